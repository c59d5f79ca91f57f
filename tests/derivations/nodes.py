"""Named values of a forward pass, each with autograd's gradient: what a derivation's terms are compared with."""

from typing import Any

import torch
from laws import assert_close
from torch import Tensor


class Nodes(dict[str, Tensor]):
    """Name → value. `nodes(name, value)` notes the value and returns a copy of its own to go on with.

    A value that is used twice is noted once per use, so that each path has a gradient of its own.
    """

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self[name] = value.clone()
        return self[name]

    def gradients(self, value: Tensor) -> dict[str, Tensor]:
        """Autograd's gradient of the number `value` along every node."""
        return dict(zip(self, torch.autograd.grad(value, list(self.values()), retain_graph=True), strict=True))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return ((found - expected).norm() / expected.norm()).item()


def assert_terms_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every expected term was derived, and equals autograd's to 1e-12 of its largest number."""
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        try:
            assert_close(found[name], gradient)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def wrong_terms(found: dict[str, Any], expected: dict[str, Tensor], threshold: float = 0.01) -> set[str]:
    """The terms that miss autograd's by more than `threshold` of their norm; all others agree."""
    wrong = {name for name, gradient in expected.items() if relative_error(found[name], gradient) > threshold}
    assert_terms_agree(found, {name: gradient for name, gradient in expected.items() if name not in wrong})
    return wrong
