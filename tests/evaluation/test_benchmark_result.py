"""The result of a benchmark to JSON and back."""

import dataclasses
import json
import math

import pytest
import torch
from benchmark_results import realistic, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

from l2lopt.core.errors import UserError
from l2lopt.evaluation.benchmark_result import BenchmarkResult, TaskInfo, joined, read_result, write_result

TASK = TaskInfo("a", "family", "own", 10, 5)


def assert_same(one, other):
    """Equal in all fields; NaN equals NaN."""
    assert [info._asdict() for info in one.tasks] == [info._asdict() for info in other.tasks]
    plain = ("suite", "seeds", "target_optimiser", "step_seconds", "environment")
    assert all(getattr(one, name) == getattr(other, name) for name in plain)
    assert len(one.runs) == len(other.runs)
    for a, b in zip(one.runs, other.runs, strict=True):
        for name in ("task", "optimiser", "kind", "league", "rates", "trials", "seconds", "warnings"):
            assert repr(getattr(a, name)) == repr(getattr(b, name))  # NaN, too
        torch.testing.assert_close(a.first, b.first, rtol=0, atol=0, equal_nan=True, check_dtype=False)
        assert {split: list(steps) for split, steps in a.losses.items()} == {
            split: list(steps) for split, steps in b.losses.items()
        }
        for split, steps in a.losses.items():
            for step, row in steps.items():
                torch.testing.assert_close(
                    row, b.losses[split][step], rtol=0, atol=0, equal_nan=True, check_dtype=False
                )


def test_a_result_comes_back_from_its_file(tmp_path):
    result = realistic(tasks=5, seeds=2)
    assert any(row.isnan().any() for run in result.runs for row in run.losses["test"].values())
    write_result(tmp_path / "result.json", result)
    assert_same(read_result(tmp_path / "result.json"), result)
    assert "NaN" not in (tmp_path / "result.json").read_text()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=4), st.text(max_size=8), st.text(max_size=8))
def test_any_losses_and_names_come_back(losses, name, description):
    """Every float32, to the bit; whatever is not finite as NaN."""
    task = TASK._replace(name=name, description=description)
    result = BenchmarkResult(name, len(losses), (task,), (run_of(name, "a", "tuned", {10: losses}),))
    back = BenchmarkResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
    expected = [loss if math.isfinite(loss) else math.nan for loss in losses]
    assert str(back.runs[0].losses["test"][10].tolist()) == str(expected)
    assert back.tasks == (task,)


@pytest.mark.parametrize(
    ("tasks", "runs", "message"),
    [
        ((TASK, TASK), (), "one task of each name, found a twice"),
        ((TASK,), [run_of("a", "x", "tuned", {10: [1.0]})] * 2, "one run of each name"),
        ((TASK,), [run_of("b", "x", "tuned", {10: [1.0]})], "runs of the tasks a, found one of b"),
        ((TASK,), [run_of("a", "x", "tuned", {10: [1.0, 2.0]})], "losses of 1 seeds, found others in x on a"),
        ((TASK,), [run_of("a", "x", "tuned", {9: [1.0]})], "train and test losses up to step 10, found others in x"),
        (
            (TASK,),
            [run_of("a", "x", "tuneb", {10: [1.0]})],
            "in untuned, self-tuned, tuned, found baseline in tuneb: x on a",
        ),
        (
            (TASK,),
            [dataclasses.replace(run_of("a", "x", "tuned", {10: [1.0]}), rates={})],
            "a rate for train and one for test",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tasks, runs, message):
    with pytest.raises(UserError, match=message):
        BenchmarkResult("suite", 1, tuple(tasks), tuple(runs))


@pytest.mark.parametrize("change", [{"format": 2}, {"tasks": None}, {"runs": [{}]}, {"tasks": [{"name": "a"}]}])
def test_damaged_files_are_refused(tmp_path, change):
    facts = realistic(tasks=1, seeds=1, leagues=("tuned",)).to_json()
    (tmp_path / "result.json").write_text(json.dumps(facts | change))
    with pytest.raises(UserError, match="benchmark"):
        read_result(tmp_path / "result.json")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="found nothing; run l2lopt benchmark first"):
        read_result(tmp_path / "result.json")
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "result.json").write_text(damaged)
        with pytest.raises(UserError, match="run l2lopt benchmark again"):
            read_result(tmp_path / "result.json")


def test_a_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        realistic(tasks=1, seeds=1).suite = "other"


def begun(**sizes):
    """A result whose optimisers have the same losses at step 0, as those of one suite do."""
    result = realistic(**sizes)
    first = {run.task: run.first for run in result.runs}
    return dataclasses.replace(
        result, runs=tuple(dataclasses.replace(run, first=first[run.task]) for run in result.runs)
    )


def only(result, *optimisers, **changes):
    """The part of a result that some optimisers have."""
    runs = tuple(run for run in result.runs if run.optimiser in optimisers)
    timed = {task: {name: found[name] for name in optimisers} for task, found in result.step_seconds.items()}
    return dataclasses.replace(result, runs=runs, step_seconds=timed, **changes)


def test_two_parts_joined_are_the_whole():
    whole = begun(tasks=3, seeds=2)
    names = [*dict.fromkeys(run.optimiser for run in whole.runs)]
    found = joined(only(whole, *names[:2]), only(whole, *names[2:]))
    order = [(run.task, run.optimiser, run.league) for run in found.runs]
    assert sorted(order) == sorted((run.task, run.optimiser, run.league) for run in whole.runs)
    by_key = {(run.task, run.optimiser, run.league): run for run in whole.runs}
    assert_same(found, dataclasses.replace(whole, runs=tuple(by_key[key] for key in order)))


def test_each_other_machine_is_named_once():
    """However often runs were put beside those of before, and a result's own machine not at all."""
    whole = begun(tasks=1, seeds=2)
    places = [{"processor": name, "torch": "2.15"} for name in ("first", "second", "first", "second")]
    result, *rest = [dataclasses.replace(whole, environment=place) for place in places]
    for newer in rest:
        result = joined(newer, result)
    assert result.environment == {**places[-1], "beside runs of": "processor first, torch 2.15"}


def test_own_runs_stay_and_times_of_other_machines_are_left_out():
    whole = begun(tasks=2, seeds=2)
    mine = only(whole, "transferable", "adamw", environment={"processor": "another"})
    mine = dataclasses.replace(
        mine, runs=tuple(dataclasses.replace(run, trials=77) for run in mine.runs if run.league == "untuned")
    )
    found = joined(mine, whole)
    own = [run for run in found.runs if run.trials == 77]
    assert len(own) == len(mine.runs)
    assert {(run.optimiser, run.league) for run in own} == {("transferable", "untuned"), ("adamw", "untuned")}
    leagues = {run.league for run in found.runs if run.optimiser == "transferable"}
    assert leagues == {"untuned"}  # an earlier rule of this name may be another one
    assert ("adamw", "tuned") in {(run.optimiser, run.league) for run in found.runs}
    assert all(math.isnan(run.seconds) for run in found.runs if run.trials != 77)
    assert {name for timed in found.step_seconds.values() for name in timed} == {"transferable", "adamw"}
    assert_same(BenchmarkResult.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))), found)


def test_tasks_of_the_earlier_result_alone_are_left_out():
    whole = begun(tasks=3, seeds=2)
    mine = only(whole, "adamw")
    few = dataclasses.replace(
        mine, tasks=mine.tasks[:1], runs=tuple(r for r in mine.runs if r.task == mine.tasks[0].name)
    )
    assert {run.task for run in joined(few, whole).runs} == {mine.tasks[0].name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: begun(tasks=2, seeds=3), "expected 2 seeds, found 3"),
        (
            lambda result: dataclasses.replace(
                result, tasks=tuple(task._replace(steps=7) for task in result.tasks), runs=()
            ),
            "steps of .*, found 7",
        ),
        (
            lambda result: dataclasses.replace(
                result, runs=tuple(dataclasses.replace(run, first=run.first + 0.1) for run in result.runs)
            ),
            "the same losses at step 0",
        ),
        (
            lambda result: dataclasses.replace(
                result, tasks=tuple(task._replace(problem="other") for task in result.tasks)
            ),
            "expected the problem .* of this benchmark, found another of that name",
        ),
    ],
)
def test_results_of_other_problems_are_not_joined(change, message):
    whole = begun(tasks=2, seeds=2)
    whole = dataclasses.replace(whole, tasks=tuple(task._replace(problem="one") for task in whole.tasks))
    with pytest.raises(UserError, match=message):
        joined(only(whole, "adamw"), change(whole))
