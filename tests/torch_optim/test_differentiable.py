"""`higher.innerloop_ctx` on a `LearnedOptimizer`: gradients of the parameters' start and of φ, against `torch.func`."""

import subprocess
import sys
from functools import partial

import laws
import pytest
import torch
from implementations import DOUBLES, OPTIMISERS, each, learned, normal
from torch import nn
from torch.func import functional_call, grad_and_value

from l2lopt import LearnedOptimizer, UserError, estimators, optimisers
from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, InnerStep, Target
from l2lopt.torch_optim.differentiable import higher

STEPS = 4
X, Y = normal(STEPS + 1, 6, 3, seed=1), normal(STEPS + 1, 6, 2, seed=2)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def unrolled(model, optimizer, **options):
    """The sum of the losses after each step, by `higher`; and the model that it leaves."""
    total = 0.0
    with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False, **options) as (functional, inner):
        for step in range(STEPS):
            inner.step((functional(X[step]) - Y[step]).square().mean())
            total = total + (functional(X[step + 1]) - Y[step + 1]).square().mean()
    return total, functional


def by_hand(phi, theta, rule, model, lr=1.0, weight_decay=0.0, bound=None):
    """The same sum as a function of φ and the start, step by step under `torch.func`."""
    layout = Layout.of(theta)

    def loss(flat, step):
        return (functional_call(model, layout.unravel(flat), (X[step],)) - Y[step]).square().mean()

    flat, total = layout.ravel(theta), 0.0
    state = rule.init(layout, like=flat)
    for step in range(STEPS):
        gradient, value = grad_and_value(loss)(flat, step)
        update, state = rule.update_with(phi, gradient, state, flat, loss=value)
        update = update if bound is None else update.clamp(-bound, bound)
        flat = flat + lr * (update - weight_decay * flat)
        total = total + loss(flat, step + 1)
    return total


@pytest.mark.parametrize("make", each(OPTIMISERS | DOUBLES, factories=True))
def test_gradients_of_start_and_phi_are_exact(make):
    rule, model = make(), small_model()
    theta = dict(model.named_parameters())
    start, phi = laws.clone(theta), rule.phi()
    optimizer = LearnedOptimizer(model.named_parameters(), rule)
    value, _ = unrolled(model, optimizer, override={"weights": [rule]})
    (of_phi, of_start), wanted = grad_and_value(partial(by_hand, rule=rule, model=model), argnums=(0, 1))(phi, theta)
    gradients = torch.autograd.grad(value, [*phi.values(), *theta.values()])
    expected = [*of_phi.values(), *of_start.values()]
    for gradient, exact in zip((value.detach(), *gradients), (wanted, *expected), strict=True):
        laws.assert_close(gradient, exact, 1e-10)
    laws.assert_same({name: value.detach() for name, value in theta.items()}, {k: v.detach() for k, v in start.items()})
    assert not optimizer.state


def test_the_meta_gradient_is_the_tapes():
    """`unrolls.Backprop` in second order, a step's target the next batch."""
    rule, model = learned("direction-and-magnitude"), small_model()
    layout = Layout.of(dict(model.named_parameters()))
    flat = layout.ravel(dict(model.named_parameters())).detach()

    def loss(theta, aux, step):
        return (functional_call(model, layout.unravel(theta), (X[step],)) - Y[step]).square().mean(), aux

    carry = Carry(flat, {}, rule.init(layout, like=flat))
    steps = [InnerStep(step, (Target(step + 1, 1.0),)) for step in range(STEPS)]
    taped = estimators.Backprop(2)(rule.update_with, loss, rule.phi(), carry, steps)
    value, _ = unrolled(model, LearnedOptimizer(model.parameters(), rule), override={"weights": [rule]})
    gradients = torch.autograd.grad(value, list(rule.phi().values()))
    laws.assert_close(value.detach(), taped.value, 1e-10)
    for gradient, name in zip(gradients, rule.phi(), strict=True):
        laws.assert_close(gradient, taped.gradient[name], 1e-10)


def test_options_hold_and_are_differentiable():
    rule, model = learned("direction-and-magnitude"), small_model()
    theta, lr, decay = dict(model.named_parameters()), torch.tensor(0.7).double(), torch.tensor(0.02).double()
    optimizer = LearnedOptimizer(model.parameters(), rule, max_update=0.05)
    leaves = [lr.clone().requires_grad_(), decay.clone().requires_grad_()]
    override = {"lr": [leaves[0]], "weight_decay": [leaves[1]]}
    value, _ = unrolled(model, optimizer, override=override)

    def exact(lr, weight_decay):
        return by_hand(rule.phi(), theta, rule, model, lr, weight_decay, bound=0.05)

    expected, wanted = grad_and_value(exact, argnums=(0, 1))(lr, decay)
    laws.assert_close(value.detach(), wanted.detach(), 1e-10)
    for gradient, one in zip(torch.autograd.grad(value, leaves), expected, strict=True):
        laws.assert_close(gradient, one.detach(), 1e-10)


@pytest.mark.parametrize("tracked", [True, False], ids=["on the tape", "test mode"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_it_goes_on_from_the_optimisers_state_and_does_as_it_does(state_dtype, tracked):
    """Two groups in float32 after two steps, a frozen parameter among them (which test mode would thaw)."""
    model = small_model().float()
    model[0].bias.requires_grad_(not tracked)
    adam = {"params": model[0].parameters(), "weights": {"name": "adam", "lr": 0.01}}
    optimizer = LearnedOptimizer(
        [adam, {"params": model[2].parameters()}],
        learned("direction-and-magnitude").float(),
        lr=0.5,
        weight_decay=0.1,
        state_dtype=state_dtype,
    )

    def descend(steps):
        for step in steps:
            optimizer.zero_grad()
            (model(X[step].float()) - Y[step].float()).square().mean().backward()
            optimizer.step()

    descend(range(2))
    with higher.innerloop_ctx(model, optimizer, track_higher_grads=tracked) as (functional, inner):
        for step in range(2, STEPS):
            inner.step((functional(X[step].float()) - Y[step].float()).square().mean())
    descend(range(2, STEPS))
    for ours, theirs in zip(functional.parameters(), model.parameters(), strict=True):
        laws.assert_close(ours.detach(), theirs.detach(), 1e-5 if state_dtype == "float32" else 0.01)
        assert (ours.grad_fn is not None) == (tracked and theirs.requires_grad)
    states = [value for own in inner.state for table in own.values() for value in table.values()]
    assert tracked or not any(torch.is_tensor(value) and value.requires_grad for value in states)


@pytest.mark.parametrize("rule", DOUBLES)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_state_per_group_goes_on_from_the_optimisers(rule, state_dtype):
    """After steps in which a parameter has had no gradient, so that there are two vectors."""
    model = small_model().float()
    optimizer = LearnedOptimizer(model.parameters(), DOUBLES[rule]().float(), state_dtype=state_dtype)

    def descend(steps):
        for step in steps:
            optimizer.zero_grad()
            (model(X[step].float()) - Y[step].float()).square().mean().backward()
            if step == 1:
                model[0].bias.grad = None
            optimizer.step()

    descend(range(2))
    with higher.innerloop_ctx(model, optimizer) as (functional, inner):
        for step in range(2, STEPS):
            inner.step((functional(X[step].float()) - Y[step].float()).square().mean())
    descend(range(2, STEPS))
    for ours, theirs in zip(functional.parameters(), model.parameters(), strict=True):
        laws.assert_close(ours.detach(), theirs.detach(), 1e-5 if state_dtype == "float32" else 0.01)


def test_a_rule_of_its_own_for_each_group():
    model, rules = small_model(), [learned("additive"), optimisers.SGD(0.1)]
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = LearnedOptimizer(groups, optimisers.SGD(0.3))
    value, functional = unrolled(model, optimizer, override={"weights": rules})
    assert all(gradient.ne(0).any() for gradient in torch.autograd.grad(value, list(rules[0].parameters())))
    twin = small_model()
    separate = [LearnedOptimizer(twin[layer].parameters(), rule) for layer, rule in zip((0, 2), rules, strict=True)]
    for step in range(STEPS):
        twin.zero_grad()
        (twin(X[step]) - Y[step]).square().mean().backward()
        for each_optimizer in separate:
            each_optimizer.step()
    for ours, theirs in zip(functional.parameters(), twin.parameters(), strict=True):
        laws.assert_close(ours.detach(), theirs.detach(), 1e-10)


def test_a_bias_in_a_group_of_its_own_moves_as_the_optimiser_moves_it():
    model = small_model()
    weights, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    optimizer = LearnedOptimizer(
        [{"params": weights}, {"params": biases}], learned({"name": "direction-and-magnitude", "by_fan_in": True})
    )
    with higher.innerloop_ctx(model, optimizer) as (functional, inner):
        inner.step((functional(X[0]) - Y[0]).square().mean())
    (model(X[0]) - Y[0]).square().mean().backward()
    optimizer.step()
    for ours, theirs in zip(functional.parameters(), model.parameters(), strict=True):
        laws.assert_close(ours.detach(), theirs.detach(), 1e-10)


def test_a_fallback_is_refused():
    model = small_model()
    optimizer = LearnedOptimizer(model.parameters(), learned("additive"), fallback="adam")
    with (
        pytest.raises(UserError, match=r"higher: fallback: expected none, as the switch is not smooth"),
        higher.innerloop_ctx(model, optimizer),
    ):
        pass


@pytest.mark.slow
def test_to_import_the_class_is_enough():
    code = "import warnings; warnings.simplefilter('ignore'); import higher, l2lopt; "
    code += "print(l2lopt.LearnedOptimizer in higher.optim._opt_mapping)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"
