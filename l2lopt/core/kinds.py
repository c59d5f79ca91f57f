"""What a parameter is to an optimiser: a matrix, a vector, an embedding or the head of a language model.

An orthogonalised direction serves matrices that map activations to activations. The rows of an embedding and of a
language model's head stand for single tokens, which a batch holds or does not, and a vector has no spectrum: these want
a direction per coordinate. A module tells by its classes; without one, names and shapes have to do.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from l2lopt.core.errors import UserError, did_you_mean

Kind: TypeAlias = Literal["matrix", "vector", "embedding", "head"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|emb|wte|wpe|pos|position|positions)([._]|$)")
POSITIONS = re.compile(
    r"(^|[._])(wpe|pos|position|positions|pos\w*embed\w*|embed\w*pos\w*|token_type\w*|segment\w*)([._]|$)"
)
"""Embeddings of places and parts, whose number says nothing about how many tokens there are."""
HEAD = re.compile(r"(^|[._])(lm_head|unembed\w*)([._]|$)")
STACKED = re.compile(r"(^|[._])(qkv|in_proj_weight|in_proj|c_attn|Wqkv)([._]|$)")


class Role(NamedTuple):
    """What a parameter is to an optimiser.

    Attributes:
        kind: Kind of the parameter.
        split: Number of matrices of one shape that are stacked along its first axis.
    """

    kind: Kind
    split: int = 1


def matrix_view(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor's matrix view [shape[0], the rest]; a vector [k] is the matrix [k, 1]."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


def roles(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[Role, ...]:
    """The roles of parameters of which no more than names and shapes is known, in their order.

    - A matrix view with a single row or column is a vector.
    - A tensor of two or three axes with a part such as "embed_tokens", "wte" or "pos_embed" in its name is an
      embedding.
    - A matrix called "lm_head" or "unembed" is a head; where none is, the last matrix of all is one if it has as many
      rows as an embedding that is not one of positions.
    - A matrix called "qkv", "in_proj" or the like with three times as many rows as columns is a stack of three.

    Args:
        names: Names, with dots between modules as in `nn.Module.named_parameters`; any strings will do.
        shapes: Shapes of the whole tensors.
    """
    found = [_role(name, shape) for name, shape in zip(names, shapes, strict=True)]
    last = max((index for index, role in enumerate(found) if role.kind == "matrix"), default=None)
    tables = zip(names, shapes, found, strict=True)
    tokens = {shape[0] for name, shape, role in tables if role.kind == "embedding" and not POSITIONS.search(name)}
    known = any(role.kind == "head" for role in found)
    if not known and last is not None and len(shapes[last]) == 2 and shapes[last][0] in tokens:
        # Of the last one only: a model may have hidden matrices of as many rows as it has tokens.
        found[last] = Role("head")
    return tuple(found)


def roles_in(module: nn.Module) -> dict[str, Role]:
    """The roles of a module's parameters by name, from the classes that they belong to.

    An embedding is the weight of an `nn.Embedding` or `nn.EmbeddingBag`, also where a head is tied to it. A head is
    the weight of the last linear layer with as many outputs as an embedding of tokens has entries, unless a linear
    layer behind it takes as many inputs. The projections of `nn.MultiheadAttention` are a stack of three matrices, the
    weights of recurrent layers one of a matrix per gate, and all parameters of a norm vectors. What no class tells, and
    a weight that is computed of other parameters, as by `torch.nn.utils.parametrizations`, is judged by `roles`.
    """
    parameters = dict(module.named_parameters())
    found = dict(zip(parameters, roles(list(parameters), [p.shape for p in parameters.values()]), strict=True))
    # By identity: of tied weights `named_parameters` has the first name alone.
    name_of = {id(parameter): name for name, parameter in parameters.items()}

    def say(parameter: Tensor, role: Role) -> None:
        if (name := name_of.get(id(parameter))) is not None:  # none: computed of other parameters
            found[name] = role

    named = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and hasattr(part, "weight")  # a subclass may have factors
    ]
    tables = [table for _, table in named]
    tokens = {table.num_embeddings for name, table in named if not POSITIONS.search(name)}
    linear = [part for part in module.modules() if isinstance(part, nn.Linear) and hasattr(part, "weight")]
    for part in module.modules():
        # What a layer calls an embedding, of image patches for instance, is a matrix where its class is none.
        if isinstance(part, nn.Linear) or type(part).__module__.startswith("torch.nn.modules."):
            for parameter in part.parameters(recurse=False):
                if found[name_of[id(parameter)]].kind == "embedding":
                    say(parameter, _shaped(parameter.shape))
    shared = {id(table.weight) for table in tables}
    if any(id(layer.weight) in shared for layer in linear):
        # The head is tied: what names and shapes took for one, a last matrix as wide as there are tokens, is none.
        found |= {name: _shaped(parameters[name].shape) for name, role in found.items() if role.kind == "head"}
    last = max((place for place, layer in enumerate(linear) if layer.out_features in tokens), default=None)
    if last is not None and all(layer.in_features != linear[last].out_features for layer in linear[last + 1 :]):
        say(linear[last].weight, Role("head"))
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            say(part.in_proj_weight, Role("matrix", 3))
        if isinstance(part, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _NormBase):
            for parameter in part.parameters(recurse=False):
                say(parameter, Role("vector"))
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            kind = part.mode if isinstance(part, nn.RNNBase) else type(part).__name__.removesuffix("Cell")
            gates = {"LSTM": 4, "GRU": 3}.get(kind, 1)
            for name, weight in part.named_parameters(recurse=False):
                if name.startswith(("weight_ih", "weight_hh")):
                    say(weight, Role("matrix", gates))
    for table in tables:
        say(table.weight, Role("embedding"))
    return found


def check_kind(where: str, value: Any) -> Kind:
    """One of `KINDS`.

    Raises:
        UserError: For anything else.
    """
    if value not in KINDS:
        remedy = did_you_mean(str(value), KINDS)
        raise UserError(f"{where}: kind", expected=f"one of {', '.join(KINDS)}", found=repr(value), remedy=remedy)
    kind: Kind = value
    return kind


def check_split(name: str, shape: Sequence[int], split: int) -> int:
    """A number of matrices into which the first axis can be cut.

    Raises:
        UserError: Where it cannot.
    """
    rows, _ = matrix_view(shape)
    if split < 1 or rows % split:
        expected, remedy = f"a divisor of {rows}, the rows of {name}", "give the number of matrices that are stacked"
        raise UserError("split", expected=expected, found=str(split), remedy=remedy)
    return split


def as_roles(names: Sequence[str], shapes: Sequence[Sequence[int]], known: Mapping[str, Role]) -> tuple[Role, ...]:
    """The roles of parameters of which some are known, the others by name and shape."""
    guessed = roles(names, shapes)
    return tuple(known.get(name, role) for name, role in zip(names, guessed, strict=True))


def _role(name: str, shape: Sequence[int]) -> Role:
    """The role that a name and a shape tell by themselves."""
    plain = _shaped(shape)
    if len(shape) in (2, 3) and EMBEDDING.search(name):
        return Role("embedding")
    if plain.kind == "matrix" and HEAD.search(name):
        return Role("head")
    rows, columns = matrix_view(shape)
    if plain.kind == "matrix" and STACKED.search(name) and rows == 3 * columns:
        return Role("matrix", 3)
    return plain


def _shaped(shape: Sequence[int]) -> Role:
    """A matrix, or a vector where the matrix view has a single row or column."""
    return Role("matrix" if min(matrix_view(shape)) > 1 else "vector")
