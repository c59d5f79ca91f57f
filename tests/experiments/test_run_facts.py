"""What tells the code of an optimiser of one's own from what it was before."""

import hashlib
import importlib
import linecache
import sys
import types

import pytest

from l2lopt.experiments import run_facts
from l2lopt.experiments.run_facts import code_of


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def written(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    return written


def digest(*files):
    """As every release has said it: another would make all runs that are kept anew."""
    made = hashlib.blake2b(digest_size=16)
    for name, text in files:
        made.update(f"{name} {len(text)}{text}".encode())
    return made.hexdigest()


def test_the_digests_of_modules_scripts_and_packages_stay(write, tmp_path, monkeypatch):
    write(one_x="import two_x, three_x", two_x="a = 1", three_x__in____init__="", three_x__in__part="b = 2")
    beside = ("three_x/__init__.py", ""), ("three_x/part.py", "b = 2"), ("two_x.py", "a = 1")
    source = digest(("one_x.py", "import two_x, three_x"), *beside)
    assert code_of("one_x:Rule") == {"source of one_x": source}
    assert code_of("three_x.part:Rule") == {"source of three_x": digest(*beside[:2])}
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "one_x.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert code_of("__main__:Rule") == {"source of __main__": source}
    assert not {"source of torch", "source of numpy"} & {*code_of("numpy:Rule"), *code_of("torch.optim:Adam")}


def test_a_folder_without_an_init_counts(write, tmp_path):
    write(mine_x__in__deep__in__rules="import other_x", other_x__in__help="a = 1")
    (tmp_path / "numpy").mkdir()  # of data, say: the name is another package's
    (tmp_path / "numpy" / "unseen.py").write_text("")
    write(solo_x="import mine_x, numpy")
    files = ("mine_x/deep/rules.py", "import other_x"), ("other_x/help.py", "a = 1")
    assert code_of("mine_x.deep.rules:Rule") == {"source of mine_x": digest(*files)}
    assert code_of("solo_x:Rule") == {"source of solo_x": digest(*files, ("solo_x.py", "import mine_x, numpy"))}
    before = code_of("solo_x:Rule")
    write(other_x__in__help="a = 2")
    assert code_of("solo_x:Rule") != before


RULE = """
import torch
unrelated = 1
class Rule(torch.optim.SGD):
    rate = 1.0  # a note
    def step(self):
        return half(self.rate)
"""
HALF = "def half(x):\n    return x / 2\n"


@pytest.fixture
def notebook(monkeypatch):
    """What tells the code of `__main__` apart after cells were run, whose source is known where a name is given."""

    def told(*cells, known=True):
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        for number, text in enumerate(cells):
            name = f"<cell-{number}>"
            lines = len(text), None, text.splitlines(keepends=True), name
            monkeypatch.setitem(linecache.cache, name, lines) if known else linecache.cache.pop(name, None)
            exec(compile(text, name, "exec"), vars(main))
        return code_of("__main__:Rule")

    return told


def test_the_classes_and_functions_of_a_notebook_count(notebook, caplog):
    first = notebook(RULE, HALF)
    assert [*first] == ["source of __main__"]
    same = RULE.replace("a note", "another").replace("unrelated = 1", "unrelated = 2")
    assert notebook(same, "print", HALF) == first
    for cells in [(RULE.replace("1.0", "2.0"), HALF), (RULE, HALF.replace("2", "3")), (RULE, HALF, "f = lambda: 1")]:
        assert notebook(*cells) != first
    assert notebook(RULE, HALF, "f = lambda: 1") != notebook(RULE, HALF, "f = lambda: 2")
    assert not caplog.records


def test_code_without_any_source_is_told_once(notebook, caplog):
    run_facts._tell_lost.cache_clear()
    assert notebook(RULE, HALF, known=False) == notebook(RULE, HALF.replace("2", "3"), known=False)
    (record,) = caplog.records
    assert record.getMessage() == (
        "there is no source of Rule, half, so runs with it are not told apart when it changes: put it into a module"
    )
