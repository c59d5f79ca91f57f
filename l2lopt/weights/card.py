"""The model card of a learned optimiser, the README of its repository on the Hugging Face hub.

A card says what the file's header knows: the rule, the tasks it has seen, what it cost, how it compares, where it
failed, and the range that it was tried in. Format: https://huggingface.co/docs/hub/model-cards.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from l2lopt.core.errors import UserError
from l2lopt.report.names import BEFORE
from l2lopt.report.tables import Table, loss_text
from l2lopt.weights import files

NAME = "README.md"
"""Name of the card in a repository of the hub."""
COSTS = {"meta_updates": "meta-updates", "inner_steps": "inner steps", "seconds": "seconds"}
"""Facts of a meta-training that say its cost, and their units."""
_TAGS = ("l2lopt", "learned-optimizer", "learning-to-optimize", "meta-learning", "pytorch")


def model_card(weights: str | Path, repo: str = "owner/name") -> str:
    """The card of a learned optimiser as Markdown below a YAML header of `library_name`, `license` and `tags`.

    All in it comes from the header of the file. Facts that are given to `l2lopt.publish` add to it: "license" (an
    identifier of the hub; else "mit" for the weights in the package and "unknown" for others), "benchmark" (Markdown,
    such as a table of a benchmark's report), "failures" (a list of sentences), "safe_range" (a sentence).

    Args:
        weights: File written by `files.save`, or a name in `list_weights()`.
        repo: Repository, "owner/name", for the example of how to use it.

    Raises:
        UserError: For a missing, damaged or foreign file, or one whose header has facts of other types.

    Example:
        >>> from l2lopt.weights.card import model_card
        >>> print(model_card("lstm").splitlines()[1])
        library_name: l2lopt
    """
    header, path = files.header(weights), files.find(weights)
    training, title = header["training"], repo.rpartition("/")[2]
    try:
        own = "mit" if path.parent == files.HOME else "unknown"
        yaml = ["---", "library_name: l2lopt", f"license: {' '.join(training.get('license', own).split())}", "tags:"]
        parts = {
            "": [_opening(title, repo, header)],
            "Tasks seen": [*_tasks(training)],
            "Cost": [cost(training) or "Not recorded."],
            "Comparisons": [*_comparisons(training)],
            "Known failures": [*_failures(training, rule_name(header["optimiser"]))],
            "Safe range": [_safe_range(training)],
        }
        texts = [text for head, part in parts.items() for text in ([f"## {head}"] if head else []) + part]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        found, remedy = f"others ({error})", "publish it again, with facts as the documentation has them"
        raise UserError(str(weights), expected="facts of a meta-training", found=found, remedy=remedy) from None
    return "\n".join([*yaml, *(f"- {tag}" for tag in _TAGS), "---", ""]) + "\n" + "\n\n".join(texts) + "\n"


def cost(training: Mapping[str, Any]) -> str:
    """The cost of a meta-training in one line; empty where nothing is known of it."""
    return ", ".join(f"{training[key]:,.0f} {what}" for key, what in COSTS.items() if key in training)


def rule_name(rule: Mapping[str, Any]) -> str:
    """The name of a rule, with its cell where it has one: "hierarchical lstm"."""
    cell = rule.get("cell", "lstm" if rule["name"] == "coordinatewise" else "")
    return " ".join(filter(None, (str(rule["name"]), str(cell))))


def remarks(training: Mapping[str, Any]) -> list[str]:
    """What the author has written of the rule: its benchmark, where it failed, the range that it was tried in."""
    failures, safe_range = "\n".join(_told_failures(training)), " ".join(_texts(training.get("safe_range", [])))
    found = [training.get("benchmark", ""), failures, safe_range]
    return [text for text in found if text]


def comparison_tables(label: str, lines: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The mean losses of a comparison that was written to a file, a table for each split, which fits a terminal.

    Args:
        label: Problem's name.
        lines: Lines of the comparison, as in `evaluation.json`.
    """
    found = {(line["optimiser"], line["split"], line["horizon"]): line["mean"] for line in lines}
    means = {place: loss_text(mean) for place, mean in found.items()}
    names = dict.fromkeys(line["optimiser"] for line in lines)
    tables = []
    for split in dict.fromkeys(line["split"] for line in lines):
        horizons = list(dict.fromkeys(line["horizon"] for line in lines if line["split"] == split))
        rows = tuple((name, *(means.get((name, split, horizon), "") for horizon in horizons)) for name in names)
        heads = ("optimiser", *(f"step {horizon:,}" for horizon in horizons))
        tables.append(Table(heads, rows, title=f"{label}: {split} loss, mean per sample"))
    return tables


def _opening(title: str, repo: str, header: Mapping[str, Any]) -> str:
    """The title, the rule and how to use it."""
    rule = json.dumps(header["optimiser"], sort_keys=True)
    return f"""# {title}

A learned optimiser for PyTorch, `{rule_name(header["optimiser"])}`, of
[l2lopt](https://github.com/l2lopt/l2lopt) {header["release"]}. The file is a safetensors file; nothing in it is
unpickled.

```python
import l2lopt

path = l2lopt.pull("{repo}")
optimizer = l2lopt.LearnedOptimizer(model.parameters(), path)
```

The choice that builds the rule: `{rule}`."""


def _tasks(training: Mapping[str, Any]) -> Iterator[str]:
    """The problems of the meta-training, as a list."""
    config = training.get("config", {})
    first = config.get("optimisee", training.get("optimisee"))
    choices = [] if first is None else [first, *config.get("mixed_with", [])]
    if config.get("trained_on"):
        choices = list(config["trained_on"])
    yield "\n".join(f"- {_said(choice)}" for choice in choices) if choices else "Not recorded."


def _said(choice: Any) -> str:
    """A name with its options in words: "mlp: activation sigmoid, hidden [20]"."""
    if not isinstance(choice, Mapping):
        return str(choice)
    options = ", ".join(f"{key} {value}" for key, value in sorted(choice.items()) if key != "name")
    return f"{choice['name']}: {options}" if options else str(choice["name"])


def _comparisons(training: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the header, and the benchmark's where there is one."""
    tables = [table for item in training.get("comparisons", {}).items() for table in comparison_tables(*item)]
    yield from (table.markdown() for table in tables)
    if "benchmark" in training:
        yield f"### Benchmark\n\n{training['benchmark'].strip()}"
    elif not tables:
        yield "None recorded: compare it on problems of your own before you trust it, with `l2lopt benchmark`."


def _failures(training: Mapping[str, Any], rule: str) -> Iterator[str]:
    """The author's sentences, and each problem on which the rule has lost or diverged.

    A comparison may have other learned optimisers, too: where one row has the rule's name, it is the one that counts.
    """
    lines = _told_failures(training)
    for label, rows in training.get("comparisons", {}).items():
        learned = [row["optimiser"] for row in rows if row["kind"] == "learned"]
        names = [name for name in dict.fromkeys(learned) if not name.endswith(f", {BEFORE}")]
        own = [name for name in names if _is_own(name, training, rule)]
        for name in own or names:
            mine = [row for row in rows if row["optimiser"] == name]
            behind: dict[str, list[str]] = {}
            for row in mine:
                if (row.get("difference_low") or 0) > 0:
                    behind.setdefault(row["split"], []).append(f"{row['horizon']:,}")
            where = " and ".join(f"{split} loss (step {', '.join(steps)})" for split, steps in behind.items())
            lost = max(row.get("diverged", 0) for row in mine)
            said = [f"behind the best tuned baseline in {where}"] if behind else []
            said += [f"up to {lost} runs ended above their first loss"] if lost else []
            lines += [f"- {label}, {name}: {'; '.join(said)}."] if said else []
    yield "\n".join(lines) if lines else "None recorded, which does not say that there are none."


def _is_own(name: str, training: Mapping[str, Any], rule: str) -> bool:
    """Whether a row of a comparison is the rule's: by the name that it had there, its label, or that of its cell."""
    if "row" in training:
        return name == training["row"] or name.startswith(f"{training['row']}, ")
    label = training.get("label")
    return name.partition(", ")[0].lower() == rule.split()[-1] or name == label or name.startswith(f"{label}, ")


def _told_failures(training: Mapping[str, Any]) -> list[str]:
    """The author's sentences on where the rule failed, as lines of a list."""
    return [f"- {text}" for text in _texts(training.get("failures", []))]


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(map(str, value))


def _safe_range(training: Mapping[str, Any]) -> str:
    """The lengths of the runs that it has seen."""
    config = training.get("config", {})
    lengths, horizons = config.get("unroll", {}).get("length"), config.get("validation", {}).get("horizons")
    texts = _texts(training.get("safe_range", []))
    if lengths is not None:
        texts.append(f"Meta-trained on runs of {_span(lengths)} steps of the tasks above.")
    if horizons:
        texts.append(f"Chosen by validations of {_span(horizons)} steps.")
    return " ".join([*texts, "Longer runs and networks of other kinds are outside of what it was made for."])


def _span(numbers: Any) -> str:
    """The least to the greatest of numbers, or a single number."""
    found = [numbers] if isinstance(numbers, int) else list(numbers)
    low, high = min(found), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
