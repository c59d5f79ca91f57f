"""The transformer: its logits token by token, causality, windows, roles, samples, and an optimiser on it."""

import math
from functools import partial

import laws
import pytest
import torch
from implementations import TEXTS, normal
from torch.func import grad

import l2lopt
import optimisees
from l2lopt.core.errors import UserError
from l2lopt.core.kinds import Role
from l2lopt.core.layout import Layout
from optimisees.language.transformer import Transformer

from test_cli import called  # isort: skip

SMALL = partial(Transformer, TEXTS, width=4, layers=2, heads=2, window=5, batch_size=3, dtype="float64")


def random_params(model):
    """Parameters of size ½, so that every term counts."""
    params, _ = model.init(0)
    return {name: 0.5 * normal(*value.shape, seed=k) for k, (name, value) in enumerate(params.items())}


def normalised(x, params, name, kind):
    """Layer norm or RMS norm of a vector."""
    if kind == "rms":
        return x / (x.square().mean() + torch.finfo(x.dtype).eps).sqrt() * params[f"{name}.weight"]
    x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * params[f"{name}.weight"] + params[f"{name}.bias"]


def logits_by_hand(params, tokens, layers, heads, kind="layer", tied=False):
    """The logits of one window [T, vocabulary], vector by vector and head by head."""
    x = [params["embedding.weight"][token] + params["positions"][place] for place, token in enumerate(tokens)]
    size = len(x[0]) // heads
    for layer in range(layers):

        def linear(name, vector, layer=layer):
            return params[f"layers.{layer}.{name}.weight"] @ vector + params[f"layers.{layer}.{name}.bias"]

        projected = [linear("qkv", normalised(one, params, f"layers.{layer}.norm_1", kind)).chunk(3) for one in x]
        added = []
        for place, (query, _, _) in enumerate(projected):
            mixed = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack(
                    [query[part] @ key[part] / math.sqrt(size) for _, key, _ in projected[: place + 1]]
                )
                values = torch.stack([value[part] for _, _, value in projected[: place + 1]])
                mixed.append(scores.softmax(0) @ values)
            added.append(linear("out", torch.cat(mixed)))
        x = [one + more for one, more in zip(x, added, strict=True)]
        for place, one in enumerate(x):
            hidden = linear("up", normalised(one, params, f"layers.{layer}.norm_2", kind))
            x[place] = one + linear("down", 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))
    matrix = params["embedding.weight" if tied else "lm_head.weight"]
    return torch.stack([matrix @ normalised(one, params, "norm", kind) for one in x])


@pytest.mark.parametrize(("norm", "tied", "heads"), [("layer", False, 2), ("rms", True, 1), ("layer", True, 4)])
def test_the_loss_is_that_of_its_equations(norm, tied, heads):
    model = SMALL(heads=heads, norm=norm, tied=tied)
    params, batch = random_params(model), model.batch("train", 0, 0)
    logs = torch.stack([logits_by_hand(params, row, 2, heads, norm, tied).log_softmax(-1) for row in batch["inputs"]])
    expected = -logs.gather(-1, batch["targets"][..., None]).mean()
    laws.assert_close(model.loss(params, {}, batch)[0], expected)
    laws.assert_close(model.evaluate(params, {}, batch), expected)


def test_no_place_sees_a_later_one():
    model = SMALL()
    params, tokens = random_params(model), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 4, 0]])
    logits = model._outputs(params, {}, {"inputs": tokens})
    assert torch.equal(logits[0, :3], logits[1, :3])
    assert not torch.equal(logits[0, 3], logits[1, 3])


def test_windows_are_consecutive_tokens_and_their_successors():
    model, texts = SMALL(), {"train": TEXTS.train, "inner": TEXTS.train, "heldout": TEXTS.valid, "test": TEXTS.test}
    for split, text in texts.items():
        whole = [batch for batch, _ in SMALL(evaluation_samples=None).evaluation_batches(split, 0)]
        inputs, targets = (torch.cat([batch[name] for batch in whole]).flatten() for name in ("inputs", "targets"))
        count = (len(text) - 1) // 5 * 5
        assert torch.equal(inputs, text[:count])
        assert torch.equal(targets, text[1 : count + 1])
        windows = {tuple(row.tolist()) for row in inputs.view(-1, 5)}
        drawn = model.batch(split, 3, 1)
        assert {tuple(row.tolist()) for row in drawn["inputs"]} <= windows


def test_an_evaluation_of_a_split_is_the_same_for_all_seeds_and_copied_for_none():
    model = SMALL(evaluation_samples=4)
    for split in ("train", "inner", "heldout", "test"):
        (one, count), (other, _) = (next(iter(model.evaluation_batches(split, seed))) for seed in (0, 7))
        assert one is other
        assert count == 4


def test_roles_are_those_of_a_language_model():
    """Also with as many positions as the last matrix has rows."""
    roles = SMALL(window=4).roles()
    assert roles["embedding.weight"] == roles["positions"] == Role("embedding")
    assert roles["lm_head.weight"] == Role("head")
    assert roles["layers.1.qkv.weight"] == Role("matrix", 3)
    assert roles["layers.1.down.weight"] == roles["layers.0.out.weight"] == Role("matrix")
    tied = SMALL(tied=True)
    assert "lm_head.weight" not in tied.init(0)[0]
    assert tied.roles()["embedding.weight"] == Role("embedding")


def test_initial_weights_are_those_of_gpt_2():
    model = Transformer(TEXTS, 64, 8, 2, 16, batch_size=2)
    params, aux = model.init(0)
    assert aux == {}
    for name, value in params.items():
        expected = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        if value.dim() == 2:
            assert float(value.std()) == pytest.approx(expected, rel=0.15)
        elif name.endswith("bias"):
            assert not value.any()


def test_it_can_be_differentiated_twice():
    model = Transformer(TEXTS, 2, 1, 1, 3, expansion=1, batch_size=2, dtype="float64")
    params, batch = random_params(model), model.batch("train", 0, 0)
    layout = Layout.of(params)
    theta = layout.ravel(params)

    def loss(theta):
        return model.loss(layout.unravel(theta), {}, batch)[0]

    v, eps = normal(len(theta), seed=3), 1e-5
    expected = (grad(loss)(theta + eps * v) - grad(loss)(theta - eps * v)) / (2 * eps)
    laws.assert_close(grad(lambda theta: grad(loss)(theta) @ v)(theta), expected, 1e-7)


def test_it_goes_on_with_a_text_by_its_last_window():
    model = SMALL()
    params, prompt = random_params(model), torch.tensor([0, 1, 2, 3, 0, 2])
    drawn = list(model.generate(params, prompt, 4, temperature=0))
    given = [TEXTS.vocabulary.tokens.index("<eos>"), *prompt.tolist()]
    for token in drawn:
        assert token == int(logits_by_hand(params, given[-5:], 2, 2)[-1].argmax())
        given.append(token)
    bold = [list(model.generate(params, prompt, 20, temperature=1.0, seed=seed)) for seed in (0, 0, 1)]
    assert bold[0] == bold[1] != bold[2]


def test_it_is_trained_and_sampled_from_the_command_line(tmp_path, monkeypatch, capsys):
    """On characters of a user's own texts, by the harness."""
    data = {}
    for name, lines in (("train", 60), ("valid", 20), ("test", 20)):
        data[name] = str(tmp_path / f"{name}.txt")
        (tmp_path / f"{name}.txt").write_text("\n".join("abcabcabc" for _ in range(lines)))
    problem = {"name": "transformer", "data": {"name": "files", "unit": "character", **data}}
    problem |= {"width": 16, "layers": 1, "window": 8, "batch_size": 8}
    recipe = {"threads": 1, "optimisee": problem, "optimiser": "normalised-muon", "train": {"steps": 60}}
    result = l2lopt.train(recipe, tmp_path / "run")
    assert result.metrics["loss"] < 0.5 < math.log(4)
    assert result.metrics["bits_per_character"] == pytest.approx(result.metrics["loss"] / math.log(2))
    call = ["sample", tmp_path / "run", "--prompt", "abca", "--tokens", "4", "--temperature", "0"]
    code, out, _ = called(monkeypatch, capsys, *call)
    assert code == 0
    assert "abcabcab" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"transformer: heads: expected a divisor of the width, 4, found 3"),
        ({"window": 0}, r"transformer: window: expected above 0, found 0"),
        ({"dropout": 1.0}, r"transformer: dropout: expected in \[0, 1\), found 1.0"),
        ({"window": 50}, r"transformer: test: expected more than the 50 tokens of a window, found 41; lower window"),
        ({"batch_size": 0}, r"batch_size: expected from 1 to the 31 training samples, found 0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        SMALL(**options)


def test_it_is_made_by_name():
    made = optimisees.make("transformer", data=TEXTS, width=4, window=5, batch_size=3)
    assert isinstance(made, Transformer)
