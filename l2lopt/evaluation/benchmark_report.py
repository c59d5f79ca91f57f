"""The report of a benchmark: one page to read, its Markdown, and every number behind it."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from l2lopt.evaluation import benchmark_tables as tables
from l2lopt.evaluation.benchmark_csv import LOSS_COLUMNS, csv_text, loss_rows, scores_csv
from l2lopt.evaluation.benchmark_drawings import (
    MOST_CURVES,
    Drawing,
    draw_losses,
    draw_profiles,
    draw_step_times,
    shown,
)
from l2lopt.evaluation.benchmark_result import BenchmarkResult, League, write_result
from l2lopt.evaluation.benchmark_tables import LEAGUE_TITLES, Shaded
from l2lopt.evaluation.standings import RESAMPLES, Standings
from l2lopt.report import html
from l2lopt.report.style import BANDED_SEEDS
from l2lopt.report.tables import Table
from l2lopt.storage.run_log import write_text

NORMALISED = (
    "A normalised loss is (loss − target) / (mean loss at the beginning − mean target), the target being that of the "
    "same seed: 0 % ends where the target's optimiser ends, 100 % where all began, and below 0 % is better than the "
    "target. Shown are interquartile means over tasks and seeds. Green: the 95 % interval lies below 0 %. Red: it lies "
    "above."
)
"""Explanation of the normalised loss, below the tables that show it."""


class Part(NamedTuple):
    """A section of the report.

    Attributes:
        name: Identifier.
        heading: Heading.
        texts: Paragraphs before the rest.
        tables: Tables.
        drawings: Figures.
        folded: Whether the page shows its tables and figures on demand only.
    """

    name: str
    heading: str
    texts: Sequence[str] = ()
    tables: Sequence[Shaded] = ()
    drawings: Sequence[Drawing] = ()
    folded: bool = False


def write_report(result: BenchmarkResult, folder: Path) -> list[Path]:
    """Writes the report of a benchmark; equal results give equal bytes.

    The folder gets `report.html`, which needs no other file; `report.md`; `benchmark.json`, from which the report can
    be written again; `benchmark.csv` with every loss and `scores.csv` with every score; and `figures/`, each figure as
    PNG, as SVG and as CSV. Drawing takes about three seconds for every ten tasks and league.

    Args:
        result: Result of the benchmark.
        folder: Folder of the report, made if need be.

    Returns:
        The files, the page first.

    Example:
        >>> from l2lopt.evaluation.benchmark_result import read_result
        >>> write_report(read_result(folder / "benchmark.json"), folder)  # doctest: +SKIP
    """
    standings, training = Standings(result), Standings(result, "train")
    parts = _parts(standings, training, folder / "figures")
    page, text = folder / "report.html", folder / "report.md"
    title = f"Benchmark of optimisers: {result.suite}"
    lead, *others = tables.headline(standings)
    write_text(page, html.page(title, _body(title, lead, others, parts)))
    write_text(text, _markdown(title, lead, others, parts, folder))
    losses, scored, stored = folder / "benchmark.csv", folder / "scores.csv", folder / "benchmark.json"
    write_text(losses, csv_text(LOSS_COLUMNS, loss_rows(result)))
    write_text(scored, scores_csv([standings, training]))
    write_result(stored, result)
    drawings = [drawing for part in parts for drawing in part.drawings]
    return [page, text, losses, scored, stored, *(path for drawing in drawings for path in drawing.paths)]


def _parts(standings: Standings, training: Standings, folder: Path) -> list[Part]:
    leagues = tables.leagues_of(standings)[::-1]
    return [
        _standing(standings, leagues),
        *(_league(standings, league, folder, folded=index > 0) for index, league in enumerate(leagues)),
        *(_training(training, league, folder) for league in leagues[:1]),
        _losing(standings),
        _cost(standings, folder),
        Part("protocol", "Protocol", _protocol(standings.result)),
        *_remarks(standings),
    ]


def _standing(standings: Standings, leagues: Sequence[League]) -> Part:
    """The tables over all tasks."""
    entries, others = tables.learned(standings), tables.rivals(standings)
    duels = [tables.duel_table(standings, [*entries, *others], others)] if others else []
    found = [tables.family_table(standings, league) for league in leagues]
    return Part("standing", "Where they stand: test loss", (_counted(standings), NORMALISED), [*found, *duels])


def _league(standings: Standings, league: League, folder: Path, folded: bool) -> Part:
    """The profiles, curves and losses of a league."""
    field = shown(standings, league)
    whole = standings.field(league)
    left = [entry.label for entry in whole if entry not in field]
    texts = ["Learned rules and the harness are untuned in this comparison, where they have run untuned."]
    if left:
        texts.append(f"Figures show {MOST_CURVES} optimisers at most; left out: {', '.join(left)}.")
    profile = draw_profiles(standings, field, folder, f"profile-{league}")
    curves = draw_losses(standings, field, folder, f"losses-{league}")
    texts += [_profiled(standings)] if profile else []
    drawings = [*([profile] if profile else []), curves]
    found = [tables.loss_table(standings, whole)]
    return Part(league, LEAGUE_TITLES[league], [*texts, _banded(standings.result)], found, drawings, folded)


def _training(standings: Standings, league: League, folder: Path) -> Part:
    """The training losses of the league of the most effort."""
    field = shown(standings, league)
    drawing = draw_losses(standings, field, folder, f"training-losses-{league}")
    found = [tables.family_table(standings, league), tables.loss_table(standings, standings.field(league))]
    texts = ("The rates of the tuned league are chosen for the training loss here.", NORMALISED)
    return Part("training", f"Training loss, {league}", texts, found, [drawing], folded=True)


def _losing(standings: Standings) -> Part:
    """The tasks on which a learned rule loses."""
    others = tables.rivals(standings)
    found = [tables.losses_against(standings, entry, others) for entry in tables.learned(standings)] if others else []
    texts = ["Every task on which a learned rule ends above the harness or a tuned rival."]
    texts += [f"{shaded.table.title}: none." for shaded in found if not shaded.table.rows]
    return Part("losing", "Where it loses", texts, [shaded for shaded in found if shaded.table.rows])


def _cost(standings: Standings, folder: Path) -> Part:
    """The time of a step."""
    quiet = bool(standings.result.step_seconds)
    how = "measured apart from the runs on a quiet machine" if quiet else "as the runs were made, beside other work"
    drawing = draw_step_times(standings, folder, "step-times")
    drawings = [drawing] if drawing else []
    texts = (f"Time of one step of one seed, gradients included, {how}.",)
    return Part("cost", "What a step costs", texts, [Shaded(tables.cost_table(standings), {})], drawings)


def _counted(standings: Standings) -> str:
    result = standings.result
    text = f"{len(result.tasks)} tasks, of which {len(standings.tasks)} count; {result.seeds} seeds of each."
    if len(standings.tasks) < len(result.tasks):
        text += " Tasks of the meta-training do not count in what is said over tasks."
    lost = [task.name for task in standings.tasks if task.name not in standings.targets]
    there = any(run.optimiser == result.target_optimiser for run in result.runs)
    if lost and there:
        text += f" Without a target, since {result.target_optimiser} did not lower the loss: {', '.join(lost)}."
    elif lost:
        text += f" Without targets, since {result.target_optimiser} did not take part."
    return text


def _profiled(standings: Standings) -> str:
    target = standings.result.target_optimiser
    return (
        f"Profiles: the speed-up is the budget of steps over the steps to the target, the mean loss with which the "
        f"best-tuned {target} ends; it is 0 where the target is never reached. Higher curves are better; the upright "
        "line is the target. Bands are 95 % bootstrap intervals over seeds, pointwise."
    )


def _banded(result: BenchmarkResult) -> str:
    if result.seeds >= BANDED_SEEDS:
        return f"Loss curves: lines are means over {result.seeds} seeds, bands their 95 % intervals by Student's t."
    if result.seeds > 1:
        return f"Loss curves: thick lines are means over {result.seeds} seeds, thin lines the single runs."
    return "Loss curves: every line is a single run, since there is one seed; nothing is known of its spread."


def _protocol(result: BenchmarkResult) -> list[str]:
    trials = sorted({run.trials for run in result.runs if run.league == "tuned"})
    many = " or ".join(map(str, trials)) or "no"
    return [
        "All optimisers start from the same initial values and see the same batches. Rates are chosen on other seeds "
        "than the reported ones, for the test loss by samples that are neither trained on nor reported.",
        f"Leagues: untuned, one setting for all tasks; self-tuned, the one rate that is best on the meta-training "
        f"tasks, used on all; tuned, {many} rates tried on each task.",
        f"The target of a task is the mean final loss of {result.target_optimiser} in the league of the most effort. "
        "Steps to the target are read from the mean curve, straight between records; never reached counts as infinite.",
        "A run that ends above its loss at the beginning or at no finite number has diverged: it is counted, never "
        "dropped, and a loss that is not finite makes the mean infinite. An optimiser without a run on a task counts "
        "as infinite there.",
        f"Intervals over tasks are bootstrap intervals of {RESAMPLES} resamples of the seeds within each task: they "
        "say what other seeds would change, not what other tasks would. Targets move with the seeds that are drawn.",
        "A rule is ahead of a rival where it ends lower on more than half of the tasks, and behind where on fewer than "
        "half, with the whole interval of that number; else the two are level, and always with a single seed.",
        "After AlgoPerf (Dahl et al. 2023), rliable (Agarwal et al. 2021), VeLO (Metz et al. 2022) and DeepOBS "
        "(Schneider et al. 2019).",
    ]


def _remarks(standings: Standings) -> Iterable[Part]:
    result = standings.result
    warnings = [(run.task, f"{run.optimiser}, {run.league}", text) for run in result.runs for text in run.warnings]
    if warnings:
        table = Table(("task", "optimiser", "remark"), tuple(warnings))
        yield Part("remarks", f"Remarks on {len(warnings)} runs", (), [Shaded(table, {})], folded=True)
    tasks = [
        (task.name, task.family, task.split, f"{task.steps:,}", f"{task.parameters:,}", task.description)
        for task in result.tasks
    ]
    heads = ("task", "family", "for", "steps", "parameters", "description")
    found = [Shaded(Table(heads, tuple(tasks)), {})]
    if result.environment:
        found.append(Shaded(Table(("made with", ""), tuple(result.environment.items())), {}))
    yield Part("tasks", "Tasks and environment", (), found, folded=True)


def _body(title: str, lead: str, others: Sequence[str], parts: Sequence[Part]) -> Iterable[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield html.paragraph(lead, "lead")
    yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in others) + "</ul>" if others else ""
    for part in parts:
        inside = [*_figures(part.drawings), *(html.scrolling(table.html(classes)) for table, classes in part.tables)]
        texts = [html.paragraph(text, "soft") for text in part.texts]
        if part.folded:
            inside = [html.folded("Show", inside)]
        yield html.section(part.name, part.heading, [*texts, *inside])


def _figures(drawings: Sequence[Drawing]) -> Iterable[str]:
    for drawing in drawings:
        image = next(path for path in drawing.drawn.paths if path.suffix == ".svg").read_text(encoding="utf-8")
        panels = html.inline_panels(image, drawing.name, drawing.drawn.boxes)
        if drawing.lines:
            yield html.legend(drawing.lines)
        found = zip(panels, drawing.titles, drawing.remarks, strict=True)
        yield html.grid([html.figure(*panel) for panel in found], wide=len(panels) < 3)
        data = drawing.data.read_text(encoding="utf-8")
        yield f"<p>Data: {html.data_link(drawing.data.name, data)}</p>"


def _markdown(title: str, lead: str, others: Sequence[str], parts: Sequence[Part], folder: Path) -> str:
    lines = [f"# {title}", lead, "\n".join(f"- {text}" for text in others)]
    for part in parts:
        lines += [f"## {part.heading}", *part.texts]
        for drawing in part.drawings:
            png, data = (path.relative_to(folder).as_posix() for path in (drawing.drawn.paths[0], drawing.data))
            lines.append(f"![{drawing.name}]({png})\n\nData: [{drawing.data.name}]({data})")
        lines += [table.markdown() for table, _ in part.tables]
    # Markdown is HTML as well: a label must not become an element of it.
    return "\n\n".join(text for text in lines if text).replace("<", "&lt;") + "\n"
