"""The tables that show a comparison."""

import math
from collections.abc import Callable, Sequence

from l2lopt.evaluation.comparison import Comparison, Evaluation
from l2lopt.evaluation.settings import SPLITS
from l2lopt.report.tables import Table, loss_text


def comparison_table(
    label: str, result: Evaluation, means: Callable[[Comparison], Sequence[float]] = lambda _: ()
) -> Table:
    """Every optimiser's mean loss on every split at every horizon, with what to know about it as notes.

    A learned optimiser's loss is bold where it is below the best baseline's, and has an arrow ↑ where it is above it,
    the 95 % interval of the paired difference on one side of 0 in both cases.

    Args:
        label: Head of the first column, such as the problem's name.
        result: Comparison.
        means: Line of the comparison → mean losses under several meta-seeds, whose lowest and highest are shown in
            brackets; none by default.
    """
    lines = {(row.optimiser, row.split, row.horizon): row for row in result.table}
    horizons = sorted({row.horizon for row in result.table})
    places = [(split, horizon) for split in SPLITS for horizon in horizons]
    rows = []
    for optimiser in dict.fromkeys(row.optimiser for row in result.table):
        found = [lines[optimiser, *place] for place in places]
        rows.append((optimiser, *(_cell(row, means(row)) for row in found)))
    diverged = (
        f"{row.optimiser}: {row.diverged} runs above their first loss at step {row.horizon:,} on the {row.split} set"
        for row in result.table
        if row.diverged
    )
    heads = (label, *(f"{split}, step {horizon:,}" for split, horizon in places))
    return Table(heads, tuple(rows), (*result.warnings, *diverged))


def _cell(row: Comparison, means: Sequence[float]) -> str:
    cell = loss_text(row.mean)
    if not row.versus:
        return cell
    cell = f"**{cell}**" if row.difference_high < 0 else cell
    cell += " ↑" if row.difference_low > 0 else ""
    return cell + (f" ({min(means):.3g}–{max(means):.3g})" if len(means) > 1 else "")


def loss_table(result: Evaluation, split: str) -> Table:
    """The mean losses on a split at every horizon, and below each learned optimiser its paired differences.

    Args:
        result: Comparison.
        split: "train" or "test".
    """
    horizons = sorted({row.horizon for row in result.table})
    rows = []
    for name in dict.fromkeys(row.optimiser for row in result.table):
        found = [row for row in result.table if (row.optimiser, row.split) == (name, split)]
        rows.append((name, *(loss_text(row.mean, ".5f") for row in found)))
        if found[0].versus:
            rows.append(("  less the best baseline", *map(_paired, found)))
    heads = ("optimiser", *(f"step {horizon}" for horizon in horizons))
    return Table(heads, tuple(rows), title=f"{split} loss, mean per sample")


def _paired(row: Comparison) -> str:
    """A line's difference from the best baseline with its interval, which infinite losses do not have."""
    if not math.isfinite(row.difference):
        return f"{'both ∞' if math.isnan(row.difference) else '∞' if row.difference > 0 else '−∞'} {row.versus}"
    bounds = f" [{row.difference_low:+.5f}, {row.difference_high:+.5f}]" if math.isfinite(row.difference_low) else ""
    return f"{row.difference:+.5f}{bounds} {row.versus}"
