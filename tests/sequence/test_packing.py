"""oneDNN's packed products are tried out once a process, which leaves no trace and does not depend on the moment."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from l2lopt import sequence
from l2lopt.sequence.by_hand import products

WIDE = 64


@pytest.fixture(autouse=True)
def untried():
    """As in a new process."""
    products.packs.cache_clear()
    yield
    products.packs.cache_clear()


def test_the_first_call_draws_no_random_numbers():
    layer, x = sequence.make("lstm", WIDE, WIDE), torch.ones(2, 3, WIDE)
    before = torch.get_rng_state()
    layer(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_precision_of_new_tensors_does_not_matter():
    expected = products.packs()
    products.packs.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert products.packs() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_tensors_without_numbers_run_unpacked():
    expected = products.packs()
    products.packs.cache_clear()
    with FakeTensorMode():
        output, _ = sequence.make("irc-gru", WIDE, WIDE)(torch.ones(2, 3, WIDE))
    assert output.shape == (2, 3, WIDE)
    assert products.packs() == expected
