"""The harness: an orthogonalised direction of a relative size, a schedule to a known end, and a decay tied to it."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from l2lopt.core import registry
from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError, above_0, at_least_0
from l2lopt.core.kinds import matrix_view
from l2lopt.core.layout import Layout
from l2lopt.core.registry import Choice
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step, zeros
from l2lopt.optimisers.directions import DIRECTIONS
from l2lopt.optimisers.inputs import Input, StepInputs
from l2lopt.optimisers.rates import Rate, check_rate, per_row
from l2lopt.optimisers.rules import root_mean_square
from l2lopt.optimisers.schedules import to_the_end

REST = 0.9
"""Factor of the step for every update since a tensor's gradient has been 0 throughout."""


def usual_embedding_scale(shape: Sequence[int]) -> float:
    """√(words / columns), at least 1 and at most √columns: the factor of an embedding's step.

    A table of no more words than columns moves as a matrix does, and no number of words makes its step larger than η.

    Args:
        shape: Words and columns.

    Example:
        >>> from l2lopt.optimisers.normalised_muon import usual_embedding_scale
        >>> usual_embedding_scale((64, 64)), usual_embedding_scale((12800, 200)), usual_embedding_scale((10**6, 64))
        (1.0, 8.0, 8.0)
    """
    rows, columns = matrix_view(shape)
    return math.sqrt(min(max(rows / max(columns, 1), 1.0), max(columns, 1)))


class NormalisedMuon(Optimiser):
    """The harness of everything learned, and an optimiser without a rate to tune.

    u = −η s_t (a r d / RMS(d) + λ θ), the root mean square taken over each tensor's coordinates:

    - d, the direction: by default the orthogonalised Nesterov momentum of matrices and Adam's direction elsewhere
      (`directions.Orthogonalised`);
    - r = 1/√fan-in (`Layout.fan_ins`), the usual size of initial weights, to which η is relative; of embeddings
      `embedding_scale` times that: most of many words are in few batches, and want larger steps in these;
    - s_t, the schedule: linear to 1 over 5 % of the run, then a half cosine to 0 at its end (`total_steps` of `init`).
      Where the end is unknown: linear over 10 updates, then 1 / (1 + t/100);
    - a = 0.9ᵏ, k the number of updates since the tensor has last had a gradient other than 0: a direction of fixed size
      would go on for ever.

    A coordinate whose gradient is not finite gets the update 0 and keeps its state.

    8 bytes of state a parameter in float32. Of a step's time most are the five Newton-Schulz steps of every matrix.

    Args:
        lr: η > 0. The default and the decay of 0.1 are one setting for many networks; small sigmoid ones want more.
        weight_decay: λ ≥ 0.
        direction: Any of `directions.DIRECTIONS`, by name or by name and options.
        schedule: Fall after the warm-up where the end is known: "cosine", "linear", "warm-up-stable-decay", "constant".
        warm_up: Share of the updates over which the step rises, in [0, 1).
        embedding_scale: Factor of the step of embeddings, also where a head is tied to one; None for
            `usual_embedding_scale` of each.

    Raises:
        UserError: For a value out of its range.

    Example:
        >>> import torch, l2lopt
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = l2lopt.LearnedOptimizer(model.parameters(), {"name": "normalised-muon"})
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> _ = optimizer.step()
    """

    groupings = ("tensors",)
    knows_end = True

    @checks_words
    def __init__(
        self,
        lr: Rate = 0.03,
        weight_decay: float = 0.1,
        direction: Choice = "orthogonalised",
        schedule: Literal["cosine", "linear", "warm-up-stable-decay", "constant"] = "cosine",
        warm_up: float = 0.05,
        embedding_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.schedule, self.warm_up = check_rate(lr), weight_decay, schedule, warm_up
        at_least_0("normalised-muon", weight_decay=weight_decay)
        if embedding_scale is not None:
            above_0("normalised-muon", embedding_scale=embedding_scale)
        self.embedding_scale = embedding_scale
        if not 0 <= warm_up < 1:
            remedy = "give the share of the updates"
            raise UserError("normalised-muon: warm_up", expected="in [0, 1)", found=str(warm_up), remedy=remedy)
        made = registry.build(DIRECTIONS, "direction", direction)
        self.direction: Input = registry.checked_kind("direction", direction, made, Input)

    def scales(self, layout: Layout, like: Tensor) -> Tensor:
        """Each tensor's factor of the step beside r, [*batch, tensors] like `like`."""
        found = [1.0] * len(layout.names)
        for index, (shape, role) in enumerate(zip(layout.whole_shapes, layout.roles, strict=True)):
            if role.kind == "embedding":
                found[index] = usual_embedding_scale(shape) if self.embedding_scale is None else self.embedding_scale
        return layout.tensors.each(found, like)

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The direction's running values and each tensor's idle updates at 0, and the number of steps of the run."""
        coordinates = {name: zeros(layout, batch, like) for name in self.direction.memory}
        none = zeros(Layout(("any",), ((0,),)), batch, like)
        groups = {"tensors": {"idle": none.new_zeros(*batch, layout.tensors.count)}}
        step = zero_step(none)
        return OptimiserState(layout, coordinates, groups, {"step": step, "total_steps": step + (total_steps or 0)})

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """−η s_t (a r d / RMS(d) + λ θ)."""
        layout, step = state.layout, state.shared["step"] + 1
        finite = grads.square().isfinite()
        seen = StepInputs(grads.where(finite, 0.0), params, step, loss, layout, finite)
        (direction,), memory = self.direction(seen, state.coordinates)
        memory = {name: torch.where(finite, memory[name], value) for name, value in state.coordinates.items()}
        tensors, idle = layout.tensors, state.groups["tensors"]["idle"]
        moves = tensors.mean("moves", (seen.grads != 0).to(grads.dtype)) > 0
        idle = torch.where(moves, 0.0, idle + 1)
        size = self.scales(layout, idle) * REST**idle / root_mean_square(direction, layout, by_fan_in=True)
        shared = state.shared
        factor = to_the_end(self.schedule, shared["step"], shared["total_steps"], self.warm_up).to(grads)
        update = tensors.spread(size) * direction + self.weight_decay * params
        update = -per_row(self.lr, grads) * factor * update
        after = OptimiserState(layout, memory, {"tensors": {"idle": idle}}, {**shared, "step": step})
        return update.where(finite, 0.0), after
