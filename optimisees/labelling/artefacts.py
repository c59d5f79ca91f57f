"""Files that training leaves of sequence labelling: vocabulary, scores, an example, and every mistake by its place."""

import logging
from itertools import pairwise
from pathlib import Path

from l2lopt.storage.run_log import write_json, write_text
from optimisees.labelling.labelled import Labelled, Labelling

_log = logging.getLogger("l2lopt")


def write_labels(data: Labelled, labelling: Labelling, folder: Path) -> None:
    """Writes `vocabulary.json`, `labels.json` and `mistakes.txt`.

    `labels.json` has precision, recall and F1 of each label on the test sequences, and one of these sequences, that
    with the most changes of label. `mistakes.txt` has a line for each wrong label, by file and line for tokens.

    Args:
        data: Task.
        labelling: True and found labels of the test sequences.
        folder: Folder of the run.
    """
    (true, found, scores), classes = labelling, data.classes
    mistakes = [
        f"{data.test.places(sequence, position)}: {classes[one]} taken for {classes[other]}\n"
        for sequence, pair in enumerate(zip(true, found, strict=True))
        for position, (one, other) in enumerate(zip(*pair, strict=True))
        if one != other
    ]
    write_json(folder / "vocabulary.json", {"tokens": data.tokens, "labels": classes})
    write_text(folder / "mistakes.txt", "".join(mistakes))
    shown = max(range(len(true)), key=lambda k: sum(a != b for a, b in pairwise(true[k])))
    inputs = data.test.inputs[: len(true[shown]), shown].tolist()
    positions = sum(map(len, true))
    facts = {
        "f1": scores.f1,
        "labels": scores.labels,
        "mistakes": len(mistakes),
        "positions": positions,
        "example": {
            "place": data.test.places(shown, 0),
            "classes": classes,
            "true": true[shown],
            "found": found[shown],
            "tokens": None if data.tokens is None else [data.tokens[k] for k in inputs],
            "signals": inputs if data.tokens is None else None,
            "rate": data.rate,
        },
    }
    write_json(folder / "labels.json", facts)
    _log.info(f"{len(mistakes):,} of {positions:,} test labels are wrong: {folder / 'mistakes.txt'}")
