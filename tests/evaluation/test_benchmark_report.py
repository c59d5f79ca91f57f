"""The report of a benchmark: what is in the page, the tables and the files."""

import csv
import io
import math
import re
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from benchmark_results import OPTIMISERS, realistic, run_of

from l2lopt.evaluation import benchmark_tables as tables
from l2lopt.evaluation.benchmark_board import write_board
from l2lopt.evaluation.benchmark_csv import LOSS_COLUMNS, csv_text, loss_rows, scores_csv
from l2lopt.evaluation.benchmark_drawings import MOST_CURVES, line_styles, shown
from l2lopt.evaluation.benchmark_report import _counted, write_report
from l2lopt.evaluation.benchmark_result import BenchmarkResult, TaskInfo, read_result
from l2lopt.evaluation.standings import Competitor, Standings

HOSTILE = ('<script>alert("x")</script>', "$\\frac{", "_hidden &amp; `|` 日本\n\x07", "**bold** ]]> --> =1+1")
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The elements, identifiers, references and texts of a page; every element must be closed where it was opened."""

    def __init__(self, document):
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.uses, self.links, self.text, self.open = Counter(), [], set(), [], "", []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            self.ids += [value] if name == "id" else []
            self.links += [value] if name in ("href", "src") else []
            self.uses |= set(re.findall(r"url\(#([^)]+)\)", value or ""))
        self.uses |= {value[1:] for name, value in attributes if name == "href" and value.startswith("#")}

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open[-1:]:
            self.text += data


def small(names=("rule", "harness", "adamw"), tasks=("seen", "new"), seeds=2, splits=("meta-training", "held-out")):
    """A few tasks; the rule loses to the harness on those of odd number, and one of its runs diverges there."""
    infos, runs = [], []
    kinds = dict(zip(names, ("learned", "harness", "baseline"), strict=True))
    for index, task in enumerate(tasks):
        infos.append(TaskInfo(task, f"family {index}", splits[index % len(splits)], 100, 50, "described"))
        for place, (name, kind) in enumerate(kinds.items()):
            for league in ("tuned",) if kind == "baseline" else ("untuned",):
                fall = 0.5 + 0.1 * place + 0.3 * (place == 0 and index % 2)
                losses = {
                    step: [2.3 * fall ** math.log10(step + 1) + 0.01 * k for k in range(seeds)]
                    for step in (0, 1, 10, 100)
                }
                if place == 0 and index % 2:
                    losses[100][0] = math.nan
                runs.append(run_of(task, name, league, losses, kind=kind, warnings=("remarkable",)))
    return BenchmarkResult("tiny", seeds, tuple(infos), tuple(runs), names[-1], {}, {"processor": "small"})


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    result = small(HOSTILE[:3], (HOSTILE[3], "plain"), splits=("held-out",))
    return result, folder, write_report(result, folder)


def checked(path):
    """The page, without a broken reference, a name of two elements, or anything from outside."""
    page = Page(path.read_text(encoding="utf-8"))
    assert max(Counter(page.ids).values()) == 1
    assert page.uses <= set(page.ids)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert not {"script", "img", "iframe", "object"} & set(page.tags)
    return page


def test_the_page_is_whole_and_holds_all_names_as_text(hostile):
    _, _, paths = hostile
    page = checked(paths[0])
    shown = " ".join(page.text.split())
    for name in ('<script>alert("x")</script>', "$\\frac{", "_hidden &amp; `|` 日本"):
        assert name in shown
    assert "bold ]]> --> =1+1" in shown
    figures = 2 + 2 + 2 + 2 + 1 + 2  # profiles and losses of two leagues, times, training losses
    assert page.tags["figure"] == figures
    assert "2/2" not in shown
    assert "1 of 2" in shown


def test_all_files_are_there_and_not_empty(hostile):
    _, folder, paths = hostile
    assert {path.relative_to(folder).as_posix() for path in paths} == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    }
    names = {path.name for path in paths}
    assert names >= {"report.html", "report.md", "benchmark.csv", "scores.csv", "benchmark.json", "losses-tuned.svg"}
    assert all(path.stat().st_size > 100 for path in paths)


def test_equal_results_give_equal_bytes(hostile, tmp_path):
    _, folder, paths = hostile
    again = write_report(read_result(folder / "benchmark.json"), tmp_path)
    for one, other in zip(paths, again, strict=True):
        assert one.relative_to(folder) == other.relative_to(tmp_path)
        assert one.read_bytes() == other.read_bytes(), one.name


def test_the_data_of_every_figure_are_in_the_page_and_beside_it(hostile):
    _, folder, paths = hostile
    links = [link for link in checked(paths[0]).links if link.startswith("data:text/csv")]
    beside = sorted(path.read_text() for path in (folder / "figures").glob("*.csv"))
    assert sorted(b64decode(link.partition("base64,")[2]).decode() for link in links) == beside
    assert len(beside) == 6


def test_the_markdown_links_files_that_exist(hostile):
    _, folder, _ = hostile
    text = (folder / "report.md").read_text()
    found = re.findall(r"\]\(([^)]+)\)", text)
    assert len(found) == 12
    assert all((folder / name).is_file() for name in found)
    assert "<script" not in text
    assert "**Of 1 learned" not in text
    assert text.startswith("# Benchmark of optimisers: tiny\n\nOf 1 learned rule")


def test_benchmark_csv_is_the_result():
    result = realistic(tasks=3, seeds=2)
    rows = list(csv.DictReader(io.StringIO(csv_text(LOSS_COLUMNS, loss_rows(result)))))
    tasks = {task.name: task for task in result.tasks}
    found = {(r["task"], r["optimiser"], r["league"], r["split"], int(r["step"]), int(r["seed"])): r for r in rows}
    count = 0
    for run in result.runs:
        for split, by_step in run.losses.items():
            for step, losses in by_step.items():
                for seed, loss in enumerate(losses.tolist()):
                    row = found[run.task, run.optimiser, run.league, split, step, seed]
                    assert str(float(row["loss"])) == str(loss)
                    assert float(row["rate"]) == run.rates[split]
                    assert (row["family"], row["task_split"]) == (tasks[run.task].family, tasks[run.task].split)
                    count += 1
    assert count == len(rows) == len(found)


def test_scores_csv_has_a_line_for_every_run_and_split():
    result = small()
    rows = list(csv.DictReader(io.StringIO(scores_csv([Standings(result), Standings(result, "train")]))))
    assert len(rows) == 2 * len(result.runs)
    lost = [row for row in rows if (row["task"], row["optimiser"]) == ("new", "rule")]
    assert [(row["final"], row["diverged"], row["speed_up"]) for row in lost] == [("inf", "1", "0.0")] * 2


def test_the_headline_says_first_where_the_rules_lose():
    lead, line = tables.headline(Standings(small(seeds=2)))
    assert lead == (
        "Of 1 learned rule, none is ahead of the harness (harness, untuned) and 1 is behind it; none is ahead of tuned "
        "adamw and 1 is behind it, by the test loss at the end of 1 task outside the meta-training."
    )
    assert line.startswith("rule, untuned: lower than the harness on 0 of 1 tasks (0–0 with other seeds): behind; ")
    assert line.endswith("interquartile mean ∞.")
    lead, line = tables.headline(Standings(small(tasks=("a",), splits=("held-out",))))
    assert "1 is ahead of the harness (harness, untuned) and none is behind it" in lead
    assert "1 task outside the meta-training" in lead


def test_the_headline_says_where_nothing_can_be_said():
    seen = tables.headline(Standings(small(tasks=("a",))))[0]
    assert "by the test loss at the end of 1 task that all belong to the meta-training." in seen
    own = tables.headline(Standings(small(tasks=("a",), splits=("own",))))[0]
    assert own.endswith("at the end of 1 task.")
    result = small()
    without = [run for run in result.runs if run.kind != "learned"]
    said = tables.headline(Standings(BenchmarkResult("tiny", 2, result.tasks, tuple(without))))
    assert said == ["No learned rule took part; harness, untuned has the lowest mean normalised test loss (−25.5 %)."]
    alone = [run for run in result.runs if run.kind == "learned"]
    said = tables.headline(Standings(BenchmarkResult("tiny", 2, result.tasks, tuple(alone))))
    assert said == ["Nothing took part that a learned rule could be held to."]


def test_the_tasks_where_a_rule_loses_are_listed_and_no_others():
    standings = Standings(small(tasks=("wins", "loses"), splits=("held-out",)))
    rule = Competitor("rule", "learned", "untuned")
    table, classes = tables.losses_against(standings, rule, tables.rivals(standings))
    assert table.rows == (("loses", "family 1", "∞", "∞", "∞"),)
    assert classes == {(0, 3): "bad", (0, 4): "bad"}
    assert table.title == "rule, untuned: 1 of 2 tasks"


def test_losses_are_shown_with_their_divergences():
    standings = Standings(small(tasks=("wins", "loses"), splits=("held-out",)))
    table, classes = tables.loss_table(standings, standings.field("tuned"))
    assert table.columns == ("task", "rule, untuned", "harness, untuned", "adamw, tuned")
    assert table.rows[1][1] == "∞ (1/2 diverged)"
    assert table.rows[0][1].startswith("**")
    assert classes == {(0, 1): "good", (1, 1): "bad"}


def test_a_twin_of_the_target_is_at_0_however_skewed_its_losses_are():
    result, made = small(tasks=("a", "b"), splits=("held-out",), seeds=5), []
    outlier = torch.tensor([0, 0, 0, 0, 1.0])
    for run in result.runs:
        losses = {step: values + outlier for step, values in run.losses["test"].items()}
        run = replace(run, losses={**run.losses, "test": losses}, first=run.first + outlier)
        made += [run, replace(run, optimiser="twin")] if run.optimiser == result.target_optimiser else [run]
    standings = Standings(replace(result, runs=tuple(made)))
    entry = next(entry for entry in standings.competitors if entry.optimiser == "twin")
    assert standings.interquartile(entry, standings.tasks) == (0, 0, 0)
    assert {line.normalised for line in standings.lines() if line.optimiser == "twin"} == {0}


def test_normalised_losses_are_those_of_the_definition():
    standings = Standings(small(tasks=("a", "b"), splits=("held-out",)))
    harness, adamw = (run for run in standings.result.runs if run.task == "a" and run.kind != "learned")
    begin = torch.stack([adamw.losses["test"][0], adamw.first]).amin(0).mean()
    target = adamw.losses["test"][100]
    expected = (harness.losses["test"][100] - target) / (begin - target.mean())
    entry = Competitor("harness", "harness", "untuned")
    torch.testing.assert_close(standings.normalised(entry, standings.tasks)[0], expected)
    table, _ = tables.family_table(standings, "untuned")
    cell = table.rows[0][table.columns.index("family 0")]
    assert table.rows[0][0] == "harness (harness)"
    assert cell == f"{100 * float(expected.mean()):+.1f} %".replace("-", "−")
    assert table.rows[0][1] == cell  # of four runs the best and the worst, a divergence, are cut off


def noisy(seed, shared, seeds=10):
    """Two optimisers that are equal but for their noise, on ten tasks."""
    generator = torch.Generator().manual_seed(seed)
    infos = tuple(TaskInfo(f"t{k}", "f", "own", 10, 5) for k in range(10))
    runs = []
    for info in infos:
        common = 0.2 * shared * torch.randn(seeds, generator=generator)
        for name, league in (("mine", "untuned"), ("adamw", "tuned")):
            final = 1 + common + 0.1 * torch.randn(seeds, generator=generator)
            runs.append(run_of(info.name, name, league, {0: [2.0] * seeds, 10: final.tolist()}))
    return Standings(BenchmarkResult("noisy", seeds, infos, tuple(runs), "adamw"))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_an_interval_holds_equality_as_often_as_it_says(shared):
    """The target is a mean over the same problems, so it moves with them: with noise of its own, or with the common."""
    holds, width = 0, 0.0
    for seed in range(100):
        standings = noisy(seed, shared)
        (mine,) = (entry for entry in standings.competitors if entry.optimiser == "mine")
        found = standings.interquartile(mine, standings.tasks)
        holds, width = holds + (found.low <= 0 <= found.high), width + (found.high - found.low) / 100
    assert 88 <= holds <= 99
    assert 0.04 < width < 0.08  # the difference of two means over 100 runs, whatever both have in common


def test_a_single_seed_decides_nothing():
    standings = noisy(0, 0.0, seeds=1)
    (mine,) = (entry for entry in standings.competitors if entry.optimiser == "mine")
    (other,) = (entry for entry in standings.competitors if entry.optimiser == "adamw")
    found = standings.interquartile(mine, standings.tasks)
    assert math.isfinite(found.value)
    assert math.isnan(found.low)
    assert tables._verdict(standings, mine, other) == tables._verdict(standings, other, mine) == "level"
    shaded = tables.duel_table(standings, [mine], [other]), tables.family_table(standings, "untuned")
    assert not any(one.classes for one in shaded)
    assert "nan" not in repr([one.table for one in shaded])
    assert "with other seeds" not in str(tables.headline(standings))


def test_self_tuned_runs_have_no_column_on_the_meta_training():
    result = realistic(tasks=5, seeds=2, optimisers=("transferable", "adamw", "muon"))
    seen = {task.name for task in result.tasks if task.split == "meta-training"}
    kept = [run for run in result.runs if run.league != "self-tuned" or run.task not in seen]
    standings = Standings(BenchmarkResult("part", 2, result.tasks, tuple(kept)))
    table, _ = tables.family_table(standings, "self-tuned")
    place = table.columns.index("digits (meta-training)")
    assert {row[0] for row in table.rows} == {"adamw", "muon"}
    assert all(row[place] is None and "∞" not in row[1] for row in table.rows)


def test_a_competitor_without_a_run_counts_as_infinite():
    result = small(tasks=("a", "b", "c"), splits=("held-out",))
    kept = [run for run in result.runs if (run.task, run.kind) != ("b", "harness")]
    standings = Standings(BenchmarkResult("part", 2, result.tasks, tuple(kept), "adamw"))
    entry = Competitor("harness", "harness", "untuned")
    assert standings.finals(entry, standings.tasks)[1].tolist() == [math.inf] * 2
    table, _ = tables.family_table(standings, "untuned")
    assert next(row for row in table.rows if row[0].startswith("harness"))[-1] == "0 of 4, 1 tasks not run"


@pytest.mark.parametrize("final", [[9.0, 9.0], [math.nan, 1.0]])
def test_a_target_that_did_not_learn_is_none(final):
    task = TaskInfo("a", "family", "own", 10, 5)
    target = run_of("a", "adamw", "tuned", {0: [2.0, 2.0], 10: final})
    rule = run_of("a", "rule", "untuned", {0: [2.0, 2.0], 10: [1.0, 1.0]}, kind="learned")
    standings = Standings(BenchmarkResult("own", 2, (task,), (target, rule)))
    assert standings.targets == {}
    assert [line.steps_to_target for line in standings.lines()] == [math.inf] * 2
    # Without the seed that diverged both end at 1: other seeds could make them even.
    expected = "1 is ahead of tuned adamw" if final[0] == 9 else "none is ahead of tuned adamw and none is behind it"
    assert expected in tables.headline(standings)[0]


def test_without_the_targets_optimiser_steps_are_measured_by_the_quickest():
    task, ends = TaskInfo("a", "family", "own", 10, 5), {0: [2.0], 10: [1.0]}
    runs = [run_of("a", name, "tuned", ends) for name in ("sgd", "adam", "adamw")]
    seconds = {"a": {"sgd": 0.25, "adam": 0.75, "adamw": math.nan}}

    def standings(*names):
        return Standings(
            BenchmarkResult(
                "own", 1, (task,), tuple(run for run in runs if run.optimiser in names), step_seconds=seconds
            )
        )

    # AdamW's time is that of another machine, and counts no more than none.
    for some in (standings("sgd", "adam"), standings("sgd", "adam", "adamw")):
        assert {name: by_task["a"][1] for name, by_task in tables.step_ratios(some).items()} == {"sgd": 1, "adam": 3}
        assert tables.cost_table(some).columns[2] == "over the quickest, median"
    assert _counted(standings("sgd")).endswith("Without targets, since adamw did not take part.")


def test_speed_ups_are_ratios_of_steps():
    task = TaskInfo("a", "family", "own", 100, 5)
    target = run_of("a", "adamw", "tuned", {0: [3.0, 3.0], 50: [2.0, 2.0], 100: [1.0, 1.0]})
    quick = run_of("a", "rule", "untuned", {0: [3.0, 3.0], 50: [0.0, 1.0], 100: [0.0, 0.5]}, kind="learned")
    standings = Standings(BenchmarkResult("own", 2, (task,), (target, quick), step_seconds={"a": {"rule": 0.5}}))
    entry = Competitor("rule", "learned", "untuned")
    needed = 50 * 2 / 2.5  # from 3 at 0 to 0.5 at 50 it passes 1 after 2 of 2.5
    assert standings.speed_ups(entry)[0].tolist() == pytest.approx([100 / needed])
    line = standings.lines()[1]
    assert (line.steps_to_target, line.seconds_to_target) == pytest.approx((needed, 0.5 * needed))
    # The seeds by themselves pass 1 after 2 of 3 and 2 of 2 parts of the first 50 steps.
    by_draw = {100 / needed, 100 / (50 * 2 / 3), 100 / 50}
    drawn = standings.speed_ups(entry)[1][:, 0].unique().tolist()
    assert sorted(drawn) == pytest.approx(sorted(by_draw))


def test_figures_keep_the_rules_and_their_rivals_where_there_are_too_many():
    result = realistic(tasks=2, seeds=1)
    standings = Standings(result)
    field = shown(standings, "tuned")
    assert len(standings.field("tuned")) == len(OPTIMISERS) > MOST_CURVES == len(field)
    names = {entry.optimiser for entry in field}
    assert names >= {"transferable", "transferable-ihc-lstm", "normalised-muon", "muon", "adamw"}
    assert {entry.league for entry in field if entry.kind == "baseline"} == {"tuned"}
    lines = line_styles(result)
    assert len(set(lines.values())) == len(lines)


@pytest.mark.parametrize(
    "result",
    [
        small(seeds=1, tasks=("a",), splits=("own",)),
        BenchmarkResult("alone", 1, (TaskInfo("a", "f", "own", 3, 1),), (run_of("a", "x", "tuned", {3: [math.nan]}),)),
    ],
    ids=["one seed of one task", "one run that diverged"],
)
def test_small_results_are_reported(result, tmp_path):
    page = checked(write_report(result, tmp_path)[0])
    assert "a single run" in page.text
    assert "Where it loses" in page.text


def test_tensorboard_gets_scalars_figures_and_hparams(tmp_path, hostile):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, _, paths = hostile
    result = small()
    figure = next(path for path in paths if path.name == "step-times.png")
    text = next(path for path in paths if path.suffix == ".md")
    write_board(result, tmp_path, [figure, text, paths[0]])
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.name for path in folders] == ["00-rule-untuned", "01-harness-untuned", "02-adamw-tuned"]
    found = EventAccumulator(str(folders[2])).Reload()
    run = next(run for run in result.runs if (run.task, run.optimiser) == ("new", "adamw"))
    seen = {event.step: event.value for event in found.Scalars("new/test")}
    assert seen == pytest.approx({step: float(row.mean()) for step, row in run.losses["test"].items()})
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(found.PluginTagToContent("hparams"))
    assert math.isnan(EventAccumulator(str(folders[0])).Reload().Scalars("new/test")[-1].value)
    shared = EventAccumulator(str(tmp_path)).Reload()
    assert shared.Tags()["images"] == ["step-times"]
    (told,) = shared.Tensors("Where they stand: test loss/text_summary")
    (table,) = told.tensor_proto.string_val
    assert b"| optimiser | all tasks |" in table
    assert b"![" not in b"".join(
        shared.Tensors(name)[0].tensor_proto.string_val[0] for name in shared.Tags()["tensors"]
    )


@pytest.mark.slow
def test_a_whole_suite_is_drawn(tmp_path):
    result = realistic()
    paths = write_report(result, tmp_path)
    page = checked(paths[0])
    for name in [*OPTIMISERS, *(task.name for task in result.tasks)]:
        assert name in page.text
    assert page.tags["figure"] == 20 * 4 + 2 * 3 + 1
    assert "4 of 80" in page.text  # the runs of momentum that diverge
