"""Pure functions of tensors as one compiled graph: PyTorch's operations, recorded once and compiled by inductor."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

_log = logging.getLogger("l2lopt")
WIDER = 16
"""How many times as many numbers what is computed from a tensor must have for the tensor to get memory of its own."""
_compiled: dict[Any, Callable[..., Any]] = {}
"""Graph, its inputs' kinds and the number of threads → compiled function."""


class NotCompiledError(Exception):
    """A function that cannot be compiled here; the message says why, in a line."""


def compile_function(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """A pure function of pytrees, compiled for arguments of the example's shapes, dtypes and device.

    Its operations are recorded on the example as they come, through `torch.func` and autograd, whatever Python decides
    on the way: a function whose Python looks at numbers is refused. Tensors that it closes over, such as rates, are
    inputs of the graph, so functions that differ in nothing else share one compilation; inductor keeps compilations on
    disk, too. Nothing is compiled unless the result on the example equals the function's own up to rounding.

    Cost: on a CPU some 20 ms an operation, the first time on a machine.

    Args:
        function: Pure function without gradients to its caller. What it closes over stays as it is.
        example: Arguments like those to come. Leaves that are no tensors must be equal in all calls.

    Raises:
        NotCompiledError: If there is no compiler, Python looks at numbers, or the results differ.

    Example:
        >>> import torch
        >>> def step(x, rate):
        ...     return x - rate * x.cos()
        >>> compiled = compile_function(step, torch.ones(3), torch.tensor(0.5))
        >>> bool((compiled(torch.zeros(3), torch.tensor(2.0)) == -2).all())
        True
    """
    leaves, structure = pytree.tree_flatten(example)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = [leaves[place] for place in places]

    def flat(*tensors: Tensor) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        results, found = pytree.tree_flatten(function(*pytree.tree_unflatten(filled, structure)))
        return [*results, found]

    with torch.no_grad():
        # First of all as it is, so that what layouts make once and keep is there: each recording then has it alike.
        *expected, outputs = flat(*inputs)
        is_tensor = [isinstance(result, Tensor) for result in expected]
        try:
            graph = make_fx(lambda *tensors: [leaf for leaf in flat(*tensors) if isinstance(leaf, Tensor)])(*inputs)
            constants = _lift_constants(graph)
            handed_on = _drop_handed_on(graph)
            _keep_small_results(graph)
            run = _compiled_graph(graph, [*inputs, *constants])
        except Exception as error:  # a compiler may fail in any way, and the function works without it
            said = str(error).strip().splitlines()
            raise NotCompiledError(f"{type(error).__name__}{': ' if said else ''}{said[0] if said else ''}") from error

        def call(*arguments: Any) -> Any:
            given = pytree.tree_leaves(arguments)
            tensors = [*(given[place] for place in places), *constants]
            made = iter(run(*tensors))
            found = iter([next(made) if source is None else tensors[source] for source in handed_on])
            pairs = zip(expected, is_tensor, strict=True)
            return pytree.tree_unflatten([next(found) if tensor else leaf for leaf, tensor in pairs], outputs)

        pairs = zip(pytree.tree_leaves(call(*example)), expected, flat(*map(_nudged, inputs)), strict=False)
        if not all(_agree(*some) for some, tensor in zip(pairs, is_tensor, strict=True) if tensor):
            raise NotCompiledError("the compiled function gives other numbers")
        # Only their places are needed from now on.
        expected = [None if one else leaf for leaf, one in zip(expected, is_tensor, strict=True)]
    return call


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Makes the tensors that the graph has closed over inputs after its others, and gives them."""
    constants: list[Tensor] = []
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    lifted: dict[str, fx.Node] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        if node.target not in lifted:
            constant = getattr(graph, node.target)
            with graph.graph.inserting_before(first):
                lifted[node.target] = graph.graph.placeholder(f"constant_{len(constants)}")
            lifted[node.target].meta = {"val": constant}
            constants.append(constant)
        node.replace_all_uses_with(lifted[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return constants


def _drop_handed_on(graph: fx.GraphModule) -> list[int | None]:
    """Takes the inputs that the graph hands on as they are out of its outputs: for each output that input, or None."""
    inputs = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, list)
    output.args = ([node for node in results if node not in inputs],)
    graph.recompile()
    return [inputs.get(node) for node in results]


def _keep_small_results(graph: fx.GraphModule) -> None:
    """Lets every result that much wider ones are computed from have memory of its own.

    Inductor would compute it anew inside their loops: a power of the step count at every coordinate.
    """
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        small = node.op == "call_function" and isinstance(value, Tensor) and not _is_view(node)
        if small and value.is_contiguous() and _widest(node) >= WIDER * max(value.numel(), 1):
            with graph.graph.inserting_after(node):
                # A view by strides needs memory to look at.
                view = torch.ops.aten.as_strided.default
                kept = graph.graph.call_function(view, (node, list(value.shape), list(value.stride())))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.recompile()


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _widest(node: fx.Node) -> int:
    """Numbers in the largest result computed from this one or from a view of it."""
    widest = 0
    for user in node.users:
        value = user.meta.get("val")
        if isinstance(value, Tensor):
            widest = max(widest, value.numel(), _widest(user) if _is_view(user) else 0)
    return widest


def _compiled_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The graph compiled, or an equal one that has been before."""
    kinds = tuple((value.shape, value.stride(), value.dtype, value.device) for value in inputs)
    key = graph.code, kinds, torch.get_num_threads()
    if key not in _compiled:
        from torch import _inductor  # imported here: it takes seconds

        _log.info("compiling a graph of %d operations", len(graph.graph.nodes) - len(inputs))
        # Inductor keeps on disk only what it has compiled in such a context.
        fake = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True))
        with tracing(TracingContext(fake)):
            _compiled[key] = _inductor.compile(graph, list(inputs))
    return _compiled[key]


def _nudged(value: Tensor) -> Tensor:
    """Numbers changed by one rounding each, up or down."""
    if not value.is_floating_point():
        return value
    signs = torch.arange(value.numel(), device=value.device).view(value.shape) % 2 * 2 - 1
    return value * (1 + signs * torch.finfo(value.dtype).eps)


def _agree(found: Tensor, expected: Tensor, nudged: Tensor) -> bool:
    """Whether a result is as near to the expected one as rounding lets it be.

    Adam's first update has the size of the rate at coordinates whose gradient is nothing but rounding, too, so an error
    may be as large as that of inputs that are changed by one rounding.
    """
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    one, other, third = (value.double().nan_to_num() for value in (found, expected, nudged))
    allowed = 1e3 * torch.finfo(expected.dtype).eps * other.norm() + 10 * (third - other).norm()
    return bool((found.isfinite() == expected.isfinite()).all()) and bool((one - other).norm() <= allowed)
