"""Neural networks that learn to be optimisers: meta-train them, compare them, use them.

`meta_train`, `evaluate`, `train`, `benchmark`, `controls`, `sample`, `sample_images`, `reproduce`, `plot` and `demo` do
what the command line does, and the first five also work on your own model, loss and data, of which `make_optimisee`
makes an optimisee; `load_trained` gives a model that `train` has left, and `progress` shows how far long work is.
`save` and `load` write and read learned optimisers, `list_weights` names those that come with the package, `push` and
`pull` share them, and `LearnedOptimizer` puts one into any training loop; `parameter_groups` tells it what a module's
parameters are.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from l2lopt.core.errors import UserError
    from l2lopt.experiments.benchmark import benchmark
    from l2lopt.experiments.comparison_study import reproduce
    from l2lopt.experiments.controls import controls
    from l2lopt.experiments.demo import demo
    from l2lopt.experiments.make_optimisee import make_optimisee
    from l2lopt.experiments.publish import publish
    from l2lopt.experiments.runs import evaluate, meta_train, plot, train
    from l2lopt.experiments.samples import paint as paint  # the earlier name of sample_images
    from l2lopt.experiments.samples import sample, sample_images
    from l2lopt.experiments.trained_model import load_trained
    from l2lopt.terminal import progress
    from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer
    from l2lopt.torch_optim.parameter_groups import parameter_groups
    from l2lopt.weights.files import list_weights, load, save
    from l2lopt.weights.hub import pull, push

_HOME = {
    "LearnedOptimizer": "torch_optim",
    "UserError": "core.errors",
    "benchmark": "experiments.benchmark",
    "controls": "experiments.controls",
    "demo": "experiments.demo",
    "evaluate": "experiments.runs",
    "list_weights": "weights.files",
    "load": "weights.files",
    "load_trained": "experiments.trained_model",
    "make_optimisee": "experiments.make_optimisee",
    "meta_train": "experiments.runs",
    "paint": "experiments.samples",
    "parameter_groups": "torch_optim.parameter_groups",
    "plot": "experiments.runs",
    "progress": "terminal",
    "publish": "experiments.publish",
    "pull": "weights.hub",
    "push": "weights.hub",
    "reproduce": "experiments.comparison_study",
    "sample": "experiments.samples",
    "sample_images": "experiments.samples",
    "save": "weights.files",
    "train": "experiments.runs",
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for, so that the command line answers at once."""
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, imported or not: what a notebook offers after `l2lopt.`."""
    return sorted([*__all__, "__version__"])


__all__ = [
    "LearnedOptimizer",
    "UserError",
    "benchmark",
    "controls",
    "demo",
    "evaluate",
    "list_weights",
    "load",
    "load_trained",
    "make_optimisee",
    "meta_train",
    "parameter_groups",
    "plot",
    "progress",
    "publish",
    "pull",
    "push",
    "reproduce",
    "sample",
    "sample_images",
    "save",
    "train",
]
