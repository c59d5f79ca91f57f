"""Training: the same numbers as a loop by hand, the same bytes after a kill, mistakes in one line."""

import json
import math
from functools import partial

import laws
import pytest
import torch
from killing import kill_and_resume, killed
from safetensors.torch import load_file
from test_cli import called, sets

import l2lopt
import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.optimisee import evaluate_split
from l2lopt.optimisers.schedules import warm_up_cosine
from l2lopt.report import figures as plotting
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile, pack, unpack
from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer
from l2lopt.training import train as training
from l2lopt.training.train import TrainSettings
from l2lopt.weights import files as weights

SMALL = {
    "threads": 1,
    "optimisee": {"name": "convnet", "channels": [3], "hidden": 4, "batch_size": 8},
    "optimiser": {"name": "torch.optim.Adam", "lr": 0.05},
    "train": {"steps": 9, "evaluate_every": 3, "checkpoint_every": 2, "schedule": "cosine", "warm_up": 2, "clip": 0.5},
}
OPTIMISERS = {
    "adamw": {"name": "adamw", "lr": 0.01},
    "torch.optim.Adam": {"name": "torch.optim.Adam", "lr": 0.01, "betas": [0.8, 0.9]},
    "torch.optim.SGD": {"name": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
    "torch.optim.NAdam": "torch.optim.NAdam",
    "torch.optim.LBFGS": {"name": "torch.optim.LBFGS", "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "coordinatewise": {"name": "coordinatewise", "hidden_size": 3},
    "weights": {"weights": "learned.safetensors", "lr": 0.5},
}
MLP = partial(optimisees.mlp, (3,), batch_size=16)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Tests run in a folder of their own, with weights in it."""
    monkeypatch.chdir(tmp_path)
    weights.save(optimisers.make("coordinatewise", hidden_size=3, seed=5), "learned.safetensors")


@pytest.fixture
def _without_figures(monkeypatch):
    monkeypatch.setattr(plotting, "training_curve", lambda *args, **options: [])


def config(optimiser=None, **settings):
    optimiser = optimiser or SMALL["optimiser"]
    return {**SMALL, "optimiser": optimiser, "train": {**SMALL["train"], **settings}}


def files(folder):
    names = ("model.safetensors", "metrics.jsonl", "config.toml", "result.json", "checkpoint.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def lines(folder, stage):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line.pop("stage") == stage]


@pytest.mark.usefixtures("_without_figures")
@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_killed_and_resumed_equals_the_whole_run(tmp_path, name, patience):
    settings = config(OPTIMISERS[name], **({"patience": patience} if patience else {}))
    l2lopt.train(settings, tmp_path / "whole")
    for moment in (1, 2, 4, 1):
        killed(partial(l2lopt.train, settings, tmp_path / "run", resume=True), moment)
    l2lopt.train(settings, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    l2lopt.train(settings, tmp_path / "run", resume=True)  # a finished run stays as it is
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.usefixtures("_without_figures")
def test_other_weights_or_another_config_are_refused_on_resuming(tmp_path):
    settings = config(OPTIMISERS["weights"])
    killed(partial(l2lopt.train, settings, "run"), 5)
    weights.save(optimisers.make("coordinatewise", hidden_size=3, seed=6), "learned.safetensors")
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: expected weights = \w+, found weights = \w+"):
        l2lopt.train(settings, "run", resume=True)
    with pytest.raises(UserError, match=r"expected .*train\.clip = 0\.5.*, found .*train\.clip = 0\.25"):
        l2lopt.train(settings, "run", changes=["train.clip=0.25"], resume=True)


@pytest.mark.usefixtures("_without_figures")
def test_a_class_of_a_module_trains_as_under_its_name_in_torch():
    found = []
    for number, name in enumerate(["torch.optim.Adam", "torch.optim:Adam"]):
        settings = config({"name": name, "lr": 0.01, "betas": [0.8, 0.9]})
        l2lopt.train(settings, f"run-{number}")
        found.append(load_file(f"run-{number}/model.safetensors"))
    laws.assert_same(*found)
    with pytest.raises(
        UserError, match=r"optimiser '.*Muon': expected one for all parameters, found rest; leave it out"
    ):
        l2lopt.train(config({"name": "torch.optim:Muon", "rest": "adamw"}), "run")
    with pytest.raises(UserError, match=r"found <class '.*Adam'>; put it into a module and name it 'torch.optim"):
        l2lopt.train(config(torch.optim.Adam), "run")


@pytest.mark.usefixtures("_without_figures")
def test_weights_that_name_a_module_train_where_they_are_trusted():
    for file, cell in (("own.safetensors", "l2lopt.cells.gru:GRU"), ("ours.safetensors", "gru")):
        weights.save(optimisers.make("coordinatewise", hidden_size=3, cell=cell), file)
    with pytest.raises(UserError, match="or say trusted = true beside weights"):
        l2lopt.train(config({"weights": "own.safetensors"}), "run")
    l2lopt.train(config({"weights": "own.safetensors", "trusted": True}), "run")
    l2lopt.train(config({"weights": "ours.safetensors"}), "other")
    laws.assert_same(load_file("run/model.safetensors"), load_file("other/model.safetensors"))


@pytest.mark.usefixtures("_without_figures")
def test_a_run_of_training_is_no_run_of_meta_training(tmp_path):
    l2lopt.train(config(steps=2, checkpoint_every=1, evaluate_every=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"run: expected a run of meta-training, found one of training; give a folder"):
        l2lopt.evaluate(tmp_path / "run")


@pytest.mark.parametrize("schedule", [{"schedule": "cosine"}, {"warm_up": 1}, {}], ids=str)
@pytest.mark.parametrize("rule", ["normalised-muon", {"name": "adam", "lr": 0.1}], ids=str)
def test_two_schedules_are_told(caplog, schedule, rule):
    """A rule that knows its end has its own; a hand-designed one has none."""
    task = optimisees.make("quadratic", size=3)
    training.train(task, partial(l2lopt.LearnedOptimizer, weights=rule), TrainSettings(steps=2, **schedule))
    assert ("a warm-up and a fall to 0 of its own" in caplog.text) == (bool(schedule) and rule == "normalised-muon")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch.optim.LBFGS", "weights"])
def test_real_kills(tmp_path, name):
    """SIGKILL at random moments of a run of some seconds."""
    settings = config(OPTIMISERS[name], steps=1500, checkpoint_every=10, evaluate_every=50)
    (tmp_path / "config.toml").write_text(configs.dump(configs.load(settings, kind=TrainConfig)))
    kill_and_resume(["train", tmp_path / "config.toml"], tmp_path / "run", pause=0.3)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_the_last_rate_of_a_schedule_is_not_taken_for_a_mistake(caplog):
    """At step 100 a factor is looked at again, which a cosine of as many steps has brought near 0."""
    task, settings = optimisees.make("quadratic", size=2), TrainSettings(steps=100, schedule="cosine")
    for lr, told in ((1.0, 0), (1e-3, 2)):
        caplog.clear()
        training.train(task, partial(l2lopt.LearnedOptimizer, weights="lstm", lr=lr), settings)
        assert caplog.text.count("it is a factor") == told


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_is_the_plain_loop(schedule):
    task = optimisees.convnet((3,), hidden=4, batch_size=8)
    settings = TrainSettings(steps=7, evaluate_every=3, clip=0.5, schedule=schedule, warm_up=2)
    result = training.train(task, partial(torch.optim.Adam, lr=0.05), settings, seed=3)
    params, aux = task.init(seed_of("train", 3))
    leaves = [value.requires_grad_() for value in params.values()]
    optimizer = torch.optim.Adam(leaves, lr=0.05)
    for step in range(7):
        loss, aux = task.loss(params, aux, task.batch("train", seed_of("train", 3), step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        factor = warm_up_cosine(torch.tensor(step), 2, 7 if schedule == "cosine" else None)
        optimizer.param_groups[0]["lr"] = 0.05 * float(factor)
        optimizer.step()
        aux = {name: value.detach() for name, value in aux.items()}
    laws.assert_same((result.params, result.aux), ({k: v.detach() for k, v in params.items()}, aux))
    assert (result.step, result.steps, result.diverged) == (7, 7, None)
    assert result.metrics == evaluate_split(task, "test", 0, result.params, result.aux)


def test_lbfgs_evaluates_as_often_as_it_likes_on_one_batch():
    task = optimisees.Quadratic(4, "float64")
    settings = TrainSettings(steps=1, evaluate_every=1)
    factory = partial(torch.optim.LBFGS, max_iter=40, line_search_fn="strong_wolfe")
    result = training.train(task, factory, settings, seed=1)
    params, _ = task.init(seed_of("train", 1))
    (theta,) = (value.requires_grad_() for value in params.values())
    optimizer = torch.optim.LBFGS([theta], max_iter=40, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss, _ = task.loss({"theta": theta}, {}, task.batch("train", seed_of("train", 1), 0))
        loss.backward()
        return loss

    optimizer.step(closure)
    laws.assert_same(result.params["theta"], theta.detach())
    assert result.metrics["loss"] < 1e-6


@pytest.mark.parametrize("changed", [False, True])
def test_averages_are_refused_where_statistics_run(changed):
    """They would be those of the last parameters."""
    settings = TrainSettings(epochs=1, average=1)
    problem = optimisees.make("mlp", norm="batch")
    problem = optimisees.Reparametrised(problem, 2.0) if changed else problem
    message = r"train\.average: expected a model without running statistics, found batch norm"
    with pytest.raises(UserError, match=message):
        training.train(problem, partial(torch.optim.SGD, lr=0.1), settings)


def test_our_rules_see_the_loss():
    rule = optimisers.make("coordinatewise", hidden_size=3, inputs=["rnnprop", "loss"])
    result = training.train(MLP(), partial(LearnedOptimizer, weights=rule), TrainSettings(steps=2))
    assert math.isfinite(result.metrics["loss"])


@pytest.mark.usefixtures("_without_figures")
def test_early_stopping_ends_with_the_best(tmp_path):
    settings = config({"name": "torch.optim.SGD", "lr": 0.4}, steps=60, patience=2, schedule="constant", warm_up=0)
    result = l2lopt.train(settings, tmp_path / "run")
    watched = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "heldout")}
    assert watched[result.step] == min(watched.values())
    assert result.steps == max(watched) == min(60, result.step + 2 * 3)
    assert 0 < result.step < result.steps < 60
    task = build.build_training(configs.load(settings, kind=TrainConfig)).optimisee
    again = evaluate_split(task, "heldout", seed_of("train", 0), result.params, result.aux)
    assert again["loss"] == watched[result.step]
    first = evaluate_split(task, "heldout", seed_of("train", 0), *task.init(seed_of("train", 0)))
    assert first["loss"] == watched[0]
    assert lines(tmp_path / "run", "test") == []


@pytest.mark.parametrize(("lr", "step"), [(1e30, 2), (0.05, None)])
def test_divergence_is_a_result(tmp_path, lr, step):
    optimiser = {"name": "sgd", "lr": lr}
    problem = {"optimisee": {"name": "quadratic", "size": 3}, "optimiser": optimiser, "train": {"steps": 9}}
    result = l2lopt.train(problem, tmp_path / "run")
    assert result.diverged == step
    record = lines(tmp_path / "run", "train")
    assert len(record) == result.steps == (step or 9)
    assert (record[-1]["loss"] is None) == (step is not None)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"] == step
    assert (tmp_path / "run" / "figures" / "training-curve.svg").stat().st_size > 5000
    before = files(tmp_path / "run")
    l2lopt.train(problem, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


def test_a_watched_loss_that_is_not_finite_ends_the_run():
    task = optimisees.Quadratic(2)
    result = training.train(task, partial(torch.optim.SGD, lr=1e38), TrainSettings(steps=9, evaluate_every=1))
    assert (result.diverged, result.steps) == (1, 1)
    assert not math.isfinite(result.metrics["loss"])


def test_a_run_that_diverged_before_its_first_step_is_taken_up_as_it_ended(tmp_path):
    class Lost(optimisees.Quadratic):
        def evaluate(self, params, aux, batch):
            return super().evaluate(params, aux, batch) * math.nan

    place = CheckpointFile(tmp_path / "checkpoint.safetensors", {})
    ends = [
        training.train(
            Lost(2), partial(torch.optim.SGD, lr=0.1), TrainSettings(steps=9, evaluate_every=1), checkpoint=place
        )
        for _ in range(2)
    ]
    assert [(end.diverged, end.steps) for end in ends] == [(0, 0), (0, 0)]
    assert place.load()[0]["step"] == 0


def test_early_stopping_survives_divergence():
    settings = TrainSettings(steps=9, evaluate_every=1, patience=5)
    result = training.train(optimisees.Quadratic(2), partial(torch.optim.SGD, lr=1e30), settings)
    assert (result.step, result.diverged) == (0, 1)
    assert math.isfinite(result.metrics["loss"])


def test_metrics_are_means_over_all_samples():
    task = MLP()
    task = optimisees.ModuleOptimisee(
        task.factory, task.criterion, optimisees.digits(), evaluation_size=200, metrics=task.measures
    )
    params, aux = task.init(0)
    data = optimisees.digits()
    scores = torch.sigmoid(data.test_inputs @ params["0.weight"].T + params["0.bias"])
    scores = scores @ params["2.weight"].T + params["2.bias"]
    right = sum(int(row.argmax()) == int(label) for row, label in zip(scores, data.test_targets, strict=True))
    loss = -sum(row.double().log_softmax(0)[label].item() for row, label in zip(scores, data.test_targets, strict=True))
    found = evaluate_split(task, "test", 0, params, aux)
    assert [count for _, count in task.evaluation_batches("test", 0)] == [200, 200, 97]
    assert found["accuracy"] == pytest.approx(right / 497, rel=1e-6)
    assert found["loss"] == pytest.approx(loss / 497, rel=1e-6)
    assert optimisees.Quadratic().metrics({}, {}, None) == {}


def test_the_run_leaves_everything(tmp_path, monkeypatch, capsys):
    path = tmp_path / "small.toml"
    path.write_text(configs.dump(configs.load(config(), kind=TrainConfig)))
    code, out, err = called(monkeypatch, capsys, "train", path, "--seed", 4, *sets(["train.steps=7"]))
    assert (code, err) == (0, "")
    run = tmp_path / "runs" / "small"
    names = {item.relative_to(run).as_posix() for item in run.rglob("*") if item.is_file()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    figures = {"figures/training-curve.png", "figures/training-curve.svg"}
    assert names - events == {*files(run), *figures}
    result = json.loads((run / "result.json").read_text())
    assert "train: 7/7" in out
    assert f"test loss: {result['metrics']['loss']:.5f}" in out
    assert f"test accuracy: {result['metrics']['accuracy']:.5f}" in out
    header, tensors = tensor_file.read(run / "model.safetensors", "l2lopt.model", "a model", "train")
    assert header == result
    assert (result["seed"], result["step"], result["optimiser"]) == (4, 7, SMALL["optimiser"])
    task = optimisees.convnet((3,), hidden=4, batch_size=8)
    params, aux = (
        {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)} for part in ("params/", "aux/")
    )
    assert evaluate_split(task, "test", 0, params, aux) == result["metrics"]
    assert [line["step"] for line in lines(run, "test")] == [0, 3, 6, 7]
    before = (run / "figures" / "training-curve.svg").read_bytes()
    (run / "figures" / "training-curve.svg").unlink()
    assert called(monkeypatch, capsys, "plot", run)[0] == 0
    assert (run / "figures" / "training-curve.svg").read_bytes() == before
    assert called(monkeypatch, capsys, "train", run / "config.toml", "--run", run)[0] == 2
    assert called(monkeypatch, capsys, "train", run / "config.toml", "--run", run, "--overwrite")[0] == 0
    assert json.loads((run / "result.json").read_text()) == result


MISTAKES = [
    (
        "optimiser=torch.optim.Addam",
        r"expected a known name, found 'torch.optim.Addam'; did you mean 'torch.optim.Adam'?",
    ),
    ("optimiser=adamm", r"optimiser: expected a known name, found 'adamm'; did you mean 'adam'?"),
    ("optimiser=adamw", r"optimiser 'adamw': lr: expected a value, found none; add the key"),
    ("optimiser={name='adam', lr=0.1, beta=1}", r"expected a known key, found 'beta'; did you mean 'betas'?"),
    ("optimiser.lrr=1", r"optimiser 'torch.optim.Adam': lrr: expected a known key, found 'lrr'; did you mean 'lr'?"),
    ("optimiser.lr='x'", r"lr: expected a valid number or Tensor, found 'x'"),
    (
        "optimiser.lr=-1",
        r"optimiser 'torch.optim.Adam': expected one for these parameters, found Invalid learning rate",
    ),
    ("optimiser.betas=[0.9]", r"betas.1: expected a value, found none"),
    ("optimiser=torch.optim.Muon", r"expected one for these parameters, found Muon only supports 2D"),
    ("optimiser={weights='none.safetensors'}", r"none.safetensors: expected a learned optimiser, found nothing"),
    ("optimiser={weights='c.toml'}", r"c.toml: expected a whole safetensors file"),
    ("optimiser={weights='learned.safetensors', rate=2}", r"optimiser 'weights': rate: expected a known key"),
    ("optimiser={weights='learned.safetensors', lr=-1}", r"lr: expected at least 0, found -1"),
    ("optimiser={lr=1}", r"optimiser: expected a table with the key 'name'"),
    (
        "optimiser={name='torch.optim.LBFGS', line_search_fn='bogus'}",
        r"optimiser 'torch.optim.LBFGS': expected one that can step, found only 'strong_wolfe' is supported",
    ),
    ("optimiser={name='torch.optim:SparseAdam', lr=0.1}", r"expected one that can step, found SparseAdam does not"),
    ("train.step=3", r"train.step: expected a known key, found 'step'; did you mean 'steps'?"),
    ("train.warm_up=10", r"train.warm_up: expected at most 9, the steps, found 10"),
    ("train.schedule=cosines", r"train.schedule: expected 'constant' or 'cosine', found 'cosines'"),
    ("optimisee.heldout=0.0", r"heldout: expected samples held out, found none"),
    ("unroll.length=3", r"unroll: expected a known key, found 'unroll'"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[change for change, _ in MISTAKES])
def test_a_mistake_ends_in_one_line_and_code_2(tmp_path, monkeypatch, capsys, change, message):
    (tmp_path / "c.toml").write_text(configs.dump(configs.load(config(patience=3), kind=TrainConfig)))
    before = sorted(tmp_path.iterdir())
    code, _, err = called(monkeypatch, capsys, "train", tmp_path / "c.toml", "--set", change)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_tree_is_packed_and_unpacked():
    tree = {"a": [torch.ones(2), None, {"b": (1, 2.5, True)}], 3: {"c": {}}, "d": math.inf, "e": ()}
    packed, tensors = pack(tree)
    again = unpack(json.loads(json.dumps(packed)), tensors)
    laws.assert_same(again, tree)
    assert again["a"][0] is not tree["a"][0]


@pytest.mark.parametrize("content", ["", "{\n", '{"stage": "train", "step": 1}\n', '{"stage": "train", "loss": 1}\n'])
def test_damaged_records_are_not_drawn(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl.*train again"):
        plotting.read_training(tmp_path / "metrics.jsonl")


def test_the_curve_is_smoothed_over_what_went_before():
    values = plotting._running_mean(plotting.np.array([1.0, 3.0, 5.0, 7.0]), 2)
    assert values.tolist() == [1.0, 2.0, 4.0, 6.0]
    assert plotting._running_mean(plotting.np.array([1.0, 3.0]), 3).tolist() == [1.0, 2.0]
    after_a_leap = plotting._running_mean(plotting.np.array([1e20, *[1.0] * 10]), 3)
    assert after_a_leap[3:].tolist() == [1.0] * 8


def test_a_checkpoints_keys_are_those_of_earlier_versions(tmp_path):
    """Whoever renames one of them locks users out of the runs that they have interrupted."""
    l2lopt.train(config(patience=9), tmp_path / "run")
    header, tensors = tensor_file.read(tmp_path / "run" / "checkpoint.safetensors", "l2lopt.checkpoint", "", "")
    assert set(header["facts"]) == {"step", "place"}
    state = unpack(header["facts"]["place"], tensors)
    assert [*state] == ["params", "aux", "step", "diverged", "watched", "best", "mean", "averaged", "optimizer"]
    assert [*state["best"]] == ["evaluation", "loss", "step", "params", "aux"]


class TwoPlaced(torch.optim.SGD):
    """Steps at one place, and is evaluated one higher, as schedule-free optimisers are elsewhere."""

    here = "train"

    def _move(self, mode, change):
        if self.here != mode:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data += change
        self.here = mode

    def train(self):
        self._move("train", -1.0)

    def eval(self):
        self._move("eval", 1.0)

    def step(self, closure=None):
        assert self.here == "train"
        return super().step(closure)


def test_an_optimiser_with_modes_is_told_them():
    task = optimisees.make("quadratic", size=3)
    plain = training.train(task, partial(torch.optim.SGD, lr=0.01), TrainSettings(steps=6, evaluate_every=2))
    other = training.train(task, partial(TwoPlaced, lr=0.01), TrainSettings(steps=6, evaluate_every=2))
    laws.assert_close(other.params["theta"], plain.params["theta"] + 1, 1e-5)


class Drawing(torch.optim.SGD):
    """Adds noise from the global generator, as Langevin dynamics do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.1 * torch.randn_like(parameter)
        return loss


def test_an_optimiser_that_draws_is_the_same_in_every_run():
    task, found = optimisees.make("quadratic", size=3), []
    for seed in (0, 0, 1):
        torch.randn(5)  # what others draw does not matter
        settings = TrainSettings(steps=6, evaluate_every=2)
        found.append(training.train(task, partial(Drawing, lr=0.01), settings, seed=seed).params["theta"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class Refusing(torch.optim.SGD):
    """Refuses its third step, as some do of numbers that are none."""

    made, spoils = 0, True

    def step(self, closure=None):
        self.made += 1
        if self.made == 3:
            if self.spoils:
                self.param_groups[0]["params"][0].grad[0] = math.nan
            raise ValueError("not a number")
        return super().step(closure)


def test_a_class_that_refuses_numbers_that_are_none_has_diverged(monkeypatch):
    task, settings = optimisees.make("quadratic", size=3), TrainSettings(steps=6, evaluate_every=1)
    result = training.train(task, partial(Refusing, lr=0.01), settings)
    assert (result.diverged, result.steps) == (3, 3)
    assert math.isfinite(result.metrics["loss"])
    monkeypatch.setattr(Refusing, "spoils", False)
    with pytest.raises(ValueError, match="not a number"):
        training.train(task, partial(Refusing, lr=0.01), settings)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"size": 0.1})


def test_groups_without_a_rate_are_refused(monkeypatch):
    monkeypatch.setattr(build, "_factory", lambda *args: WithoutRate)
    with pytest.raises(UserError, match="expected groups with a rate, 'lr', found none"):
        build.build_training(configs.load(config(), kind=TrainConfig))
