"""One step of the learned rule on a block of coordinates."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.types import Params
from l2lopt.kernels.cpu.block import Block
from l2lopt.kernels.cpu.cells import Buffers, Network
from l2lopt.kernels.cpu.features import ROWS, Rows
from l2lopt.kernels.cpu.rules import UPDATES, Finish
from l2lopt.kernels.folding import Folded
from l2lopt.optimisers import Coordinatewise
from l2lopt.optimisers.inputs import Sight


class Step(NamedTuple):
    """What all blocks of a step share: the numbers that φ and the step count come down to.

    Attributes:
        inputs: each input's rows.
        network: the products.
        finish: the rule.
    """

    inputs: Mapping[str, Rows]
    network: Network
    finish: Finish

    @classmethod
    def of(cls, optimiser: Coordinatewise, phi: Params, folded: Folded, sight: Sight) -> "Step":
        """The step of an optimiser that `refusal` lets pass, its layers multiplied out."""
        step = int(sight.step)
        inputs = {name: ROWS[type(item)](name, item, sight, step) for name, item in optimiser.inputs.items()}  # type: ignore[index]  # a ModuleDict forgets what its modules are
        scale = [factor for rows in inputs.values() for factor in rows.scale]
        finish = UPDATES[type(optimiser.rule)](optimiser.rule, phi, inputs, step)
        return cls(inputs, Network(folded, scale), finish)

    def buffers(self) -> Buffers:
        """Memory for this step and those after it."""
        return Buffers(self.network, [len(rows.scale) for rows in self.inputs.values()], self.finish.head.shape[0])

    def run(self, buffers: Buffers, block: Block) -> Tensor | None:
        """Writes the block's next state and its update, or what the rule has of it before a tensor's statistic.

        Returns the places in the block of the gradients that are not finite, if there are any: their state is kept,
        their update is for the caller to clear.
        """
        buffers.cut(block.update.shape[0])
        if math.isfinite(torch.dot(block.grads, block.grads)):
            self._compute(buffers, block)
            return None
        bad = block.grads.square().isfinite().logical_not().nonzero()[:, 0]  # none, where the sum alone is infinite
        kept = {key: value[..., bad] for key, value in block.before.items()}
        self._compute(buffers, block._replace(grads=block.grads.index_fill(0, bad, 0.0)))
        for key, value in kept.items():
            block.after[key][..., bad] = value
        return bad

    def _compute(self, buffers: Buffers, block: Block) -> None:
        rows = dict(zip(self.inputs, buffers.features, strict=True))
        for name, item in self.inputs.items():
            item.write(rows[name], block)
        h = self.network.step(buffers, block)
        single = len(buffers.output_rows) == 1
        outputs = block.update[None] if single else buffers.outputs
        torch.addmm(self.finish.bias[:, None], self.finish.head, h, out=outputs)
        self.finish.write(buffers.output_rows, rows, block)
