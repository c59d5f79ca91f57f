"""Samples of trained models: texts and images, for scripts and the command line."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import optimisees
from l2lopt.core import registry
from l2lopt.core.errors import UserError, above_0
from l2lopt.experiments import from_python
from l2lopt.experiments.config import training_config
from l2lopt.experiments.run_folder import saved
from l2lopt.optimisee import SampleRequest

_SAMPLED = {"text": "a trained language model", "images": "a trained model of images"}
_ONLY = {"prompt": "text", "tokens": "text", "temperature": "text", "count": "images"}
"""Option → the one kind of samples that has it."""


def sample(run: str | Path, prompt: str = "", *, tokens: int = 100, temperature: float = 1.0, seed: int = 0) -> str:
    """The prompt, continued by the language model that `train` has left.

    Args:
        run: Folder of the run.
        prompt: Beginning of the text, after a line's end: words of the vocabulary, or its characters.
        tokens: Number of tokens that follow.
        temperature: Boldness of the draws: above 1 bolder, below 1 safer, at 0 always the likeliest token.
        seed: Seed of the draws.

    Raises:
        UserError: For a folder without the run of a language model, and a prompt that is not in the vocabulary.

    Example:
        >>> import l2lopt
        >>> run = "runs/ptb"  # l2lopt.train("configs/ptb-small.toml", run) takes some minutes
        >>> l2lopt.sample(run, "the company", tokens=20, seed=1)  # doctest: +SKIP
        'the company said it expects to report a loss ...'
    """
    text = _sample(Path(run), "text", SampleRequest(prompt=prompt, tokens=tokens, temperature=temperature, seed=seed))
    assert isinstance(text, str)
    return text


def sample_images(run: str | Path, count: int = 8, seed: int = 0) -> list[Path]:
    """Images by the model that `train` has left, such as a DRAW, with the steps in which they come to be.

    Leaves `samples.png` (a row for each image, a column for each time step, the rectangle that is written drawn in) and
    `samples.gif` (every step) in the run's `figures/`, and gives their paths.

    Args:
        run: Folder of the run.
        count: Number of images.
        seed: Seed of the draws.

    Raises:
        UserError: For a folder without the run of a model of images.

    Example:
        >>> import l2lopt
        >>> run = "runs/draw"  # l2lopt.train("configs/draw-small.toml", run) takes some minutes
        >>> [path.name for path in l2lopt.sample_images(run, count=4)]  # doctest: +SKIP
        ['samples.png', 'samples.gif']
    """
    above_0("sample", count=count)
    paths = _sample(Path(run), "images", SampleRequest(count=count, seed=seed))
    assert isinstance(paths, list)
    return paths


paint = sample_images
"""The earlier name."""


def sample_kind(run: str | Path, options: Iterable[str] = ()) -> Literal["text", "images"] | None:
    """The kind of samples that the trained model in a folder makes; None for another folder.

    Args:
        run: Folder of the run.
        options: Names of options that a sample is asked for with.

    Raises:
        UserError: For an option that samples of this kind do not have.
    """
    config = training_config(Path(run))
    kind = None if config is None else from_python.class_of(config.optimisee).sample_kind
    for name in options:
        if kind is not None and name in _ONLY and _ONLY[name] != kind:
            expected, remedy = f"no {name} of {_SAMPLED[kind]}", "leave it out"
            raise UserError(f"sample: {run}", expected=expected, found=f"--{name}", remedy=remedy)
    return kind


def _sample(folder: Path, kind: Literal["text", "images"], request: SampleRequest) -> str | list[Path]:
    """A sample of a finished run, whose optimisee must make such samples."""
    choice, finished = saved(folder, _SAMPLED[kind])
    made, name = from_python.class_of(choice), choice if isinstance(choice, str) else choice.get("name")
    if made.sample_kind != kind:
        expected = _SAMPLED[kind] if made.sample_kind else "a trained language model or DRAW"
        found = f"the run of another optimisee, {made.__name__ if from_python.is_object(choice) else name}"
        raise UserError(str(folder), expected=expected, found=found, remedy=f"give the folder of {expected}")
    call, expected = "generate" if kind == "text" else "sample_images", "a run of a named class of optimisees"
    if from_python.is_object(choice):  # of which a config knows no options
        remedy = f"call {call} on that object, with the parameters of l2lopt.load_trained"
        raise UserError(str(folder), expected=expected, found=f"one made in Python, a {made.__name__}", remedy=remedy)
    entry, known = registry.find(optimisees.OPTIMISEES, "optimisee", str(name)), optimisees.OPTIMISEES.values()
    if entry is not made and made in known:  # which is built anew of its options, and a function has others
        remedy = f"call {call} on the optimisee that l2lopt.load_trained gives, with the parameters beside it"
        raise UserError(str(folder), expected=expected, found=f"one of the function {name!r}", remedy=remedy)
    return made.sample(finished, request)
