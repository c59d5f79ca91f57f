"""The examples in the docstrings of the public names run, and give what they say."""

import doctest
import inspect

import pytest

import l2lopt
from l2lopt.training import meta_train, train

STILL_WITHOUT = {
    "LearnedOptimizer",
    "UserError",
    "demo",
    "list_weights",
    "load",
    "paint",
    "plot",
    "publish",
    "pull",
    "push",
    "reproduce",
    "sample",
    "save",
}
"""Public names whose docstrings have no example yet. This set may only shrink."""
SLOW = {"demo", "reproduce", "sample", "paint"}
"""Names whose examples train for more than some seconds."""
INTERNAL = {"training.meta_train": meta_train.meta_train, "training.train": train.train}
"""Names that no user imports, with examples all the same."""


def examples(name, thing):
    """The examples in one docstring, those of a class's methods included."""
    finder = doctest.DocTestFinder(recurse=inspect.isclass(thing))
    return [test for test in finder.find(thing, name, globs={}) if test.examples]


THINGS = {name: getattr(l2lopt, name) for name in l2lopt.__all__} | INTERNAL


@pytest.mark.parametrize(
    ("name", "thing"),
    [pytest.param(*item, id=item[0], marks=[pytest.mark.slow] * (item[0] in SLOW)) for item in THINGS.items()],
)
def test_the_examples_run(name, thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = examples(name, thing)
    if name in STILL_WITHOUT and not found:
        pytest.skip("no example yet")
    assert found, f"l2lopt.{name} has no example in its docstring"
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_runner_finds_an_example_that_fails():
    def wrong():
        """Says too much.

        >>> 1 + 1
        3
        """

    (test,) = examples("wrong", wrong)
    assert doctest.DocTestRunner().run(test, out=lambda _: None).failed == 1


def test_every_name_without_an_example_is_public():
    assert set(l2lopt.__all__) >= STILL_WITHOUT
