"""The hand-derived passes: the loop's numbers and gradients for every cell and option, whatever the shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import CELLS, SQUARE, cell, normal, seeded
from laws import assert_close
from stacks import Elman, M, N
from torch.func import functional_call, grad, vmap

from l2lopt import cells, sequence
from l2lopt.cells.highway import Simplified
from l2lopt.core.errors import UserError
from l2lopt.sequence import by_hand, loop, run, torch_lstm
from l2lopt.sequence.backends import refusal
from l2lopt.sequence.by_hand import plans, products


def has_pass(make):
    """Whether a cell has a hand-derived pass, which is optional."""
    cell = make()
    return isinstance(cell, cells.Cell) and refusal(cell, torch.zeros(1, cell.input_size)) is None


COVERED = {label: make for label, make in CELLS.items() if has_pass(make)}
NAMES = [name for name in cells.CELLS if name in COVERED]
"""The cells with a hand-derived pass, with all options and by their names alone."""
IRC = [name for name in cells.CELLS if name.startswith("irc-")]
each_cell = pytest.mark.parametrize("label", COVERED)


def arguments(cell, steps=5, batch=(3,), dtype=torch.float64, seed=0):
    """x, state and weights, all of which need gradients."""
    x = normal(steps, cell.input_size, *batch, seed=seed)
    state = {
        name: 0.3 * normal(size, *batch, seed=seed + k) for k, (name, size) in enumerate(cell.state_sizes.items(), 1)
    }
    named = {"input": x, **state}
    return {name: value.to(dtype).requires_grad_() for name, value in named.items()} | dict(cell.named_parameters())


def loss(outputs, final):
    """Some number that all of them have a part in."""
    parts = [outputs, *(final[name] for name in sorted(final))]
    return sum((part * normal(*part.shape, seed=50 + k).to(part.dtype)).sum() for k, part in enumerate(parts))


def results(way, cell, given, *how, **options):
    """Outputs, final state and the gradients of some loss of all of them."""
    state = {name: given[name] for name in cell.state_sizes}
    outputs, final = way(cell, given["input"], state, *how, **options)
    gradients = torch.autograd.grad(
        loss(outputs, final), list(given.values()), allow_unused=True, materialize_grads=True
    )
    return outputs, final, dict(zip(given, gradients, strict=True))


def assert_equals_the_loop(cell, given, *how, way=run, tolerance=1e-12, **options):
    assert_close(results(way, cell, given, *how, **options), results(loop.run, cell, given, *how), tolerance)


@each_cell
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("lengths", [None, [4, 0, 5]], ids=["whole", "lengths"])
def test_equals_the_loop_with_all_gradients(label, reverse, lengths):
    cell = seeded(COVERED[label]())
    given = arguments(cell)
    lengths = None if lengths is None else torch.tensor(lengths)
    assert sequence.backend(cell, given["input"]) == ("by-hand", None)
    assert_equals_the_loop(cell, given, lengths, reverse, tolerance=1e-11)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop_in_single_precision(name, packed, monkeypatch):
    """To 1e-5 of each gradient's largest number, at PyTorch's initial values, with and without packed products."""
    torch.manual_seed(0)
    if packed and not products.packs():
        pytest.skip("this PyTorch has no packed product of the form used")
    monkeypatch.setattr(products, "packs", lambda: packed)
    cell = cells.make(name, 67, 67 if name in SQUARE else 71)
    assert (products.Repeated(torch.ones(71, 67)).packed is not None) == packed
    assert_equals_the_loop(cell, arguments(cell, 20, (5,), torch.float32), tolerance=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no grad", "inference"])
@pytest.mark.parametrize("name", ["lstm", "ihc-lstm", "sru", "t-lstm"])
def test_equals_the_loop_without_a_tape(name, mode):
    cell = seeded(cells.make(name, M, M))
    x = normal(4, M, 3)
    with mode():
        state = cell.initial_state(x[0])
        assert sequence.backend(cell, x) == ("by-hand", None)
        assert_close(run(cell, x, state), loop.run(cell, x, state), 1e-12)


@each_cell
def test_gradcheck(label):
    """Of everything that goes in, for everything that comes out, on odd sizes."""
    cell = seeded(COVERED[label]())
    given = arguments(cell, 3, (2,))

    def function(x, *rest):
        named = dict(zip(list(given)[1:], rest, strict=True))
        weights = {name: named.pop(name) for name in list(named) if name not in cell.state_sizes}
        module = sequence.backends.Direction(cell, False, "fast")
        weights = {f"cell.{name}": value for name, value in weights.items()}
        outputs, final = functional_call(module, weights, (x, named, None))
        return outputs, *(value for value in final.values())

    assert torch.autograd.gradcheck(function, tuple(given.values()), fast_mode=True)


def test_adjoints_beyond_the_end_of_another_sequence_cost_no_digits():
    """One of 1e8 there, beside one of 1 before, in single precision, in a cell that forgets its state."""
    cell = seeded(cells.make("fastgrnn", N, M)).float()
    with torch.no_grad():
        cell.weight_h.zero_()
        cell.bias[:M] = -30.0
    found = []
    for way in (run, loop.run):
        x = normal(3, N, 2).float().requires_grad_()
        outputs, _ = way(cell, x, cell.initial_state(x[0]), torch.tensor([3, 2]))
        gradient = torch.autograd.grad(outputs[1, :, 0].sum() + 1e8 * outputs[2, :, 0].sum(), x)[0]
        found.append(gradient[1, :, 0])
    assert_close(*found, tolerance=1e-5)


@given(
    name=st.sampled_from([name for name in NAMES if name != "stacked"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.integers(1, 6),
    batch=st.lists(st.integers(1, 3), max_size=2),
    reverse=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_loop_at_any_shape(name, sizes, steps, batch, reverse, data):
    n, m = sizes
    cell = seeded(cells.make(name, m if name in SQUARE else n, m))
    lengths = None
    if batch and data.draw(st.booleans()):
        total = torch.Size(batch).numel()
        drawn = data.draw(st.lists(st.integers(0, steps), min_size=total, max_size=total))
        lengths = torch.tensor(drawn).view(batch)
    assert_equals_the_loop(cell, arguments(cell, steps, batch), lengths, reverse, tolerance=1e-9)


@pytest.mark.parametrize("sizes", [(3, 5), (7, 4), (5, 5)], ids=str)
@pytest.mark.parametrize("name", IRC)
def test_folded_equals_the_loop(name, sizes):
    cell = seeded(cells.make(name, *(sizes if name not in SQUARE else (5, 5)), gate_bias=True))
    assert_equals_the_loop(cell, arguments(cell), way=by_hand.run, tolerance=1e-11, fold=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "stacked"])
def test_frozen_weights_and_plain_inputs_need_no_gradients(name):
    cell = seeded(cells.make(name, M, M))
    expected = results(loop.run, cell, arguments(cell))[2]
    given = arguments(cell)
    for part in (["input", *cell.state_sizes], [*dict(cell.named_parameters())]):
        for key, value in given.items():
            value.requires_grad_(key in part)
        state = {key: given[key] for key in cell.state_sizes}
        gradients = torch.autograd.grad(loss(*run(cell, given["input"], state)), [given[key] for key in part])
        assert_close(dict(zip(part, gradients, strict=True)), {key: expected[key] for key in part}, 1e-11)


@pytest.mark.parametrize("name", ["lstm", "gru", "irc-gru", "ihc-lstm", "sru", "t-lstm", "irc-fastgrnn", "rnn"])
def test_second_derivatives_are_the_loops(name):
    """Also where the arguments depend on each other: x is made of a weight."""
    cell = seeded(cells.make(name, M, M))
    weight = next(p for p in cell.parameters() if p.dim() == 2 and p.shape[1] == M)
    raw = normal(4, M, 2, seed=3).requires_grad_()
    state = {key: 0.3 * normal(size, 2, seed=4) for key, size in cell.state_sizes.items()}
    found = []
    for way in (run, loop.run):
        x = raw * weight[0].view(-1, 1)
        outputs, final = way(cell, x, state, torch.tensor([4, 2]))
        total = outputs.pow(3).sum() + sum(value.square().sum() for value in final.values())
        first = torch.autograd.grad(total, [raw, weight], create_graph=True)
        second = torch.autograd.grad(sum(f.square().sum() for f in first), [raw, weight])
        found.append((first, second))
    assert_close(*found, tolerance=1e-10)


@pytest.mark.parametrize("name", ["lstm", "ihc-gru", "irc-lstm", "t-lstm"])
def test_graphs_do_not_share_what_they_keep(name):
    """Two calls before the first way back, outputs changed in place after it, and the same way back twice."""
    cell = seeded(cells.make(name, M, M))
    one, two = arguments(cell), arguments(cell, seed=20)
    expected = [results(loop.run, cell, call)[2] for call in (one, two)]
    losses = [loss(*run(cell, call["input"], {key: call[key] for key in cell.state_sizes})) for call in (one, two)]
    for k in (0, 1, 0):
        call = (one, two)[k]
        gradients = torch.autograd.grad(losses[k], list(call.values()), retain_graph=True)
        assert_close(dict(zip(call, gradients, strict=True)), expected[k], 1e-11)
        for gradient in gradients:
            gradient.fill_(float("nan"))


def test_outputs_may_be_changed_in_place_but_not_weights():
    cell = seeded(cells.make("lstm", N, M))
    given = arguments(cell)
    state = {key: given[key] for key in cell.state_sizes}
    outputs, _ = run(cell, given["input"], state)
    doubled = outputs.mul_(2)
    gradient = torch.autograd.grad(doubled.sum(), given["input"])[0]
    assert_close(
        gradient, torch.autograd.grad(2 * loop.run(cell, given["input"], state)[0].sum(), given["input"])[0], 1e-11
    )
    outputs, _ = run(cell, given["input"], state)
    with torch.no_grad():
        cell.weight_h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_errs_no_more_than_twice_as_much_as_the_loop(name):
    """Against float32; states and sums stay in float32."""
    torch.manual_seed(0)
    cell = cells.make(name, 48, 48)
    given = arguments(cell, 20, (6,), torch.float32)
    exact = results(loop.run, cell, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast, slow = (results(way, cell, given) for way in (run, loop.run))
    assert fast[0].dtype == torch.float32

    def errors(found):
        """Of the outputs, and of all gradients as one vector."""
        for part, wanted in (
            (found[0], exact[0]),
            *[[torch.cat([*map(torch.ravel, f[2].values())]) for f in (found, exact)]],
        ):
            yield ((part - wanted).norm() / wanted.norm()).item()

    for mine, loops in zip(errors(fast), errors(slow), strict=True):
        assert 1e-4 < mine <= 2 * loops
        assert mine < 0.02


def test_bfloat16_inputs_under_autocast():
    """As they come from a linear layer."""
    torch.manual_seed(0)
    cell = cells.make("irc-gru", 16, 16)
    given = arguments(cell, 5, (3,), torch.float32)
    lower = given | {"input": given["input"].detach().bfloat16().requires_grad_()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, _, gradients = results(run, cell, lower)
    assert (outputs.dtype, gradients["input"].dtype) == (torch.float32, torch.bfloat16)
    expected = results(run, cell, given)
    assert_close((outputs, gradients["input"].float()), (expected[0], expected[2]["input"]), 0.02)


@pytest.mark.parametrize("name", ["gru", "ihc-lstm"])
def test_autocast_leaves_double_precision_as_it_is(name):
    """As it does in every operation of PyTorch's, and so in the loop."""
    cell = seeded(cells.make(name, 6, 6))
    given = arguments(cell, 5, (3,))
    exact = results(loop.run, cell, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(results(run, cell, given), exact, 1e-11)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_pytorchs_kernel_on_our_weights_equals_the_loop(reverse, batch):
    cell = seeded(cells.make("lstm", N, M))
    assert_equals_the_loop(cell, arguments(cell, batch=batch), None, reverse, way=torch_lstm.run, tolerance=1e-11)


def refusing(function, x, cell):
    """What `backend` says within a transform."""
    found = []

    def inside(x):
        found.append(sequence.backend(cell, x))
        return run(cell, x, cell.initial_state(x[0]))[0].square().sum()

    function(inside, x)
    return found[0]


def test_the_loop_is_taken_and_the_reason_given():
    cell, x = seeded(cells.make("lstm", N, M)), normal(4, N, 2)
    transforms = {
        "grad": lambda f, x: grad(f)(x),
        "vmap": lambda f, x: vmap(f)(torch.stack([x, x])),
    }
    for name, transform in transforms.items():
        assert refusing(transform, x, cell) == ("loop", "a transform of torch.func is at work"), name
    with torch.autograd.forward_ad.dual_level():
        assert sequence.backend(cell, x)[1] == "forward-mode differentiation is at work"
    assert sequence.backend(cell, x[:0]) == ("loop", "there are no steps")
    assert sequence.backend(cell, x.float()) == ("loop", "x is float32 on cpu, the weights are float64 on cpu")
    assert sequence.backend(cells.make("lstm", N, M).bfloat16(), x)[1] == "the weights are bfloat16"
    assert sequence.backend(seeded(Elman(N, M)), x) == ("loop", "Elman has no hand-derived pass")
    pairs = sequence.make("coupled-gru", N, M).double()
    assert pairs.backends(normal(4, 2, 3, N)) == {"0.0": ("loop", "CoupledGRU has no hand-derived pass")}


def test_a_stack_tells_each_cells_way():
    stack = seeded(sequence.Stack([[cells.make("gru", N, 2), cells.make("sru", N, N)], [Elman(2 + N, M)]]))
    by_hand, other = ("by-hand", None), ("loop", "Elman has no hand-derived pass")
    assert stack.backends(normal(4, 2, N), [4, 1]) == {"0.0": by_hand, "0.1": by_hand, "1.0": other}


def test_what_is_asked_for_is_taken_or_refused():
    x = normal(4, N, 3)
    with pytest.raises(UserError, match="Elman has no hand-derived pass"):
        seeded(sequence.Stack([[Elman(N, M)]], backend="fast"))(x.mT)
    with pytest.raises(UserError, match="did you mean 'fast'"):
        sequence.make("lstm", N, M, backend="fats")
    with pytest.raises(UserError, match="cell: state: expected shapes"):
        run(cells.make("lstm", N, M).double(), x, {})


@pytest.mark.parametrize("name", NAMES)
def test_stacks_equal_the_loops(name):
    """Two layers, both directions, lengths, weight drop and dropout with the same masks."""
    size = M
    options = {"dropout": 0.5, "weight_drop": {dict(cells.make(name, size, size).named_parameters()).popitem()[0]: 0.5}}
    layers = [[cells.make(name, width, width) for _ in range(2)] for width in (size, 2 * size)]
    stacks = [seeded(sequence.Stack(layers, backend=backend, **options)) for backend in ("loop", "fast")]
    x = normal(5, 3, size)
    masks = stacks[0].draw_masks(x, torch.Generator().manual_seed(0))
    found = []
    for stack in stacks:
        output, final = stack(x, lengths=[5, 0, 3], masks=masks)
        gradients = torch.autograd.grad(
            output.square().sum(), list(stack.parameters()), materialize_grads=True, allow_unused=True
        )
        found.append((output, final, gradients))
    assert_close(*found[::-1], tolerance=1e-11)


def test_every_hand_derived_pass_is_tested():
    made = [make() for make in COVERED.values()]
    assert {*plans.PLANS} <= {type(cell) for cell in made}
    assert {*plans.CORES} <= {type(cell.core) for cell in made if isinstance(cell, Simplified)}
    assert "stacked" in COVERED
    assert cell("lstm")().input_size == N


def test_a_cell_without_a_hand_derived_pass_runs_the_loop():
    cell, x = Elman(N, M).double(), normal(4, N, 3)
    assert not has_pass(lambda: Elman(N, M))
    assert sequence.backend(cell, x) == ("loop", "Elman has no hand-derived pass")
    state = cell.initial_state(x[0])
    assert_close(run(cell, x, state), loop.run(cell, x, state), 0.0)
