"""The validations of a meta-training, problem by problem, beside what was there before it."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from l2lopt.core.errors import UserError
from l2lopt.report.style import RULES, STYLE, lines_of, shown, write_figure
from l2lopt.storage import run_log

_PREFIX = "score/"
_LOWEST = math.log(1e-12)
"""Where `evaluation.scores.log_losses` has no logarithm any more."""
_LEAST = 0.5, 2.0
"""What the axis of ratios spans at least."""


class Validations(NamedTuple):
    """The validation scores of a meta-training, logarithms of losses.

    Attributes:
        updates: Meta-updates before each validation, [N].
        mean: Score, which is the mean over the problems, [N]; NaN where it was not finite.
        problems: Problem → score, [N]; empty where there is a single problem.
    """

    updates: np.ndarray
    mean: np.ndarray
    problems: dict[str, np.ndarray]

    def changes(self) -> dict[str, np.ndarray]:
        """Name → score less that at the first finite validation, [N]; "all" is the mean over the problems."""
        scores = {"all": self.mean, **self.problems}
        return {name: values - values[first_finite(values)] for name, values in scores.items()}

    def ratios(self) -> dict[str, np.ndarray]:
        """Name → loss over that at the first finite validation, [N]; "all" is the geometric mean over the problems."""
        with np.errstate(over="ignore"):
            found = {name: np.exp(values) for name, values in self.changes().items()}
        return {name: np.where(np.isfinite(values), values, np.nan) for name, values in found.items()}

    def have_ratios(self) -> bool:
        """Whether all losses were above 0, where the score is their logarithm; below it has the order alone."""
        scores = np.concatenate([self.mean, *self.problems.values()])
        return bool((scores[np.isfinite(scores)] > _LOWEST).all())


def first_finite(values: np.ndarray) -> int:
    """The place of the first finite value; 0 where there is none."""
    return int(np.isfinite(values).argmax())


def read_validations(path: Path) -> Validations:
    """The validations in the `metrics.jsonl` of a meta-training; without any, the arrays are empty.

    A last line that a kill has cut short is passed over.

    Raises:
        UserError: For a missing file, or a line that cannot be read (with its number).
    """
    found = []
    texts = run_log.read_text(path, "a meta-training's records", "run l2lopt meta-train first").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if line["stage"] == "validation":
                names = [name for name in line if name == "score" or name.startswith(_PREFIX)]
                scores = {name: math.nan if line[name] is None else float(line[name]) for name in names}
                found.append((float(line["step"]), scores["score"], scores))
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
            if number == len(texts):
                break
            where, remedy = f"{path}, line {number}", "meta-train again"
            raise UserError(where, expected="figures", found=text[:80], remedy=remedy) from None
    names = list(dict.fromkeys(name for *_, scores in found for name in scores if name != "score"))
    problems = {
        name.removeprefix(_PREFIX): np.array([scores.get(name, math.nan) for *_, scores in found]) for name in names
    }
    return Validations(np.array([step for step, *_ in found]), np.array([mean for _, mean, _ in found]), problems)


def validation_curves(validations: Validations, folder: Path, title: str = "", kept: int | None = None) -> list[Path]:
    """Draws each problem's validation loss over that before meta-training, against the meta-updates.

    A problem whose line lies above 1 has been lost. One whose loss was not finite before is set against its first
    finite one, which the legend says. Where a loss is not above 0 the differences of scores are drawn, and 0 takes the
    place of 1.

    Args:
        validations: Validations, at least one.
        folder: Folder for `validation.png` and `validation.svg`.
        title: Line above the panel.
        kept: Update whose optimiser was kept, shown by a dotted line; none before the end of a meta-training.
    """
    have_ratios = validations.have_ratios()
    drawn, against = (validations.ratios(), "times") if have_ratios else (validations.changes(), "less")

    def told(name: str, scores: np.ndarray) -> str:
        place = first_finite(scores)
        return shown(f"{name}, {against} that after {validations.updates[place]:g}" if place else name)

    lines = lines_of(dict.fromkeys(validations.problems, "baseline"))
    with plt.rc_context(STYLE):
        height = max(3.6, 0.2 * len(lines) + 1.4)
        figure, panel = plt.subplots(figsize=(7.4, height), layout="constrained")
        if have_ratios:
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
        panel.axhline(float(have_ratios), color="black", linewidth=0.9, alpha=0.6, label="before meta-training")
        if kept is not None:
            panel.axvline(kept, color="black", linewidth=0.9, alpha=0.6, linestyle=(0, (1, 3)), label="kept")
        for name, line in lines.items():
            panel.plot(
                validations.updates,
                drawn[name],
                color=line.colour,
                linestyle=line.dash,
                marker=line.marker,
                markersize=4,
                linewidth=line.width,
                label=told(name, validations.problems[name]),
            )
        mean = "geometric mean" if have_ratios else "mean"
        label = told(mean if lines else "the problem", validations.mean)
        panel.plot(
            validations.updates, drawn["all"], color=RULES[0], linewidth=2.2, marker="o", markersize=4, label=label
        )
        if have_ratios:
            low, high = panel.get_ylim()
            panel.set_ylim(min(low, _LEAST[0]), max(high, _LEAST[1]))
        said = f"validation {'loss' if have_ratios else 'score'}, {against} that before"
        panel.set(xlabel="meta-update", ylabel=said, xlim=(0, None))
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        if title:
            figure.suptitle(shown(title))
        return write_figure(figure, folder, "validation")
