"""The names of optimisers in figures."""

import pytest

from l2lopt import cells, optimisers
from l2lopt.evaluation.settings import Baseline, default_baselines
from l2lopt.report.names import PROPER, proper_name, proper_names


@pytest.mark.parametrize(
    ("name", "proper"),
    [
        ("adamw", "AdamW"),
        ("normalised-muon, untuned", "normalised Muon, untuned"),
        ("lstm", "LSTM"),
        ("learned-irc-t-lstm", "learned IRC-T-LSTM"),
        ("learned-fastgrnn, multiplier tuned", "learned FastGRNN, multiplier tuned"),
        ("learned-", "learned-"),
        ("torch.optim:NAdam", "NAdam (torch.optim)"),
        ("torch.optim.Muon", "Muon (torch.optim)"),
        ("mine", "mine"),
        ("control: the rule without its network", "control: the rule without its network"),
        ("", ""),
    ],
)
def test_a_name_as_its_paper_writes_it(name, proper):
    assert proper_name(name) == proper


def test_every_hand_designed_optimiser_has_one():
    assert set(PROPER) == set(optimisers.HAND_DESIGNED)


def test_a_baselines_name_says_its_schedule_and_kind():
    found = [baseline.proper_name for baseline in default_baselines()]
    assert found == [
        "Nesterov momentum",
        "Adam",
        "AdamW, warm-up + cosine",
        "Muon, warm-up + cosine",
        "normalised Muon, untuned",
    ]
    assert Baseline(optimiser="adamw", rates=[0.1], schedule="cosine", label="mine").proper_name == "mine"


def test_names_that_would_become_one_stay_apart():
    assert proper_names(["adam", "Adam", "sgd"]) == {"adam": "adam", "Adam": "Adam", "sgd": "SGD"}
    assert proper_names(["adamw"], {"adamw": "AdamW, warm-up + cosine"}) == {"adamw": "AdamW, warm-up + cosine"}


def test_all_cells_of_rules_have_one():
    odd = {name for name in cells.CELLS if proper_name(f"learned-{name}") == f"learned-{name}"}
    assert odd <= {"leaky", "stacked"}
