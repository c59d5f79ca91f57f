"""Options that are one of a few words, of estimators that are made without a config."""

import pytest

from l2lopt import estimators
from l2lopt.core.errors import UserError


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (estimators.Backprop, {"order": 3}, "Backprop: order: expected 1 or 2, found 3"),
        (estimators.Backprop, {"objective": "log"}, "Backprop: objective: .* found 'log'"),
        (estimators.Blockwise, {"record": "float16"}, "Blockwise: record: .* did you mean 'bfloat16'"),
        (estimators.Higher, {"objective": "x"}, "Higher: objective: expected 'loss' or 'log-loss'"),
        (estimators.EvolutionStrategies, {"objective": "logloss"}, "did you mean 'log-loss'"),
        (estimators.EvolutionStrategies, {"shaping": "standardized"}, "did you mean 'standardised'"),
        (estimators.EvolutionStrategies, {"backend": "compiled"}, "did you mean 'compile'"),
        (
            estimators.persistent_evolution_strategies,
            {"shaping": "standardized"},
            "persistent_evolution_strategies: shaping: .* did you mean 'standardised'",
        ),
        (estimators.Mixed, {"exact_members": "one"}, "Mixed: exact_members: expected 'both' or 'plus'"),
    ],
)
def test_a_misspelt_word_is_refused(make, options, expected):
    with pytest.raises(UserError, match=expected):
        make(**options)
