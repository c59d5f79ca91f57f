"""A module's parameters, their kinds, and a run's length, as `LearnedOptimizer` is told of them."""

import math
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from implementations import normal
from torch import nn
from torch.nn import functional

import l2lopt
from l2lopt import LearnedOptimizer, UserError, optimisers
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout
from l2lopt.torch_optim.options import names_of
from l2lopt.torch_optim.parameter_groups import inform, parameter_groups, roles_of


def model_of(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 9)).double()
    model[1].bias.requires_grad_(False)
    return model


def descend(model, optimizer, steps):
    for step in steps:
        tokens = torch.arange(9).roll(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens), torch.arange(9)).backward()
        optimizer.step()


def parameters(model):
    return torch.cat([param.detach().ravel() for param in model.parameters()])


def test_a_module_is_its_parameters_with_their_kinds():
    """Frozen ones among them, as in the `parameters()` that an optimiser of torch is given."""
    (group,) = LearnedOptimizer(model_of(), "normalised-muon").param_groups
    assert group["param_names"] == ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert group["kind"] == ["embedding", "matrix", "vector", "head", "vector"]
    assert roles_of(group) == tuple(map(Role, group["kind"]))


@pytest.mark.parametrize("weights", ["normalised-muon", "lstm", {"name": "adam", "lr": 0.1}], ids=str)
def test_a_layer_that_is_unfrozen_later_is_trained_from_then_on(weights):
    """With a state of its own, which a checkpoint between the steps has as well."""
    model = model_of()
    model[1].requires_grad_(False)
    optimizer = LearnedOptimizer(model, weights, steps=6)
    before = model[1].weight.detach().clone()
    descend(model, optimizer, range(3))
    assert model[1].weight.equal(before)
    assert model[1].weight not in optimizer.state
    model[1].requires_grad_(True)
    descend(model, optimizer, [3])
    again = deepcopy(model)
    other = LearnedOptimizer(again, weights, steps=6)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    descend(model, optimizer, [4, 5])
    descend(again, other, [4, 5])
    assert not model[1].weight.equal(before)
    assert parameters(model).equal(parameters(again))


def test_several_modules_are_one():
    encoder, decoder = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
    (group,) = LearnedOptimizer([encoder, decoder]).param_groups
    assert group["param_names"] == ["0.weight", "1.weight", "1.bias"]
    assert group["kind"] == ["embedding", "head", "vector"]
    assert [id(p) for p in group["params"]] == [id(p) for one in (encoder, decoder) for p in one.parameters()]


def test_frozen_numbers_of_another_kind_are_taken():
    """As the integers of a quantised layer beside trained adapters."""
    model = torch.nn.Linear(4, 4)
    model.scales = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    optimizer = LearnedOptimizer(model, steps=2)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert model.scales.equal(torch.ones(4, 4, dtype=torch.int8))


def test_the_steps_are_those_of_the_rule_with_the_modules_kinds():
    model, rule = model_of(), optimisers.make("normalised-muon")
    theirs = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    layout = Layout.of(theirs, {"0.weight": Role("embedding"), "3.weight": Role("head")})
    theta = layout.ravel(theirs)
    state = rule.init(layout, like=theta, total_steps=6)
    optimizer = LearnedOptimizer(model, "normalised-muon", steps=6)
    for step in range(6):
        descend(model, optimizer, [step])
        grads = layout.ravel({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        update, state = rule.update(grads, state, theta)
        theta = theta + update
    found = layout.ravel({name: p.detach() for name, p in model.named_parameters()})
    torch.testing.assert_close(found, theta, rtol=0, atol=1e-14)


def test_a_groups_own_word_counts_and_all_else_is_told_by_names_and_shapes():
    params = [("wte.weight", nn.Parameter(normal(9, 4))), ("w", nn.Parameter(normal(6, 3)))]
    optimizer = LearnedOptimizer([{"params": params[:1], "kind": "matrix"}, {"params": params[1:], "split": 2}], "lstm")
    assert roles_of(optimizer.param_groups[0]) == (Role("matrix"),)
    assert roles_of(optimizer.param_groups[1]) == (Role("matrix", 2),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "matrx"}, "did you mean 'matrix'"),
        ({"kind": ["matrix", "vector"]}, "kind: expected one value, or a list of 1"),
        ({"split": 4}, "split: expected a divisor of 6"),
        ({"fan_in": [3, 4]}, "fan_in: expected one value, or a list of 1"),
        ({"fan_in": 0}, "fan_in: expected a whole number above 0, or None, found 0"),
        ({"fan_in": True}, "fan_in: expected a whole number above 0, or None, found True"),
        ({"steps": 0}, "steps: expected a whole number above 0, or None, found 0"),
        ({"steps": 2.5}, "steps: expected a whole number"),
        ({"split": "3"}, "split: expected a whole number above 0, or None, found '3'"),
        ({"split": [True]}, "split: expected a whole number above 0, or None, found True"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        LearnedOptimizer([("w", nn.Parameter(normal(6, 3)))], "normalised-muon", **options)


@pytest.mark.parametrize("weights", [{"name": "sgd", "lr": 0.1}, "normalised-muon"], ids=str)
def test_a_name_that_is_made_unique_is_not_one_that_comes_later(weights):
    """The third "weight" is the second parameter of its kind, and a `Sequential` has a "2.weight" of its own."""
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    models.append(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)))
    every = [named for model in models for named in model.named_parameters()]
    optimizer = LearnedOptimizer(every, weights, steps=9)
    before = [param.detach().clone() for _, param in every]
    hidden = models[2](normal(3, 4).float())
    for _ in range(2):
        (models[0](hidden) + models[1](hidden)).square().mean().backward(retain_graph=True)
    optimizer.step()
    assert not any(torch.equal(param, old) for (_, param), old in zip(every, before, strict=True))
    names = names_of(optimizer.param_groups[0])
    assert len({*names}) == len(names) == 8


def test_a_group_that_comes_later_counts_at_once_and_not_from_the_next_loading_on():
    """The matrix before a vector may be among the new parameters: a resumed run has the same steps to the bit."""

    def end(resumed):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(20, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
        optimizer = LearnedOptimizer(layers[1:].parameters(), steps=20)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": list(layers[0].parameters())})
            if step == 2 and resumed:
                optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            layers(normal(3, 20).float()).square().mean().backward()
            optimizer.step()
        return [param.detach() for param in layers.parameters()]

    assert all(map(torch.equal, end(False), end(True)))


@pytest.mark.parametrize("weights", ["coordinatewise-lstm", "normalised-muon", "lstm"])
def test_a_module_may_be_converted_between_steps(weights):
    """The state goes with it, as it does for a run that is loaded there."""
    ends = []
    for loaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = LearnedOptimizer(model, weights, steps=9)
        for step in range(4):
            if step == 2:
                model[1].double()
                if loaded:
                    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model[1](model[0](normal(5, 3).float()).to(model[1].weight)).square().mean().backward()
            optimizer.step()
        ends.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("lr", [np.float64(0.5), np.float32(0.5)])
def test_rates_of_numpy_are_saved_as_pythons(tmp_path, lr):
    model = torch.nn.Linear(3, 2)
    optimizer = LearnedOptimizer(model, lr=lr, weight_decay=lr, max_update=lr, steps=9)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": torch.nn.Linear(3, 2)}, 'found a module as params; give {"params": module.parameters()}'),
        ({"lr": 1.0}, 'add_param_group: expected a table with "params", found a dict without it'),
        ([torch.nn.Parameter(torch.ones(1))], "found a list without it"),
    ],
)
def test_what_is_no_group_is_refused(group, message):
    optimizer = LearnedOptimizer(torch.nn.Linear(3, 2), steps=9)
    with pytest.raises(UserError, match=re.escape(message)):
        optimizer.add_param_group(group)


class Conv1D(nn.Module):
    """As in GPT-2 of transformers: the inputs first."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(inputs, outputs).float()), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_a_layer_with_its_inputs_first_steps_as_its_transpose():
    first, second = Conv1D(8, 32), torch.nn.Linear(32, 8)
    second.load_state_dict({"weight": first.weight.detach().mT, "bias": first.bias.detach()})
    for layer in (first, second):
        optimizer = LearnedOptimizer(layer, steps=9)
        for step in range(3):
            optimizer.zero_grad()
            layer(normal(4, 32).float().roll(step)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(first.weight.mT, second.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.bias, second.bias, rtol=1e-4, atol=1e-5)
    named = torch.nn.Sequential(torch.nn.Linear(3, 32), first)
    assert LearnedOptimizer(named).param_groups[0]["fan_in"] == [None, None, 32, 32]
    assert LearnedOptimizer(named, fan_in=5).param_groups[0]["fan_in"] == 5
    assert {group["fan_in"] for group in parameter_groups(named, by_role=True)} == {3, 32}


def test_a_layers_experts_step_by_their_own_inputs():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(normal(4, 6, 3))

    for group in (parameter_groups(Experts())[0], *parameter_groups(Experts(), by_role=True)):
        optimizer = LearnedOptimizer([group], {"name": "normalised-muon", "weight_decay": 0.0, "schedule": "constant"})
        (experts,) = (param for made in optimizer.param_groups for param in made["params"])
        before, experts.grad = experts.detach().clone(), normal(4, 6, 3, seed=1)
        optimizer.step()
        size = (experts - before).square().mean().sqrt().item()
        # The first of ten steps of the warm-up, of 0.03 / √3.
        assert size == pytest.approx(0.1 * 0.03 / math.sqrt(3), rel=1e-6)


def test_counts_of_numpy_are_taken_and_saved_as_pythons(tmp_path):
    counts = {"steps": np.int64(9), "split": np.int32(2), "fan_in": [np.int64(3)]}
    (group,) = LearnedOptimizer([("w", nn.Parameter(normal(6, 3)))], **counts).param_groups
    assert {name: group[name] for name in counts} == {"steps": 9, "split": 2, "fan_in": [3]}
    torch.save({name: group[name] for name in counts}, tmp_path / "group.pt")
    torch.load(tmp_path / "group.pt", weights_only=True)


def test_a_lazy_module_is_called_first():
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    for params in (model, model.parameters()):
        with pytest.raises(UserError, match=r"expected a parameter with a shape, found a lazy one; call the model on"):
            LearnedOptimizer(params)
    model(torch.ones(3, 4))
    assert LearnedOptimizer(model).param_groups[0]["kind"] == ["matrix", "vector"]


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(3, 2).requires_grad_(False)], ids=str)
def test_a_module_with_nothing_to_train_is_refused(module):
    with pytest.raises(UserError, match="params: expected a parameter to train, found none"):
        LearnedOptimizer(module)


@pytest.mark.parametrize("kind", ["matrix", ["matrix", "matrix"], "head", "embedding"], ids=str)
def test_an_empty_parameter_is_no_matrix(kind):
    empty, full = nn.Parameter(normal(0, 4)), nn.Parameter(normal(3, 4))
    optimizer = LearnedOptimizer([empty, full], kind=kind)
    before = full.detach().clone()
    (empty.sum() + full.square().sum()).backward()
    optimizer.step()
    assert not full.equal(before)


@pytest.mark.parametrize("weights", [{"name": "sgd", "lr": 0.1}, "normalised-muon", "lstm"], ids=str)
def test_two_models_whose_parameters_have_the_same_names_are_both_trained(weights):
    """As where the names of an encoder and a decoder are chained; Adam takes them as well."""
    encoder, decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    both = [*encoder.named_parameters(), *decoder.named_parameters()]
    optimizer = LearnedOptimizer(iter(both), weights)
    before = [param.detach().clone() for _, param in both]
    for _ in range(2):
        decoder(encoder(torch.ones(3, 4))).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(param, old) for (_, param), old in zip(both, before, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in both]


def test_what_is_said_of_a_modules_parameters_counts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    (group,) = LearnedOptimizer(model, kind="vector").param_groups
    assert group["kind"] == "vector"
    assert group["split"] == [1] * 4
    with pytest.raises(UserError, match="kind: expected one of"):
        LearnedOptimizer(model, kind="nonsense")


def test_a_fan_in_of_its_own_counts():
    """A relative step of size lr/√fan-in, of a bias without its matrix."""
    for fan_in, expected in ((None, 0.1 / math.sqrt(6)), (25, 0.02), ([4], 0.05)):
        bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        bias.grad = normal(6)
        LearnedOptimizer([bias], {"name": "normalised-adam", "lr": 0.1, "weight_decay": 0.0}, fan_in=fan_in).step()
        assert float(bias.detach().square().mean().sqrt()) == pytest.approx(expected)


def test_groups_by_role_step_as_one_group_does():
    """Also where they are shared out: each by itself, in any order."""
    one, two = model_of(), model_of()
    groups = parameter_groups(two, by_role=True)
    assert all(isinstance(group[name], str | int) for group in groups for name in ("kind", "split", "fan_in"))
    apart = [LearnedOptimizer([group], "normalised-muon", steps=6) for group in reversed(groups)]
    whole = LearnedOptimizer(one, "normalised-muon", steps=6)
    for step in range(6):
        descend(one, whole, [step])
        for param, other in zip(two.parameters(), one.parameters(), strict=True):
            param.grad = other.grad
        for optimizer in apart:
            optimizer.step()
    torch.testing.assert_close(parameters(two), parameters(one), rtol=0, atol=1e-14)


def test_a_resumed_run_is_the_whole_one_to_the_bit():
    one, two = model_of(), model_of()
    descend(one, LearnedOptimizer(one, "normalised-muon", steps=8), range(8))
    first = LearnedOptimizer(two, "normalised-muon", steps=8)
    descend(two, first, range(3))
    second = LearnedOptimizer(two, "normalised-muon")
    second.load_state_dict(deepcopy(first.state_dict()))
    assert second.param_groups[0]["steps"] == 8
    descend(two, second, range(3, 8))
    assert torch.equal(parameters(one), parameters(two))


def test_a_run_that_goes_on_for_longer_takes_its_new_end_and_says_so(caplog):
    model = model_of()
    first = LearnedOptimizer(model, "normalised-muon", steps=4)
    descend(model, first, range(4))
    longer = LearnedOptimizer(model, "normalised-muon", steps=12)
    with caplog.at_level("WARNING", "l2lopt"):
        longer.load_state_dict(first.state_dict())
    assert "the run was begun for 4 steps and goes on to 12" in caplog.text
    before = parameters(model)
    descend(model, longer, [4])
    assert int(longer.state[model[1].weight]["total_steps"]) == 12
    assert int(longer.state[model[1].weight]["step"]) == 5
    assert not torch.equal(parameters(model), before)


def test_a_run_is_told_of_its_end_later():
    """Between two steps, too, as a framework that counts batches does it."""
    known, told = model_of(), model_of()
    descend(known, LearnedOptimizer(known, "normalised-muon", steps=5), range(5))
    optimizer = LearnedOptimizer(told, "normalised-muon")
    inform(optimizer, steps=5)
    descend(told, optimizer, range(5))
    assert torch.equal(parameters(known), parameters(told))
    inform(optimizer, steps=50)
    descend(told, optimizer, [5])
    assert not torch.equal(parameters(known), parameters(told))
    inform(torch.optim.SGD(told.parameters(), lr=0.1), steps=5)  # has no use for it


def test_what_is_known_of_parameters_goes_before_their_names():
    optimizer = LearnedOptimizer([("a", nn.Parameter(normal(4, 4))), ("wte", nn.Parameter(normal(4, 4)))], "lstm")
    inform(optimizer, known={"a": Role("head"), "b": Role("vector")})
    assert roles_of(optimizer.param_groups[0]) == (Role("head"), Role("embedding"))


def test_a_state_without_a_length_is_read():
    """One of a release that knew no kinds."""
    model = model_of()
    first = LearnedOptimizer(model, {"name": "adam", "lr": 0.01})
    descend(model, first, range(2))
    saved = first.state_dict()
    for group in saved["param_groups"]:
        for name in ("steps", "kind", "split"):
            del group[name]
    second = l2lopt.LearnedOptimizer(model, {"name": "adam", "lr": 0.01}, steps=9)
    second.load_state_dict(saved)
    assert second.param_groups[0]["steps"] == 9
    descend(model, second, [2])


def test_a_layer_without_names_goes_beside_a_module():
    """As where layers are unfrozen one after the other: the module's names were taken unasked."""
    module, layer = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    optimizer = LearnedOptimizer(module)
    optimizer.add_param_group({"params": layer.parameters()})
    assert optimizer.param_groups[1]["param_names"] == ["1.0", "1.1"]


def test_a_group_that_is_refused_is_not_there():
    optimizer, added = LearnedOptimizer([torch.nn.Parameter(torch.zeros(2))]), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError, match="kind: expected one of"):
        optimizer.add_param_group({"params": [added], "kind": "nope"})
    optimizer.add_param_group({"params": [added], "kind": "vector"})
    assert len(optimizer.param_groups) == 2


def test_what_is_told_between_two_steps_counts_at_once():
    """As it would after a checkpoint."""
    found = []
    for again in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        optimizer = LearnedOptimizer([weight], steps=9)
        for step in range(4):
            weight.grad = torch.linspace(1, 2, 12).view(3, 4).cos()
            if step == 2:
                optimizer.param_groups[0]["kind"] = "vector"
                if again:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_list_and_a_tuple_are_of_the_first_parameters_alone(sequence):
    params = [nn.Parameter(torch.ones(shape)) for shape in ((8, 2), (4,), (6, 2))]
    optimizer = LearnedOptimizer(params[:2], kind=sequence(["embedding", "vector"]))
    optimizer.add_param_group({"params": params[2:]})
    assert [group["kind"] for group in optimizer.param_groups] == [["embedding", "vector"], None]


def test_modules_are_what_groups_are_made_of():
    layers = [nn.Linear(3, 2), nn.Linear(2, 1)]
    (group,) = parameter_groups(layers)
    assert [name for name, _ in group["params"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(UserError, match="expected a module, or a list of modules, found a generator; give the model"):
        parameter_groups(layers[0].parameters())


def test_a_parameter_that_is_appended_to_a_group_is_trained():
    model, added = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    optimizer = LearnedOptimizer(model)
    optimizer.param_groups[0].update(kind=None, split=None)
    optimizer.param_groups[0]["params"].append(added)
    model(torch.ones(1, 3)).sum().backward()
    added.grad = torch.ones(4)
    optimizer.step()
    assert (added < 1).all()
