"""The fast CPU step against the reference, on every cell, input and rule it knows."""

import copy
import logging
from functools import partial

import laws
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import FOLDED, INPUTS, RULES, seeded
from torch.utils import _pytree as pytree
from twins import problem, reference, rolled

from l2lopt import cells, kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.kernels.cpu.block import WIDTH
from l2lopt.optimisers import Coordinatewise, inputs, rules
from l2lopt.parallel.threads import cpu_threads, one_each, share_out

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
SIZES = {"none": 0, "one": 1, "few": 31, "block": WIDTH, "block and one": WIDTH + 1, "prime": 40_009}


def assert_twin(optimiser, size, batch=(), steps=5):
    """Update, state and what is shared, of `update` and of `update_`, are the reference's."""
    dtype = next(optimiser.parameters()).dtype
    layout, *arguments = problem(size, batch, dtype, steps)
    wanted = rolled(optimiser.update, optimiser.init(layout, batch, like=arguments[0]), *arguments)
    twin = kernels.fuse(optimiser, "cpu")
    updated = rolled(twin.update, twin.init(layout, batch, like=arguments[0]), *arguments)
    laws.assert_close(updated, wanted, TOLERANCE[dtype])
    laws.assert_same(rolled(twin.update_, twin.init(layout, batch, like=arguments[0]), *arguments), updated)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cell", FOLDED)
def test_equals_the_reference(cell, rule, dtype):
    """With every input at once, three rows, blocks that end within them."""
    assert_twin(reference(cell, rule=rule, dtype=dtype), 1511, (3,))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("item", INPUTS)
def test_equals_the_reference_with_one_input(item, dtype):
    assert_twin(reference(items=[item], dtype=dtype), 97, (2,))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", ["additive", "direction-and-magnitude"])
@pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])
def test_equals_the_reference_at_full_size(cell, rule, dtype):
    assert_twin(reference(cell, ["log-and-sign", "rnnprop", "log-step"], rule, dtype, 20), 5003)


@pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])
def test_input_and_hidden_size_may_differ(cell):
    network = cells.make(cell, 3, 5)
    assert_twin(seeded(Coordinatewise({"rnnprop": inputs.RNNprop()}, network, rules.Bounded()), scale=0.3), 100)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
def test_any_number_of_coordinates(rule, size):
    assert_twin(reference("ihc-lstm", rule=rule), size, steps=2)


@given(st.integers(0, 700), st.sampled_from([(), (1,), (7,), (2, 3)]))
def test_any_shape(size, batch):
    assert_twin(reference(rule="direction-and-magnitude", size=2), size, batch, steps=2)


@pytest.mark.parametrize("log_scale", [9.0, 100.0])
@pytest.mark.parametrize("rule", ["gated with a learned scale", "direction-and-magnitude"])
def test_no_step_with_a_scale_beyond_all_numbers_is_finite(rule, log_scale):
    """As the reference does: the run has diverged, and is told so."""
    optimiser = reference(rule=rule, dtype=torch.float32)
    torch.nn.init.constant_(optimiser.rule.log_scale, log_scale)
    layout, *arguments = problem(31, (), torch.float32, 1)
    wanted, found = (
        rolled(one.update, one.init(layout, like=arguments[0]), *arguments)[0][0]
        for one in (optimiser, kernels.fuse(optimiser, "cpu"))
    )
    assert not wanted.isfinite().any()
    assert not found.isfinite().any()


def test_a_layout_of_nothing():
    twin, empty = kernels.fuse(reference(rule="direction-and-magnitude"), "cpu"), torch.zeros(0).double()
    update, state = twin.update_(empty, twin.init(Layout((), ()), like=empty), empty, loss=torch.tensor(1.0))
    assert update.shape == (0,)
    assert state.shared["step"] == 1


each_rule = pytest.mark.parametrize("rule", ["additive", "gated", "direction-and-magnitude"])


def twin_of(rule):
    """A twin that needs no loss."""
    return kernels.fuse(reference("ihc-lstm", ["log-and-sign", "rnnprop", "momenta"], rule), "cpu")


@each_rule
@pytest.mark.parametrize(
    "law",
    [
        laws.assert_optimiser_changes_nothing,
        laws.assert_batch_rows_are_separate_runs,
        laws.assert_permutes_with_its_coordinates,
        laws.assert_is_local,
        partial(laws.assert_state_is_like, like=torch.zeros(1).double(), dtype=torch.float64),
    ],
    ids=["changes nothing", "rows", "permutes", "blocks", "state"],
)
def test_laws(rule, law):
    twin = twin_of(rule)
    law(twin)
    with torch.no_grad():  # no derivative may be asked for, and the reference stays out of it
        law(twin)


@each_rule
def test_update_is_a_function_of_phi(rule):
    twin, other = twin_of(rule), twin_of(rule)
    seeded(other.reference, seed=1, scale=0.1)
    laws.assert_update_is_a_function_of_phi(twin, other)
    layout, gradients, params, losses = problem(50)
    wanted = rolled(other.update, other.init(layout, like=params), gradients, params, losses)
    for function in (twin.update_with, twin.update_with_):
        state = twin.init(layout, like=params)
        laws.assert_same(rolled(partial(function, other.phi()), state, gradients, params, losses), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_derivatives_are_the_references(rule):
    optimiser = reference(rule=rule, items=["log-and-sign", "rnnprop"])
    twin, (layout, (grads, *_), params, _) = kernels.fuse(optimiser, "cpu"), problem(50)
    state = twin.init(layout, like=params)
    gradients = [
        torch.autograd.grad(each.update(grads, state, params)[0].sum(), list(optimiser.parameters()))
        for each in (twin, optimiser)
    ]
    laws.assert_same(*gradients)
    leaf = grads.clone().requires_grad_()
    assert twin.update_with(pytree.tree_map(torch.detach, twin.phi()), leaf, state, params)[0].requires_grad
    assert not any(result.requires_grad for result in pytree.tree_leaves(twin.update_(leaf, state, params)))


@pytest.mark.parametrize("threads", [2, 3])
@each_rule
def test_threads_change_no_bit_and_their_number_stays(rule, threads):
    twin, (layout, *arguments) = twin_of(rule), problem(70_001, steps=2)
    arguments[0][:, 5] = float("nan")
    results = []
    for count in (1, threads):
        with cpu_threads(count):
            results.append(rolled(twin.update, twin.init(layout, like=arguments[0]), *arguments))
            assert torch.get_num_threads() == count
    laws.assert_same(*results)


def test_a_mistake_in_a_thread_comes_out():
    def work(index):
        raise ValueError(f"mistake {index}")

    with cpu_threads(2):
        with pytest.raises(ValueError, match="mistake"), one_each() as threads:
            share_out(work, 4, threads)
        assert torch.get_num_threads() == 2


@each_rule
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bad_gradients_are_the_references(rule, dtype):
    """NaN, infinities, squares that overflow, and a block whose sum of squares alone does."""
    optimiser = reference("ihc-lstm", rule=rule, dtype=dtype)
    layout, gradients, params, losses = problem(2 * WIDTH + 9, (2,), dtype)
    gradients[1, 0, [3, WIDTH - 1, WIDTH]] = float("nan")
    gradients[2, 1, [0, 4000]] = torch.tensor([float("inf"), -float("inf")], dtype=dtype)
    gradients[3, 0, 7] = torch.finfo(dtype).max ** 0.75
    gradients[4, 1, 100:200] = torch.finfo(dtype).max ** 0.5 / 2
    state = optimiser.init(layout, (2,), like=params)
    wanted = rolled(optimiser.update, state, gradients, params, losses)
    twin = kernels.fuse(optimiser, "cpu")
    results = rolled(twin.update_, state, gradients, params, losses)
    laws.assert_close(results, wanted, 2 * TOLERANCE[dtype])
    assert results[-1][2]["skipped"].tolist() == [4, 2]
    for (update, _, _), bad in zip(results[1:4], ((0, 3), (1, 0), (0, 7)), strict=True):
        assert update[bad] == 0


def test_views_are_read_as_they_are():
    """Gradients, parameters and states that are not contiguous."""
    twin, (layout, gradients, params, losses) = twin_of("gated"), problem(40, (3,))
    state = twin.init(layout, (3,), like=params)
    wanted = rolled(twin.update, state, gradients, params, losses)
    turned = pytree.tree_map(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, state._replace(shared={}))
    turned = turned._replace(shared=state.shared)
    for function in (twin.update, twin.update_):
        results = rolled(function, turned, gradients.mT.contiguous().mT, params.mT.contiguous().mT, losses)
        laws.assert_same(results, wanted)


@pytest.mark.parametrize("size", [1, 40])
def test_an_expanded_state_is_copied_once(size):
    twin, (layout, gradients, params, losses) = twin_of("gated"), problem(size)
    state = twin.init(layout, like=params)
    zero = torch.zeros((), dtype=params.dtype)
    expanded = state._replace(coordinates={key: zero.expand(value.shape) for key, value in state.coordinates.items()})
    wanted = rolled(twin.update, state, gradients, params, losses)
    laws.assert_same(rolled(twin.update_, expanded, gradients, params, losses), wanted)
    assert zero == 0


@each_rule
def test_update__works_in_place(rule):
    """The state stays where it is, and so does the update."""
    twin, (layout, gradients, params, _) = twin_of(rule), problem(3000)
    state, places = twin.init(layout, like=params), []
    for grads in gradients:
        update, state = twin.update_(grads, state, params)
        places.append([value.data_ptr() for value in (update, *state.coordinates.values())])
    assert places == [places[0]] * len(places)


def test_a_copy_is_a_twin_of_its_own():
    twin, (layout, gradients, params, losses) = twin_of("additive"), problem(30)
    wanted = rolled(twin.update_, twin.init(layout, like=params), gradients, params, losses)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        twin.reference.head.weight.zero_()
    laws.assert_same(rolled(other.update_, other.init(layout, like=params), gradients, params, losses), wanted)


def test_phi_is_shared():
    """A change of the reference's parameters is the twin's at once, of their numbers or of their dtype."""
    optimiser = reference(items=["log-and-sign"])
    twin, (layout, gradients, params, losses) = kernels.fuse(optimiser, "cpu"), problem(30)
    state = twin.init(layout, like=params)
    rolled(twin.update, state, gradients, params, losses)
    seeded(optimiser, seed=4)
    wanted = rolled(optimiser.update, state, gradients, params, losses)
    laws.assert_close(rolled(twin.update, state, gradients, params, losses), wanted)
    assert twin.phi().keys() == optimiser.phi().keys()
    optimiser.float()
    gradients, params, losses, state = pytree.tree_map(
        lambda t: t.float() if t.is_floating_point() else t, (gradients, params, losses, state)
    )
    wanted = rolled(optimiser.update, state, gradients, params, losses)
    laws.assert_close(rolled(twin.update_, state, gradients, params, losses), wanted, 2e-6)


def _by_adam(weight, **options):
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight], lr=0.1, **options).step()


@torch.no_grad()
def _in_place(weight):
    weight.mul_(2)


@torch.no_grad()
def _foreach(weight):
    torch._foreach_mul_([weight], 2)


@torch.inference_mode()
def _in_inference(weight):
    weight.mul_(2)


CHANGES = {
    "in place": lambda rule: _in_place(rule.head.weight),
    "foreach": lambda rule: _foreach(rule.head.weight),
    "in inference mode": lambda rule: _in_inference(rule.head.weight),
    "in .data": lambda rule: rule.head.weight.data.mul_(2),
    "through NumPy": lambda rule: np.multiply(rule.head.weight.detach(), 2, out=rule.head.weight.detach().numpy()),
    "by Adam": lambda rule: _by_adam(rule.head.weight),
    "by fused Adam": lambda rule: _by_adam(rule.head.weight, fused=True),
    "other .data": lambda rule: setattr(rule.head.weight, "data", 2 * rule.head.weight.data),
    "other parameter": lambda rule: setattr(rule.head, "weight", torch.nn.Parameter(2 * rule.head.weight.detach())),
    "loaded": lambda rule: rule.load_state_dict({k: 2 * v for k, v in rule.state_dict().items()}),
    "assigned": lambda rule: rule.load_state_dict({k: 2 * v for k, v in rule.state_dict().items()}, assign=True),
}
"""Ways in which φ changes between two steps. Some of them leave the version of the tensor as it was."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_phi_is_seen(change):
    optimiser = reference(items=["log-and-sign"])
    twin, (layout, gradients, params, losses) = kernels.fuse(optimiser, "cpu"), problem(30, steps=1)
    state = twin.init(layout, like=params)
    before = rolled(twin.update_, state, gradients, params, losses)
    change(optimiser)
    wanted = rolled(optimiser.update, state, gradients, params, losses)
    assert not torch.equal(before[0][0], wanted[0][0])
    for function in (twin.update_, twin.update):
        laws.assert_close(rolled(function, state, gradients, params, losses), wanted)


def test_phi_in_memory_that_another_had_is_seen():
    """Temporaries of one size often lie where the last ones were, and their versions are alike."""
    twin, (layout, gradients, params, losses) = kernels.fuse(reference(items=["log-and-sign"]), "cpu"), problem(30)
    state = twin.init(layout, like=params)
    for factor in (1.0, 2.0, 3.0):
        phi = {name: factor * value.detach() for name, value in twin.phi().items()}
        wanted = rolled(partial(twin.reference.update_with, phi), state, gradients, params, losses)
        laws.assert_close(rolled(partial(twin.update_with_, phi), state, gradients, params, losses), wanted)
        del phi


def test_a_fixed_phi_is_not_looked_at():
    """Steps with the very dict that was fixed have the same bits; another φ is still seen, and its own afterwards."""
    twin, (layout, gradients, params, losses) = kernels.fuse(reference(items=["log-and-sign"]), "cpu"), problem(30)
    state = twin.init(layout, like=params)
    wanted = rolled(twin.update_, state, gradients, params, losses)
    twin.fix()
    twin._folded = None
    laws.assert_same(rolled(twin.update_, state, gradients, params, losses), wanted)
    assert twin._folded is None  # nothing was compared or multiplied out
    other = {name: 2 * value.detach() for name, value in twin.phi().items()}
    found = rolled(partial(twin.update_with_, other), state, gradients, params, losses)
    laws.assert_close(found, rolled(partial(twin.reference.update_with, other), state, gradients, params, losses))
    laws.assert_same(rolled(twin.update_, state, gradients, params, losses), wanted)


def test_a_loss_that_is_not_given_is_asked_for():
    twin, (layout, (grads, *_), params, _) = kernels.fuse(reference(items=["loss"]), "cpu"), problem(5)
    with pytest.raises(UserError, match="pass loss="):
        twin.update_(grads, twin.init(layout, like=params), params)


class OwnInput(inputs.LogStep):
    pass


class OwnRule(rules.Additive):
    pass


def own(items=None, rule=None):
    cell = optimisers.coordinatewise().cell
    return Coordinatewise(items or {"log-step": inputs.LogStep()}, cell, rule or rules.Additive())


REFUSED = {
    "hand-made": (lambda: optimisers.SGD(0.1), "SGD is not the coordinatewise"),
    "cell": (lambda: optimisers.coordinatewise(cell="gru"), "GRU"),
    "input": (lambda: own(items={"mine": OwnInput()}), "the input 'mine' is not one of the library's: OwnInput"),
    "rule": (lambda: own(rule=OwnRule()), "the rule is not one of the library's: OwnRule"),
    "dtype": (lambda: own().bfloat16(), "bfloat16 on cpu"),
    "device": (lambda: own().to("meta"), "float32 on meta"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_says_why(make, reason, caplog):
    optimiser = make()
    with pytest.raises(UserError, match=reason):
        kernels.fuse(optimiser, "cpu")
    kernels.choices.clear()
    with caplog.at_level(logging.INFO, "l2lopt"):
        assert kernels.fuse(optimiser) is kernels.fuse(optimiser) is optimiser
    (record,) = caplog.records
    assert reason in record.message
    assert "reference" in record.message


def test_backends(caplog):
    optimiser = reference()
    assert kernels.fuse(optimiser, "reference") is optimiser
    assert not caplog.records
    kernels.choices.clear()
    with caplog.at_level(logging.INFO, "l2lopt"):
        twins = [kernels.fuse(optimiser), kernels.fuse(optimiser, "auto"), kernels.fuse(optimiser, "cpu")]
    assert [type(twin) for twin in twins] == [kernels.CPU] * 3
    assert kernels.fuse(twins[0]) is twins[0]
    assert [record.message for record in caplog.records] == ["backend auto: cpu"]
    with pytest.raises(UserError, match="did you mean 'cpu'"):
        kernels.fuse(optimiser, "cpuu")
