"""STUB until the suite branch is merged."""
from typing import Literal
from pydantic import Field, PositiveFloat, PositiveInt
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings
from l2lopt.evaluation.settings import Baseline


class Task(Settings):
    family: str
    optimisee: Choice
    short: PositiveInt
    medium: PositiveInt
    long: PositiveInt
    description: str = ""
    needs: str | None = None


class Competitor(Baseline):
    untuned: PositiveFloat | None = None
    leagues: list[Literal["untuned", "self-tuned", "tuned"]] = Field(default=["untuned"])


class Suite(Settings):
    tasks: list[str]
    budget: Literal["short", "medium", "long"] = "medium"
    seeds: PositiveInt = 5
    tuning_seeds: PositiveInt = 3
    competitors: list[Competitor]


class Catalogue(Settings):
    families: dict[str, Literal["meta-training", "validation", "held-out"]]
    tasks: dict[str, Task]
