"""Work divided among the processes that `torchrun` starts: each does a part, and every one gets all results.

Results are small (an optimiser's meta-gradient has some thousand numbers), so they travel through Gloo on the CPU, on
whatever device the tensors are.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from l2lopt.core.environment import whole_number
from l2lopt.core.errors import UserError

if dist.is_available():  # some builds of PyTorch, of other systems than Linux, come without it
    import torch.distributed.nn  # noqa: F401  # to be imported before there is a process group, see sharding.py

T = TypeVar("T")
TIMEOUT = timedelta(hours=12)
"""Longest wait for another process. A dead process is noticed at once; this is for one that hangs."""


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if _is_joined() else 0


def ranks() -> int:
    """How many processes work together."""
    return dist.get_world_size() if _is_joined() else 1


def _is_joined() -> bool:
    """Whether there is a group of processes."""
    return dist.is_available() and dist.is_initialized()


def alone(what: str) -> None:
    """Refuses work that several processes cannot share.

    Args:
        what: Name of the work, for the error.

    Raises:
        UserError: If `torchrun` has started more than one process.
    """
    if (count := whole_number("WORLD_SIZE", 1)) != 1:
        remedy = "start it without torchrun"
        raise UserError(what, expected="one process", found=f"{count} of torchrun's", remedy=remedy)


@contextmanager
def together() -> Iterator[None]:
    """Joins the processes of `torchrun` to one group within the block.

    Does nothing without `torchrun`, and within another such block.
    """
    alone = whole_number("WORLD_SIZE", 1) == 1 or "MASTER_ADDR" not in os.environ
    if alone or _is_joined():
        yield
        return
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:  # a variable that is not there, or no number, or an address of nobody
        found, remedy = str(error).splitlines()[0], "start it by torchrun, or unset WORLD_SIZE"
        raise UserError("distributed", expected="what torchrun sets", found=found, remedy=remedy) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_out(work: Callable[[int], T], count: int) -> list[T]:
    """[work(0), …, work(count − 1)] on every rank. Collective: every rank must call it.

    Rank r does the work of the numbers that are r modulo the number of ranks. Results are ordered by number before
    anyone adds them up, so sums over them are the same to the bit for any number of ranks.

    Args:
        work: Number → result, a pytree; with several ranks its tensors come back on the CPU.
        count: Number of results.

    Raises:
        UserError: If another rank has ended.
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
    """The entries of all ranks on rank 0, none on the others. Collective: every rank must call it."""
    if ranks() == 1:
        return dict(own)
    parts: list[dict[int, T]] | None = [{} for _ in range(ranks())] if rank() == 0 else None
    with _answering():
        dist.gather_object(_on_cpu(dict(own)), parts, dst=0)
    return {index: result for part in parts or () for index, result in part.items()}


def on_first(work: Callable[[], T]) -> T:
    """Does `work` on rank 0 alone and gives its result, or raises its `UserError`, on every rank.

    Collective: every rank must call it. The error is sent as well, since the other ranks would otherwise wait for a
    result that never comes.
    """
    if ranks() == 1:
        return work()
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome = [work()]
        except UserError as error:
            # Any other error ends rank 0, and the other ranks see its connection closed.
            outcome = [error]
    with _answering():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    result: T = outcome[0]
    return result


def _on_cpu(tree: T) -> T:
    # A pickled CUDA tensor is restored on the sender's device, which may not be the receiver's.
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
