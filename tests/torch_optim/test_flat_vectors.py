"""How a state lies in memory: one buffer, of which each parameter's table has a view."""

import math
import weakref

import laws
import pytest
import torch
from descent import LSTM, RULES, descend, each_optimiser, start
from implementations import OPTIMISERS, normal

from l2lopt import LearnedOptimizer, optimisers
from l2lopt.core.kinds import Role
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zeros
from l2lopt.torch_optim import blocks
from l2lopt.torch_optim.flat_vectors import FlatVector


@each_optimiser
def test_a_state_is_one_buffer_that_stays(rule):
    params = start(torch.float32)
    optimizer = LearnedOptimizer(params.values(), rule())

    def places():
        return {
            (name, key): (value.data_ptr(), value.untyped_storage().data_ptr())
            for name, param in params.items()
            for key, value in optimizer.state[param].items()
            if torch.is_tensor(value)
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


class Handing(Optimiser):
    """Gives its inputs as update and state."""

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        return OptimiserState(layout, {"g": zeros(layout, batch, like), "theta": zeros(layout, batch, like)}, {}, {})

    def update(self, grads, state, params, *, loss=None):
        return grads, state._replace(coordinates={"g": grads, "theta": params})


def test_the_copies_that_are_kept_are_nobodys_state():
    """The memory that gradients and parameters are gathered in is written again at the next step."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = LearnedOptimizer([param], Handing())
    for step in (1.0, 2.0):
        before, param.grad = param.detach().clone(), torch.full((3,), step)
        optimizer.step()
        assert torch.equal(param, before + step)
        assert torch.equal(param.grad, torch.full((3,), step))
        assert torch.equal(optimizer.state[param]["g"], torch.full((3,), step))
        assert torch.equal(optimizer.state[param]["theta"], before)


def test_the_copies_that_are_kept_follow_the_parameters():
    """Their dtype, and their device whatever the default one is."""
    layer = torch.nn.Linear(2, 1)
    optimizer = LearnedOptimizer(layer.parameters(), {"name": "sgd", "lr": 1e-9})
    for dtype in (torch.float32, torch.float64):
        layer.to(dtype)
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        before = [param.detach().clone() for param in layer.parameters()]
        with torch.device("meta"):
            optimizer.step()
        if dtype == torch.float64:
            for param, old in zip(layer.parameters(), before, strict=True):
                torch.testing.assert_close(param - old, torch.full_like(old, -1e-9), rtol=1e-6, atol=0)


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
        monkeypatch.setattr(blocks, "BLOCK", piece)
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


class LossAverage(Optimiser):
    """Steps as large as the running mean of the loss, which all coordinates share."""

    needs_loss = True

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        zero = zeros(layout, batch, like)
        return OptimiserState(layout, {"m": zero}, {}, {"average": zero.new_zeros(tuple(batch))})

    def update(self, grads, state, params, *, loss=None):
        average = 0.5 * state.shared["average"] + 0.5 * loss
        return -0.01 * average * grads.sign(), state._replace(shared={"average": average})


def test_what_all_coordinates_share_moves_once_a_step_however_many_blocks(monkeypatch):
    found = []
    for size in (2**16, 3):
        monkeypatch.setattr(blocks, "BLOCK", size)
        params = start()
        optimizer = LearnedOptimizer(params.values(), LossAverage(), state_dtype="bfloat16")
        found.append((descend(params, optimizer, range(3)), optimizer.state[params["matrix"]]["average"]))
    laws.assert_close(*found)


def test_a_state_follows_its_parameters_to_another_device():
    """On a machine without a GPU, "meta" is the other device."""
    rule, param = optimisers.make("adam", lr=0.1), torch.nn.Parameter(torch.ones(3))
    vector = FlatVector({"p": param}, [{}], (1,), (Role("vector"),))
    vector.update_(rule, "", torch.float32, torch.ones(3), torch.ones(3), None)
    moved = FlatVector({"p": param}, vector.states, (1,), (Role("vector"),))
    state = moved._join(rule, "", torch.float32, torch.ones(3, device="meta"))
    values = [*state.coordinates.values(), *state.shared.values()]
    assert {value.device.type for value in values} == {"meta"}
    assert len(values) > 2
