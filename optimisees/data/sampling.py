"""Which samples of a set in memory a batch, an epoch and an evaluation are made of."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.seeding import seed_of
from l2lopt.optimisee import Split


class Sampling:
    """Indices of samples, drawn without replacement within an epoch; an incomplete last batch is dropped.

    Args:
        train: Number of training samples.
        test: Number of test samples.
        batch_size: Samples a step.
        heldout: The share of training samples that each seed holds out of the split `inner`.
        evaluation_samples: Number of a split's samples in an evaluation, of `train` and `test` always the same;
            None: all.
        valid: Number of validation samples, where the data have some: they are the split `heldout` then, and `inner`
            are all training samples.

    Raises:
        UserError: For values out of range.
    """

    def __init__(
        self,
        train: int,
        test: int,
        batch_size: int,
        heldout: float,
        evaluation_samples: int | None = None,
        valid: int | None = None,
    ) -> None:
        if not 0 <= heldout < 1:
            raise UserError("heldout", expected="a share in [0, 1)", found=str(heldout), remedy="change the value")
        above_0("optimisee", evaluation_samples=1 if evaluation_samples is None else evaluation_samples)
        if not 1 <= batch_size <= train:
            expected = f"from 1 to the {train} training samples"
            raise UserError("batch_size", expected=expected, found=str(batch_size), remedy="change the value")
        if test < 1:
            raise UserError("test", expected="at least one test sample", found="none", remedy="give some")
        self.train, self.test, self.batch_size, self.heldout = train, test, batch_size, heldout
        self.evaluation_samples, self.valid = evaluation_samples, valid

    @property
    def alike(self) -> tuple[Split, ...]:
        """The splits that are the same for all seeds."""
        return ("train", "test") if self.valid is None else ("train", "inner", "heldout", "test")

    def members(self, split: Split, seed: int) -> Tensor:
        """All of the split's samples, in no order."""
        if split in self.alike:
            return torch.arange({"test": self.test, "heldout": self.valid or 0}.get(split, self.train))
        order = _permutation(self.train, seed_of("heldout", seed))
        kept = self.train - int(self.heldout * self.train)
        members = order[:kept] if split == "inner" else order[kept:]
        if not len(members):
            remedy = "raise heldout, or leave held-out samples out of the meta-loss"
            raise UserError("heldout", expected="samples held out", found="none", remedy=remedy)
        return members

    def drawn(self, split: Split, seed: int, first: int, count: int) -> Tensor:
        """The batches of `count` steps from `first` on, [count, batch_size], or all of a split that is smaller."""
        chosen = self.members(split, seed)
        size = min(self.batch_size, len(chosen))
        steps = len(chosen) // size  # of an epoch
        found = []
        for epoch in range(first // steps, (first + count - 1) // steps + 1):
            # A seed for each epoch: the batch of any step is found without those before it.
            order = _permutation(len(chosen), seed_of("order", split, seed, epoch))
            low, high = max(first - epoch * steps, 0), min(first + count - epoch * steps, steps)
            found.append(chosen[order[low * size : high * size]].view(-1, size))
        return torch.cat(found)

    def evaluated(self, split: Split, seed: int) -> Tensor:
        """Indices of the samples that an evaluation uses."""
        members, few = self.members(split, seed), self.evaluation_samples
        if few is not None and few < len(members):
            # Not by the run's seed: of `train` and `test` all runs are evaluated on the same samples.
            members = members[_permutation(len(members), seed_of("evaluation samples", split))[:few]]
        return members

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """The step at which pass `number` of full batches begins."""
        samples = len(self.members(split, seed))
        return number * (samples // min(self.batch_size, samples))


def _permutation(count: int, seed: int) -> Tensor:
    """An order of `count` samples; the last ones asked for are kept, of large sets few."""
    kept = next(kept for limit, kept in _KEPT.items() if count <= limit)
    return kept(count, seed)


def _drawn(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


_KEPT = {limit: lru_cache(maxsize)(_drawn) for limit, maxsize in ((100_000, 256), (1_000_000, 64), (math.inf, 48))}
"""Largest number of samples → the function that draws their order and keeps some: 20 runs side by side need 40."""
