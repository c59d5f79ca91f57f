"""Studies of DRAW: the bound and its terms, and samples of every run side by side."""

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt

from l2lopt.core.references import Column, References, Result, StudyRun
from l2lopt.core.types import Report
from optimisees.draw import pictures


class PaintedSamples(References):
    """The bound on the test images and its terms, nats per image, and samples of each run from the same noise."""

    default_seeds: ClassVar[tuple[int, ...]] = (0,)

    samples: PositiveInt = 10
    """Number of samples in a row of the figure."""

    def depends_on(self, kind: str) -> dict[str, Any]:
        """The number of samples."""
        return {"painted": self.samples}

    def result(self, optimisee: Any, run: StudyRun, report: Report) -> Result:
        """The metrics, and as PNG files in base64 "images" of the test split and "samples" of the model."""
        assert run.trained is not None
        samples = optimisee.sample_images(run.trained.params, self.samples).images[-1]
        held = optimisee.data.test_inputs  # of a folder for each class, in its order: so from all along it
        images = held[torch.linspace(0, len(held) - 1, self.samples).long()] / 255
        pngs = {"images": pictures.strip(images), "samples": pictures.strip(samples)}
        return {**super().result(optimisee, run, report), **pngs}

    def columns(self, result: Result) -> Sequence[Column]:
        """Parameters, the bound, its terms, and the bound's difference from another run."""
        bound = Column("test bound", itemgetter("bound"), digits=1)
        return [
            Column("seeds", show="count"),
            Column("parameters", itemgetter("parameters"), "first"),
            bound,
            Column("reconstruction", itemgetter("reconstruction"), digits=1),
            Column("KL divergence", itemgetter("kl"), digits=1),
            bound._replace(head="", show="versus"),
        ]

    def facts(self, found: Mapping[str, Mapping[str, Result]], references: Collection[str]) -> Any:
        """The results without their pictures."""
        return {label: {seed: _numbers(result) for seed, result in own.items()} for label, own in found.items()}

    def figures(
        self, found: Mapping[str, Mapping[str, Result]], references: Collection[str], folder: Path
    ) -> list[Path]:
        """A row of samples for each run, by its first seed, below test images."""
        from optimisees.draw.figures import rows_of_images  # Matplotlib: only figures need it

        first = {label: next(iter(own.values())) for label, own in found.items()}
        rows = {"test images": next(iter(first.values()))["images"]}
        return rows_of_images(rows | {label: result["samples"] for label, result in first.items()}, folder, "samples")


def _numbers(result: Result) -> Result:
    """A result without its pictures."""
    return {name: value for name, value in result.items() if name not in ("images", "samples")}
