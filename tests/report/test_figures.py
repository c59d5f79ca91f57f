"""Curves from records."""

import numpy as np
import pytest
from scipy import stats

from l2lopt.core.errors import UserError
from l2lopt.evaluation import benchmark_result
from l2lopt.experiments import run_folder
from l2lopt.report import control_curves, figures, validation_curves

HEADER = ",".join(figures.COLUMNS) + "\n"


def written(tmp_path, lines):
    path = tmp_path / "evaluation.csv"
    path.write_text(lines)
    return path


def test_bands_are_means_and_students_intervals(tmp_path):
    losses = [1.0, 2.0, 4.0]
    rows = "".join(f"a,learned,{seed},10,train,{loss}\n" for seed, loss in enumerate(losses))
    band = figures.read(written(tmp_path, HEADER + rows))["a", "learned", "train"]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(losses), scale=stats.sem(losses))
    assert (band.steps[0], band.mean[0]) == (10, pytest.approx(np.mean(losses)))
    assert np.array(band.interval) == pytest.approx(np.array([[low], [high]]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"expected columns optimiser,.*found an empty file"),
        ("a,b\n1,2\n", r"found a,b"),
        (HEADER + "a,learned,0,ten,train,1.0\n", r"line 2: expected a loss"),
        (HEADER + "a,learned,0,1,train,1.0\na,learned\n", r"line 3: expected a loss"),
        (HEADER + "a,other,0,1,train,1.0\n", r"line 2: expected a loss"),
        (HEADER + 'a,"learned,0,1,train,1.0\n' + "a,learned,0,1,train,1.0\n" * 9999, r"expected a line of a table"),
        (HEADER + "a,learned,0,1,train,1.0\na,learned,1,1,train,1.0\na,learned,0,2,train,1.0\n", r"found 1 and 2"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        figures.read(written(tmp_path, content))


def test_a_log_whose_last_line_a_kill_has_cut_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = '{"stage": "train", "step": 1, "loss": 2.0}'
    path.write_text(f"{line}\n{line[:20]}")
    assert figures.read_training(path)["train"][1].tolist() == [2.0]
    endless = line.replace("1,", "1e999,")
    for damaged in (f"{line[:20]}\n", f"{line[:20]}\n{line}\n", f"{endless}\n{line}\n", f"{'[' * 99999}\n{line}\n"):
        path.write_text(damaged)
        with pytest.raises(UserError, match="line 1: expected a loss"):
            figures.read_training(path)


@pytest.mark.parametrize("splits", [("train",), ("train", "test")])
def test_both_figures_are_drawn_even_of_runs_that_diverged(tmp_path, splits):
    rows = [
        f"{name},{kind},{seed},{step},{split},{loss}\n"
        for name, kind in (("mine", "learned"), ("sgd", "baseline"), ("adam", "baseline"))
        for split in splits
        for seed in range(2)
        for step, loss in ((0, 2.0), (1, 1.0 + seed), (10, 0.1), (100, float("nan") if name == "sgd" else 0.01))
    ]
    bands = figures.read(written(tmp_path, HEADER + "".join(rows)))
    paths = figures.loss_curves(bands, tmp_path / "figures", "title", breaks=[10, 100])
    assert [path.name for path in paths] == ["loss-curves.png", "loss-curves.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert "<svg" in paths[1].read_text()[:1000]


@pytest.mark.parametrize("splits", [("train",), ("train", "test")])
def test_a_cross_ends_the_line_of_a_diverged_optimiser(tmp_path, monkeypatch, splits):
    """One seed in five is enough, as its mean is none; the gaps of a baseline's line have no cross."""
    rows = [
        f"{name},baseline,{seed},{step},{split},{np.nan if seed == diverged and step > 10 else 1 / (1 + step)}\n"
        for name, diverged in (("adam", None), ("sgd", 3))
        for split in splits
        for seed in range(5)
        for step in (0, 1, 10, 20, 100)
    ]
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    figures.loss_curves(figures.read(written(tmp_path, HEADER + "".join(rows))), tmp_path, breaks=[1, 100])
    for panel in seen[0].axes:
        (cross,) = (line for line in panel.get_lines() if line.get_marker() == "x")
        assert (cross.get_xdata().tolist(), cross.get_ydata().tolist()) == ([10], [pytest.approx(1 / 11)])
        colours = {line.get_label(): line.get_color() for line in panel.get_lines()}
        assert cross.get_color() == colours["SGD"]
    (legend,) = seen[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["Adam", "SGD"]
    assert legend.get_title().get_text().endswith("cross: a run is no longer finite")
    seen[0].canvas.draw()
    within = seen[0].bbox
    assert within.x0 <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= within.x1
    figures.plt.close(seen[0])


def test_a_baselines_line_is_cut_after_each_horizon():
    band = figures.Band(np.array([0, 1, 10, 20, 100]), np.array([[0], [1], [10], [20], [100]]))
    cut = figures._cut(band, [10, 100])
    assert np.isnan(cut.steps).tolist() == [False, False, False, True, False, False, True]
    assert cut.mean[~np.isnan(cut.mean)].tolist() == [0, 1, 10, 20, 100]


@pytest.mark.parametrize(("cut", "expected"), [(None, ["sgd"]), (["mine"], ["mine"]), ([], [])])
def test_the_lines_of_several_runs_are_cut_and_no_others(tmp_path, monkeypatch, cut, expected):
    """Those of the baselines, where nobody says which they are."""
    rows = [
        f"{n},{k},0,{t},train,{1 / (t + 1)}\n" for n, k in (("mine", "learned"), ("sgd", "baseline")) for t in (0, 1, 9)
    ]
    seen = []
    monkeypatch.setattr(figures, "_panel", lambda panel, bands, breaks, pieces, labels, spiky: seen.append(pieces))
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: figures.plt.close(figure))
    figures.loss_curves(figures.read(written(tmp_path, HEADER + "".join(rows))), tmp_path, breaks=[1], cut=cut)
    assert [name for name, steps in seen[0].items() if steps] == expected


def test_a_long_legend_takes_no_room_from_the_panels(tmp_path, monkeypatch):
    heights = []

    def measured(figure, folder, name):
        figure.canvas.draw()
        heights.append(figure.axes[0].get_window_extent().height)
        figures.plt.close(figure)

    monkeypatch.setattr(figures, "write_figure", measured)
    for count in (2, 40):
        rows = "".join(f"{'long ' * 8}{k},learned,0,{t},train,1.0\n" for k in range(count) for t in (0, 9))
        figures.loss_curves(figures.read(written(tmp_path, HEADER + rows)), tmp_path)
    assert heights[1] > 0.9 * heights[0]


def panel_of(*curves, steps=(0, 1, 10)):
    bands = {(str(k), "learned"): figures.Band(np.array(steps), np.array([one]).T) for k, one in enumerate(curves)}
    figure, panel = figures.plt.subplots()
    names, spiky = [name for name, _ in bands], figures._rises(bands.values())
    figures._panel(panel, bands, (), dict.fromkeys(names, ()), dict(zip(names, names, strict=True)), spiky)
    figure.canvas.draw()
    figures.plt.close(figure)
    return panel


def test_where_a_curve_rises_far_above_the_first_loss_it_is_seen_what_all_come_to():
    low, high = [4.0, 2.0, 1.0], [4.0, 1e5, 2.0]
    panel = panel_of(low, high)
    assert panel.get_ylim() == pytest.approx((1 / 1.2, 2.4))
    assert (panel.get_xscale(), panel.get_xlim()) == ("linear", (0, 10))
    assert panel_of(low, [4.0, 1e5, 0.0]).get_ylim() == pytest.approx((1 / 1.2, 2.4))  # a logarithm's axis has no zero
    assert panel_of(low, [4.0, 2.0, 9.0]).get_ylim() == pytest.approx((1 / 1.2, 2.4))  # nor one that ends above it
    assert panel_of([np.nan, 2.0, 1.0], high).get_ylim() == pytest.approx((1 / 1.2, 2.4))
    early = panel_of([4.0, 3.5, 3.0, 1.0], [4.0, 1e5, 3.9, 2.0], steps=(0, 1, 99, 1000))
    assert early.get_ylim() == pytest.approx((1 / 1.2, 2.4))


def test_all_of_other_curves_is_in_the_picture():
    low, high = [4.0, 2.0, 1.0], [4.0, 1e5, 2.0]
    for panel in (panel_of(low), panel_of(low, [4.0, np.nan, np.inf]), panel_of(low, [4.0, 4.1, 2.0])):
        assert panel.get_ylim()[1] == pytest.approx(4.0, rel=0.1)
        assert panel.get_xlim()[0] == 0
    assert panel_of([4.0, 9.0, 5.0]).get_ylim()[1] > 9.0  # or nothing would be left
    assert panel_of(low, high, steps=(1, 10, 100)).get_ylim()[1] > 1e5
    assert panel_of([4.0], [5.0], steps=(0,)).get_ylim()[0] < 4.0


def test_losses_below_0_have_a_linear_axis():
    panel = panel_of([4.0, 1.0, -3.0], [4.0, 2.0, -1.0])
    assert panel.get_yscale() == "linear"
    assert panel.get_ylim() == pytest.approx((-3.35, 4.35))
    assert panel_of([4.0, 1.0, -3.0], [4.0, 1e5, 1e9]).get_ylim() == pytest.approx((-3.35, 4.35))
    assert panel_of([4.0, 1.0, -3.0], [4.0, np.nan, np.inf]).get_ylim() == pytest.approx((-3.35, 4.35))
    assert panel_of([-3.0, 1.0], steps=(1, 10)).get_ylim() == pytest.approx((-3.2, 1.2))
    assert panel_of([-3.0], steps=(1,)).get_ylim() == (-4.0, -2.0)
    assert panel_of([4.0, 1.0, 0.0]).get_yscale() == "log"


def test_both_panels_of_one_picture_have_one_axis_of_steps(tmp_path, monkeypatch):
    rows = [f"a,learned,0,{t},{s},{loss}\n" for s in ("train", "test") for t, loss in ((0, 2), (1, 1.5), (9, 1))]
    rows += [f"b,learned,0,{t},test,{loss}\n" for t, loss in ((0, 2), (1, 50), (9, 1))]
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.extend(figure.axes))
    figures.loss_curves(figures.read(written(tmp_path, HEADER + "".join(rows))), tmp_path)
    assert [panel.get_xlim() for panel in seen] == [(0, 9)] * 2
    figures.plt.close("all")


def test_a_name_that_begins_with_an_underscore_is_in_the_legend():
    panel = panel_of([4.0, 2.0, 1.0])
    panel.plot([0, 1], [4, 3], label=figures.shown("_mine $1$"))
    assert panel.get_legend_handles_labels()[1] == ["0", r" _mine \$1\$"]


@pytest.mark.parametrize(
    ("limits", "labels"),
    [
        ((0.6, 3.0), ["1", "2"]),
        ((1e-3, 4.0), ["0.001", "0.01", "0.1", "1"]),
        ((0.55, 0.95), ["0.6", "0.7", "0.8", "0.9"]),
        ((3.1, 4.9), ["4"]),
    ],
)
def test_losses_are_labelled_by_numbers(limits, labels):
    figure, panel = figures.plt.subplots()
    panel.set(yscale="log", ylim=limits)
    figures.log_losses(panel)
    figure.canvas.draw()
    figures.plt.close(figure)
    ticks = [tick for which in ("major", "minor") for tick in getattr(panel.yaxis, f"get_{which}_ticks")()]
    shown = {t.label1.get_text() for t in ticks if limits[0] <= t.get_loc() <= limits[1]} - {""}
    assert set(labels) <= shown
    assert sorted(shown, key=float) == labels or labels == ["4"]


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        (1, "line: a single run"),
        (3, "line: mean over 3 seeds; thin lines: the single runs"),
        (5, "line: mean over 5 seeds; band: 95 % interval of the mean (Student's t)"),
    ],
)
def test_the_legend_has_proper_names_and_says_what_the_bands_are(tmp_path, monkeypatch, seeds, told):
    names = {"adamw": "baseline", "learned-lstm": "learned", "adam": "baseline"}
    rows = [
        f"{name},{kind},{seed},{step},train,{1 / (step + 1)}\n"
        for name, kind in names.items()
        for seed in range(seeds)
        for step in (0, 1, 9)
    ]
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    proper = {"adamw": "AdamW, warm-up + cosine"}
    figures.loss_curves(figures.read(written(tmp_path, HEADER + "".join(rows))), tmp_path, proper=proper)
    (legend,) = seen[0].legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["learned LSTM", "AdamW, warm-up + cosine", "Adam"]
    assert legend.get_title().get_text() == told
    panel = seen[0].axes[0]
    assert len(panel.get_lines()) == (12 if seeds == 3 else 3)
    assert len(panel.collections) == (3 if seeds == 5 else 0)
    for line in panel.get_lines():
        assert (line.get_xdata()[0], line.get_ydata()[0]) == (0, 1)
    figures.plt.close(seen[0])


def test_the_training_curve_starts_at_0(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    figures.training_curve({"train": (np.arange(1.0, 101), np.linspace(2, 1, 100))}, tmp_path)
    assert seen[0].axes[0].get_xlim()[0] == 0
    (text,) = seen[0].axes[0].get_legend().get_texts()
    assert text.get_text() == "training batches, mean of 2 (thin: each)"
    figures.plt.close(seen[0])


def test_a_published_loss_is_a_line_across_the_training_curve(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    curves = {"train": (np.arange(1.0, 101), np.linspace(6, 5, 100))}
    figures.training_curve(curves, tmp_path, levels={"published, $4": 4.25, "own": 4.5})
    panel = seen[0].axes[0]
    dashes = [line._dash_pattern for line in panel.get_lines() if len(set(line.get_ydata())) == 1]
    assert len(dashes) == 2
    assert dashes[0] != dashes[1]
    (line,) = [line for line in panel.get_lines() if line.get_label() == "published, \\$4"]
    assert set(line.get_ydata()) == {4.25}
    assert panel.get_ylim()[0] < 4.25
    seen[0].canvas.draw()
    assert not any("times" in tick.get_text() for tick in panel.get_yticklabels(which="both"))
    figures.plt.close(seen[0])


def test_a_batch_without_any_loss_leaves_the_others_to_be_seen(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    losses = np.append(np.geomspace(1, 1e-6, 60), 0.0)
    figures.training_curve({"train": (np.arange(1.0, 62), losses)}, tmp_path)
    panel = seen[0].axes[0]
    assert panel.get_yscale() == "log"
    assert panel.get_ylim()[0] < 1e-5
    figures.plt.close(seen[0])


@pytest.mark.parametrize(
    "reader",
    [
        figures.read,
        figures.read_training,
        control_curves.read_controls,
        validation_curves.read_validations,
        run_folder.evaluation_summary,
        benchmark_result.read_result,
    ],
)
def test_a_file_that_cannot_be_read_is_said(tmp_path, monkeypatch, reader):
    """As another user's on a machine of several; for the system's own user nothing is closed."""

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    path = written(tmp_path, HEADER)
    monkeypatch.setattr(type(path), "read_bytes", closed)
    with pytest.raises(UserError, match=r"evaluation\.csv: expected .* that can be read, found Permission denied"):
        reader(path)
