"""Fast twins of the learned optimisers: the same numbers, sharing φ with a reference that never knows them."""

import logging
from functools import partial

from l2lopt.errors import UserError, did_you_mean
from l2lopt.kernels.cpu import CPU, refusal
from l2lopt.kernels.replay import can_pull, pull, refusal_to_replay, replay
from l2lopt.kernels.workspace import Workspace
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.types import BlockUpdate, Pull, Replay, Update
from l2lopt.unrolls.blockwise import taped_pull

BACKENDS = ("auto", "reference", "cpu")
choices: set[tuple[str, str | None]] = set()
"""What "auto" has logged: (choice, reason)."""


def fast(optimiser: Optimiser, backend: str = "auto") -> Optimiser:
    """The optimiser in the form that `backend` names, sharing its parameters.

    Args:
        optimiser: the reference.
        backend: "reference" gives it back; "cpu" gives its twin; "auto" the twin where there is one, and logs each
            choice once.

    Raises:
        UserError: for an unknown backend, and for "cpu" where there is no twin, with the reason.
    """
    if backend not in BACKENDS:
        remedy = did_you_mean(backend, BACKENDS)
        raise UserError("backend", expected="a known name", found=repr(backend), remedy=remedy)
    if backend == "reference" or isinstance(optimiser, CPU):
        return optimiser
    reason = refusal(optimiser)
    if backend == "auto":
        _log("cpu" if reason is None else "reference", reason)
    if reason is None:
        assert isinstance(optimiser, Coordinatewise)  # `refusal` has looked at it
        return CPU(optimiser)
    if backend == "auto":
        return optimiser
    expected = "an LSTM or IHC-LSTM rule of the library's inputs and rules, float32 or float64 on the CPU"
    remedy = "choose 'reference', or 'auto' to have the twin only where there is one"
    raise UserError("backend 'cpu'", expected=expected, found=reason, remedy=remedy)


def block_update(optimiser: Optimiser, backend: str = "auto") -> Update:
    """What an unroll is given of an optimiser: its update, with a fast step and a fast way back where there are any.

    Args:
        optimiser: the reference.
        backend: as in `fast`; where only the step is fast, the way back is autograd's.

    Raises:
        UserError: see `fast`.
    """
    twin, space = fast(optimiser, backend), Workspace()
    if not isinstance(twin, CPU):
        plain = optimiser.update_with
        return BlockUpdate(plain, plain, pull=taped_pull(plain)) if can_pull(optimiser) else plain
    reference = twin.reference
    back: Replay | None = None
    pulled: Pull | None = taped_pull(reference.update_with)
    if refusal_to_replay(reference) is None:
        back, pulled = partial(replay, reference, space=space), partial(pull, reference, space=space)
    return BlockUpdate(reference.update_with, twin.advance_with, back, pulled if can_pull(reference) else None)


def _log(choice: str, reason: str | None) -> None:
    if (choice, reason) not in choices:
        choices.add((choice, reason))
        logging.getLogger("l2lopt").info("backend auto: %s%s", choice, "" if reason is None else f", as {reason}")


__all__ = ["BACKENDS", "CPU", "block_update", "choices", "fast", "refusal"]
