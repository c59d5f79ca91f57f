"""Optimisees: models with a loss and data. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.optimisee import Optimisee
from optimisees.classifiers.convnet import convnet
from optimisees.classifiers.mlp import mlp
from optimisees.classifiers.resnet import resnet
from optimisees.data.datasets import InMemory, digits
from optimisees.draw.model import Draw
from optimisees.labelling.sequence_labelling import SequenceLabelling
from optimisees.language.language_model import LanguageModel
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
}


def make(name: str, **options: Any) -> Optimisee:
    """The optimisee called `name`; an unknown name or option is a `UserError` that lists the known ones."""
    optimisee: Optimisee = registry.make(OPTIMISEES, "optimisee", name, **options)
    return optimisee


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
    "convnet",
    "digits",
    "make",
    "mlp",
    "resnet",
]
