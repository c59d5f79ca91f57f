"""The hierarchical rule's step in place, for one run on the CPU."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState, Update
from l2lopt.kernels.cpu.normalised_muon import PLANS, Plan, is_one_row, of_one_row, suits
from l2lopt.optimisers import Hierarchical, Optimiser
from l2lopt.optimisers import facts as facts_module
from l2lopt.optimisers.directions import Adam
from l2lopt.optimisers.facts import SLOW
from l2lopt.optimisers.schedules import to_the_end

CHUNK = 2**15
"""Coordinates that a thread works on at once: their numbers stay in the cache from one operation to the next."""
STEERED = {"step", "decay", "mix"}
"""The controls of a rule that has a step in place."""


class Run(NamedTuple):
    """Tensors of one size, at equal distances in the flat vector: those of a network's alike layers, for instance.

    What is done to each tensor is then one operation for all of them: a network has hundreds of tensors, and an
    operation on a small one costs some microseconds whatever its size.

    Attributes:
        places: Places among the tensors of the layout.
        low: First coordinate.
        distance: Coordinates from the beginning of a tensor to the next one's.
        size: Coordinates of each tensor.
        matrix: Whether they are matrices.
    """

    places: tuple[int, ...]
    low: int
    distance: int
    size: int
    matrix: bool

    def view(self, flat: Tensor) -> Tensor:
        """Their coordinates, [tensors, size], of a vector [n]."""
        return flat.as_strided((len(self.places), self.size), (self.distance, 1), flat.storage_offset() + self.low)


def runs_of(layout: Layout) -> list[Run]:
    """The tensors of a layout in runs."""
    alike: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    low = 0
    for place, (size, role) in enumerate(zip(layout.sizes, layout.roles, strict=True)):
        alike.setdefault((size, role.kind == "matrix"), []).append((place, low))
        low += size
    runs = []
    for (size, matrix), members in alike.items():
        while members:
            distance = members[1][1] - members[0][1] if len(members) > 1 else size
            count = 1
            while count < len(members) and members[count][1] - members[count - 1][1] == distance:
                count += 1
            places = tuple(place for place, _ in members[:count])
            runs.append(Run(places, members[0][1], distance, size, matrix))
            members = members[count:]
    return runs


class _Tensors:
    """A layout's tensors in runs, and the memory for a step of the rule.

    Args:
        layout: Layout of one run's coordinates.
        like: Gradients of the run.
        precision: Dtype of the products; None chooses as `fast_precision` does.
    """

    def __init__(self, layout: Layout, like: Tensor, precision: torch.dtype | None) -> None:
        self.plan, self.runs = Plan(layout, like, precision), runs_of(layout)
        self.adam = torch.empty_like(like)
        places = torch.tensor([place for run in self.runs for place in run.places])
        self.order = places.argsort()
        self.places = [torch.tensor(run.places) for run in self.runs]
        self.sizes = like.new_tensor(layout.sizes)

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """Numbers per tensor of each run, to those of all tensors in the order of the layout, [tensors]."""
        return torch.cat(list(found))[self.order]

    def squares(self, flat: Tensor) -> Tensor:
        """The mean square of each tensor, [tensors]."""
        norms = [torch.linalg.vector_norm(run.view(flat), dim=-1) for run in self.runs]
        return self.joined(norms).square() / self.sizes

    def products(self, one: Tensor, other: Tensor) -> Tensor:
        """The mean of the product over each tensor, [tensors]."""
        found = [torch.bmm(run.view(one)[:, None], run.view(other)[..., None]).flatten() for run in self.runs]
        return self.joined(found) / self.sizes

    def largest(self, flat: Tensor) -> Tensor:
        """The largest size of each tensor's coordinates, [tensors]."""
        return self.joined([torch.linalg.vector_norm(run.view(flat), math.inf, dim=-1) for run in self.runs])


class FusedHierarchical(Optimiser):
    """The hierarchical rule whose `update_` works in place: the same states and numbers, to its products' rounding.

    For one run on the CPU, [n] or [1, n], with the controls step, decay and mix, and with finite gradients; for all
    else it is the reference. The network is the reference's. The passes over all coordinates are what the rule costs
    more than its harness, so these are few and go through the cache.

    Args:
        reference: The plain optimiser; its parameters are φ.
    """

    groupings, knows_end = Hierarchical.groupings, Hierarchical.knows_end

    def __init__(self, reference: Hierarchical) -> None:
        super().__init__()
        self.reference, self.description = reference, reference.description
        self.needs_loss = reference.needs_loss
        self._plans: dict[tuple[Layout, torch.dtype], _Tensors] = {}

    def init(
        self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None, total_steps: int | None = None
    ) -> OptimiserState:
        """The reference's."""
        return self.reference.init(layout, batch, like=like, total_steps=total_steps)

    def phi(self) -> Params:
        """The reference's."""
        return self.reference.phi()

    @property
    def update_with(self) -> Update:
        """The reference's."""
        return self.reference.update_with

    def update(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """The numbers of `update_`, to the bit, in memory of their own; the reference's where a tape is wanted."""
        leaves = [grads, params, loss, *self.phi().values(), *pytree.tree_leaves(state)]
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return self.reference.update(grads, state, params, loss=loss)
        own = {name: value.clone() for name, value in state.coordinates.items()}
        update, after = self.update_(grads, state._replace(coordinates=own), params, loss=loss)
        return update.clone(), after

    @torch.no_grad()
    def update_(
        self, grads: Tensor, state: OptimiserState, params: Tensor, *, loss: Tensor | None = None
    ) -> tuple[Tensor, OptimiserState]:
        """`update` without a tape and in place: it overwrites the state it is given and its own last result."""
        rule, layout = self.reference, state.layout
        harness, own, shared = rule.harness, state.coordinates, state.shared
        if not {*rule.controls} <= STEERED or isinstance(harness.lr, Tensor):
            return rule.update_(grads, state, params, loss=loss)
        if is_one_row(grads):
            return of_one_row(self, grads, state, params, loss)
        if not suits(grads, state, params):
            return rule.update_(grads, state, params, loss=loss)
        tensors = self._tensors(layout, grads, rule.direction.precision)
        largest = tensors.largest(grads)
        if not largest.max().square().isfinite():
            return rule.update_(grads, state, params, loss=loss)
        step = shared["step"] + 1
        adam, update, count = tensors.adam, tensors.plan.update, int(step)
        _running(grads, own, adam, rule.direction.adam, count)
        parts = {name: layout.split(value) for name, value in (("g", grads), ("m", own["m"]), ("u", update))}
        tensors.plan.orthogonalise(parts, rule.direction)
        memory = dict(state.groups["tensors"])
        memory["idle"] = torch.where(largest > 0, 0.0, memory["idle"] + 1)
        losses, remembered = facts_module.told(shared, loss) if rule.needs_loss else (None, {})
        rate = harness.lr * float(to_the_end(harness.schedule, shared["step"], shared["total_steps"], harness.warm_up))
        means = self._means(tensors, grads, own, params, count)
        outputs, memory = rule.steered(layout, means, memory, shared, losses, rate)
        controls = dict(zip(rule.controls, outputs, strict=True))
        weights = rule.weights(layout, self._products(tensors), controls, memory["idle"])
        decay = harness.weight_decay * rule.decay_factor(controls, memory["idle"])
        self._combined(tensors, params, -rate * torch.stack([*weights.values(), decay]))
        groups = {"tensors": {name: memory[name] for name in state.groups["tensors"]}}
        return update, OptimiserState(layout, own, groups, {**shared, "step": step, **remembered})

    def _means(self, tensors: _Tensors, grads: Tensor, own: Params, params: Tensor, count: int) -> Params:
        """The means that the facts look at, see `facts.MEANS`."""
        beta1, beta2 = self.reference.direction.adam.beta1, self.reference.direction.adam.beta2
        weight = 1 - beta1**count
        found = {
            "grads": lambda: tensors.squares(grads),
            "params": lambda: tensors.squares(params),
            "momentum": lambda: tensors.squares(own["m"]) / weight**2,
            "slow": lambda: tensors.squares(own["slow"]) / (1 - SLOW**count) ** 2,
            "square": lambda: (
                tensors.joined([run.view(own["v"]).mean(-1) for run in tensors.runs]) / (1 - beta2**count)
            ),
            "alignment": lambda: tensors.products(grads, own["m"]) / weight,
        }
        return {name: found[name]() for name in self.reference.means}

    def _products(self, tensors: _Tensors) -> dict[tuple[str, str], Tensor]:
        """The means of the products of the directions."""
        main, adam = tensors.plan.update, tensors.adam
        matrix = torch.cat([torch.full((len(run.places),), run.matrix) for run in tensors.runs])[tensors.order]
        of_adam = tensors.squares(adam)
        products = {("main", "main"): torch.where(matrix, tensors.squares(main), of_adam)}
        if "mix" in self.reference.controls:
            products["main", "adam"] = torch.where(matrix, tensors.products(main, adam), of_adam)
            products["adam", "adam"] = of_adam
        return products

    def _combined(self, tensors: _Tensors, params: Tensor, weights: Tensor) -> None:
        """Writes the sum of the directions and θ, times their weights [directions and 1, tensors], into the update."""
        *directions, decay = weights.to(params.dtype)
        for run, places in zip(tensors.runs, tensors.places, strict=True):
            main, adam, theta = (run.view(flat) for flat in (tensors.plan.update, tensors.adam, params))
            each = [one[places, None] for one in directions]
            if not run.matrix:
                torch.mul(adam, sum(each[1:], each[0]), out=main)
            else:
                main.mul_(each[0])
                if len(each) > 1:
                    main.addcmul_(adam, each[1])
            main.addcmul_(theta, decay[places, None])

    def _tensors(self, layout: Layout, like: Tensor, precision: torch.dtype | None) -> _Tensors:
        """What a step needs of a layout, made once while few layouts take turns."""
        key = layout, like.dtype
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            self._plans[key] = _Tensors(layout, like, precision)
        return self._plans[key]


def _running(grads: Tensor, own: Params, into: Tensor, adam: Adam, count: int) -> None:
    """The running means after this step in place, and Adam's direction into `into`.

    Args:
        grads: Gradients, [n].
        own: Running means "m", "v" and, if it is there, "slow".
        into: Memory for the direction, [n].
        adam: Direction with the rates.
        count: Number of this update, from 1.
    """
    chunk = CHUNK * torch.get_num_threads()
    first, second = 1 - adam.beta1**count, math.sqrt(1 - adam.beta2**count)
    for low in range(0, len(grads), chunk):
        g, m, v, d = (flat[low : low + chunk] for flat in (grads, own["m"], own["v"], into))
        m.lerp_(g, 1 - adam.beta1)
        v.mul_(adam.beta2).addcmul_(g, g, value=1 - adam.beta2)
        if "slow" in own:
            own["slow"][low : low + chunk].lerp_(g, 1 - SLOW)
        torch.sqrt(v, out=d).mul_(first / second).add_(adam.eps * first)
        torch.div(m, d, out=d)
