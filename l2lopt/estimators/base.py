"""The contract of an estimator of meta-gradients. It knows neither cells nor problems; it gets functions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.types import Carry, InnerStep, Loss, Update
from l2lopt.estimators.memory_plan import Plan

EstimatorState: TypeAlias = Any
"""What an estimator keeps between two calls: a pytree of tensors, empty for backpropagation."""


@dataclass(frozen=True)
class MetaGradient:
    """What an estimator gives.

    Attributes:
        value: The meta-loss of these steps, Σ over steps and targets, mean over rows.
        gradient: dvalue/dφ, like φ.
        carry: State of the run after the last step, cut from the graph.
        losses: The inner steps' training losses, [T, *batch].
        finite: Value, gradient and parameters are all finite.
        state: Estimator state for the next call.
    """

    value: Tensor
    gradient: Params
    carry: Carry
    losses: Tensor
    finite: bool
    state: EstimatorState = ()


class MetaGradientEstimator(ABC):
    """A way to differentiate a run of inner steps with respect to φ."""

    old_names: ClassVar[tuple[str, ...]] = ()
    old_options: ClassVar[dict[str, str]] = {}
    # Configs of earlier versions stay readable by these, see `registry.build`.

    @abstractmethod
    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """What the estimator keeps between the calls of one run, a pytree whose structure stays.

        Args:
            carry: State of the run before its first step.
            phi: The meta-parameters.
            seed: Seed of all random numbers that the estimator draws for this run.
        """

    @abstractmethod
    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs `steps` from `carry` and differentiates what they measure.

        Args:
            update: (φ, gradient, state, θ, loss) → (update, state).
            loss: (θ, aux, batch) → (loss [*batch], aux).
            phi: The meta-parameters.
            carry: State of the run before these steps; a constant.
            steps: One for each inner step; read once, in order.
            state: Estimator state from `init` or the last call.
        """

    def plan(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[InnerStep], length: int
    ) -> Plan | None:
        """The memory and time of a call, estimated before it is made; None, as by default: they are not known.

        Args:
            update: The update that the call will be given.
            loss: The loss that the call will be given.
            phi: The meta-parameters.
            carry: The state of the run before the call.
            steps: The steps of the call; the first few may be read.
            length: The number of steps of the call.

        Raises:
            UserError: If the memory is not there.
        """
        return None


def check_state(where: str, state: EstimatorState) -> None:
    """Refuses the empty state of a call where an estimator needs what its `init` gives, or the last call."""
    if isinstance(state, tuple):
        raise UserError(where, expected="the estimator's state", found="none", remedy="pass what init gives")
