"""Backpropagation through a module patched by the `higher` library (Grefenstette et al. 2019)."""

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.types import Aux, Batch, Carry, InnerStep, Loss, ModuleLoss, Update
from l2lopt.estimators.backprop import Backprop
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator

_WARNINGS = (
    (r"invalid escape sequence '\\ '", r"(.*/)?higher/utils"),
    (r"\"is\" with (a|'int') literal\. Did you mean \"==\"\?", r"(.*/)?higher/optim"),
)
"""What compiling `higher` 0.2.1 warns of: (message, module)."""


class Higher(MetaGradientEstimator):
    """The meta-gradient of second order, the loss computed by `higher`'s functional copy of its module.

    `higher` gives each layer of a copy a forward that takes its weights from the call, so that these stay on the tape
    as functions of φ (Grefenstette et al. 2019, Generalized Inner Loop Meta-Learning). Meta-loss, targets and windows
    are those of `Backprop` in second order, whose loop runs here too, so value and gradient are the same. What differs
    is who computes the loss: the two check one another.

    Buffers are handed over with each call as the weights are: running statistics by aux, dropout masks by the batch.

    It refuses a loss that is no `ModuleLoss`, as `higher` patches modules only, and rows θ [S, n]: a patched module
    holds its weights and moves its buffers in place, so it is one run's at a time and out of `vmap`'s reach.

    Args:
        window: K, the steps of a window; None for the whole call.
        objective: "loss" or "log-loss".
    """

    old_options: ClassVar[dict[str, str]] = {"truncation": "window"}

    @checks_words
    def __init__(self, window: int | None = None, objective: Literal["loss", "log-loss"] = "loss") -> None:
        self._backprop = Backprop(2, window, objective)

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """Nothing is kept."""
        return ()

    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs and differentiates; see `MetaGradientEstimator`."""
        remedy = "use the estimator 'backprop' with order = 2"
        if not isinstance(loss, ModuleLoss):
            found = f"{type(loss).__name__}: higher patches modules only"
            raise UserError("estimator 'higher': loss", expected="a ModuleLoss", found=found, remedy=remedy)
        if carry.params.dim() != 1:
            found = f"{list(carry.params.shape)}: a patched module holds the weights of one run"
            raise UserError("estimator 'higher': parameters", expected="a single run, [n]", found=found, remedy=remedy)
        return self._backprop(update, _patched(loss), phi, carry, steps, state)


def _patched(loss: ModuleLoss) -> Loss:
    """The same loss, computed by a functional copy of the module; for single runs."""
    module, criterion, unpack = loss.parts
    # With track_higher_grads the copy would keep the weights of every call; what is on the tape does not depend on it.
    functional = library().monkeypatch(module, track_higher_grads=False)
    names = [name for name, _ in module.named_parameters()]
    first = {buffer: name for name, buffer in module.named_buffers()}
    places = []  # a layer that stands at two places is two layers in the copy, with one tensor for both
    for path, buffer in module.named_buffers(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        places.append((functional.get_submodule(owner), name, first[buffer]))

    def patched(params: Tensor, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        moved = {name: value.clone() for name, value in aux.items()}  # the module updates its buffers in place
        inputs, targets, given = unpack(batch)
        buffers, weights = moved | given, moved | loss.layout.unravel(params)
        for layer, name, source in places:
            setattr(layer, name, buffers[source])
        outputs = functional(inputs, params=[weights[name] for name in names])
        return criterion(outputs, targets), moved

    return patched


def library() -> Any:
    """The library, imported when it is first needed and without the warnings of its compilation."""
    with warnings.catch_warnings():
        for message, module in _WARNINGS:
            warnings.filterwarnings("ignore", message, module=module)
        import higher
    return higher
