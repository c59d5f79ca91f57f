"""Checkpoints of long work: written by rename, and loaded only by the work that wrote them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.storage import tensor_file

ANEW = "remove it to begin anew"
"""The remedy for a checkpoint that cannot be gone on from."""


class Checkpoint(Protocol):
    """Where long work saves its progress."""

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replaces the checkpoint.

        Args:
            facts: Values that JSON can express.
            tensors: name → tensor.
        """

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The facts and tensors of the last `save`; None before the first."""


class NoCheckpoint:
    """The `Checkpoint` that saves nothing."""

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Does nothing."""

    def load(self) -> None:
        """None: nothing is ever saved."""


class CheckpointFile:
    """A `Checkpoint` in a safetensors file.

    Args:
        path: File to write and read.
        work: Description of the work as nested tables, such as its config. A checkpoint of other work, or of another
            release of l2lopt or PyTorch, is refused with the values that differ.
    """

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        self.path = path
        self.work = flat({"l2lopt": version("l2lopt"), "torch": torch.__version__, **work})

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes the file by rename: a kill at any moment leaves this checkpoint or the one before, whole."""
        tensor_file.write(self.path, "l2lopt.checkpoint", {"work": self.work, "facts": dict(facts)}, tensors)

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The facts and tensors in the file; None if there is no file.

        Raises:
            UserError: For a damaged file, or one of other work.
        """
        if not self.path.exists():
            return None
        header, tensors = read(self.path)
        theirs = header["work"]
        differing = [key for key in {**theirs, **self.work} if theirs.get(key) != self.work.get(key)]
        if differing:
            expected = ", ".join(f"{key} = {theirs.get(key)}" for key in differing)
            found = ", ".join(f"{key} = {self.work.get(key)}" for key in differing)
            remedy = "put it back, or begin anew in another --run"
            raise UserError(str(self.path), expected=expected, found=found, remedy=remedy)
        return header["facts"], tensors


@contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns the errors of taking up a checkpoint's contents into one that names its file.

    Args:
        checkpoint: Checkpoint that is loaded in the block.

    Raises:
        UserError: For contents that are not those of this work; a file without a digest may hold any.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        where = str(checkpoint.path) if isinstance(checkpoint, CheckpointFile) else "checkpoint"
        expected, found = "a checkpoint of this work", f"another ({type(error).__name__}: {error})"
        raise UserError(where, expected=expected, found=found, remedy=ANEW) from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header, with the tables "work" and "facts", and the tensors of a checkpoint's file.

    Raises:
        UserError: For a missing or damaged file.
    """
    return tensor_file.read(path, "l2lopt.checkpoint", "a checkpoint", ANEW, {"work": dict, "facts": dict})


def fitting(value: Tensor, like: Tensor) -> Tensor:
    """A tensor of a checkpoint, if it has the shape and dtype of the tensor that it is to replace.

    Raises:
        ValueError: If it has not: it would be broadcast, or rounded, without a word.
    """
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{value.dtype} {list(value.shape)} in place of {like.dtype} {list(like.shape)}")
    return value


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one table, whose keys are paths joined by dots."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return result


def pack(tree: Any, above: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Splits nested dicts, lists and tuples into a value for JSON and the tensors, named by their path.

    JSON knows neither tensors, nor tuples, nor keys other than strings: each becomes a table of one entry, whose key
    names the kind. `unpack` puts both together again.

    Example:
        >>> import torch
        >>> from l2lopt.storage.checkpoint import pack
        >>> pack({"a": [torch.ones(2), 3]})
        ({'dict': [['a', {'list': [{'tensor': 'a/0'}, 3]}]]}, {'a/0': tensor([1., 1.])})
    """
    if isinstance(tree, Tensor):
        return {"tensor": above}, {above: tree}
    if not isinstance(tree, dict | list | tuple):
        return tree, {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    tensors: dict[str, Tensor] = {}
    packed = []
    for key, value in items:
        inner, found = pack(value, f"{above}/{key}" if above else str(key))
        tensors |= found
        packed.append([key, inner] if isinstance(tree, dict) else inner)
    kind = "dict" if isinstance(tree, dict) else "list" if isinstance(tree, list) else "tuple"
    return {kind: packed}, tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor], above: str = "") -> Any:
    """The inverse of `pack`; each tensor is a copy, so that the loaded file can be dropped.

    Raises:
        ValueError: For a tensor that is not called after its path, and for what `pack` has not made.
    """
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        if content != above:
            raise ValueError(f"the tensor {content!r} at {above!r}")
        return tensors[content].clone()
    if kind not in ("dict", "list", "tuple"):
        raise ValueError(f"the unknown kind {kind!r}")
    pairs = content if kind == "dict" else enumerate(content)
    items = {key: unpack(value, tensors, f"{above}/{key}" if above else str(key)) for key, value in pairs}
    return items if kind == "dict" else list(items.values()) if kind == "list" else tuple(items.values())
