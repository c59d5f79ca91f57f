"""Learned optimisers as safetensors files; the header says how to build the optimiser. Nothing is unpickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from l2lopt import optimisers
from l2lopt.errors import UserError
from l2lopt.optimisers import Optimiser
from l2lopt.records import existing, written_whole

VERSION = 1
"""Of the file's layout: the header's one key `l2lopt` holds {"version", "optimiser", "training"} as JSON."""


def save(optimiser: Optimiser, path: str | Path, training: Mapping[str, Any] | None = None) -> None:
    """Writes φ and the optimiser's description to a safetensors file, by rename.

    Args:
        optimiser: built by `optimisers.make`, so that it knows its description.
        path: of the file.
        training: what is worth knowing of its meta-training; kept in the header.

    Raises:
        UserError: for an optimiser without a description.
    """
    if optimiser.description is None:
        remedy = "build it with l2lopt.optimisers.make"
        raise UserError("save", expected="an optimiser with a description", found="none", remedy=remedy)
    header = {"version": VERSION, "optimiser": dict(optimiser.description), "training": dict(training or {})}
    tensors = {name: value.detach().cpu().contiguous() for name, value in optimiser.phi().items()}
    with written_whole(Path(path)) as temporary:
        # One key: the order of several would differ from one process to the next, and with it the file's bytes.
        save_file(tensors, temporary, metadata={"l2lopt": json.dumps(header, sort_keys=True)})


def header(path: str | Path) -> dict[str, Any]:
    """The header {"version", "optimiser", "training"} of a file written by `save`.

    Raises:
        UserError: for a missing, damaged or foreign file.
    """
    return _read(Path(path))[0]


def load(path: str | Path) -> Optimiser:
    """The optimiser in a file written by `save`, built again with its φ.

    Raises:
        UserError: for a missing, damaged or foreign file, or one of another layout.
    """
    path = Path(path)
    read, tensors = _read(path)
    optimiser = optimisers.build(read["optimiser"])
    wanted = {name: tuple(value.shape) for name, value in optimiser.phi().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != found:
        odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        remedy = "meta-train again, or get the file again"
        expected = ", ".join(f"{name} {list(wanted[name]) if name in wanted else 'absent'}" for name in odd)
        came = ", ".join(f"{name} {list(found[name]) if name in found else 'absent'}" for name in odd)
        raise UserError(str(path), expected=expected, found=came, remedy=remedy)
    optimiser.load_state_dict(tensors, strict=False)
    return optimiser


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    existing(path, "a weights file", "meta-train first: l2lopt meta-train CONFIG")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        remedy = "get or make the file again"
        raise UserError(str(path), expected="a whole safetensors file", found=str(error), remedy=remedy) from None
    try:
        read = json.loads(metadata["l2lopt"])
    except (KeyError, json.JSONDecodeError):
        remedy = "give a file that l2lopt meta-train has written"
        raise UserError(str(path), expected="a learned optimiser", found="other tensors", remedy=remedy) from None
    if read.get("version") != VERSION:
        remedy = "use the release of l2lopt that wrote it"
        raise UserError(
            str(path), expected=f"file layout {VERSION}", found=f"layout {read.get('version')}", remedy=remedy
        )
    return read, tensors
