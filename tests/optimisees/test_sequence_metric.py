"""Sequence metrics: the encoders by PyTorch's GRU and by a single pair, batches, splits, and all pairs at once."""

import logging
from functools import partial

import laws
import pytest
import torch
from activities import LEFT_OUT, some_windows
from torch import nn

from l2lopt.cells import make
from l2lopt.cells.coupled_gru import coupling
from l2lopt.core.errors import UserError
from optimisees import SequenceMetric
from optimisees.metric.retrieval import retrieval

from implementations import SEQUENCE_METRICS  # isort: skip

SIAMESE, COUPLED = SEQUENCE_METRICS.values()
WINDOWS = some_windows()
ONE_CLASS = some_windows().chosen(some_windows().labels == 0)._replace(activities=("a",))
each_form = pytest.mark.parametrize("form", [SIAMESE, COUPLED], ids=["siamese", "coupled"])


def test_the_siamese_form_is_torchs_gru():
    model = SIAMESE()
    params, inputs = model.init(0)[0], model.inputs("train")[:5]
    gru = nn.GRU(9, model.hidden_size, dtype=torch.float64)
    names = {"weight_ih_l0": "weight_x", "weight_hh_l0": "weight_h", "bias_ih_l0": "bias", "bias_hh_l0": "bias_h"}
    own = {theirs: params[f"layers.0.0.cell.{ours}"] for theirs, ours in names.items()}
    # PyTorch's rows are r, z, n, as ours.
    gru.load_state_dict(own)
    with torch.no_grad():
        expected = gru(inputs.permute(2, 0, 1))[1][0]
        laws.assert_close(model.embed(params, inputs), expected, 1e-10)
        laws.assert_close(model.distances(params, inputs), torch.cdist(expected, expected), 1e-7)


def test_the_coupled_form_takes_each_pair_by_itself():
    model = COUPLED()
    params, inputs = model.init(0)[0], model.inputs("train")[:5]
    cell = make("coupled-gru", 9, model.hidden_size).double()
    cell.load_state_dict({name.removeprefix("layers.0.0.cell."): value for name, value in params.items()})
    with torch.no_grad():
        found = model.distances(params, inputs)
        for i in range(5):
            for j in range(5):
                x = torch.stack((inputs[i], inputs[j]), 1)
                state = cell.initial_state(x[..., 0])
                for t in range(x.shape[-1]):
                    _, state = cell(x[..., t], state)
                left, right = state["h"].T
                assert found[i, j].item() == pytest.approx((left - right).norm().item(), abs=1e-12)
    with pytest.raises(UserError, match="embedding: expected the siamese encoder, found the coupled one"):
        model.embed(params, inputs)


@each_form
@pytest.mark.parametrize("size", [3, 7, 1000])
def test_all_pairs_in_batches_are_the_matrix(form, size):
    model = form()
    params, inputs = model.init(1)[0], model.inputs("train")[:9]
    seen = []
    found = model.all_distances(params, inputs, lambda *facts: seen.append(facts[:3]), size)
    with torch.no_grad():
        laws.assert_close(found, model.distances(params, inputs), 1e-12)
    assert torch.equal(found.diagonal(), torch.zeros(9, dtype=torch.float64))
    stage, done, total = seen[-1]
    assert (stage, done) == (("windows", 9) if model.encoder == "siamese" else ("pairs", 36))
    assert done == total
    assert not found.requires_grad


@each_form
def test_batches_are_balanced(form):
    model = form(per_class=3)
    batch = model.batch("train", 4, 2)
    assert batch["targets"].bincount().tolist() == [3, 3, 3]
    rows = batch["inputs"].flatten(1)
    assert len(rows.unique(dim=0)) == 9
    others = {tuple(row.tolist()) for row in model.inputs("train").flatten(1)}
    assert all(tuple(row.tolist()) in others for row in rows)
    assert not torch.equal(model.batch("train", 4, 3)["inputs"], batch["inputs"])


def test_splits_are_by_subject():
    model = SIAMESE()
    subjects = {split: set(model.windows(split).subjects.tolist()) for split in ("train", "inner", "heldout", "test")}
    assert subjects == {"train": {1, 4, 7}, "inner": {1, 4}, "heldout": {7}, "test": set(LEFT_OUT)}
    inner = model.inputs("inner").movedim(1, 0).flatten(1)
    assert inner.mean(1).abs().max() < 1e-6
    assert (inner.std(1, correction=0) - 1).abs().max() < 1e-6
    whole = list(model.evaluation_batches("test", 0))
    assert [count for _, count in whole] == [len(batch["targets"]) for batch, _ in whole] == [5, 5, 2]
    rows = torch.cat([batch["inputs"] for batch, _ in whole]).flatten(1)
    laws.assert_close(rows.sort(0).values, model.inputs("test").flatten(1).sort(0).values)
    few = SIAMESE(evaluation_windows=6)
    assert sum(count for _, count in few.evaluation_batches("test", 0)) == 6


def test_aux_and_evaluation():
    model = COUPLED()
    params, aux = model.init(0)
    batch = model.batch("train", 0, 0)
    loss, after = model.loss(params, aux, batch)
    d = model.distances(params, batch["inputs"])
    laws.assert_close((loss, after), model.structural(d, batch["targets"], aux))
    evaluated = model.evaluate(params, after, batch)
    laws.assert_close(evaluated, model.structural(d, batch["targets"], after, moving=False)[0])
    facts = model.step_info(batch, after)
    assert (facts.samples, facts.unit, facts.rate) == (6, "windows", 1.0)
    assert facts.figures["positive_distance"] == float(after["positive.mean"]) > 0


def test_a_few_steps_bring_classes_together():
    """Retrieval aside, the loss falls, on batches that were not trained on too."""
    model = partial(SIAMESE, hidden_size=8, per_class=4)()
    params, aux = model.init(0)
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=0.02)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss, aux = model.loss(leaves, aux, model.batch("train", 0, step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@each_form
def test_a_last_window_is_evaluated_beside_the_others(form):
    """By itself it makes no pair, and would count as a loss of 0."""
    whole, parts = form(evaluation_size=12, evaluation_windows=9), form(evaluation_size=4, evaluation_windows=9)
    assert [count for _, count in parts.evaluation_batches("test", 0)] == [4, 5]
    assert [count for _, count in whole.evaluation_batches("test", 0)] == [9]


@each_form
def test_retrieval_of_a_whole_split(form, caplog):
    """That of all windows, or of the evaluation's for the coupled form, whatever batches it goes through."""
    caplog.set_level(logging.INFO, "l2lopt")
    model = form(evaluation_windows=9, evaluation_size=4)
    params, aux = model.init(0)
    everyone = model.inputs("test")
    rows = torch.cat([batch["inputs"] for batch, _ in model.evaluation_batches("test", 0)])
    rows = everyone if model.encoder == "siamese" else rows
    places = torch.tensor([int((everyone == row).flatten(1).all(1).nonzero()) for row in rows])
    windows = model.windows("test")
    expected = retrieval(model.all_distances(params, rows), windows.labels[places], windows.subjects[places], (1,))
    found = model.whole_metrics(params, aux, "test")
    assert found["recall@1"] == expected.recall[1]
    assert found["accuracy, 1-NN"] == expected.accuracy[1]
    assert found["mAP"] == pytest.approx(expected.mean_average_precision)
    assert "recall@10" not in found  # a query has fewer windows of others
    few = ["recall, mAP and k-NN are of 9 of 12 test windows"]
    assert caplog.messages == ([] if model.encoder == "siamese" else few)
    endless = {name: value * float("nan") for name, value in params.items()}
    assert model.whole_metrics(endless, aux, "test") == {}
    caplog.clear()
    assert model.whole_metrics(params, aux, "heldout") == {}
    assert "no recall, mAP and k-NN: all heldout windows are of one subject" in caplog.messages[0]


def test_the_coupling_of_an_evaluation():
    """From step to step by the cell, over neighbours in the batch; held above its bound; none of the siamese form."""
    model = COUPLED(least_coupling=0.3)
    params, aux = model.init(0)
    inputs = model.inputs("train")[:4]
    cell = make("coupled-gru", 9, model.hidden_size, least_coupling=0.3).double()
    cell.load_state_dict({name.removeprefix("layers.0.0.cell."): value for name, value in params.items()})
    found = model.coupling(params, inputs, inputs.roll(1, 0))
    h = torch.zeros(model.hidden_size, 2, 4, dtype=torch.float64)
    for t in range(inputs.shape[-1]):
        laws.assert_close(found[t], coupling(dict(cell.named_parameters()), h, 0.3)[:, 0])
        h, _ = cell(torch.stack((inputs, inputs.roll(1, 0)))[..., t].movedim(-1, 0), {"h": h})
    laws.assert_close(model.metrics(params, aux, {"inputs": inputs})["coupling"], found.mean())
    assert found.min() > 0.3
    assert SIAMESE().metrics(*SIAMESE().init(0), {"inputs": inputs}) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_class": 5}, "inner: expected at least 5 windows of a, found 4; lower per_class"),
        ({"per_class": 1}, "sequence-metric: per_class: expected from 2 on, for pairs of a class, found 1; raise it"),
        ({"test_subjects": [1, 2, 4, 7, 9]}, "subjects left out: expected some, but not all"),
        ({"heldout_subjects": [2]}, "subjects left out: expected some, but not all, of 1, 4, 7, found 2"),
        ({"loss": {"margins": 1.0}}, "loss 'structural': margins: expected a known key"),
        ({"least_coupling": 0.3}, "least_coupling: expected the coupled encoder, found the siamese one"),
        ({"hidden_size": 0}, "sequence-metric: hidden_size: expected above 0"),
        ({"evaluation_windows": 0}, "sequence-metric: evaluation_windows: expected above 0"),
        (
            {"evaluation_windows": 1},
            "expected evaluation_size and evaluation_windows from 2 on, for pairs, found 5 and 1",
        ),
        ({"evaluation_size": 1}, "from 2 on, for pairs, found 1 and None; raise them"),
        (
            {"data": WINDOWS._replace(labels=WINDOWS.labels + 1)},
            "data: expected labels from 0 to .*, found some from 1",
        ),
        ({"data": WINDOWS._replace(labels=WINDOWS.labels[1:])}, "data: expected signals .* a subject for each window"),
        ({"data": ONE_CLASS}, "sequence-metric: data: expected at least two classes, found a; give samples"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        SIAMESE(**options)


def test_a_split_without_subjects():
    model = SequenceMetric([2], data=some_windows(), per_class=2)
    assert torch.equal(model.windows("inner").subjects, model.windows("train").subjects)
    with pytest.raises(UserError, match="heldout_subjects: expected subjects held out, found none"):
        model.batch("heldout", 0, 0)
