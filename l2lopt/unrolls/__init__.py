"""Ways to get a meta-gradient. `make(name, **options)` builds one by name."""

from collections.abc import Mapping
from typing import Any

from l2lopt import tables
from l2lopt.unrolls.higher import Higher
from l2lopt.unrolls.taped import Taped
from l2lopt.unrolls.unroll import MetaGradient, Unroll, UnrollState

UNROLLS: Mapping[str, type[Unroll]] = {"taped": Taped, "higher": Higher}


def make(name: str, **options: Any) -> Unroll:
    """The unroll called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    unroll: Unroll = tables.make(UNROLLS, "unroll", name, **options)
    return unroll


__all__ = ["UNROLLS", "Higher", "MetaGradient", "Taped", "Unroll", "UnrollState", "make"]
