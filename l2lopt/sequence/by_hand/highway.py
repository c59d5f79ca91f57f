"""Feeds of the IRC and IHC cells, whose gates are functions of v, itself a function of x and h.

The products of a step depend on one another: one or two for v, then W v, which therefore stays in the loop; W_A x and
W_G x are computed outside. The adjoint of v is at the same time that of x, so W v needs no product for dx. Weights:
`W_v` [gM, N], `W_A` [M, N], perhaps the gates' bias `b`, and those of v.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from l2lopt.core.layout import Params
from l2lopt.sequence.by_hand import products
from l2lopt.sequence.by_hand.feed import Feed

REPEATED = ("W_v", "U", "J", "gamma")
"""Weights of the products inside the loop, forward and backward."""


class Simplified(Feed):
    """The gates' arguments W v + b, and W_A x; the subclasses compute v."""

    def hoist(self) -> None:
        """W_A x."""
        products.write(self.part(self.z, "candidate").flatten(0, 1), self.x.flatten(0, 1), self.w["W_A"])
        self.gates, self.xs = self.part(self.z, "product").unbind(0), self.x.unbind(0)
        self.v = self.buffer("v", self.x.shape[2]).unbind(0)
        self.there = {name: products.Repeated(self.w[name]) for name in REPEATED if name in self.w}

    def step(self, t: int, h: Tensor) -> None:
        """W v + b."""
        self.mix(t, h)
        self.there["W_v"].write(self.gates[t], self.v[t], self.w.get("b"))

    @abstractmethod
    def mix(self, t: int, h: Tensor) -> None:
        """Writes v of step t."""

    def prepare_back(self, d: Tensor) -> None:
        """Memory for dv, and views for each step."""
        self.d, self.adjoints = d, self.part(d, "product").unbind(0)
        self.back = {name: products.Repeated(self.w[name].t()) for name in REPEATED if name in self.w}
        # All of dv is kept: after the loop dx needs it, and so may the gradients of the weights of v.
        self.dv = products.room(d, *self.x.shape)
        self.dvs = self.dv.unbind(0)

    def step_back(self, t: int, dh: Tensor) -> None:
        """Dv = Wᵀ d, and from it dh."""
        self.back["W_v"].write(self.dvs[t], self.adjoints[t])
        self.mix_back(t, dh)

    @abstractmethod
    def mix_back(self, t: int, dh: Tensor) -> None:
        """Adds the contribution of dv to dh."""

    def weight_gradients(self) -> Params:
        """For W, W_A and the gates' bias; subclasses add the weights of v."""
        gates, candidate = self.part(self.d, "product"), self.part(self.d, "candidate")
        gradients = {"W_v": self.outer(gates, self.tape["v"], "W_v"), "W_A": self.outer(candidate, self.x, "W_A")}
        if "b" in self.w:
            gradients["b"] = gates.sum((0, 1))
        return gradients

    def input_gradient(self) -> Tensor:
        """W_Aᵀ d + dv, written over dv."""
        return self.dv.add_(products.back(self.part(self.d, "candidate"), self.w["W_A"]))


class Residual(Simplified):
    """v = x + U h with α multiplied into U [N, M]; or v = x + ω∘h with α in ω [N], which leaves one product a step."""

    def mix(self, t: int, h: Tensor) -> None:
        """Writes v."""
        if "omega" in self.w:
            torch.addcmul(self.xs[t], h, self.w["omega"], out=self.v[t])
        else:
            self.there["U"].write(self.v[t], h, self.xs[t])

    def mix_back(self, t: int, dh: Tensor) -> None:
        """Uᵀ dv, or ω∘dv."""
        if "omega" in self.w:
            dh.addcmul_(self.dvs[t], self.w["omega"])
        else:
            self.back["U"].add(dh, self.dvs[t])

    def weight_gradients(self) -> Params:
        """For U or ω, too."""
        if "omega" in self.w:
            return super().weight_gradients() | {"omega": (self.dv * self.h).sum((0, 1))}
        return super().weight_gradients() | {"U": self.outer(self.dv, self.h, "U")}


class Highway(Simplified):
    """g = σ(W_G x + b_G + Γ h); v = x + g∘(u − x), u = U h, or ω∘h with a vector ω; Γ may act on u instead of h.

    u and g share a buffer, side by side, so that [U; Γ] h is a single product if Γ acts on h. Its weights are then
    `J` = [U; Γ], otherwise `U` or `omega`, and `gamma`; perhaps `W_G` and `b_G`. Γ acts on u if `blocks` has "on_u".
    """

    def hoist(self) -> None:
        """W_A x and W_G x + b_G."""
        super().hoist()
        n = self.x.shape[2]
        both = self.buffer("u g", 2 * n)
        self.u, self.g, self.both = both[..., :n].unbind(0), both[..., n:].unbind(0), both.unbind(0)
        # The product with J adds to both halves at once: u starts from zero, and g from what does not depend on h.
        if "W_G" in self.w:
            products.write(both[..., n:].flatten(0, 1), self.x.flatten(0, 1), self.w["W_G"], self.w["b_G"])
            both[..., :n].zero_()
        else:
            both.zero_()

    def mix(self, t: int, h: Tensor) -> None:
        """Writes u, g and v."""
        u, g = self.u[t], self.g[t]
        if "J" in self.w:
            self.there["J"].add(self.both[t], h)
        else:
            if "omega" in self.w:
                torch.mul(h, self.w["omega"], out=u)
            else:
                self.there["U"].write(u, h)
            self.there["gamma"].add(g, u if "on_u" in self.blocks else h)
        # σ works in place: the backward pass needs the value of g and not its argument.
        torch.lerp(self.xs[t], u, g.sigmoid_(), out=self.v[t])

    def prepare_back(self, d: Tensor) -> None:
        """Writes the factors that turn dv into the adjoints of u and of g's argument, for all steps."""
        super().prepare_back(d)
        n, both = self.x.shape[2], self.tape["u g"]
        self.d_both = products.room(d, *both.shape)
        u, g, d_u, d_g = self._halves()
        d_u.copy_(g)
        torch.sub(u, self.x, out=d_g)
        torch.ops.aten.sigmoid_backward.grad_input(d_g, g, grad_input=d_g)
        self.d_boths, self.d_pairs = self.d_both.unbind(0), self.d_both.unflatten(2, (2, n)).unbind(0)
        self.d_u, self.d_g = d_u.unbind(0), d_g.unbind(0)

    def mix_back(self, t: int, dh: Tensor) -> None:
        """The adjoints of u and of g's argument, and their contribution to dh."""
        # dv multiplies the factors of u and of g alike, so one operation serves both.
        self.d_pairs[t].mul_(self.dvs[t].unsqueeze(1))
        if "J" in self.w:
            self.back["J"].add(dh, self.d_boths[t])
            return
        # Where Γ acts on u, the adjoint of u is complete only with its part, and U must pass on the whole.
        self.back["gamma"].add(self.d_u[t] if "on_u" in self.blocks else dh, self.d_g[t])
        if "omega" in self.w:
            dh.addcmul_(self.d_u[t], self.w["omega"])
        else:
            self.back["U"].add(dh, self.d_u[t])

    def weight_gradients(self) -> Params:
        """For J, or for U or ω and Γ, and for W_G and b_G, too."""
        gradients = super().weight_gradients()
        u, _, d_u, d_g = self._halves()
        if "J" in self.w:
            gradients["J"] = self.outer(self.d_both, self.h, "J")
        else:
            gradients["gamma"] = self.outer(d_g, u if "on_u" in self.blocks else self.h, "gamma")
            if "omega" in self.w:
                gradients["omega"] = (d_u * self.h).sum((0, 1))
            else:
                gradients["U"] = self.outer(d_u, self.h, "U")
        if "W_G" in self.w:
            gradients["W_G"], gradients["b_G"] = self.outer(d_g, self.x, "W_G"), d_g.sum((0, 1))
        return gradients

    def input_gradient(self) -> Tensor:
        """Through a, g and v."""
        _, g, _, d_g = self._halves()
        # v has the term (1 − g)∘x; the result may lie over dv, as nothing after this needs dv itself.
        self.dv.addcmul_(self.dv, g, value=-1)
        if "W_G" in self.w:
            self.dv.add_(products.back(d_g, self.w["W_G"]))
        return super().input_gradient()

    def _halves(self) -> tuple[Tensor, ...]:
        """u, g and their adjoints."""
        return *self.tape["u g"].chunk(2, 2), *self.d_both.chunk(2, 2)
