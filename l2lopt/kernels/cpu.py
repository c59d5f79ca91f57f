"""The coordinatewise learned optimiser's step on the CPU, in blocks that stay in cache."""

from collections import Counter
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.kernels import folding
from l2lopt.kernels.block import WIDTH, Block
from l2lopt.kernels.features import ROWS
from l2lopt.kernels.folding import Folded
from l2lopt.kernels.network import Buffers
from l2lopt.kernels.statistic import RootMeanSquare
from l2lopt.kernels.step import Step
from l2lopt.kernels.updates import UPDATES
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.optimisers.inputs import Sight
from l2lopt.threads import one_each, share_out
from l2lopt.types import Layout, OptimiserState, Params

CONTIGUOUS = torch.contiguous_format
KINDS = [{(torch.float32, "cpu")}, {(torch.float64, "cpu")}]


def refusal(optimiser: Optimiser) -> str | None:
    """Why an optimiser has no twin on the CPU, or None where it has one."""
    reason = folding.refusal(optimiser)
    if reason is not None:
        return reason
    assert isinstance(optimiser, Coordinatewise)
    for name, item in optimiser.inputs.items():
        if type(item) not in ROWS:
            return f"the input {name!r} is not one of the library's: {type(item).__name__}"
    if type(optimiser.rule) not in UPDATES:
        return f"the rule is not one of the library's: {type(optimiser.rule).__name__}"
    for name, value in optimiser.phi().items():
        if {(value.dtype, value.device.type)} not in KINDS:
            return f"{name} is {value.dtype} on {value.device}".replace("torch.", "")
    return None


class CPU(Optimiser):
    """The fast twin of a coordinatewise rule on an LSTM or an IHC-LSTM: the same φ, states and numbers.

    The linear layers are multiplied out (`folding.fold`), and a block of coordinates goes through inputs, product,
    activations, head and rule while it is in cache. The blocks are shared out to `torch.get_num_threads()` threads;
    nothing depends on their number. What a rule takes over a tensor is summed block by block in one order, and the
    update is finished in a second pass.

    Where a derivative may be asked for (φ or an argument needs one, or a `torch.func` transform is at work), `update`
    is the reference's.

    Args:
        reference: the plain optimiser, one that `refusal` lets pass; its parameters are φ.
    """

    def __init__(self, reference: Coordinatewise) -> None:
        super().__init__()
        self.reference = reference
        self.coordinatewise, self.description = reference.coordinatewise, reference.description
        self._update = torch.empty(0)
        self._idle: dict[torch.dtype, list[Buffers]] = {}
        self._folded: tuple[Params, Folded] | None = None

    def init(self, layout: Layout, batch: Sequence[int] = (), *, like: Tensor | None = None) -> OptimiserState:
        """The reference's."""
        return self.reference.init(layout, batch, like=like)

    def phi(self) -> Params:
        """The reference's."""
        return self.reference.phi()

    def update(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The reference's update and next state."""
        return self.update_with(self.phi(), grads, state, params, loss, after)

    def update_with(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The same as a function of φ."""
        leaves = pytree.tree_leaves((phi, grads, state, params, loss))
        taped = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        if taped or not _plain(phi, grads, state, params):
            return self.reference.update_with(phi, grads, state, params, loss, after)
        with torch.no_grad():
            fresh = {key: _empty(value) for key, value in state.coordinates.items()}
            with one_each() as threads:
                return self._step(threads, phi, grads, state, params, loss, after, fresh, _empty(grads))

    def advance(
        self,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """`update` without a tape and in place: it overwrites the state it is given and its own last result.

        From the second call on nothing is allocated. A state in memory that is not its own (expanded, or shared
        between its values) is copied first.
        """
        return self.advance_with(self.phi(), grads, state, params, loss, after)

    @torch.no_grad()
    def advance_with(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None = None,
        after: Params | None = None,
    ) -> tuple[Tensor, OptimiserState]:
        """The same as a function of φ."""
        if not _plain(phi, grads, state, params):
            return self.reference.update_with(phi, grads, state, params, loss, after)
        places = Counter(value.data_ptr() for value in state.coordinates.values())
        own = {
            key: value.contiguous() if places[value.data_ptr()] == 1 else value.clone(memory_format=CONTIGUOUS)
            for key, value in state.coordinates.items()
        }
        if self._update.dtype != grads.dtype or self._update.numel() < grads.numel():
            self._update = _empty(grads).view(-1)
        update = self._update[: grads.numel()].view(grads.shape)
        with one_each() as threads:
            state = state._replace(coordinates=own)
            return self._step(threads, phi, grads, state, params, loss, after, own, update)

    def _step(
        self,
        threads: int,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None,
        after: Params | None,
        coordinates: Params,
        update: Tensor,
    ) -> tuple[Tensor, OptimiserState]:
        """Writes the next state into `coordinates`, which may be the state's own, and the update into `update`."""
        rule, batch = self.reference.rule, grads.shape[:-1]
        shared = {**state.shared, "step": state.shared["step"] + 1}
        step = Step.of(self.reference, phi, self._fold(phi), Sight(grads, params, shared["step"], loss))
        idle = self._idle.setdefault(grads.dtype, [])
        whole = Block(
            0,
            grads.reshape(-1),
            params.reshape(-1),
            {key: _flat(value, grads) for key, value in state.coordinates.items()},
            {key: _flat(value, grads) for key, value in coordinates.items()},
            update.view(-1),
        )
        statistic = RootMeanSquare(state.layout, batch, rule.by_fan_in) if rule.statistic else None
        runs = _runs(grads.numel())

        def first(index: int) -> list[tuple[Tensor | None, list[tuple[int, float]]]]:
            buffers = idle.pop() if idle else step.buffers()
            results = []
            for block in whole.blocks(*runs[index]):
                bad = step.run(buffers, block)
                if bad is not None:
                    block.update[bad] = 0
                squares = statistic.squares(block.start, block.update) if statistic and after is None else []
                results.append((None if bad is None else bad + block.start, squares))
            idle.append(buffers)
            return results

        results = [result for run in share_out(first, len(runs), threads) for result in run]
        if statistic:
            if after is None:
                shared["statistic"] = statistic.total((part for _, parts in results for part in parts), grads)
            measured = (shared if after is None else after)["statistic"]
            factors = (step.finish.scale / measured.double()).flatten().tolist()

            def second(index: int) -> None:
                start, size = runs[index]
                part = whole.update.narrow(0, start, size)
                statistic.divide(start, part, factors)
                if step.finish.decay:
                    part.add_(whole.params.narrow(0, start, size), alpha=-step.finish.decay)

            share_out(second, len(runs), threads)
        bad = [places for places, _ in results if places is not None]
        if bad:
            places = torch.cat(bad)
            whole.update[places] = 0
            counts = torch.bincount(places // grads.shape[-1], minlength=prod(batch))
            shared["skipped"] = shared["skipped"] + counts.view(batch)
        return update, OptimiserState(state.layout, coordinates, shared if after is None else after)

    def _fold(self, phi: Params) -> Folded:
        """The layers multiplied out, anew only where a number of φ is another: that takes longer than to look."""
        if self._folded is None or not all(_equal(value, phi[key]) for key, value in self._folded[0].items()):
            copy = {key: value.clone() for key, value in phi.items()}
            self._folded = copy, folding.fold(self.reference, copy)
        return self._folded[1]


def _plain(phi: Params, grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
    """Whether all numbers are of one known kind in CPU memory, and no `torch.func` transform looks on."""
    tensors = [grads, params, *phi.values(), *state.coordinates.values()]
    return (
        grads.shape == params.shape
        and {(value.dtype, value.device.type) for value in tensors} in KINDS
        and not torch._C._are_functorch_transforms_active()
    )


def _runs(count: int) -> list[tuple[int, int]]:
    """Start and size of what a thread takes at once: 2 to 16 blocks, few where there are few."""
    size = WIDTH * min(max(count // WIDTH // 32, 2), 16)
    return [(start, min(size, count - start)) for start in range(0, count, size)]


def _flat(value: Tensor, like: Tensor) -> Tensor:
    """[..., *batch, n] with the batch axes and n in one, as a view where it can be."""
    return value.reshape(*value.shape[: value.dim() - like.dim()], like.numel())


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype)
