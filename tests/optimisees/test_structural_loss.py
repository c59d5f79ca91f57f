"""The structural loss against its equations read aloud, and where a batch lacks what they speak of."""

import math
from dataclasses import replace

import laws
import pytest
import torch
from sklearn.metrics.pairwise import cosine_distances, euclidean_distances

from l2lopt.core.errors import UserError
from optimisees.metric.structural_loss import StructuralLoss, distance

from implementations import normal  # isort: skip

LOSS = StructuralLoss(0.4, 0.7, 0.3, 0.02, 0.05, 0.8, through_beta=True, through_threshold=True)


def literal(loss, d, labels, means):
    """The loss, and the running means after it, sum by sum; `means` are None before the first pairs of a kind."""
    n = len(labels)
    positives = [(i, j) for i in range(n) for j in range(n) if i != j and labels[i] == labels[j]]
    negatives = [(i, j) for i in range(n) for j in range(n) if labels[i] != labels[j]]
    local, total = 0.0, 0.0
    for i, j in positives:
        own = [d[a][b] for a, b in positives if labels[a] == labels[i]]
        tau = 2 / len(own) * sum(own) - min(own)
        beta = math.exp(d[i][j] - tau) if loss.beta == "corrected" else math.exp(d[i][j]) - tau
        inner = sum(
            math.exp((d[i][j] - d[i][k] + loss.margin) / loss.scale) for k in range(n) if labels[k] != labels[i]
        )
        local, total = local + beta * math.log(1 + inner), total + beta
    value, after = local / total if total else 0.0, []
    for pairs, mean, most in (
        (positives, means[0], loss.spread_positive),
        (negatives, means[1], loss.spread_negative),
    ):
        if pairs:
            batch = sum(d[i][j] for i, j in pairs) / len(pairs)
            mean = batch if mean is None else loss.momentum * mean + (1 - loss.momentum) * batch
            variance = sum((d[i][j] - mean) ** 2 for i, j in pairs) / len(pairs)
            value += loss.weight / 2 * max(variance - most, 0.0)
        after.append(mean)
    return value, after


@pytest.mark.parametrize("beta", ["corrected", "printed"])
def test_100_batches_are_the_equations(beta):
    """One after the other, so that the means run."""
    loss = replace(LOSS, beta=beta)
    aux, means = loss.init(torch.float64), [None, None]
    for number in range(100):
        source = torch.Generator().manual_seed(number)
        labels = torch.randint(4, (8,), generator=source)
        d = 3 * torch.rand(8, 8, generator=source, dtype=torch.float64)  # any matrix: nothing needs symmetry
        found, aux = loss(d, labels, aux)
        expected, means = literal(loss, d.tolist(), labels.tolist(), means)
        assert found.item() == pytest.approx(expected, rel=1e-12)
        assert [aux["positive.mean"].item(), aux["negative.mean"].item()] == pytest.approx(means, rel=1e-12)


def test_as_printed_near_samples_of_a_class_are_driven_apart():
    """Eq. 31, exp(d) − τ, is negative for d = 0.5 where τ = 6; exp(d − τ) is not, and above 1 exactly where d > τ."""
    labels, d = torch.tensor([0, 0, 0, 1]), torch.full((4, 4), 6.0, dtype=torch.float64)
    d[0, 1] = d[1, 0] = 0.5
    signs = {}
    for beta in ("printed", "corrected"):
        loss, leaf = StructuralLoss(weight=0.0, beta=beta), d.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, labels, loss.init(torch.float64))[0], leaf)
        signs[beta] = [gradient[0, 1].sign().item(), gradient[0, 2].sign().item()]
    assert signs == {"printed": [-1, 1], "corrected": [1, 1]}


def outputs(*groups, coincide=()):
    """n outputs of size 3, and labels, a group a class; those named coincide with the first."""
    labels = torch.tensor([label for label, count in enumerate(groups) for _ in range(count)])
    y = 0.6 * normal(len(labels), 3, seed=len(labels))
    for index in coincide:
        y[index] = y[0]
    return y, labels


BATCHES = {
    "plain": outputs(3, 2, 2),
    "a class of one sample": outputs(3, 1),
    "every class of one sample": outputs(1, 1, 1),
    "one class": outputs(4),
    "one sample": outputs(1),
    "two of a class coincide": outputs(3, 2, coincide=[1]),
    "two of two classes coincide": outputs(3, 2, coincide=[3]),
    "all coincide": outputs(2, 2, coincide=[1, 2, 3]),
}
each_batch = pytest.mark.parametrize("batch", list(BATCHES))


@each_batch
@pytest.mark.parametrize("kind", ["euclidean", "cosine"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("beta", ["corrected", "printed"])
def test_gradients(batch, kind, begun, beta):
    """Central differences: at a distance's kink, where two outputs coincide, they too give 0."""
    (y, labels), loss = BATCHES[batch], replace(LOSS, beta=beta)
    aux = loss.init(torch.float64)
    if begun:
        aux = loss(*distances(outputs(2, 2), kind), aux)[1]

    def value(y):
        return loss(distance(y[:, None], y, kind), labels, aux)[0]

    y = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(y), y)
    assert value(y).isfinite()
    assert gradient.isfinite().all()
    assert torch.autograd.gradcheck(value, (y,), atol=2e-5)


def distances(made, kind):
    y, labels = made
    return distance(y[:, None], y, kind), labels


@pytest.mark.parametrize("begun", [False, True])
@each_batch
def test_gradients_in_the_distances(batch, begun):
    _, labels = BATCHES[batch]
    aux = (
        LOSS(*distances(outputs(2, 2), "euclidean"), LOSS.init(torch.float64))[1] if begun else LOSS.init(torch.float64)
    )
    d = normal(len(labels), len(labels), seed=4).abs().requires_grad_()
    assert torch.autograd.gradcheck(lambda d: LOSS(d, labels, aux)[0], (d,))


def test_where_gradients_go():
    """The parts that are cut off are constants of the equations: β, and in it τ."""
    labels = torch.tensor([0, 0, 0, 1, 1])
    d = normal(5, 5, seed=1).abs()
    aux = LOSS.init(torch.float64)
    gradients = {}
    for beta, threshold in ((False, False), (True, False), (False, True), (True, True)):
        loss = replace(LOSS, weight=0.0, through_beta=beta, through_threshold=threshold)
        leaf = d.clone().requires_grad_()
        gradients[beta, threshold] = torch.autograd.grad(loss(leaf, labels, aux)[0], leaf)[0]
        again = torch.zeros_like(d)
        for i in range(5):
            for j in range(5):
                if i != j:
                    bump = torch.zeros_like(d)
                    bump[i, j] = 1e-6
                    up, down = (frozen(loss, d + s * bump, d, labels) for s in (1, -1))
                    again[i, j] = (up - down) / 2e-6
        laws.assert_close(gradients[beta, threshold], again, 1e-7)
    assert len({tuple(gradient.flatten().tolist()) for gradient in gradients.values()}) == 4


def frozen(loss, d, base, labels):
    """The local term with β's cut-off arguments at `base`."""
    n, local, total = len(labels), 0.0, 0.0
    beta_d, tau_d = (d if through else base for through in (loss.through_beta, loss.through_threshold))
    positives = [(i, j) for i in range(n) for j in range(n) if i != j and labels[i] == labels[j]]
    for i, j in positives:
        own = torch.stack([tau_d[a, b] for a, b in positives if labels[a] == labels[i]])
        beta = torch.exp(beta_d[i, j] - 2 * own.mean() + own.min())
        inner = ((d[i, j] - d[i, labels != labels[i]] + loss.margin) / loss.scale).exp().sum()
        local, total = local + beta * torch.log1p(inner), total + beta
    return local / total


def test_evaluation_leaves_the_means_alone():
    (y, labels), aux = BATCHES["plain"], LOSS.init(torch.float64)
    aux = LOSS(*distances(outputs(2, 2), "euclidean"), aux)[1]
    still = replace(LOSS, momentum=1.0)
    d = distance(y[:, None], y)
    assert torch.equal(LOSS(d, labels, aux, moving=False)[0], still(d, labels, aux)[0])
    assert not torch.equal(LOSS(d, labels, aux)[0], still(d, labels, aux)[0])


def test_large_distances_stay_finite():
    d = (1e4 * torch.rand(6, 6, generator=torch.Generator().manual_seed(0))).requires_grad_()
    loss, _ = StructuralLoss(through_beta=True)(d, torch.tensor([0, 0, 0, 1, 1, 2]), StructuralLoss().init())
    (gradient,) = torch.autograd.grad(loss, d)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["euclidean", "cosine"])
def test_the_distance_of_a_diverged_output_is_no_number(kind):
    """0 would put it beside everything, and a run that diverged would look trained."""
    assert distance(torch.tensor([math.nan, 1.0]), torch.ones(2), kind).isnan()


def test_distances_are_scikit_learns():
    a, b = normal(5, 3, seed=1), normal(4, 3, seed=2)
    for kind, theirs in (("euclidean", euclidean_distances), ("cosine", cosine_distances)):
        laws.assert_close(distance(a[:, None], b, kind), torch.as_tensor(theirs(a, b)))
    assert distance(torch.zeros(3), a, "cosine").tolist() == [1.0] * 5


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"weight": -1.0}, {"momentum": 1.1}, {"spread_negative": -1.0}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=f"structural loss: {next(iter(options))}"):
        StructuralLoss(**options)
