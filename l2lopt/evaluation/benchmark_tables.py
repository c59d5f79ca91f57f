"""The tables and sentences of a benchmark's report."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.evaluation import scores
from l2lopt.evaluation.benchmark_result import LEAGUES, League, TaskInfo
from l2lopt.evaluation.comparison import interval
from l2lopt.evaluation.scores import Interval
from l2lopt.evaluation.standings import Competitor, Standings
from l2lopt.report.tables import Table, loss_text

LEAGUE_TITLES: Mapping[League, str] = {
    "untuned": "Untuned: one setting for all tasks",
    "self-tuned": "Self-tuned: the one rate that is best on the meta-training tasks",
    "tuned": "Tuned: the best of several rates on each task",
}
"""League → what a reader is told about it."""


class Shaded(NamedTuple):
    """A table and the cells that stand out.

    Attributes:
        table: Table.
        classes: Row and column → "good" or "bad".
    """

    table: Table
    classes: dict[tuple[int, int], str]


def rivals(standings: Standings) -> list[Competitor]:
    """What a learned rule has to beat: the harness as it is, Muon, and the target's optimiser, where they took part.

    The baselines are in the league of the most effort in which they ran.
    """
    harness = [entry for entry in standings.competitors if entry.kind == "harness"][:1]
    baselines = [entry for entry in reversed(standings.competitors) if entry.kind == "baseline"]
    muon = [entry for entry in baselines if "muon" in entry.optimiser.lower()][:1]
    target = [entry for entry in baselines if entry.optimiser == standings.result.target_optimiser][:1]
    return list(dict.fromkeys([*harness, *muon, *target]))


def learned(standings: Standings) -> list[Competitor]:
    """The learned rules, each in the league of the least effort."""
    first: dict[str, Competitor] = {}
    for entry in standings.competitors:
        if entry.kind == "learned":
            first.setdefault(entry.optimiser, entry)
    return list(first.values())


def family_table(standings: Standings, league: League) -> Shaded:
    """Optimisers × families: the interquartile mean of the normalised loss, in percent.

    Args:
        standings: Scores.
        league: League of the optimisers.
    """
    families = _families(standings)
    target = next((entry for entry in rivals(standings) if entry.optimiser == standings.result.target_optimiser), None)
    entered = [entry for entry in standings.competitors if entry.league == league]
    overall = {entry: standings.interquartile(entry, standings.tasks) for entry in entered}
    entered.sort(key=lambda entry: found.value if (found := overall[entry]) else torch.inf)
    rows, classes = [], {}
    for row, entry in enumerate(entered):
        cells = [overall[entry], *(_of_family(standings, entry, tasks) for tasks in families.values())]
        for column, found in enumerate(cells):
            if found and (found.high < 0 or found.low > 0):
                classes[row, column + (2 if column else 1)] = "good" if found.high < 0 else "bad"
        shown = [None if found is None else percent(found.value) for found in cells]
        whole = _bounds(cells[0], "{} to {}") if cells[0] else None
        name = f"{entry.optimiser} ({entry.kind})" if entry.kind != "baseline" else entry.optimiser
        rest = _below(standings, entry, target), _reached(standings, entry), _diverged(standings, entry)
        rows.append((name, shown[0], whole, *shown[1:], *rest))
    below = f"below {target.label}" if target else "below the target"
    heads = (
        "optimiser",
        "all tasks",
        "95 % interval",
        *families,
        below,
        "reaches the target, median speed-up",
        "diverged",
    )
    return Shaded(Table(heads, tuple(rows), title=LEAGUE_TITLES[league]), classes)


def loss_table(standings: Standings, field: Sequence[Competitor]) -> Shaded:
    """Tasks × optimisers: the mean final loss, the lowest one bold, those of losing learned rules shaded.

    Args:
        standings: Scores.
        field: Competitors, each optimiser at most once.
    """
    rows, classes = [], {}
    lines = {(line.task, line.optimiser, line.league): line for line in standings.lines()}
    for row, task in enumerate(standings.result.tasks):
        found = [lines.get((task.name, entry.optimiser, entry.league)) for entry in field]
        means = [line.final if line else torch.inf for line in found]
        hand_made = [mean for mean, entry in zip(means, field, strict=True) if entry.kind != "learned"]
        cells: list[str | None] = []
        for column, (line, mean, entry) in enumerate(zip(found, means, field, strict=True), start=1):
            text = loss_text(mean, ".4g") if line else None
            text = f"{text} ({line.diverged}/{standings.result.seeds} diverged)" if line and line.diverged else text
            cells.append(f"**{text}**" if text and mean == min(means) < torch.inf else text)
            if line and entry.kind == "learned" and hand_made and mean != min(hand_made):
                classes[row, column] = "good" if mean < min(hand_made) else "bad"
        rows.append((f"{task.name} ({task.split})", *cells))
    legend = "**Bold**: the lowest mean. ∞: a run has no finite loss."
    return Shaded(Table(("task", *(entry.label for entry in field)), tuple(rows), legend=legend), classes)


def losses_against(standings: Standings, entry: Competitor, others: Sequence[Competitor]) -> Shaded:
    """The tasks on which a learned rule loses to a rival: its mean final loss, and the differences from the rivals'.

    Args:
        standings: Scores.
        entry: Learned rule.
        others: Rivals.
    """
    rows: list[tuple[str, ...]] = []
    classes = {}
    for task in standings.tasks:
        own = standings.finals(entry, [task])[0]
        pairs = [(own, standings.finals(other, [task])[0]) for other in others]
        if any(mine.mean() > other.mean() for mine, other in pairs):
            for column, (mine, other) in enumerate(pairs, start=3):
                if mine.mean() != other.mean():
                    classes[len(rows), column] = "bad" if mine.mean() > other.mean() else "good"
            rows.append(
                (task.name, task.family, loss_text(float(own.mean()), ".4g"), *(_difference(*pair) for pair in pairs))
            )
    heads = ("task", "family", "its loss", *(f"less that of {other.label}" for other in others))
    legend = "Mean final test losses, and differences paired by seed with 95 % intervals of Student's t."
    title = f"{entry.label}: {len(rows)} of {len(standings.tasks)} tasks"
    return Shaded(Table(heads, tuple(rows), legend=legend, title=title), classes)


def duel_table(standings: Standings, entries: Sequence[Competitor], others: Sequence[Competitor]) -> Shaded:
    """How often each entry ends below each rival.

    Args:
        standings: Scores.
        entries: Competitors of the rows.
        others: Rivals.
    """
    rows, classes = [], {}
    for row, entry in enumerate(entries):
        cells: list[str | None] = []
        for column, other in enumerate(others, start=1):
            if entry == other or not standings.tasks:
                cells.append(None)
                continue
            duel = standings.duel(entry, other)
            below, chance = duel.below, duel.improvement
            if chance.low > 0.5 or chance.high < 0.5:
                classes[row, column] = "good" if chance.low > 0.5 else "bad"
            told = f"{below.value} of {duel.tasks}{_range(below)}; P = {chance.value:.2f}"
            cells.append(told if math.isnan(chance.low) else f"{told} ({chance.low:.2f}–{chance.high:.2f})")
        rows.append((entry.label, *cells))
    legend = (
        "Tasks on which the row's mean final test loss is below the column's, and P, the probability that a run of the "
        "row on a random task ends below one of the column; in brackets 95 % bootstrap intervals over seeds."
    )
    return Shaded(Table(("below", *(other.label for other in others)), tuple(rows), legend=legend), classes)


def step_ratios(standings: Standings) -> dict[str, dict[str, tuple[float, float]]]:
    """Optimiser → task → seconds of a step, and the same over that of the target's optimiser.

    Without a time of the target's optimiser on a task the ratio is to the quickest one there. What was not timed is
    left out.

    Args:
        standings: Scores.
    """
    found: dict[str, dict[str, float]] = {}
    for run in standings.result.runs:
        if (seconds := standings.seconds(run)) > 0:  # not NaN, as a run from another machine has it
            found.setdefault(run.task, {}).setdefault(run.optimiser, seconds)
    ratios: dict[str, dict[str, tuple[float, float]]] = {}
    for task, times in found.items():
        base = times.get(standings.result.target_optimiser, min(times.values()))
        for name, value in times.items():
            ratios.setdefault(name, {})[task] = value, value / base
    return ratios


def step_base(standings: Standings) -> str | None:
    """The optimiser whose step the ratios of `step_ratios` are to; None where that is the quickest of each task."""
    target = standings.result.target_optimiser
    timed = any(run.optimiser == target and standings.seconds(run) > 0 for run in standings.result.runs)
    return target if timed else None


def cost_table(standings: Standings) -> Table:
    """The time of one step of each optimiser, and its ratio to that of the target's, or to the quickest one."""
    rows = []
    for name, by_task in step_ratios(standings).items():
        seconds, ratios = zip(*by_task.values(), strict=True)
        times = f"{1000 * min(seconds):.3g}–{1000 * max(seconds):.3g}"
        rows.append((name, times, f"{statistics.median(ratios):.2f}×", f"{min(ratios):.2f}–{max(ratios):.2f}×"))
    base = step_base(standings)
    over = "over the quickest, median" if base is None else f"over {base}'s, median"
    return Table(("optimiser", "ms a step, over tasks", over, "lowest–highest"), tuple(rows))


def headline(standings: Standings) -> list[str]:
    """How the learned rules stand against the harness and the tuned baselines: one sentence for all, one for each."""
    rules, others, count = learned(standings), rivals(standings), len(standings.tasks)
    if not rules or not others or not count:
        ranked = [(found.value, entry) for entry in standings.competitors if (found := _overall(standings, entry))]
        best = min(ranked, default=None, key=lambda pair: pair[0])
        told = f"; {best[1].label} has the lowest mean normalised test loss ({percent(best[0])})" if best else ""
        missing = "No learned rule took part" if not rules else "Nothing took part that a learned rule could be held to"
        return [f"{missing}{told}."]
    verdicts = {(entry, other): _verdict(standings, entry, other) for entry in rules for other in others}
    parts = []
    for other in others:
        said = [verdicts[entry, other] for entry in rules]
        ahead, behind = said.count("ahead"), said.count("behind")
        parts.append(f"{_how_many(ahead)} ahead of {_called(other)} and {_how_many(behind)} behind it")
    rule = "learned rule" if len(rules) == 1 else "learned rules"
    lead = f"Of {len(rules)} {rule}, {'; '.join(parts)}, by the test loss at the end of {count} {_which(standings)}."
    return [lead, *(_sentence(standings, entry, others, verdicts) for entry in rules)]


def percent(value: float) -> str:
    """A normalised loss as a percentage with its sign; what is beyond 1,000 % says no more than that."""
    if abs(value) == torch.inf:
        return "∞"
    if abs(value) >= 10:
        return "> +1000 %" if value > 0 else "< −1000 %"
    text = f"{100 * value:+.1f} %"  # without a sign where nothing is left to have one
    return text[1:] if text[1:] == "0.0 %" else text.replace("-", "−")


def _families(standings: Standings) -> dict[str, list[TaskInfo]]:
    """Head of a column → tasks with a target; families of the meta-training alone say so and come last."""
    counted: dict[str, list[TaskInfo]] = {}
    for task in standings.targeted:
        counted.setdefault(task.family, []).append(task)
    seen: dict[str, list[TaskInfo]] = {}
    for task in standings.result.tasks:
        if task.name in standings.targets and task.family not in counted:
            seen.setdefault(f"{task.family} (meta-training)", []).append(task)
    return counted | seen


def _of_family(standings: Standings, entry: Competitor, tasks: list[TaskInfo]) -> Interval | None:
    """None where the competitor ran on none of the tasks."""
    ran = any(standings.run(task.name, entry) for task in tasks)
    return standings.interquartile(entry, tasks) if ran else None


def _overall(standings: Standings, entry: Competitor) -> Interval | None:
    return standings.interquartile(entry, standings.tasks)


def _below(standings: Standings, entry: Competitor, target: Competitor | None) -> str | None:
    if target is None or entry == target or not standings.tasks:
        return None
    found = standings.duel(entry, target)
    return f"{found.below.value} of {found.tasks}"


def _reached(standings: Standings, entry: Competitor) -> str | None:
    """On how many tasks the target is reached, and the median speed-up there."""
    if not standings.targeted:
        return None
    speeds = standings.speed_ups(entry)[0]
    there = speeds[speeds > 0]
    return f"{len(there)} of {len(speeds)}" + (f", {float(there.quantile(0.5)):.2f}×" if len(there) else "")


def _diverged(standings: Standings, entry: Competitor) -> str:
    runs = [run for task in standings.tasks if (run := standings.run(task.name, entry))]
    count = sum(int(scores.diverged(run.losses[standings.split], run.first).sum()) for run in runs)
    missing = len(standings.tasks) - len(runs)
    return f"{count} of {len(runs) * standings.result.seeds}" + (f", {missing} tasks not run" if missing else "")


def _difference(mine: Tensor, other: Tensor) -> str:
    if not (mine.isfinite().all() and other.isfinite().all()):
        return "∞" if mine.mean() > other.mean() else "−∞" if mine.mean() < other.mean() else "both ∞"
    mean, low, high = interval(mine - other)
    bounds = f" [{low:+.2g}, {high:+.2g}]" if len(mine) > 1 else ""
    return f"{mean:+.3g}{bounds}".replace("-", "−")


def _range(found: Interval, more: str = "") -> str:
    """The bounds in brackets; nothing of a single seed, which has none."""
    return "" if math.isnan(found.low) else f" ({found.low:g}–{found.high:g}{more})"


def _bounds(found: Interval, text: str) -> str:
    """The bounds as percentages in a text; nothing of a single seed, which has none."""
    return "" if math.isnan(found.low) else text.format(percent(found.low), percent(found.high))


def _verdict(standings: Standings, entry: Competitor, other: Competitor) -> str:
    """Ahead or behind where the interval of the number of tasks lies on one side of half of them.

    A single seed decides nothing.
    """
    found = standings.duel(entry, other)
    even = found.tasks - found.below.value - found.above
    if 2 * found.below.low + even > found.tasks:
        return "ahead"
    return "behind" if 2 * found.below.high + even < found.tasks else "level"


def _called(entry: Competitor) -> str:
    if entry.kind == "harness":
        return f"the harness ({entry.optimiser}, {entry.league})"
    return f"{entry.league} {entry.optimiser}"


def _how_many(count: int) -> str:
    return "none is" if count == 0 else f"{count} {'is' if count == 1 else 'are'}"


def _which(standings: Standings) -> str:
    noun = "task" if len(standings.tasks) == 1 else "tasks"
    if all(task.split == "meta-training" for task in standings.tasks):
        return f"{noun} that all belong to the meta-training"
    return noun if all(task.split == "own" for task in standings.tasks) else f"{noun} outside the meta-training"


def _sentence(
    standings: Standings,
    entry: Competitor,
    others: Sequence[Competitor],
    verdicts: Mapping[tuple[Competitor, Competitor], str],
) -> str:
    parts = []
    for other in others:
        found = standings.duel(entry, other)
        rival = "the harness" if other.kind == "harness" else _called(other)
        bounds = _range(found.below, " with other seeds")
        counts = f"lower than {rival} on {found.below.value} of {found.tasks} tasks{bounds}"
        parts.append(f"{counts}: {verdicts[entry, other]}")
    overall = _overall(standings, entry)
    mean = f"; interquartile mean {percent(overall.value)}" if overall else ""
    return f"{entry.label}: {'; '.join(parts)}{mean}{_held_out(standings, entry, others)}."


def _held_out(standings: Standings, entry: Competitor, others: Sequence[Competitor]) -> str:
    """The same on the held-out tasks alone, where others count: those may have chosen between rules."""
    tasks = [task for task in standings.tasks if task.split == "held-out"]
    if not tasks or len(tasks) == len(standings.tasks):
        return ""
    own = standings.finals(entry, tasks).mean(1)
    counts = [int((own < standings.finals(other, tasks).mean(1)).sum()) for other in others]
    said = ", ".join(f"{count} of {len(tasks)}" for count in counts)
    overall = standings.interquartile(entry, tasks)
    bounds = _bounds(overall, " [{}, {}]") if overall else ""
    mean = f", interquartile mean {percent(overall.value)}{bounds}" if overall else ""
    return f"; on the held-out tasks alone, in the same order: lower on {said}{mean}"


def leagues_of(standings: Standings) -> list[League]:
    """The leagues that were run."""
    return [league for league in LEAGUES if any(entry.league == league for entry in standings.competitors)]
