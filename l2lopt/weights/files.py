"""Learned optimisers as safetensors files, whose header says how to build the optimiser. Nothing is unpickled.

The files in `pretrained/` come with the package and are found by name.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from l2lopt import cells, optimisers
from l2lopt.core import registry
from l2lopt.core.digest import bytes_of
from l2lopt.core.errors import UserError, within
from l2lopt.core.layout import Layout
from l2lopt.core.memory import watched
from l2lopt.core.registry import Choice
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.rule_check import options, written
from l2lopt.storage import tensor_file
from l2lopt.storage.run_log import existing

VERSION = 1
"""Version of the file layout: the header's one key `l2lopt` holds {"version", "release", "optimiser", "training"}."""
DIGEST = 2
"""Of what `digest` makes. The first version stood without a number, and changed with the name of any class of ours."""
_FIELDS = {"version": int, "release": str, "optimiser": dict, "training": dict}
"""Fields of the header, and the types of their values."""
_AGAIN = "meta-train again, or get the file again"
_Part: TypeAlias = tuple[str, type, dict[str, str]]
"""A part of an optimiser: its name, its class and its options."""
HOME = Path(__file__).with_name("pretrained")
"""Folder of the files that come with the package."""


def list_weights() -> list[str]:
    """The names of the learned optimisers that come with the package; `weights.files.header(name)` has their recipe.

    Example:
        >>> import l2lopt
        >>> l2lopt.list_weights()
        ['coordinatewise-ihc-lstm', 'coordinatewise-lstm', 'ihc-lstm', 'lstm']
    """
    return sorted(path.stem for path in HOME.glob("*.safetensors"))


def find(weights: str | Path) -> Path:
    """The file of a name in `list_weights()`, that of a folder which meta-training has left, or the path as it is.

    Raises:
        UserError: If there is no such name and no such file.
    """
    given: object = weights
    if not isinstance(given, str | os.PathLike):
        expected, found = "a name or a file", f"a {type(given).__name__}"
        raise UserError("weights", expected=expected, found=found, remedy="use 'lstm', for instance")
    if isinstance(weights, str) and weights in list_weights():
        return HOME / f"{weights}.safetensors"
    if os.path.isfile(own := Path(os.path.expanduser(weights), "optimiser.safetensors")):
        return own
    known, asked = [*list_weights(), *optimisers.UNTUNED], str(weights).lower().replace("_", "-")
    near = ["normalised-muon"] if asked == "harness" else get_close_matches(asked, known, n=1)
    near = [name for name in near if name != str(weights)]
    remedy = f"did you mean {near[0]!r}?" if near else f"give a file of l2lopt meta-train, or one of {', '.join(known)}"
    if weights in optimisers.UNTUNED:
        remedy = "it has no weights: give its name to LearnedOptimizer or l2lopt.optimisers.make"
    return existing(Path(os.path.expanduser(weights)), "a learned optimiser", remedy)


def save(optimiser: Optimiser, path: str | Path, training: Mapping[str, Any] | None = None) -> None:
    """Writes φ, the buffers and the description of an optimiser to a safetensors file, by rename.

    Example:
        >>> import tempfile, l2lopt
        >>> from l2lopt import optimisers
        >>> optimiser = optimisers.make("coordinatewise", cell="lstm", hidden_size=4)
        >>> path = tempfile.mkdtemp() + "/mine.safetensors"
        >>> l2lopt.save(optimiser, path, training={"hours": 0})
        >>> sum(value.numel() for value in l2lopt.load(path).parameters()) == sum(
        ...     value.numel() for value in optimiser.parameters()
        ... )
        True

    Args:
        optimiser: Optimiser built by `optimisers.make`, which gives it its description.
        path: File to write; its folder is made if need be.
        training: Facts of its meta-training for the header, in values that JSON can express.

    Raises:
        UserError: For an optimiser without a description, one with other options than it says, or one with numbers that
            are not finite; the file is left as it is.
    """
    given: Any = optimiser
    if not isinstance(given, Optimiser):
        remedy = "give a rule, such as l2lopt.load gives"
        raise UserError("save", expected="an optimiser", found=f"a {type(given).__name__}", remedy=remedy)
    path = Path(os.path.expanduser(path))  # not `Path.expanduser`, which raises for a user that is none
    if os.path.isdir(path):  # not `Path.is_dir`, which raises for a name that no file can have
        raise UserError(str(path), expected="a file to write", found="a folder", remedy="add a file's name")
    if optimiser.description is None:
        remedy = "build it with l2lopt.optimisers.make"
        raise UserError("save", expected="an optimiser with a description", found="none", remedy=remedy)
    if differing := _differing(optimiser):
        expected, remedy = "the options of its description", "build it with these options by l2lopt.optimisers.make"
        raise UserError("save", expected=expected, found=f"others: {', '.join(differing)}", remedy=remedy)
    header = {
        "version": VERSION,
        "release": version("l2lopt"),
        "optimiser": dict(optimiser.description),
        "training": dict(training or {}),
    }
    for part in ("training", "optimiser"):
        try:
            json.dumps(header[part])
        except (TypeError, ValueError) as error:
            remedy = "give plain numbers, texts, lists and tables"
            raise UserError(f"save: {part}", expected="values of JSON", found=str(error), remedy=remedy) from None
    tensor_file.check_finite(path, _numbers(optimiser), "meta-train again, with a lower rate")
    tensor_file.write(path, "l2lopt", header, _numbers(optimiser))


def header(path: str | Path) -> dict[str, Any]:
    """The header of a file: a table of "version", "release", "optimiser" and "training".

    "release" is the release of l2lopt that wrote the file; "optimiser" the choice that builds it; "training" its
    meta-training: the cost, and for the weights in the package the config and a table of comparisons.

    Args:
        path: File written by `save`, or a name in `list_weights()`.

    Raises:
        UserError: For a missing, damaged or foreign file.
    """
    return _read(find(path))[0]


def load(path: str | Path, *, trusted: bool = False) -> Optimiser:
    """Builds the optimiser of a file and loads its φ.

    Example:
        >>> import l2lopt
        >>> optimiser = l2lopt.load("lstm")
        >>> optimiser.description["name"]
        'hierarchical'

    To train a model with it, pass the name or file to `l2lopt.LearnedOptimizer`.

    Args:
        path: File written by `save`, or a name in `list_weights()`.
        trusted: Whether the file may name modules ("mypackage.mymodule:Cell") that are then imported. That runs their
            code, so set it for your files only.

    Raises:
        UserError: For a missing, damaged or foreign file, tensors that do not fit the description, or a file that names
            a module.
    """
    path = find(path)
    read, tensors = _read(path)
    # Float32, whatever PyTorch's default is: the default would round φ, or give it another digest.
    optimiser = _build(path, read["optimiser"], tensors, trusted).to(torch.float32)
    # A rule that was meta-trained in another precision is rounded.
    tensor_file.check_tensors(path, _numbers(optimiser), tensors, _AGAIN, any_float=True)
    # Not strict: the comparison above has found whatever is missing or odd.
    optimiser.load_state_dict(tensors, strict=False)
    tensor_file.check_finite(path, _numbers(optimiser), _AGAIN)
    return optimiser


def from_choice(choice: Mapping[str, Any]) -> Optimiser:
    """The learned optimiser of a table of `weights`, a file or name, beside which may be `trusted`; see `load`.

    Raises:
        UserError: For what `load` refuses, a key beside these, and a value of another type.
    """

    def loaded(weights: str, trusted: bool = False) -> Optimiser:
        return load(weights, trusted=trusted)

    made: Optimiser = registry.make({"weights": loaded}, "optimiser", "weights", **choice)
    return made


def digest(optimiser: Optimiser) -> str:
    """What an optimiser does, as "2:" and 16 hexadecimal digits: what it is, and its φ and buffers.

    What it is is its description, whatever the names of classes and attributes are. Where there is none, or where the
    optimiser is not what its description builds (someone has set an option by hand), it is the state that it keeps, and
    of each part its name in the tables (of a part that is in none, its class unless that is ours) and its plain values
    in the order they were set in: sorted, two options with their values exchanged would be one rule. Such a digest
    changes with an attribute that comes or goes, so what has to last is built by `optimisers.make`.
    """
    what = _canonical(optimiser.description) if _is_as_described(optimiser) else _by_hand(optimiser)
    found = hashlib.sha256(json.dumps(what, sort_keys=True, default=written).encode())
    # Sorted, so that the order of registration does not count.
    for name, value in sorted(_numbers(optimiser).items()):
        # With precision and shape: the same bytes may stand for other numbers.
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(bytes_of(value))
    return f"{DIGEST}:{found.hexdigest()[:16]}"


def is_old(mark: Any) -> bool:
    """Whether `mark` is a digest of the first version, which cannot be made any more."""
    return isinstance(mark, str) and re.fullmatch("[0-9a-f]{16}", mark) is not None


def _numbers(optimiser: Optimiser) -> dict[str, Tensor]:
    """φ, the buffers and the parameters that a rule's own `phi` leaves out, which are not trained and count as well."""
    return {**dict(optimiser.named_parameters()), **optimiser.phi(), **dict(optimiser.named_buffers())}


def _is_as_described(optimiser: Optimiser) -> bool:
    """Whether the description builds the like of this optimiser, but for φ."""
    return _described(optimiser) == _parts(optimiser)


def _described(optimiser: Optimiser) -> list[_Part]:
    """The parts of what the description builds; none where there is none, or it is of another table than ours."""
    if optimiser.description is None:
        return []
    try:
        return _parts(optimisers.build(dict(optimiser.description)))
    except UserError:
        return []


def _differing(optimiser: Optimiser) -> list[str]:
    """The options that were set by hand, which a file of the description and φ would lose."""
    described = {name: options for name, _, options in _described(optimiser)}
    return [
        f"{name}.{key}" if name else key
        for name, _, options in (_parts(optimiser) if described else ())
        for key, value in options.items()
        # What a rule notes while it works, such as the size that `init` was told, is no option.
        if name not in described or described[name].get(key, value) != value
    ]


def _parts(optimiser: Optimiser) -> list[_Part]:
    """Every part with its options; the same for optimisers that differ in φ only."""
    return [(name, type(part), options(part)) for name, part in optimiser.named_modules()]


def _canonical(choice: Any) -> Any:
    """A description with one way to say a thing: a name for a table of a name alone, lists for tuples."""
    if isinstance(choice, Mapping):
        return choice["name"] if [*choice] == ["name"] else {key: _canonical(value) for key, value in choice.items()}
    return [_canonical(item) for item in choice] if isinstance(choice, list | tuple) else choice


def _by_hand(optimiser: Optimiser) -> Any:
    """What an optimiser is, as far as it shows without a description."""
    state = optimiser.init(Layout(("one",), ((1,),)))
    tables: list[Mapping[str, Any]] = [optimisers.OPTIMISERS, optimisers.INPUTS, optimisers.RULES]
    tables += [optimisers.DIRECTIONS, cells.CELLS, cells.CORES]
    names = {entry: name for table in tables for name, entry in table.items() if isinstance(entry, type)}
    parts = [(names.get(type(part)) or _class(part), list(options(part).values())) for part in optimiser.modules()]
    return [sorted(state.coordinates), sorted(state.shared), parts]


def _class(part: nn.Module) -> str | None:
    """The name of a class that is not ours to rename."""
    return None if type(part).__module__.startswith("l2lopt.") else type(part).__qualname__


def _build(path: Path, choice: Choice, tensors: Mapping[str, Tensor], trusted: bool) -> Optimiser:
    """The optimiser that a file describes, whose parts are no larger than what the file has for them."""
    most = sum(value.nbytes for value in tensors.values())
    try:
        with within(str(path)), nullcontext() if trusted else registry.only_registered(), watched("header", 16 * most):
            return optimisers.build(choice)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        expected = "the description of a learned optimiser"
        raise UserError(f"{path}: header", expected=expected, found=str(error), remedy=_AGAIN) from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    what, remedy = "a learned optimiser", "give a file that l2lopt meta-train has written"
    read, tensors = tensor_file.read(path, "l2lopt", what, remedy)
    if read.get("version") != VERSION:
        writer = f"l2lopt {read['release']}" if "release" in read else "another release of l2lopt"
        found, remedy = f"layout {read.get('version')}, written by {writer}", f"use {writer} to read it"
        raise UserError(str(path), expected=f"file layout {VERSION}", found=found, remedy=remedy)
    tensor_file.check_header(path, read, _FIELDS, what, remedy)
    if not isinstance(name := read["optimiser"].get("name"), str):
        raise UserError(f"{path}: header", expected="an optimiser's name", found=repr(name), remedy=remedy)
    return read, tensors
