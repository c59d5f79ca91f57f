"""A labelled sequence drawn: true classes and found ones, one above the other."""

import json
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from l2lopt.core.errors import UserError
from l2lopt.report import style
from l2lopt.storage.run_log import existing


class Example(NamedTuple):
    """A labelled sequence of T positions.

    Attributes:
        place: Name of the place where it begins.
        classes: Names of the classes.
        true: True class of each position.
        found: Class that the model found for each position.
        tokens: Token of each position, or None.
        signals: Signals [T, N], or None.
        rate: Positions per second, or None.
    """

    place: str
    classes: list[str]
    true: list[int]
    found: list[int]
    tokens: list[str] | None
    signals: list[list[float]] | None
    rate: float | None


def read_labelled(path: Path) -> Example:
    """The example of a `labels.json`.

    Raises:
        UserError: For a missing or damaged file.
    """
    remedy = "train again"
    existing(path, "labels", remedy)
    try:
        example = Example(**json.loads(path.read_text(encoding="utf-8"))["example"])
        if not len(example.true) == len(example.found) == len(example.tokens or example.signals or ()):
            raise ValueError
        return example
    except (TypeError, ValueError, KeyError):
        raise UserError(str(path), expected="labels", found="damage", remedy=remedy) from None


def labelled_sequence(example: Example, folder: Path) -> list[Path]:
    """Draws a sequence, its true classes and those that were found, one above the other over its positions.

    Args:
        example: Sequence of tokens, or of signals, which are drawn as curves.
        folder: Folder that gets `labelled-sequence.png` and `labelled-sequence.svg`.
    """
    steps = np.arange(len(example.true)) / (example.rate or 1.0)
    rows = 1 if example.signals is None else 2
    width = 6.4 if example.tokens is None else max(6.4, 0.35 * len(example.tokens))
    with plt.rc_context(style.STYLE):
        figure, axes = plt.subplots(
            rows, 1, figsize=(width, 2.4 * rows + 0.8), sharex=True, squeeze=False, layout="constrained"
        )
        if example.signals is not None:
            axes[0][0].plot(steps, np.array(example.signals), linewidth=0.7)
            axes[0][0].set_ylabel("signals")
        panel = axes[-1][0]
        shown = sorted({*example.true, *example.found})
        heights = {k: height for height, k in enumerate(shown)}
        for name, own, look in (
            ("true", example.true, {"color": style.RIVALS[0], "linewidth": 5.0, "alpha": 0.6}),
            ("found", example.found, {"color": style.RULES[0], "linewidth": 1.4}),
        ):
            panel.step(steps, [heights[k] for k in own], where="mid", label=name, **look)
        panel.set_yticks(range(len(shown)), [style.shown(example.classes[k]) for k in shown])
        panel.legend(frameon=False, loc="best")
        if example.tokens is not None:
            panel.set_xticks(steps, [style.shown(token) for token in example.tokens], rotation=90)
        panel.set_xlabel("token" if example.tokens is not None else "s" if example.rate else "position")
        figure.suptitle(style.shown(example.place), fontsize=10)
        return style.write_figure(figure, folder, "labelled-sequence")
