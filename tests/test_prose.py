"""How the house writes: items of a docstring stand alone, one word for one thing, every exemption has its reason.

`python tests/test_prose.py` lists what is not clean yet; with `--shrink` it takes the files that have become clean
out of `prose_not_yet_clean.txt`, which may only shrink.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LISTED = Path(__file__).with_name("prose_not_yet_clean.txt")

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
ITEM = re.compile(r"[*\w.,/ ()\[\]`]+?:(?: (.*))?")

# Words that lean on what was said before, or begin half a sentence. "rate: of the optimiser" is read as
# "rate: the optimiser's learning rate" by whoever already knows; the second is what is to be written.
LEANING = {
    *("of", "from", "to", "in", "at", "on", "by", "for", "with", "without", "after", "before", "above", "below"),
    *("over", "under", "until", "per", "what", "where", "when", "which", "who", "whose", "how", "that", "if", "so"),
    *("see", "likewise", "as", "like", "otherwise", "there", "ditto", "same"),
    *("it", "its", "their", "they", "is", "are", "gets", "takes", "makes", "fills", "multiplies"),
}
# "UserError: If …", "UserError: For …" is how the field writes the conditions of an error.
LEANING_RAISES = {"of", "see", "likewise", "as", "like", "otherwise", "there", "ditto", "it", "so"}

# The word for ∂loss/∂x is gradient, for f′ derivative, for what backpropagation carries adjoint.
AMBIGUOUS = re.compile(r"(?<!negative_)slope", re.IGNORECASE)
OF_A_LINE = {"tests/experiments/test_own_modules.py"}  # which fits a straight line, and that has a slope

EXEMPTION = re.compile(r"#\s*(?:type:\s*ignore(?:\[[\w, -]*\])?|noqa(?::\s*[A-Z]+\d+(?:[, ]+[A-Z]+\d+)*)?)")


def leaning_items(text):
    """The items of docstrings that do not stand alone, (line number, item)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            first = node.body[0].lineno
            section, whole = None, False
            for number, line in enumerate(doc.splitlines(), first):
                if not line.startswith(" ") and line:
                    found = SECTION.fullmatch(line)
                    section, whole = found and found[1], False
                elif section and re.match(r"    \S", line) and not whole:
                    item = line.strip()
                    whole = section in ("Returns", "Yields")  # is one text, whose later lines are no items
                    named = None if whole else ITEM.fullmatch(item)
                    words = re.findall(r"[\w'’]+", (named[1] or "") if named else item)
                    banned = LEANING_RAISES if section == "Raises" else LEANING
                    leads_with_a_symbol = re.match(r"[^\w]", (named[1] or "") if named else item)
                    if words and not leads_with_a_symbol and words[0].lower() in banned:
                        yield number, item


def ambiguous_words(text):
    """Lines with the word that means three things."""
    for number, line in enumerate(text.splitlines(), 1):
        if AMBIGUOUS.search(line):
            yield number, line.strip()


def bare_exemptions(text):
    """Exemptions from the type checker and the linter that give no reason, behind them or in the comment above."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if found := EXEMPTION.search(line):
            above = number > 1 and lines[number - 2].lstrip().startswith("#")
            if not above and len(re.findall(r"\w+", line[found.end() :])) < 2:
                yield number, line.strip()


def complaints(path):
    """What a file is to change."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    checks = []
    if name not in OF_A_LINE:
        checks.append((ambiguous_words, "says slope: gradient (∂loss/∂x), derivative (f′) or adjoint?"))
    if path.suffix == ".py":
        checks.append((bare_exemptions, "an exemption without its reason"))
    if path.is_relative_to(ROOT / "l2lopt") or path.is_relative_to(ROOT / "optimisees"):
        checks += [(leaning_items, "an item that does not stand alone")] if path.suffix == ".py" else []
    return [f"{name}:{line}: {why}: {what}" for check, why in checks for line, what in check(text)]


def pages():
    """Every file that people read, but for this one, which has to name what it forbids."""
    folders = [ROOT / name for name in ("l2lopt", "optimisees", "tests", "docs", "configs")]
    found = [path for folder in folders for kind in ("py", "md", "toml") for path in folder.rglob(f"*.{kind}")]
    return sorted({*found, *ROOT.glob("*.md")} - {Path(__file__)})


def not_yet_clean():
    """Files that are still to be rewritten."""
    return set(LISTED.read_text(encoding="utf-8").split()) if LISTED.exists() else set()


@pytest.fixture(scope="module")
def found():
    """File → its complaints, of those that have any."""
    return {str(path.relative_to(ROOT)): said for path in pages() if (said := complaints(path))}


def test_prose_is_clean(found):
    new = [line for name, lines in found.items() if name not in not_yet_clean() for line in lines]
    assert not new, "\n" + "\n".join(new)


def test_the_list_only_shrinks(found):
    gone = not_yet_clean() - set(found)
    assert not gone, f"clean or gone, run `python tests/test_prose.py --shrink`: {sorted(gone)}"


def docstring(items, section="Args"):
    return f'def f():\n    """What it does.\n\n    {section}:\n{items}\n    """\n'


@pytest.mark.parametrize(
    "item",
    [
        "path: of the file.",
        "a, b: likewise.",
        "*args: see `f`.",
        "rate: as in Adam.",
        "it: what comes out.",
        "n: where.",
    ],
)
def test_an_item_that_leans_is_found(item):
    assert list(leaning_items(docstring(f"        {item}")))


@pytest.mark.parametrize(
    "item",
    [
        *("path: File to write.", "x: [T, N], of any dtype.", "p: p in [0, 1).", "names: whether they are asked for."),
        *("path: The file\n            of the run.", "seconds: (of the step) a number."),
    ],
)
def test_an_item_that_stands_alone_is_left(item):
    assert not list(leaning_items(docstring(f"        {item}")))


def test_returns_is_one_text():
    assert list(leaning_items(docstring("        What it made.", "Returns")))
    assert not list(leaning_items(docstring("        The sums and the means\n        of the rows.", "Returns")))


def test_errors_may_have_conditions():
    assert not list(leaning_items(docstring("        UserError: If the file is gone.", "Raises")))
    assert list(leaning_items(docstring("        UserError: see `f`.", "Raises")))


IGNORE = "# type: " + "ignore[misc]"  # in two parts: this is no exemption
NOQA = "# no" + "qa: N801, E501"


def test_exemptions_need_reasons():
    bare = [f"x = f()  {IGNORE}", f"x = f()  {NOQA}", "x = f()  # no" + "qa"]
    reasoned = [f"x = f()  {IGNORE}  # higher has no types", f"x = f()  {NOQA} (not a mapping)"]
    reasoned.append(f"# higher has no types\nx = f()  {IGNORE}")
    assert all(list(bare_exemptions(line)) for line in bare)
    assert not any(list(bare_exemptions(line)) for line in reasoned)


def test_the_ambiguous_word_is_found():
    assert list(ambiguous_words("Slopes of the loss."))
    assert not list(ambiguous_words("leaky_relu(x, negative_slope=0.1)"))


if __name__ == "__main__":
    unclean = {str(path.relative_to(ROOT)): said for path in pages() if (said := complaints(path))}
    if "--shrink" in sys.argv:
        left = sorted(not_yet_clean() & set(unclean))
        LISTED.write_text("".join(f"{name}\n" for name in left), encoding="utf-8") if left else LISTED.unlink(True)
    sys.stdout.write("".join(f"{line}\n" for lines in unclean.values() for line in lines))
