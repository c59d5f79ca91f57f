"""Seeds and random generators that are pure functions of a key."""

import hashlib
import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

import numpy as np
import torch


def seed_of(*key: str | int) -> int:
    """A seed in [0, 2⁶³) that is a pure function of `key`, the same on every machine and in every process."""
    # NumPy's integers, such as those of `numpy.arange`, are other than Python's in `repr` alone.
    key = tuple(part if isinstance(part, str | int) else index(part) for part in key)
    # Not `hash`: Python salts the hashes of strings anew in every process.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: str | int) -> torch.Generator:
    """A CPU generator seeded by `key`; equal keys give equal streams."""
    return torch.Generator().manual_seed(seed_of(*key))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global CPU generator under `seed` within the block, and as it was after it; other devices are left alone."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs as well, whose state is not put back afterwards.
        torch.default_generator.manual_seed(seed)
        yield


def other_generators() -> Hashable:
    """The states of Python's and of NumPy's global generators, which no seed of a run sets.

    Two that differ have a draw between them.
    """
    state: Any = np.random.get_state(legacy=False)
    parts = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state["state"].items()}
    return random.getstate(), repr((parts, state.get("has_gauss")))
