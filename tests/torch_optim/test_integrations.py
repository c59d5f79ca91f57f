"""Other people's training loops give what a plain loop gives on the batches that they draw, and can be resumed."""

import laws
import pytest
import torch
from implementations import normal
from torch import nn

from l2lopt import LearnedOptimizer, optimisers

X, Y = normal(32, 4).float(), torch.arange(32) % 3
LIGHTNINGS = "ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning"
"""Its own use of what others have deprecated."""


def rule():
    return optimisers.make("coordinatewise", hidden_size=4)


@pytest.fixture(autouse=True, params=["learned", "harness"])
def either(request, monkeypatch):
    """Every test with a learned rule and with the harness."""
    if request.param == "harness":
        monkeypatch.setitem(globals(), "rule", lambda: optimisers.make("normalised-muon"))


class Model(nn.Module):
    """Remembers the batches that it has seen in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.seen = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), []

    def forward(self, x, labels):
        self.seen.append((x.clone(), labels.clone()))
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def plain(seen, rates, accumulated=1, dtype=torch.float32, told=False):
    """The parameters after a plain loop over the same batches."""
    model = Model()
    optimizer = LearnedOptimizer(model.parameters(), rule(), fallback="adam")
    for step, rate in enumerate(rates):
        optimizer.zero_grad()
        for batch in seen[step * accumulated : (step + 1) * accumulated]:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(*batch)["loss"] / accumulated
            loss.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step(loss=loss if told else None)
    return model.state_dict()


@pytest.fixture
def accelerate():
    """With none of its settings, of which it has one a process."""
    import accelerate as library

    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", [False, True], ids=["the trainer's schedule", "ours"])
def test_hugging_faces_trainer(scheduled, tmp_path, accelerate):
    import transformers

    samples = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]

    def train(resumed=None):
        model = Model()
        optimizer = LearnedOptimizer(model.named_parameters(), rule(), fallback="adam")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6) if scheduled else None
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=0.0,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=samples, optimizers=(optimizer, scheduler))
        trainer.train(resume_from_checkpoint=resumed)
        assert optimizer.state[model.body[0].weight]["step"].item() == 6
        return model

    model = train()
    falling = [1 - step / 6 for step in range(6)]
    cosine = [(1 + torch.cos(torch.tensor(torch.pi * step / 6, dtype=torch.float64)).item()) / 2 for step in range(6)]
    laws.assert_close(model.state_dict(), plain(model.seen, cosine if scheduled else falling, accumulated=2), 1e-6)
    laws.assert_same(train(str(tmp_path / "checkpoint-3")).state_dict(), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accelerate(dtype, tmp_path, accelerate):
    precision = "no" if dtype == torch.float32 else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)

    def prepared():
        model = Model()
        optimizer = LearnedOptimizer(model.parameters(), rule(), fallback="adam")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return accelerator.prepare(model, optimizer, scheduler)

    def train(model, optimizer, scheduler, steps):
        for step in steps:
            with accelerator.accumulate(model):
                places = torch.arange(4 * step, 4 * step + 4)
                accelerator.backward(model(X[places], Y[places])["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    together = prepared()
    train(*together, range(4))
    accelerator.save_state(tmp_path / "state")
    train(*together, range(4, 8))
    after, seen = laws.clone(dict(together[0].state_dict())), together[0].seen
    laws.assert_close(after, dict(plain(seen, [1.0, 0.5, 0.25, 0.125], accumulated=2, dtype=dtype)), 1e-6)
    accelerator.load_state(tmp_path / "state")
    train(*together, range(4, 8))
    laws.assert_same(dict(together[0].state_dict()), after)


@pytest.mark.slow
@pytest.mark.filterwarnings(LIGHTNINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision, tmp_path):
    """Its automatic optimisation steps with a closure, which computes and tells the loss."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.told = Model(), []

        def training_step(self, batch, index):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            optimizer = LearnedOptimizer(self.named_parameters(), rule(), fallback="adam")
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs, batch, index):
            self.told.append(self.trainer.optimizers[0].param_groups[0]["first_loss"])

    samples = torch.utils.data.TensorDataset(X, Y)

    def fit(steps, resumed=None):
        module = Module()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            precision=precision,
            logger=False,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=8), ckpt_path=resumed)
        return module, trainer

    module, trainer = fit(4)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(8, tmp_path / "half.ckpt")
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    seen, rates = [*module.model.seen, *resumed.model.seen], [0.5**step for step in range(8)]
    for model, steps in ((module.model, 4), (resumed.model, 8)):
        laws.assert_close(dict(model.state_dict()), dict(plain(seen, rates[:steps], 1, dtype, told=True)), 1e-6)
    assert module.told[0] > 0
    assert len({*module.told, *resumed.told}) == 1
