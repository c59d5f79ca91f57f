"""The figures of a benchmark on plain values, and their way into a page."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from scipy import stats

from l2lopt.report import benchmark_figures as figures
from l2lopt.report import html, panels
from l2lopt.report.benchmark_figures import Curve, LossPanel
from l2lopt.report.panels import plain
from l2lopt.report.style import DASHES, HARNESS, IN_THE_DARK, MARKERS, RIVALS, RULES, Line, lines_of

LINE = Line("#0072B2", DASHES[0], "o", 1.3)
SIGHTS = {  # Machado, Oliveira & Fernandes 2009, of full strength, on linear RGB
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def perceived(colour, sight):
    """CIELAB of a colour as seen with some sight."""
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("dark", [False, True])
def test_all_colours_stay_apart_for_all_eyes(sight, dark):
    """A difference of 2 in CIELAB is just seen side by side; thin lines some way apart take more."""
    colours = [*RULES, HARNESS, *RIVALS]
    shown = [perceived(IN_THE_DARK[colour] if dark else colour, sight) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(shown, 2)) > 10


def test_lines_differ_and_rules_stand_out():
    kinds = (
        {f"rule {k}": "learned" for k in range(6)} | {"harness": "harness"} | {f"b{k}": "baseline" for k in range(9)}
    )
    lines = lines_of(kinds)
    assert list(lines) == list(kinds)
    assert len({(line.colour, line.dash) for line in lines.values()}) == len(lines)
    widths = {kind: {lines[name].width for name in kinds if kinds[name] == kind} for kind in kinds.values()}
    assert min(widths["learned"] | widths["harness"]) > max(widths["baseline"])


def test_names_alike_but_for_their_ends_have_step_times_of_their_own(tmp_path, monkeypatch):
    names = [f"{'a' * 40}{letter}" for letter in "bc"]
    monkeypatch.setattr(panels.Sheet, "write", lambda sheet, folder, name: sheet)
    ratios = dict(zip(names, ([1.0, 2.0], [3.0]), strict=True))
    sheet = figures.step_times(ratios, dict.fromkeys(names, LINE), tmp_path, "step-times", "x")
    assert [label.get_text() for label in sheet.axes[0].get_yticklabels()] == ["a" * 29 + "…"] * 2
    drawn = [list(line.get_xdata()) for line in sheet.axes[0].lines if line.get_marker() == "o"]
    assert drawn == [[1.0, 2.0], [3.0]]
    pyplot.close("all")


def panel(*finals, begin=2.0, steps=100, early=None):
    marks = np.array([0, 1, 10, steps // 5, steps])
    curves = []
    for final in finals:
        middle = early or (final + 0.1 * (begin - final) if np.isfinite(final) else np.nan)
        losses = np.array([begin, begin, begin, middle, final])[:, None] * np.ones(3)
        curves.append(Curve("a", LINE, marks, losses, 0))
    return LossPanel("task", curves, begin)


def test_near_losses_get_linear_axes_over_the_region_that_matters():
    low, high, linear = figures.limits(panel(0.30, 0.32, begin=2.3))
    assert linear
    assert 0.25 < low < 0.30
    assert 0.498 < high < 0.55  # the slower curve at a fifth of the budget is at 0.518


def test_losses_far_apart_get_logarithmic_axes_from_the_beginning():
    low, high, linear = figures.limits(panel(0.01, 0.3, begin=2.3))
    assert not linear
    assert 0.005 < low < 0.01
    assert high == 2.3


def test_losses_that_no_logarithm_takes_get_linear_axes():
    assert figures.limits(panel(-1.0, 0.3))[2]
    assert figures.limits(panel(0.0, 0.3))[2]


def test_what_diverged_does_not_stretch_the_axes():
    assert figures.limits(panel(0.30, 0.32, 1e6, np.nan)) == figures.limits(panel(0.30, 0.32))
    assert figures.limits(panel(np.nan, begin=2.0))[:2] == pytest.approx((1.88, 2.12))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), max_size=4), st.floats(width=32))
def test_limits_are_always_an_interval(finals, begin):
    low, high, linear = figures.limits(panel(*finals, begin=begin))
    assert np.isfinite([low, high]).all()
    assert low < high
    assert linear or low > 0


def test_bands_are_students_intervals_and_end_where_a_run_is_not_finite():
    losses = np.array([[1.0, 2.0, 4.0], [1.0, np.inf, 2.0]])
    curve = Curve("a", LINE, np.array([0, 1]), losses, 1)
    expected = stats.t.interval(0.95, 2, loc=losses[0].mean(), scale=stats.sem(losses[0]))
    assert [bound[0] for bound in curve.band] == pytest.approx(list(expected))
    assert np.isnan([curve.mean[1], *(bound[1] for bound in curve.band)]).all()
    assert np.isnan(Curve("a", LINE, np.array([0]), np.ones((1, 1)), 0).band).all()


@pytest.mark.parametrize(("seeds", "bands", "thin"), [(1, 0, 0), (4, 0, 4), (5, 1, 0)])
def test_few_seeds_are_drawn_one_by_one(seeds, bands, thin):
    figure = figures.Sheet(1, 1, (3, 3), {}).figure
    axes = figure.axes[0]
    losses = np.linspace(2, 1, 4)[:, None] + 0.1 * np.arange(seeds)
    figures._draw_curve(axes, Curve("a", LINE, np.array([0, 1, 10, 100]), losses, 0), 0, linear=True)
    assert len(axes.collections) == bands
    assert len(axes.lines) == thin + 1
    pyplot.close(figure)


def test_a_curve_that_diverges_ends_in_a_cross():
    figure = figures.Sheet(1, 1, (3, 3), {}).figure
    losses = np.array([[2.0], [1.0], [np.nan]])
    figures._draw_curve(figure.axes[0], Curve("a", LINE, np.array([0, 1, 10]), losses, 1), 0, linear=True)
    cross = figure.axes[0].lines[-1]
    assert (cross.get_marker(), list(cross.get_xdata()), list(cross.get_ydata())) == ("x", [1], [1.0])
    pyplot.close(figure)


@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_a_sheet_says_what_its_bands_are_and_starts_at_step_0(tmp_path, monkeypatch, seeds):
    seen = []
    monkeypatch.setattr(panels, "write_figure", lambda figure, folder, name: seen.append(figure) or [])
    for last in (0.001, 1.0):  # logarithmic and linear axes
        losses = np.array([2.0, 1.5, last])[:, None] * np.ones(seeds)
        other = Curve("b", LINE, np.array([0, 1, 100]), losses / losses[-1], 0)
        curves = [Curve("a", LINE, np.array([0, 1, 100]), losses, 0), *([other] if last < 1 else [])]
        figures.loss_panels([LossPanel("task", curves, 2.0)], tmp_path, "name")
    told = {1: "a single run", 3: "mean over 3 seeds; thin lines", 6: "mean over 6 seeds; band: 95 % interval"}[seeds]
    for figure, scale in zip(seen, ("symlog", "linear"), strict=True):
        (axes,) = figure.axes
        assert told in " ".join(" ".join(text.get_text().split()) for text in figure.texts)
        assert (axes.get_xscale(), axes.get_xlim()) == (scale, (0, 100))
        assert axes.lines[-1].get_xdata()[0] == 0
        pyplot.close(figure)


@pytest.mark.filterwarnings("error")
def test_a_task_without_runs_has_an_empty_panel(tmp_path):
    """As where an earlier result, whose runs stand beside, has fewer tasks."""
    curve = Curve("a", LINE, np.array([0, 1, 100]), np.array([[2.0], [1.0], [0.5]]), 0)
    drawn = figures.loss_panels([LossPanel("one", [curve], 2.0), LossPanel("none", [], np.inf)], tmp_path, "name")
    assert len(drawn.boxes) == 2


@pytest.fixture(scope="module")
def sheet(tmp_path_factory):
    """Two panels whose curves share a marker, which Matplotlib then defines in the first panel alone."""
    folder = tmp_path_factory.mktemp("sheet")
    curve = Curve("me & <you>", LINE, np.array([0, 1, 10, 100]), np.linspace(2, 0.1, 4)[:, None], 1)
    drawn = figures.loss_panels([LossPanel("$x & <b>", [curve], 2.0), LossPanel("two", [curve], 2.0)], folder, "name")
    return drawn, drawn.paths[1].read_text()


def test_panels_of_a_page_stand_alone(sheet):
    drawn, svg = sheet
    panels = html.inline_panels(svg, "name", drawn.boxes)
    seen = set()
    for text in panels:
        root = ElementTree.fromstring(text)
        names = [element.get("id") for element in root.iter() if element.get("id")]
        used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
        assert used
        assert used <= set(names)
        assert len(names) == len(set(names))
        assert not seen & set(names)
        seen |= set(names)
        assert "two" not in text
        assert "diverged" not in text
        assert not re.search(r"[^(]#[0-9a-f]{6}(?!\))", re.sub(r"var\([^)]*\)", "", text))
        assert "step" in "".join(root.itertext())
    assert "diverged: me &amp; &lt;you&gt; 1/1" in svg
    assert "$x &amp; &lt;b&gt;" in svg


def test_the_boxes_of_panels_do_not_meet(sheet):
    drawn, svg = sheet
    one, two = drawn.boxes
    assert one.x + one.width <= two.x + 1e-9
    size = [float(value) for value in ElementTree.fromstring(svg).get("viewBox").split()]
    assert all(box.x >= 0 and box.x + box.width <= size[2] + 1e-6 for box in drawn.boxes)
    assert all(box.y >= 0 and box.y + box.height <= size[3] for box in drawn.boxes)


def test_texts_are_at_least_nine_points(sheet):
    _, svg = sheet
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert sizes
    assert min(sizes) >= 9


@settings(max_examples=50)
@given(st.text(max_size=300))
def test_what_is_drawn_is_printable(text):
    shown = plain(text, 20)
    assert len(shown) <= 20
    assert shown.isprintable()


def test_every_marker_has_a_swatch():
    lines = {f"<{marker}>": LINE._replace(marker=marker) for marker in MARKERS}
    text = html.legend(lines)
    assert text.count("<li>") == len(MARKERS)
    assert len(set(re.findall(r"<g [^>]*>(.*?)</g>", text))) == len(MARKERS)
    assert "<o>" not in text
    assert "&lt;o&gt;" in text


def test_a_figure_is_named_for_those_who_do_not_see_it():
    text = html.figure('<svg viewBox="0 0 1 1" />', 'a "quoted" <name>', "note & so on")
    assert 'aria-label="a &quot;quoted&quot; &lt;name&gt;"' in text
    assert "<small>note &amp; so on</small>" in text
