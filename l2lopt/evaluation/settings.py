"""What a comparison of optimisers is made of: baselines with their grids, seeds, steps, horizons.

As all settings they do not import PyTorch; what builds an optimiser is imported where it is called.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.core.settings import Settings, Split
from l2lopt.report.names import proper_name

if TYPE_CHECKING:
    from l2lopt.evaluation.contestants import Contestant, Runner
    from l2lopt.optimisee import Optimisee
    from l2lopt.optimisers import Rate

SPLITS: tuple[Split, ...] = ("train", "test")
"""The splits on which every comparison reads the losses."""


class Baseline(Settings):
    """A hand-designed optimiser, or a class of `torch.optim.Optimizer`, and the rates to choose from."""

    optimiser: Choice
    """Name, or name and options, without the rate: one of ours, such as "adam", or a class of `torch.optim.Optimizer`
    from any installed package as `module:Class`, such as "torch.optim:Muon" or "schedulefree:AdamWScheduleFree". Such a
    class runs problem by problem. With `rest = "adamw"` among its options, the parameters that are no matrices go to
    `torch.optim.AdamW`, and with `rest_names = ["embedding"]` those whose names contain "embedding" as well."""
    rates: list[PositiveFloat] = Field(min_length=1)
    """The grid, rising; at least seven half-decades make the comparison fair. A single rate is not tuned."""
    schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: a warm-up over the first twentieth of the horizon, then a half cosine to 0 at its end."""
    label: str | None = None
    """Its name in the results; the optimiser's own name by default."""

    @property
    def name(self) -> str:
        """Its name in the results."""
        choice = {"name": self.optimiser} if isinstance(self.optimiser, str) else self.optimiser
        return self.label or str(choice.get("name") or choice.get("weights"))

    @property
    def proper_name(self) -> str:
        """Its name in figures, which says the schedule as well: "AdamW, warm-up + cosine"."""
        if self.label:
            return proper_name(self.label)
        nesterov = self.name == "momentum" and not isinstance(self.optimiser, str) and self.optimiser.get("nesterov")
        own = "Nesterov momentum" if nesterov else proper_name(self.name)
        return own + (", warm-up + cosine" if self.schedule == "cosine" else "")

    def contestant(self) -> "Contestant":
        """Its part in a comparison."""
        from l2lopt.evaluation.contestants import Contestant
        from l2lopt.evaluation.torch_classes import is_torch_class
        from l2lopt.optimisers import Optimiser

        one_by_one = is_torch_class(self.optimiser)
        made = None if one_by_one else self.build(self.rates[0], 1)
        knows_end = self.schedule == "cosine" or (isinstance(made, Optimiser) and made.knows_end)
        return Contestant(self.name, "baseline", self.build, tuple(self.rates), knows_end, one_by_one)

    def build(self, rates: "Rate", horizon: int) -> "Runner":
        """The optimiser for runs of `horizon` steps.

        Args:
            rates: Rate of all runs, or [S], a rate for each of S runs side by side.
            horizon: Last step of the runs, at which a cosine ends.

        Returns:
            An optimiser of ours, or what makes the optimisers of a class of `torch.optim`: one for all runs, or a list
            of one for each.

        Raises:
            UserError: For an unknown name or option.
        """
        from torch import Tensor

        from l2lopt import kernels, optimisers
        from l2lopt.evaluation.torch_classes import is_torch_class, torch_class

        ends = {"warm_up": horizon // 20, "total": horizon} if self.schedule == "cosine" else {}
        if is_torch_class(self.optimiser):
            found = torch_class(self.optimiser)
            if found.lr is not None:
                said, remedy = f"lr = {found.lr}", f"leave it out, and write rates = [{found.lr}]"
                raise UserError(f"{self.name}: rates", expected="the only rates", found=said, remedy=remedy)
            if isinstance(rates, Tensor):
                return [found.at(rate, **ends) for rate in rates.tolist()]
            return found.at(rates, **ends)
        if ends and not _takes(self.optimiser, ends):
            return optimisers.Scheduled(optimisers.build(self.optimiser, _table(), lr=rates), "cosine", **ends)
        made = optimisers.build(self.optimiser, _table(), lr=rates, **ends)
        return kernels.fuse(made) if isinstance(made, optimisers.NormalisedMuon) else made

    def check(self, optimisee: "Optimisee") -> None:
        """Builds the optimiser for a problem, to find mistakes before any work.

        Args:
            optimisee: Problem.

        Raises:
            UserError: For an unknown name or option, or parameters that the class refuses.
        """
        from l2lopt.optimisers import Optimiser

        built = self.build(self.rates[0], 1)
        if callable(built) and not isinstance(built, Optimiser):
            params, _ = optimisee.init(0)
            built([(name, value.detach().clone().requires_grad_()) for name, value in params.items()])


def _table() -> Mapping[str, Callable[..., Any]]:
    """The optimisers of ours that can be a baseline."""
    from l2lopt import optimisers

    return {**optimisers.HAND_DESIGNED, **optimisers.WRAPPERS}


def _takes(choice: Choice, options: Mapping[str, Any]) -> bool:
    """Whether an optimiser of ours has these options of its own."""
    name = choice if isinstance(choice, str) else choice.get("name")
    entry = registry.find(_table(), "optimiser", str(name))
    return set(options) <= set(inspect.signature(entry).parameters)


def half_decades(lowest: float, count: int) -> list[float]:
    """`count` rates from `lowest` up, each √10 times the last."""
    return [float(f"{lowest * 10 ** (k / 2):.3g}") for k in range(count)]


def default_baselines() -> list[Baseline]:
    """Nesterov's momentum, Adam, and AdamW and Muon with warm-up and cosine, nine rates each; the harness, untuned."""
    return [
        Baseline(optimiser={"name": "momentum", "nesterov": True}, rates=half_decades(1e-3, 9)),
        Baseline(optimiser="adam", rates=half_decades(1e-4, 9)),
        Baseline(optimiser="adamw", rates=half_decades(1e-4, 9), schedule="cosine"),
        Baseline(optimiser="muon", rates=half_decades(1e-3, 9), schedule="cosine"),
        Baseline(optimiser="normalised-muon", rates=[0.03], label="normalised-muon, untuned"),
    ]


class EvaluationSettings(Settings):
    """How optimisers are compared."""

    seeds: PositiveInt = 20
    """Fresh problems, the same for every optimiser; at least 10 for an interval worth reading."""
    steps: PositiveInt = 1000
    """Inner steps of each run."""
    horizons: list[PositiveInt] = Field(default=[100, 200, 1000], min_length=1)
    """Where the table reads the losses, and for which the rates are chosen, for either split by itself."""
    tuning_seeds: PositiveInt = 5
    """Problems on which the rates are chosen; never the reported ones."""
    rows: PositiveInt | None = None
    """Runs made side by side, in one vectorised pass; none: all. 1 suits large models: the memory is that of one run,
    and a study that is stopped goes on after the last run it has made."""
    backend: Literal["auto", "compile", "eager"] = "auto"
    """Form of the inner steps of runs side by side: "compile" makes one compiled graph of a step for each optimiser,
    which takes ten seconds to a minute where it is not on disk yet; "auto" does so on a CPU where an optimiser has
    enough steps to make. Results agree up to rounding."""
    readings: PositiveInt | None = None
    """Steps a decade at which the losses are read on the way; none: 12. Fewer suit slow problems."""
    baselines: list[Baseline] = Field(default_factory=default_baselines)
    """What the learned optimisers are compared with."""
    multipliers: list[PositiveFloat] = Field(default_factory=lambda: half_decades(1e-2, 9))
    """Factors of a learned optimiser's updates to choose from, in a second row beside the one as it is; of none or a
    single one, which is nothing to choose from, there is no such row."""
    before_meta_training: bool = True
    """Whether each learned optimiser has a row with the φ that its meta-training began from, as it is: what
    meta-training has changed. `l2lopt evaluate` alone has it; a study names its rows itself."""

    def checked_horizons(self) -> list[int]:
        """The horizons, rising, the last one the end of the run.

        Raises:
            UserError: For a horizon beyond the end.
        """
        if max(self.horizons, default=0) > self.steps:
            found, remedy = f"{max(self.horizons)}", "lower the horizon or raise evaluation.steps"
            raise UserError("evaluation.horizons", expected=f"at most {self.steps}", found=found, remedy=remedy)
        return sorted({*self.horizons, self.steps})
