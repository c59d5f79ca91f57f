"""Our optimisers as `torch.optim.Optimizer`: the same numbers, and torch.optim's own manners."""

import gc
import logging
import math
import pickle
import subprocess
import sys
import weakref
from copy import deepcopy
from functools import partial
from pathlib import Path

import laws
import pytest
import torch
from implementations import OPTIMISERS, normal, seeded
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

from l2lopt import LearnedOptimizer, UserError, kernels, optimisers
from l2lopt.core.types import Layout
from l2lopt.torch_optim import flat_vectors
from l2lopt.torch_optim.registry import TORCH
from l2lopt.weights import files

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


LSTM = partial(optimisers.make, "coordinatewise", hidden_size=3)
"""A rule from its description, as files have it."""
RANKS = {f"rank {rank}": (2, 3, 1, 2, 2)[:rank] for rank in range(6)} | {"empty": (0, 3)}
RULES = {"adam": partial(optimisers.adam, 0.01)} | {
    label: OPTIMISERS[f"coordinatewise {label}"] for label in ("additive", "direction-and-magnitude")
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ranks_and_dtypes(rule, dtype):
    """Rules compute in float32 from what there is, and the sum is rounded, to the bit."""
    params = {name: torch.nn.Parameter(normal(*shape).to(dtype)) for name, shape in RANKS.items()}
    layout, precise = Layout.of(params), torch.float64 if dtype == torch.float64 else torch.float32
    theta = layout.ravel(params).detach()
    by_hand = kernels.fast(RULES[rule]().to(precise).requires_grad_(False))
    state = by_hand.init(layout, like=theta.to(precise))
    optimizer = LearnedOptimizer(params.values(), RULES[rule](), lr=0.5)
    for step in range(3):
        grads = normal(layout.size, seed=step).to(dtype)
        for param, grad in zip(params.values(), layout.split(grads), strict=True):
            param.grad = grad.view(param.shape).clone()
        optimizer.step(loss=1.0)
        update, state = by_hand.update(grads.to(precise), state, theta.to(precise), torch.ones((), dtype=precise))
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


# How the state lies


@each_optimiser
def test_a_state_is_one_buffer_that_stays(rule):
    params = start(torch.float32)
    optimizer = LearnedOptimizer(params.values(), rule())

    def places():
        return {
            (name, key): (value.data_ptr(), value.untyped_storage().data_ptr())
            for name, param in params.items()
            for key, value in optimizer.state[param].items()
            if torch.is_tensor(value) and key not in ("step", "skipped", "statistic")
        }

    descend(params, optimizer, range(1))
    before = places()
    descend(params, optimizer, range(1, 4))
    assert places() == before
    assert len({storage for _, storage in before.values()}) == len({key for _, key in before})
    descend(params, optimizer, range(4, 6), lambda step: ["vector"])
    assert len({storage for (_, key), (_, storage) in places().items()}) == 2 * len({key for _, key in before})


def test_parameters_left_behind_do_not_hold_the_memory_of_all():
    params = start(torch.float32)
    optimizer = LearnedOptimizer(params.values(), LSTM())
    descend(params, optimizer, range(1))
    whole = weakref.ref(optimizer.state[params["matrix"]]["cell.h"]._base)
    descend(params, optimizer, range(1, 2), lambda step: ["vector"])
    assert whole() is None


def test_a_state_put_in_the_place_of_a_view_counts():
    one, other = start(), start()
    first, second = (LearnedOptimizer(params.values(), LSTM()) for params in (one, other))
    descend(one, first, range(2))
    descend(other, second, range(2))
    first.state[one["matrix"]]["cell.h"].zero_()
    second.state[other["matrix"]]["cell.h"] = torch.zeros(3, 3, 2, dtype=torch.float64)
    laws.assert_same(descend(one, first, range(2, 4)), descend(other, second, range(2, 4)))


def test_many_tensors_are_one_to_a_rule_without_statistics():
    many = {str(index): torch.nn.Parameter(part.clone()) for index, part in enumerate(normal(30).split(3))}
    one = {"all": torch.nn.Parameter(normal(30))}
    rule = OPTIMISERS["coordinatewise additive"]()
    after = descend(many, LearnedOptimizer(many.values(), rule), range(4))
    laws.assert_close(
        torch.cat(list(after.values())), descend(one, LearnedOptimizer(one.values(), rule), range(4))["all"]
    )


@pytest.mark.parametrize("name", ["additive", "direction-and-magnitude"])
def test_a_state_in_bfloat16_is_worked_on_in_pieces(name, monkeypatch):
    """The first update is exact, later ones come from a rounded state; what is shared is that of the whole."""
    results = {}
    for piece, dtype in ((2**16, "float32"), (2**16, "bfloat16"), (3, "bfloat16")):
        monkeypatch.setattr(flat_vectors, "PIECE", piece)
        params = start()
        optimizer = LearnedOptimizer(params.values(), RULES[name](), state_dtype=dtype)
        (params["vector"] * math.nan).sum().backward()
        params["matrix"].grad, params["scalar"].grad = normal(3, 2), normal()
        optimizer.step()
        first = {key: value.detach().clone() for key, value in params.items()}
        laws.assert_same(first["vector"], start()["vector"].detach())
        later, own = descend(params, optimizer, range(4)), optimizer.state[params["matrix"]]
        results[piece, dtype] = first, later, own
    (first, later, own), *others = results.values()
    for in_pieces, after, state in others:
        laws.assert_close(in_pieces, first)
        laws.assert_close(after, later, 0.02)
        assert state["cell.h"].dtype == torch.bfloat16
        assert (state["step"].item(), state["skipped"].item()) == (own["step"].item(), own["skipped"].item()) == (5, 4)
        assert state.get("statistic", torch.ones(0)).shape == own.get("statistic", torch.ones(0)).shape


# Options and groups


def test_decay_is_decoupled_as_adamws():
    ours, theirs = start(), start()
    optimizer = LearnedOptimizer(ours.values(), optimisers.adam(1.0), lr=0.02, weight_decay=0.2)
    reference = torch.optim.AdamW(theirs.values(), lr=0.02, weight_decay=0.2)
    laws.assert_close(descend(ours, optimizer, range(20)), descend(theirs, reference, range(20)))


def test_a_bound_holds_for_each_coordinate_before_the_rate():
    params = start()
    optimizer = LearnedOptimizer(params.values(), optimisers.SGD(1.0), lr=0.5, max_update=0.1)
    for param in params.values():
        param.grad = torch.full_like(param, 3.0)
    params["vector"].grad = torch.tensor([0.05, -0.05, 4.0, -4.0], dtype=torch.float64)
    optimizer.step()
    change = {name: value.detach() - start()[name].detach() for name, value in params.items()}
    laws.assert_close(change["vector"], torch.tensor([-0.025, 0.025, -0.05, 0.05], dtype=torch.float64), 1e-9)
    laws.assert_close(change["matrix"], torch.full((3, 2), -0.05, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize("lr", [torch.tensor(0.02), 0.02], ids=["tensor", "number"])
def test_groups_have_rules_of_their_own(lr, tmp_path):
    files.save(LSTM(seed=3), tmp_path / "w.safetensors")
    ours, theirs, alone = start(), start(), start()
    groups = [
        {"params": [("matrix", ours["matrix"])], "weights": {"name": "adam", "lr": 1.0}, "lr": lr},
        {"params": [("scalar", ours["scalar"])], "max_update": 0.01},
    ]
    before = [dict(group) for group in groups]
    optimizer = LearnedOptimizer(groups, tmp_path / "w.safetensors", fallback="adam")
    added = {"params": [("vector", ours["vector"])], "weights": optimisers.SGD(0.05), "weight_decay": 0.1}
    optimizer.add_param_group(added)
    assert groups == before
    assert set(added) == {"params", "weights", "weight_decay"}
    after = descend(ours, optimizer, range(8))
    separate = [
        torch.optim.Adam([theirs["matrix"]], lr=0.02),
        torch.optim.SGD([theirs["vector"]], lr=0.05),
        LearnedOptimizer([theirs["scalar"]], LSTM(seed=3).double(), max_update=0.01),
    ]
    for step in range(8):
        bumpy(theirs, step).backward()
        with torch.no_grad():
            theirs["vector"].mul_(1 - 0.1)
        for each in separate:
            each.step()
            each.zero_grad()
    laws.assert_close(
        after, {name: value.detach() for name, value in theirs.items()}, 1e-6 if torch.is_tensor(lr) else 1e-12
    )
    assert [group["fallback"] is None for group in optimizer.param_groups] == [True, False, True]
    again = LearnedOptimizer([alone["scalar"]], tmp_path / "w.safetensors", fallback="adam")
    again.add_param_group({**again.param_groups[0], "params": [alone["matrix"]]})  # a copied group has its rules
    assert again.param_groups[1]["weights"] == again.param_groups[0]["weights"] == optimizer.param_groups[1]["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"LearnedOptimizer: lr: expected at least 0"),
        ({"lr": torch.tensor([0.1, 0.1])}, r"LearnedOptimizer: lr: expected one number, found \[2\]"),
        ({"weight_decay": -1.0}, r"weight_decay: expected at least 0"),
        ({"max_update": 0.0}, r"max_update: expected above 0"),
        ({"state_dtype": "float61"}, r"state_dtype: expected a known name, found 'float61'; did you mean"),
        ({"fallback": "adamm"}, r"optimiser: expected a known name, found 'adamm'; did you mean 'adam'"),
        ({"fallback": LSTM()}, r"fallback: expected a hand-made optimiser, found Coordinatewise"),
        ({"weights": {"name": "adam"}}, r"optimiser 'adam': lr: expected a value, found none"),
        ({"capturable": True}, r"capturable: expected False, found True; .* on the host"),
    ],
    ids=str,
)
def test_a_mistaken_option_is_refused_for_all_and_for_a_group(options, message):
    param, rule = torch.nn.Parameter(torch.ones(2)), {"weights": optimisers.SGD(0.1)}
    with pytest.raises(UserError, match=message):
        LearnedOptimizer([param], **(rule | options))
    with pytest.raises(UserError, match=message):
        LearnedOptimizer([{"params": [param], **options}], **rule)


# What torch.optim refuses, and what it leaves alone

ONE, TWO = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(1, 1))
MISTAKES = {
    "a bare tensor": (ONE, TypeError, "should be an iterable of Tensors or dicts"),
    "no parameters": ([], ValueError, "empty parameter list"),
    "one twice in a group": ([ONE, ONE], UserWarning, "a parameter group with duplicate parameters"),
    "a set": ({ONE, TWO}, FutureWarning, "need to be organized in ordered collections"),
    "one in two groups": ([{"params": ONE}, {"params": ONE}], ValueError, "appear in more than one parameter group"),
    "some names": ([("one", ONE), TWO], ValueError, "Some param names are missing"),
    "names in a later group": (
        [{"params": [ONE]}, {"params": [("two", TWO)]}],
        ValueError,
        "cannot add param group with names to the optimizer",
    ),
    "a tensor that is no leaf": ([2 * ONE], ValueError, "can't optimize a non-leaf Tensor"),
}
"""Label → (parameters, what torch.optim raises, its message): what all of torch's classes are tested on."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_parameters_are_refused_as_torch_does(mistake):
    params, error, message = MISTAKES[mistake]
    for kind in (torch.optim.SGD, LearnedOptimizer):
        with pytest.raises(error, match=message):
            kind(params, optimisers.SGD(0.1)) if kind is LearnedOptimizer else kind(params, lr=0.1)


def test_a_step_without_any_gradient_does_nothing():
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM(), weight_decay=0.1, fallback="adam")
    optimizer.step()
    laws.assert_same(
        {name: value.detach() for name, value in params.items()}, {n: v.detach() for n, v in start().items()}
    )
    assert optimizer.state_dict()["state"] == {}


def test_a_copy_has_all_public_attributes():
    optimizer = LearnedOptimizer(start().values(), LSTM())
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {name for name in vars(deepcopy(optimizer)) if not name.startswith("_")} == public


@pytest.mark.parametrize("rule", [partial(optimisers.adam, 0.01), LSTM], ids=["adam", "the recipe"])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("schedulers", [(), ("StepLR",), ("StepLR", "ReduceLROnPlateau")], ids=str)
def test_it_goes_downhill(rule, contiguous, schedulers):
    """A weight and a bias of one layer, by closure, with one or more schedulers; the recipe begins near Adam's way."""
    weight = torch.nn.Parameter(normal(10, 5, 2).float()[..., 0])
    weight = torch.nn.Parameter(weight.detach().contiguous()) if contiguous else weight
    bias, x = torch.nn.Parameter(normal(10, seed=1).float()), normal(5, seed=2).float()
    assert weight.is_contiguous() == contiguous
    optimizer = LearnedOptimizer([weight, bias], rule())
    on_top = [scheduled(each, optimizer) for each in schedulers]

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure).item()
        for scheduler in on_top:
            scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    assert closure().item() < first


# Schedulers, scalers, hooks, compiled models

SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {"total_iters": 4},
    "CosineAnnealingLR": {"T_max": 6},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 10.0},
    "SequentialLR": {"milestones": [3]},
    "ChainedScheduler": {},
    "SWALR": {"swa_lr": 0.01, "anneal_epochs": 3},
}


def scheduled(name, optimizer):
    if name in ("SequentialLR", "ChainedScheduler"):
        inner = [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)]
        made = getattr(lr_scheduler, name)
        return made(optimizer, inner, **SCHEDULERS[name]) if name == "SequentialLR" else made(inner, optimizer)
    return getattr(swa_utils if name == "SWALR" else lr_scheduler, name)(optimizer, **SCHEDULERS[name])


def test_every_scheduler_is_in_the_table():
    base = lr_scheduler.LRScheduler
    there = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and issubclass(kind, base)}
    assert there - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_scale_the_update(name):
    """Those that move the momentum as well need `cycle_momentum=False`: our rules have no such option."""
    ours, theirs = start(), start()
    pairs = [
        (ours, LearnedOptimizer(ours.values(), optimisers.SGD(1.0), lr=0.05)),
        (theirs, torch.optim.SGD(theirs.values(), lr=0.05)),
    ]
    rates = []
    for params, optimizer in pairs:
        scheduler = scheduled(name, optimizer)
        rates.append([])
        for step in range(8):
            descend(params, optimizer, [step])
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    laws.assert_close(dict(ours), dict(theirs))


def test_a_scaler_skips_steps_and_unscales():
    scaled, plain = start(torch.float32), start(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    first, second = LearnedOptimizer(scaled.values(), LSTM()), LearnedOptimizer(plain.values(), LSTM())
    for step in range(5):
        loss = bumpy(scaled, step)
        scaler.scale(loss).backward()
        if step == 2:
            scaled["matrix"].grad[0, 0] = math.inf
        scaler.step(first, loss=loss)
        scaler.update()
        first.zero_grad()
        if step != 2:
            descend(plain, second, [step])
    assert scaler.get_scale() == 512.0
    laws.assert_same(dict(scaled), dict(plain))
    assert first.state[scaled["matrix"]]["step"].item() == 4


def test_hooks():
    params, calls = start(), []
    optimizer = LearnedOptimizer(params.values(), LSTM())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("before", sorted(kwargs))))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    descend(params, optimizer, range(1))
    handle.remove()
    assert calls == [("before", ["loss"]), "after", "all"]
    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"note": 1})
    saved = optimizer.state_dict()
    assert saved.pop("note") == 1

    def with_h_cleared(optimizer, state):
        cleared = {key: own | {"cell.h": torch.zeros_like(own["cell.h"])} for key, own in state["state"].items()}
        return {**state, "state": cleared}

    def look(optimizer):
        calls.append(float(optimizer.state[params["matrix"]]["cell.h"].abs().max()))

    optimizer.register_load_state_dict_pre_hook(with_h_cleared)
    optimizer.register_load_state_dict_post_hook(look)
    optimizer.load_state_dict(saved)
    assert calls[3:] == ["saving", 0.0]


def test_a_compiled_model_trains_alike():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    twin = deepcopy(model)
    for module, call in ((model, model), (twin, torch.compile(twin, backend="eager"))):
        optimizer = LearnedOptimizer(module.named_parameters(), LSTM())
        for step in range(3):
            optimizer.zero_grad()
            call(normal(5, 3, seed=step).float()).square().mean().backward()
            optimizer.step()
    laws.assert_same(twin.state_dict(), model.state_dict())


# Saving


def test_a_state_dict_holds_tensors_and_plain_values(tmp_path):
    params = start()
    groups = [
        {"params": [params["matrix"]]},
        {"params": [params["vector"], params["scalar"]], "weights": optimisers.SGD(0.1)},
    ]
    optimizer = LearnedOptimizer(groups, LSTM(), fallback="adam", lr=torch.tensor(0.5))
    descend(params, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    laws.assert_same(saved, optimizer.state_dict())
    assert saved["param_groups"][0]["weights"] == files.digest(LSTM())
    assert not any(isinstance(value, torch.nn.Module) for group in optimizer.param_groups for value in group.values())
    assert "weights" in repr(optimizer)


@pytest.mark.parametrize("again", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@each_optimiser
def test_copies_go_on_by_themselves(rule, again):
    params = start()
    optimizer = LearnedOptimizer(params.values(), rule(), fallback="adam")
    descend(params, optimizer, range(3))
    other, copies = again((optimizer, params))
    expected = descend(params, optimizer, range(3, 5))
    laws.assert_same(descend(copies, other, range(3, 5)), expected)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "weights": {"name": "sgd", "lr": 0.1}})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"weights": LSTM(seed=1)},
            r"expected the state of weights (2:\w{16}), found that of weights (?!\1)2:\w{16}; make",
        ),
        (
            {"weights": optimisers.SGD(0.2)},
            r"expected the state of weights (2:\w{16}), found that of weights (?!\1)2:\w{16}",
        ),
        ({"fallback": None}, r"expected the state of fallback None, found that of fallback 2:\w{16}"),
    ],
    ids=["another φ", "another rule", "no fallback"],
)
def test_the_state_of_other_rules_is_refused(other, message):
    params, options = start(), {"weights": LSTM(), "fallback": "adam"}
    optimizer = LearnedOptimizer(params.values(), **options)
    descend(params, optimizer, range(2))
    another = LearnedOptimizer(params.values(), **(options | other))
    before = another.state_dict()
    with pytest.raises(UserError, match=message):
        another.load_state_dict(optimizer.state_dict())
    laws.assert_same(another.state_dict(), before)
    with pytest.raises(UserError, match=r"found that of weights None"):
        another.load_state_dict(torch.optim.SGD(params.values(), lr=0.1).state_dict())


OLD = Path(__file__).parents[1] / "golden" / "state-digest-1.pt"
"""Name → the states of Linear(3, 2) and `LearnedOptimizer(…, name, fallback="adam")` after three steps, as 0.1.0 left
them when hashes had no version."""


def linear(name, saved):
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(saved["model"])
    return dict(model.named_parameters()), LearnedOptimizer(model.named_parameters(), name, fallback="adam")


@pytest.mark.parametrize("name", ["lstm", "ihc-lstm"])
def test_a_state_with_a_hash_of_the_first_version_goes_on(name):
    saved = torch.load(OLD, weights_only=True)[name]
    params, optimizer = linear(name, saved)
    marks = {key: optimizer.param_groups[0][key] for key in ("weights", "fallback")}
    before = deepcopy(saved["optimizer"])
    optimizer.load_state_dict(saved["optimizer"])
    laws.assert_same(saved["optimizer"], before)
    assert {key: optimizer.param_groups[0][key] for key in marks} == marks
    again, other = linear(name, saved)
    saved["optimizer"]["param_groups"][0] |= marks
    other.load_state_dict(saved["optimizer"])
    laws.assert_same(optimizer.state_dict(), other.state_dict())
    laws.assert_same(descend(params, optimizer, range(3)), descend(again, other, range(3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "lstm"}, r"expected the state of fallback None, found that of fallback \w{16}"),
        ({"weights": {"name": "adam", "lr": 0.1}, "fallback": "adam"}, r"weight: expected .*'m'.*found .*'cell\.h'"),
        ({"weights": {"name": "sgd", "lr": 0.1}, "fallback": "adam"}, r"weight: expected \{\}, found .*'cell\.h'"),
        ({"weights": LSTM(hidden_size=3), "fallback": "adam"}, r"'cell\.h': \(3,\).*'cell\.h': \(20,\)"),
        ({"weights": "lstm", "fallback": "momentum"}, r"weight: expected .*'velocity'.*found .*'m'"),
    ],
)
def test_such_a_state_of_other_rules_is_refused_where_that_shows(options, message):
    saved = torch.load(OLD, weights_only=True)["lstm"]
    optimizer = LearnedOptimizer(torch.nn.Linear(3, 2).named_parameters(), **options)
    before = deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=message):
        optimizer.load_state_dict(saved["optimizer"])
    laws.assert_same(optimizer.state_dict(), before)


def test_such_a_state_of_a_hand_made_rule_goes_on():
    params = start()
    optimizer = LearnedOptimizer(params.values(), optimisers.SGD(0.1))
    descend(params, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["weights"] = "0123456789abcdef"
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weights"] in optimizer.rules


def test_a_state_of_another_kind_is_taken_up():
    """A step count that is a number, options that were not there yet, parameters of another dtype."""
    params = start()
    optimizer = LearnedOptimizer(params.values(), optimisers.adam(0.01))
    descend(params, optimizer, range(3))
    saved = deepcopy(optimizer.state_dict())
    for own in saved["state"].values():
        own["step"] = own["step"].item()
    del saved["param_groups"][0]["max_update"], saved["param_groups"][0]["state_dtype"]
    single = {name: torch.nn.Parameter(value.detach().float()) for name, value in params.items()}
    other = LearnedOptimizer(single.values(), optimisers.adam(0.01))
    other.load_state_dict(saved)
    laws.assert_close(
        {name: value.double() for name, value in descend(single, other, range(3, 6)).items()},
        descend(params, optimizer, range(3, 6)),
        1e-6,
    )
    assert other.state[single["matrix"]]["m"].dtype == torch.float32


def test_a_state_by_names_goes_on_as_distributed_checkpoints_have_it():
    by_names = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        adam = {"params": model[1].parameters(), "weights": {"name": "adam", "lr": 0.1}}
        return model, LearnedOptimizer([{"params": model[0].parameters()}, adam], LSTM(), fallback="adam")

    (model, optimizer), (other, another) = made(), made()
    descend(dict(model.named_parameters()), optimizer, range(3))
    other.load_state_dict(model.state_dict())
    by_names.set_optimizer_state_dict(other, another, by_names.get_optimizer_state_dict(model, optimizer))
    expected = descend(dict(model.named_parameters()), optimizer, range(3, 6))
    laws.assert_same(descend(dict(other.named_parameters()), another, range(3, 6)), expected)


def test_a_first_state_is_made_without_a_loss():
    """Distributed checkpoints have it made by a step at a rate of 0; nothing else has happened then."""
    by_names = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = torch.nn.Linear(3, 4)
    before = laws.clone(dict(model.state_dict()))
    rule = LSTM(inputs=["log-and-sign", "rnnprop", "loss"])
    optimizer = LearnedOptimizer(model.parameters(), rule, fallback="adam", weight_decay=0.1)
    assert set(by_names.get_optimizer_state_dict(model, optimizer)["state"]) == {"weight", "bias"}
    laws.assert_same(dict(model.state_dict()), before)
    assert optimizer.param_groups[0]["first_loss"] is None


def test_it_goes_when_nobody_holds_it():
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM(), fallback="adam")
    descend(params, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    assert gone() is None


def test_the_hash_is_that_of_numbers_and_description():
    rules = [LSTM(), LSTM(seed=1), LSTM(hidden_size=4), optimisers.SGD(0.1), optimisers.SGD(0.2), optimisers.adam(0.1)]
    assert len({files.digest(rule) for rule in rules}) == len(rules)
    assert files.digest(LSTM()) == files.digest(deepcopy(LSTM()))


RUN = """
import sys, torch
from l2lopt import LearnedOptimizer, optimisers
torch.set_num_threads(1)
first, last, path, dtype, state_dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *sys.argv[4:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 7))
model.to(getattr(torch, dtype))
groups = [{"params": model[0].parameters(), "weights": {"name": "adam", "lr": 0.01}, "lr": 1.0}]
groups += [{"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.01}]
rule = optimisers.make("coordinatewise", hidden_size=4, inputs=["log-and-sign", "rnnprop", "loss"])
optimizer = LearnedOptimizer(groups, rule, lr=0.5, state_dtype=state_dtype, fallback="adam", max_update=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
if first:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
for step in range(first, last):
    tokens = torch.randint(7, (16,), generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % 7)
    optimizer.zero_grad()
    loss.backward()
    if step % 50 > 45:
        model[1].bias.grad = None
    optimizer.step(loss=loss)
    scheduler.step()
    if step + 1 in (300, last):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, path if step + 1 == 300 else path + ".end" + str(first))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
    ids=str,
)
def test_a_new_process_goes_on_to_the_bit(dtypes, tmp_path):
    """600 steps at once, and 300 after 300 in another process."""
    path = str(tmp_path / "run.pt")
    for first in ("0", "300"):
        subprocess.run([sys.executable, "-c", RUN, first, "600", path, *dtypes], check=True)
    whole, resumed = (torch.load(f"{path}.end{first}", weights_only=True) for first in (0, 300))
    laws.assert_same(resumed, whole)
    assert whole["model"]["1.weight"].isfinite().all()


# The guard


def guarded(params, rule, **options):
    return LearnedOptimizer(params.values(), rule, fallback={"name": "adam", "lr": 0.01}, **options)


def warnings_of(caplog):
    return [
        record.message for record in caplog.records if record.name == "l2lopt" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize(("bad", "said"), [(math.nan, "nan"), (math.inf, "inf"), (31.0, "31"), (29.0, None)])
def test_a_loss_that_has_diverged_brings_in_the_fallback(bad, said, caplog):
    """The fallback has seen every gradient, so it goes on as if it had run all the time."""
    params, other = start(), start()
    optimizer, adam = guarded(params, LSTM()), optimisers.adam(0.01)
    layout = Layout.of(other)
    state = adam.init(layout, like=layout.ravel(other))
    for step in range(6):
        grads = normal(layout.size, seed=step)
        for param, grad in zip(params.values(), layout.split(grads), strict=True):
            param.grad = grad.view(param.shape).clone()
        before = layout.ravel(params).detach()
        optimizer.step(loss=torch.tensor(bad if step == 3 else 3.0))
        update, state = adam.update(grads, state, before)
        by_adam = torch.allclose(layout.ravel(params).detach() - before, update.detach(), rtol=1e-9)
        assert by_adam == (said is not None and step >= 3)
    assert optimizer.param_groups[0]["fallen_back"] == (said is not None)
    assert len(warnings_of(caplog)) == (said is not None)
    assert said is None or f"the loss is {said} and was 3 at first" in warnings_of(caplog)[0]


def test_an_update_that_is_not_finite_brings_in_the_fallback(caplog):
    params = start()
    optimizer = guarded(params, seeded(LSTM(rule="additive")))
    expected = start()
    descend(params, optimizer, range(2))
    with torch.no_grad():
        optimizer.state[params["matrix"]]["cell.h"][0, 0, 0] = math.nan
    saved = deepcopy(optimizer.state_dict())
    held = {name: value.detach().clone() for name, value in params.items()}
    after = descend(params, optimizer, range(2, 6))
    assert all(value.isfinite().all() for value in after.values())
    assert len(warnings_of(caplog)) == 1
    assert "not finite" in warnings_of(caplog)[0]
    for name, value in expected.items():
        value.data.copy_(held[name])
    other = guarded(expected, seeded(LSTM(rule="additive")))
    other.load_state_dict(saved)
    laws.assert_same(descend(expected, other, range(2, 6)), after)
    resumed = guarded(expected, seeded(LSTM(rule="additive")))
    resumed.load_state_dict(optimizer.state_dict())
    laws.assert_same(descend(expected, resumed, range(6, 8)), descend(params, optimizer, range(6, 8)))


def test_the_fallback_survives_gradients_that_are_not_finite():
    params = start()
    optimizer = guarded(params, LSTM())
    params["vector"].grad = torch.tensor([1.0, math.nan, math.inf, 1e200], dtype=torch.float64)
    optimizer.step()
    optimizer.step(loss=math.nan)
    assert params["vector"].isfinite().all()
    assert optimizer.state[params["vector"]]["fallback.v"].isfinite().all()


def test_a_bias_moves_by_its_matrixs_fan_in_even_alone():
    """A first update of Adam's direction has the size lr/√fan-in, here 0.1/√64, though the matrix is frozen."""
    layer = torch.nn.Linear(64, 10)
    layer.bias.grad = normal(10).float()
    before = layer.bias.detach().clone()
    LearnedOptimizer(layer.parameters(), {"name": "normalised-adam", "weight_decay": 0.0}).step()
    laws.assert_close((layer.bias - before).abs(), torch.full((10,), 0.1 / 8), 1e-5)


@pytest.mark.parametrize("options", [{}, {"fallback": "adam"}, {"state_dtype": "bfloat16"}])
def test_an_empty_group_steps_with_the_others(options):
    full, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))
    optimizer = LearnedOptimizer([{"params": [full]}, {"params": [empty]}], "lstm", **options)
    full.grad, empty.grad = torch.ones(3), torch.empty(0)
    optimizer.step()
    assert full.ne(1).all()


def test_a_bias_in_a_group_of_its_own_moves_as_beside_its_matrix():
    def moved(groups):
        layer, other = seeded(nn.Linear(30, 4)), seeded(nn.Linear(4, 7))
        before = layer.bias.detach().clone()
        optimizer = LearnedOptimizer(groups(layer, other), "lstm")
        for number, p in enumerate((layer.weight, layer.bias, other.weight, other.bias)):
            p.grad = torch.linspace(-1, 1, p.numel()).to(p).view_as(p) + number
        optimizer.step()
        return layer.bias.detach() - before

    together = moved(lambda a, b: [*a.parameters(), *b.parameters()])
    apart = moved(lambda a, b: [{"params": [a.weight, b.weight]}, {"params": [a.bias, b.bias]}])
    torch.testing.assert_close(apart, together)


@pytest.mark.parametrize("key", ["maximize", "differentiable", "capturable"])
def test_a_groups_option_that_would_change_a_step_is_refused(key):
    with pytest.raises(UserError, match=f"LearnedOptimizer: {key}: expected False, found True"):
        LearnedOptimizer([{"params": [nn.Parameter(torch.ones(1))], key: True}], {"name": "sgd", "lr": 0.1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": None}, "lr: expected a number, found None"),
        ({"lr": "0.1"}, "lr: expected a number, found '0.1'"),
        ({"weight_decay": None}, "weight_decay: expected a number, found None"),
        ({"weights": None}, "weights: expected a name, a file, a choice or an optimiser, found None"),
        ({"fallback": 3}, "fallback: expected a name, a choice or a hand-made optimiser, found 3"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(options, message):
    with pytest.raises(UserError, match=f"LearnedOptimizer: {message}"):
        LearnedOptimizer([nn.Parameter(torch.ones(1))], **{"weights": "lstm"} | options)


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
    assert param.equal(after)


def test_a_rate_of_one_number_is_taken_whatever_its_shape():
    moved = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([[0.5]])):
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        LearnedOptimizer([param], {"name": "sgd", "lr": 0.1}, lr=lr).step()
        moved.append(param.detach())
    assert moved[0].equal(moved[1])
    assert moved[0].equal(moved[2])


@pytest.mark.parametrize("fault", ["another shape", "transposed", "a part missing"])
def test_the_state_of_another_model_is_refused(fault):
    def stepped(*shape):
        param = nn.Parameter(torch.ones(*shape))
        optimizer = LearnedOptimizer([param], "lstm", fallback="adam")
        param.grad = torch.ones(*shape)
        optimizer.step()
        return optimizer

    shape = {"another shape": (4, 3), "transposed": (5, 3), "a part missing": (3, 5)}[fault]
    saved, target = stepped(*shape).state_dict(), stepped(3, 5)
    if fault == "a part missing":
        del saved["state"][0]["cell.h"]
    before = deepcopy(target.state_dict())
    with pytest.raises(UserError, match=r"load_state_dict: p0: expected .*cell\.h, .* \[\.\.\., \*\[3, 5\]\]"):
        target.load_state_dict(saved)
    laws.assert_same(target.state_dict()["state"], before["state"])
