"""The hierarchical rule's step in place against the reference."""

import laws
import pytest
import torch
from implementations import hierarchical, normal

from l2lopt import kernels
from l2lopt.core.layout import Layout
from l2lopt.kernels.cpu.hierarchical import FusedHierarchical, runs_of
from l2lopt.optimisers.facts import FACTS

SHAPES = {
    "wide": (3, 5),
    "bias": (3,),
    "tall": (5, 3),
    "scalar": (),
    "convolution": (3, 5, 1, 1),
    "qkv": (12, 4),
    "embed.weight": (6, 4),
    "square": (4, 4),
    "norm": (3,),
}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
WIDE = Layout.of({"filters": torch.zeros(32, 8, 3, 3), "bias": torch.zeros(32), "tall": torch.zeros(70, 33)})


def run(update, optimiser, layout=LAYOUT, steps=5, dtype=torch.float64, gradient=None, batch=(), losses=True):
    theta = normal(*batch, layout.size, seed=1).to(dtype)
    state, trail = optimiser.init(layout, batch, like=theta, total_steps=20), []
    for step in range(steps):
        g = normal(*batch, layout.size, seed=50 + step).to(dtype) * (1 + step)
        g = g if gradient is None else gradient(g, step)
        loss = theta.square().sum(-1) if losses else None
        change, state = update(g, state, theta, loss=loss)
        trail.append((change.clone(), laws.clone(state.coordinates)))
        theta = theta + change
    return trail, state.groups, state.shared


def both(**options):
    plain = hierarchical(**options).requires_grad_(False)
    fused = kernels.fuse(plain, "cpu")
    assert isinstance(fused, FusedHierarchical)
    assert kernels.fuse(fused) is fused
    assert fused.phi() == plain.phi()
    return plain, fused


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cell": "none", "controls": ["step"], "facts": ["progress", "weight-size"]},
        {"controls": ["mix", "decay"], "mix": "logit", "facts": [*FACTS][::2], "schedule": "linear"},
    ],
)
def test_the_step_in_place_is_the_references(options):
    plain, fused = both(**options)
    laws.assert_close(run(fused.update_, fused), run(plain.update, plain), 1e-10)
    laws.assert_same(run(fused.update, fused), run(fused.update_, fused))


def test_in_float32_it_is_near():
    plain, fused = both()
    single = torch.float32
    plain.float()
    laws.assert_close(run(fused.update_, fused, dtype=single), run(plain.update, plain, dtype=single), 2e-4)


@pytest.mark.parametrize("layout", [LAYOUT, WIDE])
def test_what_the_memory_held_before_does_not_matter(layout):
    fused = both()[1]
    wanted = run(fused.update_, fused, layout)
    (tensors,) = fused._plans.values()
    batches = [
        (batch.x, batch.y, batch.gram, batch.square, batch.factor, batch.spare) for batch in tensors.plan.batches
    ]
    for memory in (tensors.adam, tensors.plan.update, *sum(batches, ())):
        memory.fill_(torch.nan)
    laws.assert_same(run(fused.update_, fused, layout), wanted)


def test_the_state_of_a_single_row_is_overwritten():
    fused, g = both()[1], normal(1, LAYOUT.size)
    state = fused.init(LAYOUT, (1,), like=g)
    _, after = fused.update_(g, state, normal(1, LAYOUT.size, seed=1), loss=torch.ones(1))
    assert after.coordinates["m"].data_ptr() == state.coordinates["m"].data_ptr()


def bad(g, step):
    return g.masked_fill(torch.arange(g.shape[-1]) % 7 == 0, float("nan")) if step % 2 else g


def idle(g, step):
    values = LAYOUT.unravel(g.clone())
    values["qkv"].zero_()
    if step > 2:
        values["wide"].zero_()
        values["bias"].zero_()
    return LAYOUT.ravel(values)


@pytest.mark.parametrize("gradient", [bad, idle, lambda g, step: g * (1e-8 if step else 0.0)])
def test_gradients_that_are_not_finite_or_zero(gradient):
    plain, fused = both()
    found, wanted = (run(update, plain, gradient=gradient) for update in (fused.update_, plain.update))
    laws.assert_close(found, wanted, 1e-9)


@pytest.mark.parametrize(
    ("layout", "batch", "losses"),
    [
        (LAYOUT, (2,), True),
        (LAYOUT, (1,), True),
        (LAYOUT, (1,), False),
        (WIDE, (), True),
        (LAYOUT, (), False),
        (Layout(("bias",), ((4,),)), (), True),
        (Layout(("w", "none"), ((4, 6), (0, 3))), (), True),
    ],
)
def test_any_layout(layout, batch, losses):
    plain, fused = both()
    ours, theirs = (run(one.update_, one, layout, batch=batch, losses=losses) for one in (fused, plain))
    laws.assert_close(ours, theirs, 1e-10)


def test_where_a_derivative_is_wanted_it_is_the_references():
    plain = hierarchical()
    fused, theta = kernels.fuse(plain), normal(LAYOUT.size, seed=1)
    state, g = plain.init(LAYOUT, like=theta), normal(LAYOUT.size)
    found, wanted = (rule.update(g, state, theta, loss=theta.sum())[0].square().sum() for rule in (fused, plain))
    laws.assert_same(*(torch.autograd.grad(one, list(plain.parameters())) for one in (found, wanted)))


def test_runs_are_the_tensors_of_one_size_and_kind_at_equal_distances():
    shapes = ((2, 3), (3,), (2, 3), (3,), (2, 3), (6,), (3,), (2, 3))
    layout = Layout(tuple("abcdefgh"), shapes)
    flat = normal(layout.size)
    runs = runs_of(layout)
    assert [run.places for run in runs] == [(0, 2, 4), (7,), (1, 3), (6,), (5,)]
    assert [run.matrix for run in runs] == [True, True, False, False, False]
    parts = layout.split(flat)
    for one in runs:
        laws.assert_same(one.view(flat), torch.stack([parts[place] for place in one.places]))
