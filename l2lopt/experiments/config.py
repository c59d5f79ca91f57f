"""Typed configs from TOML, named by a path or as the package ships them; `build` makes the objects that they describe.

As all settings they do not import PyTorch, so that the command line answers a mistake in them at once.
"""

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, overload

import tomli_w
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings, Split
from l2lopt.evaluation import suites
from l2lopt.evaluation.settings import EvaluationSettings
from l2lopt.storage import toml_file
from l2lopt.storage.run_log import existing
from l2lopt.storage.toml_file import read_toml
from l2lopt.training.settings import MetaTrainSettings, TrainSettings, UnrollSettings

C = TypeVar("C", bound=Settings)
MOST_NAMES = 10
"""The most names of shipped files that an error lists."""


@cache
def catalogue() -> suites.Catalogue:
    """The shipped catalogue of tasks."""
    return suites.load_catalogue(shipped("suites/tasks.toml"))


def problem(choice: Any) -> Any:
    """The optimisee of a task that is named; any other choice as it is."""
    if isinstance(choice, str) and choice in catalogue().tasks:
        return catalogue().tasks[choice].optimisee
    return choice


Problem: TypeAlias = Annotated[Choice, BeforeValidator(problem)]
"""A problem: the name of an optimisee, a table of the name and its options, or the name of a task of the catalogue,
such as "digits-convnet-8-layer-norm", which stands for the task's optimisee."""


def problem_name(choice: Choice) -> str:
    """The name of a problem for readers: that of the task of the catalogue that it is, or the optimisee's own."""
    tasks = (name for name, task in catalogue().tasks.items() if task.optimisee == choice)
    return next(tasks, choice if isinstance(choice, str) else str(choice.get("name")))


class ValidationSettings(Settings):
    """How the best optimiser is picked during meta-training: lower mean log loss at the horizons."""

    on: list[Problem] | None = Field(default=None, min_length=1)
    """Problems of validation, best of families that meta-training does not see; none: those of meta-training."""
    seeds: PositiveInt = 5
    """Fresh problems, the same at every validation, never those of the evaluation."""
    horizons: list[PositiveInt] = Field(default=[100, 200, 1000], min_length=1)
    """The steps at which the losses are taken; the last ends the run."""
    split: Split = "train"
    """Split on which the validation loss is computed; "heldout": on samples that the runs then do not train on."""
    rows: PositiveInt | None = None
    """Runs made side by side; none: all. 1 suits large models."""


class _Common(Settings):
    """The settings that every kind of experiment has."""

    label: str | None = None
    """The optimiser's name in results; by default made of what it is."""
    seed: NonNegativeInt = 0
    """Seed of everything: equal configs and seeds give equal runs on the same machine."""
    device: str = "cpu"
    """Device of all tensors: "cpu", "cuda", "cuda:1", …"""
    threads: PositiveInt | None = Field(default=None, le=1024)
    """CPU threads; none: PyTorch's own choice. Small tensors are fastest on one."""
    optimisee: Problem
    """Problem to optimise: a name, a table of the name and its options, or the name of a task of the catalogue."""


class Config(_Common):
    """An experiment: an optimiser meta-trained on an optimisee, then compared with baselines."""

    mixed_with: list[Problem] = Field(default_factory=list)
    """Further problems of meta-training and validation: every run draws one of all, with equal chances."""
    trained_on: list[Problem] | None = Field(default=None, min_length=1)
    """Problems of meta-training; none: `optimisee` and `mixed_with`. Where there are some, `optimisee` is only the
    problem on which the optimiser is compared with baselines."""
    optimiser: Choice = "coordinatewise"
    """The learned optimiser: a name, or a table of the name and its options; or a table of `weights` alone, the name of
    one that comes with the package or a file that meta-training has left, to meta-train it further."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Backend of the learned optimiser's steps where no gradient flows through them; "auto" takes the fastest."""
    unroll: UnrollSettings = UnrollSettings()
    """How long the unrolls are and how they are differentiated."""
    meta: MetaTrainSettings = MetaTrainSettings()
    """How the meta-gradient is followed."""
    validation: ValidationSettings = ValidationSettings()
    """How the best optimiser is picked."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How it is compared with baselines."""

    @model_validator(mode="after")
    def _either(self) -> "Config":
        if self.trained_on and self.mixed_with:
            raise ValueError("trained_on or mixed_with, not both")
        return self

    @property
    def problems(self) -> list[Choice]:
        """The problems of meta-training."""
        return self.trained_on or [self.optimisee, *self.mixed_with]

    @property
    def name(self) -> str:
        """The learned optimiser's name in results."""
        choice = {"name": self.optimiser} if isinstance(self.optimiser, str) else self.optimiser
        kind = choice.get("name") or Path(str(choice.get("weights"))).stem
        if kind == "coordinatewise":
            cell = choice.get("cell", "lstm")
            kind = cell if isinstance(cell, str) else cell.get("name")
        return self.label or f"learned-{kind}"


class TrainConfig(_Common):
    """An optimisee trained to the end by any optimiser."""

    optimiser: Choice
    """One of ours, learned or hand-designed, or `torch.optim.RMSprop` and its like: a name, or a table of the name and
    its options; or a table of `weights`, the name of one that comes with the package or a file that meta-training has
    left, and any of `LearnedOptimizer`'s `lr`, `weight_decay`, `max_update` and `fallback`."""
    train: TrainSettings = TrainSettings()
    """How long, and what is watched."""

    @property
    def name(self) -> str:
        """The optimiser's name in results."""
        choice = {"name": self.optimiser} if isinstance(self.optimiser, str) else self.optimiser
        return self.label or str(choice.get("name") or choice.get("weights"))


@overload
def load(source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = ()) -> Config: ...
@overload
def load(source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = (), *, kind: type[C]) -> C: ...
def load(
    source: str | Path | Mapping[str, Any] | Settings, changes: Sequence[str] = (), *, kind: type[Any] = Config
) -> Any:
    """A config from a TOML file, a mapping or a config, with changes such as "unroll.length=200" made to it.

    Args:
        source: Path, name of a shipped config such as "demo", mapping or config.
        changes: Changes, made in this order.
        kind: Class of the config: `Config` or `TrainConfig`.

    Raises:
        UserError: For a missing file, one that is not TOML, the file of another command, an unknown key or a value of
            the wrong type, also among the options of a choice: None, or an object.
    """
    where, data = _read(source)
    commands: Mapping[Any, str] = {Config: "meta-train", TrainConfig: "train", suites.Suite: "benchmark"}
    if command := commands.get(kind):
        check_kind(where, data, command)
    if isinstance(changes, str):
        raise UserError("changes", expected="a list of texts", found=repr(changes), remedy=f"write [{changes!r}]")
    for change in changes:
        _change(data, change, kind)
    toml_file.check(where, data)
    try:
        made = kind.model_validate(data)
    except ValidationError as error:
        raise registry.explain(where, error, kind.model_fields, data) from None
    _check_plain(where, made.model_dump(exclude_none=True))
    return made


def check_kind(where: str, data: Mapping[str, Any], command: str) -> None:
    """Refuses the contents of a file for another command, where a key tells which.

    Args:
        where: Name of the file, for the error.
        data: Contents of the file.
        command: Command that reads it: "train", "meta-train", "reproduce" or "benchmark".

    Raises:
        UserError: For keys that another command's files alone have.
    """
    told = [other for other, (_, keys) in _KINDS.items() if data.keys() & keys]
    if told and command not in told:
        expected, found = _KINDS[command][0], _KINDS[told[0]][0]
        raise UserError(where, expected=expected, found=found, remedy=f"use l2lopt {told[0]}")


_KINDS: Mapping[str, tuple[str, frozenset[str]]] = {
    "train": ("a config of training", frozenset(TrainConfig.model_fields.keys() - Config.model_fields.keys())),
    "meta-train": (
        "a config of meta-training",
        frozenset(Config.model_fields.keys() - TrainConfig.model_fields.keys()),
    ),
    "reproduce": ("a study", frozenset({"meta_seeds", "problems", "optimisers", "runs", "encoders", "labellers"})),
    "benchmark": ("a suite", frozenset({"tasks", "competitors"})),
}
"""Command → what its files are called, and keys that no other command's files have."""


def _check_plain(where: str, value: Any, path: str = "") -> None:
    """Refuses options of a choice that a run could not write into its own config."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inside:
        _check_plain(where, item, f"{path}.{key}" if path else str(key))
    if not isinstance(value, str | int | float | dict | list | tuple):  # bool is an int
        found = "None" if value is None else f"a {type(value).__name__}"
        plain = "write a text, a number, a list or a table"
        remedy = "leave the key out" if value is None else registry.by_name(value) or plain
        raise UserError(f"{where}: {path}", expected="a plain value", found=found, remedy=remedy)


def dump(config: Settings) -> str:
    """The config as TOML, every field written out; of a choice, the options that were given."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def shipped(name: str) -> Path:
    """A file or folder of configs/: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "configs"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "configs") / name


def find(source: str | Path, folder: str, what: str) -> Path:
    """The file that a user names: `source` itself where there is such a file, else a shipped one.

    Args:
        source: Path; or the name of a shipped file, such as "fig3", or its path in a checkout,
            "configs/studies/fig3.toml".
        folder: Folder in configs/, such as "studies", whose files are found by name.
        what: Description of the file for the error, such as "a study's file".

    Raises:
        UserError: For a missing file, with the nearest names of shipped ones.
    """
    home, own = shipped(""), Path(source)
    named = {path.stem: path for path in sorted((home / folder).glob("*.toml"), key=lambda path: path.stem)}
    paths = {"configs" / path.relative_to(home): path for path in home.rglob("*.toml")}
    if not os.path.isfile(own):  # not `Path.is_file`, which raises for a name that no file can have
        own = named.get(str(source)) or paths.get(own, own)
    if not folder and os.path.isfile(inside := own / "config.toml"):
        raise UserError(str(own), expected=what, found="a run's folder", remedy=f"give {inside}")
    known = get_close_matches(own.stem, named) or [*named]
    some = ", ".join([*known[:MOST_NAMES], *(["…"] if len(known) > MOST_NAMES else [])])
    return existing(own, what, f"give its path, or one of {some}")


def default_folder(config: Path) -> Path:
    """The folder of a run by its config's name, or by that of the folder in which another run has left it."""
    return Path("runs") / (config.resolve().parent.name if config.name == "config.toml" else config.stem)


def demo() -> Path:
    """The demo's config."""
    return shipped("demo.toml")


def meta_training_config(folder: Path, changes: Sequence[str]) -> Config:
    """The config of a run of meta-training, with changes made to it.

    Raises:
        UserError: For a folder without one, that of a run of training, or a mistake in the changes.
    """
    remedy = "give a folder that l2lopt meta-train has left"
    path = existing(folder / "config.toml", "a run's config", remedy)
    if training_config(folder) is not None:
        raise UserError(str(folder), expected="a run of meta-training", found="one of training", remedy=remedy)
    return load(path, changes)


def training_config(folder: Path) -> TrainConfig | None:
    """The config of a run of training; None for another folder."""
    try:
        return load(folder / "config.toml", kind=TrainConfig)
    except UserError:
        return None


def _read(source: str | Path | Mapping[str, Any] | Settings) -> tuple[str, dict[str, Any]]:
    if isinstance(source, Settings):
        return "config", source.model_dump()
    if isinstance(source, Mapping):
        return "config", {key: value for key, value in source.items()}
    return str(Path(source)), read_toml(find(source, "", "a config file"), "a config file", "give its path")


def _change(data: dict[str, Any], change: str, kind: type[Settings]) -> None:
    """Carries out "a.b=value" on nested tables; a choice that is only a name becomes a table first."""
    path, equals, text = change.partition("=")
    *above, last = path.strip().split(".")
    if not equals or not all((*above, last)):
        remedy = "write for instance --set unroll.length=200"
        raise UserError("--set", expected="KEY=VALUE", found=repr(change), remedy=remedy)
    try:
        value = toml_file.value(text)
    except ValueError as error:
        remedy = "pass each with a --set of its own"
        raise UserError("--set", expected="one KEY=VALUE", found=f"{error}: {change!r}", remedy=remedy) from None
    owner: Any = None
    for key in above:
        field = kind.model_fields.get(key) if owner is None else None
        owner = field.default if field is not None else getattr(owner, key, ())
        inner = problem(data.get(key, owner if isinstance(owner, str) else {}))
        # None: a table that is absent by default, in a config that was given as an object.
        inner = {"name": inner} if isinstance(inner, str) else {} if inner is None else inner
        if not isinstance(inner, dict):
            raise UserError("--set", expected=f"a table at {key!r}", found=repr(inner), remedy="change the key")
        data[key] = data = dict(inner)
    if text.strip() == "none" and _may_be_none(kind, above, last):
        data.pop(last, None)
        return
    if (above, last) == (["optimiser"], "weights") and "name" in data:
        data.clear()  # a rule by its name and options gives way to a trained one
    data[last] = value


def _may_be_none(kind: type[Settings], above: Sequence[str], last: str) -> bool:
    """Whether a field of settings may be None, which TOML has no value for; never an option of a choice."""
    annotation: Any = kind
    for key in (*above, last):
        kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
        fields = next((one.model_fields for one in kinds if issubclass(one, Settings)), {})
        annotation = fields[key].annotation if key in fields else None
    return NoneType in get_args(annotation)
