"""The cards that go to the hub with weights."""

import pytest

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.weights import files
from l2lopt.weights.card import model_card

ROW = {"optimiser": "mine", "kind": "learned", "split": "test", "horizon": 1000, "mean": 0.5}
ROW |= {"difference_low": 0.1, "diverged": 2}
FACTS = {
    "meta_updates": 1500,
    "seconds": 60.0,
    "optimisee": "quadratic",
    "config": {
        "optimisee": {"name": "mlp", "hidden": [20]},
        "mixed_with": ["rosenbrock"],
        "unroll": {"length": [100, 500]},
        "validation": {"horizons": [50]},
    },
    "comparisons": {
        "digits | MLP": [
            ROW,
            ROW | {"optimiser": "won", "difference_low": None, "diverged": 0},
            ROW | {"optimiser": "adam", "kind": "baseline", "mean": None, "difference_low": None},
        ]
    },
}


@pytest.fixture
def card(tmp_path):
    """The card of a rule with facts, as the hub's own package reads it: header and text."""
    hub = pytest.importorskip("huggingface_hub")

    def made(**facts):
        files.save(optimisers.make("coordinatewise", cell="ihc-lstm"), tmp_path / "mine", facts)
        card = hub.ModelCard(model_card(tmp_path / "mine", "me/my-optimiser"))
        return card.data, card.text

    return made


def sections(body):
    """Heading → text."""
    parts = dict(part.partition("\n\n")[::2] for part in body.split("\n## ")[1:])
    return {name: text.strip() for name, text in parts.items()}


def test_the_header_is_what_the_hub_reads(card):
    head, body = card(license="apache-2.0")
    assert (head.library_name, head.license) == ("l2lopt", "apache-2.0")
    assert {"learned-optimizer", "l2lopt"} <= set(head.tags)
    assert body.strip().startswith("# my-optimiser")
    assert 'l2lopt.pull("me/my-optimiser")' in body
    assert "`coordinatewise ihc-lstm`" in body


def test_the_text_says_what_the_header_of_the_file_knows(card):
    head, body = card(**FACTS)
    found = sections(body)
    assert head.license == "unknown"
    assert found["Tasks seen"] == "- mlp: hidden [20]\n- rosenbrock"
    assert found["Cost"] == "1,500 meta-updates, 60 seconds"
    assert "| adam | ∞ |" in found["Comparisons"]
    said = "behind the best tuned baseline in test loss (step 1,000); up to 2 runs ended above their first loss."
    assert found["Known failures"] == f"- digits | MLP, mine: {said}"
    assert found["Safe range"].startswith("Meta-trained on runs of 100 to 500 steps")
    assert "validations of 50 steps" in found["Safe range"]


def test_the_author_adds_facts(card):
    facts = {"benchmark": "| a |\n|---|\n| 1 |\n", "failures": ["Diverges on GANs."], "safe_range": "Small networks."}
    found = sections(card(**facts)[1])
    assert found["Comparisons"] == "### Benchmark\n\n| a |\n|---|\n| 1 |"
    assert found["Known failures"] == "- Diverges on GANs."
    assert found["Safe range"].startswith("Small networks. ")


def test_what_is_not_known_is_said_to_be_so(card):
    found = sections(card()[1])
    assert found["Tasks seen"] == found["Cost"] == "Not recorded."
    assert found["Comparisons"].startswith("None recorded")
    assert found["Known failures"].startswith("None recorded")


def test_failures_are_those_of_the_rule_where_a_row_has_its_name(card):
    rows = [ROW | {"optimiser": "IHC-LSTM"}, ROW | {"optimiser": "LSTM"}]
    found = sections(card(comparisons={"digits": rows})[1])["Known failures"]
    assert "IHC-LSTM: behind" in found
    assert found.count("\n") == 0


@pytest.mark.parametrize(
    ("facts", "own"),
    [
        ({"row": "learned-lstm (b)"}, ["learned-lstm (b)", "learned-lstm (b), multiplier tuned"]),
        ({"row": "learned-lstm"}, ["learned-lstm"]),
        ({"label": "Mine"}, ["Mine"]),
    ],
)
def test_failures_are_not_those_of_another_rule(card, facts, own):
    """Of a run that was evaluated beside others of its name, and of one whose label has a capital."""
    names = [
        "learned-lstm",
        "learned-lstm, before meta-training",
        "learned-lstm (b)",
        "learned-lstm (b), multiplier tuned",
        "Mine",
        "other",
    ]
    rows = [ROW | {"optimiser": name} for name in names]
    found = sections(card(comparisons={"digits": rows}, **facts)[1])["Known failures"].splitlines()
    assert [line.partition("digits, ")[2].partition(": behind")[0] for line in found] == own


@pytest.mark.parametrize("name", files.list_weights())
def test_those_in_the_package_have_one(name):
    text = model_card(name)
    found = sections(text)
    assert "license: mit\n" in text
    seen = found["Tasks seen"][2:].split("\n- ")
    assert seen[0] in ("mlp: activation sigmoid, hidden [20]", "digits-mlp-20-sigmoid")
    assert not found["Known failures"].startswith("None recorded")


@pytest.mark.parametrize(
    "facts", [{"comparisons": 3}, {"meta_updates": "many"}, {"config": {"unroll": {"length": []}}}]
)
def test_facts_of_other_types_are_one_line(card, facts):
    with pytest.raises(UserError, match="expected facts of a meta-training") as caught:
        card(**facts)
    assert "\n" not in str(caught.value)
