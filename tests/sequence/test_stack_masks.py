"""Weight drop and dropout between layers: which numbers, how many, from where."""

import pytest
import torch
from implementations import normal, seeded
from laws import assert_close, assert_same
from stacks import GRU, M, N, grid
from torch.func import functional_call, grad, vmap

from l2lopt import cells, sequence


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_masks_drop_their_share_and_scale_the_rest(share):
    stack = sequence.make("lstm", 50, 60, 2, dropout=share, weight_drop={"weight_h": share})
    masks = stack.draw_masks(torch.zeros(20, 15, 50), generator())
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "0.0.weight_h": (240, 60),
        "1.0.weight_h": (240, 60),
        "dropout.0": (20, 15, 60),
    }
    for mask in masks.values():
        assert sorted(mask.unique().tolist()) == pytest.approx([0, 1 / (1 - share)])
        spread = (share * (1 - share) / mask.numel()) ** 0.5
        assert abs((mask == 0).double().mean().item() - share) < 4 * spread
        rows, columns = (mask == 0).flatten(0, -2), (mask == 0).flatten(1)
        assert all(0 < part.double().mean() < 1 for part in (*rows.T, *columns))
    assert not torch.equal(masks["0.0.weight_h"], masks["1.0.weight_h"])


def test_a_masked_weight_is_the_weight_times_its_mask():
    stack, x = grid(cells.LSTM, 2, True, weight_drop={"weight_h": 0.5, "bias": 0.25}), normal(5, 3, N)
    masks = stack.draw_masks(x, generator())
    assert {name.split(".")[-1] for name in masks} == {"weight_h", "bias"}
    plain = grid(cells.LSTM, 2, True)
    with torch.no_grad():
        for name, mask in masks.items():
            i, k, weight = name.split(".")
            getattr(plain.layers[int(i)][int(k)].cell, weight).mul_(mask)
    assert_close(stack(x, masks=masks), plain(x))
    assert (stack(x, masks=masks)[0] - stack(x, masks={})[0]).abs().max() > 1e-3


def test_one_mask_holds_for_the_whole_call_and_the_next_call_draws_another():
    stack, x = grid(GRU, weight_drop={"weight_h": 0.5}), normal(6, 3, N)
    torch.manual_seed(3)
    drawn = stack(x)
    torch.manual_seed(3)
    masks = stack.draw_masks(x)
    assert_same(stack(x, masks=masks), drawn)
    assert (stack(x)[0] - drawn[0]).abs().max() > 1e-3


def test_evaluation_drops_nothing():
    x = normal(6, 3, N)
    plain = grid(GRU, 2)
    stack = grid(GRU, 2, weight_drop={"weight_h": 0.5}, dropout=0.5)
    assert (stack(x)[0] - plain(x)[0]).abs().max() > 1e-3
    assert_same(stack.eval()(x), plain(x))
    assert (stack(x, masks=stack.draw_masks(x, generator()))[0] - plain(x)[0]).abs().max() > 1e-3
    state = torch.get_rng_state()
    stack(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_shares_of_zero_drop_nothing():
    x = normal(6, 3, N)
    assert_same(grid(GRU, 2, weight_drop={"weight_h": 0.0}, dropout=0.0)(x), grid(GRU, 2)(x))


def test_gradient_reaches_the_raw_weight_through_its_mask():
    stack, x = grid(cells.LSTM, weight_drop={"weight_h": 0.5}), normal(6, 3, N)
    masks = stack.draw_masks(x, generator())
    raw, mask = stack.layers[0][0].cell.weight_h, masks["0.0.weight_h"]
    plain = grid(cells.LSTM)
    with torch.no_grad():
        plain.layers[0][0].cell.weight_h.mul_(mask)
    (gradient,) = torch.autograd.grad(stack(x, masks=masks)[0].square().sum(), raw)
    (dropped,) = torch.autograd.grad(plain(x)[0].square().sum(), plain.layers[0][0].cell.weight_h)
    assert_close(gradient, dropped * mask)
    assert gradient[mask == 0].abs().max() == 0
    assert gradient[mask > 0].abs().min() > 0
    assert isinstance(raw, torch.nn.Parameter)
    assert dict(stack.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_masks_of_weights_have_the_weights_precision():
    """As under autocast, where x may be bfloat16 and 1/(1 − p) is not one of its numbers."""
    stack = sequence.make("lstm", N, M, 2, dropout=0.3, weight_drop={"weight_h": 0.3})
    masks = stack.draw_masks(torch.zeros(5, 2, N).bfloat16(), generator())
    assert {name: mask.dtype for name, mask in masks.items()} == {
        "0.0.weight_h": torch.float32,
        "1.0.weight_h": torch.float32,
        "dropout.0": torch.bfloat16,
    }
    assert set(masks["0.0.weight_h"].unique().tolist()) == {0.0, torch.ones(()).div(1 - 0.3).item()}


def test_a_call_leaves_the_weights_alone():
    stack, x = grid(cells.LSTM, 2, weight_drop={"weight_h": 0.5}), normal(4, 2, N)
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    identities = [id(parameter) for parameter in stack.parameters()]
    stack(x)[0].sum().backward()
    assert_same(dict(stack.state_dict()), before)
    assert [id(parameter) for parameter in stack.parameters()] == identities


def test_dropout_falls_between_layers_only():
    layers = [grid(GRU), seeded(sequence.Stack([[GRU(M, M)]]), 1), seeded(sequence.Stack([[GRU(M, M)]]), 2)]
    stack = sequence.Stack([[layer.layers[0][0].cell] for layer in layers], dropout=0.5)
    x = normal(6, 3, N)
    masks = stack.draw_masks(x, generator())
    assert masks.keys() == {"dropout.0", "dropout.1"}
    h = layers[0](x)[0] * masks["dropout.0"]
    assert_close(stack(x, masks=masks)[0], layers[2](layers[1](h)[0] * masks["dropout.1"])[0])


def test_batch_first_masks_have_time_first():
    stack, x = grid(GRU, 2, dropout=0.5, batch_first=True), normal(3, 6, N)
    masks = stack.draw_masks(x, generator())
    assert masks["dropout.0"].shape == (6, 3, M)
    assert_same(stack(x, masks=masks)[0], grid(GRU, 2)(x.transpose(0, 1), masks=masks)[0].transpose(0, 1))


def test_a_loss_with_masks_passed_in_is_pure_and_maps():
    stack, xs = grid(cells.LSTM, 2, weight_drop={"weight_h": 0.5}, dropout=0.25), normal(3, 4, 2, N)
    drawn = [stack.draw_masks(x, generator(seed)) for seed, x in enumerate(xs)]
    rows = {name: torch.stack([masks[name] for masks in drawn]) for name in drawn[0]}
    weights = {name: value.detach() for name, value in stack.named_parameters()}

    def loss(weights, x, masks):
        return functional_call(stack, weights, (x,), {"masks": masks})[0].square().sum()

    mapped = vmap(grad(loss), in_dims=(None, 0, 0))(weights, xs, rows)
    for row, (x, masks) in enumerate(zip(xs, drawn, strict=True)):
        assert_close({name: value[row] for name, value in mapped.items()}, grad(loss)(weights, x, masks))
        assert_same(grad(loss)(weights, x, masks), grad(loss)(weights, x, masks))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_masks_are_drawn_within_vmap(randomness):
    stack, x = grid(GRU, 2, weight_drop={"weight_h": 0.5}, dropout=0.5), normal(5, 2, N).expand(3, 5, 2, N)
    rows = vmap(lambda x: stack(x)[0], randomness=randomness)(x)
    assert torch.equal(rows[0], rows[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: stack(x)[0])(x)
