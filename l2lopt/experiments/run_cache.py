"""The store of free runs: JSON files that are read again where everything that a run depends on is the same.

A file names its `work`, all that the losses in it depend on; a file of another work is as good as none, and so is one
with another value for a default that it has `beside` its work. A number that is not finite is null in the file and NaN
when it is read again.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from l2lopt.core.digest import as_written, opened
from l2lopt.core.registry import Choice
from l2lopt.evaluation.contestants import tuned_name
from l2lopt.evaluation.free_runs import Curves
from l2lopt.evaluation.settings import SPLITS, Baseline
from l2lopt.evaluation.tuned_runs import Choices, OptimiserRun, TunedRun, choice_facts
from l2lopt.experiments.run_facts import problem_facts, run_defaults, run_facts
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.storage.checkpoint import Checkpoint, CheckpointFile
from l2lopt.storage.run_log import write_json

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)
"""The errors of reading a file that is absent or damaged: it is made anew."""


class MissingRunError(Exception):
    """A group of runs that is in no file."""


class FileCache:
    """A `RunCache` of JSON files, one for each group of runs, named by a hash of what the runs depend on.

    Args:
        folder: Folder of the files, made when the first is written.
        work: Facts that all groups depend on, such as the problem, its data and an optimiser's weights.
        beside: Defaults that they depend on as well, as `run_defaults` gives them: a stored group without a word on one
            is taken for a group of its value.

    Example:
        >>> import optimisees
        >>> from l2lopt.evaluation.settings import Baseline, EvaluationSettings
        >>> from l2lopt.evaluation.tuned_runs import Problems, optimiser_run
        >>> cache = FileCache("runs/cache/quadratic", {"optimisee": "quadratic"})
        >>> settings = EvaluationSettings(seeds=2, steps=5, horizons=[5])
        >>> problems = Problems(optimisees.make("quadratic"), settings, cache=cache)
        >>> run = optimiser_run(Baseline(optimiser="sgd", rates=[0.01]).contestant(), problems)  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | Path, work: Mapping[str, Any], beside: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.folder, self.work, self.beside = Path(folder), work, beside

    def __call__(self, work: Mapping[str, Any], make: Callable[[Checkpoint], Curves]) -> Curves:
        """The curves of a group: read where they are there, made and written where they are not.

        Runs that were interrupted go on from their checkpoint, which lies beside the files of the others.
        """
        text = self._text(work)
        try:
            return self.read(work)
        except MissingRunError:
            unfinished = CheckpointFile(self._path(text).with_suffix(".safetensors"), {"work": text, **self.beside})
            curves = make(unfinished)
        rows = {split: losses.tolist() for split, losses in curves.losses.items()}
        facts = {"steps": curves.steps, "losses": rows, "first": curves.first.tolist(), "seconds": curves.seconds}
        made = {"work": text, **_record(self.beside), **facts, **_precision(curves.first, *curves.losses.values())}
        write_json(self._path(text), made, seal=True)
        unfinished.path.unlink(missing_ok=True)
        return curves

    def read(self, work: Mapping[str, Any], make: Callable[[Checkpoint], Curves] | None = None) -> Curves:
        """The curves of a group that was made before: a `RunCache` that makes none.

        Args:
            work: Facts that the group depends on, besides those of all groups.
            make: Function that would make the group; it is not called.

        Raises:
            MissingRunError: Where there are none.
        """
        text = self._text(work)
        try:
            stored = opened(json.loads(self._path(text).read_text(encoding="utf-8")))
            # The name has a part of the hash only, so the file itself says what it was made from.
            if stored["work"] == text and _agrees(stored, self.beside):
                return _curves(stored, work.get("splits", ()))
        except _UNREADABLE:
            pass
        raise MissingRunError

    def _text(self, work: Mapping[str, Any]) -> str:
        return json.dumps({**self.work, **work}, sort_keys=True)

    def _path(self, text: str) -> Path:
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def contestant_caches(
    folder: str | Path,
    choice: Choice | Optimisee,
    optimisee: Optimisee,
    baselines: Sequence[Baseline],
    rules: Mapping[str, Optimiser] = MappingProxyType({}),
) -> dict[str, FileCache]:
    """The store of each contestant's runs on a problem, all in one folder: name → store.

    A learned rule's second row, with the best multiplier, is a contestant of its own.

    Args:
        folder: Folder of the files.
        choice: Choice of the problem, or the problem itself.
        optimisee: Problem.
        baselines: Baselines.
        rules: Name → learned rule, as it takes part.
    """
    problem = problem_facts(choice, optimisee)

    def cache(optimiser: Optimiser | Baseline) -> FileCache:
        return FileCache(folder, run_facts(problem, optimiser), run_defaults(choice, optimiser))

    caches = {baseline.name: cache(baseline) for baseline in baselines}
    for name, rule in rules.items():
        caches[name] = caches[tuned_name(name)] = cache(rule)
    return caches


def write_run(
    path: Path, work: Mapping[str, Any], run: OptimiserRun, beside: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes an optimiser's whole run.

    Args:
        path: File to write.
        work: Facts that the run depends on.
        run: Run.
        beside: Defaults that it depends on as well.
    """
    losses = {split: {str(step): row.tolist() for step, row in steps.items()} for split, steps in run.losses.items()}
    facts = {
        "kind": run.kind,
        "seconds": run.seconds,
        "warnings": run.warnings,
        "chosen": choice_facts(run.chosen),
        "cut": run.cut,
    }
    facts |= {
        "first": run.first.tolist(),
        "losses": losses,
        **_precision(run.first, *(row for steps in run.losses.values() for row in steps.values())),
    }
    write_json(path, {"work": work, **_record(beside), **facts}, seal=True)


def read_run(
    path: Path, work: Mapping[str, Any], beside: Mapping[str, str] = MappingProxyType({})
) -> OptimiserRun | None:
    """An optimiser's run that was written before; None where there is none, or one of another work or default.

    Args:
        path: File to read.
        work: Facts that the run is to depend on.
        beside: Defaults that it is to depend on as well.
    """
    try:
        facts = opened(json.loads(path.read_text(encoding="utf-8")))
        if facts["work"] != as_written(work) or not _agrees(facts, beside):
            return None
        first = _tensor(facts, facts["first"])
        losses: dict[Any, dict[int, Tensor]] = {
            split: {int(step): _tensor(facts, row, len(first)) for step, row in facts["losses"][split].items()}
            for split in SPLITS
        }
        chosen: Choices = {
            split: {int(horizon): TunedRun(**tuned) for horizon, tuned in by_horizon.items()}
            for split, by_horizon in facts["chosen"].items()
        }
        _check(losses, facts)
        rest = float(facts["seconds"]), chosen, list(map(str, facts["warnings"])), bool(facts["cut"])
        return OptimiserRun(facts["kind"], losses, first, *rest)
    except _UNREADABLE:
        return None


def file_digest(path: Path) -> str | None:
    """The SHA-256 of a file's content; None where there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _record(beside: Mapping[str, str]) -> dict[str, Any]:
    """What a file says of defaults, if there are any."""
    return {"beside": dict(beside)} if beside else {}


def _agrees(stored: Mapping[str, Any], beside: Mapping[str, str]) -> bool:
    """Whether a file has no other default: one that it does not name was there before it was written down."""
    known = stored.get("beside", {})
    return all(known.get(option, value) == value for option, value in beside.items())


def _curves(stored: Mapping[str, Any], splits: Sequence[str]) -> Curves:
    """The curves of a file, with those of each of the splits among them.

    Raises:
        ValueError: For parts that do not fit one another, as in a damaged file without a digest.
    """
    steps, first = list(map(int, stored["steps"])), _tensor(stored, stored["first"])
    losses: dict[Any, Tensor] = {
        split: _tensor(stored, stored["losses"][split], len(steps), len(first)) for split in splits or stored["losses"]
    }
    return Curves(steps, losses, first, float(stored["seconds"]))


def _check(losses: Mapping[Any, Mapping[int, Tensor]], facts: Mapping[str, Any]) -> None:
    """Refuses a run without the losses that its comparison reads.

    Raises:
        ValueError: If some are missing, as in a damaged file without a digest.
    """
    if facts["kind"] not in ("learned", "baseline"):
        raise ValueError(f"a run of the kind {facts['kind']!r}")
    evaluation = facts["work"].get("evaluation") or {}
    needed = {0, *evaluation.get("horizons", ()), *([evaluation["steps"]] if "steps" in evaluation else ())}
    for split, steps in losses.items():
        if needed - steps.keys():
            raise ValueError(f"no {split} loss at {sorted(needed - steps.keys())}")


def _precision(*losses: Tensor) -> dict[str, str]:
    """What a file says of losses in float64, if some are; those without a word are float32."""
    return {"dtype": "float64"} if any(values.dtype == torch.float64 for values in losses) else {}


def _tensor(stored: Mapping[str, Any], rows: Any, *shape: int) -> Tensor:
    """Numbers of a file as a tensor.

    Raises:
        ValueError: For one of another shape, where a shape is given.
    """
    dtype = torch.float64 if stored.get("dtype") == "float64" else torch.float32
    found = torch.tensor(_with_nan(rows), dtype=dtype)
    if shape and found.shape != shape:
        raise ValueError(f"shape {tuple(found.shape)} where {shape} belongs")
    return found


def _with_nan(rows: Any) -> Any:
    """Nested lists of numbers with NaN for None."""
    if isinstance(rows, list):
        return [_with_nan(row) for row in rows]
    return math.nan if rows is None else rows
