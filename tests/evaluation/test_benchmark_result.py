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
from l2lopt.evaluation.benchmark_result import BenchmarkResult, TaskInfo, read_result, write_result

TASK = TaskInfo("a", "family", "own", 10, 5)


def assert_same(one, other):
    """Equal in all fields; NaN equals NaN."""
    assert [info._asdict() for info in one.tasks] == [info._asdict() for info in other.tasks]
    plain = ("suite", "seeds", "target_optimiser", "step_seconds", "environment")
    assert all(getattr(one, name) == getattr(other, name) for name in plain)
    assert len(one.runs) == len(other.runs)
    for a, b in zip(one.runs, other.runs, strict=True):
        for name in ("task", "optimiser", "kind", "league", "rates", "trials", "seconds", "warnings"):
            assert getattr(a, name) == getattr(b, name)
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
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UserError, match="run l2lopt benchmark again"):
        read_result(tmp_path / "result.json")


def test_a_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        realistic(tasks=1, seeds=1).suite = "other"
