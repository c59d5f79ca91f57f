"""Rules of one's own that break the contract are refused in one line before any work."""

import pytest
import torch
from torch import nn

import l2lopt
from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.core.types import OptimiserState
from l2lopt.optimisers.base import Optimiser, zero_step, zeros


class Good(Optimiser):
    """Momentum with two means, as one would write it."""

    def __init__(self, rate: float = 0.01, seed: int = 0) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.tensor(rate).log())

    def init(self, layout, batch=(), *, like=None, total_steps=None):
        m = zeros(layout, batch, like)
        return OptimiserState(layout, {"m": m, "v": m.clone()}, {"tensors": {}}, {"step": zero_step(m)})

    def update(self, grads, state, params, *, loss=None):
        m = 0.9 * state.coordinates["m"] + 0.1 * grads
        v = 0.9 * state.coordinates["v"] + 0.1 * grads.square()
        after = state._replace(coordinates={"m": m, "v": v}, shared={"step": state.shared["step"] + 1})
        return self.given(-self.log_rate.exp() * m / (v.sqrt() + 1e-3), after)

    def given(self, update, state):
        return update, state


class Mixed(Good):
    """Has constants of NumPy's dtype, which meta-training casts."""

    def __init__(self, rate: float = 0.01, seed: int = 0) -> None:
        super().__init__(rate, seed)
        self.other = nn.Parameter(torch.ones(9, dtype=torch.float64))

    def given(self, update, state):
        return self.other.expand(update.shape[-1:]) * update, state


class Notes(Good):
    """Notes in `init` what it was told."""

    def init(self, layout, batch=(), **options):
        self.size = layout.size
        return super().init(layout, batch, **options)


class Rated(Good):
    def __init__(self, lr: float | torch.Tensor = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def given(self, update, state):
        return (self.lr if isinstance(self.lr, float) else self.lr[:, None]) * update, state


class Alone(Good):
    def given(self, update, state):
        return update


class Nothing(Good):
    def given(self, update, state):
        return None


class Three(Good):
    def given(self, update, state):
        return update, state, 1


class Number(Good):
    def given(self, update, state):
        return 0.1, state


class Mean(Good):
    def given(self, update, state):
        return update.mean(), state


class Double(Good):
    def given(self, update, state):
        return update.double(), state


class Swapped(Good):
    def given(self, update, state):
        return update, state._replace(coordinates=dict(reversed(state.coordinates.items())))


class More(Good):
    def given(self, update, state):
        return update, state._replace(coordinates={**state.coordinates, "w": update})


class Fewer(Good):
    def given(self, update, state):
        return update, state._replace(shared={})


class Table(Good):
    def given(self, update, state):
        return update, state._asdict()


class Counter(Good):
    def init(self, layout, batch=(), **options):
        return super().init(layout, batch, **options)._replace(shared={"step": 0})


class WithoutRows(Good):
    def init(self, layout, batch=(), **options):
        return super().init(layout, **options)


class Stateless(Good):
    def init(self, layout, batch=(), **options):
        return None


class InPlace(Good):
    def update(self, grads, state, params, *, loss=None):
        state.coordinates["m"].mul_(0.9).add_(grads, alpha=0.1)
        return -state.coordinates["m"], state


class Clipped(Good):
    """Clips as one would with one run."""

    def update(self, grads, state, params, *, loss=None):
        return super().update(grads / grads.norm(), state, params)


class Counts(Good):
    def __init__(self, rate: float = 0.01, seed: int = 0) -> None:
        super().__init__(rate, seed)
        self.calls = 0

    def given(self, update, state):
        self.calls += 1
        return update, state


WRONG = {
    Alone: "expected a pair of the update and the next state, found a Tensor;",
    Nothing: "found a NoneType;",
    Three: "found a tuple of 3;",
    Number: "expected a tensor as the update, found a float;",
    Mean: r"expected an update like the gradients, float32 \[2, 9\], found float32 \[\];",
    Double: r"found float64 \[2, 9\];",
    Swapped: r"in their order, .*, found coordinates.v float32 \[2, 9\] for coordinates.m float32 \[2, 9\];",
    More: r"found coordinates.w float32 \[2, 9\] for shared.step int64 \[\];",
    Fewer: r"found nothing for shared.step int64 \[\];",
    Table: "expected an OptimiserState, found a dict;",
    Counter: "expected a tensor as shared.step, found a int;",
    WithoutRows: r"found coordinates.m float32 \[2, 9\] for coordinates.m float32 \[9\];",
    Stateless: "expected an OptimiserState, found a NoneType;",
    InPlace: "expected an update that changes nothing in place, found changed coordinates.m;",
    Clipped: "expected rows that do not see one another, .*; reduce over the last axis alone",
    Counts: "found another 'calls' after an update; keep it in the state, or under a name that begins with",
}


@pytest.mark.parametrize(("rule", "message"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_that_breaks_the_contract_is_refused(rule, message):
    with pytest.raises(UserError, match=f"optimiser '{rule.__name__}': .*{message}"):
        optimisers.make(f"{__name__}:{rule.__name__}")


@pytest.mark.parametrize("rule", [Good, Mixed, Notes])
def test_a_rule_that_keeps_it_is_built_and_bears_no_trace(rule):
    made = optimisers.make(f"{__name__}:{rule.__name__}")
    assert vars(made).keys() - vars(rule()).keys() == {"description"}
    assert all(value.requires_grad for value in made.parameters())


def test_a_rule_around_a_wrong_one_is_refused():
    with pytest.raises(UserError, match="optimiser 'Alone': expected a pair"):
        optimisers.make("scheduled", optimiser={"name": f"{__name__}:Alone"}, total=3)


@pytest.mark.parametrize("rule", [rule for rule in WRONG if rule not in (Clipped, Counts, WithoutRows)])
def test_it_is_refused_in_a_loop_of_ones_own(rule):
    with pytest.raises(UserError, match=f"optimiser '{rule.__name__}': expected"):
        l2lopt.LearnedOptimizer(nn.Linear(2, 1), rule())


@pytest.mark.parametrize("rule", [Good, Clipped, Counts, WithoutRows])
def test_in_a_loop_of_ones_own_there_is_one_run(rule):
    """What holds for a single run may be in the rule, and its options may change: no file is made of it."""
    model = nn.Linear(2, 1)
    optimizer = l2lopt.LearnedOptimizer(model, rule())
    model(torch.ones(3, 2)).mean().backward()
    optimizer.step()


def test_rates_of_several_runs_are_tried_with_none():
    """They fit that number of rows alone."""
    rule = optimisers.make(f"{__name__}:Rated", lr=torch.tensor([0.1, 0.2, 0.3]))
    assert rule.lr.shape == (3,)
