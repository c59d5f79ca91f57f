"""Fast twins of the learned optimisers: the same numbers, sharing φ with a reference that never knows them."""

import logging
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.layout import Params
from l2lopt.core.types import Update
from l2lopt.estimators.window import AdjointOfMean, BlockUpdate, MeanAdjoint, Replay, Window
from l2lopt.kernels import recorded, triton
from l2lopt.kernels.cpu.hierarchical import FusedHierarchical
from l2lopt.kernels.cpu.normalised_muon import FusedNormalisedMuon
from l2lopt.kernels.cpu.replay import refusal_to_replay, replay
from l2lopt.kernels.cpu.step import CPU, refusal
from l2lopt.kernels.cpu.workspace import Workspace
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.kernels.phi_rows import FusedOverPhi, FusedPhiRows, RowSteps
from l2lopt.optimisers import Coordinatewise, Hierarchical, NormalisedMuon, Optimiser
from l2lopt.optimisers.phi_rows import PhiRows

BACKENDS = ("auto", "reference", "cpu", "triton")
FORMS = (FusedOptimiser, FusedNormalisedMuon, FusedHierarchical, FusedPhiRows)
"""The fused forms."""
choices: set[tuple[str, str | None]] = set()
"""What "auto" has logged: (choice, reason)."""


def fuse(optimiser: Optimiser, backend: str = "auto") -> Optimiser:
    """The optimiser in the form that `backend` names, sharing its parameters.

    Args:
        optimiser: The reference; one that has a fused form already is given back.
        backend: "reference" gives it back; "cpu" and "triton" give its twin for the CPU or a GPU; "auto" the twin
            where there is one for the device it is on, and logs each choice once. A twin of the harness or of a rule
            per tensor takes the reference's steps where its own do not reach, as for another direction.

    Raises:
        UserError: For an unknown backend, and for "cpu" or "triton" where there is no twin, with the reason.
    """
    if backend not in BACKENDS:
        remedy = did_you_mean(backend, BACKENDS)
        raise UserError("backend", expected="a known name", found=repr(backend), remedy=remedy)
    if backend == "reference" or isinstance(optimiser, FORMS):
        return optimiser
    # The class itself: a subclass may have an update of its own.
    if type(optimiser) is NormalisedMuon and backend != "triton":
        return FusedNormalisedMuon(optimiser)
    if type(optimiser) is Hierarchical and backend != "triton":
        return FusedHierarchical(optimiser)
    if isinstance(optimiser, PhiRows):
        one = fuse(optimiser.reference, backend)
        if isinstance(one, FusedOptimiser):
            return FusedPhiRows(optimiser, partial(type(one), one.reference))
        if backend == "auto":
            return optimiser
        expected, found = "rows of a coordinatewise rule", f"rows of a {type(optimiser.reference).__name__}"
        raise UserError(f"backend {backend!r}", expected=expected, found=found, remedy="choose 'auto'")
    wanted = backend if backend != "auto" else _of_its_device(optimiser)
    reason = (triton.refusal if wanted == "triton" else refusal)(optimiser)
    if backend == "auto":
        _log(wanted if reason is None else "reference", reason)
    if reason is None:
        assert isinstance(optimiser, Coordinatewise)  # its refusal has looked at it
        return _triton(optimiser) if wanted == "triton" else CPU(optimiser)
    if backend == "auto":
        return optimiser
    kind = "float32 on a GPU" if wanted == "triton" else "float32 or float64 on the CPU"
    expected = f"an LSTM or IHC-LSTM rule of the library's inputs and rules, {kind}"
    remedy = "choose 'reference', or 'auto' to have the twin only where there is one"
    raise UserError(f"backend {wanted!r}", expected=expected, found=reason, remedy=remedy)


def block_update(optimiser: Optimiser, backend: str = "auto") -> Update:
    """The update of an optimiser as an estimator takes it, with a fused step and a replay by hand where there are any.

    Args:
        optimiser: The reference.
        backend: One of `BACKENDS`, see `fuse`; where only the step has a fused form, autograd goes back.

    Raises:
        UserError: For what `fuse` refuses.
    """
    twin, space = fuse(optimiser, backend), Workspace()
    if not isinstance(twin, FusedOptimiser):
        plain = optimiser.update_with
        return BlockUpdate(plain, plain, local=optimiser.coordinatewise, row_steps=RowSteps(plain))
    reference = twin.reference
    rows = RowSteps(reference.update_with, FusedOverPhi(partial(type(twin), reference)))
    if refusal_to_replay(reference) is not None:
        return BlockUpdate(reference.update_with, twin.update_with_, row_steps=rows)
    back: Replay = partial(replay, reference, space=space)
    at_once = None
    if not isinstance(twin, CPU):
        # Imported late: it imports Triton itself, which not every machine has.
        from l2lopt.kernels.triton import replay as on_gpu

        back, at_once = partial(on_gpu.replay, reference), on_gpu.AT_ONCE
    linked: tuple[str, ...] | None = None if reference.rule.statistic else ()
    adjoint: AdjointOfMean | None = None
    if recorded.has_statistic_adjoint(reference):
        linked, adjoint = (recorded.MEAN,), _adjoint_of_statistic(reference)
    return BlockUpdate(reference.update_with, twin.update_with_, back, linked, adjoint, at_once, row_steps=rows)


def _adjoint_of_statistic(optimiser: Coordinatewise) -> AdjointOfMean:
    """The adjoint of the one mean that there is, as an estimator asks for it."""

    def of_mean(phi: Params, window: Window, adjoints: Mapping[str, MeanAdjoint], key: str) -> Tensor:
        return recorded.statistic_adjoint(optimiser, phi, window)

    return of_mean


def _of_its_device(optimiser: Optimiser) -> str:
    """The twin that suits where φ lies."""
    return "triton" if any(value.is_cuda for value in optimiser.phi().values()) else "cpu"


def _triton(optimiser: Coordinatewise) -> FusedOptimiser:
    from l2lopt.kernels.triton.step import Triton  # imports Triton itself, which not every machine has

    return Triton(optimiser)


def _log(choice: str, reason: str | None) -> None:
    if (choice, reason) not in choices:
        choices.add((choice, reason))
        logging.getLogger("l2lopt").info("backend auto: %s%s", choice, "" if reason is None else f", as {reason}")


__all__ = ["BACKENDS", "CPU", "block_update", "choices", "fuse", "refusal"]
