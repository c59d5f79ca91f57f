"""Rows of meta-parameters: every row is what its own rule makes of it alone."""

import laws
import pytest
import torch
from implementations import DOUBLES, LEARNED, problem

from l2lopt import kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.phi_rows import over_phi, row_of, stack_carries
from l2lopt.core.types import Carry
from l2lopt.kernels.phi_rows import FusedPhiRows
from l2lopt.optimisers.phi_rows import PhiRows

COUNT = 3
RULES = LEARNED | {label: make for label, make in DOUBLES.items() if list(make().parameters())}


def varied(rule):
    """The rule's φ in rows, each changed at random."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: value.detach() + 0.1 * torch.randn(COUNT, *value.shape, generator=draw, dtype=value.dtype)
        for name, value in rule.phi().items()
    }


def gradients(layout, step, count=COUNT):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(count, layout.size, generator=draw, dtype=torch.float64)


def steps(update, state, params, layout, count=4):
    """Parameters after each of some updates, with other gradients and losses in every row; the state."""
    found = []
    for step in range(count):
        g = gradients(layout, step)
        g[1, 2] = torch.nan if step == 1 else g[1, 2]
        change, state = update(g, state, params, loss=g.nan_to_num().square().mean(1))
        params = params + change
        found.append(params)
    return torch.stack(found), state


@pytest.mark.parametrize("label", RULES)
def test_a_row_is_its_own_rule(label):
    rule = RULES[label]()
    rows, layout = varied(rule), problem("sgd").carry.state.layout
    params = gradients(layout, 99)
    many = PhiRows(rule, rows)
    found, state = steps(many.update, many.init(layout, (COUNT,), like=params, total_steps=9), params, layout)
    for index in range(COUNT):

        def alone(g, state, theta, *, loss, index=index):
            phi = {name: value[index] for name, value in rows.items()}
            change, state = rule.update_with(phi, g[index], state, theta, loss=loss[index])
            return change, state

        theta, one = params[index], rule.init(layout, like=params, total_steps=9)
        wanted, one = steps(alone, one, theta, layout)
        laws.assert_close(found[:, index], wanted)
        laws.assert_close(row_of(Carry(found[-1], {}, state), index).state.coordinates, one.coordinates)


@pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fused_rows_are_the_plain_ones(cell, dtype):
    rule = optimisers.make("coordinatewise", cell=cell).to(dtype)
    plain, layout = PhiRows(rule, varied(rule)), problem("sgd").carry.state.layout
    fused = kernels.fuse(plain)
    assert isinstance(fused, FusedPhiRows)
    params = gradients(layout, 99).to(dtype)

    def run(update):
        state = plain.init(layout, (COUNT,), like=params)
        return steps(lambda g, *rest, loss: update(g.to(dtype), *rest, loss=loss.to(dtype)), state, params, layout)

    (found, state), (wanted, expected) = run(fused.update_), run(plain.update)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found, wanted, **tolerance)
    torch.testing.assert_close(state.coordinates, expected.coordinates, **tolerance)
    assert torch.equal(state.shared["skipped"], expected.shared["skipped"])
    assert state.shared["skipped"].tolist() == [0, 1, 0]


def test_an_update_in_place_leaves_shared_memory_alone():
    """A state whose names lie in one memory, as a first state may."""
    rule = optimisers.make("coordinatewise").double()
    plain, layout = PhiRows(rule, varied(rule)), problem("sgd").carry.state.layout
    params = gradients(layout, 99)
    state = plain.init(layout, (COUNT,), like=params)
    zeros = torch.zeros_like(state.coordinates["rnnprop.m"].contiguous())
    shared = state._replace(coordinates=state.coordinates | {"rnnprop.m": zeros, "rnnprop.v": zeros})
    g = gradients(layout, 0)
    found, after = kernels.fuse(plain).update_(g, shared, params)
    wanted, expected = plain.update(g, state, params)
    laws.assert_close(found, wanted)
    laws.assert_close(after.coordinates, expected.coordinates)
    assert not zeros.any()


def test_carries_as_rows_and_back():
    task = problem("coordinatewise additive")
    other = task.carry._replace(params=2 * task.carry.params)
    rows = stack_carries([task.carry, other])
    for index, carry in enumerate([task.carry, other]):
        laws.assert_same(row_of(rows, index), carry)
    g = torch.ones_like(rows.params)
    phi = {name: torch.stack([value, value]).detach() for name, value in task.phi.items()}
    change, state = over_phi(task.update)(phi, g, rows.state, rows.params)
    wanted, after = task.update(task.phi, g[1], other.state, other.params)
    laws.assert_close(change[1].detach(), wanted.detach())
    laws.assert_close(row_of(Carry(rows.params, {}, state), 1).state.coordinates, after.coordinates)


def test_rows_of_another_rule_are_refused():
    rule = optimisers.make("coordinatewise")
    with pytest.raises(UserError, match="stack the φ"):
        PhiRows(
            rule, {name: value[None] for name, value in optimisers.make("coordinatewise", cell="gru").phi().items()}
        )
    rows = varied(rule)
    with pytest.raises(UserError, match="stack the φ"):
        PhiRows(rule, {**rows, "head.bias": rows["head.bias"][:1]})


def test_rows_with_other_numbers_are_those_rows():
    rule = optimisers.make("coordinatewise")
    rows, layout, g = varied(rule), Layout(("w",), ((5,),)), torch.ones(COUNT, 5)
    for make in (lambda own: PhiRows(rule, own), lambda own: kernels.fuse(PhiRows(rule, own), "cpu")):
        zeros = make({name: torch.zeros_like(value) for name, value in rows.items()})
        state = zeros.init(layout, (COUNT,), like=g)
        laws.assert_same(
            zeros.update_with(rows, g, state, g)[0].detach(), PhiRows(rule, rows).update(g, state, g)[0].detach()
        )


def test_rows_without_a_twin_are_refused_one():
    rule = optimisers.make("hierarchical")
    rows = PhiRows(rule, varied(rule))
    assert kernels.fuse(rows) is rows
    with pytest.raises(UserError, match="backend 'cpu': expected rows of a coordinatewise rule, found rows of a Hier"):
        kernels.fuse(rows, "cpu")
