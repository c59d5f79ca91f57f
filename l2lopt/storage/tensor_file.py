"""Tensors with a JSON header in one safetensors file, written by rename. Nothing is unpickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import existing, written_whole


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
        save_file(own, temporary, metadata={key: json.dumps(header, sort_keys=True)})


def read(path: Path, key: str, what: str, remedy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a file of `write`.

    Args:
        path: File to read.
        key: Kind of the file, as given to `write`.
        what: Description of such a file for the error, such as "a checkpoint".
        remedy: Advice for the error.

    Raises:
        UserError: For a missing or damaged file, or one of another kind.
    """
    existing(path, what, remedy)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping: it cannot be iterated over
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), expected="a whole safetensors file", found=str(error), remedy=remedy) from None
    try:
        header = json.loads(metadata[key])
    except (KeyError, json.JSONDecodeError):
        raise UserError(str(path), expected=what, found="other tensors", remedy=remedy) from None
    return header, tensors
