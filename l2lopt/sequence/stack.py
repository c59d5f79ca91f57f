"""Layers of any cells over time: several layers, both directions, lengths, dropout, weight drop."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from l2lopt.cells import Cell
from l2lopt.core.errors import UserError
from l2lopt.sequence import masks as m
from l2lopt.sequence.backends import Direction, backend, check_backend
from l2lopt.sequence.checks import check_input, check_layers, check_precision, width
from l2lopt.sequence.padding import Lengths, check_lengths, pack_like, unpack
from l2lopt.sequence.states import StackState, join, split


class Stack(nn.Module):
    """`output, state = stack(x, state)`: `nn.LSTM`, `nn.GRU` and `nn.RNN` for any cells.

    Each layer reads the outputs of the one below, forward features before backward ones; `states` lists the forms of
    the state. Weight drop (Merity et al., "Regularizing and optimizing LSTM language models", 2018) multiplies named
    weights by one mask per call, which all time steps share; the parameters of the stack stay the unmasked weights.
    Dropout follows every layer but the last. In `eval` neither is applied. A loss that must be a pure function takes
    its masks from `draw_masks` and passes them in; masks that are passed in are applied in either mode.

    Example:
        >>> import torch
        >>> from l2lopt import cells, sequence
        >>> stack = sequence.Stack([[cells.make("lstm", 3, 8)], [cells.make("ihc-lstm", 8, 5)]], dropout=0.2)
        >>> x = torch.randn(11, 4, 3)
        >>> masks = stack.draw_masks(x, torch.Generator().manual_seed(0))
        >>> output, state = stack(x, lengths=[11, 7, 9, 2], masks=masks)
        >>> output.shape, len(state)
        (torch.Size([11, 4, 5]), 2)

    Args:
        layers: Cells of each layer: one, or a forward and a backward one.
        dropout: Probability p in [0, 1) of dropout between layers.
        weight_drop: Weight of the cells → probability p in [0, 1); it applies to each cell that has such a weight.
        batch_first: Whether x is [B, T, N] and the output [B, T, M] instead of [T, B, N] and [T, B, M]. States keep
            their axes.
        backend: Pass over time: "auto", "fast" or "loop", see `backends.run`.

    Raises:
        UserError: For no layers, more than 2 directions, sizes that do not match, a probability out of range, and an
            unknown weight or backend.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Cell]],
        dropout: float = 0.0,
        weight_drop: Mapping[str, float] | None = None,
        batch_first: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_layers(layers)
        check_backend(backend)
        self.layers = nn.ModuleList(
            nn.ModuleList(Direction(cell, reverse=k == 1, choice=backend) for k, cell in enumerate(layer))
            for layer in layers
        )
        self.input_size = layers[0][0].input_size
        self.widths = [width(layer) for layer in layers]
        self.dropout, self.batch_first = m.check_share("dropout", dropout), batch_first
        self.dropped = m.dropped_weights(layers, weight_drop or {})

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: StackState | None = None,
        *,
        lengths: Lengths | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor | PackedSequence, StackState]:
        """The outputs of the last layer and the final state of every cell.

        Args:
            x: Inputs, [T, B, N], [B, T, N] with `batch_first`, or packed. One sequence is [T, N]; further axes are
                batch axes, [T, 2, B, N] or [2, B, T, N] for cells over pairs.
            state: Initial state; None for zeros.
            lengths: Number of steps of each sequence in [0, T], of the shape of x's batch axes; later outputs are zero.
            masks: Random numbers, see `draw_masks`; None draws them in `train` and applies none in `eval`.

        Raises:
            UserError: For an input, a state, lengths or masks that do not fit.
        """
        padded, own = self._time_first(x)
        check_precision(padded, self.layers[0])
        if isinstance(x, PackedSequence):
            if lengths is not None:
                remedy = "leave lengths out"
                raise UserError("lengths", expected="none with packed x, which has them", found="some", remedy=remedy)
            assert own is not None
            output, final = self._run(padded, state, own, masks)
            return pack_like(x, output, own), final
        output, final = self._run(padded, state, lengths, masks)
        return output.movedim(0, -2) if self.batch_first else output, final

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def bidirectional(self) -> bool:
        """Whether the last layer has two directions."""
        return len(self._grid()[-1]) == 2

    @property
    def hidden_size(self) -> int:
        """M of the last layer, in one direction."""
        return self.widths[-1] // len(self._grid()[-1])

    def flatten_parameters(self) -> None:
        """Does nothing; it exists for code that was written for `nn.LSTM`."""

    def draw_masks(self, x: Tensor | PackedSequence, generator: torch.Generator | None = None) -> m.Masks:
        """Draws masks for a call on x in either mode, with the dtype and device of what they multiply: a weight, or x.

        Args:
            x: Inputs of that call.
            generator: Source of the random numbers; None takes PyTorch's global one.

        Raises:
            UserError: For a weight to drop that has become a function of others, such as a weight-normed one.
        """
        return self._draw(self._time_first(x)[0], generator)

    def backends(self, x: Tensor | PackedSequence, lengths: Lengths | None = None) -> dict[str, tuple[str, str | None]]:
        """The pass that a call on x takes at this moment, and the reason if it is the loop.

        `"layer.direction"` → (name, reason), see `backends.backend`.
        """
        x, own = self._time_first(x)
        steps, *batch = x.shape[:-1]
        some = None if lengths is None and own is None else torch.empty(batch)
        # One number, expanded: the choice depends on shape, precision and device, not on values.
        one = x.new_empty(1)
        return {
            f"{i}.{k}": ("loop", "backend='loop' was chosen")
            if direction.choice == "loop"
            else backend(direction.cell, one.expand(steps, direction.cell.input_size, *batch), some)
            for i, layer in enumerate(self._grid())
            for k, direction in enumerate(layer)
        }

    def _time_first(self, x: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
        """The inputs as [T, *batch, N], of a fitting shape, and the lengths of packed ones."""
        padded, lengths = unpack(x) if isinstance(x, PackedSequence) else (x, None)
        check_input(padded, self.input_size)
        return padded.movedim(-2, 0) if self.batch_first and lengths is None else padded, lengths

    def _run(
        self, x: Tensor, state: StackState | None, lengths: Lengths | None, masks: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, StackState]:
        """The call with time first."""
        steps, *batch = x.shape[:-1]
        alive = None if lengths is None else check_lengths(lengths, steps, tuple(batch), x.device)
        if masks is None:
            masks = self._draw(x, None) if self.training else {}
        m.check_masks(masks, self._mask_shapes(x))
        x = x.movedim(-1, 1)
        initial = [
            d.cell.initial_state(x.new_zeros(d.cell.input_size, *batch)) for layer in self._grid() for d in layer
        ]
        states = iter(initial if state is None else split(state, initial))
        finals = []
        for i, layer in enumerate(self._grid()):
            outputs = []
            for k, direction in enumerate(layer):
                weights = m.masked(direction, f"{i}.{k}.", masks)
                given = x, next(states), alive
                # Replaced for this call alone, so that the parameters stay unmasked, and by name, so that a mask of one
                # of two tied weights leaves the other. `torch.jit.trace` refuses a replacement, even one of nothing.
                output, final = (
                    functional_call(direction, weights, given, tie_weights=False) if weights else direction(*given)
                )
                outputs.append(output)
                finals.append(final)
            x = torch.cat([o.movedim(1, -1) for o in outputs], -1).movedim(-1, 1) if len(outputs) > 1 else outputs[0]
            if f"dropout.{i}" in masks:
                x = x * masks[f"dropout.{i}"].movedim(-1, 1)
        return x.movedim(1, -1).contiguous(), join(finals)

    def _draw(self, x: Tensor, generator: torch.Generator | None) -> m.Masks:
        shares = self.dropped | {f"dropout.{i}": self.dropout for i in range(len(self.layers) - 1) if self.dropout}
        shapes = self._mask_shapes(x)
        if absent := [name for name in shares if name not in shapes]:
            expected, remedy = f"a parameter {absent[0]}", "leave that weight as it is, or out of weight_drop"
            found = "a weight computed from others, as by weight norm or pruning"
            raise UserError("weight_drop", expected=expected, found=found, remedy=remedy)
        weights = self._weights()
        # Under autocast x may have a lower precision than the weights.
        return {name: m.draw(shapes[name], share, weights.get(name, x), generator) for name, share in shares.items()}

    def _mask_shapes(self, x: Tensor) -> dict[str, Sequence[int]]:
        """The shape of every mask there can be, for x [T, *batch, N]."""
        shapes: dict[str, Sequence[int]] = {name: weight.shape for name, weight in self._weights().items()}
        between = enumerate(self.widths[:-1])
        return shapes | {f"dropout.{i}": (*x.shape[:-1], width) for i, width in between}

    def _weights(self) -> dict[str, Tensor]:
        """`"layer.direction.weight"` → weight."""
        return {
            f"{i}.{k}.{name}": weight
            for i, layer in enumerate(self._grid())
            for k, direction in enumerate(layer)
            for name, weight in direction.cell.named_parameters(remove_duplicate=False)
        }

    def _grid(self) -> list[list[Direction]]:
        """Per layer its directions."""
        return [list(cast(Iterable[Direction], layer)) for layer in self.layers]
