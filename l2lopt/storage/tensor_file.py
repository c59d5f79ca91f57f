"""Tensors with a JSON header in one safetensors file, written by rename. Nothing is unpickled.

The header holds a digest of itself and of the tensors, which is compared when the file is read. Files of earlier
releases have none; they are read as well, if all else in them is as it should be.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from l2lopt.core.digest import opened, sealed
from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import existing, written_whole

_UNREADABLE = (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError)
"""The errors of reading a file that is damaged, or that someone has made to be no file of ours."""


def write(path: Path, key: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` and `header`; equal contents give equal bytes.

    Args:
        path: File to write.
        key: Kind of the file, such as "l2lopt.checkpoint"; `read` asks for the same.
        header: Any value that JSON can express, infinities included.
        tensors: name → tensor, on any device.
    """
    # Clones: safetensors refuses tensors that share memory, as views of one flat vector do.
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with written_whole(path) as temporary:
        # A single key: safetensors keeps several in a hash map, whose order (and so the file's bytes) changes from one
        # process to the next.
        save_file(own, temporary, metadata={key: json.dumps(sealed(header, own), sort_keys=True)})


def read(
    path: Path, key: str, what: str, remedy: str, fields: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a file of `write`.

    Args:
        path: File to read.
        key: Kind of the file, as given to `write`.
        what: Description of such a file for the error, such as "a checkpoint".
        remedy: Advice for the error.
        fields: Fields of the header, as for `check_header`; None leaves them to the caller.

    Raises:
        UserError: For a missing or damaged file, or one of another kind.
    """
    metadata, tensors = read_any(path, what, remedy)
    try:
        header = json.loads(metadata[key])
    except (KeyError, ValueError, RecursionError):
        raise UserError(str(path), expected=what, found="other tensors", remedy=remedy) from None
    try:
        header = opened(header, tensors)
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), expected=f"{what}, whole", found=f"damage ({error})", remedy=remedy) from None
    if fields is not None:
        check_header(path, header, fields, what, remedy)
    return header, tensors


def read_any(path: Path, what: str, remedy: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file of whatever kind.

    Args:
        path: File to read.
        what: Description of such a file for the error.
        remedy: Advice for the error.

    Raises:
        UserError: For a missing or damaged file.
    """
    existing(path, what, remedy)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Clones: safetensors maps the file, and Windows renames nothing over a file that is mapped, such as the
            # checkpoint that a resumed run goes on from.
            return metadata, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping: it cannot be iterated over
    except _UNREADABLE as error:
        raise UserError(str(path), expected="a whole safetensors file", found=str(error), remedy=remedy) from None


def check_header(path: Path, header: Mapping[str, Any], fields: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuses a header that has other fields, or values of other types.

    Args:
        path: File that it was read from.
        header: Header.
        fields: name → type of the value, or several types in a tuple.
        what: Description of such a file for the error.
        remedy: Advice for the error.

    Raises:
        UserError: For a field that is missing, unknown or of another type.
    """
    for name in {**fields, **header}:
        known, there = name in fields, name in header
        if known and there and isinstance(header[name], fields[name]):
            continue
        if not known:
            found = f"the unknown field {name!r}"
        else:
            found = f"{name!r} of type {type(header[name]).__name__}" if there else f"no {name!r}"
        raise UserError(f"{path}: header", expected=f"the fields of {what}", found=found, remedy=remedy)


def check_tensors(
    path: Path,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    remedy: str,
    *,
    any_float: bool = False,
    any_number: bool = False,
) -> None:
    """Refuses tensors of other names, shapes or dtypes than expected, and numbers that are not finite.

    Args:
        path: File that they were read from.
        expected: name → tensor of the shape and dtype that it should have.
        found: name → tensor that was read.
        remedy: Advice for the error.
        any_float: Whether a floating dtype may stand for another.
        any_number: Whether numbers may be other than finite.

    Raises:
        UserError: For what differs, by name.
    """
    shapes = [{name: str(list(value.shape)) for name, value in these.items()} for these in (expected, found)]
    dtypes = [{name: _dtype(value, any_float) for name, value in these.items()} for these in (expected, found)]
    for wanted, came in (shapes, dtypes):
        odd = sorted(name for name in wanted.keys() | came.keys() if wanted.get(name) != came.get(name))
        if odd:
            one, other = (", ".join(f"{name} {told.get(name, 'absent')}" for name in odd) for told in (wanted, came))
            raise UserError(str(path), expected=one, found=other, remedy=remedy)
    if not any_number:
        check_finite(path, found, remedy)


def check_finite(path: Path, tensors: Mapping[str, Tensor], remedy: str) -> None:
    """Refuses infinities and what is no number.

    Args:
        path: File that they were read from.
        tensors: name → tensor.
        remedy: Advice for the error.

    Raises:
        UserError: For the first tensor that has any.
    """
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise UserError(str(path), expected="finite numbers", found=f"others in {name}", remedy=remedy)


def _dtype(value: Tensor, any_float: bool) -> str:
    """The dtype as a word."""
    return "float" if any_float and value.is_floating_point() else str(value.dtype).removeprefix("torch.")
