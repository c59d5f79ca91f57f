"""The random numbers of a stack: masks for dropped weights and for dropout between layers, scaled by 1/(1 − p)."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from l2lopt.cells import Cell
from l2lopt.core.errors import UserError, did_you_mean

Masks: TypeAlias = dict[str, Tensor]
"""`"0.1.weight_h"` (layer, direction, weight) or `"dropout.0"` (the layer it follows) → mask; all are optional."""


def check_share(where: str, share: float) -> float:
    """A probability p in [0, 1) of dropping a number.

    Args:
        where: Name of the argument, for the error.
        share: p.

    Raises:
        UserError: For a p outside [0, 1).
    """
    if not 0 <= share < 1:
        raise UserError(where, expected="a share in [0, 1)", found=str(share), remedy="change the value")
    return float(share)


def dropped_weights(layers: Sequence[Sequence[Cell]], weight_drop: Mapping[str, float]) -> dict[str, float]:
    """The names of the masks of weight drop, `"layer.direction.weight"` → p.

    Args:
        layers: The cells of each layer.
        weight_drop: Weight of the cells → p; a cell without that weight is left alone.

    Raises:
        UserError: For a weight that no cell has, or a p outside [0, 1).
    """
    owned = {
        f"{i}.{k}": [name for name, _ in cell.named_parameters(remove_duplicate=False)]
        for i, layer in enumerate(layers)
        for k, cell in enumerate(layer)
    }
    known = sorted({name for names in owned.values() for name in names})
    for name, share in weight_drop.items():
        if name not in known:
            remedy = did_you_mean(name, known)
            raise UserError(
                "weight_drop", expected=f"a weight of the cells ({', '.join(known)})", found=repr(name), remedy=remedy
            )
        check_share(f"weight_drop: {name}", share)
    return {
        f"{place}.{name}": float(share)
        for place, names in owned.items()
        for name, share in weight_drop.items()
        if name in names
    }


def draw(shape: Sequence[int], share: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """A mask: 0 with probability p = `share`, else 1/(1 − p); the draws of `torch.nn.functional.dropout`."""
    if generator is None and torch._C._are_functorch_transforms_active():
        # `vmap` with a draw for each row cannot draw into the memory of one.
        return nn.functional.dropout(torch.ones(tuple(shape), dtype=like.dtype, device=like.device), share)
    mask = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    return mask.bernoulli_(1 - share, generator=generator).div_(1 - share)


def check_masks(masks: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuses masks with an unknown name or another shape.

    Args:
        masks: name → mask.
        shapes: name → shape, of everything that can be masked.

    Raises:
        UserError: For either mistake.
    """
    for name, mask in masks.items():
        if name not in shapes:
            remedy = did_you_mean(name, shapes)
            raise UserError(
                "masks", expected=f"names among {', '.join(sorted(shapes))}", found=repr(name), remedy=remedy
            )
        if list(mask.shape) != list(shapes[name]):
            where, expected = f"masks: {name}", f"shape {list(shapes[name])}"
            remedy = "draw the masks for this input with draw_masks"
            raise UserError(where, expected=expected, found=str(list(mask.shape)), remedy=remedy)


def masked(direction: nn.Module, place: str, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masked weights of a direction, for `functional_call`; those without a mask are left out.

    Args:
        direction: Module of one cell.
        place: Prefix of its masks' names, `"layer.direction."`.
        masks: name → mask.
    """
    parameters = direction.named_parameters(remove_duplicate=False)
    named = ((name, weight, place + name.removeprefix("cell.")) for name, weight in parameters)
    # A product on autograd's tape: the gradient reaches the unmasked parameter.
    return {name: weight * masks[mask] for name, weight, mask in named if mask in masks}
