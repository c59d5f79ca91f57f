"""State per tensor, row and column of parameters that are distributed over processes."""

from copy import deepcopy

import laws
import processes
import pytest
import torch
from implementations import DOUBLES
from test_sharding import (
    MODELS,
    OPTIONS,
    assert_same_parameters,
    backward,
    is_cut,
    loaded,
    model_of,
    one_process,
    pickled,
    saved,
    sharded,
    tensor_parallel,
    whole,
)
from torch.utils import _pytree as pytree

from l2lopt import LearnedOptimizer

FACTORED, STEERED, ORTHOGONALISED = DOUBLES


@pytest.mark.parametrize(
    ("made", "rule"),
    [pytest.param(made, rule, marks=pytest.mark.slow) for made in MODELS for rule in DOUBLES],
)
def test_twenty_steps_give_one_processs_parameters(made, rule):
    processes.run(one_process, 2, made, rule, torch.float64, 20, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("rule", DOUBLES)
def test_columns_may_be_sharded_too(rule):
    processes.run(tensor_parallel, 2, rule)


def gaps(rank, rule, dtype):
    """A parameter lacks its gradient in some steps; the state is saved and loaded in between, sharded or whole."""
    alone, together = model_of(), sharded(model_of())
    first, second = (
        LearnedOptimizer(model.parameters(), DOUBLES[rule](), state_dtype=dtype) for model in (alone, together)
    )

    def step(model, optimizer, number, by_itself):
        backward(model, number, by_itself)
        if number % 3 == 1:
            model[0].bias.grad = None
        optimizer.step()

    for number in range(5):
        step(alone, first, number, True)
        step(together, second, number, False)
    tolerance = 1e-9 if dtype == "float32" else 0.02
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        (cut,) = ours.placements
        for key, value in first.state[theirs].items():
            mine = second.state[ours][key]
            if key in ("step", "skipped", "vector"):
                assert mine == value
                continue
            axes = {"tensors": [], "rows": [0], "columns": range(1, theirs.dim())}.get(
                key.split(".")[0], range(theirs.dim())
            )
            assert (is_cut(mine), mine.shape) == (True, value.shape)
            assert mine.placements[0].is_shard() == (cut.dim in axes)
            laws.assert_close(whole(mine), value, tolerance)
    for taken in (lambda value: value, deepcopy, pickled, whole):
        state = second.state_dict()
        state["state"] = pytree.tree_map_only(torch.Tensor, taken, state["state"])
        model = sharded(model_of())
        model.load_state_dict(together.state_dict())
        other, before = LearnedOptimizer(model.parameters(), DOUBLES[rule](), state_dtype=dtype), deepcopy(state)
        other.load_state_dict(state)
        goes_on = deepcopy((alone, first))
        for number in range(5, 8):
            step(*goes_on, number, True)
            step(model, other, number, False)
        laws.assert_same(
            pytree.tree_map_only(torch.Tensor, whole, state), pytree.tree_map_only(torch.Tensor, whole, before)
        )
        assert_same_parameters(model, goes_on[0], 1e-7 if dtype == "float32" else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", DOUBLES)
def test_a_parameter_without_a_gradient_and_a_state_that_lies_as_its_parameter_does(rule, dtype):
    processes.run(gaps, 2, rule, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", [(2, 3), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("rule", DOUBLES)
def test_a_distributed_checkpoint_goes_on_in_any_number_of_processes(rule, counts, options, tmp_path):
    processes.run(saved, counts[0], tmp_path / "checkpoint", options, rule)
    processes.run(loaded, counts[1], tmp_path / "checkpoint", options, rule)
