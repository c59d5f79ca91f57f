"""What parameters are to an optimiser: by the classes of a module, by names and shapes, by the user's word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.core.kinds import KINDS, Role, check_kind, check_split, matrix_view, roles, roles_in, stack_of
from l2lopt.core.layout import Layout


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.classes, self.out = nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.start = nn.Parameter(torch.zeros(1, 1, 8))
        if tied:
            self.out.weight = self.tokens.weight


def test_a_modules_classes_tell():
    found = roles_in(Tied(tied=False))
    assert found["tokens.weight"] == found["positions.weight"] == Role("embedding")
    assert found["attention.in_proj_weight"] == Role("matrix", 3)
    assert found["attention.out_proj.weight"] == found["classes.weight"] == Role("matrix")
    assert found["out.weight"] == Role("head")
    assert found["start"] == found["classes.bias"] == found["attention.in_proj_bias"] == Role("vector")


def test_a_tied_weight_is_an_embedding_whatever_its_first_name():
    assert roles_in(Tied())["tokens.weight"] == Role("embedding")
    model = nn.Sequential(nn.Linear(8, 50, bias=False), nn.Embedding(50, 8))
    model[1].weight = model[0].weight
    assert roles_in(model) == {"0.weight": Role("embedding")}


@pytest.mark.parametrize(("kind", "split"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_the_weights_of_recurrent_layers_are_a_matrix_per_gate(kind, split):
    found = roles_in(kind(3, 5, num_layers=2, bidirectional=True))
    assert {role for name, role in found.items() if name.startswith("weight")} == {Role("matrix", split)}
    assert {role for name, role in found.items() if name.startswith("bias")} == {Role("vector")}


@pytest.mark.parametrize(("kind", "split"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_so_are_those_of_a_single_step(kind, split):
    found = roles_in(kind(3, 4))
    assert {name: role.split for name, role in found.items()} == {
        "weight_ih": split,
        "weight_hh": split,
        "bias_ih": 1,
        "bias_hh": 1,
    }


class Factored(nn.Linear):
    """A layer whose weight is a product."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        del self.weight
        self.u, self.v = nn.Parameter(torch.ones(outputs, 2)), nn.Parameter(torch.ones(2, inputs))


class ParallelExperts(nn.Module):
    """A layer's experts in one tensor, as GraniteMoe has them."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, 6, 8)), nn.Parameter(torch.ones(4, 6))


def test_each_expert_of_a_tensor_is_a_matrix():
    found = roles_in(nn.Sequential(ParallelExperts()))
    assert found == {"0.weight": Role("matrix", 4), "0.scale": Role("matrix")}


@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    split=st.integers(1, 8),
)
def test_a_stack_has_all_of_a_tensors_numbers_or_is_refused(shape, split):
    matrices, rows, columns = stack_of(shape, split)
    whole = torch.Size(shape).numel()
    assert matrices == split
    if matrices * rows * columns == whole:
        check_split("w", shape, split)
        # A stack of whole slices of the tensor: its matrices are those of its own layout in memory.
        assert torch.arange(whole).reshape(matrices, rows, columns).flatten().tolist() == list(range(whole))
    else:
        with pytest.raises(UserError, match="split"):
            check_split("w", shape, split)


def test_a_subclass_of_a_cell_has_its_gates():
    class Own(nn.GRUCell):
        pass

    found = roles_in(nn.ModuleList([Own(3, 4), type("Lstm", (nn.LSTMCell,), {})(3, 4)]))
    assert (found["0.weight_hh"], found["1.weight_ih"]) == (Role("matrix", 3), Role("matrix", 4))


def test_names_tell_what_a_container_holds():
    tables = {"wte": nn.Parameter(torch.ones(9, 4)), "w": nn.Parameter(torch.ones(7, 4))}
    found = roles_in(nn.Sequential(nn.ParameterDict(tables)))
    assert {name: role.kind for name, role in found.items()} == {"0.wte": "embedding", "0.w": "matrix"}


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_an_embedding_and_a_head_that_are_computed_are_not_tied():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    for part in (model[0], model[2]):
        nn.utils.parametrize.register_parametrization(part, "weight", Halved())
    names = ["0.parametrizations.weight.original", "2.parametrizations.weight.original"]
    assert roles_in(model).items() >= dict(zip(names, roles(names, [(9, 4)] * 2), strict=True)).items()


def test_asking_for_the_roles_changes_no_buffer():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 2))
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert before
    l2lopt.LearnedOptimizer(model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_layer_of_factors_has_no_weight_to_ask_for():
    found = roles_in(nn.Sequential(nn.Embedding(9, 4), Factored(4, 9)))
    assert {name: role.kind for name, role in found.items()} == {
        "0.weight": "embedding",
        "1.bias": "vector",
        "1.u": "matrix",
        "1.v": "matrix",
    }


def test_only_the_last_layer_of_as_many_outputs_as_tokens_is_a_head():
    found = roles_in(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    assert [role.kind for name, role in found.items() if "weight" in name] == ["embedding", "matrix", "head"]


def test_a_classifiers_last_layer_is_a_matrix():
    found = roles_in(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10)))
    assert [role.kind for role in found.values()] == ["matrix", *["vector"] * 3, "matrix", "vector"]


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("transformer.wte.weight", (50, 8), Role("embedding")),
        ("model.embed_tokens.weight", (50, 8), Role("embedding")),
        ("bert.embeddings.word_embeddings.weight", (50, 8), Role("embedding")),
        ("pos_embed", (1, 7, 8), Role("embedding")),
        ("patch_embed.proj.weight", (8, 3, 4, 4), Role("matrix")),
        ("cls_token", (1, 1, 8), Role("vector")),
        ("lm_head.weight", (50, 8), Role("head")),
        ("head.weight", (10, 8), Role("matrix")),
        ("blocks.0.attn.qkv.weight", (24, 8), Role("matrix", 3)),
        ("blocks.0.attn.qkv.bias", (24,), Role("vector")),
        ("blocks.0.attn.qkv.weight", (16, 8), Role("matrix")),
        ("embedding.bias", (8,), Role("vector")),
        ("position", (), Role("vector")),
        ("conv.weight", (8, 1, 1, 1), Role("vector")),
        ("p3", (8, 8), Role("matrix")),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 6, 8), Role("matrix", 4)),
        ("mlp.experts.gate_up_proj_bias", (4, 6), Role("vector")),
        ("experts.w1", (1, 6, 8), Role("vector")),
        ("experts.0.conv.weight", (4, 6, 3), Role("matrix")),
        ("experts.0.w1.weight", (4, 6), Role("matrix")),
    ],
)
def test_names_and_shapes_tell(name, shape, role):
    assert roles([name], [shape]) == (role,)


def test_the_last_matrix_with_a_row_per_token_is_a_head():
    names, shapes = ["wte", "fc", "out"], [(50, 8), (8, 8), (50, 8)]
    assert [role.kind for role in roles(names, shapes)] == ["embedding", "matrix", "head"]
    # A hidden matrix of as many rows as there are positions.
    assert [role.kind for role in roles(["wpe", "fc", "out"], [(8, 8), (8, 8), (50, 8)])][1:] == ["matrix", "matrix"]


@pytest.mark.parametrize(
    "name", ["wpe", "positions", "pos_embed", "embed_positions.weight", "position_embedding.weight"]
)
def test_positions_are_no_tokens(name):
    """The last layer's output matrix may have as many rows as there are positions."""
    names, shapes = [name, "wte", "up", "down"], [(8, 8), (50, 8), (32, 8), (8, 32)]
    assert [role.kind for role in roles(names, shapes)] == ["embedding", "embedding", "matrix", "matrix"]
    assert [role.kind for role in roles([*names, "lm_head"], [*shapes, (50, 8)])][3:] == ["matrix", "head"]


def test_a_tied_model_as_wide_as_it_has_tokens_has_no_head():
    """The last matrix has a row per token by chance."""
    model = nn.ModuleDict({"wte": nn.Embedding(8, 8), "down": nn.Linear(32, 8), "out": nn.Linear(8, 8, bias=False)})
    model["out"].weight = model["wte"].weight
    assert roles_in(model)["down.weight"] == Role("matrix")
    assert roles_in(model)["wte.weight"] == Role("embedding")


def test_a_tied_model_of_as_many_positions_as_channels_has_no_head():
    """The tied weight is used by a function, so that no layer is the head."""
    model = nn.ModuleDict({"wte": nn.Embedding(50, 8), "wpe": nn.Embedding(8, 8), "down": nn.Linear(32, 8)})
    assert roles_in(model)["down.weight"] == Role("matrix")


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6), st.text(max_size=12))
def test_every_parameter_has_a_role(shapes, name):
    found = roles([f"{name}{index}" for index in range(len(shapes))], shapes)
    assert len(found) == len(shapes)
    for role, shape in zip(found, shapes, strict=True):
        assert role.kind in KINDS
        rows, columns = matrix_view(shape)
        assert role.kind != "matrix" or (min(rows, columns) > 1 and rows % role.split == 0)


def test_a_layout_hands_its_roles_to_every_part_of_it():
    layout = Layout.of(dict(Tied(tied=False).named_parameters()), roles_in(Tied(tied=False)))
    known = dict(zip(layout.names, layout.roles, strict=True))
    assert known["out.weight"] == Role("head")
    for part in (layout.slice(3, 400), layout.select(torch.arange(0, layout.size, 7)), layout.emptied()):
        assert part.roles == layout.roles
    assert layout.part(1, 4).roles == layout.roles[1:4]


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"w: kind: expected one of matrix, .*, found 'matrx'; did you mean 'matrix'"):
        check_kind("w", "matrx")
    with pytest.raises(UserError, match="split: expected a divisor of 8, the rows of w, found 3"):
        check_split("w", (8, 2), 3)
    assert check_split("w", (8, 2), 4) == 4


@pytest.mark.parametrize(
    "wrapped",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_weights_that_are_computed_are_no_parameters(wrapped):
    """What they are computed of is judged by its shape."""
    found = roles_in(nn.Sequential(wrapped(nn.Linear(4, 6)), nn.Embedding(5, 4), wrapped(nn.Linear(6, 5))))
    assert found["1.weight"].kind == "embedding"
    assert "matrix" in {role.kind for name, role in found.items() if "original" in name}


def test_all_parameters_of_a_norm_are_vectors():
    module = nn.Sequential(nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4)), nn.GroupNorm(2, 4), nn.BatchNorm2d(3))
    assert {role.kind for role in roles_in(module).values()} == {"vector"}


def test_a_hidden_layer_as_wide_as_there_are_tokens_is_no_head():
    found = roles_in(nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64), nn.Linear(64, 10)))
    assert [found[f"{place}.weight"].kind for place in range(3)] == ["embedding", "matrix", "matrix"]
    found = roles_in(
        nn.ModuleDict({"head": nn.Linear(16, 64), "tokens": nn.Embedding(64, 16), "last": nn.Linear(16, 16)})
    )
    assert found["head.weight"].kind == "head"  # which may have been made first


def test_what_a_layer_calls_an_embedding_is_a_matrix():
    module = nn.ModuleDict({"pos_conv_embed": nn.Conv1d(3, 4, 5), "embedder": nn.Bilinear(2, 3, 4)})
    assert {role.kind for name, role in roles_in(module).items() if name.endswith("weight")} == {"matrix"}
