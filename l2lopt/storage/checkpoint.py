"""Checkpoints of long work: written by rename, taken up only by the work they came from."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.storage import tensor_file


class Checkpoint(Protocol):
    """Where long work keeps its place."""

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keeps the place, in the stead of the last one."""

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The place last kept, or None."""


class NoCheckpoint:
    """The `Checkpoint` that keeps nothing."""

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""

    def load(self) -> None:
        """Nothing is kept."""


class CheckpointFile:
    """A `Checkpoint` in a safetensors file.

    Args:
        path: of the file.
        work: what the work is, as nested tables; a checkpoint of other work, or of another version of l2lopt or
            PyTorch, is refused with what differs.
    """

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        self.path = path
        self.work = flat({"l2lopt": version("l2lopt"), "torch": torch.__version__, **work})

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes the file by rename: a kill at any moment leaves this place or the last."""
        tensor_file.write(self.path, "l2lopt.checkpoint", {"work": self.work, "facts": dict(facts)}, tensors)

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The place last kept, or None without a file.

        Raises:
            UserError: for a damaged file, or one of other work.
        """
        if not self.path.exists():
            return None
        header, tensors = tensor_file.read(self.path, "l2lopt.checkpoint", "a checkpoint", "remove it to begin anew")
        theirs = header["work"]
        differing = [key for key in {**theirs, **self.work} if theirs.get(key) != self.work.get(key)]
        if differing:
            expected = ", ".join(f"{key} = {theirs.get(key)}" for key in differing)
            found = ", ".join(f"{key} = {self.work.get(key)}" for key in differing)
            remedy = "put it back, or begin anew in another --run"
            raise UserError(str(self.path), expected=expected, found=found, remedy=remedy)
        return header["facts"], tensors


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one, the keys joined by dots."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return result


def pack(tree: Any, above: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Nested dicts, lists and tuples of tensors and plain values, as what JSON can say and tensors by their place.

    JSON knows neither tensors, nor tuples, nor keys other than strings: they become tables of one entry.
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


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given, each tensor a copy."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in content}
    items = [unpack(value, tensors) for value in content]
    return items if kind == "list" else tuple(items)
