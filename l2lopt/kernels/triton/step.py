"""The coordinatewise learned optimiser's step on a GPU: one kernel, and two more for a statistic over tensors."""

from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.layout import Layout, Params
from l2lopt.core.types import OptimiserState
from l2lopt.kernels.fused import FusedOptimiser
from l2lopt.kernels.recorded import root_of
from l2lopt.kernels.triton import device, interpreted, packing
from l2lopt.kernels.triton.packing import KernelShape
from l2lopt.optimisers import Coordinatewise
from l2lopt.optimisers.rules import DIRECTION

KINDS = (torch.float32, torch.bfloat16)
PRECISION = "tf32x3"
"""Of the products, on tensor cores: three tf32 products, about as good as float32."""
WIDTH = 64
"""Coordinates in a block: the most whose tiles stay in registers with `WARPS`, but for the way back."""
WARPS = 8
PROGRAMS = 2
"""Programs for each multiprocessor of a GPU; each loads the weights once."""
LAUNCH = {"num_warps": WARPS, "enable_fp_fusion": True}
CHUNK = 4096
"""Coordinates whose squares are summed at once, of one tensor."""


class Chunks(NamedTuple):
    """A row's coordinates in chunks of at most `CHUNK`, none of them in two tensors.

    Attributes:
        starts: [chunks].
        sizes: [chunks].
        tensors: The number of the tensor that each lies in.
        counts: Chunks per tensor.
    """

    starts: Tensor
    sizes: Tensor
    tensors: Tensor
    counts: Tensor

    @classmethod
    def of(cls, layout: Layout, like: Tensor) -> "Chunks":
        """On the device of `like`."""
        counts = torch.tensor([ceil(size / CHUNK) for size in layout.sizes], dtype=torch.int64)
        tensors = torch.arange(len(counts)).repeat_interleave(counts)
        sizes = torch.tensor(layout.sizes, dtype=torch.int64)
        first = sizes.cumsum(0) - sizes
        within = (torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]) * CHUNK
        left = (sizes[tensors] - within).clamp(max=CHUNK)
        return cls(*(part.to(like.device) for part in (first[tensors] + within, left, tensors, counts)))


class Triton(FusedOptimiser):
    """The twin of a rule on an LSTM or an IHC-LSTM for a GPU.

    φ and all arithmetic are float32, products by `PRECISION`; gradients, θ and the state may be float32 or bfloat16,
    which is rounded when it is stored. Nothing is added up in an order that depends on time.

    Cost: the state is read and written once, 328 bytes a coordinate for an LSTM of 20 in float32, 164 in bfloat16; a
    rule with a statistic reads and writes five numbers more.

    Args:
        reference: The plain optimiser, one that `refusal` lets pass; its parameters are φ.
    """

    accepts_low_precision_state = True

    def __init__(self, reference: Coordinatewise) -> None:
        super().__init__(reference)
        self.shape = KernelShape.of(reference, PRECISION, WIDTH)
        self._packed: tuple[object, Tensor] | None = None
        self._chunks: tuple[Layout, torch.device, Chunks] | None = None

    def _suits(self, phi: Params, grads: Tensor, state: OptimiserState, params: Tensor) -> bool:
        numbers = [grads, params, *state.coordinates.values()]
        return (
            grads.shape == params.shape
            and all(value.dtype in KINDS for value in numbers)
            and all(value.dtype == torch.float32 for value in phi.values())
            and len({value.device for value in (*numbers, *phi.values())}) == 1
            and (grads.is_cuda or interpreted())
            and not torch._C._are_functorch_transforms_active()
        )

    def _fresh(self, value: Tensor) -> Tensor:
        # The kernel works in place, so even memory of its own has to begin as the state before.
        return value.clone(memory_format=torch.contiguous_format)

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
        reference, n, rows = self.reference, grads.shape[-1], prod(grads.shape[:-1])
        step = state.shared["step"] + 1
        shared = {**state.shared, "step": step}
        if grads.numel():
            grads, params, numbers = grads.contiguous(), params.contiguous(), [int(step)]
            scale, scalars = packing.scales(reference, phi, numbers, grads), packing.table(reference, numbers, grads)
            memory = tuple(coordinates[name] for name in self.shape.memory)
            blocks = ceil(n / WIDTH)
            # Each block writes a count of its own: nothing to clear first, no atomic additions.
            skipped = torch.empty(rows, blocks, dtype=torch.int32, device=grads.device)
            with torch.cuda.device_of(grads):  # Triton launches on the current GPU, wherever the tensors are
                device.step[(programs(rows * blocks, grads),)](
                    grads,
                    params,
                    update,
                    skipped,
                    (coordinates["cell.h"], coordinates["cell.c"], *gates_of(coordinates, grads)),
                    memory,
                    self._weights(phi),
                    rule_of(phi, grads),
                    scalars,
                    packing.losses(reference, loss, grads),
                    scale,
                    n,
                    grads.numel(),
                    blocks,
                    rows * blocks,
                    S=self.shape.constants,
                    **LAUNCH,
                )
                if reference.rule.statistic:
                    self._finish(state.layout, grads, params, update, memory, scalars, scale)
            shared["skipped"] = state.shared["skipped"] + skipped.sum(-1).view(state.shared["skipped"].shape)
        elif reference.rule.statistic:
            nothing = grads.new_zeros(*grads.shape[:-1], len(state.layout.sizes))
            state.layout.tensors.mean_of_sums(DIRECTION, nothing)  # recorded, and asked of all processes
        return update, OptimiserState(state.layout, coordinates, state.groups, shared)

    def _finish(
        self,
        layout: Layout,
        grads: Tensor,
        params: Tensor,
        update: Tensor,
        memory: tuple[Tensor, ...],
        scalars: Tensor,
        scale: Tensor,
    ) -> None:
        """Makes updates of directions."""
        rule, batch, rows = self.reference.rule, grads.shape[:-1], prod(grads.shape[:-1])
        if self._chunks is None or self._chunks[:2] != (layout, grads.device):
            self._chunks = layout, grads.device, Chunks.of(layout, grads)
        chunks, n = self._chunks[2], grads.shape[-1]
        grid, fixed = (len(chunks.starts), rows), {"B": 1024, "ROUNDS": CHUNK // 1024}
        sums = torch.empty(rows, len(chunks.starts), dtype=torch.float64, device=grads.device)
        device.squares[grid](update, chunks.starts, chunks.sizes, sums, n, sums.shape[1], **fixed)
        # Not `index_add`: on a GPU it adds by atomics, in an order that depends on time.
        totals = torch.segment_reduce(sums.T.contiguous(), "sum", lengths=chunks.counts).T
        means = layout.tensors.mean_of_sums(DIRECTION, totals.reshape(*batch, -1))
        measured = root_of(means, layout, rule.by_fan_in).to(torch.float32)
        device.finish[grid](
            update,
            grads,
            params,
            memory,
            scalars,
            measured.contiguous(),
            scale,
            chunks.starts,
            chunks.sizes,
            chunks.tensors,
            n,
            len(layout.sizes),
            S=self.shape.constants,
            **fixed,
        )

    def _weights(self, phi: Params) -> Tensor:
        """The packed layers, anew where they were folded anew."""
        folded = self._fold(phi)
        if self._packed is None or self._packed[0] is not folded:
            self._packed = folded, self.shape.pack(folded)
        return self._packed[1]


def programs(blocks: int, like: Tensor) -> int:
    """How many programs share out the blocks."""
    if not like.is_cuda:
        return min(blocks, 3)
    return min(blocks, PROGRAMS * torch.cuda.get_device_properties(like.device).multi_processor_count)


def gates_of(coordinates: Params, like: Tensor) -> tuple[Tensor, Tensor]:
    """The gated rule's memory; any tensor for other rules, which do not look."""
    return coordinates.get("rule.forget", like), coordinates.get("rule.input", like)


def rule_of(phi: Params, like: Tensor) -> Tensor:
    """The gated rule's own numbers, [6]; any tensor for other rules."""
    if "rule.bias" not in phi:
        return like
    return torch.cat([phi["rule.bias"], phi["rule.weight_params"], phi["rule.weight_gates"]])
