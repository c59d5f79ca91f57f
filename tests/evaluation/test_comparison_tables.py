"""The tables of a comparison, against ones written by hand."""

import math

from l2lopt.evaluation.comparison import Comparison, Evaluation
from l2lopt.evaluation.tables import comparison_table, loss_table
from l2lopt.weights.card import comparison_tables

NAN = math.nan


def line(optimiser, horizon, split, mean, versus="", low=NAN, high=NAN, diverged=0):
    kind = "learned" if versus else "baseline"
    middle = (low + high) / 2
    return Comparison(optimiser, kind, horizon, split, mean, NAN, NAN, versus, middle, low, high, diverged)


RESULT = Evaluation(
    [],
    [
        line("mine", 1000, "train", 0.123456, "sgd", -0.2, -0.1),
        line("sgd", 1000, "train", 0.3, diverged=2),
        line("mine", 1000, "test", 12345.0, "sgd", 0.1, 0.2),
        line("sgd", 1000, "test", math.inf),
        line("mine", 20, "train", 1.0, "sgd", -0.1, 0.1),
        line("sgd", 20, "train", 1.0),
        line("mine", 20, "test", 1.0, "sgd", NAN, NAN),
        line("sgd", 20, "test", 1.0),
    ],
    warnings=["sgd: the best rate at step 20, 1, is the upper end of its grid"],
)


def test_the_comparison_in_markdown():
    means = {("mine", "train", 1000): [0.1, 0.15], ("mine", "test", 20): [1.0]}
    table = comparison_table("Small, MLP", RESULT, lambda row: means.get((row.optimiser, row.split, row.horizon), []))
    assert table.markdown().splitlines() == [
        "| Small, MLP | train, step 20 | train, step 1,000 | test, step 20 | test, step 1,000 |",
        "|---|---|---|---|---|",
        "| mine | 1 | **0.123** (0.1–0.15) | 1 | 1.23e+04 ↑ |",
        "| sgd | 1 | 0.3 | 1 | ∞ |",
        "",
        "- sgd: the best rate at step 20, 1, is the upper end of its grid",
        "- sgd: 2 runs above their first loss at step 1,000 on the train set",
    ]


def test_the_losses_on_one_split_with_paired_differences():
    rows = [row for row in RESULT.table if row.horizon == 1000]
    table = loss_table(Evaluation([], rows), "train")
    assert table.title == "train loss, mean per sample"
    assert table.columns == ("optimiser", "step 1000")
    assert table.rows == (
        ("mine", "0.12346"),
        ("  less the best baseline", "-0.15000 [-0.20000, -0.10000] sgd"),
        ("sgd", "0.30000"),
    )


def test_the_differences_of_losses_that_are_not_finite():
    """NaN is ∞ − ∞; a single seed has a difference and no interval."""

    def row(horizon, difference, low=NAN):
        return Comparison("mine", "learned", horizon, "test", 0.5, NAN, NAN, "sgd", difference, low, -low, 0)

    inf = math.inf
    rows = [row(1, -inf), row(2, inf, inf), row(3, NAN), row(4, 0.25), row(5, 0.0, -0.125)]
    losses, differences = loss_table(Evaluation([], rows), "test").rows
    assert losses == ("mine", *["0.50000"] * 5)
    assert differences[1:] == ("−∞ sgd", "∞ sgd", "both ∞ sgd", "+0.25000 sgd", "+0.00000 [-0.12500, +0.12500] sgd")


def test_a_published_comparison():
    lines = [row._asdict() for row in RESULT.table][:5]
    train, test = comparison_tables("digits", lines)
    assert train.title == "digits: train loss, mean per sample"
    assert train.columns == ("optimiser", "step 1,000", "step 20")
    assert train.rows == (("mine", "0.123", "1"), ("sgd", "0.3", ""))
    assert test.title == "digits: test loss, mean per sample"
    assert test.columns == ("optimiser", "step 1,000")
    assert test.rows == (("mine", "1.23e+04"), ("sgd", "∞"))
    (diverged,) = comparison_tables("digits", [lines[0] | {"mean": None}])  # as a file has it
    assert diverged.rows == (("mine", "∞"),)
