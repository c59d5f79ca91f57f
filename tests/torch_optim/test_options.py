"""Options of `LearnedOptimizer`, for all parameters and for a group, and those that are refused."""

import logging
import math

import laws
import pytest
import torch
from descent import LSTM, bumpy, descend, start
from implementations import normal, seeded
from torch import nn

from l2lopt import LearnedOptimizer, UserError, optimisers
from l2lopt.torch_optim.parameter_groups import inform
from l2lopt.weights import files


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


def test_a_rate_below_0_is_refused():
    with pytest.raises(UserError, match=r"LearnedOptimizer: lr: expected at least 0"):
        LearnedOptimizer([torch.nn.Parameter(torch.ones(2))], optimisers.SGD(0.1), lr=-1.0)


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
        ({"lr": math.inf}, r"LearnedOptimizer: lr: expected a finite number, found inf"),
        ({"lr": torch.tensor(math.inf)}, r"LearnedOptimizer: lr: expected a finite number, found tensor\(inf\)"),
        ({"weight_decay": math.inf}, r"weight_decay: expected a finite number, found inf"),
        ({"weights": {"name": "sgd", "lr": math.inf}}, r"lr: expected a rate above 0, found inf"),
        ({"weights": {"name": "lion", "lr": 0.1, "weight_decay": math.inf}}, r"weight_decay: expected a finite number"),
        (
            {"weights": {"name": "coordinatewise", "head_scale": math.nan}},
            r"head_scale: expected a finite .* found nan",
        ),
        ({"state_dtype": "float61"}, r"state_dtype: expected a known name, found 'float61'; did you mean"),
        ({"fallback": "adamm"}, r"optimiser: expected a known name, found 'adamm'; did you mean 'adam'"),
        (
            {"fallback": {"name": "sgd", "lr": torch.ones(2)}},
            r"fallback: expected a rule with one rate",
        ),
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


@pytest.mark.parametrize(("name", "options"), [("normalised-muon", {}), ("adam", {"lr": 1e-3})])
def test_a_fallback_by_name_has_a_rate_that_suits_it(name, options):
    optimizer = LearnedOptimizer([nn.Parameter(normal(2, 2))], {"name": "coordinatewise"}, fallback=name)
    assert optimizer.param_groups[0]["fallback"] == files.digest(optimisers.make(name, **options))


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


@pytest.mark.parametrize("key", ["maximize", "differentiable", "capturable", "foreach", "fused"])
def test_a_groups_option_that_would_change_a_step_is_refused(key):
    param, message = nn.Parameter(torch.ones(1)), f"LearnedOptimizer: {key}: expected False, found True"
    with pytest.raises(UserError, match=message):
        LearnedOptimizer([{"params": [param], key: True}], {"name": "sgd", "lr": 0.1})
    with pytest.raises(UserError, match=message):
        LearnedOptimizer([param], {"name": "sgd", "lr": 0.1}, **{key: True})


def test_torchs_options_that_ask_for_nothing_are_accepted():
    """As loops hand them to every optimiser."""
    param = nn.Parameter(torch.ones(1))
    nothing = {"maximize": False, "foreach": None, "fused": False, "differentiable": False, "capturable": False}
    for optimizer in (
        LearnedOptimizer([param], {"name": "sgd", "lr": 0.5}, **nothing),
        LearnedOptimizer([{"params": [param], **nothing}], {"name": "sgd", "lr": 0.5}),
    ):
        param.grad = torch.ones(1)
        optimizer.step()
    assert param.item() == 0.0


@pytest.mark.parametrize(
    ("weights", "lr", "count"),
    [
        ("lstm", 5e-5, 1),
        ("normalised-muon", torch.tensor(1e-3), 1),
        ("lstm", 0.01, 0),
        ("lstm", 0.0, 0),
        ({"name": "adam", "lr": 1.0}, 1e-3, 0),
    ],
)
def test_a_factor_that_looks_like_a_rate_is_warned_of_once(weights, lr, count, caplog):
    """Frameworks hand in 5e-5 by default. (A rate of 1 times a small factor is somebody's way to write a rate.)"""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))]}]
    optimizer = LearnedOptimizer(groups, weights, lr=lr)
    optimizer.param_groups[0]["lr"] = 1e-9  # as a schedule does
    optimizer.step()
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == count
    assert all("it is a factor, 1 by default, and not a rate" in record.message for record in told)


@pytest.mark.parametrize("weights", ["normalised-muon", "lstm", {"name": "adam", "lr": 1.0}], ids=str)
def test_a_rate_that_is_set_later_is_warned_of_as_well(weights, caplog):
    """By a schedule, after a hundred steps, when a warm-up to 1 is over it; or with a group that is added."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = LearnedOptimizer([{"params": [param]} for param in params], weights)
    for step in range(120):
        for group, param in zip(optimizer.param_groups, params, strict=True):
            group["lr"], param.grad = 1e-3 * (step + 1) / 120, torch.ones_like(param)
        optimizer.step()
        assert len(caplog.records) == int(step >= 99 and not isinstance(weights, dict))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 1e-3})
    assert len(caplog.records) == (0 if isinstance(weights, dict) else 2)
    assert all("it is a factor, 1 by default, and not a rate" in record.message for record in caplog.records)
    caplog.clear()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert not caplog.records


def test_a_warm_up_to_1_is_not_warned_of(caplog):
    param = nn.Parameter(torch.ones(2))
    optimizer = LearnedOptimizer([param])
    for step in range(120):
        optimizer.param_groups[0]["lr"] = (step + 1) / 5000
        param.grad = torch.ones(2)
        optimizer.step()
    assert not caplog.records


@pytest.mark.parametrize(
    ("weights", "decay", "count"),
    [("lstm", 0.1, 1), ("normalised-muon", 0.01, 1), ("lstm", 1e-5, 0), ({"name": "adam", "lr": 1.0}, 0.1, 0)],
)
def test_a_weight_decay_that_was_meant_for_adamw_is_warned_of(weights, decay, count, caplog):
    """Of AdamW it is multiplied by the rate; here it is a share of the weights at each step."""
    LearnedOptimizer(nn.Linear(3, 2), weights, weight_decay=decay, steps=9)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == count
    assert all(f"weight_decay takes {decay:g} of every weight at each step" in text for text in told)


@pytest.mark.parametrize("weights", ["normalised-muon", "lstm"])
def test_the_first_step_after_the_last_is_told_once(weights, caplog):
    """Epochs in place of steps, for instance, would train next to nothing without a word."""
    model = nn.Linear(3, 2)
    optimizer = LearnedOptimizer(model, weights, steps=4)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == int(step >= 4)
        if step == 2:  # a checkpoint counts on
            optimizer.load_state_dict(optimizer.state_dict())
    assert "the run was to end after 4 steps, and updates are 0 from now on: this is step 5" in told[0]


@pytest.mark.parametrize(("schedule", "count"), [("cosine", 1), ("constant", 0)])
def test_a_step_without_a_number_does_not_tell_whether_a_run_has_ended(schedule, count, caplog):
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = LearnedOptimizer([param], {"name": "normalised-muon", "schedule": schedule}, steps=3)
    for step in range(6):
        param.grad = torch.full((3, 2), math.nan if step == 3 else 1.0)
        optimizer.step()
    told = [record.message for record in caplog.records if "updates are 0" in record.message]
    assert len(told) == count
    assert all("this is step 5" in message for message in told)


@pytest.mark.parametrize("later", ["loaded", "told"])
def test_a_run_that_goes_on_past_its_end_is_told_so_once(later, caplog):
    """However many groups there are."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = LearnedOptimizer(groups, "normalised-muon")

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    if later == "loaded":
        saved = optimizer.state_dict()
        optimizer = LearnedOptimizer([{"params": layer.parameters()} for layer in model], "normalised-muon", steps=2)
        optimizer.load_state_dict(saved)
    else:
        inform(optimizer, steps=2)
    for _ in range(2):
        step()
    (told,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "the run was to end after 2 steps, and updates are 0 from now on: this is step 4" in told


@pytest.mark.parametrize(
    ("weights", "remedy"),
    [
        ("harness", "did you mean 'normalised-muon'?"),
        ("normalized-muon", "did you mean 'normalised-muon'?"),
        ("ihc_lstm", "did you mean 'ihc-lstm'?"),
        ("LSTM", "did you mean 'lstm'?"),
        (1e-3, "a rate goes to lr="),
        (
            "something",
            "or one of coordinatewise-ihc-lstm, coordinatewise-lstm, ihc-lstm, lstm, dowg, normalised-adam, ",
        ),
    ],
)
def test_the_nearest_name_is_suggested(weights, remedy):
    with pytest.raises(UserError) as caught:
        LearnedOptimizer(nn.Linear(3, 2), weights)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": None}, "lr: expected a number, found None"),
        ({"lr": "0.1"}, "lr: expected a number, found '0.1'"),
        ({"weight_decay": None}, "weight_decay: expected a number, found None"),
        ({"weights": None}, "weights: expected a name, a file, a choice or an optimiser, found None"),
        ({"weight_decay": torch.ones(2)}, r"weight_decay: expected one number, found \[2\]"),
        ({"max_update": torch.ones(2)}, r"max_update: expected one number, found \[2\]"),
        ({"lr": torch.tensor(1j)}, "lr: expected a number, found tensor"),
        ({"weights": {"name": "adam", "lr": torch.ones(1)}}, r"weights: expected a rule with one rate, found a tensor"),
        ({"weights": {"name": "muon", "lr": torch.ones(2)}}, r"weights: expected a rule with one rate, found a tensor"),
        ({"weights": {"name": "hierarchical", "lr": torch.ones(2)}}, "weights: expected a rule with one rate, found"),
        (
            {"weights": {"name": "scheduled", "optimiser": {"name": "sgd", "lr": torch.ones(2)}}},
            "weights: expected a rule with one rate, found",
        ),
        ({"fallback": "lstm"}, "fallback: optimiser: expected a known name, found 'lstm'; choose one"),
        ({"fallback": 3}, "fallback: expected a name, a choice or a hand-made optimiser, found 3"),
        (
            {"weights": "adam"},
            "weights: expected a rule, found 'adam' without a rate; use {'name': 'adam', 'lr': 0.001}",
        ),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(options, message):
    with pytest.raises(UserError, match=f"LearnedOptimizer: {message}"):
        LearnedOptimizer([nn.Parameter(torch.ones(1))], **{"weights": "lstm"} | options)


def test_a_rate_of_one_number_is_taken_whatever_its_shape():
    moved = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([[0.5]])):
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        LearnedOptimizer([param], {"name": "sgd", "lr": 0.1}, lr=lr).step()
        moved.append(param.detach())
    assert moved[0].equal(moved[1])
    assert moved[0].equal(moved[2])


@pytest.mark.parametrize("name", ["lr", "weight_decay", "max_update"])
def test_an_option_may_be_a_tensor_of_one_number_of_any_shape(name):
    found = []
    for value in (0.01, torch.tensor(0.01), torch.tensor([[0.01]])):
        param = nn.Parameter(normal(2, 3).float())
        param.grad = normal(2, 3, seed=1).float()
        LearnedOptimizer([param], {"name": "sgd", "lr": 0.5}, **{name: value}).step()
        found.append(param.detach())
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("name", ["normalised-muon", "hierarchical"])
def test_a_rule_that_goes_on_after_its_end_is_not_said_to_stand(name, caplog):
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = LearnedOptimizer([param], {"name": name, "schedule": "constant"}, steps=2)
    for _ in range(4):
        before, param.grad = param.detach().clone(), torch.ones(3, 2)
        optimizer.step()
        assert not param.equal(before)
    assert not [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("shape", [(3, 2), (2,)])
def test_a_rule_is_made_on_the_cpu_whatever_the_default_device(shape):
    """Models are made on "meta", and "cuda" as the default would draw φ from the user's own generator."""
    hashes = set()
    for device in ("cpu", "meta"):
        with torch.device(device):
            rules = ["lstm", {"name": "coordinatewise"}, {"name": "hierarchical", "head_scale": 1.0}, "normalised-muon"]
            made = [LearnedOptimizer([nn.Parameter(torch.ones(shape, device="cpu"))], rule) for rule in rules]
            hashes.add(tuple(one.param_groups[0]["weights"] for one in made))
            assert {value.device.type for value in optimisers.make("small-fc").phi().values()} == {"cpu"}
    assert len(hashes) == 1


@pytest.mark.parametrize("given", [None, 3, optimisers.SGD(0.1)])
def test_what_is_no_name_and_no_file_is_refused(given):
    with pytest.raises(UserError, match="weights: expected a name or a file, found a "):
        files.load(given)
