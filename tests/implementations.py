"""The tables of implementations: label → factory, in float64. A new one gets one line and inherits every law.

A label starts with the implementation's registered name, so that a test can ask for the ones that are missing.
"""

import atexit
import shutil
import tempfile
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from activities import LEFT_OUT, some_windows
from doubles import FactoredMoments, Steered
from PIL import Image
from torch import Tensor, nn

from l2lopt import cells, estimators, optimisers
from l2lopt.core.groupings import Computed, Exchange
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.optimisee import batch_rows, flat_loss, init_rows
from l2lopt.optimisers import inputs, rules
from l2lopt.optimisers.controls import CONTROLS
from l2lopt.optimisers.facts import FACTS
from optimisees import (
    Draw,
    InMemory,
    LanguageModel,
    ModuleOptimisee,
    Quadratic,
    Rosenbrock,
    SequenceLabelling,
    SequenceMetric,
    Transformer,
    augmented,
    autoencoder,
    convnet,
    logistic_regression,
    matrix_factorisation,
    mlp,
    parametric_convnet,
    parametric_language,
    parametric_mlp,
    resnet,
    vit,
)
from optimisees.data.text import EOS, Corpus, Vocabulary
from optimisees.labelling.labelled import Labelled, Sequences, by_position


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(module: nn.Module, seed: int = 0, scale: float = 0.5) -> nn.Module:
    """The module in float64 with parameters from N(0, scale²)."""
    module = module.double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(scale * normal(*parameter.shape, seed=100 * seed + index))
    return module


def step_inputs(
    grads: Tensor, params: Tensor, step: int | Tensor, loss: Any = None, layout: Any = None
) -> inputs.StepInputs:
    """What inputs and rules see of finite gradients; one tensor unless a layout is given."""
    layout = layout or Layout(("all",), ((grads.shape[-1] if grads.dim() else 1,),))
    finite = torch.ones_like(grads, dtype=torch.bool)
    return inputs.StepInputs(grads, params, torch.as_tensor(step), loss, layout, finite)


SQUARE = ("sru", "irc-sru", "ihc-sru", "no-irc-sru", "irc-t-lstm", "ihc-t-lstm")
"""The cells that need N = M."""


class Paired(nn.Module):
    """A cell on pairs as one on single columns: the features of the left, then those of the right."""

    def __init__(self, name: str, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__()
        self.cell, self.input_size = cells.make(name, input_size, hidden_size, **options), 2 * input_size

    def initial_state(self, x: Tensor) -> cells.CellState:
        return {name: self.joined(value) for name, value in self.cell.initial_state(self.split(x)).items()}

    def forward(self, x: Tensor, state: cells.CellState) -> Any:
        h, state = self.cell(self.split(x), {name: self.split(value) for name, value in state.items()})
        return self.joined(h), {name: self.joined(value) for name, value in state.items()}

    @staticmethod
    def split(x: Tensor) -> Tensor:
        return x.unflatten(0, (2, -1)).movedim(0, 1)

    @staticmethod
    def joined(x: Tensor) -> Tensor:
        return x.movedim(1, 0).flatten(0, 1)


def cell(name: str, **options: Any) -> Any:
    """The factory of a small cell, N = M where the cell needs it."""
    return partial(cells.make, name, 3, 3 if name in SQUARE else 5, **options)


IHCS = [name for name in cells.CELLS if name.startswith("ihc-")]
IRCS = [name for name in cells.CELLS if name.startswith("irc-")]
GATE_BIASED = ["sru", "t-lstm", "fastgrnn", *IRCS, *IHCS, "no-irc-sru"]
CELLS = {
    **{name: cell(name) for name in cells.CELLS},
    "rnn relu": cell("rnn", activation="relu"),
    **{
        f"gru {update} {reset} {biases}": cell("gru", update=update, reset=reset, biases=biases)
        for update in ("new", "kept")
        for reset in ("before", "after")
        for biases in ("none", "one", "two")
    },
    "lstm two biases": cell("lstm", biases="two"),
    "gru new with gate bias": cell("gru", gate_bias=True),
    "gru kept with gate bias": cell("gru", update="kept", gate_bias=True),
    "gru linear": cell("gru", activation="linear"),
    "gru relu": cell("gru", activation="relu"),
    "gru kept after linear": cell("gru", update="kept", reset="after", activation="linear"),
    "leaky linear": cell("leaky", activation="linear"),
    "leaky scalar without recurrence": cell("leaky", step="scalar", recurrent=False),
    **{f"{name} with gate bias": cell(name, gate_bias=True) for name in GATE_BIASED},
    **{f"{name} without gate input": cell(name, gate_input=False) for name in IHCS},
    **{f"{name} uvh": cell(name, gamma_on="uvh") for name in IHCS},
    "ihc-lstm uvh without gate input": cell("ihc-lstm", gamma_on="uvh", gate_input=False),
    "coupled-gru": partial(Paired, "coupled-gru", 3, 5),
    "coupled-gru siamese": partial(Paired, "coupled-gru", 3, 5, coupled=False),
    "coupled-gru held open": partial(Paired, "coupled-gru", 3, 5, least_coupling=0.3),
}
INPUTS = {
    "log-and-sign": inputs.LogAndSign,
    "rnnprop": inputs.RNNprop,
    "log-step": inputs.LogStep,
    "momenta": inputs.Momenta,
    "parameter": inputs.Parameter,
    "loss": inputs.Loss,
}
RULES = {
    "additive": rules.Additive,
    "bounded": rules.Bounded,
    "gated": rules.Gated,
    "gated with a learned scale": partial(rules.Gated, scale=3.0),
    "direction-and-magnitude": rules.DirectionAndMagnitude,
    "direction-and-magnitude without nominal": partial(rules.DirectionAndMagnitude, nominal=False),
    "direction-and-magnitude by fan-in": partial(rules.DirectionAndMagnitude, by_fan_in=True),
}


def learned(rule: Any, seed: int = 0, **options: Any) -> optimisers.Optimiser:
    """A small learned optimiser, its step large enough to matter within a few steps."""
    optimiser = optimisers.coordinatewise(hidden_size=3, rule=rule, **options)
    seeded(optimiser, seed)
    if hasattr(optimiser.rule, "log_scale"):
        nn.init.constant_(optimiser.rule.log_scale, 0.15)
    return optimiser


def hierarchical(*fewer: str, seed: int = 0, **options: Any) -> optimisers.Optimiser:
    """A small hierarchical optimiser that is well away from its harness, without some of the facts."""
    facts = [name for name in FACTS if name not in fewer]
    rule = optimisers.make("hierarchical", **{"hidden_size": 3, "facts": facts, "lr": 0.3, **options})
    return seeded(rule, seed)


OF_PARAMS = ("weight-size", "growth", "update-to-weight")
"""The facts that are functions of θ."""

OPTIMISERS = {
    "sgd": partial(optimisers.SGD, 0.05),
    "momentum": partial(optimisers.Momentum, 0.05),
    "adam": partial(optimisers.adam, 0.01),
    "adamw": partial(optimisers.AdamW, 0.01, weight_decay=0.1, warm_up=2, total=6),
    "normalised-adam": partial(optimisers.NormalisedAdam, 0.05, horizon=3.0),
    "nadamw": partial(optimisers.NAdamW, 0.01),
    "dowg": optimisers.DoWG,
    "lion": partial(optimisers.Lion, 0.01, weight_decay=0.1),
    "muon": partial(optimisers.Muon, 0.05),
    "normalised-muon": optimisers.NormalisedMuon,
    "normalised-muon of sign": partial(optimisers.NormalisedMuon, direction="sign", schedule="linear"),
    "nesterov": partial(optimisers.Momentum, 0.05, nesterov=True),
    "scheduled harness": lambda: optimisers.Scheduled(optimisers.NormalisedMuon(), lr=0.5),
    "scheduled": partial(optimisers.scheduled, "momentum", "linear", warm_up=2, total=6, final=0.2, lr=0.05),
    "coordinatewise additive": partial(learned, "additive"),
    "coordinatewise bounded": partial(learned, "bounded"),
    "coordinatewise gated": partial(learned, {"name": "gated", "forget_bias": 2.0, "input_bias": -1.0}),
    "coordinatewise direction-and-magnitude": partial(learned, "direction-and-magnitude"),
    "coordinatewise direction-and-magnitude by fan-in": partial(
        learned, {"name": "direction-and-magnitude", "by_fan_in": True}
    ),
    **{
        f"coordinatewise {rule} of {cell} with every input": partial(learned, rule, cell=cell, inputs=list(INPUTS))
        for rule in rules.RULES
        for cell in ("lstm", "ihc-lstm")
    },
    "small-fc": lambda: seeded(optimisers.SmallFC(hidden_size=3, step_scale=0.1)),
    "hierarchical": hierarchical,
    "hierarchical without facts of θ": partial(hierarchical, *OF_PARAMS, cell="none"),
    "hierarchical with every mixture": partial(hierarchical, *OF_PARAMS, cell="gru", controls=CONTROLS[:-1]),
}


class _Watch(Computed):
    """Notes the means that depend on a leaf."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def mean(self, grouping: Any, name: str, values: Tensor) -> Tensor:
        self.seen |= {name} if values.requires_grad else set()
        return super().mean(grouping, name, values)


def means_of_params(label: str) -> set[str]:
    """The means of what depends on θ that an optimiser takes, which are constants block by block."""
    rule, watch, params = (OPTIMISERS | DOUBLES)[label](), _Watch(), normal(7).requires_grad_()
    state = rule.init(Layout(("matrix", "vector"), ((2, 2), (3,))).meeting(watch), like=params)
    phi = {name: value.detach() for name, value in rule.phi().items()}
    rule.update_with(phi, normal(7, seed=1), state, params, loss=torch.ones((), dtype=torch.float64))
    return watch.seen


MANY = [label for label in OPTIMISERS if "every input" in label][1:]
MANY += [label for label in OPTIMISERS if label.startswith(("hierarchical", "small-fc"))]
"""So many that the tests of all but the first are slow ones."""


def each(table: Any, factories: bool = False) -> list[Any]:
    """The parameters of a test that runs over a table: its labels, or its factories."""
    return [
        pytest.param(make if factories else label, id=label, marks=[pytest.mark.slow] if label in MANY else [])
        for label, make in table.items()
    ]


def crossed(table: Any, *axes: Any) -> list[Any]:
    """The parameters of a test that runs over a table and further axes: all of them, of `MANY` the last of each."""
    crossings = []
    for case in each(table):
        (label,) = case.values
        values = product(*(axis[-1:] if label in MANY else axis for axis in map(list, axes)))
        crossings += [
            pytest.param(label, *more, marks=case.marks, id="-".join(map(str, (label, *more)))) for more in values
        ]
    return crossings


def orthogonalised_input() -> optimisers.Optimiser:
    """A coordinatewise rule that has the orthogonalised momentum among its inputs."""
    return learned("direction-and-magnitude", inputs=["orthogonalised", "rnnprop"])


DOUBLES = {
    "factored moments": lambda: FactoredMoments().double(),
    "per-tensor network that steers": lambda: Steered().double(),
    "orthogonalised input": orthogonalised_input,
}
"""Label → factory of rules whose coordinates meet in more than the library's own do."""
LEARNED = {label: make for label, make in OPTIMISERS.items() if list(make().parameters())}
GROUPED = DOUBLES | {label: make for label, make in LEARNED.items() if make().init(Layout(("x",), ((1,),))).groups}
"""Those and the learned optimisers with a state per tensor, row or column."""

FOLDED = {
    "lstm": "lstm",
    "lstm two biases": {"name": "lstm", "biases": "two"},
    "ihc-lstm": "ihc-lstm",
    "ihc-lstm with gate bias": {"name": "ihc-lstm", "gate_bias": True},
    "ihc-lstm without gate input": {"name": "ihc-lstm", "gate_input": False},
    "ihc-lstm uvh": {"name": "ihc-lstm", "gamma_on": "uvh"},
}
"""Label → the cells for which there are fast twins."""

EXACT_ESTIMATORS = {
    "backprop, first order": (1, partial(estimators.Backprop, 1)),
    "backprop, second order": (2, partial(estimators.Backprop, 2)),
}
"""Label → (order, factory) of the unrolls that give the exact meta-gradient of that order."""


def mixed(objective: Any = "loss", **options: Any) -> estimators.Mixed:
    """The mixture of few pairs; the options are evolution's."""
    evolution = {"name": "es", "pairs": 4, **options}
    return estimators.Mixed("blockwise", evolution, objective, exact_members="plus")


EVOLUTION = {
    "es": partial(estimators.EvolutionStrategies, 2),
    "pes": partial(estimators.EvolutionStrategies, 2, persistent=True),
}
"""Label → factory of those that know losses alone."""
RANDOM_ESTIMATORS = EVOLUTION | {"mixed": mixed}
"""Label → factory of the unrolls that give a random estimate."""
BLOCKWISE = {
    "blockwise": estimators.Blockwise,
    "blockwise in small blocks": partial(estimators.Blockwise, block=7),
    "blockwise, spilt": partial(estimators.Blockwise, block=7, spill=tempfile.gettempdir()),
}
"""Label → factory of those that are exact in first order but for means that depend on θ."""
DETERMINISTIC_ESTIMATORS = {label: make for label, (_, make) in EXACT_ESTIMATORS.items()} | BLOCKWISE
MODULE_ESTIMATORS = {"higher": (2, estimators.Higher)}
"""Likewise, of those that take single runs of a loss that knows its module, and refuse the rest."""

IMAGES = InMemory(normal(22, 2, 3, 3, seed=1), torch.arange(22) % 3, normal(9, 2, 3, 3, seed=2), torch.arange(9) % 3)


def module_optimisee(*layers: Any, **options: Any) -> ModuleOptimisee:
    """An optimisee of the layers that the factories make, on 22 small images in three classes."""
    options = {"batch_size": 5, "heldout": 0.3, "evaluation_size": 8} | options

    def factory() -> nn.Module:
        return nn.Sequential(*(layer() for layer in layers)).double()

    return ModuleOptimisee(factory, nn.functional.cross_entropy, IMAGES, **options)


def linear(*args: Any, **options: Any) -> Any:
    return partial(nn.Linear, *args, **options)


@cache
def pictures() -> str:
    """A folder of 24 + 9 images of 8×8 in three classes, which stays while the tests run."""
    home = Path(tempfile.mkdtemp(prefix="l2lopt-pictures-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return str(write_pictures(home / "pictures", train=8, test=3))


def write_pictures(folder: Path, size: tuple[int, int] = (8, 8), **counts: int) -> Path:
    """`counts` images of each of three classes as PNG in every split, of random colours."""
    colours = torch.Generator().manual_seed(0)
    for split, count in counts.items():
        for label in ("ant", "bee", "cat"):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (*size[::-1], 3), generator=colours, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / split / label / f"{number}.png")
    return folder


def small_resnet(**options: Any) -> ModuleOptimisee:
    """Two stages of one block on the pictures."""
    options = {"dtype": "float64", "batch_size": 5, "heldout": 0.3, "evaluation_size": 8} | options
    return resnet((1, 1), 2, pictures(), **options)


def on_pictures(make: Any, *sizes: Any) -> ModuleOptimisee:
    """A small classifier on the pictures."""
    made: ModuleOptimisee = make(*sizes, dataset=pictures(), batch_size=5, heldout=0.3, dtype="float64")
    return made


def changed(choice: Any, **options: Any) -> Any:
    """A small problem on digits with some of `augmented`'s changes."""
    return partial(augmented, {**choice, "dtype": "float64"}, **options)


SMALL_MLP = {"name": "mlp", "hidden": [3], "batch_size": 200}
SAMPLED = {
    "mlp": partial(mlp, (4,), batch_size=300, dtype="float64"),
    "augmented samples": changed(SMALL_MLP, permuted_pixels=True, label_noise=0.2, train_share=0.4),
    "convnet": partial(convnet, (2, 3), 4, batch_size=300, dtype="float64"),
    "resnet": small_resnet,
    "module with batch norm": partial(
        module_optimisee, nn.Flatten, linear(18, 4, bias=False), partial(nn.BatchNorm1d, 4), nn.Tanh, linear(4, 3)
    ),
    "module with dropout": partial(
        module_optimisee, nn.Flatten, linear(18, 6), nn.Tanh, partial(nn.Dropout, 0.4), linear(6, 3)
    ),
    "module with dropout2d": partial(
        module_optimisee, partial(nn.Conv2d, 2, 6, 2), partial(nn.Dropout2d, 0.3), nn.Tanh, nn.Flatten, linear(24, 3)
    ),
}
"""The optimisees that draw batches from a set of samples."""
TEXTS = Corpus(
    Vocabulary(("a", "b", "c", "d", EOS), "word"), *(torch.arange(count) ** 3 % 11 % 5 for count in (160, 60, 41))
)
LANGUAGE_MODELS = {
    "language-model": partial(LanguageModel, TEXTS, "irc-gru", 3, 4, 2, batch_size=3, window=6, dtype="float64"),
    "transformer": partial(Transformer, TEXTS, 4, 2, 2, 5, batch_size=3, evaluation_samples=8, dtype="float64"),
    "transformer with rms norm, tied, with dropout": partial(
        Transformer, TEXTS, 4, 1, 1, 5, norm="rms", tied=True, dropout=0.3, batch_size=3, dtype="float64"
    ),
}
SPOTS = InMemory(
    *(
        torch.randint(256, (n, *s), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
        for n, s in ((20, (2, 5, 4)), (20, ()), (9, (2, 5, 4)), (9, ()))
    )
)
DRAWS = {
    "draw": partial(
        Draw,
        SPOTS,
        decoder="ihc-lstm",
        hidden_size=4,
        latent_size=3,
        steps=3,
        read=2,
        write=3,
        batch_size=5,
        heldout=0.3,
        dtype="float64",
    ),
}
SEQUENCE_METRICS = {
    f"sequence-metric {encoder}": partial(
        SequenceMetric,
        test_subjects=LEFT_OUT,
        heldout_subjects=[7],
        encoder=encoder,
        hidden_size=3,
        per_class=2,
        evaluation_size=5,
        data=some_windows(),
        dtype="float64",
    )
    for encoder in ("siamese", "coupled")
}


def few_sequences(count: int, tokens: int | None, seed: int) -> Sequences:
    """Of 1 to 5 positions in three classes: tokens, or real inputs of two numbers."""
    lengths = [(seed + k) % 5 + 1 for k in range(count)]
    inputs = [
        normal(length, 2, seed=seed + k) if tokens is None else (torch.arange(length) + k) ** 2 % 7 % tokens
        for k, length in enumerate(lengths)
    ]
    return Sequences.of(
        inputs, [(torch.arange(length) + k) ** 3 % 3 for k, length in enumerate(lengths)], "{}:{}".format
    )


def few_labelled(tokens: int | None = None) -> Labelled:
    """A small task."""
    parts = [few_sequences(count, tokens, seed) for count, seed in ((8, 1), (4, 2), (5, 3))]
    names = ("a", "b", "c")
    return Labelled(names, *parts, partial(by_position, names), None if tokens is None else tuple("pqrst"[:tokens]))


LABELLING = {
    "sequence-labelling of tokens": partial(
        SequenceLabelling, few_labelled(4), "deep-gru", 2, 3, True, 2, 0.3, batch_size=3, dtype="float64"
    ),
    "sequence-labelling of signals": partial(
        SequenceLabelling, few_labelled(), "irc-gru", 1, 3, False, batch_size=3, dtype="float64"
    ),
}
OPTIMISEES = {
    "quadratic": partial(Quadratic, 4, "float64"),
    "quadratic, ill-conditioned, under noise": partial(Quadratic, 4, "float64", condition=50.0, noise=0.3),
    "matrix-factorisation": partial(matrix_factorisation, 8, 6, 2, 3, batch_size=7, dtype="float64"),
    "rosenbrock": partial(Rosenbrock, 4, dtype="float64"),
    "mlp with batch norm": partial(
        mlp, (4, 3), "gelu", batch_size=20, norm="batch", initialisation="orthogonal", gain=0.7, dtype="float64"
    ),
    "logistic-regression": partial(logistic_regression, batch_size=20, dtype="float64"),
    "convnet with layer norm": partial(convnet, (2, 3), 4, batch_size=20, norm="layer", dtype="float64"),
    "vit": partial(vit, width=4, layers=1, dataset="digits", batch_size=20, dtype="float64"),
    "parametric-mlp": partial(parametric_mlp, 1, ["digits"], evaluation_samples=50, dtype="float64"),
    "parametric-convnet": partial(parametric_convnet, 0, ["digits"], evaluation_samples=50, dtype="float64"),
    "autoencoder": partial(autoencoder, (5, 2), dataset="digits", batch_size=20, dtype="float64"),
    "autoencoder on images": partial(
        autoencoder, (3,), "tanh", "cross-entropy", pictures(), batch_size=5, heldout=0.3, size=4, dtype="float64"
    ),
    "augmented scales of a convnet": changed(
        {"name": "convnet", "channels": [2], "hidden": 3, "batch_size": 20}, reparametrised=3.0
    ),
    "augmented scales of a quadratic": changed({"name": "quadratic", "size": 3}, reparametrised=5.0),
    "parametric-language": partial(parametric_language, 4, 8, dtype="float64"),
    "mlp on images": partial(on_pictures, mlp, (3,)),
    "convnet on images": partial(on_pictures, convnet, (2, 2), 3),
    "resnet on changed images": partial(small_resnet, channels_last=True, crop_and_flip=True, evaluation_samples=6),
    **SAMPLED,
    **LANGUAGE_MODELS,
    **DRAWS,
    **SEQUENCE_METRICS,
    **LABELLING,
}


class Problem(NamedTuple):
    """What an unroll is called with."""

    update: Any
    loss: Any
    phi: Any
    carry: Carry
    steps: list[InnerStep]


MIXTURES = {
    "next batch": lambda now, after, heldout: (Target(after, 1.0),),
    "same batch": lambda now, after, heldout: (Target(now, 1.0),),
    "heldout": lambda now, after, heldout: (Target(heldout, 1.0),),
    "next batch and heldout": lambda now, after, heldout: (Target(after, 0.3), Target(heldout, 0.7)),
    "parts of two": lambda now, after, heldout: (Target(after, 0.3, "a"), Target(now, 0.2), Target(heldout, 0.5, "a")),
}
"""What a step measures after its update."""


def problem(
    optimiser: str = "coordinatewise additive",
    optimisee: str = "module with dropout",
    mixture: str = "next batch and heldout",
    seeds: int | tuple[int, ...] = (0, 1),
    length: int = 4,
) -> Problem:
    """A run for one seed, or rows for several."""
    rule, task, single = (OPTIMISERS | DOUBLES)[optimiser](), OPTIMISEES[optimisee](), isinstance(seeds, int)

    def batch(split: Any, step: int) -> Any:
        return task.batch(split, seeds, step) if single else batch_rows(task, split, seeds, step)

    if single:
        params, aux = task.init(seeds)
        layout, rows = Layout.of(params), ()
        theta = layout.ravel(params)
    else:
        layout, theta, aux = init_rows(task, seeds)
        rows = (len(seeds),)
    inner = [batch("inner", t) for t in range(length + 1)]
    steps = [InnerStep(inner[t], MIXTURES[mixture](inner[t], inner[t + 1], batch("heldout", t))) for t in range(length)]
    carry = Carry(theta, aux, rule.init(layout, rows, like=theta))
    return Problem(rule.update_with, flat_loss(task, layout), rule.phi(), carry, steps)


def with_means_constant(task: Problem, names: set[str] | None = None) -> Problem:
    """The problem with an update through whose means over groups, or those of these names, no gradient goes."""

    def update(phi: Any, grads: Any, state: Any, params: Any, *, loss: Any = None) -> Any:
        layout = state.layout
        change, after = task.update(
            phi, grads, state._replace(layout=layout.meeting(_Constant(layout.exchange, names))), params, loss=loss
        )
        return change, after._replace(layout=layout)

    return task._replace(update=update)


class _Constant(Exchange):
    """Means as another exchange gives them, through which, or those of some names, no gradient goes."""

    def __init__(self, inner: Exchange, names: set[str] | None) -> None:
        self._inner, self._names = inner, names

    def mean(self, grouping: Any, name: str, values: Tensor) -> Tensor:
        return self._inner.mean(grouping, name, self._cut(name, values))

    def mean_of_sums(self, grouping: Any, name: str, sums: Tensor) -> Tensor:
        return self._inner.mean_of_sums(grouping, name, self._cut(name, sums))

    def whole(self, name: str, function: Any, values: Tensor) -> Tensor:
        return self._inner.whole(name, function, values)

    def controls(self, grouping: Any, name: str, compute: Any, memory: Any) -> Any:
        return self._inner.controls(grouping, name, compute, memory)

    def _cut(self, name: str, values: Tensor) -> Tensor:
        return values.detach() if self._names is None or name in self._names else values
