"""Work shared out to the processes that `torchrun` starts: each makes its own part, and all get the whole.

What is exchanged is small (an optimiser's meta-gradient has some thousand numbers), so it goes through Gloo and the CPU
wherever the tensors live.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  # before there is a process group, for the reason in sharding.py
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.errors import UserError

T = TypeVar("T")
TIMEOUT = timedelta(hours=12)
"""How long one waits for another's part. A process that has died is noticed at once; this is for one that hangs."""


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def alone(what: str) -> None:
    """Refuses to go on where `torchrun` has started several processes, for work that they cannot share.

    Raises:
        UserError: there.
    """
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        remedy = "start it without torchrun"
        raise UserError(what, expected="one process", found=f"{count} of torchrun's", remedy=remedy)


@contextmanager
def together() -> Iterator[None]:
    """The processes of `torchrun` as one group within the block; without it, or within another block, nothing."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ
    if alone or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_out(work: Callable[[int], T], count: int) -> list[T]:
    """[work(0), …, work(count − 1)] on every rank; rank r makes those whose number is r modulo the ranks.

    Results are pytrees; with several ranks their tensors come back on the CPU, bit for bit the same everywhere.

    Raises:
        UserError: where another rank has ended.
    """
    own = {index: work(index) for index in range(rank(), count, ranks())}
    if ranks() == 1:
        return list(own.values())
    parts: list[dict[int, T]] = [{} for _ in range(ranks())]
    with _answering():
        dist.all_gather_object(parts, _on_cpu(own))
    every = {index: result for part in parts for index, result in part.items()}
    return [every[index] for index in range(count)]


def collect(own: Mapping[int, T]) -> dict[int, T]:
    """Everyone's entries on rank 0, nothing elsewhere."""
    if ranks() == 1:
        return dict(own)
    parts: list[dict[int, T]] | None = [{} for _ in range(ranks())] if rank() == 0 else None
    with _answering():
        dist.gather_object(_on_cpu(dict(own)), parts, dst=0)
    return {index: result for part in parts or () for index, result in part.items()}


def on_first(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, where alone it is done, on every rank; a `UserError` likewise."""
    if ranks() == 1:
        return work()
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome = [work()]
        except UserError as error:
            outcome = [error]
    with _answering():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    result: T = outcome[0]
    return result


def _on_cpu(tree: T) -> T:
    moved: T = pytree.tree_map_only(Tensor, Tensor.cpu, tree)
    return moved


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # Gloo's word for a connection that has closed or timed out
        remedy = "look for that rank's own message, and go on with --resume"
        found = str(error).splitlines()[0]
        raise UserError("distributed", expected="an answer from every rank", found=found, remedy=remedy) from error
