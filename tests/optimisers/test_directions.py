"""Directions against singular value decompositions, loops and `torch.optim`."""

from dataclasses import replace

import pytest
import torch
from implementations import normal, step_inputs

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.groupings import Shards
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout
from l2lopt.optimisers import directions
from l2lopt.optimisers.directions import (
    COEFFICIENTS,
    DIRECTIONS,
    LARGE,
    Adam,
    Orthogonalised,
    Sign,
    newton_schulz,
    orthogonalised,
)

LAYOUT = Layout.of(
    {
        "wide": torch.zeros(3, 5),
        "tall": torch.zeros(5, 3),
        "bias": torch.zeros(4),
        "convolution": torch.zeros(3, 5, 1, 1),
        "square": torch.zeros(4, 4),
        "qkv": torch.zeros(12, 4),
        "embed": torch.zeros(6, 4),
        "scalar": torch.zeros(()),
    }
)


def by_values(matrix, name):
    """The polynomials applied to the singular values one by one."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for a, b, c in COEFFICIENTS[name]:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(name, shape):
    matrices = normal(2, 3, *shape)
    found = newton_schulz(matrices, COEFFICIENTS[name])
    for index in ((0, 0), (1, 2)):
        torch.testing.assert_close(found[index], by_values(matrices[index], name), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("keller-jordan", 0.65, 1.21), ("you-jiacheng", 0.87, 1.13), ("polar-express", 0.85, 1.15)],
)
def test_singular_values_come_near_1(name, least, most):
    """From a fiftieth of the norm on."""
    u, v = (torch.linalg.qr(normal(40, 40, seed=seed))[0] for seed in (1, 2))
    s = torch.logspace(-1.3, 0, 40, dtype=torch.float64)
    s = s / s.norm()
    assert s.min() > 0.015
    found = torch.linalg.svdvals(newton_schulz(u @ torch.diag(s) @ v.mT, COEFFICIENTS[name]))
    assert least <= found.min()
    assert found.max() <= most


def test_matrices_are_turned_one_by_one_and_all_else_is_0():
    values = normal(2, LAYOUT.size)
    found = orthogonalised(values, LAYOUT)
    for row in range(2):
        own, given = LAYOUT.unravel(found[row]), LAYOUT.unravel(values[row])
        for name in ("wide", "tall", "convolution", "square"):
            matrix = given[name].reshape(given[name].shape[0], -1)
            torch.testing.assert_close(own[name].reshape(matrix.shape), newton_schulz(matrix), rtol=0, atol=1e-12)
        for third, whole in zip(own["qkv"].split(4), given["qkv"].split(4), strict=True):
            torch.testing.assert_close(third, newton_schulz(whole), rtol=0, atol=1e-12)
        for name in ("bias", "embed", "scalar"):
            assert not own[name].any()


def test_each_expert_is_turned_by_itself_and_steps_by_its_own_inputs():
    experts, bias, plain = torch.zeros(4, 6, 3), torch.zeros(4, 6), torch.zeros(4, 6, 3)
    layout = Layout.of({"experts.w": experts, "experts.w_bias": bias, "w": plain})
    assert layout.fan_ins == (3, 6, 18)
    values = normal(layout.size)
    own, given = layout.unravel(orthogonalised(values, layout)), layout.unravel(values)
    for found, matrix in zip(own["experts.w"], given["experts.w"], strict=True):
        torch.testing.assert_close(found, newton_schulz(matrix), rtol=0, atol=1e-12)
    assert not own["experts.w_bias"].any()
    torch.testing.assert_close(own["w"].flatten(1), newton_schulz(given["w"].flatten(1)), rtol=0, atol=1e-12)


def test_rows_and_columns_without_a_gradient_are_left_alone():
    matrix = normal(5, 4)
    matrix[2], matrix[:, 1] = 0, 0
    found = newton_schulz(matrix)
    assert not found[2].any()
    assert not found[:, 1].any()


def test_zeros_stay_zeros_and_have_a_derivative():
    values = torch.zeros(LAYOUT.size, dtype=torch.float64, requires_grad=True)
    found = orthogonalised(values, LAYOUT)
    found.sum().backward()
    assert not found.any()
    assert values.grad.isfinite().all()


def test_the_derivative_is_right():
    layout = Layout.of({"w": torch.zeros(3, 2), "b": torch.zeros(2), "v": torch.zeros(2, 3)})
    values = normal(2, layout.size).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: orthogonalised(x, layout), values)


def test_bfloat16_products_are_near():
    values = normal(LAYOUT.size).float()
    found = orthogonalised(values, LAYOUT, precision=torch.bfloat16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, orthogonalised(values, LAYOUT), rtol=0, atol=0.05)


@pytest.mark.parametrize("able", [True, False])
def test_large_matrices_are_multiplied_in_bfloat16_where_the_processor_can(monkeypatch, able):
    monkeypatch.setattr(directions, "_cpu_multiplies_bfloat16", lambda: able)
    layout = Layout.of({"large": torch.zeros(LARGE, LARGE + 1), "small": torch.zeros(LARGE - 1, LARGE + 1)})
    for values in (normal(3, layout.size).float(), normal(3, layout.size)):
        found, own = orthogonalised(values, layout), orthogonalised(values, layout, precision=values.dtype)
        large, small = (a == b for a, b in zip(layout.split(found), layout.split(own), strict=True))
        assert bool(large.all()) != (able and values.dtype == torch.float32)
        assert small.all()


def test_precision_goes_by_the_matrix_alone(monkeypatch):
    """Runs side by side are computed as each by itself."""
    monkeypatch.setattr(directions, "_cpu_multiplies_bfloat16", lambda: True)
    layout = Layout.of({"large": torch.zeros(LARGE, LARGE)})
    values = normal(3, layout.size).float()
    each = torch.stack([orthogonalised(row, layout) for row in values])
    torch.testing.assert_close(orthogonalised(values, layout), each, rtol=0, atol=1e-5)


def test_no_tensors():
    assert orthogonalised(torch.zeros(2, 0), Layout((), ())).shape == (2, 0)


def test_only_matrices_are_gathered_from_other_processes():
    """Here from one process, which has all of every tensor."""
    asked = []

    def gather(names, values):
        asked.append((tuple(names), len(values)))
        return values

    shards = Shards(LAYOUT.shapes, lambda sums: sums, gather=gather, part=lambda names, values: values)
    cut, values = replace(LAYOUT, shards=shards), normal(LAYOUT.size)
    found = cut.whole("orthogonalised", orthogonalised, values, "matrix")
    assert torch.equal(found, orthogonalised(values, LAYOUT))
    matrices = [k for k, role in enumerate(LAYOUT.roles) if role.kind == "matrix"]
    assert asked == [(tuple(LAYOUT.names[k] for k in matrices), sum(LAYOUT.sizes[k] for k in matrices))]
    vectors = replace(Layout.of({"bias": torch.zeros(4)}), shards=shards._replace(shapes=((4,),)))
    assert not vectors.whole("orthogonalised", orthogonalised, values[:4], "matrix").any()
    assert len(asked) == 1


def stepped(direction, steps=4):
    memory = {name: torch.zeros(LAYOUT.size).double() for name in direction.memory}
    for t in range(1, steps + 1):
        inputs = step_inputs(normal(LAYOUT.size, seed=t), torch.zeros(LAYOUT.size).double(), t, layout=LAYOUT)
        found, memory = direction(inputs, memory)
    return found[0]


@pytest.mark.parametrize("name", DIRECTIONS)
def test_features_and_memory_are_as_declared(name):
    direction = DIRECTIONS[name]()
    memory = {key: torch.zeros(2, LAYOUT.size).double() for key in direction.memory}
    inputs = step_inputs(normal(2, LAYOUT.size), torch.zeros(2, LAYOUT.size).double(), 1, layout=LAYOUT)
    found, after = direction(inputs, memory)
    assert found.shape == (1, 2, LAYOUT.size)
    assert [*after] == [*direction.memory]


def test_adams_direction_is_adams():
    param = torch.nn.Parameter(torch.zeros(LAYOUT.size).double())
    adam = torch.optim.Adam([param], lr=1.0, betas=(0.9, 0.99))
    for t in range(1, 5):
        before, param.grad = param.detach().clone(), normal(LAYOUT.size, seed=t)
        adam.step()
    torch.testing.assert_close(-stepped(Adam()), param.detach() - before)


def test_the_sign_is_lions():
    m = torch.zeros(LAYOUT.size).double()
    for t in range(1, 5):
        g = normal(LAYOUT.size, seed=t)
        expected, m = torch.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
    assert torch.equal(stepped(Sign()), expected)


def test_the_orthogonalised_direction_is_nesterovs_on_matrices_and_adams_elsewhere():
    m, found, adam = torch.zeros(LAYOUT.size).double(), stepped(Orthogonalised()), stepped(Adam())
    for t in range(1, 5):
        m = 0.9 * m + 0.1 * normal(LAYOUT.size, seed=t)
    turned = orthogonalised(0.9 * m + 0.1 * normal(LAYOUT.size, seed=4), LAYOUT)
    for role, own, ns, other in zip(LAYOUT.roles, *map(LAYOUT.split, (found, turned, adam)), strict=True):
        torch.testing.assert_close(own, ns if role.kind == "matrix" else other)


def test_a_role_decides():
    values, layout = normal(12), Layout(("w",), ((4, 3),), roles=(Role("embedding"),))
    assert not orthogonalised(values, layout).any()


@pytest.mark.parametrize("options", [{"coefficients": "jordan"}, {"precision": "float8"}, {"betas": (0.9, 1.0)}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        registry.build(DIRECTIONS, "direction", {"name": "orthogonalised", **options})
