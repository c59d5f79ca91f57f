"""The names of optimisers as their papers write them, for figures; tables and files have the registered names."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

PROPER = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadamw": "NAdamW",
    "lion": "Lion",
    "muon": "Muon",
    "dowg": "DoWG",
    "normalised-adam": "normalised Adam",
    "normalised-muon": "normalised Muon",
}
"""Registered name → proper name."""
BEFORE = "before meta-training"
"""What follows the name of a rule in the row with the φ that its meta-training began from."""
_CELLS = {"t": "T", "no": "no", "fastgrnn": "FastGRNN"} | {
    name: name.upper() for name in ("rnn", "gru", "lstm", "sru", "ihc", "irc")
}
"""Part of the name of a cell → how it is written."""
_CLASS = re.compile(r"([A-Za-z_][\w.]*)[:.]([A-Z]\w*)")


def proper_name(name: str) -> str:
    """The proper name of an optimiser; a label that somebody has chosen stays as it is.

    What follows a comma stays: "normalised-muon, untuned" is "normalised Muon, untuned".

    Example:
        >>> from l2lopt.report.names import proper_name
        >>> proper_name("adamw"), proper_name("learned-ihc-lstm"), proper_name("torch.optim:NAdam")
        ('AdamW', 'learned IHC-LSTM', 'NAdam (torch.optim)')
    """
    own, comma, rest = name.partition(", ")
    learned, _, cell = own.rpartition("learned-")
    if own in PROPER:
        own = PROPER[own]
    elif not learned and cell and set(parts := cell.split("-")) <= set(_CELLS):
        own = ("learned " if own != cell else "") + "-".join(_CELLS[part] for part in parts)
    elif found := _CLASS.fullmatch(own):
        own = f"{found[2]} ({found[1]})"
    return own + comma + rest


def proper_names(names: Iterable[str], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name → name for a figure; names that would become one stay as they are.

    Args:
        names: Names in the results.
        known: Name → proper name, where more is known of it than its name says, such as the schedule.
    """
    found = {name: (known or {}).get(name) or proper_name(name) for name in names}
    counts = Counter(found.values())
    return {name: proper if counts[proper] == 1 else name for name, proper in found.items()}
