"""Our optimisers as `torch.optim.Optimizer`: the same numbers, and torch.optim's own manners."""

from copy import deepcopy

import laws
import pytest
import torch
from implementations import OPTIMISERS, normal, seeded

from l2lopt import LearnedOptimizer, UserError, kernels, optimisers, weights
from l2lopt.torch_table import TORCH
from l2lopt.types import Layout

SHAPES = {"matrix": (3, 2), "scalar": (), "vector": (4,)}
each_optimiser = pytest.mark.parametrize("rule", [pytest.param(make, id=name) for name, make in OPTIMISERS.items()])


def start(dtype=torch.float64, seed=7):
    return {
        name: torch.nn.Parameter(normal(*shape, seed=seed + k).to(dtype))
        for k, (name, shape) in enumerate(SHAPES.items())
    }


def descend(params, optimizer, steps, without=lambda step: (), scheduler=None):
    """Steps on a bumpy loss; `without(step)` names the parameters that it leaves out."""
    for step in steps:
        optimizer.zero_grad()
        loss = bumpy({name: value for name, value in params.items() if name not in without(step)}, step)
        loss.backward()
        optimizer.step(loss=loss) if isinstance(optimizer, LearnedOptimizer) else optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach().clone() for name, value in params.items()}


def bumpy(params, step):
    return sum((value.square() + torch.cos(3 * value + 0.1 * step)).sum() for value in params.values())


@each_optimiser
def test_equals_the_rule_run_by_hand_to_the_bit(rule):
    params = start()
    layout, theta = Layout.of(params), Layout.of(params).ravel(params).detach()
    by_hand, state = kernels.fast(rule()), rule().init(layout, like=theta)
    for step in range(6):
        leaf = theta.clone().requires_grad_()
        loss = bumpy(layout.unravel(leaf), step)
        (grads,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            change, state = by_hand.update(grads, state, theta, loss.detach())
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


@each_optimiser
@pytest.mark.parametrize("without", [lambda step: (), lambda step: ["vector"] if step % 2 else []], ids=["all", "gaps"])
def test_a_loaded_state_goes_on_to_the_bit(rule, without, tmp_path):
    params = start(torch.float32)
    optimizer = LearnedOptimizer(params.values(), rule())
    half = descend(params, optimizer, range(5), without)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    expected = descend(params, optimizer, range(5, 9), without)
    saved = torch.load(tmp_path / "state.pt")
    before = deepcopy(saved)
    params = {name: torch.nn.Parameter(value) for name, value in half.items()}
    other = LearnedOptimizer(params.values(), rule(), lr=0.5)
    other.load_state_dict(saved)
    laws.assert_same(descend(params, other, range(5, 9), without), expected)
    laws.assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])
    laws.assert_same((saved["state"], saved["param_groups"][0]["lr"]), (before["state"], 1.0))


def test_a_copy_goes_on_as_well():
    params = start()
    optimizer = LearnedOptimizer(params.values(), optimisers.make("coordinatewise", hidden_size=3))
    descend(params, optimizer, range(3))
    other, copies = deepcopy((optimizer, params))
    laws.assert_same(descend(copies, other, range(3, 5)), descend(params, optimizer, range(3, 5)))


def test_a_schedule_scales_the_update():
    rates = [0.3, 1.0, 0.5, 0.0]
    params, theta = start(), start()
    optimizer = LearnedOptimizer(params.values(), optimisers.SGD(0.05))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step % 4])
    descend(params, optimizer, range(4), scheduler=scheduler)
    for step, rate in enumerate(rates):
        grads = torch.autograd.grad(bumpy(theta, step), list(theta.values()))
        theta = {
            name: (value - rate * 0.05 * g).detach().requires_grad_()
            for (name, value), g in zip(theta.items(), grads, strict=True)
        }
    laws.assert_close(dict(params), theta)


def test_groups_have_their_own_rate_and_state():
    params = start()
    groups = [{"params": [params["matrix"]], "lr": 0.0}, {"params": [params["vector"], params["scalar"]]}]
    before = params["matrix"].detach().clone()
    optimizer = LearnedOptimizer(groups, optimisers.make("coordinatewise", hidden_size=3))
    after = descend(params, optimizer, range(3))
    assert torch.equal(after["matrix"], before)
    assert not torch.equal(after["vector"], start()["vector"])
    assert optimizer.state[params["matrix"]]["rnnprop.m"].abs().sum() > 0


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


def test_weights_come_from_a_file(tmp_path):
    rule = optimisers.make("coordinatewise", hidden_size=3)
    weights.save(rule, tmp_path / "w.safetensors")
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


def test_a_rate_below_0_is_refused():
    with pytest.raises(UserError, match=r"LearnedOptimizer: lr: expected at least 0"):
        LearnedOptimizer([torch.nn.Parameter(torch.ones(2))], optimisers.SGD(0.1), lr=-1.0)


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_classes_are_made_by_name(name):
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    optimizer = TORCH[name](lr=0.125)([param])
    optimizer.step(lambda: torch.ones(()))
    assert f"torch.optim.{type(optimizer).__name__}" == name
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert not torch.equal(param, torch.ones(2, 2))
