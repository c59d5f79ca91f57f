"""Layouts, seeds and the pytrees that travel between the parts."""

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import normal
from torch.func import vmap

from l2lopt.core.layout import Layout, Shards
from l2lopt.core.seeding import generator, seed_of
from l2lopt.core.types import OptimiserState, detach, stack

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=4)


def named(shapes):
    return {f"tensor {k}": normal(*shape, seed=k) for k, shape in enumerate(shapes)}


@given(shapes)
def test_layout_goes_there_and_back(shapes):
    params = named(shapes)
    layout = Layout.of(params)
    flat = layout.ravel(params)
    numbers = [value for tensor in params.values() for value in tensor.flatten().tolist()]
    assert flat.tolist() == numbers
    assert layout.size == len(numbers)
    assert layout.sizes == tuple(tensor.numel() for tensor in params.values())
    laws.assert_same(layout.unravel(flat), params)


@given(shapes.filter(bool), st.lists(st.integers(1, 2), max_size=2))
def test_split_cuts_the_last_axis(shapes, batch):
    layout = Layout.of(named(shapes))
    flat = normal(*batch, layout.size)
    parts = layout.split(flat)
    assert [part.shape for part in parts] == [(*batch, size) for size in layout.sizes]
    laws.assert_same(torch.cat(parts, -1), flat)


@given(shapes, st.data())
def test_a_slice_counts_what_lies_in_it(shapes, data):
    layout = Layout.of(named(shapes))
    low = data.draw(st.integers(0, layout.size))
    high = data.draw(st.integers(low, layout.size))
    owners = [name for name, size in zip(layout.names, layout.sizes, strict=True) for _ in range(size)][low:high]
    between = layout.slice(low, high)
    assert between.names == layout.names
    assert between.sizes == tuple(owners.count(name) for name in layout.names)


def test_order_is_that_of_the_names_and_not_of_the_mapping():
    params = named([(2,), (3,)])
    layout = Layout.of(params)
    laws.assert_same(layout.ravel(dict(reversed(params.items()))), layout.ravel(params))


def test_unravelled_tensors_are_views():
    layout, flat = Layout(("a", "b"), ((2,), (2, 1))), torch.zeros(4)
    layout.unravel(flat)["b"][1, 0] = 5
    assert flat.tolist() == [0, 0, 0, 5]


def test_layout_is_a_constant_to_vmap():
    layout = Layout(("a", "b"), ((2, 2), (3,)))
    rows = normal(5, 7)
    state = OptimiserState(layout, {"m": rows}, {}, {"step": torch.arange(5)})

    def function(state):
        parts = state.layout.unravel(state.coordinates["m"])
        return parts, state._replace(coordinates={"m": state.layout.ravel(parts) * state.shared["step"]})

    parts, after = vmap(function)(state)
    assert after.layout == layout
    laws.assert_same(parts, stack([layout.unravel(row) for row in rows]))
    laws.assert_same(after.coordinates["m"], rows * torch.arange(5)[:, None])


def test_layouts_with_equal_content_are_equal_and_others_differ():
    layout = Layout(("a",), ((2,),))
    assert layout == Layout.of({"a": torch.ones(2)})
    assert hash(layout) == hash(Layout.of({"a": torch.ones(2)}))
    assert layout not in (Layout(("b",), ((2,),)), Layout(("a",), ((1, 2),)))


def test_fan_ins_are_those_of_the_matrices_and_their_vectors():
    shapes = {"gain": (7,), "weight": (5, 3), "bias": (5,), "kernel": (4, 3, 2, 2), "scale": (), "table": (9, 6)}
    layout = Layout(tuple(shapes), tuple(shapes.values()))
    assert layout.fan_ins == (7, 3, 3, 12, 12, 6)
    assert layout.part(2, 4).fan_ins == (3, 12)  # its matrix is elsewhere
    assert layout.slice(5, 24).fan_ins == layout.fan_ins
    assert Layout(("empty",), ((0, 4),)).fan_ins == (4,)


def test_a_part_of_the_coordinates_knows_the_whole_tensors():
    layout = Layout(("weight", "bias"), ((5, 3), (5,)))
    parts = [layout.slice(4, 17), layout.select(torch.tensor([0, 16])), layout.emptied()]
    assert {part.whole_shapes for part in (layout, *parts)} == {((5, 3), (5,))}
    assert layout.part(1, 2).whole_shapes == ((5,),)
    here = Layout(("weight", "bias"), ((2, 3), (0,)), Shards(layout.shapes, lambda sums: sums))
    assert {part.whole_shapes for part in (here, here.slice(1, 3))} == {layout.shapes}


@pytest.mark.parametrize(
    ("key", "seed"), [((0,), 2631537505891389924), (("order", "train", 3, 1), 5662664788055903001)], ids=str
)
def test_seeds_never_change(key, seed):
    """Known answers: the seeds of yesterday's runs are those of tomorrow's, in every process."""
    assert seed_of(*key) == seed


keys = st.lists(st.one_of(st.integers(-5, 2**70), st.text(max_size=3)), max_size=3)


@given(keys, keys)
def test_a_seed_is_a_function_of_its_key(one, other):
    assert 0 <= seed_of(*one) < 2**63
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_equal_keys_give_equal_streams():
    same, again, other = (torch.rand(8, generator=generator("key", n)) for n in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_detach_cuts_every_tensor():
    leaf = torch.ones(2, requires_grad=True)
    tree = {"a": leaf * 2, "b": (leaf * 3, 4)}
    cut = detach(tree)
    assert not cut["a"].requires_grad
    assert not cut["b"][0].requires_grad
    laws.assert_same(cut, {"a": torch.full((2,), 2.0), "b": (torch.full((2,), 3.0), 4)})
    assert tree["a"].requires_grad


def test_stack_adds_an_axis():
    rows = [{"a": normal(2, seed=k), "b": [normal(seed=k)]} for k in range(3)]
    stacked = stack(rows)
    assert stacked["a"].shape == (3, 2)
    for k, row in enumerate(rows):
        laws.assert_same({"a": stacked["a"][k], "b": [stacked["b"][0][k]]}, row)
