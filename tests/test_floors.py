"""The import order is the architecture: a module imports strictly lower floors only."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "l2lopt.__main__": 10,
    "l2lopt.cli": 9,
    "l2lopt.experiments": 8,
    "optimisees": 7,
    "l2lopt.training": 6,
    "l2lopt.torch_optim": 5,
    "l2lopt.evaluation": 5,
    "l2lopt.kernels": 4,
    "l2lopt.terminal": 4,
    "l2lopt.weights": 4,
    "l2lopt.optimisers": 3,
    "l2lopt.sequence": 3,
    "l2lopt.estimators": 3,
    "l2lopt.report": 3,
    "l2lopt.optimisee": 2,
    "l2lopt.cells": 2,
    "l2lopt.storage": 2,
    "l2lopt.parallel": 2,
    "l2lopt.core": 1,
}
"""A module, or a package with all that is in it, → its floor. `l2lopt` itself is the public face, above all."""
OPEN_TO_OPTIMISEES = {f"l2lopt.{name}" for name in ("core", "storage", "cells", "sequence", "optimisee", "report")}


def sources():
    """Dotted name → source text of every module."""
    paths = [path for package in ("l2lopt", "optimisees") for path in (ROOT / package).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}


def unit(module):
    """The entry of `FLOORS` that a module belongs to; None if there is none."""
    return next((name for name in FLOORS if module == name or module.startswith(f"{name}.")), None)


def imports(module, source, known):
    """The modules of this project that a source imports anywhere: in functions, under TYPE_CHECKING, relatively."""
    found = set()
    is_package = any(other.startswith(f"{module}.") for other in known)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*(parents if node.level else []), *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known or unit(name) == name else base for name in inner}
    return {name for name in found if name.split(".")[0] in ("l2lopt", "optimisees")}


def violations(sources):
    """A line for each import that goes up or sideways, each cycle and each module without a floor."""
    graph = {module: imports(module, source, sources) for module, source in sources.items()}
    graph.pop("l2lopt", None)
    found = [f"{module} has no floor" for module in graph if unit(module) is None]
    for module, targets in graph.items():
        for target in targets:
            here, there = unit(module), unit(target)
            if here is None or there is None:
                found.append(f"{module} imports {target}")
            elif FLOORS[there] >= FLOORS[here] and here != there:
                found.append(f"{module} (floor {FLOORS[here]}) imports {target} (floor {FLOORS[there]})")
            elif here == "optimisees" and there not in {here, *OPEN_TO_OPTIMISEES}:
                found.append(f"{module} imports {target}, which is closed to optimisees")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(" imports ".join(error.args[1][::-1]))
    return found


def talkers(sources):
    """The modules that print, or that know a console."""
    found = set()
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if prints or any(name.split(".")[0] == "rich" for name in names):
                found.add(module)
    return found


def too_long(sources):
    """Modules above 400 lines and functions above 80, docstrings included: what cannot be read at one sitting."""
    found = [
        f"{module}: {source.count(chr(10))} lines" for module, source in sources.items() if source.count("\n") > 400
    ]
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80:
                found.append(f"{module}.{node.name}: {node.end_lineno - node.lineno + 1} lines")
    return found


def test_modules_and_functions_are_short():
    assert too_long(sources()) == []


def test_checker_finds_what_is_long():
    body = "def f():\n" + "    x = 1\n" * 80
    assert too_long({"a": body, "b": "x = 1\n" * 401}) == ["b: 401 lines", "a.f: 81 lines"]


def test_modules_import_lower_floors_only():
    assert violations(sources()) == []


def test_only_the_terminal_prints():
    assert talkers(sources()) == {"l2lopt.terminal"}


GOOD = {
    "l2lopt.core.errors": "import torch",
    "l2lopt.core.types": "from l2lopt.core.errors import UserError",
    "l2lopt.cells": "from l2lopt.cells.lstm import LSTM",
    "l2lopt.cells.lstm": "from l2lopt.cells.cell import Cell\nfrom . import cell",
    "l2lopt.cells.cell": "from ..core.types import Params",
    "l2lopt.optimisers": "from l2lopt import cells\nfrom l2lopt.core import types",
    "l2lopt.experiments.config": "import optimisees",
    "optimisees": "from l2lopt.cells.lstm import LSTM\nfrom optimisees.mlp import mlp",
    "optimisees.mlp": "from l2lopt.core.types import Params",
    "l2lopt": "from l2lopt.experiments.config import load",
}


def test_checker_lets_good_imports_pass():
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        (
            "l2lopt.core.types",
            "from l2lopt.experiments.config import load",
            "l2lopt.core.types (floor 1) imports l2lopt.experiments.config (floor 8)",
        ),
        (
            "l2lopt.core.types",
            "from l2lopt.experiments import config",
            "l2lopt.core.types (floor 1) imports l2lopt.experiments.config (floor 8)",
        ),
        (
            "l2lopt.core.types",
            "import l2lopt.kernels.lstm as k",
            "l2lopt.core.types (floor 1) imports l2lopt.kernels.lstm (floor 4)",
        ),
        (
            "l2lopt.core.types",
            "def f():\n    import optimisees",
            "l2lopt.core.types (floor 1) imports optimisees (floor 7)",
        ),
        (
            "l2lopt.cells.cell",
            "if TYPE_CHECKING:\n    from ..optimisers import Optimiser",
            "l2lopt.cells.cell (floor 2) imports l2lopt.optimisers (floor 3)",
        ),
        (
            "l2lopt.torch_optim.differentiable",
            "import l2lopt.evaluation.comparison",
            "l2lopt.torch_optim.differentiable (floor 5) imports l2lopt.evaluation.comparison (floor 5)",
        ),
        (
            "l2lopt.estimators",
            "from l2lopt import optimisers",
            "l2lopt.estimators (floor 3) imports l2lopt.optimisers (floor 3)",
        ),
        ("l2lopt.cells.cell", "from . import lstm", "l2lopt.cells.lstm imports l2lopt.cells.cell"),
        ("l2lopt.cells.cell", "from l2lopt.cells import LSTM", "l2lopt.cells.cell imports l2lopt.cells"),
        (
            "optimisees.mlp",
            "from l2lopt.estimators import Backprop",
            "optimisees.mlp imports l2lopt.estimators, which is closed to optimisees",
        ),
        ("l2lopt.training", "import optimisees", "l2lopt.training (floor 6) imports optimisees (floor 7)"),
        ("l2lopt.experiments.config", "from l2lopt import meta_loss", "l2lopt.experiments.config imports l2lopt"),
        ("l2lopt.novelty", "", "l2lopt.novelty has no floor"),
    ],
)
def test_checker_finds_bad_imports(module, source, found):
    assert any(found in line for line in violations(GOOD | {module: source}))


@pytest.mark.parametrize("source", ["def f():\n    print(1)", "from rich.console import Console", "import rich"])
def test_checker_finds_talkers(source):
    assert talkers({"l2lopt.training": source, "l2lopt.cells": "from l2lopt import console"}) == {"l2lopt.training"}
