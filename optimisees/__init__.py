"""Optimisees: models with a loss and data. `make(name, **options)` builds one by name."""

from collections.abc import Callable, Mapping
from typing import Any

from l2lopt.core import registry
from l2lopt.core.errors import UserError
from l2lopt.core.registry import Choice
from l2lopt.optimisee import Optimisee
from optimisees.augmented import Reparametrised, changed_samples
from optimisees.autoencoder import autoencoder
from optimisees.classifiers.convnet import convnet
from optimisees.classifiers.logistic_regression import logistic_regression
from optimisees.classifiers.mlp import mlp
from optimisees.classifiers.resnet import resnet
from optimisees.classifiers.vit import vit
from optimisees.contract import check_optimisee
from optimisees.data.datasets import InMemory, digits
from optimisees.draw.model import Draw
from optimisees.labelling.sequence_labelling import SequenceLabelling
from optimisees.language.language_model import LanguageModel
from optimisees.language.transformer import Transformer
from optimisees.matrix_factorisation import matrix_factorisation
from optimisees.metric.sequence_metric import SequenceMetric
from optimisees.module import ModuleOptimisee
from optimisees.parametric import parametric_convnet, parametric_language, parametric_mlp
from optimisees.quadratic import Quadratic
from optimisees.rosenbrock import Rosenbrock


def augmented(
    optimisee: Choice,
    reparametrised: float = 1.0,
    permuted_pixels: bool = False,
    label_noise: float = 0.0,
    train_share: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> Optimisee:
    """Another optimisee, changed in a way that leaves it a problem of its kind; see `optimisees.augmented`.

    Args:
        optimisee: Choice of the optimisee, a name or a table of name and options.
        reparametrised: Largest factor on the parameters' scale: each tensor of each run has one of its own,
            log-uniform in [1/`reparametrised`, `reparametrised`]. Every optimisee allows it.
        permuted_pixels: Whether the pixels of all images are in another order, one for all.
        label_noise: Share of the training samples that get the label of another class.
        train_share: Share of the training samples that are left.
        seed: Seed of the order of the pixels, of the wrong labels and of the samples that are left.
        device: Device of data and parameters.

    Raises:
        UserError: For values out of range, and changes of samples that the optimisee does not have.
    """
    made = build(optimisee, device=device)
    if permuted_pixels or label_noise or train_share != 1:
        made = changed_samples(made, permuted_pixels, label_noise, train_share, seed)
    return made if reparametrised == 1 else Reparametrised(made, reparametrised)


OPTIMISEES: Mapping[str, Callable[..., Optimisee]] = {
    "augmented": augmented,
    "autoencoder": autoencoder,
    "draw": Draw,
    "quadratic": Quadratic,
    "matrix-factorisation": matrix_factorisation,
    "rosenbrock": Rosenbrock,
    "logistic-regression": logistic_regression,
    "mlp": mlp,
    "convnet": convnet,
    "language-model": LanguageModel,
    "parametric-convnet": parametric_convnet,
    "parametric-language": parametric_language,
    "parametric-mlp": parametric_mlp,
    "resnet": resnet,
    "vit": vit,
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
        UserError: For a mistake in the choice, for a function that gives something else, and for an optimisee of a
            module's own that breaks the contract.
    """
    optimisee = registry.build(OPTIMISEES, "optimisee", choice, **extra)
    if not isinstance(optimisee, Optimisee):
        found, remedy = type(optimisee).__name__, "derive it from l2lopt.optimisee.Optimisee"
        raise UserError(f"optimisee {_name(choice)!r}", expected="an Optimisee", found=found, remedy=remedy)
    check_optimisee(optimisee)
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
    "Rosenbrock",
    "SequenceLabelling",
    "SequenceMetric",
    "Transformer",
    "artefact_files",
    "augmented",
    "autoencoder",
    "build",
    "check_optimisee",
    "class_of",
    "convnet",
    "digits",
    "logistic_regression",
    "make",
    "matrix_factorisation",
    "mlp",
    "parametric_convnet",
    "parametric_language",
    "parametric_mlp",
    "resnet",
    "vit",
]
