"""Controls and validations: what their tables and figures hold."""

import json
import math

import numpy as np
import pytest

from l2lopt.core.errors import UserError
from l2lopt.report import control_curves, validation_curves
from l2lopt.report.control_curves import ControlCurve

STEPS = np.array([1.0, 2.0, 3.0])
CURVES = [
    ControlCurve("matrix", "step", "factor", STEPS, np.array([1, 2, 3.0]), np.array([0.5, 1, 3]), np.array([2, 4, 3])),
    ControlCurve("vector", "step", "factor", STEPS, *[np.array([1, np.nan, np.inf])] * 3),
    ControlCurve("matrix", "mix", "degrees", STEPS, np.array([30, 0, -5.0]), np.zeros(3) - 14, np.zeros(3) + 80),
    ControlCurve("vector", "mix", "degrees", STEPS, *[np.zeros(3)] * 3),
]
HEADER = ",".join(control_curves.COLUMNS) + "\n"


@pytest.fixture
def drawn(monkeypatch):
    """The figure that is drawn next, in place of its files."""
    found = []
    for module in (control_curves, validation_curves):
        monkeypatch.setattr(module, "write_figure", lambda figure, *_: found.append(figure) or [])
    yield found
    for figure in found:
        control_curves.plt.close(figure)


def test_the_table_is_read_as_it_was_written(tmp_path):
    control_curves.write_controls(CURVES, tmp_path / "controls.csv")
    assert (tmp_path / "controls.csv").read_text().splitlines()[1] == "matrix,step,factor,1,1,0.5,2"
    for ours, theirs in zip(CURVES, control_curves.read_controls(tmp_path / "controls.csv"), strict=True):
        assert ours[:3] == theirs[:3]
        for one, other in zip(ours[3:], theirs[3:], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"expected columns kind,.*found an empty file"),
        (HEADER, r"expected controls, found none"),
        (HEADER + "matrix,step,factor,1,1,1,1\nmatrix,step,factor,two,1,1,1\n", r"line 3: expected a control"),
        (HEADER + "matrix,step,metres,1,1,1,1\n", r"line 2: expected a control"),
        (HEADER + "matrix,step,factor,1,1\n", r"line 2: expected a control"),
        (HEADER + '"matrix,step,factor,1,1,1,1\n' + "matrix,step,factor,1,1,1,1\n" * 9999, r"a line of a table"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, content, message):
    (tmp_path / "controls.csv").write_text(content)
    with pytest.raises(UserError, match=message):
        control_curves.read_controls(tmp_path / "controls.csv")


def test_a_panel_for_each_control_with_a_line_and_a_band_for_each_kind(drawn, tmp_path):
    control_curves.control_curves(CURVES, tmp_path, "of $a$ run")
    (figure,) = drawn
    steps, mix = figure.axes
    # For vectors the direction of the harness is Adam's.
    for panel, of_kinds, harness in ((steps, CURVES[:2], 1.0), (mix, CURVES[2:3], 0.0)):
        level, *lines = panel.get_lines()
        assert set(level.get_ydata()) == {harness}
        assert [line.get_label() for line in lines] == [curve.kind for curve in of_kinds]
        for line, curve in zip(lines, of_kinds, strict=True):
            finite = np.where(np.isfinite(curve.mean), curve.mean, np.nan)
            np.testing.assert_array_equal(line.get_xdata(), STEPS)
            np.testing.assert_array_equal(line.get_ydata(), finite)
        corners = panel.collections[0].get_paths()[0].vertices[:, 1]
        assert (corners.min(), corners.max()) == (of_kinds[0].low.min(), of_kinds[0].high.max())
    assert steps.get_yscale() == "log"
    assert mix.get_ylabel() == "degrees"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["the harness", "matrix", "vector"]
    assert "lowest to highest" in legend.get_title().get_text()


def test_every_kind_is_in_the_legend_whichever_panel_is_first(drawn, tmp_path):
    control_curves.control_curves(CURVES[::-1], tmp_path)
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["the harness", "matrix", "vector"]


def test_the_files_of_the_figure(tmp_path):
    one = [curve for curve in CURVES if curve.control == "step"]
    paths = control_curves.control_curves(one, tmp_path)
    assert [path.name for path in paths] == ["controls.png", "controls.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)


def recorded(tmp_path, *scores, end=""):
    lines = [{"stage": "meta-train", "step": 1, "loss": None}]
    lines += [{"stage": "validation", "step": 50 * index, **score} for index, score in enumerate(scores)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return validation_curves.read_validations(tmp_path / "metrics.jsonl")


def test_validations_are_told_as_ratios_of_losses(tmp_path, drawn):
    before = {"score": 0.0, "score/won": 1.0, "score/lost": -1.0, "score/$": 1000.0}
    after = {"score": -0.5, "score/won": 1.0 - math.log(4), "score/lost": -1.0 + math.log(2), "score/$": None}
    found = recorded(tmp_path, before, after, before | {"score/$": 2000.0}, end='{"stage": "valid')
    assert found.updates.tolist() == [0, 50, 100]
    ratios = found.ratios()
    assert ratios["won"] == pytest.approx([1, 1 / 4, 1])
    assert ratios["lost"] == pytest.approx([1, 2, 1])
    assert ratios["all"] == pytest.approx([1, math.exp(-0.5), 1])
    np.testing.assert_array_equal(ratios["$"], [1, np.nan, np.nan])
    validation_curves.validation_curves(found, tmp_path, kept=100)  # the last, though 50 has the lowest score
    (figure,) = drawn
    before_it, kept, *lines = figure.axes[0].get_lines()
    assert (set(before_it.get_ydata()), set(kept.get_xdata())) == ({1.0}, {100.0})
    assert [line.get_label() for line in lines] == ["won", "lost", r"\$", "geometric mean"]
    np.testing.assert_array_equal(lines[1].get_ydata(), ratios["lost"])
    figure.draw_without_rendering()


def test_a_single_problem_is_the_score(tmp_path, drawn):
    found = recorded(tmp_path, {"score": 1.0}, {"score": 2.0})
    assert found.problems == {}
    validation_curves.validation_curves(found, tmp_path)
    assert [line.get_label() for line in drawn[0].axes[0].get_lines()] == ["before meta-training", "the problem"]


def test_what_begins_without_a_finite_loss_is_set_against_the_first_that_is(tmp_path, drawn):
    found = recorded(tmp_path, {"score": None}, {"score": 2.0}, {"score": 2.0 + math.log(2)}, {"score": None})
    np.testing.assert_array_equal(found.ratios()["all"], [np.nan, 1, 2, np.nan])
    assert np.isnan(recorded(tmp_path, {"score": None}, {"score": None}).ratios()["all"]).all()
    validation_curves.validation_curves(found, tmp_path)
    assert drawn[0].axes[0].get_lines()[1].get_label() == "the problem, times that after 50"


def test_a_damaged_record_is_refused_and_none_is_empty(tmp_path):
    assert len(recorded(tmp_path).updates) == 0
    (tmp_path / "metrics.jsonl").write_text('{"stage": "validation"}\n{"stage": "meta-train", "step": 1}\n')
    with pytest.raises(UserError, match="line 1: expected figures"):
        validation_curves.read_validations(tmp_path / "metrics.jsonl")


def test_losses_below_0_have_no_ratios(tmp_path, drawn):
    """Of −5 and −10 the score is no logarithm: their difference is drawn."""
    scores = [-29.3, -29.9]
    validations = validation_curves.Validations(np.array([0.0, 5.0]), np.array(scores), {})
    validation_curves.validation_curves(validations, tmp_path)
    (panel,) = drawn[0].axes
    assert panel.get_yscale() == "linear"
    assert panel.get_ylabel() == "validation score, less that before"
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}
    assert lines["before meta-training"] == [0, 0]
    assert lines["the problem"] == pytest.approx([0, -0.6])
