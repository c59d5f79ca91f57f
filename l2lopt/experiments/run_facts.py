"""What free runs depend on beside their seeds, rates and steps: one key in a `FileCache` for benchmarks and studies.

Runs are equal up to rounding where these facts are: the number of threads and the form of a step are not among them.
"""

from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Any

from l2lopt.core.registry import Choice
from l2lopt.evaluation.settings import Baseline
from l2lopt.experiments import from_python
from l2lopt.optimisee import Optimisee
from l2lopt.optimisers import Optimiser
from l2lopt.parallel.jobs import fingerprint
from l2lopt.weights import files

FORMAT = 3
"""Number of what a free run is: raised when runs of equal settings become others, so that old ones are made anew."""


def problem_facts(choice: Choice | Optimisee, optimisee: Optimisee) -> dict[str, Any]:
    """What tells a problem from others: how it is chosen, its data, and its device where that is no CPU.

    Args:
        choice: Choice of the problem, or the problem itself.
        optimisee: The problem.
    """
    said = from_python.describe(optimisee) if isinstance(choice, Optimisee) else _shortest(choice)
    device = next((value.device.type for value in optimisee.init(0)[0].values()), "cpu")
    return {"optimisee": said, **optimisee.fingerprint(), **({} if device == "cpu" else {"device": device})}


def run_facts(problem: dict[str, Any], optimiser: Optimiser | Baseline) -> dict[str, Any]:
    """What all runs of an optimiser on a problem depend on.

    Args:
        problem: Result of `problem_facts`.
        optimiser: A rule of ours in the dtype of the problem, which takes part as it is, or a baseline with rates.
    """
    facts = fingerprint(format=FORMAT, **problem)
    if isinstance(optimiser, Optimiser):
        return facts | {"rule": files.digest(optimiser)}
    return facts | {
        "optimiser": _shortest(optimiser.optimiser),
        "schedule": optimiser.schedule,
        **_package_version(optimiser),
    }


def package_of(baseline: Baseline) -> str | None:
    """The package of an optimiser that is named as "module:Class"; None for one of ours."""
    choice = baseline.optimiser
    name = choice if isinstance(choice, str) else str(choice.get("name", ""))
    module, colon, _ = name.partition(":")
    return module.partition(".")[0] if colon else None


def _package_version(baseline: Baseline) -> dict[str, str]:
    """The version of the package that an optimiser's class comes from; none for our own and torch's."""
    package = package_of(baseline)
    return {} if package is None or package == "torch" else dict(_versions(package))


@cache
def _versions(package: str) -> dict[str, str]:
    """The versions of all that is installed as this package. It takes half a second, whatever the package."""
    return {f"version of {name}": version(name) for name in packages_distributions().get(package, [])}


def _shortest(choice: Choice) -> Choice:
    """A choice without options as its name alone: a table with a name and nothing else means the same."""
    return choice["name"] if not isinstance(choice, str) and choice.keys() == {"name"} else choice
