"""The control against the learned rule whose network says nothing, and by hand."""

import laws
import pytest
import torch
from implementations import normal

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.optimisers import NormalisedAdam, coordinatewise

LAYOUT = Layout(("matrix", "bias"), ((3, 4), (3,)))


@pytest.mark.parametrize("by_fan_in", [False, True])
def test_equals_the_learned_rule_without_its_network(by_fan_in):
    rule = {"name": "direction-and-magnitude", "step_size": 0.2, "weight_decay": 0.3, "by_fan_in": by_fan_in}
    learned = coordinatewise(hidden_size=3, rule=rule, head_scale=0.0).double()
    control = NormalisedAdam(0.2, weight_decay=0.3, by_fan_in=by_fan_in)
    theta = ours = normal(15)
    state, own = learned.init(LAYOUT, like=theta), control.init(LAYOUT, like=theta)
    for step in range(40):
        drawn, silent = normal(15, seed=step + 1), torch.zeros(15, dtype=torch.bool)
        silent[3], silent[5], silent[12:] = True, step > 5, step > 2  # the last three are the whole bias
        change, state = learned.update((drawn + theta).where(~silent, 0.0), state, theta)
        same, own = control.update((drawn + ours).where(~silent, 0.0), own, ours)
        theta, ours = theta + change, ours + same
    laws.assert_close(ours, theta, 1e-12)


def test_the_first_update_is_the_sign_of_the_gradient_at_the_size_asked_for():
    grads, theta = normal(15), torch.zeros(15, dtype=torch.float64)
    control = NormalisedAdam(0.2, eps=1e-14)
    update, _ = control.update(grads, control.init(LAYOUT, like=theta), theta)
    laws.assert_close(update, -0.1 * grads.sign())  # both tensors have a fan-in of 4


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"horizon": 0.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        NormalisedAdam(**options)
