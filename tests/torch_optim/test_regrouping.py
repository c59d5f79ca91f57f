"""Parameters that come into other groups, into one memory or into another shape between steps."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from l2lopt import LearnedOptimizer, UserError
from l2lopt.core.kinds import Role
from l2lopt.torch_optim.parameter_groups import inform


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(5, 4)).square().mean().backward()
    optimizer.step()


def counts(optimizer):
    return [int(optimizer.state[param]["step"]) for group in optimizer.param_groups for param in group["params"]]


def two_ages(weights):
    """A model whose second layer came two steps later than the first, which made three alone."""
    net = model()
    first, second = list(net[0].parameters()), list(net[2].parameters())
    optimizer = LearnedOptimizer(first, weights, steps=9)
    for _ in range(2):
        step(net, optimizer)
    optimizer.add_param_group({"params": second})
    step(net, optimizer)
    assert counts(optimizer) == [3, 3, 1, 1]
    return net, optimizer


each_rule = pytest.mark.parametrize("weights", ["normalised-muon", "lstm", {"name": "adam", "lr": 0.01}], ids=str)


@each_rule
def test_groups_that_become_one_keep_their_counts(weights):
    """As if each parameter had gone on by itself; rules per tensor and Adam know no other parameter."""
    net, optimizer = two_ages(weights)
    apart, beside = two_ages(weights)
    moved = optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"].extend(moved["params"])
    for _ in range(2):
        step(net, optimizer)
        step(apart, beside)
    assert counts(optimizer) == counts(beside) == [5, 5, 3, 3]
    if weights != "lstm":  # whose tensors' neighbours are those of its group
        for one, other in zip(net.parameters(), apart.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@each_rule
def test_a_state_by_names_of_more_groups_keeps_its_counts(weights):
    net, optimizer = two_ages(weights)
    saved = get_optimizer_state_dict(net, optimizer)
    other = deepcopy(net)
    whole = LearnedOptimizer(other.parameters(), weights, steps=9)
    set_optimizer_state_dict(other, whole, saved)
    step(other, whole)
    assert counts(whole) == [4, 4, 2, 2]


def test_a_parameter_whose_state_was_lost_begins_alone():
    net = model()
    optimizer = LearnedOptimizer(net.parameters(), {"name": "adam", "lr": 0.01})
    step(net, optimizer)
    optimizer.state[net[0].weight] = {"vector": 0}
    step(net, optimizer)
    assert counts(optimizer) == [1, 2, 2, 2]


@pytest.mark.parametrize("weights", [{"name": "sgd", "lr": 0.1}, {"name": "momentum", "lr": 0.1}])
def test_parameters_in_one_memory_both_move_it(weights):
    first = nn.Parameter(torch.ones(4))
    second = nn.Parameter(first)  # another object of the same numbers
    ours = LearnedOptimizer([first, second], weights)
    one = nn.Parameter(torch.ones(4))
    other = nn.Parameter(one)
    momentum = 0.9 if weights["name"] == "momentum" else 0.0
    torchs = torch.optim.SGD([one, other], lr=0.1, momentum=momentum)
    for _ in range(3):
        first.grad, second.grad = torch.ones(4), 2 * torch.ones(4)
        one.grad, other.grad = torch.ones(4), 2 * torch.ones(4)
        ours.step()
        torchs.step()
    torch.testing.assert_close(first, one)


def test_weights_that_are_tied_between_steps_both_move_them():
    """As in `p.data = q.data`, which leaves every object and every state as it was."""
    ours, torchs = ([nn.Parameter(torch.ones(4)), nn.Parameter(2 * torch.ones(4))] for _ in range(2))
    optimizers = LearnedOptimizer(ours, {"name": "sgd", "lr": 0.1}), torch.optim.SGD(torchs, lr=0.1)
    for number in range(3):
        for (first, second), optimizer in zip((ours, torchs), optimizers, strict=True):
            first.grad, second.grad = torch.ones(4), 2 * torch.ones(4)
            optimizer.step()
            if not number:
                second.data = first.data
    torch.testing.assert_close(ours, torchs)


def test_a_parameter_that_is_taken_out_takes_its_name_with_it():
    """A name decides what a parameter is taken for, and which of the names is gone nobody can tell."""
    net = model()
    optimizer = LearnedOptimizer(net.named_parameters(), {"name": "adam", "lr": 0.01})
    step(net, optimizer)
    group = optimizer.param_groups[0]
    group["params"].pop(1)
    with pytest.raises(UserError, match=r"param_names: expected 3 names, one for each parameter, found 4; take"):
        step(net, optimizer)
    group["param_names"].pop(1)
    step(net, optimizer)
    assert counts(optimizer) == [2, 2, 2]


def test_a_parameter_of_another_shape_is_refused_until_its_state_is_dropped():
    net = model()
    optimizer = LearnedOptimizer(net.parameters(), {"name": "adam", "lr": 0.01})
    step(net, optimizer)
    weight = net[0].weight
    for shape in ((4, 3), (8, 3)):
        weight.data, weight.grad = torch.ones(shape), torch.ones(shape)
        with pytest.raises(UserError, match=rf"state of parameter 'p0': expected m \[{shape[0]}, 3\], found \[3, 4\]"):
            optimizer.step()
    optimizer.state.pop(weight)
    optimizer.step()
    assert optimizer.state[weight]["m"].shape == (8, 3)


@pytest.mark.parametrize("made", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(1, 4))])
@pytest.mark.filterwarnings("ignore:`torch.jit")  # of which torch.compile and torch.export take the place
def test_a_scripted_module_gives_its_parameters(made):
    net = made(model())
    with pytest.raises(
        UserError, match=r"found one of torch\.jit\.script or torch\.jit\.trace; give its named_parameters"
    ):
        LearnedOptimizer(net)
    optimizer = LearnedOptimizer(net.named_parameters(), steps=3)
    step(net, optimizer)


@pytest.mark.parametrize("steps", [0, -5, 10.5, True, "50", 10**20])
def test_a_length_of_the_run_that_is_none_changes_nothing(steps):
    net = model()
    optimizer = LearnedOptimizer([{"params": net[0].parameters()}, {"params": net[2].parameters()}], steps=7)
    with pytest.raises(UserError, match="steps: expected a whole number above 0"):
        inform(optimizer, steps=steps)
    assert [group["steps"] for group in optimizer.param_groups] == [7, 7]


def test_a_length_of_numpy_is_saved_as_pythons(tmp_path):
    net = model()
    optimizer = LearnedOptimizer(net.parameters())
    inform(optimizer, steps=np.int64(30))
    step(net, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert optimizer.param_groups[0]["steps"] == 30


def test_an_unknown_kind_that_is_told_later_changes_nothing():
    optimizer = LearnedOptimizer(model())
    with pytest.raises(UserError, match="matrx"):
        inform(optimizer, steps=9, known={"0.weight": Role("matrx")})
    assert optimizer.param_groups[0]["kind"][0] == "matrix"
    assert optimizer.param_groups[0]["steps"] is None


@pytest.mark.parametrize("option", [{"kind": ["embedding", "vector"]}, {"split": [1, 1]}, {"fan_in": [7, 7]}], ids=str)
def test_a_list_for_the_first_parameters_is_not_one_for_later_ones(option):
    net = model()
    optimizer = LearnedOptimizer(net[0].parameters(), **option)
    optimizer.add_param_group({"params": net[2].parameters()})
    ((name, _),) = option.items()
    assert optimizer.param_groups[1][name] is None
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("copied", [deepcopy, lambda one: one], ids=["copy", "original"])
def test_a_copy_warns_of_a_group_as_the_original(copied, caplog):
    optimizer = copied(LearnedOptimizer(model(), "lstm", steps=9))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-3})
    assert caplog.text.count("lr=0.001 makes every step of the rule that much smaller") == 1


def test_a_rule_that_a_fallback_has_taken_over_from_has_no_end(caplog):
    net = model()
    optimizer = LearnedOptimizer(net, "lstm", steps=3, fallback={"name": "adam", "lr": 0.01})
    for loss in (1.0, 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0):
        optimizer.zero_grad()
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step(loss=loss)
    assert caplog.text.count("the run was to end after 3 steps") == 1


def test_a_complex_loss_is_refused():
    net = model()
    optimizer = LearnedOptimizer(net, fallback="adam", steps=3)
    net(torch.ones(5, 4)).square().mean().backward()
    with pytest.raises(UserError, match="step: loss: expected a real number"):
        optimizer.step(loss=torch.tensor(1 + 2j))


def test_parameters_without_memory_are_refused():
    param = nn.Parameter(torch.ones(3, 2, device="meta"))
    param.grad = torch.ones(3, 2, device="meta")
    with pytest.raises(UserError, match="expected a parameter with numbers, found one on meta"):
        LearnedOptimizer([param], steps=3).step()


def test_a_state_of_lists_is_refused():
    net = model()
    optimizer = LearnedOptimizer(net.parameters(), {"name": "momentum", "lr": 0.1})
    step(net, optimizer)
    saved = optimizer.state_dict()
    (array,) = (name for name, value in saved["state"][0].items() if getattr(value, "ndim", 0) == 2)
    saved["state"][0][array] = saved["state"][0][array].tolist()
    with pytest.raises(UserError, match=f"found {{'{array}': 'list'}}; give it the state of this model"):
        optimizer.load_state_dict(saved)
