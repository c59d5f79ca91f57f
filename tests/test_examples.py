"""The examples in docstrings run as they stand, and give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import l2lopt

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("l2lopt", "optimisees")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(import_module(module), optionflags=doctest.ELLIPSIS, raise_on_error=False)
    assert tried
    assert not failed, "see the output above"


@pytest.mark.parametrize("name", l2lopt.__all__)
def test_every_public_name_has_an_example(name):
    thing = getattr(l2lopt, name)
    assert ">>> " in thing.__doc__
    assert thing.__module__ in MODULES  # whose examples run above
