"""Runs of optimisees made in Python: they are those of a config, and go on with the same object alone."""

import math
import tomllib
from functools import partial

import laws
import pytest
import torch
from implementations import SPOTS, few_labelled
from killing import killed
from torch import nn

import l2lopt
import optimisees
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.evaluation.free_runs import run_free
from l2lopt.experiments import build, from_python, runs
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from optimisees import ModuleOptimisee, Reparametrised
from optimisees.data.datasets import InMemory

SOURCE = torch.Generator().manual_seed(0)
INPUTS = torch.randn(120, 3, generator=SOURCE)
TARGETS = (INPUTS.sum(1) > 0).long()
META = [
    "threads=1",
    "unroll.length=4",
    "meta.updates=3",
    "meta.checkpoint_every=1",
    "validation.horizons=[4]",
    "validation.seeds=1",
    "evaluation.seeds=2",
    "evaluation.steps=4",
    "evaluation.horizons=[4]",
    "evaluation.tuning_seeds=1",
    "evaluation.baselines=[{optimiser='sgd', rates=[0.1, 0.2]}]",
    "evaluation.multipliers=[]",
]
RULE = {"name": "coordinatewise", "hidden_size": 3}
ADAM = {"name": "adam", "lr": 0.01}
TRAIN = ["threads=1", "train.steps=6", "train.checkpoint_every=1", "train.evaluate_every=3"]


class OfAModule(optimisees.Quadratic):
    """Gives the parameters of a module as they are, which want a gradient."""

    def init(self, seed):
        params, aux = super().init(seed)
        return {name: nn.Parameter(value) for name, value in params.items()}, aux


@pytest.mark.parametrize("optimiser", ["torch.optim.Adam", ADAM, "lstm"], ids=str)
def test_parameters_of_a_module_train_as_their_numbers(tmp_path, optimiser):
    given = l2lopt.load("lstm") if optimiser == "lstm" else optimiser
    ends = [
        l2lopt.train(make(3), tmp_path / make.__name__, optimiser=given, changes=TRAIN)
        for make in (OfAModule, optimisees.Quadratic)
    ]
    laws.assert_same(*(end.params for end in ends))
    assert not any(value.requires_grad for value in ends[0].params.values())


def test_baselines_meet_the_parameters_of_a_module():
    losses = [
        run_free(partial(torch.optim.SGD, lr=0.1), make(3), [0], [0, 3]).losses["train"]
        for make in (OfAModule, optimisees.Quadratic)
    ]
    assert torch.equal(*losses)


def problem(hidden=4, inputs=INPUTS, activation=nn.Tanh, batch_size=20, **options):
    def model():
        return nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), activation(), nn.Linear(hidden, 2))

    return l2lopt.make_optimisee(
        model, nn.functional.cross_entropy, (inputs, TARGETS), batch_size=batch_size, **options
    )


def files(folder, *names):
    return {name: (folder / name).read_bytes() for name in (*names, "metrics.jsonl", "config.toml")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return l2lopt.meta_train(problem(), tmp_path_factory.mktemp("runs") / "run", optimiser=RULE, changes=META)


def test_a_run_of_an_object_is_that_of_a_config(tmp_path):
    """To the byte, with an optimisee that both can name."""
    options = {"name": "mlp", "hidden": [3], "batch_size": 16}
    named = l2lopt.meta_train({"optimisee": options, "optimiser": RULE}, tmp_path / "named", changes=META)
    made = l2lopt.meta_train(optimisees.mlp((3,), batch_size=16), tmp_path / "made", optimiser=RULE, changes=META)
    assert (named / "metrics.jsonl").read_bytes() == (made / "metrics.jsonl").read_bytes()
    one, other = l2lopt.load(named / "optimiser.safetensors"), l2lopt.load(made / "optimiser.safetensors")
    assert all(torch.equal(value, other.phi()[name]) for name, value in one.phi().items())


def test_the_config_says_that_the_optimisee_came_from_python(run):
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["optimiser"] == RULE
    assert config["optimisee"]["name"] == "python"
    assert config["optimisee"]["type"] == "ModuleOptimisee"
    assert config["optimisee"]["parameters"] == 3 * 4 + 4 + 8 + 4 * 2 + 2
    assert config["optimisee"]["samples"] == problem().fingerprint()["samples"]
    assert (run / "optimiser.safetensors").is_file()


def test_killed_and_resumed_equals_the_whole_run(run, tmp_path):
    work = partial(l2lopt.meta_train, problem(), tmp_path / "run", optimiser=RULE, changes=META)
    killed(work, 3)
    work(resume=True)
    assert files(tmp_path / "run", "optimiser.safetensors") == files(run, "optimiser.safetensors")


OTHERS = {
    "samples": problem(inputs=INPUTS + 1),
    "parameters": problem(hidden=5),
    "first_loss": problem(activation=nn.ReLU),
    "batches": problem(batch_size=19),
}


@pytest.mark.parametrize("differing", OTHERS)
def test_another_optimisee_is_refused_with_what_differs(run, differing):
    before = files(run, "optimiser.safetensors")
    expected = rf"optimisee\.{differing} = \S+.*, found .*optimisee\.{differing} = \S+"
    with pytest.raises(UserError, match=expected) as error:
        l2lopt.meta_train(OTHERS[differing], run, optimiser=RULE, changes=META, resume=True)
    assert "\n" not in str(error.value)
    expected = (
        rf"^optimisee: expected .*{differing} = \S+.*, found .*{differing} = \S+.*; pass the one that the run was"
    )
    with pytest.raises(UserError, match=expected):
        l2lopt.evaluate(run, optimisee=OTHERS[differing])
    assert files(run, "optimiser.safetensors") == before


def test_held_out_samples_belong_to_the_optimisee(run):
    with pytest.raises(UserError, match="expected batches = "):
        l2lopt.evaluate(run, optimisee=problem(heldout=0.5))


def test_a_run_is_evaluated_on_its_optimisee(run):
    result = l2lopt.evaluate(run, optimisee=problem())
    assert {row.optimiser for row in result.table} == {
        "sgd",
        "learned-lstm",
        "learned-lstm, before meta-training",
    }
    assert (run / "evaluation.csv").is_file()
    assert l2lopt.plot(run)


def test_without_the_optimisee_the_run_says_that_it_is_needed(run):
    with pytest.raises(UserError, match=r"optimisee: expected 1 made in Python, .* found none; pass them from Python"):
        l2lopt.evaluate(run)
    with pytest.raises(UserError, match=r"optimisee: expected 1 made in Python, .* found none"):
        l2lopt.meta_train(run / "config.toml", run, resume=True)


def test_an_optimisee_for_a_run_that_names_its_own_is_refused(tmp_path):
    named = l2lopt.meta_train({"optimisee": {"name": "quadratic", "size": 2}}, tmp_path / "run", changes=META)
    with pytest.raises(UserError, match=r"optimisee: expected none made in Python, .* found 1; leave optimisee out"):
        l2lopt.evaluate(named, optimisee=problem())


def test_several_optimisees_are_meta_trained_on_and_the_first_is_compared_on(tmp_path):
    both = [problem(), problem(hidden=3)]
    changes = [*META, "meta.updates=2"]
    run = l2lopt.meta_train(both, tmp_path / "run", optimiser=RULE, changes=changes)
    config = configs.load(run / "config.toml")
    assert [choice["parameters"] for choice in (config.optimisee, *config.mixed_with)] == [34, 26]
    assert l2lopt.evaluate(run, optimisee=both).rows == l2lopt.evaluate(run, optimisee=both[0]).rows
    with pytest.raises(UserError, match="expected mixed_with = "):
        l2lopt.meta_train(both[::-1], run, optimiser=RULE, changes=changes, resume=True)


def test_objects_and_names_may_be_mixed(tmp_path):
    changes = [*META, "mixed_with=[{name='quadratic', size=2}]", "meta.updates=8"]
    run = l2lopt.meta_train(problem(), tmp_path / "run", optimiser=RULE, changes=changes)
    assert l2lopt.evaluate(run, optimisee=problem()).table


def test_any_optimisee_is_one(tmp_path):
    """Of somebody's own class, in double precision, with nothing held out."""
    task = optimisees.make("quadratic", size=3, dtype="float64")
    run = l2lopt.meta_train(task, tmp_path / "run", optimiser=RULE, changes=META)
    assert tomllib.loads((run / "config.toml").read_text())["optimisee"]["type"] == "Quadratic"
    data = InMemory(INPUTS, TARGETS, INPUTS, TARGETS)
    without = ModuleOptimisee(partial(nn.Linear, 3, 2), nn.functional.cross_entropy, data, batch_size=20, heldout=0.0)
    assert l2lopt.train(without, tmp_path / "trained", optimiser="torch.optim.SGD", changes=TRAIN).steps == 6


def test_an_object_of_the_librarys_classes_has_their_files_and_says_how_to_sample(tmp_path):
    task = optimisees.SequenceLabelling(few_labelled(), hidden_size=2, batch_size=3)
    l2lopt.train(task, tmp_path / "labels", optimiser=ADAM, changes=TRAIN)
    names = [str(path.relative_to(tmp_path / "labels")) for path in runs.training_files(tmp_path / "labels")]
    assert {"labels.json", "figures/labelled-sequence.png"} <= {*names}
    grey = SPOTS._replace(train_inputs=SPOTS.train_inputs[:, :1], test_inputs=SPOTS.test_inputs[:, :1])
    draw = optimisees.Draw(grey, hidden_size=2, latent_size=2, steps=2, batch_size=3)
    l2lopt.train(draw, tmp_path / "draw", optimiser=ADAM, changes=TRAIN)
    message = "found one made in Python, a Draw; call sample_images on that object"
    with pytest.raises(UserError, match=message):
        l2lopt.sample_images(tmp_path / "draw")
    message = "expected a trained language model or DRAW, found the run of another optimisee, SequenceLabelling; give"
    with pytest.raises(UserError, match=message):
        l2lopt.sample(tmp_path / "labels")


DRAWN = """
import optimisees, torch
from optimisees.data.datasets import InMemory

def mine(size: int = 2, device: str = "cpu") -> optimisees.Draw:
    images, labels = torch.randint(255, (6, 1, 5, 5), dtype=torch.uint8), torch.arange(6) % 2
    samples = InMemory(images, labels, images, labels)
    return optimisees.Draw(samples, hidden_size=size, latent_size=2, steps=2, batch_size=3)
"""


def test_what_a_function_has_made_is_sampled_in_python(tmp_path, monkeypatch):
    """Its options are not those of the class, which would be built of its default sizes."""
    (tmp_path / "drawn_by_me.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    problem = {"name": "drawn_by_me:mine", "size": 3}
    l2lopt.train({"optimisee": problem, "optimiser": "torch.optim.Adam", "train": {"steps": 2}}, tmp_path / "run")
    message = "found one of the function 'drawn_by_me:mine'; call sample_images on the optimisee that l2lopt.load_train"
    with pytest.raises(UserError, match=message):
        l2lopt.sample_images(tmp_path / "run")
    model = l2lopt.load_trained(tmp_path / "run")
    assert len(model.optimisee.sample_images(model.params, 2)[0])


def test_a_trained_model_is_loaded(tmp_path):
    """Also into a module of one's own, whose test-mode loss is then that of the run."""
    result = l2lopt.train(problem(), tmp_path / "run", optimiser=ADAM, changes=TRAIN)
    found = l2lopt.load_trained(tmp_path / "run", optimisee=problem())
    laws.assert_same((found.params, found.aux), (result.params, result.aux))
    assert [*found.params] == [*problem().init(0)[0]]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    model.load_state_dict({**found.params, **found.aux}, strict=False)
    data, model = found.optimisee.data, model.eval()
    loss = nn.functional.cross_entropy(model(data.test_inputs), data.test_targets)
    assert float(loss.detach()) == pytest.approx(result.metrics["loss"], rel=1e-5)
    with pytest.raises(UserError, match="optimisee: expected 1 made in Python, as the config says, found none"):
        l2lopt.load_trained(tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.toml: expected a trained model, found nothing; give a folder"):
        l2lopt.load_trained(tmp_path)
    l2lopt.train({"optimisee": "quadratic", "optimiser": ADAM}, tmp_path / "named", changes=TRAIN)
    assert isinstance(l2lopt.load_trained(tmp_path / "named", changes=["device=cpu"]).optimisee, optimisees.Quadratic)


def test_what_is_no_optimisee_is_refused(run, tmp_path):
    with pytest.raises(
        UserError, match=r"optimisee: expected an Optimisee, found a Linear; make one with l2lopt\.make"
    ):
        l2lopt.meta_train(nn.Linear(3, 2), tmp_path / "run")
    with pytest.raises(UserError, match="optimisee: expected at least one, found none"):
        l2lopt.meta_train([], tmp_path / "run")
    with pytest.raises(UserError, match="expected an Optimisee, found a str"):
        l2lopt.evaluate(run, optimisee="mlp")
    assert not (tmp_path / "run").exists()


def test_an_optimiser_to_be_meta_trained_is_a_choice(tmp_path):
    with pytest.raises(UserError, match="optimiser: expected one to be meta-trained from the start, found a Coord"):
        l2lopt.meta_train(problem(), tmp_path / "run", optimiser=optimisers.make("coordinatewise"))
    with pytest.raises(UserError, match="optimiser: expected none beside a config, found 'coordinatewise'"):
        l2lopt.meta_train("demo", tmp_path / "run", optimiser="coordinatewise")


def test_the_device_is_the_optimisees():
    choice = from_python.describe(task := problem())
    with pytest.raises(UserError, match="device: expected cpu, the optimisee's, found meta; set device in make_opt"):
        from_python.matched([task], [choice], torch.device("meta"))


def test_what_the_losses_depend_on_is_described():
    """The samples of an evaluation and their number, and a scale that leaves the loss as it is."""
    samples = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    make = partial(
        l2lopt.make_optimisee,
        lambda: nn.Linear(3, 2),
        nn.functional.cross_entropy,
        (samples, (samples[:, 0] > 0).long()),
    )
    made = [make(), make(evaluation_samples=5), make(evaluation_samples=6)]
    quadratic = optimisees.make("quadratic", size=3)
    made += [quadratic, Reparametrised(quadratic, 2.0), Reparametrised(quadratic, 10.0)]
    assert len({str(from_python.describe(one)) for one in made}) == 6


def learned(seed=0):
    return optimisers.make("coordinatewise", hidden_size=3, seed=seed)


@pytest.fixture
def chosen(run, tmp_path):
    weights = tmp_path / "mine.safetensors"
    l2lopt.save(learned(), weights)
    return {
        "name": "torch.optim.Adam",
        "options": {"name": "torch.optim.SGD", "lr": 0.1},
        "shipped": "lstm",
        "file": weights,
        "path": str(weights),
        "folder": run,
        "object": learned(),
    }


@pytest.mark.parametrize("kind", ["name", "options", "shipped", "file", "path", "folder", "object"])
def test_any_optimiser_trains_it_and_goes_on_after_a_kill(tmp_path, chosen, kind):
    work = partial(l2lopt.train, problem(), optimiser=chosen[kind], changes=TRAIN)
    work(tmp_path / "whole")
    killed(partial(work, tmp_path / "run"), 4)
    result = work(tmp_path / "run", resume=True)
    assert result.steps == 6
    assert files(tmp_path / "run", "model.safetensors") == files(tmp_path / "whole", "model.safetensors")


def test_an_object_and_its_file_train_alike(tmp_path, chosen):
    one = l2lopt.train(problem(), tmp_path / "one", optimiser=chosen["object"], changes=TRAIN)
    other = l2lopt.train(problem(), tmp_path / "other", optimiser=chosen["file"], changes=TRAIN)
    assert all(torch.equal(value, other.params[name]) for name, value in one.params.items())
    assert configs.load(tmp_path / "one" / "config.toml", kind=TrainConfig).name == "coordinatewise"


def test_another_optimiser_or_none_is_refused(tmp_path):
    work = partial(l2lopt.train, problem(), tmp_path / "run", changes=TRAIN)
    work(optimiser=learned())
    with pytest.raises(UserError, match=r"expected optimiser\.digest = \S+, found optimiser\.digest = "):
        work(optimiser=learned(1), resume=True)
    with pytest.raises(UserError, match="optimiser: expected a value, found none"):
        work()
    with pytest.raises(UserError, match="optimiser: expected a known name, found 'adamm'; did you mean 'adam"):
        work(optimiser="adamm", resume=True)
    config = configs.load(tmp_path / "run" / "config.toml", kind=TrainConfig)
    with pytest.raises(UserError, match="optimiser: expected one made in Python, found none"):
        build.build_training(config, [problem()])


def test_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(UserError, match="optimisee: expected an Optimisee, found a NoneType"):
        l2lopt.train(None, tmp_path / "run")


def test_a_trained_model_may_keep_an_infinite_mask(tmp_path):
    """As attention does; the parameters alone have to be finite."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

        def forward(self, x):
            return self.linear(x)

    def masked():
        return l2lopt.make_optimisee(Masked, nn.functional.cross_entropy, (INPUTS, TARGETS), batch_size=20)

    l2lopt.train(masked(), tmp_path / "run", optimiser=ADAM, changes=TRAIN)
    assert l2lopt.load_trained(tmp_path / "run", optimisee=masked()).aux["mask"].tolist() == [0.0, -math.inf]
