"""DRAW's window: the filters by their definition, and where it looks."""

import math

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import normal
from torch.func import vmap

from l2lopt.core.errors import UserError
from optimisees.draw.attention import window


def numbers(across=0.0, down=0.0, variance=0.01, stride=1.0, intensity=1.0, dtype=torch.float32):
    """Five numbers in the form in which a network gives them."""
    logs = (math.log(value) for value in (variance, stride, intensity))
    return torch.tensor([across, down, *logs], dtype=dtype)


def pictures(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def by_definition(five, size, height, width):
    """(F_Y, F_X, γ) as lists, a number at a time, pixels numbered from 0."""
    across, down, log_variance, log_stride, log_intensity = five
    stride = (max(height, width) - 1) / (size - 1) * math.exp(log_stride)
    banks = []
    for place, pixels in ((down, height), (across, width)):
        centre = (pixels - 1) / 2 + (pixels + 1) / 2 * place
        bank = []
        for i in range(size):
            mu = centre + (i - (size - 1) / 2) * stride
            row = [math.exp(-((a - mu) ** 2) / (2 * math.exp(log_variance))) for a in range(pixels)]
            bank.append([weight / sum(row) for weight in row])
        banks.append(bank)
    return (*banks, math.exp(log_intensity))


@pytest.mark.parametrize(("size", "height", "width"), [(2, 5, 5), (3, 4, 7), (5, 6, 4)])
def test_read_and_write_are_their_definition(size, height, width):
    five = 0.4 * normal(3, 5, seed=1)
    images, patches = normal(3, 2, height, width, seed=2), normal(3, 2, size, size, seed=3)
    view = window(five, size, height, width)
    seen, painted = view.read(images), view.write(patches)
    for b in range(3):
        rows, columns, gamma = by_definition(five[b].tolist(), size, height, width)
        for c in range(2):
            for i in range(size):
                for j in range(size):
                    total = sum(
                        rows[i][y] * images[b, c, y, x].item() * columns[j][x]
                        for y in range(height)
                        for x in range(width)
                    )
                    assert seen[b, c, i, j].item() == pytest.approx(gamma * total, rel=1e-12, abs=1e-14)
            for y in range(height):
                for x in range(width):
                    total = sum(
                        rows[i][y] * patches[b, c, i, j].item() * columns[j][x]
                        for i in range(size)
                        for j in range(size)
                    )
                    assert painted[b, c, y, x].item() == pytest.approx(total / gamma, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("size", [8, 28])
def test_a_window_over_the_whole_image_gives_the_image_back(size):
    images = pictures(2, 3, size, size)
    view = window(numbers().expand(2, 5), size, size, size)
    torch.testing.assert_close(view.read(images), images, rtol=0, atol=1e-5)
    torch.testing.assert_close(view.write(images), images, rtol=0, atol=1e-5)
    assert view.rectangle().tolist() == [[0.0, 0.0, size - 1, size - 1]] * 2


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("variance", [0.03, 0.01, 1e-4])
@pytest.mark.parametrize("intensity", [0.5, 1.0, 2.0])
def test_writing_and_then_reading_is_the_identity(stride, variance, intensity):
    """For small filters whose centres lie on pixels."""
    patches, size, pixels = pictures(2, 3, 5, 5), 5, 21
    five = numbers(0.0, 0.0, variance, stride * (size - 1) / (pixels - 1), intensity)
    view = window(five.expand(2, 5), size, pixels, pixels)
    torch.testing.assert_close(view.stride, torch.full((2,), float(stride)))
    torch.testing.assert_close(view.read(view.write(patches)), patches, rtol=0, atol=1e-5)


@given(x=st.integers(0, 12), y=st.integers(0, 10), stride=st.integers(1, 4))
def test_the_window_moves_where_the_centre_says(x, y, stride):
    """An axis at a time: the middle filter of three sees the pixel of its centre, whatever the stride."""
    width, height, size = 13, 11, 3
    image = torch.zeros(1, height, width, dtype=torch.float64)
    image[0, y, x] = 1.0
    across, down = (x - (width - 1) / 2) / ((width + 1) / 2), (y - (height - 1) / 2) / ((height + 1) / 2)
    five = numbers(across, down, 0.01, stride * (size - 1) / (width - 1), dtype=torch.float64)
    view = window(five, size, height, width)
    laws.assert_close(view.centre, torch.tensor([y, x], dtype=torch.float64), 1e-9)
    assert view.read(image)[0, 1, 1].item() == pytest.approx(1.0)
    laws.assert_close(view.rectangle(), torch.tensor([y - stride, x - stride, y + stride, x + stride]).double(), 1e-9)
    for axis, (other, start) in enumerate(((0.1, across), (0.1, down))):
        moved = five.clone()
        moved[axis] = start + other
        after = window(moved, size, height, width)
        pixels = width if axis == 0 else height
        assert (after.centre - view.centre).tolist() == pytest.approx(
            [0.0, 0.1 * (pixels + 1) / 2] if axis == 0 else [0.1 * (pixels + 1) / 2, 0.0]
        )
        assert torch.equal(after.columns if axis else after.rows, view.columns if axis else view.rows)


def test_a_filter_far_outside_has_a_finite_gradient():
    five = numbers(across=50.0, variance=1e-3).requires_grad_()
    view = window(five, 3, 8, 8)
    view.read(pictures(1, 8, 8)).sum().backward()
    assert view.columns.sum(-1).tolist() == pytest.approx([1.0] * 3)
    assert five.grad.isfinite().all()


def test_a_filter_of_no_width_is_the_nearest_pixel():
    five = torch.tensor([0.02, 0.02, -120.0, 0.0, 0.0], requires_grad=True)
    view = window(five, 8, 8, 8)
    assert torch.equal(view.columns, torch.eye(8))
    view.read(pictures(1, 8, 8)).sum().backward()
    assert five.grad.isfinite().all()


def test_rows_of_windows_are_separate_windows():
    five, images = 0.3 * normal(2, 4, 5), normal(2, 4, 3, 6, 6, seed=1)
    mapped = vmap(lambda five, images: window(five, 3, 6, 6).read(images))(five, images)
    laws.assert_close(mapped, torch.stack([window(five[k], 3, 6, 6).read(images[k]) for k in range(2)]))


def test_one_filter_has_no_stride():
    with pytest.raises(UserError, match="attention: size: expected at least 2, found 1"):
        window(torch.zeros(5), 1, 8, 8)
