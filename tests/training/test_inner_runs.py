"""What the unrolls of a run give to the meta-update."""

import laws
import pytest
import torch
from implementations import OPTIMISEES, OPTIMISERS

from l2lopt.estimators import Backprop
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.settings import UnrollSettings


class Watched(Backprop):
    """Keeps what it gives."""

    def __call__(self, *arguments):
        self.found = super().__call__(*arguments)
        return self.found


@pytest.mark.parametrize("truncation", [4, None])
def test_meta_gradient_and_meta_loss_are_divided_by_the_steps(truncation):
    """So that unrolls of any length weigh the same; the last one of a run may be shorter."""
    settings = UnrollSettings(length=6, truncation=truncation)
    rule, estimator = OPTIMISERS["coordinatewise additive"](), Watched()
    runs = InnerRuns(rule, [OPTIMISEES["quadratic"]()], estimator, settings, 1, seed=0)
    for update, steps in enumerate([4, 2] if truncation else [6], 1):
        (summary,) = runs.unroll(update)
        assert summary.steps == steps
        laws.assert_close(summary.gradient, {name: value / steps for name, value in estimator.found.gradient.items()})
        laws.assert_close(summary.meta_loss, estimator.found.value / steps)
        assert any(value.abs().max() > 0 for value in summary.gradient.values())
        assert torch.isfinite(summary.update_size)
    assert summary.ended
