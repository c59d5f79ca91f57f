"""Whole experiments: what lands in a run's folder."""

import csv
import json
import math
import re
import shutil
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path

import laws
import pytest
import torch
from killing import killed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import l2lopt
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.evaluation.comparison import Comparison, Evaluation, Row
from l2lopt.evaluation.evaluation_board import write_evaluation_board
from l2lopt.evaluation.settings import SPLITS
from l2lopt.experiments import build, runs
from l2lopt.experiments import config as configs
from l2lopt.experiments.run_folder import claimed
from l2lopt.storage import run_lock
from l2lopt.weights import files
from optimisees.quadratic import Quadratic

RECIPE = configs.shipped("digits-coordinatewise.toml")
SMALL = [
    "optimisee.hidden=[3]",
    "optimiser.hidden_size=4",
    "unroll.length=6",
    "unroll.truncation=3",
    "meta.updates=4",
    "meta.validate_every=2",
    "validation.horizons=[4]",
    "validation.seeds=2",
    "evaluation.seeds=3",
    "evaluation.steps=8",
    "evaluation.horizons=[4, 8]",
    "evaluation.tuning_seeds=2",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = l2lopt.meta_train(RECIPE, tmp_path_factory.mktemp("runs") / "run", changes=SMALL)
    l2lopt.evaluate(folder)
    runs.plot(folder)
    return folder


def test_a_run_leaves_everything(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    events = {name for name in names if "events.out.tfevents." in name}
    assert len([name for name in events if "/" not in name]) == 1
    assert {name.partition("/")[0] for name in events if "/" in name} == {"tensorboard"}
    assert names - events == {
        "config.toml",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "initial.safetensors",
        "optimiser.safetensors",
        "evaluation.csv",
        "evaluation.json",
        "figures/loss-curves.png",
        "figures/loss-curves.svg",
        "figures/validation.png",
        "figures/validation.svg",
    }


def test_the_csv_has_the_promised_columns(run):
    with (run / "evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["optimiser", "kind", "seed", "step", "split", "loss"]
    assert {row["kind"] for row in rows} == {"learned", "baseline"}
    assert {row["optimiser"] for row in rows} == {
        "learned-lstm",
        "learned-lstm, multiplier tuned",
        "learned-lstm, before meta-training",
        "momentum",
        "adam",
        "adamw",
        "muon",
        "normalised-muon, untuned",
    }
    assert {row["split"] for row in rows} == {"train", "test"}
    assert {row["seed"] for row in rows} == {"0", "1", "2"}
    assert all(math.isfinite(float(row["loss"])) for row in rows if row["kind"] == "learned")


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def validations(run):
    return [line["score"] for line in lines_of(run) if line["stage"] == "validation"]


def test_metrics_and_events_tell_the_same(run):
    lines = lines_of(run)
    losses = [line["loss"] for line in lines if line["stage"] == "meta-train"]
    events = EventAccumulator(str(run)).Reload().Scalars("meta-train/loss")
    assert [event.value for event in events] == pytest.approx(losses, rel=1e-6)
    assert [line["step"] for line in lines if line["stage"] == "validation"] == [0, 2, 4]


def test_tensorboard_gets_the_evaluation(run):
    folders = sorted(path for path in (run / "tensorboard").iterdir() if path.is_dir())
    assert [path.name for path in folders][:2] == ["00-learned-lstm", "01-learned-lstm-multiplier-tuned"]
    with (run / "evaluation.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["optimiser"], row["split"]) == ("adamw", "test")]
    losses = {}
    for row in rows:
        losses.setdefault(int(row["step"]), []).append(float(row["loss"]))
    found = EventAccumulator(str(next(path for path in folders if "adamw" in path.name))).Reload()
    seen = {event.step: event.value for event in found.Scalars("loss/test")}
    assert seen == pytest.approx({step: sum(values) / 3 for step, values in losses.items()}, rel=1e-6)
    assert found.Scalars("test loss, step 8")[0].value == pytest.approx(sum(losses[8]) / 3, rel=1e-6)
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(found.PluginTagToContent("hparams"))
    shared = EventAccumulator(str(run / "tensorboard")).Reload()
    assert shared.Tags()["images"] == ["loss-curves"]
    (told,) = shared.Tensors("test loss/text_summary")[0].tensor_proto.string_val
    assert b"| adamw |" in told


def test_tensorboard_takes_losses_of_both_infinities(tmp_path):
    rows = [Row("a", "baseline", seed, step, "test", loss) for step in (0, 1) for seed, loss in enumerate([1.0, 3.0])]
    rows[2:] = [row._replace(loss=loss) for row, loss in zip(rows[2:], (math.inf, -math.inf), strict=True)]
    lines = [
        Comparison("a", "baseline", 1, split, math.inf, *[math.nan] * 2, "", *[math.nan] * 3, 2) for split in SPLITS
    ]
    write_evaluation_board(Evaluation(rows, lines), tmp_path)
    found = EventAccumulator(str(tmp_path / "00-a")).Reload()
    assert [event.value for event in found.Scalars("loss/test")][:1] == [2.0]


def test_the_figure_is_told_the_baselines_proper_names(run):
    proper = json.loads((run / "evaluation.json").read_text())["proper"]
    assert proper["adamw"] == "AdamW, warm-up + cosine"
    assert "AdamW, warm-up + cosine" not in (run / "evaluation.csv").read_text()


def test_the_config_in_the_run_makes_the_run_again(run, tmp_path):
    assert tomllib.loads((run / "config.toml").read_text())["unroll"]["length"] == 6
    again = l2lopt.meta_train(run / "config.toml", tmp_path / "again")
    assert (again / "optimiser.safetensors").read_bytes() == (run / "optimiser.safetensors").read_bytes()


def test_evaluating_again_gives_the_same_losses(run):
    before = (run / "evaluation.csv").read_bytes()
    l2lopt.evaluate(run)
    assert (run / "evaluation.csv").read_bytes() == before
    assert all(len(list(path.glob("events*"))) == 1 for path in (run / "tensorboard").glob("*-*"))


def test_drawing_again_gives_the_same_svg(run):
    before = (run / "figures" / "loss-curves.svg").read_bytes()
    l2lopt.plot(run)
    assert (run / "figures" / "loss-curves.svg").read_bytes() == before


@pytest.mark.parametrize("content", [None, "{", "{}", '{"horizons": 3}'])
def test_a_damaged_summary_is_refused(run, tmp_path, content):
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "evaluation.csv").write_bytes((run / "evaluation.csv").read_bytes())
    if content is not None:
        (folder / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=r"evaluation\.json: expected an evaluation's summary"):
        l2lopt.plot(folder)


def test_what_is_no_run_is_not_drawn(tmp_path):
    with pytest.raises(UserError, match=r"missing: expected a run's folder, found nothing; give one"):
        l2lopt.plot(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: expected a run's folder, found a file"):
        l2lopt.plot(tmp_path / "file")


def test_a_learned_optimiser_loads_and_steps(run):
    optimiser = l2lopt.load(run / "optimiser.safetensors")
    layout = Layout(("w",), ((5,),))
    change, _ = optimiser.update(torch.ones(5), optimiser.init(layout), torch.zeros(5))
    assert change.isfinite().all()
    assert change.abs().sum() > 0


def test_a_trained_optimiser_is_meta_trained_further(run, tmp_path):
    """The first validation is that of the weights as they are, and what is left is an optimiser of the same kind."""
    source = run / "optimiser.safetensors"
    further = {**tomllib.loads(configs.dump(configs.load(RECIPE, SMALL))), "optimiser": {"weights": str(source)}}
    begin, before = build.build(configs.load(further)).optimiser, l2lopt.load(source)
    laws.assert_same(begin.phi(), before.phi())
    after = l2lopt.load(l2lopt.meta_train(further, tmp_path / "further") / "optimiser.safetensors")
    assert after.description == before.description
    assert validations(tmp_path / "further")[0] == min(validations(run))


def test_weights_that_were_changed_since_are_noticed(run, tmp_path):
    """Those that a meta-training has begun with: its checkpoint is not gone on from with others, wherever they are."""
    start = tmp_path / "start.safetensors"
    start.write_bytes((run / "optimiser.safetensors").read_bytes())
    further = {**tomllib.loads(configs.dump(configs.load(RECIPE, SMALL))), "optimiser": {"weights": str(start)}}
    l2lopt.meta_train(further, tmp_path / "further")
    moved = start.with_name("moved.safetensors")
    moved.write_bytes(start.read_bytes())
    l2lopt.meta_train({**further, "optimiser": {"weights": str(moved)}}, tmp_path / "further", resume=True)
    l2lopt.save(l2lopt.load(tmp_path / "further" / "optimiser.safetensors"), start)
    with pytest.raises(UserError, match="weights = "):
        l2lopt.meta_train(further, tmp_path / "further", resume=True)


def test_a_validation_of_an_infinite_loss_is_infinite():
    """Losses beyond the largest number are: the score would else be one, and such a rule would be kept."""
    config = configs.load({"optimisee": {"name": "quadratic", "size": 4}, "validation": {"seeds": 2, "horizons": [9]}})
    diverging = optimisers.make("sgd", lr=10.0)
    (score,) = build.build(config).score(diverging).values()
    assert score == math.inf


class Below(Quadratic):
    """A quadratic whose loss is 100 less, as a log-likelihood may be below 0."""

    def evaluate(self, params, aux, batch):
        return super().evaluate(params, aux, batch) - 100


def test_validations_of_losses_below_0_have_an_order():
    config = configs.load({"optimisee": {"name": "quadratic", "size": 4}, "validation": {"seeds": 2, "horizons": [9]}})
    experiment = build.build(config)._replace(validated_on=[Below(size=4)])
    worse, better = (optimisers.make("sgd", lr=lr) for lr in (1e-4, 1e-2))
    assert sum(experiment.score(better).values()) < sum(experiment.score(worse).values()) < 0


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"weights": "no-such-rule"}, "no-such-rule: expected a learned optimiser, found nothing"),
        ({"weights": "lstm", "lr": 3.0}, "expected a known key, found 'lr'"),
        ({"weights": 3}, "weights: expected a valid string, found 3"),
    ],
)
def test_weights_that_meta_training_cannot_begin_with(choice, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build.build(configs.load({"optimisee": "quadratic", "optimiser": choice}))


def test_meta_training_wants_weights(tmp_path):
    l2lopt.save(optimisers.make("normalised-muon"), tmp_path / "harness.safetensors")
    choice = {"weights": str(tmp_path / "harness.safetensors")}
    with pytest.raises(UserError, match="expected meta-parameters, found an optimiser without any"):
        build.build(configs.load({"optimisee": "quadratic", "optimiser": choice}))
    with pytest.raises(UserError, match=r"expected meta-parameters, .*; make them of nn\.Parameter"):
        build.build(configs.load({"optimisee": "quadratic", "optimiser": f"{__name__}:Plain"}))


class Plain(optimisers.SGD):
    """Has options, but no parameters of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(0.1)


def test_an_earlier_run_is_not_overwritten_unasked(run):
    before = (run / "optimiser.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"expected a new or empty folder.*--overwrite"):
        l2lopt.meta_train(RECIPE, run, changes=SMALL)
    assert (run / "optimiser.safetensors").read_bytes() == before


def test_a_mistake_leaves_no_folder(tmp_path):
    with pytest.raises(UserError):
        l2lopt.meta_train(RECIPE, tmp_path / "run", changes=["optimiser.cell=none"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_runs_are_evaluated_side_by_side(run, tmp_path):
    other = l2lopt.meta_train(RECIPE, tmp_path / "other", changes=[*SMALL, "meta.updates=2"])
    result = l2lopt.evaluate(run, other, changes=["evaluation.baselines=[]", "evaluation.multipliers=[]"])
    begun = "learned-lstm, before meta-training"  # one for both, which began alike
    assert [name for name in result.seconds] == ["learned-lstm", "learned-lstm (other)", begun]
    assert (run / "evaluation.csv").read_bytes() == (other / "evaluation.csv").read_bytes()
    runs.plot(other)
    assert (other / "figures" / "loss-curves.png").stat().st_size > 10_000
    for folder, row in ((run, "learned-lstm"), (other, "learned-lstm (other)")):
        published = l2lopt.publish(folder, tmp_path / "published.safetensors")
        assert files.header(published)["training"]["row"] == row
    l2lopt.evaluate(run)


def test_beside_a_rule_stands_what_its_meta_training_began_from(run, tmp_path):
    """Of a rule that goes on from another one's weights it is that other one."""
    changes = [
        f"optimiser={{weights='{run / 'optimiser.safetensors'}'}}",
        "label=mine",
        SMALL[0],
        *SMALL[2:],
        "meta.keep=last",
    ]
    further = l2lopt.meta_train(RECIPE, tmp_path / "further", changes=changes)
    asked = ["evaluation.baselines=[]", "evaluation.multipliers=[]"]
    alone = l2lopt.evaluate(run, changes=[*asked, "evaluation.before_meta_training=false"]).rows
    assert {row.optimiser for row in alone} == {"learned-lstm"}
    rows = l2lopt.evaluate(further, changes=asked).rows
    before = [row.loss for row in rows if row.optimiser == "mine, before meta-training"]
    assert before == [row.loss for row in alone]
    assert before != [row.loss for row in rows if row.optimiser == "mine"]
    # It is the run's own file: the other one may change, or go.
    config = (further / "config.toml").read_text()
    (further / "config.toml").write_text(config.replace(str(run), str(tmp_path / "gone")))
    assert l2lopt.evaluate(further, changes=asked).rows == rows
    l2lopt.evaluate(run)


def test_runs_on_different_problems_are_not_compared(run, tmp_path):
    other = l2lopt.meta_train(RECIPE, tmp_path / "other", changes=[*SMALL, "optimisee.hidden=[5]"])
    with pytest.raises(UserError, match=r"other: expected the optimisee of .*run, found another"):
        l2lopt.evaluate(run, other)


def test_a_script_may_pass_a_mapping(tmp_path):
    folder = l2lopt.meta_train(
        {"optimisee": {"name": "quadratic", "size": 3}},
        tmp_path / "q",
        changes=[*SMALL[1:6], "validation.horizons=[4]"],
    )
    assert l2lopt.load(folder / "optimiser.safetensors").phi()


def test_progress_is_reported(tmp_path):
    seen = []
    l2lopt.meta_train(RECIPE, tmp_path / "run", changes=SMALL, report=lambda *event: seen.append(event))
    steps = [(done, total) for stage, done, total, _ in seen if stage == "meta-train"]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all("loss" in figures for stage, *_, figures in seen if stage == "meta-train")


@pytest.mark.parametrize("estimator", ["backprop", "blockwise", "pes"])
def test_a_problem_in_double_precision_is_meta_trained_and_evaluated(tmp_path, estimator):
    changes = [*SMALL, "optimisee.dtype=float64", f"unroll.estimator={estimator}"]
    folder = l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes)
    assert l2lopt.evaluate(folder).table


def test_problems_of_several_dtypes_are_refused(tmp_path):
    changes = [*SMALL, "mixed_with=[{name='quadratic', dtype='float64'}]"]
    with pytest.raises(UserError, match="optimisees: expected one dtype, found float32, float64"):
        l2lopt.meta_train(RECIPE, tmp_path / "run", changes=changes)


def test_half_precision_with_few_exponents_is_refused(tmp_path):
    """A rule in float16 would make NaN of a gradient of 0, and the run would end with what it began with."""
    samples = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).half(), torch.arange(40) % 2
    task = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2).half(), torch.nn.functional.cross_entropy, samples)
    with pytest.raises(UserError, match="optimisees: expected float32, float64 or bfloat16, found float16"):
        l2lopt.meta_train(task, tmp_path / "run", changes=["meta.updates=2", "unroll.length=3"])


@pytest.mark.parametrize("again", [{"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}])
def test_what_a_kill_has_left_of_a_file_goes(tmp_path, run, again):
    """Each is as large as the file that was being written."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    left = [
        copy / ".checkpoint-0123456789ab.safetensors",
        copy / ".tmpA1b2C3",
        copy / "figures" / ".a-0123456789ab.svg",
    ]
    for path in left:
        path.write_text("half")
    (copy / ".mine.txt").write_text("mine")
    with claimed(copy, **again):
        assert not any(path.exists() for path in left)
        assert (copy / ".mine.txt").exists()


def test_files_of_others_are_left_alone(tmp_path, run):
    own = tmp_path / "project"
    (own / "figures").mkdir(parents=True)
    (own / "config.toml").write_text("mine")
    (own / "figures" / "paper.png").write_text("mine")
    with pytest.raises(UserError, match="expected a new or empty folder, found files that no run has left"):
        l2lopt.meta_train(RECIPE, own, changes=SMALL)
    assert (own / "config.toml").read_text() == "mine"
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "figures" / "paper.png").write_text("mine")
    l2lopt.meta_train(RECIPE, copy, changes=SMALL, overwrite=True)
    assert [path.name for path in (copy / "figures").iterdir()] == ["paper.png"]


def test_an_overwriting_that_is_stopped_can_be_done_again(tmp_path, run, monkeypatch):
    """At any file: the last ones to go are those that tell a run's folder from a stranger's."""
    count, plain = sum(path.is_file() for path in run.rglob("*")), Path.unlink
    for moment in range(1, count):
        copy, left = tmp_path / str(moment), iter(range(moment))
        shutil.copytree(run, copy)

        def unlink(path, missing_ok=False, left=left):
            if path.name != run_lock.NAME and next(left, None) is None:
                raise KeyboardInterrupt
            plain(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        with suppress(KeyboardInterrupt), claimed(copy, overwrite=True, resume=False):
            pass
        monkeypatch.setattr(Path, "unlink", plain)
        left_alone = {path.name for path in copy.iterdir() if path.is_file()} - {run_lock.NAME}
        if left_alone != {"config.toml"}:  # which `--resume` takes
            with claimed(copy, overwrite=True, resume=False):
                assert not (copy / "config.toml").exists()


def test_a_folder_that_cannot_be_written_in_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/l2lopt")):
        with pytest.raises(UserError, match="expected a folder to write in"):
            l2lopt.meta_train(RECIPE, place, changes=SMALL)


@pytest.mark.slow
def test_runs_of_one_name_keep_a_line_each(run, tmp_path):
    for place in ("a", "b", "c"):
        shutil.copytree(run, tmp_path / place / "lstm")
    result = l2lopt.evaluate(*(tmp_path / place / "lstm" for place in "abc"))
    # Each as it is and with its multiplier tuned, and as all of them began.
    assert len({row.optimiser for row in result.table if row.kind == "learned"}) == 7
    with pytest.raises(UserError, match="evaluate: expected each run once"):
        l2lopt.evaluate(tmp_path / "a" / "lstm", tmp_path / "b" / ".." / "a" / "lstm")


def test_the_curve_of_an_interrupted_training_is_drawn(tmp_path):
    recipe = {"optimisee": "quadratic", "optimiser": "torch.optim.SGD", "train": {"steps": 40, "evaluate_every": 10}}
    killed(partial(l2lopt.train, recipe, tmp_path / "run"), 25)
    assert (tmp_path / "run" / "figures" / "training-curve.png") in l2lopt.plot(tmp_path / "run")


def test_training_is_not_for_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="train: expected one process, found 2 of torchrun's"):
        l2lopt.train({"optimisee": "quadratic", "optimiser": "torch.optim.SGD"}, tmp_path / "run")
