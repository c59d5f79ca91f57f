"""Every optimiser's laws, and the coordinatewise learned optimiser against a scalar loop."""

import json
from functools import partial

import laws
import oracles
import pytest
import torch
from implementations import INPUTS, LEARNED, OPTIMISERS, each, learned, normal, seeded

from l2lopt import kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers import Coordinatewise, coordinatewise

each_optimiser = pytest.mark.parametrize("make", each(OPTIMISERS, factories=True))
each_learned = pytest.mark.parametrize("make", each(LEARNED, factories=True))


@each_optimiser
def test_changes_nothing(make):
    laws.assert_optimiser_changes_nothing(make())


@each_optimiser
def test_batch_rows_are_separate_runs(make):
    laws.assert_batch_rows_are_separate_runs(make())


@each_optimiser
def test_permutes_with_its_coordinates(make):
    laws.assert_permutes_with_its_coordinates(make())


@each_optimiser
def test_blocks_are_parts_of_the_whole(make):
    laws.assert_is_local(make())


@each_optimiser
def test_state_keeps_its_structure(make):
    laws.assert_state_keeps_its_structure(make())


@each_optimiser
def test_knows_its_end(make):
    """And its fused form says the same."""
    laws.assert_knows_its_end(make())
    assert kernels.fuse(make()).knows_end == make().knows_end


SIGNS = {"lion", "normalised-muon of sign"}
"""Rules whose direction is the sign of a running mean, which has no size to fade with the mean."""


@pytest.mark.parametrize("label", each(OPTIMISERS))
def test_without_a_gradient_nothing_moves(label):
    laws.assert_comes_to_rest(OPTIMISERS[label](), fades=label not in SIGNS)


@each_optimiser
@pytest.mark.parametrize(("like", "dtype"), [(None, torch.float32), (torch.zeros(1).double(), torch.float64)])
def test_state_is_like(make, like, dtype):
    laws.assert_state_is_like(make(), like, dtype)


@each_optimiser
def test_update_is_a_function_of_phi(make):
    other = make() if make not in LEARNED.values() else seeded(make(), seed=1, scale=0.1)
    laws.assert_update_is_a_function_of_phi(make(), other)


@pytest.mark.parametrize(
    ("rule", "oracle"),
    [
        ("additive", oracles.additive),
        (
            {"name": "direction-and-magnitude", "horizon": 4.0},
            partial(oracles.direction_and_magnitude, horizon=4.0, log_scale=0.15),
        ),
    ],
    ids=["additive", "direction-and-magnitude"],
)
def test_equals_a_loop_over_coordinates(rule, oracle):
    optimiser, gradients, params = learned(rule), normal(5, 7), normal(7, seed=1)
    gradients[:, 2] = 0.0
    gradients[2:, 4] *= 1e-6
    gradients[1:, 5] = 0.0
    expected = oracles.coordinatewise(
        laws.as_lists(optimiser.phi()), gradients.tolist(), params.tolist(), laws.LAYOUT.sizes, oracle
    )
    updates, _ = laws.roll(optimiser.update, optimiser.init(laws.LAYOUT, like=params), gradients, params)
    laws.assert_close(torch.stack(updates), torch.tensor(expected, dtype=torch.float64), 1e-11)


@each_learned
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_moves_nothing_and_is_counted(make, bad):
    optimiser, gradients, params = make(), normal(3, 2, 7), normal(2, 7, seed=1)
    _, state = laws.roll(optimiser.update, optimiser.init(laws.LAYOUT, (2,), like=params), gradients, params)
    spoilt, losses = normal(2, 7, seed=2), laws.loss_at(params)
    spoilt[0, [1, 5]] = bad
    update, after = optimiser.update(spoilt, state, params, loss=losses)
    assert update[0, [1, 5]].eq(0).all()
    assert update.isfinite().all()
    assert update.ne(0).sum() == 12
    for name, value in after.coordinates.items():
        kept = value.eq(state.coordinates[name])
        assert kept[0, ..., [1, 5]].all() if value.dim() == 2 else kept[:, 0, [1, 5]].all()
        assert value.isfinite().all()
    assert after.shared["skipped"].tolist() == [2, 0]
    assert optimiser.update(spoilt, after, params, loss=losses)[1].shared["skipped"].tolist() == [4, 0]
    loss = optimiser.update(spoilt, state, params, loss=losses)[0].sum()
    assert all(piece.isfinite().all() for piece in torch.autograd.grad(loss, list(optimiser.parameters())))


def test_a_bad_gradient_does_not_touch_other_coordinates_of_a_coordinatewise_rule():
    optimiser, g, params = learned("additive"), normal(7), normal(7, seed=1)
    state = optimiser.init(laws.LAYOUT, like=params)
    spoilt = optimiser.update(g.index_fill(0, torch.tensor([3]), float("nan")), state, params)[0]
    others = [0, 1, 2, 4, 5, 6]
    laws.assert_close(spoilt[others], optimiser.update(g, state, params)[0][others])


def test_equal_seeds_give_equal_phi_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (coordinatewise(seed=seed).phi() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    laws.assert_same(one, same)
    assert not torch.equal(one["cell.weight_x"], other["cell.weight_x"])


@pytest.mark.parametrize(
    ("inputs", "size"),
    [(["log-and-sign"], 2), (["rnnprop"], 2), (["log-step", {"name": "log-and-sign", "p": 5.0}], 3)],
)
@pytest.mark.parametrize(("rule", "heads"), [("additive", 1), ("direction-and-magnitude", 2)])
def test_sizes(inputs, size, rule, heads):
    nominal = {"name": rule, "nominal": False} if heads == 2 else rule
    optimiser = coordinatewise(inputs, hidden_size=5, rule=nominal)
    count = (5 * size + 5) + 4 * (25 + 25 + 5) + (heads * 5 + heads) + (heads == 2)
    assert sum(value.numel() for value in optimiser.phi().values()) == count
    assert optimiser.embedding.weight.shape == (5, size)
    assert optimiser.coordinatewise
    assert optimiser.groupings == (() if rule == "additive" else ("tensors",))


@pytest.mark.parametrize(
    ("name", "options"),
    [("adam", {"lr": 0.5}), ("coordinatewise", {"rule": {"name": "additive", "step_size": 0.2}, "seed": 3})],
)
def test_the_description_builds_it_again(name, options):
    optimiser = optimisers.make(name, **options)
    again = optimisers.make(**json.loads(json.dumps(optimiser.description)))
    g, params = normal(7).float(), normal(7, seed=1).float()
    first, second = (o.update(g, o.init(laws.LAYOUT), params)[0] for o in (optimiser, again))
    laws.assert_same(first, second)
    assert optimiser.description == {"name": name, **options}


def test_every_input_and_direction_has_its_name():
    names = [*INPUTS, *optimisers.DIRECTIONS]
    assert list(coordinatewise(names).inputs) == names


def test_first_updates_are_small():
    """`head_scale` multiplies the head's initial weights, and its bias starts at 0."""
    one, tenth = (coordinatewise(head_scale=scale).phi() for scale in (1.0, 0.1))
    laws.assert_close(tenth["head.weight"], one["head.weight"] * 0.1, 1e-6)
    assert tenth["head.bias"].eq(0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ["rnnprop", {"name": "rnnprop", "eps": 1e-3}]}, "each at most once"),
        ({"inputs": ["log-and-sign"]}, "expected rnnprop for this rule, found log-and-sign"),
        ({"inputs": [], "rule": "additive"}, "expected at least one, found none"),
        ({"inputs": ["log-and-sing"]}, "did you mean 'log-and-sign'"),
        ({"cell": "lsmt"}, "did you mean 'lstm'"),
        ({"rule": {"name": "additive", "step": 1.0}}, "did you mean 'step_size'"),
        ({"hidden_size": 0}, "expected at least 1"),
        ({"cell": {"name": "lstm", "input_size": 5}}, "expected no input_size here"),
    ],
)
def test_choices_that_cannot_be_built_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        coordinatewise(**options)


def test_state_without_coordinates():
    """A layout of nothing is a layout."""
    optimiser: Coordinatewise = learned("additive")
    empty = torch.zeros(0, dtype=torch.float64)
    update, state = optimiser.update(empty, optimiser.init(Layout((), ()), like=empty), empty)
    assert update.shape == (0,)
    assert state.shared["step"] == 1
