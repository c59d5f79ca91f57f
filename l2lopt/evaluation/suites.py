"""Suites: a catalogue of tasks by family and split, and which of them a benchmark runs with which optimisers.

A task is an optimisee with budgets of steps. Its family says which tasks it is like; families are split once, so that
everybody who meta-trains on the first split and reports on the last reports on problems of another kind. What is
compared, by default, are the training and the test loss at the end of the budget and the steps to the loss that the
tuned AdamW ends with.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from l2lopt.core import registry
from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.evaluation.settings import Baseline
from l2lopt.storage.toml_file import read_toml

FamilySplit: TypeAlias = Literal["meta-training", "validation", "held-out"]
Budget: TypeAlias = Literal["short", "medium", "long"]
League: TypeAlias = Literal["untuned", "self-tuned", "tuned"]
Data: TypeAlias = Literal["cifar10", "har", "mnist", "ptb"]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
"""Name of a task or family, which names folders, too."""
_PATHS: Mapping[Data, tuple[str, ...]] = {
    "cifar10": ("cifar10/train", "cifar-10-batches-py"),
    "har": ("UCI HAR Dataset",),
    "mnist": ("MNIST/raw",),
    "ptb": ("ptb",),
}
"""Data set → the folders under L2LOPT_DATA of which one holds it."""


class Task(Settings):
    """An optimisee with budgets of steps."""

    family: str
    """Family, whose split is the task's."""
    optimisee: Choice
    """Problem: a name, or a table of the name and its options."""
    short: PositiveInt
    """Steps of a run that only shows whether all works."""
    medium: PositiveInt
    """Steps of a run that is reported."""
    long: PositiveInt
    """Steps of a run that shows how a rule goes on."""
    description: str = ""
    """What makes the task differ from its neighbours, for readers of a report."""
    needs: Data | None = None
    """Data set that must be under L2LOPT_DATA; none: the task needs no files."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if not self.short <= self.medium <= self.long:
            raise ValueError("budgets that rise: short, medium, long")
        return self


class Catalogue(Settings):
    """All tasks, by name, and the split of each family."""

    families: dict[Name, FamilySplit]
    """Family → split."""
    tasks: dict[Name, Task] = Field(min_length=1)
    """Name → task."""

    def of_family(self, family: str) -> dict[str, Task]:
        """The tasks of a family.

        Raises:
            UserError: For an unknown family.
        """
        if family not in self.families:
            remedy = did_you_mean(family, self.families)
            raise UserError("family", expected="a family of the catalogue", found=repr(family), remedy=remedy)
        return {name: task for name, task in self.tasks.items() if task.family == family}

    def of_split(self, split: str) -> dict[str, Task]:
        """The tasks of all families of a split.

        Raises:
            UserError: For an unknown split.
        """
        if split not in get_args(FamilySplit):
            remedy = did_you_mean(split, get_args(FamilySplit))
            raise UserError("split", expected="a split of families", found=repr(split), remedy=remedy)
        return {name: task for name, task in self.tasks.items() if self.families[task.family] == split}


class Competitor(Baseline):
    """An optimiser that takes part: with one setting, tuned, or both."""

    optimiser: Choice
    """What a baseline has, or a table of `weights`: the name or file of a learned rule, whose `rates` are then factors
    of its updates; with `trusted` beside it the file may name modules of yours. Of "normalised-muon", the harness, a
    rate is its own setting, 0.03 by default."""
    untuned: PositiveFloat | None = None
    """Rate where nothing is tuned; none: it does not take part there."""
    leagues: list[League] = Field(default_factory=lambda: list(get_args(League)), min_length=1)
    """Leagues in which it takes part: "untuned", with one setting for all tasks; "self-tuned", with the one rate that
    is best on the meta-training tasks; "tuned", with the best rate on each task."""

    @model_validator(mode="after")
    def _takes_part(self) -> Self:
        if self.untuned is None and {*self.leagues} == {"untuned"}:
            raise ValueError("the key `untuned`, its rate in the league, or another league")
        from l2lopt.optimisers import LEARNED  # PyTorch, which the settings do without

        choice = self.optimiser if isinstance(self.optimiser, dict) else {"name": self.optimiser}
        if self.schedule != "constant" and ("weights" in choice or choice.get("name") in LEARNED):
            raise ValueError("no schedule for a learned rule, which makes its own steps")
        return self


class Suite(Settings):
    """Which tasks a benchmark runs, for how long, and with which optimisers."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks, "family:NAME" for all of a family, or "split:NAME" for all of a split."""
    budget: Budget = "medium"
    """Which of its budgets of steps each task gets."""
    seeds: PositiveInt = 5
    """Reported runs of each optimiser on each task, on the same problems for all."""
    tuning_seeds: PositiveInt = 3
    """Runs on which rates are chosen, of other seeds."""
    rows: PositiveInt | None = None
    """Runs of a task that are made side by side, at most; none: as many as pay. A model that `torch.func.vmap` refuses
    wants 1."""
    competitors: list[Competitor] = Field(min_length=1)
    """Optimisers, each a table of its own."""

    @field_validator("competitors")
    @classmethod
    def _apart(cls, competitors: list[Competitor]) -> list[Competitor]:
        names = [one.name for one in competitors]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"names that differ, not two times {name!r}")
        return competitors


def load_catalogue(path: Path) -> Catalogue:
    """The catalogue of a TOML file.

    Args:
        path: File with the tables `families` and `tasks`.

    Raises:
        UserError: For a missing file, one that is not TOML, an unknown key, a value of the wrong type, and a task of a
            family that the file does not have.
    """
    data = read_toml(path, "a catalogue of tasks", "give the path of a TOML file, such as configs/suites/tasks.toml")
    try:
        found = Catalogue.model_validate(data)
    except ValidationError as error:
        raise registry.explain(str(path), error, Catalogue.model_fields, data) from None
    for name, task in found.tasks.items():
        if task.family not in found.families:
            where, remedy = f"{path}: tasks.{name}.family", did_you_mean(task.family, found.families)
            raise UserError(where, expected="one of the families", found=repr(task.family), remedy=remedy)
    return found


def selected(wanted: list[str], catalogue: Catalogue) -> dict[str, Task]:
    """The tasks that a suite names, each once, in the suite's order.

    Args:
        wanted: Names of tasks, "family:NAME" or "split:NAME".
        catalogue: Catalogue to choose from.

    Raises:
        UserError: For a name that the catalogue does not have.
    """
    found: dict[str, Task] = {}
    for entry in wanted:
        kind, colon, name = entry.partition(":")
        if colon and kind == "family":
            found |= catalogue.of_family(name)
        elif colon and kind == "split":
            found |= catalogue.of_split(name)
        elif entry in catalogue.tasks:
            found[entry] = catalogue.tasks[entry]
        else:
            remedy = did_you_mean(entry, catalogue.tasks)
            expected = 'a task of the catalogue, "family:NAME" or "split:NAME"'
            raise UserError("tasks", expected=expected, found=repr(entry), remedy=remedy)
    return found


def has_data(task: Task) -> bool:
    """Whether the data set that a task needs lies under L2LOPT_DATA, by its folder; its files are not looked at."""
    if task.needs is None:
        return True
    root = os.environ.get("L2LOPT_DATA")
    return root is not None and any(Path(os.path.expanduser(root), name).is_dir() for name in _PATHS[task.needs])
