"""The learned optimiser of a run as a file for others."""

import os
from pathlib import Path
from typing import Any

from l2lopt.experiments.config import meta_training_config
from l2lopt.experiments.run_folder import evaluation_summary
from l2lopt.weights import files as weights


def publish(run: str | Path, path: str | Path, **facts: Any) -> Path:
    """Writes the learned optimiser of a run to a file for others, and gives its path.

    The header's "training" has the run's config, what it cost, the table of its evaluation where there is one, and
    `facts`. `weights.header` reads it, `l2lopt weights FILE` shows it.

    Args:
        run: Folder that `meta_train` has left.
        path: Path of the file.
        facts: Further facts, anything JSON can say; "seconds" are those of the meta-training, "comparisons" are tables
            of problems by their label, lines as in `evaluation.json`. `weights.card.model_card` shows these, and
            "license", "benchmark", "failures" and "safe_range".

    Raises:
        UserError: For a folder without a run, or damaged files.

    Example:
        >>> import l2lopt
        >>> run = "runs/mine"  # a folder that l2lopt.meta_train has left
        >>> l2lopt.publish(run, "mine.safetensors", author="me")  # doctest: +SKIP
        PosixPath('mine.safetensors')
    """
    folder, path = Path(os.path.expanduser(run)), Path(os.path.expanduser(path))
    file = folder / "optimiser.safetensors"
    training = weights.header(file)["training"]
    config = meta_training_config(folder, ())
    training["config"] = config.model_dump(mode="json", exclude_none=True)
    if (folder / "evaluation.json").exists():
        summary = evaluation_summary(folder / "evaluation.json")
        training["comparisons"] = {"its own problem": summary["table"]}
        if summary["own"] is not None:
            training["row"] = summary["own"]  # beside which may be other runs'
    weights.save(weights.load(file, trusted=True), path, training | facts)
    return path
