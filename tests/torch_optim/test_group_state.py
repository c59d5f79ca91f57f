"""State per tensor, row and column: each parameter has its part, whoever it steps with."""

from copy import deepcopy

import laws
import pytest
import torch
from descent import SHAPES, bumpy, descend, start
from doubles import Orthogonalised
from implementations import DOUBLES, GROUPED, each, normal, seeded
from torch import nn

from l2lopt import LearnedOptimizer, UserError, cells, kernels, optimisers
from l2lopt.core.layout import Layout
from l2lopt.optimisers import rules
from l2lopt.torch_optim import blocks, state_parts

each_grouped = pytest.mark.parametrize("rule", each(GROUPED))
GAPS = {
    "none": lambda step: (),
    "one at first": lambda step: ["vector"] if step < 2 else (),
    "one at times": lambda step: ["vector"] if step % 3 == 1 else (),
    "each at times": lambda step: [list(SHAPES)[step % 3]],
}


def shared_by(rule):
    """Names in `state[p]` of what all coordinates share."""
    return ["vector", *GROUPED[rule]().init(Layout(("one",), ((1,),))).shared]


each_gap = pytest.mark.parametrize("without", GAPS.values(), ids=GAPS)


@pytest.mark.parametrize("shape", [(), (4,), (0,), (3, 2), (1, 5), (2, 0), (0, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("grouping", ["tensors", "rows", "columns"])
def test_the_parts_of_an_array_have_the_columns_of_the_layouts_groups(shape, grouping):
    layout = Layout(("first", "one", "last"), ((2, 2), shape, (3,)))
    counts = layout.grouping(grouping).counts
    values = normal(5, sum(counts))
    array = state_parts.StateArray("any", grouping, values)
    parts = array.split(layout)
    assert array.columns(layout) == list(counts)
    for part, wanted, whole in zip(parts, values.split(counts, dim=-1), layout.shapes, strict=True):
        axes = {"tensors": (), "rows": whole[:1], "columns": whole[1:]}[grouping]
        assert part.shape == (5, *axes)
        laws.assert_same(part.reshape(5, -1), wanted)
        assert part.numel() == 0 or part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    params = [torch.empty(shape) for shape in layout.shapes]
    laws.assert_same(array.join(layout, parts, params), values)


def test_the_state_has_names_and_shapes_of_groups():
    params = start() | {"kernel": nn.Parameter(normal(2, 3, 4))}
    factored, steered = (LearnedOptimizer(params.values(), DOUBLES[rule]()) for rule in list(DOUBLES)[:2])
    descend(params, factored, range(2))
    descend(params, steered, range(2))
    shapes = {name: (param.shape[:1], param.shape[1:]) for name, param in params.items()}
    for name, param in params.items():
        moments = {key: value.shape for key, value in factored.state[param].items() if key.endswith("second_moment")}
        assert moments == {"rows.second_moment": shapes[name][0], "columns.second_moment": shapes[name][1]}
        assert steered.state[param]["tensors.h"].shape == (3,)
    laws.assert_close(  # β² at the decay σ(0), from 0
        factored.state[params["scalar"]]["rows.second_moment"],
        factored.state[params["scalar"]]["columns.second_moment"],
    )


@each_grouped
def test_equals_the_rule_run_by_hand(rule):
    params, by_hand = start(), kernels.fuse(GROUPED[rule]())
    layout, theta = Layout.of(params), Layout.of(params).ravel(params).detach()
    state = by_hand.init(layout, like=theta)
    for step in range(5):
        leaf = theta.clone().requires_grad_()
        loss = bumpy(layout.unravel(leaf), step)
        (grads,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            change, state = by_hand.update(grads, state, theta, loss=loss.detach())
        theta = theta + change
    after = descend(params, LearnedOptimizer(params.values(), by_hand), range(5))
    laws.assert_same(after, layout.unravel(theta))


@pytest.mark.parametrize("rule", DOUBLES)
@each_gap
def test_a_parameter_moves_as_it_does_alone(rule, without):
    """These rules' coordinates meet within a tensor only, so a parameter knows nothing of the others' gradients."""
    params, alone = start(), start()
    after = descend(params, LearnedOptimizer(params.values(), DOUBLES[rule]()), range(8), without)
    for name, param in alone.items():
        steps = [step for step in range(8) if name not in without(step)]
        wanted = descend({name: param}, LearnedOptimizer([param], DOUBLES[rule]()), steps)
        laws.assert_close(after[name], wanted[name], 1e-12)
        assert not torch.equal(after[name], start()[name])


@each_grouped
@each_gap
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_state_goes_on_to_the_bit(rule, without, dtype, tmp_path):
    params = start()
    optimizer = LearnedOptimizer(params.values(), GROUPED[rule](), state_dtype=dtype, fallback="adam")
    half = descend(params, optimizer, range(5), without)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    expected = descend(params, optimizer, range(5, 9), without)
    params = {name: nn.Parameter(value) for name, value in half.items()}
    other = LearnedOptimizer(params.values(), GROUPED[rule](), state_dtype=dtype, fallback="adam")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    laws.assert_same(descend(params, other, range(5, 9), without), expected)
    laws.assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])


@each_grouped
def test_a_parameter_left_behind_keeps_its_state(rule):
    params = start()
    optimizer = LearnedOptimizer(params.values(), GROUPED[rule]())
    descend(params, optimizer, range(2))
    kept = deepcopy(optimizer.state[params["vector"]])
    descend(params, optimizer, range(2, 4), lambda step: ["vector"])
    laws.assert_same(optimizer.state[params["vector"]], kept)


@pytest.mark.parametrize("rule", DOUBLES)
def test_a_parameter_added_later_begins_afresh(rule):
    params, late = start(), nn.Parameter(normal(4, 2))
    optimizer = LearnedOptimizer(params.values(), DOUBLES[rule]())
    descend(params, optimizer, range(2))
    optimizer.add_param_group({"params": [late]})
    together = descend(params | {"late": late}, optimizer, range(2, 5))
    alone, other = start(), nn.Parameter(normal(4, 2))
    laws.assert_same(
        together,
        descend(alone, LearnedOptimizer(alone.values(), DOUBLES[rule]()), range(5))
        | descend({"late": other}, LearnedOptimizer([other], DOUBLES[rule]()), range(2, 5)),
    )


@each_grouped
def test_a_state_in_bfloat16_is_worked_on_in_blocks_of_whole_tensors(rule, monkeypatch):
    """State per coordinate is rounded, state per group is not; where the blocks end does not matter."""
    results = []
    for size in (2**16, 3):
        monkeypatch.setattr(blocks, "BLOCK", size)
        params = start(torch.float32)
        optimizer = LearnedOptimizer(params.values(), GROUPED[rule]().float(), state_dtype="bfloat16")
        results.append((descend(params, optimizer, range(6)), optimizer.state_dict()["state"]))
    laws.assert_close(results[1], results[0], 1e-6)
    for own in results[0][1].values():
        floats = {k: own[k].dtype for k in own if k not in shared_by(rule) and torch.is_tensor(own[k])}
        assert floats == {k: torch.float32 if k.startswith(tuple(state_parts.AXES)) else torch.bfloat16 for k in floats}
        assert own["step"].item() == 6


def orthogonalised_alone():
    """A rule without any mean over groups, which needs whole tensors all the same."""
    return seeded(optimisers.Coordinatewise({"it": Orthogonalised()}, cells.build("lstm", 3, 3), rules.Bounded()))


@pytest.mark.parametrize("groups_of", [orthogonalised_alone, *list(DOUBLES.values())[:2]])
def test_blocks_end_with_a_tensor_where_coordinates_meet(groups_of, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 3)
    layout = Layout(("first", "one", "last"), ((2, 1), (2, 3), (4,)))
    found = blocks.blocks_of(layout, groups_of(), torch.zeros((), dtype=torch.float64))
    assert [(block.low, block.high, block.first, block.end) for block in found] == [(0, 8, 0, 2), (8, 12, 2, 3)]
    found = blocks.blocks_of(layout, optimisers.SGD(0.1), torch.zeros(()))
    assert [(block.low, block.high) for block in found] == [(0, 3), (3, 6), (6, 9), (9, 12)]


@each_grouped
@pytest.mark.parametrize("fault", ["another shape", "a part missing"])
def test_the_state_of_another_model_is_refused(rule, fault):
    def stepped(*shape):
        param = nn.Parameter(torch.ones(*shape, dtype=torch.float64))
        optimizer = LearnedOptimizer([param], GROUPED[rule]())
        descend({"one": param}, optimizer, range(1))
        return optimizer

    saved, target = stepped(*{"another shape": (3, 4), "a part missing": (3, 5)}[fault]).state_dict(), stepped(3, 5)
    if fault == "a part missing":
        del saved["state"][0][[key for key in saved["state"][0] if key not in shared_by(rule)][-1]]
    before = deepcopy(target.state_dict())
    with pytest.raises(UserError, match=r"load_state_dict: p0: expected .* \[\.\.\., \*\[3, 5\]\]"):
        target.load_state_dict(saved)
    laws.assert_same(target.state_dict()["state"], before["state"])


def test_the_statistic_that_older_releases_stored_is_dropped():
    params = start()
    optimizer = LearnedOptimizer(params.values(), {"name": "normalised-adam"})
    half = descend(params, optimizer, range(3))
    saved = deepcopy(optimizer.state_dict())
    for own in saved["state"].values():
        own["statistic"] = torch.ones(3, dtype=torch.float64)
    expected = descend(params, optimizer, range(3, 5))
    params = {name: nn.Parameter(value) for name, value in half.items()}
    other = LearnedOptimizer(params.values(), {"name": "normalised-adam"})
    other.load_state_dict(saved)
    laws.assert_same(descend(params, other, range(3, 5)), expected)
    assert not any("statistic" in own for own in other.state.values())
