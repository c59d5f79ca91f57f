"""Seeds that are functions of a key."""

import random

import numpy as np
import pytest

from l2lopt.core.seeding import other_generators, seed_of


def test_equal_integers_give_equal_seeds():
    """NumPy's among them, which have a `repr` of their own."""
    for number in (-3, 0, 5):
        assert seed_of("batch", np.int64(number), np.int32(7)) == seed_of("batch", number, 7)
    assert seed_of("batch", 0) != seed_of("batch", 1) != seed_of("init", 1)


def test_what_is_no_integer_is_refused():
    with pytest.raises(TypeError):
        seed_of("batch", 1.0)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn, lambda: np.random.randint(9)])
def test_a_draw_from_a_global_generator_shows(draw):
    before = other_generators()
    assert other_generators() == before
    draw()
    assert other_generators() != before
