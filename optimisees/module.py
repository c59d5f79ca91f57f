"""Any `nn.Module` with a loss and data in memory, as an optimisee."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.kinds import Role, roles_in
from l2lopt.core.layout import Params
from l2lopt.core.precision import double
from l2lopt.core.seeding import generator, other_generators, seed_of, seeded
from l2lopt.core.types import Aux, Batch, ModuleParts
from l2lopt.optimisee import IndexedBatches, Optimisee, Split
from optimisees.data.datasets import InMemory, digest
from optimisees.data.sampling import Sampling

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_STOCHASTIC = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class ModuleOptimisee(Optimisee):
    """A model made by `factory`, trained to make `criterion(model(inputs), targets)` small.

    Buffers that the model moves in training (batch norm's running statistics) become Aux, and so do parameters that
    require no gradient, which stay as they are; a sample's gradient never changes the module itself. Dropout layers are
    given their masks by the batch, so that the loss stays pure. Models that draw random numbers otherwise, use a
    dropout layer twice, overwrite a buffer or change their inputs in place are refused.

    Args:
        factory: Function that makes a freshly initialised model, drawing from PyTorch's global generator.
        criterion: (outputs, targets) → mean loss.
        data: Training and test samples.
        batch_size: Samples a step, drawn without replacement within an epoch; an incomplete last batch is dropped.
        heldout: The share of training samples that each seed holds out of the split `inner`.
        device: Device of data and parameters.
        evaluation_size: Samples evaluated at once.
        metrics: name → (outputs, targets) → mean over samples, in test mode.
        augment: (inputs, generator) → inputs, of training batches; None leaves them as they are.
        evaluation_samples: Number of a split's samples in an evaluation, always the same ones of `train` and `test`;
            None: all.
        validation: Inputs and targets of a validation set, if the data have one. It is the split `heldout` then, and
            `inner` are all training samples.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        criterion: Callable[[Tensor, Tensor], Tensor],
        data: InMemory,
        batch_size: int = 128,
        heldout: float = 0.25,
        device: str | torch.device = "cpu",
        evaluation_size: int = 2000,
        metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        evaluation_samples: int | None = None,
        validation: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.factory, self.criterion, self.device = factory, criterion, torch.device(device)
        self.measures = dict(metrics or {})
        self.data = InMemory(*(part.to(self.device) for part in data))
        above_0("optimisee", evaluation_size=evaluation_size)
        self._validation = validation and (validation[0].to(self.device), validation[1].to(self.device))
        sizes, valid = (
            (len(data.train_inputs), len(data.test_inputs)),
            None if validation is None else len(validation[0]),
        )
        self.sampling = Sampling(*sizes, batch_size, heldout, evaluation_samples, valid)
        self.batch_size, self.evaluation_size, self.augment = batch_size, evaluation_size, augment
        module = _with_given_masks(self._fresh(0))
        if any(value.layout != torch.strided for value in (*module.parameters(), *module.buffers())):
            expected, remedy = (
                "dense parameters and buffers",
                "call to_dense(), or keep a constant as a plain attribute",
            )
            raise UserError("model", expected=expected, found="a sparse one", remedy=remedy)
        self._training = copy.deepcopy(module).train()
        self._testing = copy.deepcopy(module).eval()
        self._like = next((p.detach() for p in module.parameters()), self.data.train_inputs)  # its dtype is the model's
        self._masks = self._try()
        self._whole = {split: self._cut(split, 0) for split in self.sampling.alike}

    @property
    def validation(self) -> tuple[Tensor, Tensor] | None:
        """The inputs and targets of the validation set, if the data have one."""
        return self._validation

    def with_samples(self, data: InMemory, validation: tuple[Tensor, Tensor] | None = None) -> "ModuleOptimisee":
        """The same model and loss on other samples of the same form, drawn and divided in the same way.

        Args:
            data: Training and test samples.
            validation: The validation set, where the data have one.

        Raises:
            UserError: For fewer training samples than a batch has.
        """
        sizes = self.batch_size, self.sampling.heldout, self.device, self.evaluation_size
        rest = self.measures, self.augment, self.sampling.evaluation_samples, validation
        return ModuleOptimisee(self.factory, self.criterion, data, *sizes, *rest)

    def init(self, seed: int) -> tuple[Params, Aux]:
        """The factory's parameters and buffers under `seed`."""
        module = self._fresh(seed)
        params = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
        still = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}
        return params, still | {name: value.detach() for name, value in module.named_buffers()}

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """{"inputs", "targets", "masks"}."""
        index = self.sampling.drawn(split, seed, step, 1)[0].to(self.device)
        inputs, targets = (part[index] for part in self._samples(split))
        if self.augment and split in ("train", "inner"):
            inputs = self.augment(inputs, generator("augment", split, seed, step))
        masks = {}
        for name, (p, shape) in self._masks.items():
            # On the CPU, where the masks of a seed are the same whatever the device.
            chances = torch.full((len(index), *shape), 1 - p)
            kept = torch.bernoulli(chances, generator=generator(name, split, seed, step))
            masks[name] = kept.to(self._like) / max(1 - p, 1e-12)  # with p = 1 nothing is kept
        return {"inputs": inputs, "targets": targets, "masks": masks}

    def indexed_batches(self, split: Split) -> IndexedBatches | None:
        """Inputs and targets by their places, unless a batch has masks or is augmented."""
        if self._masks or (self.augment and split in ("train", "inner")):
            return None
        inputs, targets = self._samples(split)
        samples = {"inputs": inputs, "targets": targets, "masks": {}}
        return IndexedBatches(samples, partial(self.sampling.drawn, split))

    def fingerprint(self) -> dict[str, str]:
        """The digest of the samples."""
        return {"samples": digest((*self.data, *(self._validation or ())))}

    def epoch_start(self, split: Split, seed: int, number: int) -> int:
        """Passes of full batches."""
        return self.sampling.epoch_start(split, seed, number)

    def loss(self, params: Params, aux: Aux, batch: Batch) -> tuple[Tensor, Aux]:
        """The criterion in training mode."""
        moved = {name: value.clone() for name, value in aux.items()}  # the module updates its buffers in place
        outputs = functional_call(self._training, (params, moved, batch["masks"]), (batch["inputs"],))
        return self.criterion(outputs, batch["targets"]), moved

    def evaluate(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The criterion in test mode."""
        return self.criterion(self._outputs(params, aux, batch), batch["targets"])

    def metrics(self, params: Params, aux: Aux, batch: Batch) -> dict[str, Tensor]:
        """Each of the measures in test mode."""
        if not self.measures:
            return {}
        outputs = self._outputs(params, aux, batch)
        return {name: measure(outputs, batch["targets"]) for name, measure in self.measures.items()}

    def evaluation_batches(self, split: Split, seed: int) -> Iterator[tuple[Batch, int]]:
        """The samples of the split, or `evaluation_samples` of them, `evaluation_size` at a time."""
        yield from self._whole[split] if split in self._whole else self._cut(split, seed)

    def roles(self) -> Mapping[str, Role]:
        """As the module's classes say."""
        return roles_in(self._training)

    def module_parts(self) -> ModuleParts:
        """The model with given masks, and the criterion."""

        def unpack(batch: Batch) -> tuple[Tensor, Tensor, Params]:
            return batch["inputs"], batch["targets"], batch["masks"]

        return ModuleParts(self._training, self.criterion, unpack)

    def _fresh(self, seed: int) -> nn.Module:
        with seeded(seed_of("init", seed)):
            return self.factory().to(self.device)

    def _outputs(self, params: Params, aux: Aux, batch: Batch) -> Tensor:
        """The model's, in test mode."""
        # Copies: what a model does to its buffers here is not the run's.
        kept = {name: value.clone() for name, value in aux.items()}
        outputs: Tensor = functional_call(self._testing, (params, kept), (batch["inputs"],))
        return outputs

    def _samples(self, split: Split) -> tuple[Tensor, Tensor]:
        if split == "heldout" and self._validation is not None:
            return self._validation
        return self.data[2:] if split == "test" else self.data[:2]

    def _cut(self, split: Split, seed: int) -> list[tuple[Batch, int]]:
        inputs, targets = self._samples(split)
        members = self.sampling.evaluated(split, seed)
        if len(members) < len(inputs):
            inputs, targets = inputs[members.to(self.device)], targets[members.to(self.device)]
        pieces = zip(inputs.split(self.evaluation_size), targets.split(self.evaluation_size), strict=True)
        return [({"inputs": x, "targets": y}, len(x)) for x, y in pieces]

    def _try(self) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Forward passes on two samples: refuses what is not pure and sees each mask's rate and shape per sample."""
        trial, masks = copy.deepcopy(self._training), dict[str, tuple[float, tuple[int, ...]]]()
        hooks, values = list[RemovableHandle](), {name: value.clone() for name, value in trial.named_buffers()}

        def see(name: str, layer: GivenMask, x: Tensor) -> None:
            if name in masks:
                found, remedy = "two passes through it", "use a layer for each"
                raise UserError(f"dropout {name!r}", expected="one pass", found=found, remedy=remedy)
            masks[name] = layer.p, layer.shape_for(x)[1:]

        for name, layer in trial.named_modules():
            if isinstance(layer, GivenMask):
                hook = layer.register_forward_pre_hook(
                    lambda layer, args, name=f"{name}.mask": see(name, layer, args[0])
                )
                hooks.append(hook)
        buffers, samples = dict(trial.named_buffers()), self.data.train_inputs[: min(2, self.batch_size)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before, others = torch.get_rng_state(), other_generators()
            try:
                outputs = _check_inputs_stay(trial, samples)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                remedy = "raise it, or take another norm"
                raise UserError("batch_size", expected="2 or more, for batch norm", found="1", remedy=remedy) from error
            tested = copy.deepcopy(self._testing)
            tests = [_check_inputs_stay(tested, samples) for _ in range(2)]
            drew = not torch.equal(before, torch.get_rng_state()) or others != other_generators()
            for hook in hooks:
                hook.remove()
            for name, value in trial.named_buffers():
                if name in values and not _alike(value, values[name]):  # an expanded one could not be written
                    value.copy_(values[name])
            # Generators of the model's own, or of a GPU, show in what comes out.
            if drew or not (_alike(*tests) and _alike(outputs, _check_inputs_stay(trial, samples))):
                remedy = "use dropout layers, or write an Optimisee that puts the noise into its batch"
                raise UserError("model", expected="a loss that is pure", found="random numbers in it", remedy=remedy)
        for name, value in trial.named_buffers():
            if value is not buffers.get(name):
                remedy = "update it in place, for instance with copy_"
                raise UserError(f"buffer {name!r}", expected="a buffer that stays", found="a new one", remedy=remedy)
        return masks


def _check_inputs_stay(module: nn.Module, samples: Tensor) -> Any:
    """The outputs of a copy of the samples, which must stay as they are: they are used again."""
    inputs = samples.clone()
    version = inputs._version
    outputs = module(inputs)
    if inputs._version != version:
        expected, found = "a forward pass that leaves its inputs as they are", "inputs changed in place"
        remedy = "give its first layer inplace=False, or clone the inputs"
        raise UserError("model", expected=expected, found=found, remedy=remedy)
    return outputs


def _alike(one: Any, other: Any) -> bool:
    """Whether two outputs are equal up to rounding."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    return all(
        a.shape == b.shape and (a.layout != torch.strided or torch.allclose(double(a), double(b), 1e-4, 1e-6, True))
        for a, b in tensors
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose class has the highest score; outputs [samples, classes]."""
    return (outputs.argmax(1) == targets).to(outputs.dtype).mean()


class GivenMask(nn.Module):
    """Dropout whose mask comes from outside, as the buffer `mask`: 0 where dropped, 1 / (1 − p) where kept.

    Args:
        p: The share dropped.
        spatial: Number of the last axes in which the mask has size 1, so that whole channels are dropped. With 2 these
            are all axes after the first two: `torch.nn.Dropout2d` takes [n, channels, length] as well.
    """

    mask: Tensor

    def __init__(self, p: float, spatial: int = 0) -> None:
        super().__init__()
        self.p, self.spatial = p, spatial
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def shape_for(self, x: Tensor) -> tuple[int, ...]:
        """The mask's shape for an input like x."""
        kept = 2 if self.spatial == 2 else x.dim() - self.spatial
        return (*x.shape[:kept], *[1] * (x.dim() - kept))

    def forward(self, x: Tensor) -> Tensor:
        """The input times the mask in training, the input itself in testing."""
        return x * self.mask if self.training else x


def _with_given_masks(module: nn.Module) -> nn.Module:
    """The module with a `GivenMask` in the place of every dropout layer that drops anything."""
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            found, remedy = "momentum=None", "give batch norm a momentum"
            raise UserError(f"layer {name!r}", expected="a momentum, for vmap", found=found, remedy=remedy)
        if isinstance(layer, _STOCHASTIC):
            found, remedy = (
                type(layer).__name__,
                "use dropout, or write an Optimisee that puts the noise into its batch",
            )
            raise UserError(f"layer {name!r}", expected="a loss that is pure", found=found, remedy=remedy)
        spatial = next((n for n, kind in enumerate(_DROPOUTS) if type(layer).forward is kind.forward), None)
        if spatial is not None:
            # A subclass with a forward pass of its own stays, and is refused as it draws.
            assert isinstance(layer, _DROPOUTS)
            # One that drops nothing has no mask, or every batch would carry ones.
            given = GivenMask(layer.p, spatial) if layer.p else nn.Identity()
            if not name:
                return given
            parent, _, child = name.rpartition(".")  # a layer that stands at two places gets a mask at each
            setattr(module.get_submodule(parent), child, given)
    return module
