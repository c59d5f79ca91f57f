"""What the unrolls of a run give to the meta-update."""

import laws
import pytest
import torch
from implementations import OPTIMISEES, OPTIMISERS

from l2lopt.core.errors import UserError
from l2lopt.estimators import Backprop
from l2lopt.training.inner_runs import InnerRuns
from l2lopt.training.settings import UnrollSettings
from optimisees import Quadratic


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


class Exchanging(Quadratic):
    """Has two numbers beside its loss, which change places at every step; a checkpoint knows them by their places."""

    def init(self, seed):
        return super().init(seed)[0], {"a": torch.zeros(()), "b": torch.ones(())}

    def loss(self, params, aux, batch):
        return super().loss(params, {}, batch)[0], {"b": aux["b"], "a": aux["a"]}


@pytest.mark.parametrize("truncation", [4, None])
def test_names_in_another_order_are_refused(truncation):
    settings = UnrollSettings(length=6, truncation=truncation)
    problem = Exchanging(4, "float64")
    runs = InnerRuns(OPTIMISERS["coordinatewise additive"](), [problem], Backprop(), settings, 1, seed=0)
    with pytest.raises(UserError, match="expected names and order of init, found others after an update; return the"):
        runs.unroll(1)


@pytest.mark.parametrize("end", [{"end": 1.0}, {"end_heldout": 0.5}])
def test_the_end_weighs_the_same_however_a_run_is_cut(end):
    """Beside the mean over the steps, which every unroll of the run has."""
    found = {}
    for truncation in (2, 3, None):
        settings = UnrollSettings(length=6, truncation=truncation, targets={"next": 0.0, **end})
        rule = OPTIMISERS["coordinatewise additive"]()
        runs = InnerRuns(rule, [OPTIMISEES["quadratic"]()], Backprop(), settings, 1, seed=0)
        found[truncation] = [summary.meta_loss for n in range(6 // (truncation or 6)) for summary in runs.unroll(n + 1)]
        assert not any(found[truncation][:-1])  # alone, so that all of it is in the last unroll
    assert found[None][0] > 0
    for losses in found.values():
        laws.assert_close(losses[-1] / len(losses), found[None][0])
