"""What a network per tensor is told: facts without a unit about the tensor, the run and the loss.

A tensor's numbers are means over its coordinates, so that the facts of a network of a thousand parameters and of one of
a thousand million are alike. All are finite whatever the gradients, parameters and losses are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.errors import UserError, did_you_mean
from l2lopt.core.kinds import KINDS
from l2lopt.core.layout import Layout, Params

TINY = 1e-30
"""The least mean square."""
LARGEST_MEAN = 1e37
"""What a mean beyond the largest number counts as."""
SLOW = 0.98
"""Decay rate of the slow running means."""
FAST = 0.9
"""Decay rate of the fast running means."""
LEAST_LOSS, LARGEST_LOSS = 1e-6, 1e4
"""Bounds of the losses that facts are made of; a loss that is not finite counts as the largest."""
UNKNOWN = 100
"""Where the end is not known, T is taken to be 2 (t + 100): a little more than twice the way so far."""


class Losses(NamedTuple):
    """Losses of a run, each [*batch, 1].

    Attributes:
        now: Loss of this step.
        fast: Running mean at the rate 0.9.
        slow: Running mean at the rate 0.98.
        first: The first loss of the run.
    """

    now: Tensor
    fast: Tensor
    slow: Tensor
    first: Tensor


class Numbers(NamedTuple):
    """What facts are made of.

    Attributes:
        means: Means over each tensor's coordinates by name, see `MEANS`, [*batch, tensors].
        memory: Numbers per tensor that are remembered from earlier steps, see `remembered`, [*batch, tensors].
        steps: t, the number of updates before this one.
        total: T, the number of updates of the run.
        fan_ins: Fan-in of each tensor, [tensors].
        kinds: Name of a kind → 1 where the tensor is of that kind, and 0 elsewhere, [tensors].
        losses: Losses of the run; None where this step has none.
    """

    means: Params
    memory: Params
    steps: Tensor
    total: Tensor
    fan_ins: Tensor
    kinds: Params
    losses: Losses | None

    def size(self, name: str) -> Tensor:
        """The root of a mean square."""
        return (self.means[name] + TINY).sqrt()

    def share(self, part: str, whole: str) -> Tensor:
        """The logarithm of one mean square over another, in about [−2, 1]."""
        return (self.means[part] / (self.means[whole] + TINY) + 1e-4).log() / 3 + 1

    def of_losses(self, formula: Callable[[Losses], Tensor]) -> Tensor:
        """A fact of the losses, 0 where there are none."""
        return torch.zeros_like(self.steps) if self.losses is None else formula(self.losses)


class Fact(NamedTuple):
    """One number per tensor.

    Attributes:
        formula: Function of the numbers, whose result broadcasts to [*batch, tensors].
        means: Names of the means that it looks at.
        memory: Name of the remembered number that it looks at.
        needs_loss: Whether it looks at the losses.
    """

    formula: Callable[[Numbers], Tensor]
    means: tuple[str, ...] = ()
    memory: str | None = None
    needs_loss: bool = False


MEANS: Mapping[str, str] = {
    "grads": "g²",
    "params": "θ²",
    "momentum": "m̂², of the running mean at the rate 0.9",
    "slow": "ŝ², of the running mean at the rate 0.98",
    "square": "v̂, the running mean of g²",
    "alignment": "g m̂",
}
"""Name → what the mean is of."""
FACTS: Mapping[str, Fact] = {
    # 2 t/T − 1, from −1 to 1; log T − 5.3 in [−3, 2], 0 at 200 updates and 2 from 1,480 on, so that longer runs
    # look like runs of lengths that meta-training knows; log(1 + t) / 3 − 1.
    "progress": Fact(lambda n: 2 * (n.steps / n.total).clamp(max=1.0) - 1),
    "length": Fact(lambda n: (n.total.log() - 5.3).clamp(-3, 2)),
    "age": Fact(lambda n: (1 + n.steps).log() / 3 - 1),
    # log of RMS(g) over its slow running mean, in [−3, 3].
    "gradient-size": Fact(
        lambda n: (n.size("grads") / n.memory["usual"] + 1e-8).log().clamp(-3, 3), ("grads",), "usual"
    ),
    # log of RMS(g) over that of the tensor's first gradient, / 2, in [−3, 3].
    "gradient-progress": Fact(
        lambda n: ((n.size("grads") / n.memory["first"].clamp(min=1e-15) + 1e-8).log() / 2).clamp(-3, 3),
        ("grads",),
        "first",
    ),
    # How much of the gradient is signal: log(mean m̂² / mean v̂) / 3 + 1, of two momenta.
    "signal": Fact(lambda n: n.share("momentum", "square"), ("momentum", "square")),
    "slow-signal": Fact(lambda n: n.share("slow", "square"), ("slow", "square")),
    # The cosine of the gradient and its running mean.
    "alignment": Fact(
        lambda n: n.means["alignment"] / (n.size("grads") * n.size("momentum")), ("alignment", "grads", "momentum")
    ),
    # log(RMS(θ) √fan-in), in [−4, 4]; log of RMS(θ) over that at the first update, in [−3, 3].
    "weight-size": Fact(lambda n: (n.size("params") * n.fan_ins.sqrt() + 1e-3).log().clamp(-4, 4), ("params",)),
    "growth": Fact(
        lambda n: ((n.size("params") + 1e-8) / (n.memory["start"] + 1e-8)).log().clamp(-3, 3), ("params",), "start"
    ),
    # log of the last update's size over RMS(θ), / 3 + 1, in [−3, 3]; the decay left aside.
    "update-to-weight": Fact(
        lambda n: ((n.memory["moved"] / (n.size("params") + 1e-8) + 1e-8).log() / 3 + 1).clamp(-3, 3),
        ("params",),
        "moved",
    ),
    # 1 where the tensor is of that kind, −1 elsewhere; log(fan-in) / 3 − 1; the place among the tensors, from −1 to 1:
    # among those of one flat vector, so that parameters in several groups, or cut otherwise, have other depths.
    "matrix": Fact(lambda n: 2 * n.kinds["matrix"] - 1),
    "vector": Fact(lambda n: 2 * n.kinds["vector"] - 1),
    "embedding": Fact(lambda n: 2 * n.kinds["embedding"] - 1),
    "head": Fact(lambda n: 2 * n.kinds["head"] - 1),
    "fan-in": Fact(lambda n: n.fan_ins.log() / 3 - 1),
    "depth": Fact(lambda n: n.memory["depth"], memory="depth"),
    # log ℓ / 3; 3 log of the fast over the slow running mean of ℓ, in [−3, 3]; log of the slow one over the first ℓ.
    "loss": Fact(lambda n: n.of_losses(lambda told: told.now.log() / 3), needs_loss=True),
    "loss-trend": Fact(
        lambda n: n.of_losses(lambda told: ((told.fast / told.slow).log() * 3).clamp(-3, 3)), needs_loss=True
    ),
    "loss-progress": Fact(lambda n: n.of_losses(lambda told: (told.slow / told.first).log() / 2), needs_loss=True),
}
"""Name → fact. The line above a fact has its equation."""
USUAL = (
    *("progress", "length", "gradient-size", "gradient-progress", "signal", "slow-signal", "alignment", "weight-size"),
    *("matrix", "embedding", "head", "fan-in"),
)
"""The facts of a rule that names none. No loss is among them, so that `step()` needs none; nor is the depth,
which is another where parameters are in several groups."""
LOSSES = ("loss_fast", "loss_slow", "loss_first")
"""Names in the shared state of what `Losses` remembers."""


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Facts of these names.

    Raises:
        UserError: For an unknown or repeated name, and for none at all.
    """
    for name in names:
        if name not in FACTS:
            raise UserError("facts", expected="known names", found=repr(name), remedy=did_you_mean(name, FACTS))
    if len(set(names)) < len(names) or not names:
        found, remedy = ", ".join(names) or "none", f"choose from {', '.join(FACTS)}"
        raise UserError("facts", expected="at least one, and each at most once", found=found, remedy=remedy)
    return tuple(names)


def initial_memory(names: Sequence[str], layout: Layout, zero: Tensor) -> Params:
    """The remembered numbers before the first update.

    Args:
        names: Names of the numbers.
        layout: Layout of the coordinates.
        zero: Zeros [*batch, tensors].
    """
    # Remembered, as a vector may later be updated in parts, where a tensor has another place.
    depth = torch.linspace(-1, 1, len(layout.names), dtype=zero.dtype, device=zero.device)
    return {name: depth.expand_as(zero).clone() if name == "depth" else zero.clone() for name in names}


def finite_means(means: Params) -> Params:
    """The means; those of finite squares that are beyond the largest number are large numbers, which have a ratio."""
    return {name: value.nan_to_num(0.0, LARGEST_MEAN, -LARGEST_MEAN) for name, value in means.items()}


def remembered(memory: Params, means: Params) -> Params:
    """The numbers that facts remember, after this step's means are known.

    - "usual": the slow running mean of RMS(g), which begins at the first one;
    - "first": RMS(g) of the first gradient that is not 0;
    - "start": RMS(θ) at the first update;
    - "depth" stays, and "moved", the size of the last update, is for the rule to write.

    Args:
        memory: Numbers before the step, [*batch, tensors].
        means: Means by name, [*batch, tensors].
    """
    after = dict(memory)
    # No size is 0, so 0 says that there has been none.
    if "first" in memory:
        begins = (memory["first"] == 0) & (means["grads"] > 0)
        after["first"] = torch.where(begins, (means["grads"] + TINY).sqrt(), memory["first"])
    if "usual" in memory:
        size = (means["grads"] + TINY).sqrt()
        after["usual"] = torch.where(memory["usual"] == 0, size, SLOW * memory["usual"] + (1 - SLOW) * size)
    if "start" in memory:
        after["start"] = torch.where(memory["start"] == 0, (means["params"] + TINY).sqrt(), memory["start"])
    return after


def told(shared: Mapping[str, Tensor], loss: Tensor | None) -> tuple[Losses | None, Params]:
    """The losses that facts look at, and what is remembered of them.

    Args:
        shared: Shared state with `LOSSES`, each [*batch].
        loss: Loss of this step, [*batch]; None leaves what is remembered as it was.
    """
    before = {name: shared[name] for name in LOSSES}
    if loss is None:
        return None, before
    now = torch.where(loss.isfinite(), loss, LARGEST_LOSS).to(before["loss_first"].dtype)
    now = now.clamp(LEAST_LOSS, LARGEST_LOSS)
    # No loss is 0 once it is clamped, so 0 says that there has been none.
    begins = before["loss_first"] == 0
    after = {
        "loss_fast": torch.where(begins, now, FAST * before["loss_fast"] + (1 - FAST) * now),
        "loss_slow": torch.where(begins, now, SLOW * before["loss_slow"] + (1 - SLOW) * now),
        "loss_first": torch.where(begins, now, before["loss_first"]),
    }
    return Losses(*(value.unsqueeze(-1) for value in (now, *after.values()))), after


def stated(
    facts: Sequence[str],
    layout: Layout,
    means: Params,
    memory: Params,
    step: Tensor,
    total: Tensor,
    losses: Losses | None,
) -> Tensor:
    """The facts, [facts, *batch, tensors].

    Args:
        facts: Names of the facts.
        layout: Layout of the coordinates.
        means: Means by name, [*batch, tensors].
        memory: Remembered numbers after this step, [*batch, tensors].
        step: t, the number of updates before this one, an integer.
        total: T, an integer; 0 where it is not known.
        losses: Losses of the run, if this step has one.
    """
    like = memory["idle"]
    steps = step.to(like.dtype)
    known = torch.where(total > 0, total.to(like.dtype), 2 * (steps + UNKNOWN))
    kinds: Params = {
        kind: layout.tensors.each([float(role.kind == kind) for role in layout.roles], like)
        for kind in KINDS
        if kind in facts  # whose names are those of the kinds
    }
    fan_ins = layout.tensors.each(layout.fan_ins, like)
    numbers = Numbers(means, memory, steps, known, fan_ins, kinds, losses)
    return torch.stack([fact.formula(numbers).expand_as(like) for fact in map(FACTS.__getitem__, facts)])
