"""Labels of a study that say the sizes it is run with: names in tables and titles, and of folders."""

import re
from collections.abc import Sequence
from typing import Any

from l2lopt.core.errors import UserError
from l2lopt.core.settings import Settings
from l2lopt.parallel.jobs import slug

_KEY = re.compile(r"\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")


def filled(label: str, config: Settings, where: str) -> str:
    """A label with the values of a config in the place of its keys: "width {optimisee.width}" becomes "width 16".

    The numbers of a list are joined by hyphens. Braces around anything else than a key stay as they are.

    Args:
        label: Label as a study's file has it.
        config: Config that the row or the problem is run with, all changes made.
        where: Study's file, for the error.

    Raises:
        UserError: For a key without a value in the config.

    Example:
        >>> from l2lopt.experiments import config, study_labels
        >>> made = config.load({"optimisee": {"name": "mlp", "hidden": [50, 20]}})
        >>> study_labels.filled("MLP 64-{optimisee.hidden}-10", made, "study.toml")
        'MLP 64-50-20-10'
    """
    table = config.model_dump(mode="json")

    def value(found: re.Match[str]) -> str:
        place: Any = table
        for key in found[1].split("."):
            place = place.get(key) if isinstance(place, dict) else None
        if place is None or isinstance(place, dict):
            remedy = "name a key that the config sets, or write the label without braces"
            raise UserError(f"{where}: label {label!r}", expected="a key with a value", found=found[1], remedy=remedy)
        return "-".join(map(str, place)) if isinstance(place, list) else str(place)

    return _KEY.sub(value, label)


def of_problem(label: str, config: Settings, changes: Sequence[str], where: str) -> str:
    """The `filled` label of a problem, and in brackets the changes to the optimisee that it has no key for.

    Without them the table of a study that was run with other sizes would have the name of the shipped one.

    Args:
        label: Label as a study's file has it.
        config: Config of the problem, all changes made.
        changes: Changes that were made to all configs of the study, such as "optimisee.width=4".
        where: Study's file, for the error.
    """
    said, unsaid = _KEY.findall(label), dict[str, str]()
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        if key.partition(".")[0] == "optimisee" and key not in said:
            # By key, since the last change to a key is the one that holds.
            unsaid[key.removeprefix("optimisee.")] = value
    beside = ", ".join(f"{key}={value}" for key, value in unsaid.items())
    return filled(label, config, where) + (f" ({beside})" if beside else "")


def check_folders(labels: Sequence[str], where: str) -> None:
    """Refuses labels that lead to one folder, as those of two problems may that were changed alike.

    Raises:
        UserError: For the first such pair.
    """
    known: dict[str, str] = {}
    for label in labels:
        if (folder := slug(label)) in known:
            found, remedy = f"{known[folder]!r} and {label!r}", "drop the change that makes them alike"
            raise UserError(where, expected="labels that lead to different folders", found=found, remedy=remedy)
        known[folder] = label
