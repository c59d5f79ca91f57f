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
        path: of the file.
        key: what kind of file it is.
        header: anything JSON can say, infinities included.
        tensors: by name.
    """
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with written_whole(path) as temporary:
        # One key: the order of several would differ from one process to the next, and with it the file's bytes.
        save_file(own, temporary, metadata={key: json.dumps(header, sort_keys=True)})


def read(path: Path, key: str, what: str, remedy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a file that `write` has written under `key`.

    Raises:
        UserError: for a missing, damaged or foreign file; `what` says what it should be, `remedy` what to do.
    """
    existing(path, what, remedy)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), expected="a whole safetensors file", found=str(error), remedy=remedy) from None
    try:
        header = json.loads(metadata[key])
    except (KeyError, json.JSONDecodeError):
        raise UserError(str(path), expected=what, found="other tensors", remedy=remedy) from None
    return header, tensors
