"""The Triton kernels against plain PyTorch and float64: on a GPU where there is one, else in Triton's interpreter."""

import copy
import os
import subprocess
import sys
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import laws
import pytest
import torch
from implementations import FOLDED, INPUTS, RULES, normal, seeded
from oracles import replayed
from torch import nn
from torch.utils import _pytree as pytree
from twins import BAD, learned, problem, reference, rolled, split, window

pytest.importorskip("triton")

from l2lopt import estimators, kernels, optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.types import Carry, InnerStep, Target, stack
from l2lopt.estimators.window import BlockUpdate
from l2lopt.kernels import triton
from l2lopt.kernels.triton import device, device_replay
from l2lopt.kernels.triton import replay as on_gpu
from l2lopt.optimisers import Coordinatewise
from l2lopt.torch_optim.flat_vectors import FlatVector

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's, for σ(−100) = 0

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [31, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 301, 4099))]
OFTEN = {(cell, rule) for cell in ("lstm", "ihc-lstm") for rule in ("gated", "direction-and-magnitude")}
EACH = [
    pytest.param(cell, rule, marks=[] if (cell, rule) in OFTEN else pytest.mark.slow)
    for cell in FOLDED
    for rule in RULES
]
EPS = 2.0**-23
main_rules = pytest.mark.parametrize("rule", ["additive", "bounded", "gated", "direction-and-magnitude"])
main_cells = pytest.mark.parametrize("cell", ["lstm", "ihc-lstm"])


@pytest.fixture
def poisoned():
    """Memory that is not written yet holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def replay(optimiser, phi, block):
    """The block's part of the meta-gradient."""
    return on_gpu.replay(optimiser, phi, block, {}).phi


def moved(tree, dtype=None):
    """Tensors to the device, floating ones in `dtype`."""

    def move(value):
        return value.to(DEVICE, dtype if value.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, move, tree)


def run(optimiser, update, size, batch=(), steps=3, kept=None, first=torch.float32, dtype=torch.float32):
    """What each step gives, with gradients of which some are not finite.

    The state is rounded to `kept` after each step; with `first` it begins in that dtype, and the update rounds it.
    """
    layout, gradients, *rest = problem(size, batch, torch.float64, steps)
    for t, value in enumerate(BAD[:steps]):
        gradients[t, ..., t::5] = value
    gradients, *rest = moved((gradients.float(), *(part.float() for part in rest)), dtype)
    state = optimiser.init(layout, batch, like=gradients)
    if kept is None:
        return rolled(update, rounded(state, first) if first == torch.bfloat16 else state, gradients, *rest)
    return rolled(rounding(update, kept), rounded(state, kept), gradients, *rest)


def rounded(state, dtype):
    return state._replace(coordinates={name: value.to(dtype) for name, value in state.coordinates.items()})


def rounding(update, dtype):
    """An update in its own precision on a state that is kept in `dtype`."""

    def rounds(grads, state, params, *, loss=None):
        change, after = update(grads, rounded(state, grads.dtype), params, loss=loss)
        return change, rounded(after, dtype)

    return rounds


def assert_errs_at_most_twice_as_much(found, plain, exact):
    """By the norm of each tensor's error; what float32's unit in the last place makes of its norm is nobody's error."""
    leaves = [pytree.tree_flatten_with_path(tree)[0] for tree in (found, plain, exact)]
    for (path, one), (_, other), (_, true) in zip(*leaves, strict=True):
        if not isinstance(true, torch.Tensor) or not true.is_floating_point():
            assert (one == true).all() if isinstance(true, torch.Tensor) else one == true, path
            continue
        errs, may = ((value.double() - true.double()).norm() for value in (one, other))
        assert errs <= 2 * may + EPS * true.double().norm(), (pytree.keystr(path), errs, may, true.norm())


@pytest.mark.parametrize(("cell", "rule"), EACH)
def test_the_step_is_the_references(cell, rule):
    """With every input at once, two rows, blocks that end within tensors."""
    optimiser = reference(cell, rule=rule, dtype=torch.float32).to(DEVICE)
    twin = kernels.fuse(optimiser, "triton")
    wanted = run(optimiser, optimiser.update, 97, (2,), 2)
    updated = run(optimiser, twin.update, 97, (2,), 2)
    laws.assert_close(updated, wanted, 5e-6)
    laws.assert_same(run(optimiser, twin.update_, 97, (2,), 2), updated)


@pytest.mark.parametrize(("cell", "rule"), EACH)
def test_the_way_back_is_autograds(cell, rule):
    # log_scale's gradient is what 186 terms leave of 300 times its size: against float64 both err by up to 2e-5 there.
    optimiser = learned(cell, rule, INPUTS)
    block = moved(window(optimiser, 3, (2,), 31, dtype=torch.float32))
    phi = optimiser.to(DEVICE).phi()
    laws.assert_close(replay(optimiser, phi, block), replayed(optimiser, phi, block), 3e-5)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@main_rules
@main_cells
def test_a_step_errs_at_most_twice_as_much_as_plain(cell, rule, size, kept, poisoned):
    """Over three φ where numbers are few: one may be lucky."""
    results = []
    for seed in range(3 if size < 1000 else 1):
        items, same = ["log-and-sign", "rnnprop", "log-step"], {"size": size, "steps": 2}
        optimiser = seeded(reference(cell, items, rule, size=20), seed=seed, scale=0.3).float().to(DEVICE)
        exact = copy.deepcopy(optimiser).double()
        found = run(optimiser, kernels.fuse(optimiser, "triton").update_, first=kept, **same)
        plain = run(optimiser, optimiser.update, kept=kept, **same)
        results.append((found, plain, run(exact, exact.update, dtype=torch.float64, **same)))
    assert_errs_at_most_twice_as_much(*(stack(list(parts)) for parts in zip(*results, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@main_rules
@main_cells
def test_the_way_back_errs_at_most_twice_as_much_as_plain(cell, rule, size, poisoned):
    """By the root mean square of the relative errors of φ's tensors, each as often as it has numbers.

    In the geometric mean over φ where numbers are few: of one φ a single sum of terms of both signs, such as the head's
    bias, may make all of the error, and a processor's order of summation then decides (ratios of 0.3 to 4 were seen).
    """
    ratios = []
    for seed in range(16 if size < 1000 else 1):
        optimiser = seeded(learned(cell, rule, ["log-and-sign", "parameter"], (20, 20)), seed=seed)
        if hasattr(optimiser.rule, "log_scale"):
            nn.init.constant_(optimiser.rule.log_scale, 0.15)
        single = moved(window(optimiser, 3 if size < 1000 else 2, (), size, dtype=torch.float32))
        phi = optimiser.to(DEVICE).phi()
        results = replay(optimiser, phi, single), replayed(optimiser, phi, single)
        optimiser.double()
        true = replayed(optimiser, optimiser.phi(), moved(single, torch.float64))
        found, plain = (
            torch.stack(
                [
                    value.numel() ** 0.5 * (result[name].double() - value).norm() / value.norm()
                    for name, value in true.items()
                    if value.any()
                ]
            ).norm()
            for result in results
        )
        ratios.append(found / plain)
    ratios = torch.stack(ratios)
    assert ratios.log().mean().exp() <= 2, ratios
    assert ratios.max() <= 16, ratios


def test_a_record_in_bfloat16():
    optimiser = learned("lstm", "gated", ["log-and-sign"])
    block = moved(window(optimiser, 3, (), 31, bad=False, dtype=torch.float32))
    phi = optimiser.to(DEVICE).phi()
    half = block._replace(grads=block.grads.bfloat16(), sources=block.sources.bfloat16())
    plain = half._replace(grads=half.grads.float(), sources=half.sources.float())
    laws.assert_same(replay(optimiser, phi, half), replay(optimiser, phi, plain))


@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
def test_nothing_depends_on_what_lies_in_memory(rule):
    optimiser = learned("ihc-lstm", rule, INPUTS)
    block = moved(window(optimiser, 2, (2,), 31, dtype=torch.float32))
    before = laws.clone(block)
    first = replay(optimiser.to(DEVICE), optimiser.phi(), block)
    torch.use_deterministic_algorithms(True, warn_only=True)  # empty tensors hold NaN
    again = replay(optimiser, optimiser.phi(), block)
    torch.use_deterministic_algorithms(False)
    laws.assert_same(again, first)
    laws.assert_same(block, before)


@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
def test_no_coordinates_and_no_steps_give_zeros(rule):
    optimiser = learned(rule=rule)
    optimiser.float().to(DEVICE)
    zeros = {name: torch.zeros_like(value) for name, value in optimiser.phi().items()}
    for length, size in ((0, 7), (2, 0)):
        block = moved(window(optimiser, length, (), size, dtype=torch.float32, bad=False))
        block = block._replace(
            params=block.params[..., :size],
            grads=block.grads[..., :size],
            sources=block.sources[..., :size],
            state=block.state._replace(
                layout=split(size),
                coordinates={key: value[..., :size] for key, value in block.state.coordinates.items()},
            ),
        )
        optimiser.to(DEVICE)
        laws.assert_same(replay(optimiser, optimiser.phi(), block), zeros)
    twin, empty = kernels.fuse(optimiser, "triton"), torch.zeros(0, device=DEVICE)
    update, state = twin.update_(empty, twin.init(split(0), like=empty), empty)
    assert update.shape == (0,)
    assert state.shared["step"] == 1


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("rule", ["gated", "direction-and-magnitude"])
def test_an_unroll_has_the_same_meta_gradient(rule, share):
    """The blockwise unroll on the kernels, the adjoint of the mean among it, against the same by autograd."""
    optimiser = learned("lstm", rule, ["log-and-sign"])
    optimiser.float().to(DEVICE)
    size, steps = 41, 4
    targets, start = moved((normal(steps, size).float(), normal(size, seed=1).float()))
    layout = split(size)

    def loss(params, aux, batch):
        return (params - batch).square().mean(-1), aux

    def meta_gradient(backend):
        update = kernels.block_update(optimiser, backend)
        unroll = estimators.Blockwise(share=share, block=16)
        carry = Carry(start, {}, optimiser.init(layout, like=start))
        items = [InnerStep(batch, (Target(batch, 1.0),)) for batch in targets]
        phi = optimiser.phi()
        return unroll(update, loss, phi, carry, items, unroll.init(carry, phi, 3))

    wanted, found = meta_gradient("reference"), meta_gradient("triton")
    laws.assert_close(found.gradient, wanted.gradient, 1e-5)
    laws.assert_close(found.value, wanted.value, 1e-6)


def test_the_unroll_gives_the_kernels_as_many_coordinates_as_they_take():
    update = kernels.block_update(learned().float().to(DEVICE), "triton")
    assert isinstance(update, BlockUpdate)
    assert update.at_once > 2**20


def test_a_state_in_bfloat16_goes_in_one_piece():
    """`LearnedOptimizer`'s vector hands it to the kernel, which rounds it; the CPU's twin takes it in pieces."""
    optimiser = reference("lstm", ["log-and-sign", "rnnprop"], "bounded", torch.float32).to(DEVICE)
    params = OrderedDict(a=nn.Parameter(normal(7, 3).float().to(DEVICE)), b=nn.Parameter(torch.ones(5, device=DEVICE)))
    vectors = [FlatVector(params, [{}, {}], (3, 3), (Role("matrix"), Role("vector"))) for _ in range(2)]
    twins = kernels.fuse(optimiser, "triton"), optimiser
    for seed in range(3):
        grads, theta = normal(26, seed=seed).float().to(DEVICE), normal(26, seed=9).float().to(DEVICE)
        one, other = (
            vector.update_(twin, "", torch.bfloat16, grads, theta, None).clone()
            for vector, twin in zip(vectors, twins, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-4)
    assert vectors[0].states[0]["cell.h"].dtype == torch.bfloat16


def test_derivatives_and_other_numbers_are_the_references():
    optimiser = reference("lstm", ["log-and-sign"], "additive", torch.float32).to(DEVICE)
    twin, (layout, gradients, params, _) = kernels.fuse(optimiser, "triton"), moved(problem(31, (), torch.float32, 1))
    leaf = params.clone().requires_grad_()
    update, _ = twin.update(gradients[0], optimiser.init(layout, like=params), leaf)
    assert update.requires_grad
    double = twin.update_with(
        {name: value.detach().double() for name, value in twin.phi().items()},
        gradients[0].double(),
        optimiser.init(layout, like=params.double()),
        params.double(),
    )[0]
    assert double.dtype == torch.float64


def own_input():
    class Own(type(INPUTS["log-and-sign"]())):
        """Somebody's own."""

    cell = optimisers.coordinatewise().cell
    return Coordinatewise({"own": Own()}, cell, RULES["additive"]())


def two_of_a_kind():
    cell = optimisers.coordinatewise().cell
    return Coordinatewise({"a": INPUTS["momenta"](), "b": INPUTS["momenta"]()}, cell, RULES["additive"]())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: optimisers.SGD(0.1), "SGD"),
        (lambda: optimisers.coordinatewise(cell="gru"), "GRU"),
        (own_input, "Own"),
        (two_of_a_kind, "several inputs of one kind, Momenta"),
        (lambda: optimisers.coordinatewise().double(), "float64"),
    ],
)
def test_a_refusal_says_why(make, reason):
    assert reason in triton.refusal(make())
    with pytest.raises(UserError, match=reason):
        kernels.fuse(make(), "triton")


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch):
    """Triton itself takes the current one."""
    guarded, launches = [], []

    @contextmanager
    def guard(tensor):
        guarded.append(tensor.device)
        yield
        guarded.pop()

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(tuple(guarded))
            return self.kernel[grid]

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    for module, names in ((device, ("step", "squares", "finish")), (device_replay, ("replay",))):
        for name in names:
            monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    optimiser = reference("lstm", rule="direction-and-magnitude", dtype=torch.float32).to(DEVICE)
    run(optimiser, kernels.fuse(optimiser, "triton").update, 7, steps=1)
    optimiser = learned("lstm", "gated", INPUTS).to(DEVICE)
    replay(optimiser, optimiser.phi(), moved(window(optimiser, 1, (2,), 7, dtype=torch.float32)))
    assert [[found.type for found in where] for where in launches] == [[DEVICE]] * 4


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="there is no GPU"):
        kernels.fuse(optimisers.coordinatewise(), "triton")


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu():
    """As they are launched, by Triton's compiler, which needs none, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "benchmarks/compiled_triton.py"
    command = [sys.executable, "-W", "ignore", script, "--rule", "gated", "--rule", "direction-and-magnitude"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") == 20
