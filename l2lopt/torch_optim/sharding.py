"""Parameters that lie across several processes (FSDP2's, tensor parallel ones): this process's part, and the whole.

Such a parameter is a `DTensor` over a mesh of processes, laid out along each of the mesh's dimensions: cut ("shard",
perhaps unevenly, some parts empty) or repeated ("replicate").
"""

import sys
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.dlpack import from_dlpack

from l2lopt.core.errors import UserError
from l2lopt.core.groupings import Total
from l2lopt.core.layout import Layout, Shards

if distributed.is_available():
    # The defaults of its functions hold the process group that is there when it is first imported, and `torch.optim`
    # imports it. A group that is held keeps its threads when it is destroyed, and they may abort the process at exit.
    import torch.distributed.nn


def is_distributed(value: Any) -> bool:
    """Whether a tensor lies across processes."""
    module = sys.modules.get("torch.distributed.tensor")  # seconds to import, and there once somebody has made one
    return module is not None and isinstance(value, module.DTensor)


def local(value: Tensor, like: Tensor | None = None) -> Tensor:
    """This process's part; a plain tensor as it is.

    Args:
        value: laid out as it may be.
        like: a parameter, to the placements of which a tensor [features…, *like.shape] is brought first.
    """
    here: Any = value
    if like is None or not (is_distributed(value) or is_distributed(like)):
        return here.to_local() if is_distributed(value) else value
    if not is_distributed(like):
        whole: Tensor = here.full_tensor()
        return whole
    mesh, placements = _mesh(like), _shifted(like, value.dim() - like.dim())
    if not is_distributed(value):
        here = torch.distributed.tensor.distribute_tensor(value, mesh, placements, src_data_rank=None)
    elif tuple(here.placements) != tuple(placements):
        here = here.redistribute(mesh, placements)
    part: Tensor = here.to_local()
    return part


def as_parameter(part: Tensor, param: Tensor) -> Tensor:
    """A view [features…, *(param's part)] as a tensor [features…, *param.shape] with the parameter's placements."""
    if not is_distributed(param):
        return part
    beginning: Tensor = from_dlpack(part)  # of its own storage: at an offset a DTensor has no copy or pickle
    shape = torch.Size((*part.shape[: part.dim() - param.dim()], *param.shape))
    made: Tensor = torch.distributed.tensor.DTensor.from_local(
        beginning,
        _mesh(param),
        _shifted(param, part.dim() - param.dim()),
        run_check=False,
        shape=shape,
        stride=tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))),
    )
    return made


def kind(param: Tensor) -> Hashable:
    """What the parameters of one flat vector have in common."""
    if not is_distributed(param):
        return param.dtype, param.device
    return param.dtype, param.device, _mesh(param), tuple(map(str, _any(param).placements))


def layout_of(params: Mapping[str, Tensor]) -> Layout:
    """The layout of this process's parts of parameters of one `kind`.

    Raises:
        UserError: for parameters on another device than their mesh.
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
    cuts = _cuts(first)
    shards = None
    if cuts:
        shapes = tuple(tuple(param.shape) for param in params.values())
        shards = Shards(shapes, partial(_summed, mesh, cuts), _rows(mesh, first), _columns(mesh, first))
    return Layout(layout.names, layout.shapes, shards)


def mean(value: Tensor, params: Iterable[Tensor]) -> Tensor:
    """The mean of a number over the processes that parameters lie across; the number itself where they are plain."""
    value = local(value, like=torch.empty(()))
    first = next(filter(is_distributed, params), None)
    if first is None:
        return value
    mesh = _mesh(first)
    total: Tensor = _summed(mesh, tuple(range(mesh.ndim)), value) / mesh.size()
    return total


def _summed(mesh: Any, dimensions: tuple[int, ...], values: Tensor) -> Tensor:
    """Sums over the processes along some of a mesh's dimensions."""
    total = values.detach().clone().to(mesh.device_type)
    for dimension in dimensions:
        torch.distributed.all_reduce(total, group=mesh.get_group(dimension))
    return total.to(values.device)


def _mesh(param: Any) -> Any:
    """The processes that a parameter lies across."""
    return param.device_mesh


def _cuts(param: Any) -> tuple[int, ...]:
    """The dimensions of its mesh along which a parameter is cut."""
    return tuple(index for index, placement in enumerate(param.placements) if not placement.is_replicate())


def _rows(mesh: Any, param: Any) -> Total | None:
    """The sum over the processes among which rows of a parameter's matrix view are cut."""
    cuts = tuple(index for index in _cuts(param) if _any(param).placements[index].is_shard() and _dim(param, index))
    return partial(_summed, mesh, cuts) if cuts else None


def _columns(mesh: Any, param: Any) -> Total | None:
    """The sum over the processes among which columns of a parameter's matrix view are cut."""
    cuts = tuple(index for index in _cuts(param) if _any(param).placements[index].is_shard() and not _dim(param, index))
    return partial(_summed, mesh, cuts) if cuts else None


def _dim(param: Any, index: int) -> int:
    """The axis of a parameter that is cut along a dimension of its mesh."""
    return int(param.placements[index].dim)


def _any(param: Tensor) -> Any:
    """The parameter, whose type has no placements."""
    return param


def _shifted(param: Any, axes: int) -> list[Any]:
    """A parameter's placements for a tensor with further axes before its own."""
    placements = []
    for placement in param.placements:
        if placement.is_replicate():
            placements.append(placement)
        elif placement.is_shard():
            placements.append(torch.distributed.tensor.Shard(placement.dim + axes))
        else:
            expected, remedy = "cut or repeated along each dimension of its mesh", "shard it in one way only"
            raise UserError("sharded parameter", expected=expected, found=str(placement), remedy=remedy)
    return placements
