"""Meta-gradients of rules whose coordinates meet: in means, functions of whole tensors, networks per group."""

from functools import partial

import laws
import pytest
import torch
from doubles import FactoredMoments, OwnMean, SteeredByPhi
from implementations import GROUPED, Problem, each, means_of_params, normal, problem, with_means_constant
from torch import nn

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.types import OptimiserState
from l2lopt.estimators import Backprop, Blockwise
from l2lopt.kernels import block_update
from l2lopt.optimisers.base import Optimiser, zeros

each_grouped = pytest.mark.parametrize("rule", each(GROUPED))


@each_grouped
@pytest.mark.parametrize("block", [1, 7, 8192])
@pytest.mark.parametrize("truncation", [None, 2])
def test_blocks_give_the_tapes_meta_gradient(rule, block, truncation):
    task = problem(rule)
    task = with_means_constant(task, means_of_params(rule))
    ours, tape = laws.run(Blockwise(truncation, block=block), task), laws.run(Backprop(window=truncation), task)
    assert any(piece.abs().max() > 1e-6 for piece in tape.gradient.values())
    laws.assert_close(vars(ours), vars(tape), 1e-10)


@each_grouped
def test_is_local(rule):
    laws.assert_is_local(GROUPED[rule]())


@each_grouped
def test_batch_rows_are_separate_runs(rule):
    laws.assert_batch_rows_are_separate_runs(GROUPED[rule]())


@each_grouped
def test_permutes_with_its_coordinates(rule):
    laws.assert_permutes_with_its_coordinates(GROUPED[rule]())


@each_grouped
def test_state_keeps_its_structure(rule):
    laws.assert_state_keeps_its_structure(GROUPED[rule]())


@pytest.mark.slow
@each_grouped
def test_the_mean_over_samples_of_coordinates_is_the_whole(rule):
    task = problem(rule, "module with batch norm", length=3)
    laws.assert_samples_average_to_the_whole(partial(Blockwise, share=0.3), Blockwise(), task, 200)


@each_grouped
def test_the_plan_counts_functions_of_whole_tensors(rule):
    task, estimator = problem(rule, length=6), Blockwise(window=4)
    plan = estimator.plan(*task[:4], task.steps, 6)
    estimator(*task[:4], task.steps)
    assert plan.vectors - 1 <= len(estimator.rows.made) <= plan.vectors


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [(FactoredMoments(sees_params=True), "tensors.output"), (SteeredByPhi(), "tensors.square")],
    ids=["of the parameters", "before a network"],
)
def test_a_mean_whose_adjoint_would_be_incomplete_is_left_out_and_the_log_says_so(rule, left_out, caplog):
    with caplog.at_level("INFO", "l2lopt"):
        laws.run(Blockwise(), _with(rule.double()))
    assert f"taken as constants, see its docstring: {left_out}" in caplog.text


@pytest.mark.parametrize("name", ["slow", "theta", "phi", "tensors.size"])
def test_a_state_may_have_any_name(name, caplog):
    """Also one that the analysis of what a mean depends on has for something else."""
    task = _with(_Anchored(name))
    with caplog.at_level("INFO", "l2lopt"):
        ours = laws.run(Blockwise(), task)
    assert "taken as constants, see its docstring: tensors.size" in caplog.text
    laws.assert_close(ours.gradient, laws.run(Backprop(), with_means_constant(task)).gradient, 1e-10)


def test_the_log_names_what_is_a_constant_and_no_more(caplog):
    with caplog.at_level("INFO", "l2lopt"):
        laws.run(Blockwise(), problem("small-fc", length=2))
    assert [record.getMessage() for record in caplog.records] == [
        "blockwise: taken as constants, see its docstring: tensors.parameters"
    ]


def test_two_means_of_one_name_are_refused():
    task = _with(_Anchored("slow", twice=True))
    remedy = "update: tensors.size: expected another name for each .* give one of them another name"
    with pytest.raises(UserError, match=remedy):
        laws.run(Blockwise(), task)


def test_means_that_nobody_has_declared_are_refused():
    task = _with(OwnMean().double())
    with pytest.raises(UserError, match=r"estimator 'blockwise': expected an update that a slice .* gives by itself"):
        laws.run(Blockwise(), task)
    laws.run(Backprop(), task)


def test_a_rule_that_says_it_is_not_coordinatewise_is_refused():
    rule = OwnMean().double()
    rule.coordinatewise = False
    task = _with(rule)._replace(update=block_update(rule))
    with pytest.raises(UserError, match=r"estimator 'blockwise': .* coordinatewise = False"):
        laws.run(Blockwise(), task)


def test_groups_are_those_of_the_matrix_view():
    """Of shapes (), (2, 3), (4,), (2, 3, 2), (0, 5): rows and columns against PyTorch's means."""
    shapes = ((), (2, 3), (4,), (2, 3, 2), (0, 5))
    layout = Layout(tuple("abcde"), shapes)
    values = normal(3, layout.size)
    matrices = [
        part.reshape(3, *((shape[0], -1) if 0 not in shape else shape) if shape else (3, 1, 1)[1:])
        for part, shape in zip(layout.split(values), shapes, strict=True)
    ]
    rows = torch.cat([matrix.mean(-1) for matrix in matrices], -1)
    columns = torch.cat([matrix.mean(-2) for matrix in matrices[:-1]] + [values.new_zeros(3, 5)], -1)
    laws.assert_close(layout.rows.mean("m", values), rows)
    laws.assert_close(layout.columns.mean("m", values), columns)
    for grouping in (layout.tensors, layout.rows, layout.columns):
        groups = normal(2, grouping.count)
        assert torch.equal(grouping.spread(groups), groups[:, grouping.index])
        part = layout.slice(3, 9).grouping(grouping.name)
        assert torch.equal(part.index, grouping.index[3:9])
        assert torch.equal(
            layout.select(torch.tensor([0, 4, 20])).grouping(grouping.name).index, grouping.index[[0, 4, 20]]
        )


def test_a_slice_cannot_compute_what_whole_tensors_are_needed_for():
    part, values = Layout(("a",), ((2, 3),)).slice(1, 4), normal(3)
    with pytest.raises(UserError, match="orthogonalised: expected whole tensors, found a slice of the coordinates"):
        part.whole("orthogonalised", lambda values, layout: values, values)
    with pytest.raises(UserError, match="tensors: sums: expected the whole vector, found a slice of it"):
        part.tensors.mean("any", values)


class _Anchored(Optimiser):
    """Goes down and to a running mean of θ, by a step of given size; its state has the given name."""

    def __init__(self, name, twice=False):
        super().__init__()
        self.name, self.twice = name, twice
        self.rates = nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return OptimiserState(layout, {self.name: zeros(layout, batch, like)}, {}, {})

    def update(self, grads, state, params, *, loss=None):
        tensors, slow = state.layout.tensors, state.coordinates[self.name]
        way = self.rates[0] * grads + 0.5 * self.rates[1] * (params - slow)
        size = tensors.mean("size", way.square())
        size = size + tensors.mean("size", way.abs()) if self.twice else size
        update = -0.3 * way / tensors.spread((size + 1e-6).sqrt())
        return update, state._replace(coordinates={self.name: 0.9 * slow + 0.1 * params})


def _with(rule):
    """The usual run under another rule."""
    task = problem(length=4)
    layout, rows = task.carry.state.layout, task.carry.params.shape[:-1]
    carry = task.carry._replace(state=rule.init(layout, rows, like=task.carry.params))
    return Problem(rule.update_with, task.loss, rule.phi(), carry, task.steps)
