"""An optimisee from any `nn.Module`, a loss and samples."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator, other_generators, seeded
from optimisees import InMemory, ModuleOptimisee

Samples: TypeAlias = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
"""Inputs and targets with the samples on the first axis, or a map-style data set of such pairs, or its loader."""

_CHUNK = 256
"""Samples that are collated at once."""
_MISTAKES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""Errors of PyTorch, or of the caller's functions, that a batch leads to which does not go through them."""


def make_optimisee(
    model: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    train: Samples,
    test: Samples | float = 0.2,
    *,
    batch_size: int | None = None,
    heldout: float = 0.25,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    evaluation_samples: int | None = None,
    device: str | torch.device = "cpu",
) -> ModuleOptimisee:
    """An optimisee for `meta_train`, `evaluate` and `train`: loss(model(inputs), targets) on your samples.

    Every run begins with a fresh model and draws its own batches from its seed, so that it gives the same result each
    time. The samples are therefore read once, in the order of their indices, and kept in memory on `device`. Of a
    `DataLoader` the data set, `collate_fn` and `batch_size` are used; its own order, `drop_last` and workers are not.
    A data set that gives other samples each time (random augmentation) is refused: pass `augment` instead.

    Batch norm's running statistics are part of a run's state, and dropout layers get their masks from the run's seed.
    A model that draws random numbers in any other way is refused; see `optimisees.ModuleOptimisee`.
    Runs side by side go through model and loss under `torch.func.vmap`, which refuses to branch on numbers, to index by
    a mask and `.item()`: such models run one at a time, with `validation.rows` and `evaluation.rows` 1.

    Args:
        model: A function without arguments that makes the model, such as its class. It is called under the run's
            seed and must make a new one each time, its initial values from PyTorch's global generator.
        loss: (outputs, targets) → mean over samples.
        train: Training samples.
        test: Test samples, or the share of the training samples that are put aside for testing, in (0, 1).
        batch_size: Samples per step; None: that of the loader, or else 128, or all of them if there are fewer. The
            incomplete last batch of an epoch is dropped.
        heldout: The share of training samples that a run holds out where its settings measure held-out samples.
        metrics: Name → (outputs, targets) → mean over samples, measured beside the loss in test mode.
        augment: (inputs, generator) → inputs, applied to every training batch; it must draw from that generator alone.
        evaluation_samples: The number of samples of a split that an evaluation takes; None: all.
        device: The device of samples and parameters.

    Raises:
        UserError: For samples that are not pairs of tensors, or change each time; for a model that is not made anew or
            draws random numbers in a forward pass; and where a batch does not go through model and loss.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import l2lopt
        >>> inputs = torch.randn(200, 4)
        >>> targets = (inputs.sum(1) > 0).long()
        >>> model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> problem = l2lopt.make_optimisee(model, nn.functional.cross_entropy, (inputs, targets), batch_size=20)
        >>> params, aux = problem.init(seed=0)
        >>> sorted(params)
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    _check_factory(model)
    if isinstance(loss, type):
        found, remedy = f"the class {loss.__name__}", f"write {loss.__name__}()"
        raise UserError("loss", expected="a function of outputs and targets", found=found, remedy=remedy)
    training = _read(train, "train")
    data = _with_test(training, test)
    if batch_size is None:
        given = train.batch_size if isinstance(train, DataLoader) else None
        batch_size = min(given or 128, len(data.train_inputs))
    where, remedy = "loss(model(inputs), targets)", "check the shapes and dtypes of samples, model and loss"
    try:
        options: dict[str, Any] = {"metrics": metrics, "augment": augment, "evaluation_samples": evaluation_samples}
        optimisee = ModuleOptimisee(model, loss, data, batch_size, heldout, device, **options)
        _check_augment(optimisee)
        _check_loss(where, _first_loss(optimisee))
        _check_reach(optimisee)
        where = "metrics, and the loss on test samples"
        _first_evaluation(optimisee)
        where, remedy = "the largest labels and indices", "count from 0, and give the model's layers their sizes"
        _check_range(optimisee)
    except UserError:
        raise
    except _MISTAKES as error:
        raise UserError(where, expected="a batch that goes through", found=str(error), remedy=remedy) from error
    return optimisee


def _check_augment(optimisee: ModuleOptimisee) -> None:
    """Refuses augmentation that gives no inputs, or draws from other generators than its own.

    With those, optimisers would meet different batches.
    """
    if optimisee.augment is None:
        return
    others = other_generators()
    try:
        first, again = (optimisee.batch("train", 0, 0)["inputs"] for _ in range(2))
    except _MISTAKES as error:
        expected, remedy = "inputs that it can change", "check augment(inputs, generator)"
        raise UserError("augment", expected=expected, found=str(error), remedy=remedy) from error
    if not isinstance(first, Tensor) or len(first) != optimisee.batch_size:
        found = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        expected, remedy = f"a tensor of {optimisee.batch_size} inputs", "return the inputs alone, one for each given"
        raise UserError("augment", expected=expected, found=found, remedy=remedy)
    if not _same(first, again) or others != other_generators():
        expected, remedy = "equal samples of equal generators", "draw from the generator that it is given, alone"
        raise UserError("augment", expected=expected, found="other random numbers", remedy=remedy)


def _first_evaluation(optimisee: ModuleOptimisee) -> None:
    """Measures the first test samples, so that mistakes show before the end of a run."""
    for name in ("loss", "stage", "step"):  # those of a line of the log
        if name in optimisee.measures:
            remedy = "choose another name"
            raise UserError("metrics", expected="names beside the log's own", found=repr(name), remedy=remedy)
    batch, _ = next(optimisee.evaluation_batches("test", 0))
    with torch.no_grad():
        params, aux = optimisee.init(0)
        optimisee.evaluate(params, aux, batch)
        found = optimisee.metrics(params, aux, batch)
    for name, value in found.items():
        if torch.as_tensor(value).numel() != 1:
            shape, remedy = f"shape {list(value.shape)}", "give its mean over samples"
            raise UserError(f"metric {name!r}", expected="one number", found=shape, remedy=remedy)


def _check_range(optimisee: ModuleOptimisee) -> None:
    """Measures the samples with the least and the greatest labels and indices, which a run might meet after hours."""
    params, aux = optimisee.init(0)
    data = optimisee.data
    for samples in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        extremes: set[int] = set()
        for values in samples:
            if _counts(values):
                each = values.flatten(1) if values.dim() > 1 else values[:, None]
                extremes |= {int(each.amin(1).argmin()), int(each.amax(1).argmax())}
        if extremes:
            # Beside some others, as a loss may be one of several samples.
            size = min(optimisee.batch_size, optimisee.evaluation_size, len(samples[0]))
            inputs, targets = (part[sorted(extremes | {*range(size)})] for part in samples)
            with torch.no_grad():
                optimisee.evaluate(params, aux, {"inputs": inputs, "targets": targets, "masks": {}})


def _counts(values: Tensor) -> bool:
    """Whether these are whole numbers, as labels and indices are, and there are some."""
    other = values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
    return not other and values.numel() > 0


def _check_loss(where: str, value: Tensor) -> None:
    """Refuses a loss that is not one number of the parameters."""
    if value.dim() or not value.requires_grad:
        found = f"shape {list(value.shape)}" if value.dim() else "one that does not depend on the parameters"
        remedy = 'give a loss with reduction="mean"' if value.dim() else "check that the model's outputs are used"
        raise UserError(where, expected="a mean over samples, one number", found=found, remedy=remedy)


def _check_factory(model: Any) -> None:
    """Refuses what does not make a fresh module, alike under equal seeds, at every call."""
    expected = "a function that makes a fresh nn.Module"
    if isinstance(model, nn.Module):
        remedy = "write lambda: in front of the expression that makes it"
        raise UserError("model", expected=expected, found=f"a {type(model).__name__}", remedy=remedy)
    if not callable(model):
        raise UserError("model", expected=expected, found=repr(model), remedy="pass the model's class, or a lambda")
    try:
        inspect.signature(model, follow_wrapped=False).bind()
    except TypeError as error:  # the class of a layer, for instance
        remedy = "write lambda: in front of a call with its arguments"
        raise UserError("model", expected="a function without arguments", found=str(error), remedy=remedy) from error
    except ValueError:  # it has no signature that can be read
        pass
    with seeded(0):
        first = model()
    if not isinstance(first, nn.Module):
        found = f"one that makes a {type(first).__name__}"
        raise UserError("model", expected=expected, found=found, remedy="return the module")
    if any(nn.parameter.is_lazy(value) for value in (*first.parameters(), *first.buffers())):
        found, remedy = "lazy parameters", "give the layers their sizes, or call the module once inside the function"
        raise UserError("model", expected=expected, found=found, remedy=remedy)
    with seeded(0):
        second = model()
    if {id(value) for value in first.parameters()} & {id(value) for value in second.parameters()}:
        remedy = "make the layers inside the function"
        raise UserError("model", expected=expected, found="the same parameters twice", remedy=remedy)
    one, other = [*first.parameters(), *first.buffers()], [*second.parameters(), *second.buffers()]
    if len(one) != len(other) or not all(map(_same, one, other)):
        remedy = "draw them from PyTorch's global generator, as the layers of torch.nn do"
        found = "others under the same seed"
        raise UserError("model", expected="initial values that follow from the seed", found=found, remedy=remedy)


def _first_loss(optimisee: ModuleOptimisee) -> Tensor:
    """The loss on the first batch, its gradient taken if it is one number."""
    params, aux = optimisee.init(0)
    params = {name: value.requires_grad_() for name, value in params.items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        value, _ = optimisee.loss(params, aux, optimisee.batch("train", 0, 0))
    for warning in told:
        if "Using a target size" in str(warning.message):  # [n, 1] and [n] are broadcast to a loss of all pairs
            found, remedy = str(warning.message).partition(". ")[0], "give both one shape, by targets[:, None], say"
            raise UserError("loss(model(inputs), targets)", expected="equal shapes", found=found, remedy=remedy)
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if value.requires_grad and not value.dim():
        value.backward()
    for name, param in params.items():
        if param.grad is not None and param.grad.layout != torch.strided:
            found, remedy = "a sparse one", "make its nn.Embedding with sparse=False"
            raise UserError(f"parameter {name!r}", expected="a dense gradient", found=found, remedy=remedy)
    return value


def _check_reach(optimisee: ModuleOptimisee) -> None:
    """Refuses parameters that a loss reaches past the run's own, which no optimiser moves.

    A closure is not copied with its module: what it holds on to is the module that it was made in.
    """
    params, aux = optimisee.init(0)
    if optimisee.loss(params, aux, optimisee.batch("train", 0, 0))[0].requires_grad:
        expected, found = "parameters that are those of the run", "others, which no optimiser would move"
        remedy = (
            "in forward reach layers by self, not by a lambda, a hook or a list; a loss has no parameters of its own"
        )
        raise UserError("loss(model(inputs), targets)", expected=expected, found=found, remedy=remedy)


def _with_test(training: tuple[Tensor, Tensor], test: Samples | float) -> InMemory:
    """The training samples, and those for testing, which are given or a share of them."""
    if isinstance(test, float | int) and not isinstance(test, bool):
        return _split(training, test)
    return InMemory(*training, *_read(test, "test"))


def _split(samples: tuple[Tensor, Tensor], share: float) -> InMemory:
    """The samples with a share of them, always the same, put aside for testing."""
    inputs, targets = samples
    count = round(share * len(inputs)) if 0 < share < 1 else 0
    if not 0 < count < len(inputs):
        found = f"{share} of {len(inputs)}"
        raise UserError("test", expected="a share that leaves samples to both", found=found, remedy="change the value")
    order = torch.randperm(len(inputs), generator=generator("test samples")).to(inputs.device)
    for_test, for_training = order[:count].sort().values, order[count:].sort().values
    return InMemory(inputs[for_training], targets[for_training], inputs[for_test], targets[for_test])


def _read(source: Any, where: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of any `Samples`."""
    if isinstance(source, DataLoader):
        _check_loader(source, where)
        return _indexed(source.dataset, source.collate_fn, where)
    if isinstance(source, Dataset):
        return _indexed(source, default_collate, where)
    return _pair(source, where)


def _check_loader(loader: DataLoader[Any], where: str) -> None:
    """Refuses a loader that says more than in which batches all samples come."""
    remedy = "pass the data set that it reads, or torch.utils.data.Subset of it"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return  # refused with the data set
    count = len(loader.dataset)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UserError(where, expected="a DataLoader with a batch_size", found="a batch_sampler", remedy=remedy)
    sampler = loader.sampler
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count
    if not shuffles and type(sampler) is not SequentialSampler:
        expected = "a DataLoader of all samples, in order or shuffled: runs draw their own batches"
        raise UserError(where, expected=expected, found=type(sampler).__name__, remedy=remedy)


def _indexed(dataset: Any, collate: Callable[[list[Any]], Any], where: str) -> tuple[Tensor, Tensor]:
    """The samples 0, 1, … of a map-style data set."""
    if isinstance(dataset, IterableDataset):
        found, remedy = "an IterableDataset", "read it into tensors, or write an Optimisee"
        raise UserError(where, expected="a data set with indices and a length", found=found, remedy=remedy)
    if not hasattr(dataset, "__len__"):
        found, remedy = f"{type(dataset).__name__} without a length", "give it a __len__, or read it into tensors"
        raise UserError(where, expected="a data set with indices and a length", found=found, remedy=remedy)
    count = len(dataset)

    def chunk(low: int) -> tuple[Tensor, Tensor]:
        samples = [dataset[index] for index in range(low, min(low + _CHUNK, count))]
        try:
            return _pair(collate(samples), where)
        except (RuntimeError, TypeError) as error:  # such as those of `default_collate`
            remedy = "pad or resize them, or pass a DataLoader with a collate_fn"
            raise UserError(where, expected="samples of one shape", found=str(error), remedy=remedy) from error

    if not count:
        raise UserError(where, expected="samples", found="none", remedy="give some")
    chunks = [chunk(0)]
    if not all(_same(*parts) for parts in zip(chunks[0], chunk(0), strict=True)):
        remedy = "leave random transforms out of the data set, and pass augment="
        raise UserError(where, expected="the same samples each time", found="others the second time", remedy=remedy)
    chunks += [chunk(low) for low in range(_CHUNK, count, _CHUNK)]
    for shapes in ({part.shape[1:] for part in parts} for parts in zip(*chunks, strict=True)):
        if len(shapes) == 1:
            continue
        found = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise UserError(where, expected="samples of one shape", found=found, remedy="pad or resize them")
    inputs, targets = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return inputs, targets


def _pair(found: Any, where: str) -> tuple[Tensor, Tensor]:
    """A pair of tensors of equal length, from a pair of tensors or arrays."""
    expected = "a pair (inputs, targets) of tensors"
    if not isinstance(found, tuple | list) or len(found) != 2:
        kind = f"{len(found)} parts" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
        raise UserError(
            where, expected=expected, found=kind, remedy="pass a pair, or a data set whose samples are pairs"
        )
    for part in found:
        if not isinstance(part, Tensor | np.ndarray):
            kind = f"a {type(part).__name__} in it"
            raise UserError(where, expected=expected, found=kind, remedy="make tensors of both")
        if isinstance(part, Tensor) and (part.is_nested or part.layout != torch.strided):
            kind = "a nested one" if part.is_nested else f"a {str(part.layout).removeprefix('torch.')} one"
            raise UserError(where, expected="dense tensors", found=kind, remedy="pad it, or call its to_dense()")
    try:
        inputs = _tensor(found[0]).detach()
        targets = inputs if found[1] is found[0] else _tensor(found[1]).detach()
    except TypeError as error:  # an array of strings or of objects
        remedy = "number the classes, for instance"
        raise UserError(where, expected="numbers", found=str(error), remedy=remedy) from error
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        shapes = f"shapes {list(inputs.shape)} and {list(targets.shape)}"
        raise UserError(where, expected="as many inputs as targets", found=shapes, remedy="samples are the first axis")
    return inputs, targets


def _tensor(part: Tensor | np.ndarray) -> Tensor:
    """A tensor of the same numbers, of its own, as the caller's may change later; a mapped file's as it is."""
    if isinstance(part, np.ndarray):
        native = part.dtype.isnative and all(stride >= 0 for stride in part.strides)
        if isinstance(part, np.memmap) and part.flags.writeable and native:
            return torch.as_tensor(part)
        part = part if native else part.astype(part.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(part).clone()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, not-a-numbers included; sparse ones, which are refused later, by their layout."""
    if one.layout != torch.strided:
        return one.layout == other.layout
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
