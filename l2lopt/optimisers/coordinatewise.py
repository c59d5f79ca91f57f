"""The coordinatewise learned optimiser: one small recurrent network, shared by all coordinates, a state for each.

Andrychowicz et al. 2016, with the cell of Kuo et al. 2020, section V-C.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l2lopt import cells
from l2lopt.cells.cell import Cell, affine
from l2lopt.core import registry
from l2lopt.core.errors import UserError, finite
from l2lopt.core.layout import Layout, Params
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import seeded
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step, zeros
from l2lopt.optimisers.directions import DIRECTIONS
from l2lopt.optimisers.inputs import INPUTS, Input, Loss, StepInputs
from l2lopt.optimisers.rules import RULES, UpdateRule

SEEN = {**INPUTS, **DIRECTIONS}
"""All that a rule can be given to see."""


class Coordinatewise(Optimiser):
    """Inputs → linear embedding → cell → linear head → update rule, the same for every coordinate.

    With x_k the inputs of coordinate k, e = W_e x_k + b_e, (h, s') = cell(e, s), o = W_o h + b_o and the update from
    the rule. A coordinate whose gradient (or its square) is not finite gets the update 0, keeps its state and counts as
    0 in a mean over its tensor; `state.shared["skipped"]` [*batch] counts such events. One whose gradient
    stays 0 comes to rest, and does not move before it has had another (see `rules.activity`). Per coordinate the state
    takes the cell's numbers and the inputs' memory (42 for an LSTM of 20 and `rnnprop`'s means).

    Args:
        inputs: name → input.
        cell: Cell of any input and hidden size.
        rule: Update rule, which turns the head's outputs into updates.
        head_scale: Factor of the head's initial weights, small for small first updates.
    """

    def __init__(self, inputs: Mapping[str, Input], cell: Cell, rule: UpdateRule, head_scale: float = 0.1) -> None:
        super().__init__()
        finite("coordinatewise", head_scale=head_scale)
        missing = [name for name in rule.needs if name not in inputs]
        if missing:
            found = ", ".join(inputs) or "none"
            raise UserError("inputs", expected=f"{', '.join(missing)} for this rule", found=found, remedy="add it")
        if not inputs:
            raise UserError("inputs", expected="at least one", found="none", remedy=f"choose from {', '.join(SEEN)}")
        self.inputs = nn.ModuleDict(inputs)
        self.embedding = nn.Linear(sum(item.size for item in inputs.values()), cell.input_size)
        self.cell = cell
        self.head = nn.Linear(cell.hidden_size, rule.outputs)
        with torch.no_grad():
            self.head.weight.mul_(head_scale)
            self.head.bias.zero_()
        self.rule = rule
        self.groupings = ("tensors",) if rule.statistic else ()
        self.needs_loss = any(isinstance(item, Loss) for item in inputs.values())

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The cell's initial state and empty memories: one coordinate's, expanded to all, which takes no memory."""
        zero = zeros(Layout(("any",), ((1,),)), batch, like)
        one = {f"{name}.{key}": zero.clone() for name, item in self._inputs().items() for key in item.memory}
        x = zero.expand(self.cell.input_size, *zero.shape)
        one |= {f"cell.{key}": value for key, value in self.cell.initial_state(x).items()}
        one |= {f"rule.{key}": zero.clone() for key in self.rule.memory}
        coordinates = {key: value.expand(*value.shape[:-1], layout.size) for key, value in one.items()}
        shared = {"step": zero_step(zero), "skipped": zero.new_zeros(tuple(batch), dtype=torch.int64)}
        return OptimiserState(layout, coordinates, {}, shared)

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """One step of the network for every coordinate; about 60 small tensor operations whatever n is."""
        good = grads.square().isfinite()  # the inputs square it
        step = state.shared["step"] + 1
        # `where` and not a product with the mask: 0 · ∞ is NaN.
        step_inputs = StepInputs(grads.where(good, 0.0), params, step, loss, state.layout, good)
        features: dict[str, Tensor] = {}
        coordinates: dict[str, Tensor] = {}
        for name, item in self._inputs().items():
            features[name], memory = item(step_inputs, _part(state.coordinates, name))
            coordinates |= {f"{name}.{key}": value for key, value in memory.items()}
        x = affine(self.embedding.bias, (self.embedding.weight, torch.cat(list(features.values()))))
        h, memory = self.cell(x, _part(state.coordinates, "cell"))
        coordinates |= {f"cell.{key}": value for key, value in memory.items()}
        outputs = affine(self.head.bias, (self.head.weight, h))
        update, memory = self.rule(outputs, features, step_inputs, _part(state.coordinates, "rule"))
        coordinates |= {f"rule.{key}": value for key, value in memory.items()}
        # In the state's own order, which is what a checkpoint's places go by.
        kept = {key: torch.where(good, coordinates[key], value) for key, value in state.coordinates.items()}
        shared = {"step": step, "skipped": state.shared["skipped"] + (~good).sum(-1)}
        return update.where(good, 0.0), OptimiserState(state.layout, kept, {}, shared)

    def _inputs(self) -> dict[str, Input]:
        return dict(self.inputs.items())  # type: ignore[arg-type]  # a ModuleDict forgets what its modules are


def _part(coordinates: Params, owner: str) -> Params:
    """What `owner` keeps, under its own names."""
    return {key.removeprefix(f"{owner}."): value for key, value in coordinates.items() if key.startswith(f"{owner}.")}


def coordinatewise(
    inputs: Sequence[Choice] = ("log-and-sign", "rnnprop", "log-step"),
    cell: Choice = "lstm",
    hidden_size: int = 20,
    rule: Choice = "direction-and-magnitude",
    head_scale: float = 0.1,
    seed: int = 0,
) -> Coordinatewise:
    """A coordinatewise optimiser from choices by name.

    Args:
        inputs: Any of `inputs.INPUTS` and `directions.DIRECTIONS`.
        cell: Any of `cells.CELLS`.
        hidden_size: The cell's input and hidden size.
        rule: Any of `rules.RULES`.
        head_scale: Factor of the head's initial weights.
        seed: Seed of the initial values of φ.
    """
    names = [item if isinstance(item, str) else str(item.get("name")) for item in inputs]
    if len(set(names)) < len(names):
        raise UserError("inputs", expected="each at most once", found=", ".join(names), remedy="drop the repeated one")
    # Modules draw their first values from the global generator: in the block φ depends on the seed alone.
    with seeded(seed):
        built: dict[str, Any] = {
            # "module:Input" may hold dots, which a ModuleDict refuses in a key
            name.replace(".", "/"): registry.checked_kind("input", item, registry.build(SEEN, "input", item), Input)
            for name, item in zip(names, inputs, strict=True)
        }
        network = cells.build(cell, hidden_size, hidden_size)
        update_rule = registry.checked_kind("rule", rule, registry.build(RULES, "rule", rule), UpdateRule)
        return Coordinatewise(built, network, update_rule, head_scale)
