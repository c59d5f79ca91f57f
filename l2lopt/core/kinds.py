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
from torch.nn.utils.parametrize import is_parametrized

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
EXPERTS = re.compile(r"(^|[._])experts\.\w+$")
"""Parameters of a layer that holds all experts of a mixture in one tensor each."""


class Role(NamedTuple):
    """What a parameter is to an optimiser.

    Attributes:
        kind: Kind of the parameter.
        split: Number of matrices of one shape that are stacked in it; see `stack_of`.
    """

    kind: Kind
    split: int = 1


def matrix_view(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor's matrix view [shape[0], the rest]; a vector [k] is the matrix [k, 1]."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


def stack_of(shape: Sequence[int], split: int) -> tuple[int, int, int]:
    """A tensor as a stack of `split` matrices of one shape: their number, rows and columns.

    The matrix view is cut along its rows. A tensor [E, a, b] of which each of the E slices holds whole matrices, as the
    weights of a mixture of experts do, is cut as the matrix [E·a, b].

    Args:
        shape: Shape of the tensor.
        split: Number of matrices.

    Example:
        >>> stack_of((12, 4), 3), stack_of((8, 6, 4), 1), stack_of((8, 6, 4), 8)
        ((3, 4, 4), (1, 8, 24), (8, 6, 4))
    """
    rows, columns = matrix_view(shape)
    if len(shape) == 3 and split > 1 and split % max(shape[0], 1) == 0:
        rows, columns = shape[0] * shape[1], shape[2]
    return split, rows // split, columns


def roles(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[Role, ...]:
    """The roles of parameters of which no more than names and shapes is known, in their order.

    - A matrix view with a single row or column is a vector.
    - A tensor of two or three axes with a part such as "embed_tokens", "wte" or "pos_embed" in its name is an
      embedding.
    - A matrix called "lm_head" or "unembed" is a head; where none is, the last matrix of all is one if it has as many
      rows as an embedding that is not one of positions.
    - A tensor of three axes that belongs to "experts" is a stack of as many matrices as its first axis has entries, and
      a matrix there that is called a bias is a vector.
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

    def say(parameter: Tensor | None, role: Role) -> None:
        if (name := name_of.get(id(parameter))) is not None:  # none: computed of other parameters
            found[name] = role

    named = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and _has_weight(part)
    ]
    tables = [table for _, table in named]
    tokens = {table.num_embeddings for name, table in named if not POSITIONS.search(name)}
    linear = [part for part in module.modules() if isinstance(part, nn.Linear) and _has_weight(part)]
    for part in module.modules():
        is_layer = isinstance(part, nn.Linear) or type(part).__module__.startswith("torch.nn.modules.")
        # What a layer calls an embedding, of image patches for instance, is a matrix where its class is none.
        if is_layer and not isinstance(part, nn.ParameterList | nn.ParameterDict):
            for parameter in part.parameters(recurse=False):
                if found[name_of[id(parameter)]].kind == "embedding":
                    say(parameter, _shaped(parameter.shape))
    shared = {id(_own(table)) for table in tables} - {id(None)}
    if any(id(_own(layer)) in shared for layer in linear):
        # The head is tied: what names and shapes took for one, a last matrix as wide as there are tokens, is none.
        found |= {name: _shaped(parameters[name].shape) for name, role in found.items() if role.kind == "head"}
    last = max((place for place, layer in enumerate(linear) if layer.out_features in tokens), default=None)
    if last is not None and all(layer.in_features != linear[last].out_features for layer in linear[last + 1 :]):
        say(_own(linear[last]), Role("head"))
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            say(_own(part, "in_proj_weight"), Role("matrix", 3))
        if "Experts" in type(part).__name__:
            for parameter in part.parameters(recurse=False):
                if parameter.dim() == 3:
                    say(parameter, _of_experts(parameter.shape))
        if isinstance(part, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _NormBase):
            for parameter in part.parameters(recurse=False):
                say(parameter, Role("vector"))
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            mode = part.mode if isinstance(part, nn.RNNBase) else ""
            gates = 4 if mode == "LSTM" or isinstance(part, nn.LSTMCell) else 1
            gates = 3 if mode == "GRU" or isinstance(part, nn.GRUCell) else gates
            for name, weight in part.named_parameters(recurse=False):
                if name.startswith(("weight_ih", "weight_hh")):
                    say(weight, Role("matrix", gates))
    for table in tables:
        say(_own(table), Role("embedding"))
    return found


def _own(part: nn.Module, name: str = "weight") -> Tensor | None:
    """A module's parameter of this name; None where it has none or computes it, which is not to be asked for."""
    # Through `_parameters`: a parametrised attribute would be computed, and spectral norm's changes its buffers.
    return part._parameters.get(name)


def _has_weight(part: nn.Module) -> bool:
    """Whether a layer has a weight, also one that is computed; a subclass may have factors in its place."""
    return _own(part) is not None or "weight" in vars(part) or is_parametrized(part, "weight")


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
    if split < 1 or prod(stack_of(shape, split)) != prod(shape):
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
    if EXPERTS.search(name) and len(shape) == 3:
        return _of_experts(shape)
    if EXPERTS.search(name) and len(shape) == 2 and name.endswith("bias"):
        return Role("vector")
    if len(shape) in (2, 3) and EMBEDDING.search(name):
        return Role("embedding")
    if plain.kind == "matrix" and HEAD.search(name):
        return Role("head")
    rows, columns = matrix_view(shape)
    if plain.kind == "matrix" and STACKED.search(name) and rows == 3 * columns:
        return Role("matrix", 3)
    return plain


def _of_experts(shape: Sequence[int]) -> Role:
    """A matrix for each of a mixture's experts."""
    return Role("matrix", shape[0]) if min(shape) > 1 else Role("vector")


def _shaped(shape: Sequence[int]) -> Role:
    """A matrix, or a vector where the matrix view has a single row or column."""
    return Role("matrix" if min(matrix_view(shape)) > 1 else "vector")
