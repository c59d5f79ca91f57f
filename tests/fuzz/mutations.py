"""Mutations of configs and files, each a pure function of a seed, and the limits within which they must be answered."""

import json
import random
import signal
import struct
import threading
from contextlib import contextmanager
from copy import deepcopy

from l2lopt.core.errors import UserError

JUNK = [
    0,
    -1,
    1,
    2,
    3,
    10**9,
    10**10,
    -(10**18),
    10**30,
    0.5,
    -0.5,
    0.0,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
    "",
    "/",
    ".",
    "..",
    "nan",
    "x" * 5000,
    "$x$ and $",
    "a\\b\t'\"",
    "\x1b]0;title\x07",
    "\u202e",
    "name:",
    ":",
    "os:system",
    "builtins:list",
    "l2lopt.cells.lstm:LSTM",
    "python",
    "float16",
    "log-and-sign",
    [],
    {},
    [[]],
    [0],
    [-1],
    [1, 1],
    [10**9],
    ["a", "a"],
    {"name": "adam"},
    {"name": "sgd", "lr": 0.1},
    {"name": {"name": "adam"}},
    {"name": "stacked", "layers": 10**9},
    {"name": "stacked", "cell": "gru", "layers": 2},
    {"name": 3},
    {"name": ""},
    {"weights": "lstm"},
    {"weights": ["lstm"]},
    {"weights": "lstm", "lr": -1.0},
    {"": 1},
    {"a": {"b": {"c": 1}}},
    ["adam", {"name": "sgd"}],
]
"""Values that somebody may write, or generate, in the place of any other."""


class HangError(Exception):
    """A case took longer than it may."""


@contextmanager
def limit(seconds):
    """Ends a case that goes on for ever, where signals are to be had."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise HangError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_refusal(error, *names):
    """Whether an error is one line, says what was expected and found, names its file, and moves no cursor."""
    text = str(error)
    says = isinstance(error, UserError) and text.isprintable() and ": expected " in text and ", found " in text
    return says and (not names or any(name in text for name in names))


def places(table, path=()):
    """The paths of all values of nested tables and lists."""
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(table, path):
    for key in path:
        table = table[key]
    return table


def changed(table, draw, options=None):
    """A copy of nested tables with one or two values changed, dropped, moved or added.

    Args:
        table: Tables to start from.
        draw: Source of random numbers.
        options: Further keys that a table may have, by its "name".
    """
    table = deepcopy(table)
    for _ in range(draw.choice((1, 1, 1, 2))):
        all_places = list(places(table))
        if not all_places:
            return table
        path = draw.choice(all_places)
        above, key = at(table, path[:-1]), path[-1]
        kind = draw.random()
        if kind < 0.55:
            above[key] = deepcopy(draw.choice(like(above[key]) if draw.random() < 0.7 else JUNK))
        elif kind < 0.65:
            above[key] = nudged(above[key], draw)
        elif kind < 0.72:
            del above[key]
        elif kind < 0.8:
            above[key] = deepcopy(at(table, draw.choice(all_places)) if draw.random() < 0.5 else [above[key]] * 2)
        else:
            inner = above[key] if isinstance(above[key], dict) else above
            if isinstance(inner, dict):
                known = (options or {}).get(str(inner.get("name")), [])
                inner[draw.choice([*known * 5, "unknown", "name"])] = deepcopy(draw.choice(JUNK))
            else:
                inner.append(deepcopy(draw.choice(JUNK)))
    return table


def like(value):
    """The junk of a value's own type, which is refused for what it is and not for its type."""
    kinds = (int, float) if type(value) in (int, float) else (type(value),)
    return [junk for junk in JUNK if type(junk) in kinds] or JUNK


def nudged(value, draw):
    """A value of the same type that is near, or of the other sign, or of another order of magnitude."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([-value, value + 1, value - 1, value * 10**6, 0])
    if isinstance(value, float):
        return draw.choice([-value, value * 1e6, value * 1e-6, 1 / value if value else 0.0, int(value)])
    if isinstance(value, str) and value:
        spot = draw.randrange(len(value))
        return draw.choice([value[:spot], value[:spot] + chr(draw.randrange(0x250)) + value[spot + 1 :], value * 2])
    if isinstance(value, list):
        return value[:-1]
    return value


def damaged(content, draw):
    """Bytes with a part flipped, cut, repeated, or replaced, as by a disk, a transfer or a hand."""
    if not content:
        return b"x"
    spot, other = draw.randrange(len(content)), draw.randrange(len(content))
    low, high = min(spot, other), max(spot, other)
    kind = draw.randrange(9)
    if kind < 4:
        flipped = bytearray(content)
        flipped[spot] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 4:
        return content[:spot]
    if kind == 5:
        return content[:low] + content[high:]
    if kind == 6:
        return content[:low] + bytes(high - low) + content[high:]
    if kind == 7:
        return content[:low] + draw.randbytes(min(high - low, 16)) + content[low + min(high - low, 16) :]
    return content[:spot] + content[low:high] + content[spot:]


def with_header(content, change):
    """A safetensors file whose JSON header is what `change` makes of it; the tensors' bytes stay."""
    length = struct.unpack("<Q", content[:8])[0]
    header = change(json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def source(seed, *key):
    """Random numbers of a case."""
    return random.Random(f"{seed} {key}")
