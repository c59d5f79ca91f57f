"""Parameters distributed over several processes (FSDP2, tensor parallelism): this process's part, and the whole.

Such a parameter is a `DTensor` over a mesh of processes. Along each dimension of the mesh it is either sharded, perhaps
into parts of unequal size, some of them empty, or replicated.
"""

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.dlpack import from_dlpack

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import Shards
from l2lopt.core.layout import Layout

if distributed.is_available():
    # `torch.optim` imports this module anyway. The defaults of its functions refer to the process group that exists at
    # the first import, and a group that is referred to keeps its threads after it is destroyed; they may abort the
    # process at exit. So it is imported here, before there is a group.
    import torch.distributed.nn


ALL = slice(None)
"""All axes of a parameter."""


def is_distributed(value: Any) -> bool:
    """Whether a tensor is distributed over processes."""
    module = sys.modules.get("torch.distributed.tensor")  # takes seconds to import; whoever made a DTensor has done so
    return module is not None and isinstance(value, module.DTensor)


def local(value: Tensor, like: Tensor | None = None, axes: slice = ALL) -> Tensor:
    """This process's part of a tensor; a plain tensor is returned unchanged.

    Args:
        value: Plain or distributed tensor.
        like: Parameter whose placements `value`, [features…, *like.shape[axes]], is given first; None keeps its
            placements.
        axes: Axes of the parameter that `value` has.
    """
    here: Any = value
    if like is None or not (is_distributed(value) or is_distributed(like)):
        return here.to_local() if is_distributed(value) else value
    if not is_distributed(like):
        whole: Tensor = here.full_tensor()
        return whole
    mesh, placements = _mesh(like), _placements(like, value.dim() - len(like.shape[axes]), axes)
    if not is_distributed(value):
        # None: every rank cuts its part from its own copy, and nothing is sent.
        here = torch.distributed.tensor.distribute_tensor(value, mesh, placements, src_data_rank=None)
    elif tuple(here.placements) != tuple(placements):
        here = here.redistribute(mesh, placements)
    part: Tensor = here.to_local()
    return part


def as_parameter(part: Tensor, param: Tensor, axes: slice = ALL) -> Tensor:
    """This process's part of a state, as a tensor [features…, *param.shape[axes]] with the parameter's placements.

    Args:
        part: View [features…, *shape[axes]], with the shape of this process's part of `param`; the result shares its
            memory.
        param: Plain or distributed parameter.
        axes: Axes of the parameter that `part` has.
    """
    if not is_distributed(param):
        return part
    beginning: Tensor = from_dlpack(part)  # a DTensor at an offset in its storage can be neither copied nor pickled
    kept = param.shape[axes]
    features = part.dim() - len(kept)
    shape = torch.Size((*part.shape[:features], *kept))
    # Shape and stride are given: guessed from this part they would be wrong where parts are unequal.
    made: Tensor = torch.distributed.tensor.DTensor.from_local(
        beginning,
        _mesh(param),
        _placements(param, features, axes),
        run_check=False,
        shape=shape,
        stride=tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))),
    )
    return made


def kind(param: Any) -> Hashable:
    """A key that is equal for parameters that can form one flat vector: dtype, device, mesh and placements."""
    if not is_distributed(param):
        return param.dtype, param.device
    return param.dtype, param.device, _mesh(param), tuple(param.placements)


def layout_of(params: Mapping[str, Tensor]) -> Layout:
    """The layout of this process's parts of parameters of one `kind`.

    Raises:
        UserError: The parameters are on another device than their mesh.
    """
    layout = Layout.of({name: local(param) for name, param in params.items()})
    first = next(iter(params.values()))
    if not is_distributed(first):
        return layout
    mesh = _mesh(first)
    if first.device.type != mesh.device_type:
        expected, found = f"on {mesh.device_type}, as the mesh is", f"on {first.device.type}"
        remedy = "shard without an offload policy"
        raise UserError(f"sharded parameter {layout.names[0]!r}", expected=expected, found=found, remedy=remedy)
    cuts = _sharded_along(first)
    if not cuts:
        return layout
    shapes = tuple(tuple(param.shape) for param in params.values())
    # A parameter that is sharded along its first axis has whole rows in each process, and parts of columns.
    columns = tuple(index for index in cuts if _axis(first, index) == 0)
    rows = tuple(index for index in cuts if _axis(first, index) != 0)
    total, of_rows, of_columns = (partial(_summed, mesh, some) if some else None for some in (cuts, rows, columns))
    assert total is not None
    given = dict(params)
    ways = partial(_gathered, given), partial(_own, given)
    return Layout(layout.names, layout.shapes, Shards(shapes, total, of_rows, of_columns, *ways))


def mean(value: Tensor, params: Iterable[Tensor]) -> Tensor:
    """The mean of a number over the processes that hold the parameters; the number itself if all of them are plain."""
    value = local(value, like=torch.empty(()))
    first = next(filter(is_distributed, params), None)
    if first is None:
        return value
    mesh = _mesh(first)
    total: Tensor = _summed(mesh, tuple(range(mesh.ndim)), value) / mesh.size()
    return total


def _summed(mesh: Any, dimensions: tuple[int, ...], values: Tensor) -> Tensor:
    """Sums of `values` over the processes along some of a mesh's dimensions."""
    # Collective: every rank of the mesh must come here. all_reduce writes into what it is given, hence the copy.
    total = values.detach().clone().to(mesh.device_type)
    for dimension in dimensions:
        torch.distributed.all_reduce(total, group=mesh.get_group(dimension))
    return total.to(values.device)


def _gathered(params: Mapping[str, Tensor], names: Sequence[str], values: Tensor) -> Tensor:
    """The values [n] of whole parameters from every process's values of its parts."""
    chosen = [params[name] for name in names]
    shapes = [local(param).shape for param in chosen]
    parts = values.detach().split([shape.numel() for shape in shapes])
    # Collective: every rank of the mesh must come here, with coordinates or without.
    here = (as_parameter(part.view(shape), param) for part, shape, param in zip(parts, shapes, chosen, strict=True))
    return torch.cat([local(one, like=torch.empty(())).reshape(-1) for one in here])


def _own(params: Mapping[str, Tensor], names: Sequence[str], values: Tensor) -> Tensor:
    """This process's part [n] of the values of whole parameters; nothing is sent."""
    chosen = [params[name] for name in names]
    parts = values.split([param.numel() for param in chosen])
    cut = (local(part.view(param.shape), like=param) for part, param in zip(parts, chosen, strict=True))
    return torch.cat([part.reshape(-1) for part in cut])


def _mesh(param: Any) -> Any:
    """The mesh of processes that a parameter is distributed over."""
    return param.device_mesh


def _sharded_along(param: Any) -> tuple[int, ...]:
    """The dimensions of its mesh along which a parameter is sharded."""
    return tuple(index for index, placement in enumerate(param.placements) if not placement.is_replicate())


def _axis(param: Any, dimension: int) -> int:
    """The axis of a parameter that is sharded along a dimension of its mesh."""
    return int(getattr(param.placements[dimension], "dim", 0))


def _placements(param: Any, features: int, axes: slice) -> list[Any]:
    """The placements of a tensor [features…, *param.shape[axes]]: those of the parameter for the axes that it has.

    Args:
        param: Distributed parameter.
        features: Number of axes before those of the parameter.
        axes: Axes of the parameter that the tensor has.
    """
    replicate, kept = torch.distributed.tensor.Replicate(), range(param.dim())[axes]
    placements: list[Any] = []
    for placement in param.placements:
        if not (placement.is_replicate() or placement.is_shard()):
            expected, remedy = "cut or repeated along each dimension of its mesh", "shard it in one way only"
            raise UserError("sharded parameter", expected=expected, found=str(placement), remedy=remedy)
        if placement.is_shard() and placement.dim in kept:
            # The features come first, so the axis that is cut lies so many places later than in the parameter.
            placements.append(torch.distributed.tensor.Shard(features + kept.index(placement.dim)))
        else:
            placements.append(replicate)
    return placements
