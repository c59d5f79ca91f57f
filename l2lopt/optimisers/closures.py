"""Closures for `torch.optim.Optimizer.step` that do not compute a loss again which was just computed."""

import math
from collections.abc import Callable, Iterable, MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

TRUSTED = 3
"""Calls that have to find everything unchanged. (At its first step a schedule-free class has nothing to move yet.)"""
_unchanged: MutableMapping[Optimizer, float] = WeakKeyDictionary()
"""Optimiser → such calls so far; −∞ for one that moves first."""


def closure_of(
    optimizer: Optimizer, params: Iterable[Tensor], loss: Tensor, evaluate: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """A closure whose first call gives `loss` and leaves the gradients as they are, where nothing has changed since.

    The classes of `torch.optim` and ours ask for the loss before they move anything. Others may not, such as those of
    sharpness-aware minimisation: theirs gets the loss where they ask for it. To tell, parameters and gradients are
    copied and compared until the first `TRUSTED` calls of an optimiser have found them unchanged.

    Args:
        optimizer: Optimiser whose step gets the closure.
        params: Parameters with the gradients of `loss`.
        loss: Loss at these parameters.
        evaluate: Function that computes the loss and the gradients where the parameters are now.

    Example:
        >>> import torch
        >>> from l2lopt.optimisers.closures import closure_of
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> closure = closure_of(torch.optim.SGD([weight], lr=0.1), [weight], weight.sum(), lambda: 2 * weight.sum())
        >>> closure().item(), closure().item()
        (1.0, 2.0)
    """
    ready, params = [loss], list(params)
    ours = type(optimizer).__module__.startswith(("torch.optim.", "l2lopt."))
    asks_first = ours or _unchanged.get(optimizer, 0) >= TRUSTED
    before = [] if asks_first else [(param.detach().clone(), _copy(param.grad)) for param in params]

    def closure() -> Tensor:
        if ready:
            first = ready.pop()
            pairs = zip(params, before, strict=True)
            if asks_first:
                return first
            if all(_same(param, old) and _same(param.grad, grad) for param, (old, grad) in pairs):
                _unchanged[optimizer] = _unchanged.get(optimizer, 0) + 1
                return first
            _unchanged[optimizer] = -math.inf
        return evaluate()

    return closure


def all_finite(loss: Tensor, params: Iterable[Tensor]) -> bool:
    """Whether a loss, the parameters and their gradients are numbers all through.

    Where they are not, a class of `torch.optim` may refuse its step, and the run has diverged.
    """
    params = list(params)
    numbers = [loss, *params, *(param.grad for param in params if param.grad is not None)]
    return all(bool(one.isfinite().all()) for one in numbers)


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two dense tensors, or their absence, are equal; sparse ones count as changed."""
    if one is None or other is None:
        return one is other
    return one.layout == other.layout == torch.strided and torch.equal(one, other)
