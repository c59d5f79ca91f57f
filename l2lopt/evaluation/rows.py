"""Free runs side by side between two steps, and the checkpoint that they go on from."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError
from l2lopt.core.types import Carry
from l2lopt.optimisee import Split
from l2lopt.storage.checkpoint import Checkpoint, NoCheckpoint, fitting, pack, unpack

LOOK_EVERY, CHECKPOINT_EVERY = 5.0, 300.0
"""Seconds of steps between two looks at the clock, and the least between two checkpoints of runs; a checkpoint takes a
twentieth of the time at most."""
_log = logging.getLogger("l2lopt")


class Rows:
    """Runs side by side, between two steps or after the last.

    Attributes:
        carry: Parameters, aux and state of the optimiser before the next step.
        first: Losses on the first batch, [S].
        losses: Split → the losses of each reading, [S].
        step: Number of steps made.
        readings: Number of readings.
        seconds: Time of the steps.
        reading: Time of the readings.
    """

    def __init__(self, carry: Carry, splits: Sequence[Split]) -> None:
        self.carry, self.first = carry, carry.params.new_full(carry.params.shape[:1], torch.inf)
        self.losses: dict[Split, list[Tensor]] = {split: [] for split in splits}
        self.step, self.readings, self.seconds, self.reading = 0, 0, 0.0, 0.0
        self._saved, self._cost = time.monotonic(), 0.0

    def ahead(self, mark: int) -> int:
        """How many steps to make before the next look at the clock, up to a reading.

        The first step is by itself, as its losses are asked for.
        """
        pace = 1 if self.step == 0 else int(LOOK_EVERY * self.step / max(self.seconds, 1e-9))
        return max(1, min(pace, mark - self.step))

    def due(self) -> bool:
        """Whether the time since the last checkpoint is worth another."""
        return time.monotonic() - self._saved >= max(CHECKPOINT_EVERY, 20 * self._cost)

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves where the runs are, if that is due."""
        if isinstance(checkpoint, NoCheckpoint) or not self.due():
            return
        start = time.monotonic()
        place = {name: getattr(self, name) for name in ("first", "losses", "step", "readings", "seconds", "reading")}
        packed, tensors = pack({"carry": pytree.tree_leaves(self.carry), **place})
        try:
            checkpoint.save({"place": packed}, tensors)
        except (UserError, OSError) as error:  # a full disk ends no run: it has hours behind it
            _log.warning("no checkpoint of the runs: %s", error)
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, if there is one of these runs; any other is as good as none."""
        try:
            if saved := checkpoint.load():
                place = unpack(saved[0]["place"], saved[1])
                leaves, structure = pytree.tree_flatten(self.carry)
                pairs = zip(place.pop("carry"), leaves, strict=True)
                carry = pytree.tree_unflatten([_as(leaf, like) for leaf, like in pairs], structure)
                first = _as(place.pop("first"), self.first)
                losses = {split: [_as(read, first) for read in place["losses"][split]] for split in self.losses}
                self.__dict__ |= place | {"carry": carry, "first": first, "losses": losses}
        except (UserError, LookupError, TypeError, ValueError, AttributeError):
            return


def _as(value: Any, like: Any) -> Any:
    """What a checkpoint has in place of a value."""
    return fitting(value, like).to(like.device) if isinstance(like, Tensor) else value
