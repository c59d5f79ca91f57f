"""Pictures of painting: where pixels, steps and rectangles come to lie."""

import numpy as np
import pytest
import torch
from PIL import Image

from optimisees.draw.pictures import animation, progress_grid

INK, GAP = (255, 70, 60), 2


def painted(steps, count, channels=1, side=8):
    """Image k at step t is of the grey (t + 1) · 10 + k in all channels; the rectangles go from pixel 2 to 5."""
    values = (torch.arange(steps) + 1)[:, None] * 10.0 + torch.arange(count)
    images = (values / 255)[..., None, None, None].expand(-1, -1, channels, side, side)
    return images, torch.tensor([2.0, 1.0, 5.0, 6.0]).expand(steps, count, 4)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_an_image_and_a_column_a_step(tmp_path, channels):
    images, rectangles = painted(5, 3, channels)
    with Image.open(progress_grid(tmp_path / "grid.png", images, rectangles)) as file:
        pixels = np.asarray(file.convert("RGB"))
    cell = 112 + GAP
    assert pixels.shape == (3 * cell - GAP, 5 * cell - GAP, 3)
    for k in range(3):
        for t in range(5):
            part = pixels[k * cell : k * cell + 112, t * cell : t * cell + 112]
            inked = (part == INK).all(-1)
            assert (part[~inked] == 10 * (t + 1) + k).all()
            rows, columns = np.nonzero(inked.any(1))[0], np.nonzero(inked.any(0))[0]
            assert (rows[0], rows[-1], columns[0], columns[-1]) == (35, 77, 21, 91)  # pixels 2 to 5 and 1 to 6 by 14
            assert not inked[50, 50]


def test_of_many_steps_the_last_is_shown_and_of_few_all(tmp_path):
    images, _ = painted(20, 1)
    with Image.open(progress_grid(tmp_path / "grid.png", images, None, columns=4)) as file:
        shown = np.asarray(file.convert("L"))[0, 56 :: 112 + GAP]
    assert shown.tolist() == [10, 70, 140, 200]
    with Image.open(progress_grid(tmp_path / "grid.png", images[:2], None)) as file:
        assert file.width == 2 * 112 + GAP


def test_the_animation_has_every_step_and_the_last_one_twice(tmp_path):
    images, rectangles = painted(3, 5)
    with Image.open(animation(tmp_path / "film.gif", images, rectangles)) as film:
        assert film.n_frames == 4
        assert film.size == (3 * 112 + 2 * GAP, 2 * 112 + GAP)
        inked = []
        for t in range(4):
            film.seek(t)
            frame = np.asarray(film.convert("RGB")).astype(int)
            assert abs(frame[0, 0] - 10 * (min(t, 2) + 1)).max() <= 3
            inked.append(bool((abs(frame - INK).max(-1) < 20).any()))
            assert film.info["duration"] == (120 if t < 3 else 2000)
    assert inked == [True, True, True, False]


def test_what_is_not_finite_or_out_of_range_is_drawn_all_the_same(tmp_path):
    images = torch.tensor([[[[[float("nan"), -3.0], [7.0, 0.5]]]]])
    rectangles = torch.tensor([[[-50.0, -50.0, 80.0, 80.0]]])
    with Image.open(progress_grid(tmp_path / "grid.png", images, rectangles)) as file:
        assert np.asarray(file.convert("L"))[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == [0, 0, 255, 128]
