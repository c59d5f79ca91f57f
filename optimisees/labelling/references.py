"""Studies of sequence labelling: accuracy and F1 on the test sequences."""

from collections.abc import Sequence
from operator import itemgetter

from l2lopt.core.references import Column, References, Result


class LabellingScores(References):
    """Accuracy over positions and F1, beside the number of parameters."""

    def columns(self, result: Result) -> Sequence[Column]:
        """Seeds, parameters, accuracy and F1."""
        return [
            Column("seeds", show="count"),
            Column("parameters", itemgetter("parameters"), "first"),
            Column("test accuracy", itemgetter("accuracy"), better="higher"),
            Column("test F1", itemgetter("f1"), better="higher"),
        ]
