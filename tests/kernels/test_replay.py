"""Backpropagation through a window by hand, against autograd through the reference's own steps."""

from concurrent.futures import ThreadPoolExecutor

import laws
import pytest
import torch
from implementations import FOLDED, INPUTS, RULES, normal
from oracles import replayed
from twins import learned, window

from l2lopt import cells, optimisers
from l2lopt.core.errors import UserError
from l2lopt.estimators.exchange import Playback
from l2lopt.kernels.cpu import replay as by_hand
from l2lopt.kernels.cpu.replay import refusal_to_replay
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.optimisers import inputs, rules


def replay(optimiser, phi, block, space=None):
    """The block's part of the meta-gradient."""
    return by_hand.replay(optimiser, phi, block, {}, space).phi


def assert_is_autograds(optimiser, window, tolerance=1e-10):
    phi = optimiser.phi()
    laws.assert_close(replay(optimiser, phi, window), replayed(optimiser, phi, window), tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cell", FOLDED)
def test_equals_autograd_for_every_cell_and_rule(cell, rule):
    optimiser = learned(cell, rule, INPUTS)
    for length in (1, 2, 5):
        assert_is_autograds(optimiser, window(optimiser, length, (2,)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INPUTS)
def test_equals_autograd_for_every_input_and_rule(name, rule):
    optimiser = learned("lstm", rule, [name])
    assert_is_autograds(optimiser, window(optimiser))


@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 31])
def test_equals_autograd_for_every_shape(size, batch, rule):
    optimiser = learned("lstm", rule, ["parameter", "loss", "momenta"])
    assert_is_autograds(optimiser, window(optimiser, 2, batch, size))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cell", FOLDED)
def test_equals_autograd_in_float32(cell, rule):
    optimiser = learned(cell, rule, INPUTS)
    assert_is_autograds(optimiser, window(optimiser, 5, (2,), 31, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("cell", FOLDED)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
def test_equals_autograd_for_other_input_than_hidden_sizes(sizes, cell):
    optimiser = learned(cell, sizes=sizes)
    assert_is_autograds(optimiser, window(optimiser))


def test_equals_autograd_without_weight_decay():
    optimiser = learned(rule="direction-and-magnitude")
    optimiser.rule.weight_decay = 0.0
    assert_is_autograds(optimiser, window(optimiser))


def test_equals_autograd_on_parts_of_larger_tensors():
    """A block's tensors are slices, whose rows do not follow one another."""
    optimiser = learned("lstm", "gated", INPUTS)
    whole = window(optimiser, 3, (2,), 9, bad=False)
    low, high = 2, 6
    state = whole.state._replace(
        layout=whole.state.layout.slice(low, high),
        coordinates={name: value[..., low:high] for name, value in whole.state.coordinates.items()},
    )
    tensors = {name: getattr(whole, name)[..., low:high] for name in ("params", "grads", "sources")}
    assert_is_autograds(optimiser, whole._replace(state=state, **tensors))


@pytest.mark.parametrize("rule", RULES)
def test_finite_differences_agree(rule):
    """Along a random direction of φ, gradients and statistics held constant."""
    optimiser = learned("ihc-lstm", rule, ["log-and-sign", "parameter"])
    block, phi, h = window(optimiser, 4), optimiser.phi(), 1e-5
    gradient = replay(optimiser, phi, block)
    along = {name: normal(*value.shape, seed=5) for name, value in phi.items()}

    @torch.no_grad()
    def value(step):
        moved = {name: value + step * along[name] for name, value in phi.items()}
        state, theta, total = block.state, block.params, 0.0
        for grads, sources, loss, meeting in zip(block.grads, block.sources, block.losses, block.meetings, strict=True):
            state = state._replace(layout=block.state.layout.meeting(Playback(meeting, {})))
            update, state = optimiser.update_with(moved, grads, state, theta, loss=loss)
            theta = theta + update
            total += (sources * theta).sum().item()
        return total

    derivative = sum((gradient[name] * along[name]).sum().item() for name in along)
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(derivative, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_no_steps_give_zeros(rule):
    optimiser = learned(rule=rule)
    zeros = {name: torch.zeros_like(value) for name, value in optimiser.phi().items()}
    laws.assert_same(replay(optimiser, optimiser.phi(), window(optimiser, 0)), zeros)


@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_is_skipped_throughout_gives_zeros(rule):
    optimiser = learned(rule=rule)
    block = window(optimiser)
    gradient = replay(optimiser, optimiser.phi(), block._replace(grads=torch.full_like(block.grads, float("nan"))))
    laws.assert_same(gradient, {name: torch.zeros_like(value) for name, value in optimiser.phi().items()})


@pytest.mark.parametrize("cell", FOLDED)
@pytest.mark.parametrize("rule", RULES)
def test_changes_nothing_and_what_was_in_its_memory_does_not_matter(rule, cell):
    """The same bits from fresh memory, from poisoned memory of a larger block, and after other blocks."""
    optimiser, space = learned(cell, rule, INPUTS), Workspace()
    phi, small, large = optimiser.phi(), window(optimiser), window(optimiser, 6, (2,), 9)
    before = laws.clone((phi, small))
    first = replay(optimiser, phi, small)
    replay(optimiser, phi, large, space)
    for flat in space._flat.values():
        flat.fill_(float("nan"))
    kept = {name: flat.data_ptr() for name, flat in space._flat.items()}
    laws.assert_same(replay(optimiser, phi, small, space), first)
    laws.assert_same(replay(optimiser, phi, small, space), first)
    assert {name: flat.data_ptr() for name, flat in space._flat.items()} == kept
    laws.assert_same((phi, small), before)
    assert not any(value.requires_grad for value in first.values())


def test_threads_may_share_a_workspace():
    optimiser, space = learned("ihc-lstm", "gated", INPUTS), Workspace()
    blocks = [window(optimiser, 5, (2,), size) for size in (7, 31, 9, 7)] * 4
    wanted = [replay(optimiser, optimiser.phi(), block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        laws.assert_same(list(pool.map(lambda block: replay(optimiser, optimiser.phi(), block, space), blocks)), wanted)


class OwnInput(inputs.LogAndSign):
    """Somebody's own."""


class OwnRule(rules.Additive):
    """Somebody's own."""


OF_THETA, NOMINAL = {"rnnprop": inputs.Parameter()}, "direction-and-magnitude"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: optimisers.SGD(0.1), "SGD"),
        (lambda: optimisers.coordinatewise(cell="gru"), "GRU"),
        (
            lambda: optimisers.Coordinatewise({"own": OwnInput()}, cells.make("lstm", 3, 3), rules.Additive()),
            "OwnInput",
        ),
        (lambda: optimisers.Coordinatewise({"g": inputs.LogAndSign()}, cells.make("lstm", 3, 3), OwnRule()), "OwnRule"),
        (lambda: optimisers.Coordinatewise(OF_THETA, cells.make("lstm", 3, 3), RULES[NOMINAL]()), "θ itself"),
    ],
    ids=["sgd", "gru", "input", "rule", "nominal"],
)
def test_a_refusal_says_why(make, reason):
    assert reason in refusal_to_replay(make())
    with pytest.raises(UserError, match=reason):
        replay(make(), {}, window(learned()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cell", FOLDED)
def test_what_can_be_folded_is_accepted_with_every_input_and_rule(cell, rule):
    assert refusal_to_replay(learned(cell, rule, optimisers.INPUTS)) is None
