"""The contract between a study and an application: results, columns, and yardsticks beside the trained runs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from l2lopt.core.layout import Params
from l2lopt.core.settings import Settings
from l2lopt.core.types import Aux, Report

Result: TypeAlias = Mapping[str, Any]
"""The result of one run in a study, by name: whatever JSON can say. A number that is not finite is None."""


class TrainedRun(Protocol):
    """The part of a training's result that a study reads; `training.train.Trained` has more."""

    @property
    def params(self) -> Params:
        """Final parameters."""

    @property
    def aux(self) -> Aux:
        """The loss's own state beside them."""

    @property
    def step(self) -> int:
        """Step whose parameters these are."""

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and metrics on the whole split `test`."""

    @property
    def watched(self) -> dict[str, float]:
        """Loss and metrics on the whole split that was watched in training."""

    @property
    def speed(self) -> float:
        """Samples per second; 0 where no step was made."""


class StudyRun(NamedTuple):
    """One run of a study.

    Attributes:
        kind: "trained", or the kind of a `Reference`.
        seed: Seed of the training.
        folder: Folder of the run.
        trained: Result of the training; None for a reference.
    """

    kind: str
    seed: int
    folder: Path
    trained: TrainedRun | None


class Reference(NamedTuple):
    """A row of a study's table that no training makes.

    Attributes:
        kind: Name by which `References.result` knows what to compute.
        label: Name in the table.
        folder: Name of its folder; with a row for each seed, the seed is added.
    """

    kind: str
    label: str
    folder: str


class Column(NamedTuple):
    """A column of a study's table, read from the results of a row's runs.

    Attributes:
        head: Text above the column.
        read: Value of one result; None counts as not a number. A `KeyError` leaves the cell of a reference empty.
        show: "range" shows the mean, and of several seeds the lowest and the highest value; "median" skips zeros;
            "first" shows the first seed's value; "count" the number of seeds; "versus" the difference from another row.
        digits: Decimals of a range or a difference.
        better: Direction in which values get better.
        marked: Whether a trained row's mean is set in bold where it beats every reference, and marked where not.
    """

    head: str
    read: Callable[[Result], Any] = len
    show: Literal["range", "median", "first", "count", "versus"] = "range"
    digits: int = 3
    better: Literal["lower", "higher"] = "lower"
    marked: bool = False


class References(Settings):
    """The view that a study of trained optimisees takes: results, columns, and the yardsticks beside them.

    Its fields are keys of the study's TOML file. The default compares the metrics on the test split, beside nothing.
    A subclass must be importable by its name, since a study sends it to other processes.
    """

    default_seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """Seeds of a study that names none."""
    legend: ClassVar[str] = ""
    """Sentence below the table that explains its marks."""

    def check(self, optimisees: Mapping[str, Any]) -> None:
        """Refuses, before any work, optimisees (by the label of their run) that cannot be compared.

        Raises:
            UserError: Never, by default.
        """

    def beside_each(self, label: str) -> Sequence[Reference]:
        """References computed for the run called `label` with each of its seeds."""
        return ()

    def beside_all(self) -> Sequence[Reference]:
        """References computed once, with the first run's optimisee."""
        return ()

    def depends_on(self, kind: str) -> dict[str, Any]:
        """All that a result of this kind depends on beside config and data; another value makes it anew."""
        return {}

    def result(self, optimisee: Any, run: StudyRun, report: Report) -> Result:
        """The result of a run, or of a reference.

        Args:
            optimisee: Optimisee of the run, whose class names these references.
            run: Kind, seed, folder and training.
            report: Progress of long work.
        """
        assert run.trained is not None
        parameters = sum(value.numel() for value in run.trained.params.values())
        return {"parameters": parameters, "step": run.trained.step, **run.trained.metrics}

    def columns(self, result: Result) -> Sequence[Column]:
        """The table's columns after the first, which names the rows; `result` is one of a trained run."""
        metrics = [name for name in result if name not in ("parameters", "step")]
        heads = [Column(f"test {name}", itemgetter(name)) for name in metrics]
        return [Column("seeds", show="count"), Column("parameters", itemgetter("parameters"), "first"), *heads]

    def facts(self, found: Mapping[str, Mapping[str, Result]], references: Collection[str]) -> Any:
        """The contents of `table.json`.

        Args:
            found: Label → seed → result, in the table's order.
            references: Labels of the rows that are references.
        """
        return found

    def figures(
        self, found: Mapping[str, Mapping[str, Result]], references: Collection[str], folder: Path
    ) -> list[Path]:
        """Draws figures into `folder` and gives their paths; none by default."""
        return []
