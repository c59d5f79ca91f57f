"""Optimisees of one's own that break the contract are refused in one line before any work."""

import re

import pytest
import torch

import l2lopt
import optimisees
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator
from l2lopt.optimisee import Optimisee


class Line(Optimisee):
    """A line through samples, with two numbers beside its loss."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def init(self, seed):
        params = {"weight": torch.randn(3, generator=generator("weight", seed)), "offset": torch.zeros(())}
        return params, {"a": torch.zeros(2), "b": torch.ones(2)}

    def batch(self, split, seed, step):
        x = torch.randn(8, 3, generator=generator("x", split, seed, step))
        return x, x.sum(1)

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), {"a": 0.9 * aux["a"], "b": 0.5 * aux["b"]}

    def evaluate(self, params, aux, batch):
        return self.squares(params, batch).mean()

    def squares(self, params, batch):
        return (batch[0] @ params["weight"] + params["offset"] - batch[1]).square()


class ParamsAlone(Line):
    def init(self, seed):
        return super().init(seed)[0]


class NoAux(Line):
    def init(self, seed):
        return super().init(seed)[0], None


class Counter(Line):
    def init(self, seed):
        return super().init(seed)[0], {"n": 0}


class LossAlone(Line):
    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch)


class Vector(Line):
    def loss(self, params, aux, batch):
        return self.squares(params, batch), aux


class Plain(Line):
    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch).item(), aux


class Detached(Line):
    def loss(self, params, aux, batch):
        with torch.no_grad():
            return super().loss(params, aux, batch)


class Swapped(Line):
    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), dict(reversed(aux.items()))


class More(Line):
    def init(self, seed):
        return super().init(seed)[0], {}

    def loss(self, params, aux, batch):
        return self.evaluate(params, aux, batch), {"c": torch.ones(2)}


class VectorInTests(Line):
    def loss(self, params, aux, batch):
        return self.squares(params, batch).mean(), aux

    def evaluate(self, params, aux, batch):
        return self.squares(params, batch)


WRONG = {
    ParamsAlone: "init: expected a pair, parameters and aux, found a dict;",
    NoAux: "init: aux: expected a dict of tensors, found a NoneType; give {} where there are none",
    Counter: "init: aux: expected tensors, found a int as 'n';",
    LossAlone: "loss: expected a pair, the loss and aux, found a Tensor;",
    Vector: "loss: expected a tensor of one number, of shape [], found one of shape [8]; take the mean",
    Plain: "loss: expected a tensor of one number, of shape [], found a float;",
    Detached: "loss: expected a function of the parameters, found one without a gradient;",
    Swapped: "loss: aux: expected the names a, b, found the names b, a; return those of init, in their order",
    More: "loss: aux: expected the names none, found the names c;",
    VectorInTests: "evaluate: expected a tensor of one number, of shape [], found one of shape [8];",
}


@pytest.mark.parametrize(("made", "message"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_optimisee_that_breaks_the_contract_is_refused(made, message, tmp_path):
    message = re.escape(f"optimisee '{made.__name__}': {message}")
    with pytest.raises(UserError, match=message):
        optimisees.make(f"{__name__}:{made.__name__}", device="cpu")
    for run in (l2lopt.meta_train, l2lopt.train):
        with pytest.raises(UserError, match=message):
            run(made(), tmp_path / "run", optimiser={"name": "coordinatewise", "hidden_size": 2})
    assert not (tmp_path / "run").exists()


def test_one_that_keeps_it_is_taken():
    assert isinstance(optimisees.make(f"{__name__}:Line"), Line)
