"""What free runs depend on beside their seeds, rates and steps: one key in a `FileCache` for benchmarks and studies.

Runs are equal up to rounding where these facts are: the number of threads and the form of a step are not among them.
"""

import ast
import hashlib
import importlib.util
import inspect
import linecache
import logging
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import optimisees
from l2lopt import cells, optimisers
from l2lopt.core.registry import Choice, Table
from l2lopt.evaluation.settings import Baseline
from l2lopt.experiments import from_python
from l2lopt.experiments.config import Config, TrainConfig
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel.jobs import fingerprint
from l2lopt.weights import files

_log = logging.getLogger("l2lopt")
MAIN = "__main__"
"""The module of a script or notebook that is running."""
FORMAT = 3
"""Number of what a free run is: raised when runs of equal settings become others, so that old ones are made anew."""
_TABLES: Mapping[str, Table] = {
    "optimiser": optimisers.OPTIMISERS,
    "direction": optimisers.DIRECTIONS,
    "rule": optimisers.RULES,
    "inputs": optimisers.INPUTS,
    "optimisee": optimisees.OPTIMISEES,
    **dict.fromkeys(("cell", "encoder", "decoder"), cells.CELLS),
}
"""Option → the table that its choice is from."""


def problem_facts(choice: Choice | Optimisee, optimisee: Optimisee) -> dict[str, Any]:
    """What tells a problem from others: how it is chosen, its data, and its device where that is no CPU.

    Args:
        choice: Choice of the problem, or the problem itself.
        optimisee: The problem.
    """
    said = from_python.describe(optimisee) if isinstance(choice, Optimisee) else _shortest(choice)
    device = next((value.device.type for value in optimisee.init(0)[0].values()), "cpu")
    facts = {"optimisee": said, **optimisee.fingerprint(), **({} if device == "cpu" else {"device": device})}
    return facts if isinstance(choice, Optimisee) else facts | own_facts(choice, optimisee) | code_of(choice)


def own_facts(choice: Choice, optimisee: Optimisee) -> dict[str, Any]:
    """What tells a problem of a module of one's own, "module:function", from what its code made before.

    The name stays where the code changes, so the problem itself is described. Nothing for a problem of the library.
    """
    return {"described": from_python.describe(optimisee)} if _modules(choice) else {}


def run_facts(problem: dict[str, Any], optimiser: Optimiser | Baseline) -> dict[str, Any]:
    """What all runs of an optimiser on a problem depend on.

    Args:
        problem: Result of `problem_facts`.
        optimiser: A rule of ours in the dtype of the problem, which takes part as it is, or a baseline with rates.
    """
    facts = fingerprint(format=FORMAT, **problem)
    if isinstance(optimiser, Optimiser):
        return facts | {"rule": files.digest(optimiser), **code_of(optimiser.description)}
    return facts | {
        "optimiser": _shortest(optimiser.optimiser),
        "schedule": optimiser.schedule,
        **code_of(optimiser.optimiser),
    }


def run_defaults(problem: Choice | Optimisee, optimiser: Optimiser | Baseline | Choice) -> dict[str, str]:
    """The defaults that runs depend on: option → value, of all that the two choices leave out, at any depth.

    They are no part of `run_facts`, so that earlier runs stay those of their key when an option is added. A run is
    stored with them beside it, which tells it from runs of the same choice under another default.

    Args:
        problem: Choice of the problem, or the problem itself, which leaves nothing out.
        optimiser: A learned rule, a baseline, or a choice.
    """
    if isinstance(optimiser, Baseline):
        found = _defaults("optimiser", "optimiser", optimiser.optimiser)
        found.pop("optimiser.lr", None)  # it has rates of its own
    else:
        choice = optimiser.description if isinstance(optimiser, Optimiser) else optimiser
        found = _defaults("optimiser", "optimiser", choice)
    return found | _defaults("optimisee", "optimisee", problem)


def package_of(baseline: Baseline) -> str | None:
    """The package of an optimiser that is named as "module:Class"; None for one of ours."""
    module, colon, _ = _name(baseline.optimiser).partition(":")
    return module.partition(".")[0] if colon else None


def code_of(choice: Any) -> dict[str, str]:
    """The releases of all that is named as "module:attribute" in a choice; nothing for our own names and for torch's.

    Code that may change without a release, as it is not among the installed packages, has a digest as well.

    Args:
        choice: Choice of an optimiser, or a rule's description.
    """
    found: dict[str, str] = {}
    for module in _modules(choice):
        package = module.partition(".")[0]
        if package != "torch":
            found |= {**_versions(package), **_source(package)}
    return found


def weights_file(choice: Choice) -> Path | None:
    """The file of the weights that an optimiser is loaded from; None for another optimiser."""
    return None if isinstance(choice, str) or "weights" not in choice else files.find(choice["weights"])


def weights_of(choice: Choice) -> dict[str, str]:
    """The digest of the weights that an optimiser is loaded from; nothing for another optimiser."""
    path = weights_file(choice)
    return {} if path is None else {"weights": hashlib.sha256(path.read_bytes()).hexdigest()}


def recipe_of(config: Config | TrainConfig, *without: str) -> dict[str, Any]:
    """The settings that a run depends on: all but its label, and of weights not the place, as `weights_of` tells them.

    Args:
        config: Config of the run.
        without: Further settings to leave out.
    """
    told = config.model_dump(mode="json", exclude={"label", *without})
    if isinstance(told["optimiser"], dict):
        told["optimiser"].pop("weights", None)
    return told


def _defaults(place: str, option: str, choice: Any) -> dict[str, str]:
    """`run_defaults` of one choice: nothing for what is none, and for one that is from no table of ours.

    Args:
        place: Options on the way to the choice.
        option: Option that it is the value of.
        choice: Choice.
    """
    options = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(options, Mapping):
        return {}
    entry = _TABLES[option].get(str(options.get("name")))
    if entry is None:
        return {}
    left_out = {
        name: parameter.default
        for name, parameter in inspect.signature(entry).parameters.items()
        if name not in options and isinstance(parameter.default, int | float | str | tuple | list | None)
    }
    found = {f"{place}.{name}": repr(value) for name, value in left_out.items()}
    # A part that is a default itself has defaults as well.
    for name, value in {**left_out, **options}.items():
        if name in _TABLES:
            listed = isinstance(value, list | tuple)
            parts = {f"{name}.{k}": part for k, part in enumerate(value)} if listed else {name: value}
            for key, part in parts.items():
                found |= _defaults(f"{place}.{key}", name, part)
    return found


def _modules(choice: Any) -> list[str]:
    """The modules of all that is named as "module:attribute" in a choice, at any depth."""
    if isinstance(choice, str):
        module, _, attribute = choice.partition(":")
        named = attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))
        return [module] if named else []
    parts = choice.values() if isinstance(choice, dict) else choice if isinstance(choice, list | tuple) else ()
    return list(dict.fromkeys(module for part in parts for module in _modules(part)))


@cache
def _versions(package: str) -> dict[str, str]:
    """The versions of all that is installed as this package. It takes half a second, whatever the package."""
    return {f"version of {name}": version(name) for name in packages_distributions().get(package, [])}


def _source(package: str) -> dict[str, str]:
    """The digest of the files of a package or module of one's own, and of the modules beside it that it imports."""
    first = _place_of(package)
    if first is None:
        return {f"source of {package}": _definitions()} if package == MAIN else {}
    if {"site-packages", "dist-packages"} & {*first.parts}:
        return {}
    home, files = first.parent, dict[Path, bytes]()
    waiting = [first]
    while waiting:
        place = waiting.pop()
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if path not in files:
                files[path] = path.read_bytes()
                waiting += [
                    beside
                    for name in _imported(files[path])
                    for beside in (home / name, home / f"{name}.py")
                    # A folder beside may have a package's name alone: a checkout, or a place for its data.
                    if (beside / "__init__.py").is_file() or beside.is_file() or _is_plain_folder(name, beside)
                ]
    digest = hashlib.blake2b(digest_size=16)
    for path, content in sorted(files.items()):
        digest.update(f"{path.relative_to(home).as_posix()} {len(content)}".encode() + content)
    return {f"source of {package}": digest.hexdigest()}


def _place_of(package: str) -> Path | None:
    """The file of a module, or the folder of a package, whether it has an `__init__.py` or not; None where neither is.

    Of a package without one that lies in several folders, the first.
    """
    if package == MAIN:  # which has no spec where it is a script
        origin, folders = getattr(sys.modules[MAIN], "__file__", None), list[str]()
    else:
        found = importlib.util.find_spec(package)
        origin = None if found is None else found.origin
        folders = list(found.submodule_search_locations or ()) if found is not None and origin is None else []
    if folders:
        return Path(folders[0]).absolute()
    if origin is None or not Path(origin).is_file():
        return None
    path = Path(origin).absolute()
    return path.parent if path.name == "__init__.py" else path


def _is_plain_folder(name: str, folder: Path) -> bool:
    """Whether a name is imported from this folder, which has no `__init__.py`."""
    try:
        return folder.is_dir() and name != MAIN and _place_of(name) == folder
    except ValueError:  # a module that was made by hand and has no spec
        return False


def _definitions() -> str:
    """The digest of the classes and functions of `__main__` where it is no script, such as in a notebook.

    A name is said in the log where there is no source of it.
    """
    own = {
        name: value
        for name, value in sorted(vars(sys.modules[MAIN]).items())
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == MAIN
    }
    texts = {name: _definition(value) for name, value in own.items()}
    if lost := tuple(name for name, text in texts.items() if text is None):
        _tell_lost(lost)
    return hashlib.blake2b(repr(texts).encode(), digest_size=16).hexdigest()


def _definition(made: Any) -> str | None:
    """The source of a class or function, without its comments; None where there is none.

    `inspect.getsource` looks for a class in the file of its module, which a notebook has not: but each of the class's
    methods knows its cell.
    """
    for function in [made] if inspect.isfunction(made) else filter(inspect.isfunction, vars(made).values()):
        text = "".join(linecache.getlines(inspect.unwrap(function).__code__.co_filename))
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            nodes = []
        kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        found = [ast.unparse(node) for node in nodes if isinstance(node, kinds) and node.name == made.__name__]
        if found or text:
            return "\n".join(found) or text  # of a lambda the cell
    return None


@cache
def _tell_lost(names: tuple[str, ...]) -> None:
    """Says once whose changes are not noticed."""
    said = "there is no source of %s, so runs with it are not told apart when it changes: put it into a module"
    _log.warning(said, ", ".join(names))


def _imported(source: bytes) -> set[str]:
    """The packages and modules that a file imports; none of one that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _name(choice: Choice) -> str:
    return choice if isinstance(choice, str) else str(choice.get("name", ""))


def _shortest(choice: Choice) -> Choice:
    """A choice without options as its name alone: a table with a name and nothing else means the same."""
    return choice["name"] if not isinstance(choice, str) and choice.keys() == {"name"} else choice
