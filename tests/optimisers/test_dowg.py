"""DoWG against its definition, and what its norms are over."""

import laws
import pytest
import torch
from implementations import normal

from l2lopt import LearnedOptimizer
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers import DoWG
from l2lopt.torch_optim import blocks

from test_handmade import LAYOUT, gradient, ours, start  # isort: skip


def by_definition(theta, gradients, steps, lr=1.0, initial_distance=0.01):
    """The iterates of a list of tensors, every distance and every weighted square of the past at hand."""
    thetas, weighted = [theta], []
    for step in range(steps):
        now = thetas[-1]
        moved = [sum(float((a - b).square().sum()) for a, b in zip(one, theta, strict=True)) for one in thetas]
        distance = max(initial_distance**2, *moved)
        grads = gradients(now, step)
        weighted.append(distance * sum(float(g.square().sum()) for g in grads))
        rate = lr * distance / sum(weighted) ** 0.5
        thetas.append([a - rate * g for a, g in zip(now, grads, strict=True)])
    return thetas[1:]


def bumpy(tensors, step):
    """`gradient` of a matrix and a vector."""
    flat = gradient(torch.cat([value.reshape(-1) for value in tensors]), step)
    return [part.view_as(value) for part, value in zip(LAYOUT.split(flat), tensors, strict=True)]


def expected(steps, scale=1.0, **options):
    """The flat iterates of the definition, the loss multiplied by `scale`."""
    trail = by_definition(
        list(start(torch.float64).values()), lambda *at: [scale * g for g in bumpy(*at)], steps, **options
    )
    return torch.stack([torch.cat([value.reshape(-1) for value in one]) for one in trail])


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.5}, {"initial_distance": 3.0}], ids=["default", "rate", "initial distance"]
)
def test_equals_its_definition(options):
    """The distance grows at first, and shrinks later while its largest value stays."""
    theta = LAYOUT.ravel(start(torch.float64))
    trail = ours(DoWG(**options), 200, theta)
    laws.assert_close(trail, expected(200, **options), 1e-9)
    moved = (trail - theta).norm(dim=-1)
    assert moved[-1] > 0.1
    assert (moved.diff() < 0).any()


def test_equals_its_definition_in_float32():
    laws.assert_close(ours(DoWG(), 20, LAYOUT.ravel(start(torch.float32))).double(), expected(20), 1e-4)


def test_a_rate_per_row_is_separate_runs():
    rates, theta = [0.3, 1.0, 2.0], normal(10)
    rows = ours(DoWG(torch.tensor(rates, dtype=torch.float64)), 20, theta.expand(3, 10), batch=(3,))
    for row, rate in enumerate(rates):
        laws.assert_close(rows[:, row], ours(DoWG(rate), 20, theta))


def test_the_scale_of_the_loss_changes_nothing():
    laws.assert_close(expected(50, scale=1e6), expected(50), 1e-9)
    found = ours(DoWG(), 50, normal(10), lambda theta, step: 1e6 * gradient(theta, step))
    laws.assert_close(found, ours(DoWG(), 50, normal(10)), 1e-9)


def test_without_a_gradient_nothing_moves_and_the_first_one_begins():
    theta = normal(10)
    trail = ours(DoWG(), 4, theta, lambda theta, step: gradient(theta, step) * (step >= 2))
    laws.assert_same(trail[:2], theta.expand(2, 10))
    laws.assert_close((trail[2] - theta).norm(), torch.tensor(0.01, dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_is_seen_in_its_row_and_in_no_other(bad):
    def spoilt(theta, step):
        at = torch.zeros_like(theta, dtype=torch.bool)
        at[1, 4] = step == 2
        return gradient(theta, step).masked_fill(at, bad)

    rows = ours(DoWG(), 5, normal(2, 10), spoilt, batch=(2,))
    laws.assert_close(rows[:, 0], ours(DoWG(), 5, normal(2, 10)[0]))
    assert rows[:2].isfinite().all()
    assert not rows[2, 1, 4].isfinite()


def test_a_sum_that_overflows_is_no_rate_of_0():
    """It would stand still for good, without a word."""
    theta = normal(10).float()
    trail = ours(DoWG(), 4, theta, lambda theta, step: gradient(theta, step) * (1e19 if step == 2 else 1))
    assert trail[:2].isfinite().all()
    assert trail[2:].isnan().all()


def test_a_run_that_has_diverged_is_saved_and_loaded():
    params = parameters()
    optimizer = LearnedOptimizer(params, "dowg")
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    for _ in range(2):
        optimizer.step()
    again = LearnedOptimizer(params, "dowg")
    again.load_state_dict(optimizer.state_dict())
    assert again.state[params[0]]["square_distance"].isnan()


def stepped(optimizer, params, steps):
    """The values after some steps on the bumpy loss."""
    for step in range(steps):
        for param, g in zip(params, bumpy([param.detach() for param in params], step), strict=True):
            param.grad = g
        optimizer.step()
    return [param.detach() for param in params]


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(value) for value in start(dtype).values()]


def test_its_norms_are_over_a_groups_parameters():
    """One group is the whole; of two groups each has a distance and a rate of its own."""
    params = parameters()
    one = stepped(LearnedOptimizer(params, "dowg"), params, 12)
    laws.assert_close(torch.cat([value.reshape(-1) for value in one]), expected(12)[-1], 1e-9)
    params = parameters()
    two = stepped(LearnedOptimizer([{"params": [param]} for param in params], "dowg"), params, 12)
    apart = ([], [])
    trail = list(start(torch.float64).values())
    for step in range(12):
        grads = bumpy(trail, step)
        for own, g in zip(apart, grads, strict=True):
            own.append(g)
        trail = [
            by_definition([value], lambda _, step, own=own: [own[step]], step + 1)[-1][0]
            for value, own in zip(start(torch.float64).values(), apart, strict=True)
        ]
    laws.assert_close(two, trail, 1e-9)
    assert (two[0] - one[0]).abs().max() > 1e-3


def test_a_state_in_bfloat16_is_worked_on_in_one_piece(monkeypatch):
    """From a start that bfloat16 can say, to the bit as in float32."""
    monkeypatch.setattr(blocks, "BLOCK", 3)
    found = []
    for dtype in ("float32", "bfloat16"):
        params = [torch.nn.Parameter(value.bfloat16().float()) for value in start(torch.float32).values()]
        optimizer = LearnedOptimizer(params, "dowg", state_dtype=dtype)
        found.append(stepped(optimizer, params, 20))
        assert {str(optimizer.state[param]["start"].dtype) for param in params} == {f"torch.{dtype}"}
    laws.assert_same(*found)


def test_its_sums_grow_on_in_bfloat16():
    """In bfloat16 a sum stops growing once what is added is below 1/256 of it, and the rate would stop falling."""
    optimiser, generator = DoWG(), torch.Generator()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        theta = torch.zeros(20, dtype=dtype)
        state = optimiser.init(Layout(("w",), ((20,),)), like=theta)
        generator.manual_seed(0)
        for _ in range(1500):
            noise = 0.5 * torch.randn(20, generator=generator)
            update, state = optimiser.update((theta - 1 + noise).to(dtype), state, theta)
            assert update.dtype == dtype
            theta = theta + update
        found[dtype] = float(state.shared["weighted_squares"])
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.1)


def test_nothing_is_a_layout():
    empty = torch.zeros(0)
    update, state = DoWG().update(empty, DoWG().init(Layout((), ()), like=empty), empty)
    assert update.shape == (0,)
    assert state.shared["step"] == 1


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"initial_distance": 0.0}, {"initial_distance": float("nan")}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        DoWG(**options)
