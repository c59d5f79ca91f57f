"""Fast twins of the learned optimisers: the same numbers, sharing φ with a reference that never knows them."""

import logging
from functools import cache

from l2lopt.errors import UserError, did_you_mean
from l2lopt.kernels.cpu import CPU, refusal
from l2lopt.optimisers import Coordinatewise, Optimiser

BACKENDS = ("auto", "reference", "cpu")


def fast(optimiser: Optimiser, backend: str = "auto") -> Optimiser:
    """The optimiser in the form that `backend` names, sharing its parameters.

    Args:
        optimiser: the reference.
        backend: "reference" gives it back; "cpu" gives its twin; "auto" the twin where there is one, and logs its
            choice, each once.

    Raises:
        UserError: for an unknown backend, and for "cpu" where there is no twin, with the reason.
    """
    if backend not in BACKENDS:
        remedy = did_you_mean(backend, BACKENDS)
        raise UserError("backend", expected="a known name", found=repr(backend), remedy=remedy)
    if backend == "reference" or isinstance(optimiser, CPU):
        return optimiser
    if backend == "auto":
        reason = refusal(optimiser)
        _log("cpu" if reason is None else "reference", reason)
        if reason is not None:
            return optimiser
    return CPU(optimiser)


@cache
def _log(choice: str, reason: str | None) -> None:
    logging.getLogger("l2lopt").info("backend auto: %s%s", choice, "" if reason is None else f", as {reason}")


__all__ = ["BACKENDS", "CPU", "Coordinatewise", "fast", "refusal"]
