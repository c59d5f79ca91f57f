"""Optimisees: models with a loss and data. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.optimisee import Optimisee
from optimisees.classifiers.convnet import convnet
from optimisees.classifiers.mlp import mlp
from optimisees.classifiers.resnet import resnet
from optimisees.data.datasets import InMemory, digits
from optimisees.draw.model import Draw
from optimisees.labelling.sequence_labelling import SequenceLabelling
from optimisees.language.language_model import LanguageModel
from optimisees.language.transformer import Transformer
from optimisees.metric.sequence_metric import SequenceMetric
from optimisees.module import ModuleOptimisee
from optimisees.quadratic import Quadratic

OPTIMISEES: Mapping[str, Callable[..., Optimisee]] = {
    "draw": Draw,
    "quadratic": Quadratic,
    "mlp": mlp,
    "convnet": convnet,
    "language-model": LanguageModel,
    "resnet": resnet,
    "sequence-metric": SequenceMetric,
    "sequence-labelling": SequenceLabelling,
    "transformer": Transformer,
}


def make(name: str, **options: Any) -> Optimisee:
    """The optimisee called `name`; an unknown name or option is a `UserError` that lists the known ones.

    Example:
        >>> import optimisees
        >>> optimisees.make("quadratic", size=3).init(0)[0]["theta"].shape
        torch.Size([3])
    """
    return build({"name": name, **options})


def build(choice: Choice, **extra: Any) -> Optimisee:
    """The optimisee of a choice: a name in `OPTIMISEES` or "module:function", or a mapping of name and options.

    Args:
        choice: Name, or mapping with the key `name`.
        extra: Options that the choice must leave to the caller, such as the device.

    Raises:
        UserError: For a mistake in the choice, and for a function that gives something else.
    """
    optimisee = registry.build(OPTIMISEES, "optimisee", choice, **extra)
    if not isinstance(optimisee, Optimisee):
        found, remedy = type(optimisee).__name__, "derive it from l2lopt.optimisee.Optimisee"
        raise UserError(f"optimisee {_name(choice)!r}", expected="an Optimisee", found=found, remedy=remedy)
    return optimisee


def class_of(choice: Choice) -> type[Optimisee]:
    """The class that a choice builds, whose class methods need no data; of a function, the annotated result."""
    made = registry.product(registry.find(OPTIMISEES, "optimisee", _name(choice)))
    return made if isinstance(made, type) and issubclass(made, Optimisee) else Optimisee


def artefact_files() -> set[str]:
    """Patterns, relative to a run's folder, of the artefacts of all registered optimisees."""
    return {pattern for name in OPTIMISEES for pattern in class_of(name).artefact_files}


def _name(choice: Choice) -> str:
    return choice if isinstance(choice, str) else str(choice.get("name"))


__all__ = [
    "OPTIMISEES",
    "Draw",
    "InMemory",
    "LanguageModel",
    "ModuleOptimisee",
    "Optimisee",
    "Quadratic",
    "SequenceLabelling",
    "SequenceMetric",
    "Transformer",
    "artefact_files",
    "build",
    "class_of",
    "convnet",
    "digits",
    "make",
    "mlp",
    "resnet",
]
