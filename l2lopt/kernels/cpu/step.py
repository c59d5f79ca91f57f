"""The coordinatewise learned optimiser's step on the CPU, in blocks that stay in cache."""

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.core.types import OptimiserState
from l2lopt.kernels import folding
from l2lopt.kernels.cpu.block import WIDTH, Block
from l2lopt.kernels.cpu.cells import CellKernel, cell_kernel
from l2lopt.kernels.cpu.features import FEATURES, FeatureRows
from l2lopt.kernels.cpu.reductions import RootMeanSquare
from l2lopt.kernels.cpu.rules import KERNELS, DirectionAndMagnitude, RuleKernel
from l2lopt.kernels.cpu.workspace import Memory
from l2lopt.kernels.folding import Folded
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.optimisers import Coordinatewise, Optimiser
from l2lopt.optimisers.inputs import StepInputs
from l2lopt.optimisers.rules import LEAST
from l2lopt.parallel.threads import one_each, share_out

KINDS = [{(torch.float32, "cpu")}, {(torch.float64, "cpu")}]
"""Sets of (dtype, device) that all numbers may have."""


def refusal(optimiser: Optimiser) -> str | None:
    """The reason why an optimiser has no fused form on the CPU, or None where it has one."""
    reason = folding.refusal(optimiser)
    if reason is not None:
        return reason
    assert isinstance(optimiser, Coordinatewise)
    for name, item in optimiser.inputs.items():
        if type(item) not in FEATURES:
            return f"the input {name!r} is not one of the library's: {type(item).__name__}"
    if type(optimiser.rule) not in KERNELS:
        return f"the rule is not one of the library's: {type(optimiser.rule).__name__}"
    for name, value in optimiser.phi().items():
        if {(value.dtype, value.device.type)} not in KINDS:
            return f"{name} is {value.dtype} on {value.device}".replace("torch.", "")
    return None


class CPU(FusedOptimiser):
    """The fused form of a rule on an LSTM or an IHC-LSTM for the CPU.

    The linear layers are multiplied out (`folding.fold`), and a block of coordinates goes through inputs, product,
    activations, head and rule while it is in cache. The blocks are shared out to `torch.get_num_threads()` threads;
    nothing depends on their number. A rule's statistic over a tensor is summed block by block in one order, and the
    update is finished in a second pass.

    Args:
        reference: The plain optimiser, one that `refusal` lets pass; its parameters are φ.
    """

    def __init__(self, reference: Coordinatewise) -> None:
        super().__init__(reference)
        self._idle: dict[torch.dtype, list[StepBuffers]] = {}

    def _suits(self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
        tensors = [grads, params, *phi.values(), *state.coordinates.values()]
        return (
            grads.shape == params.shape
            and {(value.dtype, value.device.type) for value in tensors} in KINDS
            and not torch._C._are_functorch_transforms_active()
        )

    def _step(
        self,
        phi: Params,
        grads: Tensor,
        state: OptimiserState,
        params: Tensor,
        loss: Tensor | None,
        coordinates: Params,
        update: Tensor,
    ) -> tuple[Tensor, OptimiserState]:
        rule, batch = self.reference.rule, grads.shape[:-1]
        shared = {**state.shared, "step": state.shared["step"] + 1}
        before = after = {key: _flat(value, grads) for key, value in coordinates.items()}
        if coordinates is not state.coordinates:
            before = {key: _flat(value, grads) for key, value in state.coordinates.items()}
        whole = Block(0, grads.reshape(-1), params.reshape(-1), before, after, update.view(-1))
        step_inputs = StepInputs(
            grads, params, shared["step"], loss, state.layout, torch.empty(0)
        )  # no kernel asks for `finite`
        with one_each() as threads:
            step = BlockStep.of(self.reference, phi, self._fold(phi), step_inputs)
            statistic = RootMeanSquare(state.layout, batch, rule.by_fan_in) if rule.statistic else None
            bad, squares = self._first_pass(threads, step, whole, statistic)
            if statistic is not None:
                _second_pass(threads, step, whole, statistic, statistic.total(squares, grads))
            # Again after the second pass, in which weight decay moves skipped coordinates, too.
            if bad is not None:
                whole.update[bad] = 0
                counts = torch.bincount(bad // grads.shape[-1], minlength=prod(batch))
                shared["skipped"] = shared["skipped"] + counts.view(batch)
        return update, OptimiserState(state.layout, coordinates, state.groups, shared)

    def _first_pass(
        self, threads: int, step: "BlockStep", whole: Block, statistic: RootMeanSquare | None
    ) -> tuple[Tensor | None, list[tuple[int, float]]]:
        """Runs all blocks; returns the indices of gradients that are not finite, and the sums of squares to measure."""
        idle, runs = self._idle.setdefault(whole.grads.dtype, []), _runs(len(whole.grads))

        def run(index: int) -> list[tuple[Tensor | None, list[tuple[int, float]]]]:
            try:  # asking first whether there are any would let two threads take the last ones
                buffers = idle.pop()
            except IndexError:
                buffers = StepBuffers(step)
            results = []
            for block in whole.blocks(*runs[index]):
                bad = step.run(buffers, block)
                # Before the squares are summed: a skipped coordinate has no part in the statistic.
                if bad is not None:
                    block.update[bad] = 0
                squares = statistic.squares(block.start, block.update) if statistic else []
                # After it: coordinates at rest count in the statistic.
                step.rest(buffers, block)
                results.append((None if bad is None else bad + block.start, squares))
            idle.append(buffers)
            return results

        # Results come by number, whichever thread was first: sums over them keep one order.
        results = [result for part in share_out(run, len(runs), threads) for result in part]
        bad = [indices for indices, _ in results if indices is not None]
        return torch.cat(bad) if bad else None, [square for _, squares in results for square in squares]


def _second_pass(threads: int, step: "BlockStep", whole: Block, statistic: RootMeanSquare, measured: Tensor) -> None:
    """Makes updates of the directions, the statistic [*batch, tensors] given."""
    rule, runs = step.rule, _runs(len(whole.grads))
    assert isinstance(rule, DirectionAndMagnitude)
    scale = rule.scale(step.number)
    factors = (scale / measured.double()).flatten().tolist()

    def run(index: int) -> None:
        start, size = runs[index]
        part = whole.update.narrow(0, start, size)
        statistic.multiply(start, part, factors)
        rule.finish(part, whole.params.narrow(0, start, size), scale)

    share_out(run, len(runs), threads)


class BlockStep(NamedTuple):
    """What all blocks of a step share: the kernels, made of φ and the step's number.

    Attributes:
        number: The step's number, from 1.
        inputs: Each input's rows.
        cell: The cell's kernel, the rows' factors multiplied in.
        rule: The rule's kernel.
    """

    number: int
    inputs: Mapping[str, FeatureRows]
    cell: CellKernel
    rule: RuleKernel

    @classmethod
    def of(cls, optimiser: Coordinatewise, phi: Params, folded: Folded, step_inputs: StepInputs) -> "BlockStep":
        """The step of an optimiser that `refusal` lets pass, its layers multiplied out."""
        number, rule = int(step_inputs.step), optimiser.rule
        inputs = {
            name: FEATURES[type(item)](name, item, step_inputs, number)  # type: ignore[index]  # a ModuleDict forgets what its modules are
            for name, item in optimiser.inputs.items()
        }
        scale = [factor for rows in inputs.values() for factor in rows.scale]
        # The rule reads the row itself, not the product, so it has to multiply by the row's factor.
        nominal = inputs["rnnprop"].scale[0] if rule.needs else 1.0
        return cls(number, inputs, cell_kernel(folded, scale), KERNELS[type(rule)](rule, folded, phi, nominal))

    def run(self, buffers: "StepBuffers", block: Block) -> Tensor | None:
        """Writes the block's next state and its update; for a rule with a statistic, the unnormalised direction.

        Returns:
            The indices in the block of gradients that are not finite, if there are any. Their state stays as it was;
            their update is left for the caller to clear.
        """
        buffers.cut(block.update.shape[0])
        # Squares cannot cancel, so one sum shows whether all are finite, and no mask is written.
        if math.isfinite(torch.dot(block.grads, block.grads)):
            self._compute(buffers, block)
            return None
        bad = block.grads.square().isfinite().logical_not().nonzero()[:, 0]  # empty where the sum alone overflows
        # Copied now, for in place the new state overwrites the old one.
        kept = {key: value[..., bad] for key, value in block.before.items()}
        self._compute(buffers, block._replace(grads=block.grads.index_fill(0, bad, 0.0)))
        for key, value in kept.items():
            block.after[key][..., bad] = value
        return bad

    def rest(self, buffers: "StepBuffers", block: Block) -> None:
        """Multiplies the update by `rules.activity`, after `run` on the same buffers."""
        if not self.rule.rests or int(torch.count_nonzero(block.grads)) == block.grads.shape[0]:
            return
        # In the places of the outputs and of the features, which have been used.
        active = torch.ne(block.grads, 0, out=buffers.output_rows[0])
        if "rnnprop" in self.inputs:
            adam = buffers.features[[*self.inputs].index("rnnprop")][0]
            adam.abs_().mul_(self.inputs["rnnprop"].scale[0] / LEAST).clamp_(max=1)
            torch.maximum(active, adam, out=active)
        block.update.mul_(active)

    def _compute(self, buffers: "StepBuffers", block: Block) -> None:
        rows = dict(zip(self.inputs, buffers.features, strict=True))
        for name, item in self.inputs.items():
            item.write(rows[name], block)
        # The product reads this copy; in place, h' goes over the state's h.
        buffers.h.copy_(block.before["cell.h"])
        c, h = block.after["cell.c"], block.after["cell.h"]
        self.cell.forward(buffers.z, block.before["cell.c"], c, h, buffers.cell)
        outputs, each = buffers.outputs, buffers.output_rows
        if len(each) == 1:
            outputs, each = block.update[None], (block.update,)  # in place: one operation less
        torch.addmm(self.rule.head_bias, self.rule.head, h, out=outputs)
        self.rule.forward(each, rows["rnnprop"][0] if self.rule.rule.needs else None, block)


class StepBuffers:
    """What one thread works in; for blocks of another width, the same memory is cut anew.

    Args:
        step: Any step of the optimiser: the shapes are the same for all.

    Attributes:
        z: The first product's argument, [F + M + 1, B]: features, h and ones.
        features: Each input's rows, [B] each.
        h: The rows of h; free once they are multiplied.
        cell: The cell's buffers.
        outputs: The head's, [outputs, B].
        output_rows: Rows of the output.
    """

    z: Tensor
    features: Sequence[Sequence[Tensor]]

    def __init__(self, step: BlockStep) -> None:
        self._sizes = [len(rows.scale) for rows in step.inputs.values()]
        self._cell, self._outputs = step.cell, step.rule.head.shape[0]
        self._memory, self._width = Memory(), -1
        self.cut(WIDTH)

    def cut(self, width: int) -> None:
        """Makes every buffer as wide as a block."""
        if width == self._width:
            return
        self._width = width
        self.z = self._take("z", sum(self._sizes) + self._cell.hidden + 1)
        *features, self.h, one = self.z.split([*self._sizes, self._cell.hidden, 1])
        # At every cut: in the same memory, another width puts the row of ones at another place.
        one.fill_(1)
        self.features = [rows.unbind() for rows in features]
        # Only the first product reads h here, so that its rows can be scratch after it.
        self.cell = self._cell.buffers(self._take, self.h)
        self.outputs = self._take("outputs", self._outputs)
        self.output_rows = self.outputs.unbind()

    def _take(self, name: str, *sizes: int) -> Tensor:
        return self._memory.take(name, *sizes, self._width, like=self._cell.first)


def _runs(count: int) -> list[tuple[int, int]]:
    """Start and size of what a thread takes at once: 2 to 16 blocks, few where there are few."""
    # By the count alone, never by the threads: blocks and the order of sums stay the same.
    size = WIDTH * min(max(count // WIDTH // 32, 2), 16)
    return [(start, min(size, count - start)) for start in range(0, count, size)]


def _flat(value: Tensor, like: Tensor) -> Tensor:
    """[..., *batch, n] with the batch axes and n in one, as a view where it can be."""
    # What is written to must be contiguous: `reshape` would copy without a word and lose it.
    return value.reshape(*value.shape[: value.dim() - like.dim()], like.numel())
