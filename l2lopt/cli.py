"""The command line, `l2lopt demo` and the rest. The only place that prints."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from l2lopt.core.errors import UserError, printable
from l2lopt.core.interrupts import interrupted_between_steps
from l2lopt.storage.disk_space import disk_full

if TYPE_CHECKING:
    from l2lopt.core.types import Report
    from l2lopt.evaluation.comparison import Evaluation
    from l2lopt.report.tables import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Meta-train neural networks to be optimisers, compare them with tuned baselines, draw the curves.",
)
console = Console(stderr=False)
errors = Console(stderr=True, soft_wrap=True)

_RANK = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else None
"""This process's number among those of `torchrun`; None where it is alone."""


def _use_data(folder: Path | None) -> Path | None:
    """Puts the folder where everything looks for it, the processes that are started included."""
    if folder is not None:
        os.environ["L2LOPT_DATA"] = os.fspath(folder.absolute())
    return folder


Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the config; repeatable.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The config's seed.")]
Device = Annotated[str | None, typer.Option("--device", help='Where tensors live: "cpu", "cuda", …')]
Run = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run's folder.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that earlier commands have left.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="ROOT", callback=_use_data, help="Of the data sets, for L2LOPT_DATA.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stands.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where runs are kept for other benchmarks and studies.")]


@app.command()
def demo(run: Run = None, changes: Set = None, seed: Seed = None, device: Device = None) -> None:
    """Meta-train an optimiser on 8×8 digits, compare it with tuned baselines, draw the curves (4 to 5 minutes)."""
    from l2lopt.experiments import runs as experiments

    folder = run or Path("runs/demo")
    with _progress() as report:
        result, figures = experiments.demo(folder, changes=_changes(changes, seed, device), report=report)
    _show(result)
    _left([folder / "optimiser.safetensors", folder / "evaluation.csv", *figures])


@app.command("meta-train")
def meta_train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, such as configs/demo.toml.")],
    run: Run = None,
    changes: Set = None,
    seed: Seed = None,
    device: Device = None,
    data: Data = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Meta-train the optimiser that CONFIG describes; the run's folder is runs/<name of the config> by default."""
    from l2lopt.experiments import runs as experiments

    folder = run or Path("runs") / config.stem
    with _progress() as report:
        experiments.meta_train(
            config, folder, changes=_changes(changes, seed, device), overwrite=overwrite, resume=resume, report=report
        )
    _left([folder / "optimiser.safetensors"])


@app.command()
def evaluate(runs: Runs, changes: Set = None, seed: Seed = None, device: Device = None, data: Data = None) -> None:
    """Compare the learned optimisers of one or more runs with tuned baselines on the same fresh problems."""
    from l2lopt.experiments import runs as experiments

    with _progress() as report:
        result = experiments.evaluate(*runs, changes=_changes(changes, seed, device), report=report)
    _show(result)
    _left([run / "evaluation.csv" for run in runs])


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, such as configs/digits-train.toml.")],
    run: Run = None,
    changes: Set = None,
    seed: Seed = None,
    device: Device = None,
    data: Data = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train the optimisee that CONFIG describes with any optimiser; by default in runs/<name of the config>."""
    from l2lopt.experiments import runs as experiments

    folder = run or Path("runs") / config.stem
    with _progress() as report:
        result = experiments.train(
            config, folder, changes=_changes(changes, seed, device), overwrite=overwrite, resume=resume, report=report
        )
    if result.diverged is not None:
        _say(f"diverged: the loss was not finite at step {result.diverged}")
    _say(f"parameters of step {result.step} of {result.steps}")
    for name, value in result.metrics.items():
        _say(f"test {name}: {value:.5f}")
    _left(experiments.training_files(folder))


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained language model or DRAW.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Words, or characters, that follow.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", help="Above 1 bolder, 0: always the likeliest.")] = 1.0,
    count: Annotated[int, typer.Option("--count", min=1, help="Images.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
) -> None:
    """Go on with a text by a trained language model, or paint images by a trained DRAW."""
    from l2lopt.experiments import samples

    if samples.sample_kind(run) == "images":
        _left(samples.paint(run, count, seed))
        return
    text = samples.sample(run, prompt, tokens=tokens, temperature=temperature, seed=seed)
    _say(text)


@app.command()
def plot(runs: Runs) -> None:
    """Draw the loss curves of evaluated runs, the validations of meta-trained and the curves of trained ones."""
    from l2lopt.experiments import runs as experiments

    _left(experiments.plot(*runs))


@app.command()
def controls(
    weights: Annotated[str, typer.Argument(metavar="WEIGHTS", help="The name of shipped weights, a file, or a run.")],
    task: Annotated[str, typer.Option("--task", metavar="NAME", help="A task of configs/suites/tasks.toml.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the run.")] = 200,
    output: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Folder of table and figure.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of initial values and batches.")] = 0,
    data: Data = None,
) -> None:
    """Draw what the network of a hierarchical rule does with each kind of tensor, step by step of a run."""
    from l2lopt.experiments import controls as experiments

    folder = output or Path("runs/controls")
    with _progress() as report:
        paths = experiments.controls(weights, task, folder, steps=steps, seed=seed, report=report)
    _left(paths)


@app.command()
def weights(
    which: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them, or a file.")] = None,
) -> None:
    """List the learned optimisers that come with the package, or show what is known of one."""
    from l2lopt.weights import files

    names = files.list_weights() if which is None else [which]
    for name in names:
        header = files.header(name)
        try:
            _show_weights(name, header, which is not None)
        # Someone else may have written the header.
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            found, remedy = f"others ({error})", "get the file again"
            raise UserError(name, expected="facts of a meta-training", found=found, remedy=remedy) from None


def _show_weights(name: str, header: Mapping[str, Any], whole: bool) -> None:
    """What a file of weights is and what it cost; its comparisons as well where the `whole` is asked for."""
    rule, training = header["optimiser"], header["training"]
    kind = rule.get("cell", "lstm") if rule["name"] == "coordinatewise" else rule["name"]
    cost = [f"{training[key]:,.0f} {what}" for key, what in _COSTS.items() if key in training]
    _say(f"{name}: {kind}; {', '.join(cost)}")
    for label, rows in (training.get("comparisons", {}) if whole else {}).items():
        from l2lopt.evaluation import tables  # half a second that the list of names has no use for

        _print(tables.published_table(label, rows))


_COSTS = {"meta_updates": "meta-updates", "inner_steps": "inner steps", "seconds": "seconds of meta-training"}


@app.command()
def reproduce(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML file, or one that is shipped, such as fig3.")],
    run: Run = None,
    changes: Set = None,
    device: Device = None,
    data: Data = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Pieces made at the same time.")] = 1,
    cache: Cache = None,
) -> None:
    """Make a study's table and figures: many optimisers, meta-seeds and problems; goes on where it was stopped."""
    from l2lopt.experiments import comparison_study

    folder = run or Path("runs") / study.stem
    with _progress() as report:
        paths = comparison_study.reproduce(
            study, folder, changes=_changes(changes, None, device), cache=cache, jobs=jobs, report=report
        )
    _say(paths[0].read_text(encoding="utf-8"))
    _left(paths)


@app.command()
def benchmark(
    suite: Annotated[
        Path, typer.Argument(metavar="SUITE", help="smoke (minutes), small (an hour), full (a night), or a TOML file.")
    ] = Path("smoke"),
    run: Run = None,
    changes: Set = None,
    data: Data = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs made at the same time.")] = 1,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="MODULE:FUNCTION", help="A problem of your own, in place of the suite's tasks."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of each run.")] = None,
    cache: Cache = None,
) -> None:
    """Compare optimisers on a suite of tasks, or on your own, untuned and tuned; goes on where it was stopped."""
    from l2lopt.experiments import benchmark as benchmarks

    name = "own" if task else suite.stem
    folder, asked = run or Path("runs") / f"benchmark-{name}", _changes(changes, None, None)
    own = {one: one for one in task} if task else None
    with _progress() as report:
        benchmarks.benchmark(
            suite, folder, tasks=own, steps=steps, changes=asked, cache=cache, jobs=jobs, report=report
        )
    _left([folder / "report.html", folder / "report.md"])


def main() -> None:
    """Runs the command line; a user's mistake or a full disk ends in one line on standard error and exit code 2.

    An interruption (Ctrl-C) ends in one line and exit code 130. A run is gone on with by `--resume` after both.
    Of several ranks only the first one talks, but for errors.
    """
    console.quiet = _RANK not in (None, "0")
    try:
        code = app(standalone_mode=False)
        if code == 130:  # Typer's, after an interruption
            _fail("stopped", code=130)
    except UserError as error:
        _fail(str(error))
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        _fail("stopped", code=130)
    except Exception as error:
        if (full := disk_full(error)) is not None:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # where it lies on that disk, it would fail once more at the end
            _fail(str(full))
        message = getattr(error, "format_message", None)  # click's own usage errors
        if message is None:
            raise
        if message():  # none where only the help was shown
            _fail(" ".join(message().split()))
        sys.exit(2)
    except KeyboardInterrupt:
        _fail("stopped", code=130)


def _fail(message: str, code: int = 2) -> None:
    where = "l2lopt" if _RANK is None else f"l2lopt, rank {_RANK}"
    errors.print(f"{where}: {printable(message)}", markup=False, highlight=False)
    sys.exit(code)


def _changes(changes: list[str] | None, seed: int | None, device: str | None) -> list[str]:
    from l2lopt.storage import toml_file

    given = {"seed": seed, "device": device}
    return [*(changes or []), *(toml_file.assignment(key, value) for key, value in given.items() if value is not None)]


@contextmanager
def _progress() -> "Iterator[Report]":
    """A bar per stage with current figures and time left; off a terminal, a line per stage now and then."""
    columns = (
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    bars: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    quiet, period = not console.is_terminal, 1800.0  # seconds that the speed is taken over: steps may take a minute
    with (
        Progress(*columns, console=console, disable=quiet, speed_estimate_period=period) as progress,
        _told(),
        interrupted_between_steps() as step_ended,
    ):

        def report(stage: str, done: int, total: int, figures: Mapping[str, float]) -> None:
            stage = printable(stage)
            shown = printable("  ".join(f"{name} {value:.4g}" for name, value in list(figures.items())[:3]))
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total, completed=done, figures=shown)
            elif done < progress.tasks[bars[stage]].completed:  # once more from the start
                progress.reset(bars[stage], completed=done)
            progress.update(bars[stage], completed=done, total=total, figures=shown)
            if not console.is_terminal and (tenth := 10 * done // max(total, 1)) != tenths.get(stage):
                tenths[stage] = tenth
                left = progress.tasks[bars[stage]].time_remaining
                told = f"  left {timedelta(seconds=ceil(left))}" if left else ""
                _say(f"{stage}: {done}/{total}  {shown}{told}")
            step_ended()

        yield report


@contextmanager
def _told() -> Iterator[None]:
    """Shows messages that the library logs for its user, such as the backend it chose, as lines."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _say(record.getMessage())

    logger, lines = logging.getLogger("l2lopt"), Lines(logging.INFO)
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


def _print(table: "Table") -> None:
    """A table in the terminal, the first column to the left and numbers to the right."""
    from l2lopt.report.tables import spans

    shown = rich.table.Table(title=escape(printable(table.title)) or None, title_justify="left")
    for number, column in enumerate(table.columns):
        shown.add_column(escape(printable(column)), justify="right" if number else "left")
    for row in table.rows:
        parts = ([(printable(text), "bold" if bold else "") for text, bold in spans(cell)] for cell in row)
        shown.add_row(*(Text.assemble(*own) for own in parts))
    console.print(shown)
    for note in (*table.notes, *([table.legend] if table.legend else [])):
        _say("".join(text for text, _ in spans(note)))


def _show(result: "Evaluation") -> None:
    """The comparison as a table, and what to know about it."""
    from l2lopt.evaluation import tables

    for split in ("train", "test"):
        _print(tables.loss_table(result, split))
    diverged = {row.optimiser: row.diverged for row in result.table if row.diverged}
    if diverged:
        _say("diverged runs: " + ", ".join(f"{name} {count}" for name, count in diverged.items()))
    for warning in result.warnings:
        _say(f"warning: {warning}")


def _left(paths: list[Path]) -> None:
    for path in paths:
        _say(os.fspath(path))


def _say(text: str) -> None:
    """A text as it is: what looks like markup is none, and control characters do not reach the terminal."""
    console.print(printable(text, but="\n\t"), markup=False, highlight=False, soft_wrap=True)
