"""The coordinatewise learned optimiser's step on the CPU, in blocks that stay in cache."""

from math import prod

import torch
from torch import Tensor

from l2lopt.core.types import OptimiserState, Params
from l2lopt.kernels import folding
from l2lopt.kernels.cpu.block import WIDTH, Block
from l2lopt.kernels.cpu.block_step import Step
from l2lopt.kernels.cpu.cells import Buffers
from l2lopt.kernels.cpu.features import ROWS
from l2lopt.kernels.cpu.reductions import RootMeanSquare
from l2lopt.kernels.cpu.rules import UPDATES
from l2lopt.kernels.fused import Twin
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.optimisers.inputs import Sight
from l2lopt.parallel.threads import one_each, share_out

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


class CPU(Twin):
    """The twin of a rule on an LSTM or an IHC-LSTM for the CPU.

    The linear layers are multiplied out (`folding.fold`), and a block of coordinates goes through inputs, product,
    activations, head and rule while it is in cache. The blocks are shared out to `torch.get_num_threads()` threads;
    nothing depends on their number. What a rule takes over a tensor is summed block by block in one order, and the
    update is finished in a second pass.

    Args:
        reference: the plain optimiser, one that `refusal` lets pass; its parameters are φ.
    """

    def __init__(self, reference: Coordinatewise) -> None:
        super().__init__(reference)
        self._idle: dict[torch.dtype, list[Buffers]] = {}

    def _suits(self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
        return _plain(phi, grads, state, params)

    def _step(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None,
        after: Params | None,
        coordinates: Params,
        update: Tensor,
    ) -> tuple[Tensor, OptimiserState]:
        with one_each() as threads:
            return self._shared_out(threads, phi, grads, state, params, loss, after, coordinates, update)

    def _shared_out(
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
