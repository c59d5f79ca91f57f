"""`LearnedOptimizer.step`: the numbers of the rule run by hand, for every rank, dtype and memory format."""

from copy import deepcopy

import laws
import pytest
import torch
from descent import LSTM, RULES, bumpy, descend, each_optimiser, start
from implementations import normal, seeded
from torch import nn

from l2lopt import LearnedOptimizer, UserError, kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.weights import files


@each_optimiser
def test_equals_the_rule_run_by_hand_to_the_bit(rule):
    params = start()
    layout, theta = Layout.of(params), Layout.of(params).ravel(params).detach()
    by_hand, state = kernels.fuse(rule()), rule().init(layout, like=theta)
    for step in range(6):
        leaf = theta.clone().requires_grad_()
        loss = bumpy(layout.unravel(leaf), step)
        (grads,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            change, state = by_hand.update(grads, state, theta, loss=loss.detach())
        theta = theta + change
    laws.assert_same(descend(params, LearnedOptimizer(list(params.items()), rule()), range(6)), layout.unravel(theta))


@pytest.mark.parametrize("without", [lambda step: (), lambda step: ["vector"] if step % 3 else []], ids=["all", "gaps"])
def test_our_adamw_equals_torchs(without):
    ours, theirs = start(), start()
    optimizer = LearnedOptimizer(ours.values(), optimisers.AdamW(0.02, weight_decay=0.2))
    reference = torch.optim.AdamW(theirs.values(), lr=0.02, weight_decay=0.2)
    expected = descend(theirs, reference, range(60), without)
    laws.assert_close(descend(ours, optimizer, range(60), without), expected)
    assert [optimizer.state[p]["step"].item() for p in ours.values()] == [
        reference.state[p]["step"].item() for p in theirs.values()
    ]


def test_the_state_has_the_shapes_of_its_parameter():
    params = start()
    optimizer = LearnedOptimizer(params.values(), seeded(optimisers.make("coordinatewise", hidden_size=3)))
    descend(params, optimizer, range(2))
    for param in params.values():
        state = optimizer.state[param]
        assert state["cell.h"].shape == (3, *param.shape)
        assert state["rnnprop.m"].shape == param.shape
        assert (state["step"].item(), state["skipped"].item()) == (2, 0)


@each_optimiser
def test_a_parameter_without_a_gradient_stays_as_it_is(rule):
    params = start()
    optimizer = LearnedOptimizer(params.values(), rule())
    descend(params, optimizer, range(2))
    before, kept = params["vector"].detach().clone(), deepcopy(optimizer.state[params["vector"]])
    after = descend(params, optimizer, range(2, 4), lambda step: ["vector"])
    laws.assert_same(after["vector"], before)
    laws.assert_same(optimizer.state[params["vector"]], kept)
    assert not torch.equal(descend(params, optimizer, range(4, 5))["vector"], before)


def test_parameters_of_two_dtypes_are_two_vectors():
    params = start() | {"single": torch.nn.Parameter(torch.ones(3))}
    rule = optimisers.make("coordinatewise", hidden_size=3)
    together = descend(params, LearnedOptimizer(params.values(), rule), range(3))
    alone = {"single": torch.nn.Parameter(torch.ones(3))}
    laws.assert_same(descend(alone, LearnedOptimizer(alone.values(), rule), range(3))["single"], together["single"])
    alone = start()
    laws.assert_same(
        descend(alone, LearnedOptimizer(alone.values(), rule), range(3)), {name: together[name] for name in alone}
    )


def test_the_loss_comes_from_the_closure_or_by_itself():
    rule = seeded(optimisers.make("coordinatewise", hidden_size=3, inputs=["log-and-sign", "rnnprop", "loss"]))
    one, other = start(), start()
    descend(one, LearnedOptimizer(one.values(), rule), range(3))
    optimizer = LearnedOptimizer(other.values(), rule)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = bumpy(other, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
    laws.assert_same(dict(one), dict(other))
    before = {name: value.detach().clone() for name, value in one.items()}
    with pytest.raises(UserError, match=r"input 'loss': expected the loss of this step"):
        LearnedOptimizer(one.values(), rule).step()
    laws.assert_same({name: value.detach() for name, value in one.items()}, before)


def test_a_loss_beside_a_closure_that_returns_none_counts():
    """As Lightning calls it in manual optimisation."""
    rule = seeded(optimisers.make("coordinatewise", hidden_size=3, inputs=["log-and-sign", "rnnprop", "loss"]))
    one, other = start(), start()
    descend(one, LearnedOptimizer(one.values(), rule), range(3))
    optimizer = LearnedOptimizer(other.values(), rule)
    for step in range(3):
        optimizer.zero_grad()
        loss = bumpy(other, step)
        loss.backward()
        assert optimizer.step(lambda: None, loss=loss) is None
    laws.assert_same(dict(one), dict(other))


def test_weights_come_from_a_file(tmp_path):
    rule = optimisers.make("coordinatewise", hidden_size=3)
    files.save(rule, tmp_path / "w.safetensors")
    one, other = start(torch.float32), start(torch.float32)
    from_file = descend(one, LearnedOptimizer(one.values(), tmp_path / "w.safetensors"), range(3))
    laws.assert_same(from_file, descend(other, LearnedOptimizer(other.values(), rule), range(3)))
    with pytest.raises(UserError, match=r"none\.safetensors: expected a learned optimiser, found nothing"):
        LearnedOptimizer(one.values(), tmp_path / "none.safetensors")


def test_the_callers_rule_is_left_alone():
    rule = optimisers.make("coordinatewise", hidden_size=3)
    before = laws.clone(rule.phi())
    params = start(torch.float64)
    descend(params, LearnedOptimizer(params.values(), rule), range(2))
    laws.assert_same(rule.phi(), before)
    assert all(value.requires_grad for value in rule.phi().values())


@pytest.mark.parametrize(
    ("grad", "found"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo float32"),
        (torch.eye(2, dtype=torch.complex64), "strided complex64"),
    ],
)
def test_a_gradient_that_no_rule_takes_is_refused_and_nothing_moves(grad, found):
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.eye(2).to(grad.dtype))
    good.grad, bad.grad = torch.ones(2), grad
    optimizer = LearnedOptimizer([("good", good), ("bad", bad)], optimisers.SGD(0.1))
    with pytest.raises(UserError, match=f"parameter 'bad': expected a dense real gradient, found {found}"):
        optimizer.step()
    assert torch.equal(good, torch.ones(2))


RANKS = {f"rank {rank}": (2, 3, 1, 2, 2)[:rank] for rank in range(6)} | {"empty": (0, 3)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ranks_and_dtypes(rule, dtype):
    """Rules compute in float32 from what there is, and the sum is rounded, to the bit."""
    params = {name: torch.nn.Parameter(normal(*shape).to(dtype)) for name, shape in RANKS.items()}
    layout, precise = Layout.of(params), torch.float64 if dtype == torch.float64 else torch.float32
    theta = layout.ravel(params).detach()
    by_hand = kernels.fuse(RULES[rule]().to(precise).requires_grad_(False))
    state = by_hand.init(layout, like=theta.to(precise))
    optimizer = LearnedOptimizer(params.values(), RULES[rule](), lr=0.5)
    for step in range(3):
        grads = normal(layout.size, seed=step).to(dtype)
        for param, grad in zip(params.values(), layout.split(grads), strict=True):
            param.grad = grad.view(param.shape).clone()
        optimizer.step(loss=1.0)
        update, state = by_hand.update(grads.to(precise), state, theta.to(precise), loss=torch.ones((), dtype=precise))
        theta = (theta.to(precise) + 0.5 * update).to(dtype)
    laws.assert_same({name: value.detach() for name, value in params.items()}, layout.unravel(theta))
    for name, param in params.items():
        floats = [
            value for value in optimizer.state[param].values() if torch.is_tensor(value) and value.is_floating_point()
        ]
        assert {value.dtype for value in floats} == {precise}, name


def test_memory_formats_do_not_matter():
    plain = torch.nn.Parameter(normal(2, 3, 4, 4).float())
    odd = torch.nn.Parameter(plain.detach().contiguous(memory_format=torch.channels_last))
    rare = torch.nn.Parameter(torch.stack([plain.detach(), plain.detach()], dim=-1)[..., 0])
    grads = normal(3, 2, 3, 4, 4, seed=1).float()
    turned = grads.transpose(-1, -2).contiguous().transpose(-1, -2)
    for param, grad in ((plain, grads), (odd, turned), (rare, grads)):
        optimizer = LearnedOptimizer([param], LSTM())
        for step in range(3):
            param.grad = grad[step]
            optimizer.step()
    laws.assert_same((odd.detach().contiguous(), rare.detach().contiguous()), (plain.detach(), plain.detach()))
    assert odd.is_contiguous(memory_format=torch.channels_last)


def test_a_step_without_any_gradient_does_nothing():
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM(), weight_decay=0.1, fallback="adam")
    optimizer.step()
    laws.assert_same(
        {name: value.detach() for name, value in params.items()}, {n: v.detach() for n, v in start().items()}
    )
    assert optimizer.state_dict()["state"] == {}


def test_a_bias_moves_by_its_matrixs_fan_in_even_alone():
    """A first update of Adam's direction has the size lr/√fan-in, here 0.1/√64, though the matrix is frozen."""
    layer = torch.nn.Linear(64, 10)
    layer.bias.grad = normal(10).float()
    before = layer.bias.detach().clone()
    LearnedOptimizer(layer.parameters(), {"name": "normalised-adam", "weight_decay": 0.0}).step()
    laws.assert_close((layer.bias - before).abs(), torch.full((10,), 0.1 / 8), 1e-5)


def test_every_vector_of_a_group_looks_for_matrices_in_the_others():
    """Biases of two dtypes are two vectors, each with a matrix in another group."""
    weights = [nn.Parameter(torch.zeros(3, 25)), nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))]
    biases = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for param in (*weights, *biases):
        param.grad = torch.ones_like(param)
    rule = {"name": "normalised-adam", "lr": 0.1, "weight_decay": 0.0}
    LearnedOptimizer([{"params": weights}, {"params": biases}], rule).step()
    for bias, size in zip(biases, (0.02, 0.05), strict=True):
        torch.testing.assert_close(bias.detach(), torch.full_like(bias, -size), rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{"fallback": "adam"}, {}])
def test_a_loss_of_one_number_is_taken_whatever_its_shape_and_others_are_refused(options):
    rule = optimisers.make("coordinatewise", inputs=["log-and-sign", "loss"], rule="additive")
    param = nn.Parameter(torch.ones(2))
    optimizer = LearnedOptimizer([param], rule, **options)
    param.grad = torch.ones(2)
    optimizer.step(loss=torch.ones(1, 1))
    after = param.detach().clone()
    with pytest.raises(UserError, match=r"step: loss: expected one number, found \[4\]"):
        optimizer.step(loss=torch.ones(4))
    for loss, found in (("x", "a str"), ({"loss": 1.0}, "a dict"), ((1.0, 2.0), "a tuple")):
        with pytest.raises(UserError, match=f"step: loss: expected one number, found {found}; tell the loss alone"):
            optimizer.step(loss=loss)
    with pytest.raises(UserError, match=r"step: closure: expected a function, found a Tensor; call step\(loss=…\)"):
        optimizer.step(torch.ones(1))
    assert param.equal(after)
