"""Studies of sequence metrics: retrieval of the test windows, beside untrained encoders and raw signals."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.references import Column, Reference, References, Result, StudyRun
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import Report
from optimisees.metric.retrieval import SCALINGS, neighbour_curve, retrieval
from optimisees.metric.time_warping import all_warped


class RawSignals(References):
    """Retrieval of each test window's activity among other subjects' windows.

    Every encoder stands beside itself untrained; all stand beside distances of the raw signals, Euclidean and by
    dynamic time warping.
    """

    legend: ClassVar[str] = (
        "**Bold**: above the mean of every untrained encoder and of the raw signals; ↓: not above all of them."
    )

    neighbours: list[PositiveInt] = Field(default=[1, 5, 10], min_length=1)
    """Numbers k of recall@k and of the vote of the k nearest neighbours."""
    band: NonNegativeInt = 12
    """Width of the time warping's band, in time steps."""
    untrained: bool = True
    """Whether each encoder has a second row, for itself before its training."""

    def check(self, optimisees: Mapping[str, Any]) -> None:
        """Refuses encoders of different test windows, and more neighbours than a query has.

        Raises:
            UserError: For either.
        """
        for (_, one), (label, other) in pairwise(optimisees.items()):
            if not torch.equal(one.inputs("test"), other.inputs("test")):
                expected, remedy = "the test windows of the others", "give the encoders the same subjects and data"
                raise UserError(f"study: {label}", expected=expected, found="others", remedy=remedy)
        windows = next(iter(optimisees.values())).windows("test")
        fewest = len(windows.subjects) - int(windows.subjects.bincount().max())
        if fewest < max(self.neighbours):
            expected = f"at least {max(self.neighbours)} windows of other test subjects"
            raise UserError(
                "study: test_subjects", expected=expected, found=str(fewest), remedy="leave out more subjects"
            )

    def beside_each(self, label: str) -> Sequence[Reference]:
        """The encoder as it is before its training."""
        return [Reference("untrained", f"{label}, untrained", f"{label}, untrained")] if self.untrained else []

    def beside_all(self) -> Sequence[Reference]:
        """The raw signals."""
        return [Reference(kind, f"raw signals, {kind}", f"raw {kind}") for kind in ("Euclidean", "time warping")]

    def depends_on(self, kind: str) -> dict[str, Any]:
        """The kind of the distances, these options, and the scalings of the curves."""
        return {"kind": kind, "neighbours": self.neighbours, "band": self.band, "scalings": list(SCALINGS)}

    def result(self, optimisee: Any, run: StudyRun, report: Report) -> Result:
        """The "retrieval" by the distances between the test windows, and their A(k), under both scalings.

        "curve" has the distances scaled together, "curve_each" each sample's by themselves. "coupling" is the mean c of
        a trained coupled encoder on the test windows, and None for all others. Of a trained encoder that has diverged
        "retrieval" and curves are None.

        Raises:
            UserError: For a reference's distances that are not finite.
        """
        distances = self._distances(optimisee, run, report)
        finite = bool(distances.isfinite().all())
        if not finite and run.trained is not None:
            return dict.fromkeys(("retrieval", *map(_curve, SCALINGS), "coupling"))
        if not finite:
            remedy = "lower the rate, or clip the gradient"
            raise UserError(str(run.folder), expected="finite distances", found="others", remedy=remedy)
        windows = optimisee.windows("test")
        found = retrieval(distances, windows.labels, windows.subjects, tuple(self.neighbours))
        curves = {_curve(scaling): neighbour_curve(distances, scaling).tolist() for scaling in SCALINGS}
        coupling = None if run.trained is None else run.trained.metrics.get("coupling")
        return {"retrieval": found._asdict(), **curves, "coupling": coupling}

    def _distances(self, model: Any, run: StudyRun, report: Report) -> Tensor:
        """Distances between the test windows, [n, n]."""
        inputs: Tensor = model.inputs("test")
        if run.kind == "Euclidean":
            return torch.cdist(inputs.flatten(1), inputs.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        if run.kind == "time warping":
            return all_warped(inputs, self.band, report)
        params = model.init(seed_of("train", run.seed))[0] if run.trained is None else run.trained.params
        distances: Tensor = model.all_distances(params, inputs, report)
        return distances

    def columns(self, result: Result) -> Sequence[Column]:
        """Recall, mean average precision, and the accuracy of the neighbours' vote."""
        reads: dict[str, Callable[[Result], Any]] = {
            **{f"recall@{k}": _reader("recall", str(k)) for k in self.neighbours},
            "mAP": _reader("mean_average_precision"),
            **{f"accuracy, {k}-NN": _reader("accuracy", str(k)) for k in self.neighbours},
        }
        return [Column(head, read, better="higher", marked=True) for head, read in reads.items()]

    def facts(self, found: Mapping[str, Mapping[str, Result]], references: Collection[str]) -> Any:
        """The results of each row as a list, in the order of its seeds."""
        return {label: list(own.values()) for label, own in found.items()}

    def figures(
        self, found: Mapping[str, Mapping[str, Result]], references: Collection[str], folder: Path
    ) -> list[Path]:
        """A(k) of the trained encoders (Figure 1 of Compagnon et al. 2021), a figure for each scaling."""
        from optimisees.metric.figures import neighbour_curves  # Matplotlib: only figures need it

        trained = {label: own.values() for label, own in found.items() if label not in references}
        paths = []
        for scaling, name, title in (
            ("together", "neighbour-curves", "test windows"),
            ("each", "neighbour-curves-each", "test windows, each scaled by its own distances"),
        ):
            curves = {
                label: np.array([one[_curve(scaling)] for one in own if one["retrieval"] is not None])
                for label, own in trained.items()
            }
            curves = {label: runs for label, runs in curves.items() if len(runs)}
            paths += neighbour_curves(curves, folder, title=title, name=name) if curves else []
        return paths


def _curve(scaling: str) -> str:
    """The key of a result's A(k)."""
    return "curve" if scaling == "together" else f"curve_{scaling}"


def _reader(*keys: str) -> Callable[[Result], Any]:
    """A function that reads one number of a result's "retrieval", None of an encoder that has diverged."""

    def read(result: Result) -> Any:
        value = result["retrieval"]
        for key in keys:
            value = None if value is None else value[key]
        return value

    return read
