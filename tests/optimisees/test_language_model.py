"""Language models: the loss by other means, windows, masks, counts, and meta-training on them."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import TEXTS, normal, problem
from torch import nn

import l2lopt
from l2lopt import cells, estimators
from l2lopt.core.errors import UserError
from l2lopt.core.seeding import generator
from l2lopt.experiments import comparison_study
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from optimisees.data.text import EOS, Corpus, Vocabulary
from optimisees.language import language_model
from optimisees.language.artefacts import continuation, text_metrics
from optimisees.language.language_model import LanguageModel
from optimisees.language.windows import cut_windows

CONFIGS = Path(__file__).parents[2] / "configs"
LONG = Corpus(Vocabulary(tuple("abcdefg"), "word"), *(torch.arange(count) ** 2 % 7 for count in (1000, 600, 300)))
SMALL = partial(LanguageModel, TEXTS, "lstm", 4, 5, 3, batch_size=2, window=6, dtype="float64")
SQUARE = partial(LanguageModel, TEXTS, embedding_size=4, hidden_size=4, layers=2, batch_size=2, dtype="float64")


def random_params(model, seed=0):
    """Parameters of size ½, so that every term of the loss counts."""
    params, aux = model.init(seed)
    made = {name: 0.5 * normal(*value.shape, seed=k) for k, (name, value) in enumerate(params.items())}
    return made, {name: 0.5 * normal(*value.shape, seed=99 + k) for k, (name, value) in enumerate(aux.items())}


def by_torch(model, params, aux, batch):
    """An LSTM's cross-entropy, its activation and temporal terms and its states, by `nn.LSTM` layer after layer."""
    masks, tokens = batch["masks"], batch["tokens"]
    embedding = params["embedding"] * masks["words"][:, None]
    x = embedding[tokens] * masks["inputs"]
    states = {}
    for layer, (inputs, size) in enumerate(pairwise(model.sizes)):
        lstm = nn.LSTM(inputs, size, dtype=torch.float64)
        own = {name: params[f"stack.layers.{layer}.0.cell.{name}"] for name in ("weight_x", "weight_h", "bias")}
        dropped = own["weight_h"] * masks[f"stack.{layer}.0.weight_h"]
        values = {"weight_ih_l0": own["weight_x"], "weight_hh_l0": dropped, "bias_ih_l0": own["bias"]}
        lstm.load_state_dict(values | {"bias_hh_l0": torch.zeros_like(own["bias"])})
        before = tuple(aux[f"{layer}.{name}"][None] for name in "hc") if batch["goes_on"] else None
        x, (h, c) = lstm(x, before)
        states |= {f"{layer}.h": h[0], f"{layer}.c": c[0]}
        if layer < len(model.sizes) - 2:
            x = x * masks[f"stack.dropout.{layer}"]
    output = x * masks["outputs"]
    logs = (output @ params["embedding"].T + params["bias"]).log_softmax(-1)
    cross_entropy = -logs.gather(-1, batch["targets"][..., None]).mean()
    terms = output.square().mean(), sum((b - a).square().sum() for a, b in pairwise(x)) / x[1:].numel()
    return cross_entropy, terms, states


@pytest.mark.parametrize("step", [0, 1])
def test_the_loss_is_that_of_torchs_lstm(step):
    model = SMALL(activation=3.0, temporal=0.7)
    params, aux = random_params(model)
    batch = model.batch("train", 3, step)
    with torch.no_grad():
        cross_entropy, (activation, temporal), states = by_torch(model, params, aux, batch)
    loss, after = model.loss(params, aux, batch)
    assert bool(batch["goes_on"]) == (step > 0)
    laws.assert_close(loss, cross_entropy + 3.0 * activation + 0.7 * temporal)
    laws.assert_close(after, states | {"cross_entropy": cross_entropy})
    facts = model.step_info(batch, after)
    assert facts.figures == {"perplexity": pytest.approx(math.exp(cross_entropy))}
    assert (facts.rate, facts.samples, facts.unit) == (len(batch["tokens"]) / 6, 2 * len(batch["tokens"]), "tokens")


def test_evaluation_carries_the_state_and_drops_nothing(monkeypatch):
    """Against one call of `nn.LSTM` per layer on the whole text, whatever the pieces."""
    model = SMALL()
    params, _ = random_params(model)
    for split, columns, text in (("heldout", 10, TEXTS.valid), ("test", 1, TEXTS.test), ("train", 10, TEXTS.train)):
        ((batch, samples),) = model.evaluation_batches(split, 0)
        rows = len(text) // columns
        read = text[: rows * columns].view(columns, rows).T
        assert torch.equal(batch["tokens"], read[:-1])
        assert torch.equal(batch["targets"], read[1:])
        assert samples == (rows - 1) * columns
        masks = {name: torch.ones((), dtype=torch.float64) for name in model.batch("train", 0, 0)["masks"]}
        masks["words"] = torch.ones(model.vocabulary_size, dtype=torch.float64)
        with torch.no_grad():
            expected, _, _ = by_torch(model, params, {}, {**batch, "masks": masks, "goes_on": False})
        for chunk in (3, 1000):
            monkeypatch.setattr(language_model, "_CHUNK", chunk)
            laws.assert_close(model.evaluate(params, {}, batch), expected)


def test_the_embedding_is_the_last_layer():
    params, _ = SMALL().init(0)
    assert [name for name in params if "stack" not in name] == ["embedding", "bias"]
    assert params["embedding"].abs().max() <= 0.1
    assert params["bias"].eq(0).all()
    assert SMALL().sizes == [4, 5, 5, 4]


def test_initial_values_of_the_authors():
    params, _ = SQUARE(cell="irc-gru", initial="authors").init(0)
    assert all((value == 2).all() for name, value in params.items() if name.endswith("alpha"))
    assert not (SQUARE(cell="irc-gru").init(0)[0]["stack.layers.0.0.cell.highway.alpha"] == 2).any()


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_windows_follow_one_another_through_the_text(split, seed):
    model = LanguageModel(LONG, "rnn", 2, 2, 1, weight_drop=0.0, batch_size=3, window=10)
    text = LONG.train if split == "train" else LONG.valid
    rows = len(text) // 3
    first = model.epoch_start(split, seed, 1)
    batches = [model.batch(split, seed, step) for step in range(first)]
    read = text[: 3 * rows].view(3, rows).T
    assert torch.equal(torch.cat([batch["tokens"] for batch in batches]), read[:-1])
    assert torch.equal(torch.cat([batch["targets"] for batch in batches]), read[1:])
    assert [bool(batch["goes_on"]) for batch in batches] == [split == "train" and step > 0 for step in range(first)]
    again = model.batch(split, seed, first)
    assert not again["goes_on"]
    assert torch.equal(again["tokens"][:5], read[:5])
    lengths = [len(model.batch(split, seed, step)["tokens"]) for step in range(2 * first)]
    assert lengths[:first] != lengths[first:]  # another epoch has other windows


@given(rows=st.integers(1, 400), window=st.integers(1, 90), seed=st.one_of(st.none(), st.integers(0, 2**40)))
def test_windows_cover_every_row_once(rows, window, seed):
    begins = cut_windows(rows, window, seed)
    lengths = [b - a for a, b in pairwise(begins)]
    assert (begins[0], begins[-1]) == (0, rows)
    assert all(length >= (5 if seed is not None else window) for length in lengths[:-1])
    assert lengths[-1] > 1 or len(lengths) == 1 or window == 1
    if seed is None and window > 1:
        assert set(lengths[:-1]) <= {window}


def test_lengths_have_the_recipes_distribution():
    """95 % of N(70, 5²), the rest of N(35, 5²), cut to whole numbers."""
    begins = cut_windows(2_000_000, 70, 1)
    lengths = torch.tensor(begins).diff().double()[:-1]
    short = lengths < 52
    assert short.double().mean().item() == pytest.approx(0.05, abs=0.005)
    assert lengths[~short].mean().item() == pytest.approx(69.5, abs=0.1)
    assert lengths[short].mean().item() == pytest.approx(34.5, abs=0.5)
    assert lengths[~short].std().item() == pytest.approx(5, abs=0.1)


def test_shifted_runs_begin_elsewhere_and_read_the_same_text():
    model = LanguageModel(LONG, "rnn", 2, 2, 1, weight_drop=0.0, batch_size=1, shifted=True)
    epoch = range(model.epoch_start("train", 0, 1))
    reads = [torch.cat([model.batch("train", seed, step)["tokens"] for step in epoch]).flatten() for seed in (1, 2)]
    assert not torch.equal(*reads)
    doubled = torch.cat([LONG.train, LONG.train]).unfold(0, 999, 1)
    assert all((doubled == read).all(1).any() for read in reads)


def test_the_layers_are_on_the_models_device():
    """Masks of weights are drawn like them, by a generator of that device."""
    assert {value.device.type for value in SQUARE(cell="lstm", device="meta").stack.parameters()} == {"meta"}


@pytest.mark.parametrize("cell", [name for name in cells.CELLS if not name.startswith("no-")])
def test_weight_drop_takes_the_recurrent_weights_alone(cell):
    """A share p of each becomes 0, the rest 1/(1 − p); a new window has new masks."""
    model = SQUARE(cell=cell, weight_drop=0.5)
    masks = [model.batch("train", 0, step)["masks"] for step in (0, 1)]
    weights = {name.removeprefix("layers.").replace(".cell.", "."): w for name, w in model.stack.named_parameters()}
    recurrent = cells.build(cell, 4, 4).recurrent_weights
    names = sorted(name for name in masks[0] if name.startswith("stack.") and "dropout" not in name)
    assert names == sorted(f"stack.{layer}.0.{name}" for layer in (0, 1) for name in recurrent)
    assert all(masks[0][name].shape == weights[name.removeprefix("stack.")].shape for name in names)
    assert all(set(masks[0][name].unique().tolist()) <= {0.0, 2.0} for name in names)
    assert any(not torch.equal(masks[0][name], masks[1][name]) for name in names)
    hidden = cells.build(cell, 4, 4)
    acting = {name for name, _ in hidden.named_parameters()} & set(recurrent)
    with torch.no_grad():
        for name, value in hidden.named_parameters():
            value.fill_(0.0 if name in acting else 0.3)
    x, state = torch.ones(4, 1), {name: torch.ones(size, 1) for name, size in hidden.state_sizes.items()}

    def output(sign):
        return hidden(x, {name: (sign * value if name[-1] in "hx" else value) for name, value in state.items()})[0]

    # Without U, ω or U_V and Γ nothing of h or x_{t−1} goes into gates and candidate, so that h' is linear in h.
    torch.testing.assert_close(output(1) + output(-1), 2 * output(0))


class Elman(cells.Cell):
    """h' = tanh(x + a∘h): a cell that nothing but its line in the table knows."""

    recurrent_weights = ("a",)

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, {"h": hidden_size})
        self.w = torch.nn.Parameter(torch.randn(hidden_size, input_size))
        self.a = torch.nn.Parameter(torch.randn(hidden_size))

    def forward(self, x, state):
        h = torch.tanh(self.w @ x + self.a[:, None] * state["h"])
        return h, {"h": h}


def test_a_new_cell_is_a_language_models_with_weight_drop(monkeypatch):
    monkeypatch.setitem(cells.CELLS, "elman", Elman)
    model = SQUARE(cell="elman", weight_drop=0.5)
    params, aux = model.init(0)
    batch = model.batch("train", 0, 0)
    assert {"stack.0.0.a", "stack.1.0.a"} <= set(batch["masks"])
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    loss, _ = model.loss(leaves, aux, batch)
    dropped = torch.autograd.grad(loss, leaves["stack.layers.0.0.cell.a"])[0]
    assert torch.equal(dropped == 0, batch["masks"]["stack.0.0.a"] == 0)


def test_a_text_begins_with_the_cells_own_state(monkeypatch):
    class Begun(Elman):
        def initial_state(self, x):
            return {"h": super().initial_state(x)["h"] + torch.arange(self.hidden_size).to(x)[:, None]}

    monkeypatch.setitem(cells.CELLS, "begun", Begun)
    model = SQUARE(cell="begun")
    params, aux = model.init(0)
    state = aux["0.h"]
    assert torch.equal(state, torch.arange(state.shape[1]).to(state).expand_as(state))
    assert model.loss(params, aux, model.batch("train", 0, 0))[0].isfinite()


@pytest.mark.parametrize("backend", ["fast", "loop"])
@pytest.mark.parametrize("cell", [name for name in cells.CELLS if not name.startswith("no-")])
def test_autocast_trains_in_bfloat16_and_keeps_states_and_evaluation(cell, backend):
    """The gradient errs by as little as bfloat16 has digits."""
    plain, model = (
        SQUARE(cell=cell, backend=backend, window=6, dtype="float32", autocast=on, weight_drop=0.0)
        for on in (False, True)
    )
    params, aux = plain.init(0)
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    (_, blank), batch = model.init(0), model.batch("train", 0, 0)
    loss, after = model.loss(leaves, blank, batch)
    wanted, theirs = plain.loss(leaves, aux, batch)
    assert {value.dtype for value in (loss, *after.values())} == {torch.float32}
    found, exact = (
        torch.cat([part.flatten() for part in torch.autograd.grad(one, list(leaves.values()))])
        for one in (loss, wanted)
    )
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()
    text, _ = next(model.evaluation_batches("heldout", 0))
    assert torch.equal(model.evaluate(params, after, text), plain.evaluate(params, theirs, text))


def test_dropout_is_one_mask_a_window():
    model = SMALL(word_dropout=0.5, input_dropout=0.5, hidden_dropout=0.5, output_dropout=0.5, weight_drop=0.0)
    masks = model.batch("train", 0, 0)["masks"]
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    assert shapes == {
        "words": (len(TEXTS.vocabulary.tokens),),
        "inputs": (2, 4),
        "stack.dropout.0": (2, 5),
        "stack.dropout.1": (2, 5),
        "outputs": (2, 4),
    }
    assert all(set(mask.unique().tolist()) <= {0.0, 2.0} for mask in masks.values())
    none = SMALL(word_dropout=0.0, input_dropout=0.0, hidden_dropout=0.0, output_dropout=0.0, weight_drop=0.0)
    assert all((mask == 1).all() for mask in none.batch("train", 0, 0)["masks"].values())


COUNTS = {
    "lstm": 20_200_800,
    "ihc-lstm": 16_262_700,
    "fastgrnn-1": 1_691_302,
    "fastgrnn": 3_382_604,
    "irc-fastgrnn-1": 1_268_151,
    "irc-fastgrnn": 2_536_302,
    "gru": 5_073_900,
    "irc-gru": 3_381_300,
    "t-lstm": 5_073_900,
    "irc-t-lstm": 2_537_600,
    "sru": 11_916_300,
    "irc-sru": 11_909_400,
}
"""Of Table II, as built."""
TEN_THOUSAND = Corpus.without_texts(Vocabulary(tuple(map(str, range(10_000))), "word"))


def from_config(name, *changes):
    choice = dict(configs.load(CONFIGS / f"ptb-{name}.toml", changes, kind=TrainConfig).optimisee)
    assert (choice.pop("name"), choice.pop("data")) == ("language-model", "ptb")
    return LanguageModel(TEN_THOUSAND, **choice)


def test_there_is_a_config_for_every_row():
    assert {path.stem for path in CONFIGS.glob("ptb-*.toml")} == {f"ptb-{name}" for name in (*COUNTS, "small")}


@pytest.mark.parametrize("name", COUNTS)
def test_recurrent_parameters_of_table_2(name):
    model = from_config(name)
    size = 10_000 * (model.sizes[0] + 1)
    assert model.counts() == (COUNTS[name] + size, COUNTS[name], 0)
    if name == "irc-gru":
        assert sum(value.numel() for value in model.init(0)[0].values()) == COUNTS[name] + size


def test_the_rows_from_the_gru_to_the_irc_gru():
    """Each is a model of 200 units a layer, with weights to drop or without weight drop."""
    study, found = comparison_study.load("ptb-without-irc"), {}
    for run in study.runs:
        choice = dict(
            configs.load(CONFIGS / "ptb-small.toml", [*study.changes, *run.changes], kind=TrainConfig).optimisee
        )
        assert (choice.pop("name"), choice.pop("data")) == ("language-model", "ptb")
        found[run.label] = LanguageModel(TEN_THOUSAND, **choice).counts().recurrent
    assert found == {
        "GRU, (1)-(3)": 2 * 3 * (2 * 200**2 + 200),
        "GRU, linear candidate (9)": 2 * 3 * (2 * 200**2 + 200),
        "GRU without recurrence, (13)-(14)": 2 * 3 * 200**2,
        "IRC-GRU without weight drop": 2 * (4 * 200**2 + 200),
        "IRC-GRU, (15)-(17)": 2 * (4 * 200**2 + 200),
        "Leaky form, (8)": 2 * (2 * 200**2 + 2 * 200),
        "Leaky form of x alone, (8) and (14)": 2 * (200**2 + 200),
    }


@pytest.mark.parametrize(("name", "biases"), [("irc-gru", 1_300), ("sru", 6_900), ("ihc-lstm", 2_700)])
def test_gate_biases_are_counted_beside(name, biases):
    counts = from_config(name, "optimisee.cell.gate_bias=true").counts()
    assert (counts.recurrent, counts.gate_biases) == (COUNTS[name], biases)
    assert f"{COUNTS[name]:,} of them in the recurrent layers (and {biases:,} in gate biases)" in counts.summary()


def test_the_lstm_with_two_biases_has_the_parameters_of_awd():
    assert from_config("lstm", "optimisee.cell.biases=two").counts().total == 24_221_600


def test_speaking_follows_the_models_probabilities():
    """The likeliest token at temperature 0, else draws from the model's softmax to the power of 1/temperature."""
    model = SMALL()
    params, _ = random_params(model)
    prompt = torch.tensor([1, 3, 2])
    opened = torch.cat([model.texts.vocabulary.encode(["<eos>"]), prompt])[:, None]
    targets = [torch.cat([opened[1:], last]) for last in torch.arange(model.vocabulary_size).view(-1, 1, 1)]
    losses = torch.stack([model.evaluate(params, {}, {"tokens": opened, "targets": own}) for own in targets])
    chances = (-len(opened) * losses).softmax(0)  # the targets differ in the last alone
    assert list(model.generate(params, prompt, 1, temperature=0.0)) == [int(chances.argmax())]
    for seed in range(20):
        drawn = torch.multinomial(chances, 1, generator=generator("sample", seed))
        assert list(model.generate(params, prompt, 1, seed=seed)) == drawn.tolist()
    cold = torch.multinomial((chances.log() / 0.3).softmax(0), 1, generator=generator("sample", 1))
    assert list(model.generate(params, prompt, 1, temperature=0.3, seed=1)) == cold.tolist()
    assert list(model.generate(params, prompt, 9, seed=4)) == list(model.generate(params, prompt, 9, seed=4))
    greedy = list(model.generate(params, prompt, 3, temperature=0.0))
    assert list(model.generate(params, torch.cat([prompt, torch.tensor(greedy[:2])]), 1, temperature=0.0)) == greedy[2:]


MISTAKES = [
    ({"cell": "lstmm"}, r"cell: expected a known name, found 'lstmm'; did you mean 'lstm'"),
    ({"cell": "sru", "hidden_size": 5}, r"cell 'sru': expected input_size = hidden_size"),
    ({"cell": "no-irc-gru"}, r"expected a cell with weights to drop, found 'no-irc-gru'; set weight_drop to 0"),
    ({"layers": 0}, r"language-model: layers: expected from 1 to 10000, found 0"),
    ({"input_dropout": 1.0}, r"language-model: dropout of inputs: expected a share in \[0, 1\), found 1.0"),
    ({"weight_drop": -0.1}, r"language-model: weight_drop: expected a share in \[0, 1\), found -0.1"),
    ({"temporal": -1.0}, r"language-model: temporal: expected at least 0, found -1.0"),
    ({"evaluation_tokens": 1}, r"language-model: evaluation_tokens: expected at least 2, found 1"),
    ({"window": 0}, r"language-model: window: expected above 0, found 0"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SQUARE(**options)


def test_a_text_too_short_for_its_columns_is_refused():
    model = SMALL()
    model.batch_size = 1000
    with pytest.raises(UserError, match=r"train: expected at least 2000 tokens for 1000 columns, found \d+; lower"):
        model.batch("train", 0, 0)


def test_blockwise_is_taped_on_a_language_model():
    """Meta-gradients through windows whose states are carried, two runs side by side."""
    task = problem("coordinatewise additive", "language-model")
    called = (task.update, task.loss, task.phi, task.carry, task.steps)
    one, other = (unroll(*called) for unroll in (estimators.Backprop(1), estimators.Blockwise()))
    laws.assert_close(one.gradient, other.gradient, 1e-10)
    laws.assert_close(one.carry.aux, other.carry.aux)
    assert one.finite
    assert all(value.ne(0).any() for value in one.gradient.values())


def test_the_states_are_carried_from_step_to_step():
    """A run's second window starts from what its first one left."""
    task = SMALL()
    params, aux = task.init(0)
    after = task.loss(params, aux, task.batch("inner", 0, 0))[1]
    second = task.batch("inner", 0, 1)
    assert task.loss(params, after, second)[0] != task.loss(params, aux, second)[0]
    heldout = task.batch("heldout", 0, 1)  # a window of a text that the run has not read
    laws.assert_same(task.loss(params, after, heldout), task.loss(params, aux, heldout))


def test_an_optimiser_is_meta_trained_and_compared(tmp_path):
    for name, lines in (("train", 60), ("valid", 20), ("test", 20)):
        words = [f"{'abcdefg'[k % 7]} {'hijkl'[k % 5]} {'mno'[k % 3]}" for k in range(lines)]
        (tmp_path / f"{name}.txt").write_text("\n".join(words))
    data = {name: str(tmp_path / f"{name}.txt") for name in ("train", "valid", "test")}
    config = {
        "threads": 1,
        "optimisee": {
            "name": "language-model",
            "data": {"name": "files", **data},
            "cell": "irc-gru",
            "embedding_size": 4,
            "hidden_size": 4,
            "layers": 1,
            "batch_size": 3,
            "window": 8,
            "shifted": True,
            "evaluation_tokens": 50,
        },
        "optimiser": {"name": "coordinatewise", "hidden_size": 3, "inputs": ["log-and-sign"], "rule": "additive"},
        "unroll": {"length": 6, "truncation": 3, "targets": {"next": 0.5, "heldout": 0.5}},
        "meta": {"updates": 4, "validate_every": 2},
        "validation": {"seeds": 2, "horizons": [3]},
        "evaluation": {
            "seeds": 2,
            "steps": 4,
            "horizons": [4],
            "tuning_seeds": 1,
            "baselines": [{"optimiser": "sgd", "rates": [0.1, 1.0]}],
            "multipliers": [],
        },
    }
    run = l2lopt.meta_train(config, tmp_path / "run")
    rows = l2lopt.evaluate(run).table
    assert {(row.optimiser, row.split) for row in rows} == {
        (name, split)
        for name in ("learned-lstm", "learned-lstm, before meta-training", "sgd")
        for split in ("train", "test")
    }
    assert all(0 < row.mean < 2 * math.log(17) for row in rows)
    optimiser = {"weights": str(run / "optimiser.safetensors")}
    training = {"threads": 1, "optimisee": config["optimisee"], "optimiser": optimiser}
    trained = l2lopt.train(training, tmp_path / "trained", changes=["train.epochs=1"])
    assert math.isfinite(trained.metrics["perplexity"])


@pytest.mark.parametrize(("loss", "perplexity"), [(2.0, math.exp(2)), (709.0, math.exp(709)), (1e4, math.inf)])
def test_the_perplexity_of_a_loss_without_bound_is_infinite(loss, perplexity):
    assert text_metrics(loss, "character") == {"perplexity": perplexity, "bits_per_character": loss / math.log(2)}
    assert math.isnan(text_metrics(math.nan, "word")["perplexity"])


def test_a_model_that_has_diverged_writes_nothing():
    vocabulary = Vocabulary(("a", EOS), "word")
    with pytest.raises(UserError, match="sample: expected finite logits, found a model that has diverged"):
        list(continuation(lambda _: torch.tensor([math.nan, 0.0]), vocabulary, torch.tensor([0]), 3, 1.0, 0))
