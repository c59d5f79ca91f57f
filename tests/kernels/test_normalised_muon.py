"""The harness's step in place against the reference."""

import laws
import pytest
import torch
from implementations import normal

from l2lopt import kernels, optimisers
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout
from l2lopt.kernels.cpu.normalised_muon import FusedNormalisedMuon, _Batch, _Member
from l2lopt.optimisers import directions

SHAPES = {
    "wide": (3, 5),
    "bias": (3,),
    "tall": (5, 3),
    "scalar": (),
    "convolution": (3, 5, 1, 1),
    "qkv": (12, 4),
    "embed.weight": (6, 4),
    "square": (4, 4),
    "experts.w": (3, 4, 5),
}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})


def run(update, optimiser, layout=LAYOUT, steps=6, dtype=torch.float64, gradient=None, batch=()):
    theta = normal(*batch, layout.size, seed=1).to(dtype)
    state, trail = optimiser.init(layout, batch, like=theta, total_steps=20), []
    for step in range(steps):
        g = normal(*batch, layout.size, seed=50 + step).to(dtype) * (1 + step)
        g = g if gradient is None else gradient(g, step)
        change, state = update(g, state, theta)
        trail.append((change.clone(), {name: value.clone() for name, value in state.coordinates.items()}))
        theta = theta + change
    return trail, state.groups, state.shared


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0, "schedule": "linear", "warm_up": 0.2},
        {"direction": {"name": "orthogonalised", "coefficients": "polar-express", "betas": [0.8, 0.95]}},
        {"direction": "adam"},
        {"embedding_scale": 10.0},
    ],
)
def test_the_step_in_place_is_the_references(options, dtype, tolerance):
    plain = optimisers.make("normalised-muon", **options)
    fused = kernels.fuse(plain, "cpu")
    assert isinstance(fused, FusedNormalisedMuon)
    laws.assert_close(run(fused.update_, fused, dtype=dtype), run(plain.update, plain, dtype=dtype), tolerance)


WIDE = Layout.of({"wide": torch.zeros(32, 100), "tall": torch.zeros(70, 33), "filters": torch.zeros(32, 8, 3, 3)})


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("coefficients", sorted(directions.COEFFICIENTS))
def test_wide_matrices_are_orthogonalised_by_their_squares(coefficients, dtype, tolerance):
    plain = optimisers.make("normalised-muon", direction={"name": "orthogonalised", "coefficients": coefficients})
    fused = kernels.fuse(plain)
    ours, theirs = (run(update, plain, WIDE, dtype=dtype) for update in (fused.update_, plain.update))
    assert [batch.of_squares for plan in fused._plans.values() for batch in plan.batches] == [True] * 3
    laws.assert_close(ours, theirs, tolerance)


@pytest.mark.parametrize("coefficients", sorted(directions.COEFFICIENTS))
@pytest.mark.parametrize("decades", [2, 6, None, "mean"])
def test_products_of_squares_bear_small_singular_values(coefficients, decades):
    rows, columns = 192, 1024
    left = torch.linalg.qr(normal(rows, rows, seed=3)).Q
    right = torch.linalg.qr(normal(columns, rows, seed=4)).Q
    if decades == "mean":  # all others are far below the largest
        matrix = 1 + 1e-4 * normal(rows, columns, seed=3)
    else:  # without decades: four equal singular values and zeros
        values = torch.logspace(0, -decades, rows) if decades else (torch.arange(rows) < 4)
        matrix = left @ values.double().diag() @ right.mT
    wanted = directions.newton_schulz(matrix, directions.COEFFICIENTS[coefficients])
    batch = _Batch([_Member(0, (1, rows, columns), 0)], torch.empty(0))
    batch.x.copy_(matrix)
    batch.orthogonalise(directions.COEFFICIENTS[coefficients])
    assert batch.of_squares
    assert (batch.x[0] - wanted).norm() <= 5e-3 * wanted.norm()  # bfloat16, in which Muon is at home, errs by 1e-2


def test_in_a_precision_that_is_asked_for_the_products_are_the_references():
    plain = optimisers.make("normalised-muon", direction={"name": "orthogonalised", "precision": "float32"})
    fused = kernels.fuse(plain)
    laws.assert_close(*(run(one, plain, WIDE, dtype=torch.float32) for one in (fused.update_, plain.update)), 2e-5)
    assert not any(batch.of_squares for plan in fused._plans.values() for batch in plan.batches)


def test_in_bfloat16_products_it_is_near():
    plain = optimisers.make("normalised-muon", direction={"name": "orthogonalised", "precision": "bfloat16"})
    fused = kernels.fuse(plain)
    ours, theirs = run(fused.update_, fused, dtype=torch.float32), run(plain.update, plain, dtype=torch.float32)
    laws.assert_close(ours, theirs, 0.05)


@pytest.mark.parametrize(("able", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_large_matrices_have_the_precision_of_the_reference(monkeypatch, able, precision):
    """On a processor with products in bfloat16 and on one without."""
    monkeypatch.setattr(directions, "_cpu_multiplies_bfloat16", lambda: able)
    layout = Layout.of({"large": torch.zeros(128, 130), "tall": torch.zeros(130, 128), "bias": torch.zeros(3)})
    plain = optimisers.make("normalised-muon")
    chosen = optimisers.make("normalised-muon", direction={"name": "orthogonalised", "precision": precision})
    for form in (lambda rule: rule, kernels.fuse):
        own, named = form(plain), form(chosen)
        found, wanted = (run(one.update, one, layout, dtype=torch.float32) for one in (own, named))
        laws.assert_close(found, wanted, 0.0)


def bad(g, step):
    return g.masked_fill(torch.arange(g.shape[-1]) % 7 == 0, float("nan")) if step % 2 else g


def idle(g, step):
    values = LAYOUT.unravel(g.clone())
    values["qkv"].zero_()
    if step > 2:
        values["wide"].zero_()
        values["bias"].zero_()
    return LAYOUT.ravel(values)


@pytest.mark.parametrize(
    ("gradient", "batch"), [(bad, ()), (bad, (1,)), (idle, ()), (lambda g, step: g * (1e-8 if step else 0.0), (1,))]
)
def test_gradients_that_are_not_finite_or_zero(gradient, batch):
    plain = optimisers.make("normalised-muon")
    fused = kernels.fuse(plain)
    found, wanted = (run(update, plain, gradient=gradient, batch=batch) for update in (fused.update_, plain.update))
    laws.assert_close(found, wanted, 1e-12)


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        (LAYOUT, (2,)),
        (LAYOUT, (1,)),
        (Layout(("bias",), ((4,),)), ()),
        (Layout(("w",), ((4, 6),)), ()),
        (Layout(("w", "none"), ((4, 6), (0, 3))), ()),
        (Layout(("w",), ((4, 6),), roles=(Role("matrix", 2),)), ()),
    ],
)
def test_any_layout(layout, batch):
    plain = optimisers.make("normalised-muon")
    fused = kernels.fuse(plain)
    laws.assert_close(
        run(fused.update_, fused, layout, batch=batch), run(plain.update, plain, layout, batch=batch), 1e-12
    )


@pytest.mark.parametrize("name", ["normalised-muon", "hierarchical"])
def test_a_subclass_keeps_its_own_update(name):
    made = optimisers.make(name)
    assert isinstance(kernels.fuse(made), kernels.FORMS)
    made.__class__ = type("Own", (type(made),), {"update": lambda *args, **options: None})
    assert kernels.fuse(made) is made


def test_a_rate_for_each_row_is_that_of_the_reference():
    plain = optimisers.make("normalised-muon", lr=torch.tensor([0.02], dtype=torch.float64))
    laws.assert_close(run(kernels.fuse(plain).update_, plain, batch=(1,)), run(plain.update, plain, batch=(1,)), 1e-12)


def test_what_is_not_in_place_has_the_same_bits_and_changes_nothing():
    fused = kernels.fuse(optimisers.make("normalised-muon"))
    laws.assert_same(run(fused.update, fused), run(fused.update_, fused))
    laws.assert_optimiser_changes_nothing(fused)


def test_where_a_derivative_is_wanted_it_is_the_references():
    plain = optimisers.make("normalised-muon")
    fused, theta = kernels.fuse(plain), normal(LAYOUT.size, seed=1).requires_grad_()
    state, g = plain.init(LAYOUT, like=theta), normal(LAYOUT.size)
    found, wanted = (
        torch.autograd.grad(rule.update(g * theta, state, theta)[0].square().sum(), theta) for rule in (fused, plain)
    )
    laws.assert_same(found, wanted)


def test_layouts_may_take_turns():
    plain = optimisers.make("normalised-muon")
    fused, other = kernels.fuse(plain), Layout(("w",), ((4, 6),))
    for layout in (LAYOUT, other, LAYOUT):
        laws.assert_close(run(fused.update_, fused, layout), run(plain.update, plain, layout), 1e-12)


@pytest.mark.parametrize("batch", [(), (1,)])
def test_the_state_is_overwritten_and_the_gradient_is_not(batch):
    fused = kernels.fuse(optimisers.make("normalised-muon"))
    g, theta = normal(*batch, LAYOUT.size), normal(*batch, LAYOUT.size, seed=1)
    state, kept = fused.init(LAYOUT, batch, like=g), (g.clone(), theta.clone())
    _, after = fused.update_(g, state, theta)
    assert after.coordinates["m"].data_ptr() == state.coordinates["m"].data_ptr()
    assert torch.equal(g, kept[0])
    assert torch.equal(theta, kept[1])
