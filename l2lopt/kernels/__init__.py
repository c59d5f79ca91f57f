"""Fast twins of the learned optimisers: the same numbers, sharing φ with a reference that never knows them."""

import logging

from l2lopt.errors import UserError, did_you_mean
from l2lopt.kernels.cpu import CPU, refusal
from l2lopt.optimisers import Coordinatewise, Optimiser

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


def _log(choice: str, reason: str | None) -> None:
    if (choice, reason) not in choices:
        choices.add((choice, reason))
        logging.getLogger("l2lopt").info("backend auto: %s%s", choice, "" if reason is None else f", as {reason}")


__all__ = ["BACKENDS", "CPU", "choices", "fast", "refusal"]
