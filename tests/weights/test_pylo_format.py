"""Weights in PyLO's format: made here as its documentation has it, loaded, used and refused."""

import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import l2lopt
from l2lopt.core import seeding
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.weights.small_fc import DECAYS, load_small_fc


def network(hidden=6, linear=1):
    """The published class: `network` is a Sequential of input, ReLU, linear_0, ReLU, …, output."""
    with seeding.seeded(0):
        layers = {"input": nn.Linear(39, hidden), "relu_input": nn.ReLU()}
        for number in range(linear):
            layers |= {f"linear_{number}": nn.Linear(hidden, hidden), f"relu_{number}": nn.ReLU()}
        layers["output"] = nn.Linear(hidden, 2)
    made = nn.Module()
    made.network = nn.Sequential(OrderedDict(layers))
    return made


def written(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("linear", [0, 1, 2])
def test_a_published_network_is_the_rules_own(tmp_path, linear):
    theirs = network(linear=linear)
    config = {"input_size": 39, "hidden_size": 6, "hidden_layers": linear}
    rule = load_small_fc(written(tmp_path / "mulo", theirs.state_dict(), config))
    x = torch.randn(39, 4, generator=torch.Generator().manual_seed(0))
    step = torch.tensor(7)
    x[28:] = torch.tanh(step / torch.tensor([1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000]) - 1)[:, None]
    torch.testing.assert_close(torch.stack(rule._network(x[:28], step)), theirs.network(x.T).T)
    for name, values in DECAYS.items():
        assert rule.phi()[name].tolist() == pytest.approx(list(values))
    assert (rule.step_scale, rule.exponent_scale, rule.rests) == (0.01, 0.001, True)


def test_it_is_saved_in_our_format_and_trains_a_model(tmp_path):
    rule = load_small_fc(written(tmp_path / "mulo", network().state_dict()) / "model.safetensors", rests=False)
    l2lopt.save(rule, tmp_path / "mine.safetensors")
    again = l2lopt.load(tmp_path / "mine.safetensors")
    layout, params, gradient = Layout(("w",), ((2, 3),)), torch.ones(6), torch.arange(6.0)
    states = [one.init(layout, like=params) for one in (rule, again)]
    first, second = (one.update(gradient, state, params)[0] for one, state in zip((rule, again), states, strict=True))
    assert torch.equal(first, second)
    assert first.ne(0).all()
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = l2lopt.LearnedOptimizer(model.parameters(), tmp_path / "mine.safetensors")
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    assert model.weight.ne(before).any()


def spoilt(**changes):
    tensors = network().state_dict()
    for name, value in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key) if value is None else tensors.update({key: value})
    return tensors


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"w": torch.zeros(2)}, None, "expected an MLP of PyLO's small_fc_lopt, found other tensors"),
        (spoilt(network__output__bias=None), None, "network.output.bias absent"),
        (spoilt(network__output__weight=torch.zeros(3, 6)), None, r"network.output.weight \[3, 6\]"),
        (spoilt(network__input__weight=torch.zeros(6, 30)), None, r"network.input.weight \[6, 30\]"),
        (spoilt(network__input__bias=torch.full((6,), torch.nan)), None, "expected finite numbers"),
        (spoilt(more=torch.zeros(2)), None, "more"),
        (spoilt(), {"input_size": 39, "hidden_size": 32, "hidden_layers": 1}, "expected the sizes of the tensors"),
        (spoilt(), [39, 6, 1], "expected a table of sizes"),
    ],
)
def test_other_files_are_one_line(tmp_path, tensors, config, message):
    with pytest.raises(UserError, match=message) as caught:
        load_small_fc(written(tmp_path / "other", tensors, config))
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_pickle_and_other_decays_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none: expected an MLP of PyLO's small_fc_lopt, found nothing"):
        load_small_fc(tmp_path / "none")
    torch.save(network().state_dict(), tmp_path / "pickle.pt")
    with pytest.raises(UserError, match="expected a whole safetensors file"):
        load_small_fc(tmp_path / "pickle.pt")
    folder = written(tmp_path / "mulo", network().state_dict())
    with pytest.raises(UserError, match="decays: squares_decay: expected 1 finite numbers"):
        load_small_fc(folder, decays={**DECAYS, "squares_decay": (1.0, 2.0)})
