"""Feeds with W x + b outside the loop over time, and one product R h a step in it, or two around a reset gate."""

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.feed import Feed


class Full(Feed):
    """W x + b + R h: one product a step. Weights: `W`, `R`, perhaps `b`, and `b_h` for blocks that W does not reach."""

    def hoist(self) -> None:
        """W x + b."""
        out = self.part(self.z, "hoisted").flatten(0, 1)
        products.write(out, self.x.flatten(0, 1), self.w["W"], self.w.get("b"))
        if "alone" in self.blocks:
            # W does not reach these blocks and their memory is not zeroed: the steps would add R h to anything.
            alone = self.part(self.z, "alone")
            alone.copy_(self.w["b_h"]) if "b_h" in self.w else alone.zero_()
        self.gates, self.r = self.part(self.z, "product").unbind(0), products.Repeated(self.w["R"])

    def step(self, t: int, h: Tensor) -> None:
        """R h."""
        self.r.add(self.gates[t], h)

    def prepare_back(self, d: Tensor) -> None:
        """Views of the adjoints of R h, one for each step."""
        # R is transposed, because `Repeated` multiplies by the transpose of what it gets.
        self.d, self.adjoints, self.r = d, self.part(d, "product").unbind(0), products.Repeated(self.w["R"].t())

    def step_back(self, t: int, dh: Tensor) -> None:
        """Rᵀ d."""
        self.r.add(dh, self.adjoints[t])

    def weight_gradients(self) -> Params:
        """For W, R and the biases."""
        hoisted, product = self.part(self.d, "hoisted"), self.part(self.d, "product")
        gradients = {"W": self.outer(hoisted, self.x, "W"), "R": self.outer(product, self.h, "R")}
        if "b" in self.w:
            gradients["b"] = hoisted.sum((0, 1))
        if "b_h" in self.w:
            gradients["b_h"] = self.part(self.d, "alone").sum((0, 1))
        return gradients

    def input_gradient(self) -> Tensor:
        """Wᵀ d."""
        return products.back(self.part(self.d, "hoisted"), self.w["W"])


class Hoisted(Feed):
    """W x + b alone, which leaves no product in the loop: no gate sees h. Weights: `W`, perhaps `b`."""

    def hoist(self) -> None:
        """W x + b."""
        out = self.part(self.z, "hoisted").flatten(0, 1)
        products.write(out, self.x.flatten(0, 1), self.w["W"], self.w.get("b"))

    def step(self, t: int, h: Tensor) -> None:
        """Nothing."""

    def prepare_back(self, d: Tensor) -> None:
        """The adjoints of W x."""
        self.adjoints = self.part(d, "hoisted")

    def step_back(self, t: int, dh: Tensor) -> None:
        """Nothing."""

    def weight_gradients(self) -> Params:
        """For W and b."""
        gradients = {"W": self.outer(self.adjoints, self.x, "W")}
        return gradients | ({"b": self.adjoints.sum((0, 1))} if "b" in self.w else {})

    def input_gradient(self) -> Tensor:
        """Wᵀ d."""
        return products.back(self.adjoints, self.w["W"])


class ResetBefore(Feed):
    """The GRU of Table I: two dependent products a step, R h for r and i, then R_A (r∘h) for a. Weights of `Full`."""

    def hoist(self) -> None:
        """W x + b."""
        products.write(self.z.flatten(0, 1), self.x.flatten(0, 1), self.w["W"], self.w.get("b"))
        m = self.h.shape[2]
        self.gates, self.reset = self.part(self.z, "product").unbind(0), self.z[..., :m].unbind(0)
        # r∘h of every step is kept: the gradient of R_A then is one product over all of them.
        self.candidate, self.rh = self.part(self.z, "candidate").unbind(0), self.buffer("rh", m).unbind(0)
        self.r_gates, self.r_a = (products.Repeated(r) for r in self.w["R"].split([2 * m, m]))

    def step(self, t: int, h: Tensor) -> None:
        """r, i = σ(…) and the argument of a."""
        self.r_gates.add(self.gates[t], h)
        # Here and not in the pass: the second product needs r already, so this cell's `sigmoid` is empty.
        self.gates[t].sigmoid_()
        torch.mul(self.reset[t], h, out=self.rh[t])
        self.r_a.add(self.candidate[t], self.rh[t])

    def prepare_back(self, d: Tensor) -> None:
        """Views of the adjoints. The blocks of r hold factors at first, which `step_back` multiplies by that of r∘h."""
        m = self.h.shape[2]
        self.d, self.d_gates, self.d_reset = d, self.part(d, "product").unbind(0), d[..., :m].unbind(0)
        self.d_candidate, self.reset = self.part(d, "candidate").unbind(0), self.z[..., :m].unbind(0)
        self.r_gates, self.r_a = (products.Repeated(r.t()) for r in self.w["R"].split([2 * m, m]))
        self.d_rh = products.room(self.h, *self.h.shape[1:])

    def step_back(self, t: int, dh: Tensor) -> None:
        """R_Aᵀ d_a is the adjoint of r∘h; then Rᵀ d."""
        self.r_a.write(self.d_rh, self.d_candidate[t])
        # Before the last product, which reads the adjoints of r and i together.
        self.d_reset[t].mul_(self.d_rh)
        dh.addcmul_(self.d_rh, self.reset[t])
        self.r_gates.add(dh, self.d_gates[t])

    def weight_gradients(self) -> Params:
        """For W, R and the bias."""
        parts = ((self.part(self.d, "product"), self.h), (self.part(self.d, "candidate"), self.tape["rh"]))
        gradients = {"W": self.outer(self.d, self.x, "W"), "R": torch.cat([self.outer(d, x, "R") for d, x in parts])}
        if "b" in self.w:
            gradients["b"] = self.d.sum((0, 1))
        return gradients

    def input_gradient(self) -> Tensor:
        """Wᵀ d."""
        return products.back(self.d, self.w["W"])
