"""A digest of what a file holds, so that a changed bit is noticed when it is read again."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KEY = "digest"
"""The key under which a file's table holds the digest of everything else in the file."""
MARK = "sealed"
"""A key that says there is a digest: without it, damage to the name of the other would make an earlier file of it."""


def bytes_of(value: "Tensor") -> memoryview:
    """The bytes of a tensor, in the order of its elements."""
    from torch import uint8  # imported here: PyTorch takes seconds, and files without tensors need none of it

    # As bytes, since NumPy has no bfloat16; flat first, since PyTorch cannot view a scalar as bytes.
    flat = value.detach().cpu().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, and cannot be viewed as bytes with one beside 1.
    flat = flat.as_strided(flat.shape, (1,)) if flat.numel() == 1 else flat
    found: memoryview = flat.view(uint8).numpy().data
    return found


def as_written(value: Any) -> Any:
    """A value as a file that `storage.run_log.write_json` wrote gives it back, to be compared with what is read.

    Tuples are lists there, keys strings, and a number that is not finite is None.

    Example:
        >>> from l2lopt.core.digest import as_written
        >>> as_written({"clip": float("inf"), "sizes": (3, 4)})
        {'clip': None, 'sizes': [3, 4]}
    """
    return json.loads(json.dumps(finite(value)))


def finite(value: Any) -> Any:
    """A value that JSON can express, with None for every number that is not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sealed(table: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> dict[str, Any]:
    """A table with the digest of itself and of the tensors beside it; it takes about a second per gigabyte.

    Args:
        table: Values that JSON can express.
        tensors: name → tensor.

    Returns:
        The table as JSON gives it back, with the further keys `MARK` and `KEY`.

    Example:
        >>> from l2lopt.core.digest import opened, sealed
        >>> opened(sealed({"loss": 0.5}))
        {'loss': 0.5}
    """
    # Through JSON, as the file goes: the digest is made of what a reader will see, such as lists in place of tuples.
    plain: dict[str, Any] = json.loads(json.dumps(table))
    return {MARK: True, **plain, KEY: _digest(plain, tensors or {})}


def opened(table: Any, tensors: "Mapping[str, Tensor] | None" = None) -> dict[str, Any]:
    """The table that `sealed` was given. A table without a digest, as earlier files have it, is given as it is.

    Args:
        table: Value that was read from a file.
        tensors: name → tensor, from the same file.

    Raises:
        ValueError: For anything but a table, and where the digest is another.
    """
    if not isinstance(table, dict):
        raise ValueError("no table")
    rest = {key: value for key, value in table.items() if key not in (KEY, MARK)}
    if (KEY in table or MARK in table) and table.get(KEY) != _digest(rest, tensors or {}):
        raise ValueError("its digest is another: it was changed after it was written")
    return rest


def _digest(table: Mapping[str, Any], tensors: "Mapping[str, Tensor]") -> str:
    """BLAKE2 of the table and of every tensor's name, dtype, shape and bytes."""
    found = hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16)
    for name, value in sorted(tensors.items()):
        # With precision and shape: the same bytes may stand for other numbers.
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(bytes_of(value))
    return found.hexdigest()
