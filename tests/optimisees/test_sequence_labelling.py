"""Sequence labelling: the loss by a literal computation, padding, dropout, and what may be chosen."""

from functools import partial

import laws
import pytest
import torch
from implementations import LABELLING, few_labelled, few_sequences, normal
from torch.func import grad

from l2lopt.core.errors import UserError
from l2lopt.core.seeding import seed_of
from l2lopt.optimisee import evaluate_split
from optimisees.labelling import sequence_labelling
from optimisees.labelling.labelled import Sequences
from optimisees.labelling.sequence_labelling import SequenceLabelling

TOKENS, SIGNALS = (few_labelled(4), few_labelled())
MADE = partial(SequenceLabelling, cell="deep-gru", layers=3, hidden_size=2, batch_size=3, dtype="float64")


def random_params(model):
    """Parameters of size 0.6, so that every term counts."""
    return {name: 0.6 * normal(*value.shape, seed=k) for k, (name, value) in enumerate(model.init(0)[0].items())}


def directions(model):
    return range(1 + model.bidirectional)


def of_one(model, params, inputs, masks):
    """Log-probabilities of each position of one sequence by seed 003's equations, position after position."""
    M, below = model.hidden_size, [params["embedding"][x] if model.data.tokens else x for x in inputs]
    for layer in range(model.layers):
        outputs = []
        for k in directions(model):
            own = {
                name: params.get(f"stack.layers.{layer}.{k}.cell.{name}") for name in ("weight_x", "weight_h", "bias")
            }
            W, V, h, states = own["weight_x"], own["weight_h"], torch.zeros(M, dtype=torch.float64), {}
            for t in reversed(range(len(below))) if k else range(len(below)):
                if layer == 0:
                    h = torch.tanh(W @ below[t] + V @ h + own["bias"])
                else:
                    r = torch.sigmoid(W[:M] @ below[t] + V[:M] @ h)
                    z = torch.sigmoid(W[M : 2 * M] @ below[t] + V[M : 2 * M] @ h)
                    h = z * h + (1 - z) * torch.tanh(W[2 * M :] @ below[t] + r * (V[2 * M :] @ h))
                states[t] = h
            outputs.append(states)
        below = [torch.cat([states[t] for states in outputs]) for t in range(len(below))]
        below = [h * masks[layer] for h in below] if masks else below
    scores = [params["output.weight"] @ h + params["output.bias"] for h in below]
    return [score - torch.log(torch.exp(score).sum()) for score in scores]


def literal(model, params, batch, masks):
    """The mean over positions, one sequence after the other without padding."""
    terms = []
    for b, length in enumerate(batch["lengths"].tolist()):
        own = [masks[str(layer)][b] for layer in range(model.layers)] if masks else None
        logs = of_one(model, params, batch["inputs"][:length, b], own)
        terms += [-log[label] for log, label in zip(logs, batch["classes"][:length, b].tolist(), strict=True)]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("data", [TOKENS, SIGNALS], ids=["tokens", "signals"])
def test_loss_and_gradients_are_those_of_the_equations(data, bidirectional):
    model = MADE(data, bidirectional=bidirectional, dropout=0.4, embedding_size=3)
    params, batch = random_params(model), model.batch("train", 1, 1)
    assert all(mask.unique().tolist() == pytest.approx([0, 1 / 0.6]) for mask in batch["masks"].values())
    found, wanted = (
        grad(function)(params)
        for function in (lambda p: model.loss(p, {}, batch)[0], lambda p: literal(model, p, batch, batch["masks"]))
    )
    loss, aux = model.loss(params, {}, batch)
    laws.assert_close(loss, literal(model, params, batch, batch["masks"]))
    right = [
        int(log.argmax()) == label
        for b, length in enumerate(batch["lengths"].tolist())
        for log, label in zip(
            of_one(model, params, batch["inputs"][:length, b], [batch["masks"][name][b] for name in "012"]),
            batch["classes"][:length, b].tolist(),
            strict=True,
        )
    ]
    assert aux["accuracy"].item() == pytest.approx(sum(right) / len(right))
    assert model.step_info(batch, aux).figures == {"accuracy": pytest.approx(sum(right) / len(right))}
    laws.assert_close(found, wanted, 1e-11)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    gradients = torch.autograd.grad(model.loss(leaves, {}, batch)[0], list(leaves.values()))  # by the derived passes
    laws.assert_close(dict(zip(leaves, gradients, strict=True)), wanted, 1e-11)
    ((whole, positions),) = model.evaluation_batches("test", 0)
    assert positions == whole["lengths"].sum() < whole["classes"].numel()
    laws.assert_close(model.evaluate(params, {}, whole), literal(model, params, whole, None))


def test_evaluation_is_the_same_in_pieces(monkeypatch):
    model = MADE(TOKENS, embedding_size=3)
    params, ((whole, _),) = random_params(model), model.evaluation_batches("train", 0)
    loss, labelling = model.evaluate(params, {}, whole), model.label(params, "train")
    monkeypatch.setattr(sequence_labelling, "_CHUNK", 3)
    laws.assert_close(model.evaluate(params, {}, whole), loss)
    assert model.label(params, "train") == labelling


@pytest.mark.parametrize("make", LABELLING.values(), ids=LABELLING)
def test_padding_reaches_nothing(make):
    """NaN or any token beyond the lengths, and any class, change no bit of loss, gradient, labels or figures."""
    model = make()
    params, batch = random_params(model), model.batch("train", 0, 0)
    steps = torch.arange(len(batch["inputs"]))[:, None]
    padding = steps >= batch["lengths"]
    assert padding.any()
    real = batch["inputs"].is_floating_point()
    inputs = batch["inputs"].clone()
    inputs[padding] = torch.nan if real else 3
    poisoned = {**batch, "inputs": inputs, "classes": torch.where(padding, 2, batch["classes"])}
    longer = {
        **poisoned,
        "inputs": torch.cat([inputs, inputs[-1:]]),
        "classes": torch.cat([poisoned["classes"], poisoned["classes"][-1:]]),
    }
    for other in (poisoned, longer):
        for one in (batch, other):
            one["found"] = model.evaluate(params, {}, one), model.metrics(params, {}, one)
            one["gradients"] = grad(lambda p, one=one: model.loss(p, {}, one)[0])(params)
        laws.assert_same(other["found"], batch["found"])
        laws.assert_same(other["gradients"], batch["gradients"])


def test_metrics_are_those_of_the_labels():
    model = MADE(SIGNALS)
    params = random_params(model)
    true, found, scores = model.label(params)
    logs = [
        of_one(model, params, SIGNALS.test.inputs[:length, b], None)
        for b, length in enumerate(SIGNALS.test.lengths.tolist())
    ]
    assert found == [[int(log.argmax()) for log in own] for own in logs]
    assert true == [SIGNALS.test.classes[:length, b].tolist() for b, length in enumerate(SIGNALS.test.lengths.tolist())]
    pairs = [(a, b) for one, other in zip(true, found, strict=True) for a, b in zip(one, other, strict=True)]
    figures = evaluate_split(model, "test", 0, params, {})
    assert figures["accuracy"] == sum(a == b for a, b in pairs) / len(pairs)
    assert figures["f1"] == scores.f1 == SIGNALS.scored(true, found).f1


def test_an_epoch_shows_every_sequence_once():
    model = SequenceLabelling(SIGNALS, batch_size=4, dtype="float64")
    assert [model.epoch_start("train", 0, k) for k in (0, 1, 2)] == [0, 2, 4]
    for seed in (0, 1):
        seen = torch.cat([model.batch("train", seed, step)["inputs"][0, :, 0] for step in (0, 1)])
        assert sorted(seen.tolist()) == sorted(SIGNALS.train.inputs[0, :, 0].tolist())
    orders = [model.batch("train", *key)["inputs"][0, :, 0].tolist() for key in ((0, 0), (0, 2), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert model.batch("heldout", 0, 0)["lengths"].sum() == SIGNALS.valid.lengths.sum()
    facts = model.step_info(model.batch("train", 0, 0), {"accuracy": torch.ones(())})
    assert (facts.unit, facts.samples, facts.rate) == ("positions", int(model.batch("train", 0, 0)["lengths"].sum()), 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "irc-gru", {"name": "gru", "update": "kept"}])
def test_any_cell(cell, bidirectional):
    """A later position is seen by an earlier one if and only if there is a backward direction."""
    model = SequenceLabelling(SIGNALS, cell, 2, 3, bidirectional, dtype="float64")
    params = random_params(model)
    inputs = normal(4, 1, 2)
    changed = torch.cat([inputs[:3], inputs[3:] + 1])
    first = [model._logits(params, {"inputs": own, "lengths": torch.tensor([4])})[0] for own in (inputs, changed)]
    assert torch.equal(*first) != bidirectional
    assert params["output.weight"].shape == (3, 6 if bidirectional else 3)


def test_the_deep_gru_with_rectifiers():
    """Option of the cell: other outputs from the same parameters, and one line for any other option."""
    made = [SequenceLabelling(SIGNALS, {"name": "deep-gru", **own}, 2, 3, dtype="float64") for own in RECTIFIED]
    params = random_params(made[0])
    batch = {"inputs": normal(4, 1, 2), "lengths": torch.tensor([4])}
    tanh, relu = (model._logits(params, batch) for model in made)
    laws.assert_same(tanh, SequenceLabelling(SIGNALS, "deep-gru", 2, 3, dtype="float64")._logits(params, batch))
    assert not torch.allclose(tanh, relu)
    assert [cell.cell.activation for layer in made[1].stack.layers for cell in layer] == ["relu"] * 4
    for options, message in (
        ({"activation": "sine"}, "cell 'deep-gru': activation: expected 'tanh' or 'relu', found 'sine'"),
        ({"activations": "relu"}, "cell 'deep-gru': activations: expected a known key.*did you mean 'activation'"),
    ):
        with pytest.raises(UserError, match=message):
            SequenceLabelling(SIGNALS, {"name": "deep-gru", **options}, 2, 3)


RECTIFIED = ({"activation": "tanh"}, {"activation": "relu"})


def test_dropout_is_one_mask_a_sequence_and_none_at_evaluation():
    model = MADE(SIGNALS, dropout=0.5)
    batch = model.batch("train", 0, 0)
    assert {name: tuple(mask.shape) for name, mask in batch["masks"].items()} == dict.fromkeys("012", (3, 4))
    assert MADE(SIGNALS).batch("train", 0, 0)["masks"] == {}
    params = random_params(model)
    laws.assert_same(model.evaluate(params, {}, batch), MADE(SIGNALS).evaluate(params, {}, batch))


def test_initial_values():
    params, aux = MADE(few_labelled(5), embedding_size=100).init(seed_of("x"))
    assert aux == {"accuracy": 0}
    assert params["embedding"].shape == (5, 100)
    assert params["embedding"].std().item() == pytest.approx(0.1, rel=0.2)
    assert 0.2 < params["output.weight"].abs().max() <= 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "sequence-labelling: layers: expected from 1 to 10000"),
        ({"batch_size": 0}, "batch_size: expected above 0"),
        ({"hidden_size": -1}, "hidden_size: expected above 0"),
        ({"dropout": 1.0}, r"dropout: expected a share in \[0, 1\)"),
        ({"cell": "deep-gr"}, "cell: expected a known name, found 'deep-gr'"),
        ({"cell": "deepgru"}, "cell: expected a known name, found 'deepgru'; did you mean 'deep-gru'?"),
        ({"cell": "coupled-gru"}, "cell: expected a known name, found 'coupled-gru'"),
        ({"data": "conl"}, "data: expected a known name, found 'conl'; did you mean 'conll'?"),
        (
            {"data": SIGNALS._replace(test=SIGNALS.test._replace(classes=SIGNALS.test.classes - 1))},
            "data: expected labels from 0 to .*, found some from -1 to ",
        ),
        ({"data": SIGNALS._replace(classes=("O",))}, "data: expected at least two classes, found O; give samples of"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        MADE(**{"data": SIGNALS, **options})


@pytest.mark.parametrize(
    ("lengths", "classes", "message"),
    [
        ((3, 2), (3, 1), "sequence 1: .* a class for every position, .*, found 2 positions and 1 positions"),
        ((3, 2), (3,), "sequence 1: .*, found 2 positions and no sequence"),
        ((3, 0), (3, 0), "sequence 1: .*, found 0 positions and 0 positions"),
        ((), (), "sequence 0: .*, found no sequence and no sequence"),
    ],
)
def test_sequences_whose_classes_do_not_fit_are_refused(lengths, classes, message):
    with pytest.raises(UserError, match=message):
        Sequences.of([torch.zeros(n, 2) for n in lengths], [torch.zeros(n).long() for n in classes], str)


def test_sequences_of_one_length_are_not_padded():
    part = few_sequences(5, None, 0)
    assert part.inputs.shape == (5, 5, 2)
    assert part.lengths.tolist() == [1, 2, 3, 4, 5]
    assert part.inputs[1:, 0].eq(0).all()


def test_the_loss_can_be_evaluated_on_some_sequences_always_the_same():
    def made(count):
        return SequenceLabelling(few_labelled(), "gru", 1, 3, batch_size=3, evaluation_sequences=count)

    (whole, positions), (batch, count) = (
        next(made(n).evaluation_batches("train", seed)) for n, seed in ((8, 0), (3, 1))
    )
    assert len(batch["lengths"]) == 3
    assert count == int(batch["lengths"].sum()) < positions == int(whole["lengths"].sum())
    laws.assert_same(next(made(3).evaluation_batches("train", 7))[0], batch)
    task = made(1)
    params, aux = task.init(0)
    assert len(task.label(params, "train").true) == 8
    expected = evaluate_split(made(None), "train", 0, params, aux)
    assert task.whole_metrics(params, aux, "train") == {name: expected[name] for name in ("accuracy", "f1")}
    assert made(None).whole_metrics(params, aux, "train") == {}  # those of the evaluation are of all
    with pytest.raises(UserError, match="evaluation_sequences"):
        made(0)
