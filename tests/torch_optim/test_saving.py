"""Saved, copied and loaded optimisers go on to the bit; the state of another rule or model is refused."""

import math
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import laws
import pytest
import torch
from descent import LSTM, descend, each_optimiser, start
from torch import nn

from l2lopt import LearnedOptimizer, UserError, optimisers, parameter_groups
from l2lopt.weights import files


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
"""Name of a coordinatewise rule → the states of Linear(3, 2) and `LearnedOptimizer(…, fallback="adam")` after three
steps, as 0.1.0 left them when hashes had no version and these rules were called "lstm" and "ihc-lstm"."""


def linear(name, saved):
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(saved["model"])
    return dict(model.named_parameters()), LearnedOptimizer(
        model.named_parameters(), f"coordinatewise-{name}", fallback="adam"
    )


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
        ({"weights": "coordinatewise-lstm"}, r"expected the state of fallback None, found that of fallback \w{16}"),
        ({"weights": {"name": "adam", "lr": 0.1}, "fallback": "adam"}, r"weight: expected .*'m'.*found .*'cell\.h'"),
        ({"weights": {"name": "sgd", "lr": 0.1}, "fallback": "adam"}, r"weight: expected \{\}, found .*'cell\.h'"),
        ({"weights": LSTM(hidden_size=3), "fallback": "adam"}, r"'cell\.h': \(3,\).*'cell\.h': \(20,\)"),
        ({"weights": "coordinatewise-lstm", "fallback": "momentum"}, r"weight: expected .*'velocity'.*found .*'m'"),
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


@pytest.mark.parametrize("change", ["order", "groups"])
def test_a_state_by_names_is_that_of_the_parameters_whatever_their_order_and_groups(change):
    """What a group lists for each parameter, its kind for instance, goes with the name too."""
    by_names = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def made(is_changed):
        torch.manual_seed(0)
        # No biases, whose fan-in is told by the matrix before them.
        layers = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 9, bias=False)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4), *layers)
        (group,) = parameter_groups(model)
        cuts = [slice(None)] if (change == "groups") == is_changed else [slice(0, 1), slice(1, None)]
        if change == "order":
            cuts = [slice(None, None, -1 if is_changed else 1)]
        return model, LearnedOptimizer([{key: value[cut] for key, value in group.items()} for cut in cuts], steps=9)

    def steps(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.arange(9)), torch.arange(9)).backward()
            optimizer.step()
        return dict(model.named_parameters())

    (model, optimizer), (other, another) = made(False), made(True)
    steps(model, optimizer)
    other.load_state_dict(model.state_dict())
    saved = deepcopy(by_names.get_optimizer_state_dict(model, optimizer))
    by_names.set_optimizer_state_dict(other, another, saved)
    expected = steps(model, optimizer)
    for name, value in steps(other, another).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["normalised-muon", "lstm"])
def test_a_state_that_was_moved_by_its_data_is_the_one_that_is_saved(rule):
    """As the snippets do that move an optimiser from device to device."""

    def run(moved):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        optimizer = LearnedOptimizer(model, rule, steps=9)
        for step in range(6):
            if moved and step == 3:
                for state in optimizer.state.values():
                    for value in state.values():
                        if isinstance(value, torch.Tensor):
                            value.data = value.data.clone()
            model(torch.ones(1, 3) * (step + 1)).square().sum().backward()
            optimizer.step()
        return optimizer.state_dict()["state"]

    laws.assert_same(run(True), run(False))


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


@pytest.mark.parametrize("fault", ["another shape", "transposed", "a part missing", "features missing"])
def test_the_state_of_another_model_is_refused(fault):
    def stepped(*shape):
        param = nn.Parameter(torch.ones(*shape))
        optimizer = LearnedOptimizer([param], "coordinatewise-lstm", fallback="adam")
        param.grad = torch.ones(*shape)
        optimizer.step()
        return optimizer

    shape = {"another shape": (4, 3), "transposed": (5, 3)}.get(fault, (3, 5))
    saved, target = stepped(*shape).state_dict(), stepped(3, 5)
    if fault == "a part missing":
        del saved["state"][0]["cell.h"]
    if fault == "features missing":
        saved["state"][0]["cell.c"] = saved["state"][0]["cell.c"][0]
    before = deepcopy(target.state_dict())
    with pytest.raises(UserError, match=r"load_state_dict: p0: expected .*cell\.h, .* \[\.\.\., \*\[3, 5\]\]"):
        target.load_state_dict(saved)
    laws.assert_same(target.state_dict()["state"], before["state"])


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("step", None, "none"),
        ("step", torch.tensor(-5), "-5.0"),
        ("step", math.nan, "nan"),
        ("step", 2.5, "2.5"),
        ("step", torch.tensor([3, 3]), r"\[3.0, 3.0\]"),
        ("skipped", -1, "-1.0"),
        ("fallback.step", None, "none"),
        ("fallback.step", torch.tensor(-1), "-1.0"),
    ],
)
def test_a_state_without_a_step_count_is_refused(key, value, found):
    """It would begin at 0 again, or fail at the next step."""
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM(), fallback="adam")
    descend(params, optimizer, range(3))
    saved, before = deepcopy(optimizer.state_dict()), deepcopy(optimizer.state_dict())
    saved["state"][1][key] = value
    if value is None:
        del saved["state"][1][key]
    message = rf"load_state_dict: p1: {key}: expected one whole number, at least 0, found {found}; load"
    with pytest.raises(UserError, match=message):
        optimizer.load_state_dict(saved)
    laws.assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize(("key", "value"), [("lr", math.inf), ("weight_decay", -1.0), ("foreach", True), ("steps", 0)])
def test_a_saved_option_out_of_its_range_is_refused(key, value):
    params = start()
    optimizer = LearnedOptimizer(params.values(), LSTM())
    descend(params, optimizer, range(3))
    saved, before = deepcopy(optimizer.state_dict()), deepcopy(optimizer.state_dict())
    saved["param_groups"][0][key] = value
    with pytest.raises(UserError, match=rf"LearnedOptimizer: {key}: expected .*, found {value}"):
        optimizer.load_state_dict(saved)
    laws.assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "a NoneType"),
        ({}, r"the keys \[\]"),
        ({"optimizer": {}, "epoch": 3}, r"the keys \['optimizer', 'epoch'\]"),
        (nn.Linear(2, 2).state_dict(), r"the keys \['weight', 'bias'\]"),
    ],
)
def test_what_is_no_optimisers_state_is_refused(given, found):
    optimizer = LearnedOptimizer(start().values(), LSTM())
    with pytest.raises(UserError, match=rf'expected a table of "state" and "param_groups", found {found}; give what'):
        optimizer.load_state_dict(given)


def test_a_rule_whose_options_json_does_not_know_is_not_saved(tmp_path):
    rule = optimisers.make("hierarchical", lr=torch.tensor([0.1]))
    with pytest.raises(UserError, match=r"save: optimiser: expected values of JSON, found .*Tensor"):
        files.save(rule, tmp_path / "mine.safetensors")
    assert not (tmp_path / "mine.safetensors").exists()


def test_a_pickle_has_every_number_once():
    """The state of all parameters is one tensor, and a view would bring the whole of it along."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = LearnedOptimizer(layers, "lstm", steps=9)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    numbers = sum(value.numel() for value in layers.parameters())
    assert len(pickle.dumps(optimizer)) < 4 * 5 * numbers + 300_000  # θ, its gradient and three numbers of state


def test_options_set_by_hand_are_not_lost_silently(tmp_path):
    rule = files.load("lstm")
    rule.harness.lr = 0.3
    with pytest.raises(UserError, match=r"save: expected the options of its description, found others: harness\.lr"):
        files.save(rule, tmp_path / "mine.safetensors")
    assert not (tmp_path / "mine.safetensors").exists()


def test_a_rule_that_a_fallback_has_taken_over_from_is_loaded():
    """What had made it diverge is in its state."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = LearnedOptimizer([parameter], "dowg", fallback="adam")
    for gradient in (math.inf, 1.0):
        parameter.grad = torch.full((3,), gradient)
        optimizer.step()
    assert optimizer.param_groups[0]["fallen_back"]
    LearnedOptimizer([parameter], "dowg", fallback="adam").load_state_dict(optimizer.state_dict())
