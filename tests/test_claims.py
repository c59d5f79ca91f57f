"""The page of the papers' claims: each line has its verdict, tests and commands exist, the counts are the lines'."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from test_docs import check_command

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
VERDICTS = ("holds", "does not", "not told apart", "not run")


def lines():
    """(heading, cells) of every line of a table of claims."""
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| Claim |"):
                yield heading, [cell.strip() for cell in line.strip("|").split("|")]


def verdict(cells):
    return re.match(r"\*\*([a-z ]+)\*\*", cells[3])[1]


def test_every_line_is_whole():
    for _, cells in lines():
        assert len(cells) == 5, cells
        assert all(cells), cells
        assert verdict(cells) in VERDICTS, cells
        if verdict(cells) == "not run":
            assert ": " in cells[3], f"a reason is due: {cells}"
        else:
            assert cells[4] != "–", f"a command is due: {cells}"


def test_the_counts_are_those_of_the_lines():
    found = {}
    for heading, cells in lines():
        found.setdefault("Ours" if cells[0].startswith("Ours") else heading, Counter())[verdict(cells)] += 1
    found["all"] = sum(found.values(), Counter())
    summary = PAGE.partition("\n## ")[0]
    for heading, counts in found.items():
        row = " | ".join(str(counts[name]) for name in VERDICTS)
        assert f"| {heading} | {row} |" in summary, heading


def test_the_tests_of_a_line_are_in_its_files():
    paths = set(re.findall(r"`((?:tests|configs|runs)/[\w./-]+)`", PAGE))
    assert all((ROOT / path).exists() for path in paths), paths
    for _, cells in lines():
        files = re.findall(r"`(tests/[\w./-]+)`", cells[4])
        code = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(test_\w+)`", cells[1]):
            assert re.search(rf"^def {name}\(", code, re.M), (name, files)


COMMANDS = sorted({found for _, cells in lines() for found in re.findall(r"`l2lopt ([^`]+)`", cells[4])})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    check_command(shlex.split(command))
