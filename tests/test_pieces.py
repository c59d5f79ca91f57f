"""The pieces of a study in processes of their own."""

import os
import signal
import time
from pathlib import Path

import pytest

from l2lopt.errors import UserError
from l2lopt.pieces import make_all, spread
from l2lopt.types import silent


def at_once_or_never(piece, report):
    """A piece that fails, one that is killed, or one that would take a minute and then leave a file."""
    if piece == "fails":
        raise UserError("piece", expected="this", found="that", remedy="mend it")
    if piece == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    Path(piece).write_text("")


@pytest.mark.parametrize(
    ("piece", "message"),
    [("fails", "piece: expected this, found that"), ("killed", "jobs: expected every process to live, .*lower --jobs")],
)
def test_where_a_piece_fails_the_others_are_ended(tmp_path, piece, message):
    with pytest.raises(UserError, match=message):
        make_all(at_once_or_never, [str(tmp_path / "long"), piece], 2, silent)
    assert list(tmp_path.iterdir()) == []


def test_what_is_under_way_is_said_at_once():
    seen = []
    make_all(nothing, [1, 2], 2, lambda *event: seen.append(event[1:3]))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def nothing(piece, report):
    """A piece that is done."""


def test_a_spread_has_brackets_for_several_values_alone():
    assert spread([1.0], 1) == "1.0"
    assert spread([1.0, 2.0, 4.0], 2) == "2.33 (1.00–4.00)"
