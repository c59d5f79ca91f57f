"""The command line, `l2lopt demo` and the rest.

PyTorch takes seconds to load. So a command first reads what it was given, with `experiments.config`, which does without
PyTorch, and then imports what does the work: the help and the answer to a mistake come at once.
"""

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2lopt.core.errors import UserError, printable
from l2lopt.storage.disk_space import disk_full
from l2lopt.terminal import console, errors, list_files, print_table, progress, say

if TYPE_CHECKING:
    from l2lopt.evaluation.comparison import Evaluation

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Meta-train neural networks to be optimisers, compare them with tuned baselines, draw the curves.",
)

_RANK = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else None
"""This process's number among those of `torchrun`; None where it is alone."""


def _use_data(folder: Path | None) -> Path | None:
    """Puts the folder where everything looks for it, the processes that are started included."""
    if folder is not None:
        os.environ["L2LOPT_DATA"] = os.path.abspath(os.path.expanduser(folder))
    return folder


def _folders(runs: list[Path]) -> list[Path]:
    """Refuses what is no folder."""
    from l2lopt.storage.run_log import existing_folder

    return [existing_folder(run) for run in runs]


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        say(f"l2lopt {version('l2lopt')}")
        raise typer.Exit


@app.callback()
def _options(
    told: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before every command."""


Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the config; repeatable.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The config's seed.")]
Device = Annotated[str | None, typer.Option("--device", help='Where tensors live: "cpu", "cuda", …')]
Run = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run's folder.")]
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", callback=_folders, help="Folders that earlier commands have left."),
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="ROOT", callback=_use_data, help="Of the data sets, for L2LOPT_DATA.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stands.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where runs are kept for other comparisons.")]


@app.command()
def demo(run: Run = None, changes: Set = None, seed: Seed = None, device: Device = None) -> None:
    """Meta-train an optimiser on 8×8 digits, compare it with tuned baselines, draw the curves (3 to 4 minutes)."""
    from l2lopt.experiments import config as configs

    given = _changes(changes, seed, device)
    configs.load(configs.demo(), given)
    from l2lopt.experiments import demo as demos

    folder = run or Path("runs/demo")
    with progress() as report:
        result, figures = demos.demo(folder, changes=given, report=report)
    _show(result)
    list_files([folder / "optimiser.safetensors", folder / "evaluation.csv", *figures])


@app.command("meta-train")
def meta_train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, or a shipped one, such as demo.")],
    run: Run = None,
    changes: Set = None,
    seed: Seed = None,
    device: Device = None,
    data: Data = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Meta-train the optimiser that CONFIG describes; the run's folder is runs/<name of the config> by default."""
    from l2lopt.experiments import config as configs

    settings, folder = configs.load(config, _changes(changes, seed, device)), run or configs.default_folder(config)
    from l2lopt.experiments import runs as experiments

    with progress() as report:
        experiments.meta_train(settings, folder, overwrite=overwrite, resume=resume, report=report)
    list_files([folder / "optimiser.safetensors"])


@app.command()
def evaluate(
    runs: Runs, changes: Set = None, seed: Seed = None, device: Device = None, data: Data = None, cache: Cache = None
) -> None:
    """Compare the learned optimisers of one or more runs with tuned baselines on the same fresh problems."""
    from l2lopt.experiments import config as configs

    given = _changes(changes, seed, device)
    for run in runs:
        configs.meta_training_config(run, given)
    from l2lopt.experiments import runs as experiments

    with progress() as report:
        result = experiments.evaluate(*runs, changes=given, cache=cache, report=report)
    _show(result)
    list_files([run / "evaluation.csv" for run in runs])


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A TOML file, or a shipped one, such as digits-train.")
    ],
    run: Run = None,
    changes: Set = None,
    seed: Seed = None,
    device: Device = None,
    data: Data = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train the optimisee that CONFIG describes with any optimiser; by default in runs/<name of the config>."""
    from l2lopt.experiments import config as configs

    settings = configs.load(config, _changes(changes, seed, device), kind=configs.TrainConfig)
    from l2lopt.experiments import runs as experiments

    folder = run or configs.default_folder(config)
    with progress() as report:
        result = experiments.train(settings, folder, overwrite=overwrite, resume=resume, report=report)
    if result.diverged is not None:
        say(f"diverged: the loss was not finite at step {result.diverged}")
    say(f"parameters of step {result.step} of {result.steps}")
    for name, value in result.metrics.items():
        say(f"test {name}: {value:.5f}")
    list_files(experiments.training_files(folder))


@app.command()
def sample(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained language model or DRAW.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Words, or characters, that follow.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", help="Above 1 bolder, 0: always the likeliest.")] = 1.0,
    count: Annotated[int, typer.Option("--count", min=1, help="Images.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
) -> None:
    """Go on with a text by a trained language model, or paint images by a trained DRAW."""
    _folders([run])
    from l2lopt.experiments import samples

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if samples.sample_kind(run, given) == "images":
        list_files(samples.sample_images(run, count, seed))
        return
    text = samples.sample(run, prompt, tokens=tokens, temperature=temperature, seed=seed)
    say(text)


@app.command()
def plot(runs: Runs) -> None:
    """Draw the loss curves of evaluated runs, the validations of meta-trained and the curves of trained ones."""
    from l2lopt.experiments import runs as experiments

    list_files(experiments.plot(*runs))


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
    with progress() as report:
        paths = experiments.controls(weights, task, folder, steps=steps, seed=seed, report=report)
    list_files(paths)


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
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
        ) as error:  # someone else may have written it
            found, remedy = f"others ({error})", "get the file again"
            raise UserError(name, expected="facts of a meta-training", found=found, remedy=remedy) from None


def _show_weights(name: str, header: Mapping[str, Any], whole: bool) -> None:
    """What a file of weights is and what it cost; the `whole`: how it compares and where it failed as well."""
    from l2lopt.weights import card

    training = header["training"]
    rule = f"{card.rule_name(header['optimiser'])}; " if whole else ""
    say(f"{name}: {rule}{card.cost(training)}", wrapped=True)
    if not whole:
        return
    for label, rows in training.get("comparisons", {}).items():
        for table in card.comparison_tables(label, rows):
            print_table(table)
    for text in card.remarks(training):
        say(f"\n{text}", wrapped=True)


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
    from l2lopt.experiments import config as configs

    configs.find(study, "studies", "a study's file")
    from l2lopt.experiments import comparison_study

    folder = run or Path("runs") / study.stem
    with progress() as report:
        paths = comparison_study.reproduce(
            study, folder, changes=_changes(changes, None, device), cache=cache, jobs=jobs, report=report
        )
    say(paths[0].read_text(encoding="utf-8"))
    list_files(paths)


@app.command()
def benchmark(
    suite: Annotated[
        Path | None,
        typer.Argument(metavar="SUITE", help="smoke (minutes), small (an hour), full (a night), or a TOML file."),
    ] = None,
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
    beside: Annotated[
        Path | None, typer.Option("--beside", metavar="FILE", help="A benchmark.json, whose runs join the report.")
    ] = None,
) -> None:
    """Compare optimisers on a suite of tasks, or on your own, untuned and tuned; goes on where it was stopped."""
    from l2lopt.experiments import config as configs

    if suite is not None or not task:
        configs.find(suite or "smoke", "suites", "a suite's file")
    from l2lopt.experiments import benchmark as benchmarks

    name = "own" if task else (suite or Path(benchmarks.SMALLEST)).stem
    folder, asked = run or Path("runs") / f"benchmark-{name}", _changes(changes, None, None)
    own = {one: one for one in task} if task else None
    with progress() as report:
        benchmarks.benchmark(
            suite,
            folder,
            tasks=own,
            steps=steps,
            changes=asked,
            cache=cache,
            beside=beside,
            jobs=jobs,
            report=report,
        )
    list_files([folder / "report.html", folder / "report.md"])


def main() -> None:
    """Runs the command line; a user's mistake or a full disk ends in one line on standard error and exit code 2.

    An interruption (Ctrl-C) ends in one line and exit code 130. A run is gone on with by `--resume` after both.
    Of several ranks only the first one talks, but for errors.
    """
    console.quiet = _RANK not in (None, "0")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a pipe may know fewer characters than UTF-8 has, as on Windows: ↑ would end in a traceback.
        sys.stdout.reconfigure(errors="replace")
    # The working folder, for "mymodule:name" in configs; last, so that no file there hides an installed module.
    sys.path.append("")
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


def _show(result: "Evaluation") -> None:
    """The comparison as a table, and what to know about it."""
    from l2lopt.evaluation import tables

    for split in ("train", "test"):
        print_table(tables.loss_table(result, split))
    diverged: dict[str, int] = {}
    for row in result.table:
        if row.diverged:
            diverged[row.optimiser] = max(row.diverged, diverged.get(row.optimiser, 0))
    if diverged:
        say("diverged runs: " + ", ".join(f"{name} {count}" for name, count in diverged.items()))
    for warning in result.warnings:
        say(f"warning: {warning}")
