"""What the means of an update depend on: which of them have an adjoint that passes over the blocks can find."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from l2lopt.core.groupings import Controls, Exchange, Grouping, key_of
from l2lopt.core.layout import Params
from l2lopt.core.types import Update
from l2lopt.estimators.window import Meeting, Window

PHI, THETA = "phi", "theta"
"""Beside them all names have the kind of thing before them: a rule may call its state "theta", or two things alike."""


class Dependencies(NamedTuple):
    """How the means of an update are dealt with in backpropagation over blocks.

    Attributes:
        linked: Means with an adjoint, "grouping.name", those that depend on others of them first.
        constant: Means and functions of whole tensors that depend on φ and are taken as constants all the same.
    """

    linked: tuple[str, ...]
    constant: tuple[str, ...]


class _Probe(Exchange):
    """Gives a slice recorded means as leaves, and keeps the values that they are means of."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.leaves, self.values, self.controls_of = Params(), Params(), Params()

    def mean(self, grouping: Grouping, name: str, values: Tensor) -> Tensor:
        """The values' shape of ones, a leaf."""
        key = f"mean {key_of(grouping, name)}"
        self.values[key] = values
        # Only the graph is looked at, so any value does; at 1 a rule may divide by it or take its root.
        self.leaves[key] = torch.ones_like(values, requires_grad=True)
        return self.leaves[key]

    def mean_of_sums(self, grouping: Grouping, name: str, sums: Tensor) -> Tensor:
        """See `mean`."""
        return self.mean(grouping, name, sums)

    def whole(self, name: str, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """The recorded result as a leaf."""
        key = f"whole {name}"
        self.values[key] = values
        self.leaves[key] = self._meeting.wholes[name].to(values.dtype).detach().requires_grad_()
        return self.leaves[key]

    def controls(self, grouping: Grouping, name: str, compute: Callable[[], Controls], memory: Params) -> Controls:
        """`compute()`, its outputs remembered."""
        outputs, after = compute()
        self.controls_of[f"controls {key_of(grouping, name)}"] = outputs
        return outputs, after


def dependencies(update: Update, phi: Params, window: Window) -> Dependencies:
    """Follows one step of a few coordinates on autograd's tape.

    A mean M is *linked* if its values depend on φ, directly or through the state, and if M comes back neither into its
    own values (of a later step, through the state or θ) nor into the inputs of a network per group: then its adjoint is
    complete once the block's coordinates have gone back with M as a leaf.

    Args:
        update: Update of the optimiser.
        phi: Meta-parameters φ.
        window: A slice of a few coordinates; its first step is looked at.
    """
    probe = _Probe(window.meetings[0])
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
        theta = window.params.detach().clone().requires_grad_()
        named = _named(window.state.coordinates, window.state.groups)
        held = {name: value.detach().clone().requires_grad_() for name, value in named.items()}
        state = window.state._replace(
            layout=window.state.layout.meeting(probe),
            coordinates={name: held[f"coordinates {name}"] for name in window.state.coordinates},
            groups={
                kind: {name: held[f"groups {kind} {name}"] for name in values}
                for kind, values in window.state.groups.items()
            },
        )
        change, after = update(leaves, window.grads[0], state, theta, loss=window.losses[0])
        outputs = {THETA: change, **_named(after.coordinates, after.groups), **probe.controls_of}
        sources = {**{f"{PHI} {name}": leaf for name, leaf in leaves.items()}, THETA: theta, **held, **probe.leaves}
        enters: dict[str, set[str]] = {}  # what an output depends on → the output
        for output, value in [*outputs.items(), *probe.values.items()]:
            if not value.requires_grad:
                continue
            found = torch.autograd.grad(value.sum(), list(sources.values()), allow_unused=True, retain_graph=True)
            for source, gradient in zip(sources, found, strict=True):
                # None says that there is no path; a derivative of 0 may be so at these numbers only.
                if gradient is not None:
                    enters.setdefault(PHI if source.startswith(f"{PHI} ") else source, set()).add(output)
    return _sorted(enters, list(probe.values), set(probe.controls_of))


def _sorted(enters: dict[str, set[str]], means: list[str], controls: set[str]) -> Dependencies:
    """The means and functions of whole tensors by what can be reached from φ and from themselves."""
    varying = _reachable(enters, PHI)
    linked: list[str] = []
    constant: list[str] = []
    for mean in means:
        if mean not in varying:
            continue
        after = _reachable(enters, mean)
        (constant if mean.startswith("whole ") or mean in after or after & controls else linked).append(mean)
    ordered = sorted(linked, key=lambda mean: len(_reachable(enters, mean) & {*linked}))
    return Dependencies(*(tuple(key.partition(" ")[2] for key in keys) for keys in (ordered, constant)))


def _reachable(enters: dict[str, set[str]], start: str) -> set[str]:
    """What depends on `start`, at this step or a later one."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in enters.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def _named(coordinates: Params, groups: dict[str, Params]) -> Params:
    """State per coordinate and per group under names of one table."""
    of_groups = {f"groups {kind} {name}": value for kind, own in groups.items() for name, value in own.items()}
    return {f"coordinates {name}": value for name, value in coordinates.items()} | of_groups
