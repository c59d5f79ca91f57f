"""Pure functions of tensors as one compiled graph: PyTorch's operations, recorded once and compiled by inductor."""

import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from l2lopt.core.types import Carry

_log = logging.getLogger("l2lopt")
WIDER = 16
"""How many times as many numbers what is computed from a tensor must have for the tensor to get memory of its own."""
MOST_OPERATIONS = 2000
"""Operations of a function that is compiled, at most: so many take about a minute, and a long recurrence far more."""
_FILLED = {getattr(torch.ops.aten, f"{name}_like").default for name in ("ones", "zeros", "full")}
"""Operations that give a constant whatever numbers they are given."""
_compiled: dict[Any, Callable[..., Any]] = {}
"""Graph, its inputs' kinds and the number of threads → compiled function."""


class NotCompiledError(Exception):
    """A function that cannot be compiled here; the message says why, in a line."""


class CompiledFunction:
    """A pure function of pytrees of tensors, compiled for arguments of an example's shapes, dtypes and device.

    Its operations are recorded on the example as they come, through `torch.func` and autograd, whatever Python decides
    on the way: a function whose Python looks at numbers is refused. Tensors that it closes over, such as rates, are
    inputs of the graph, so functions that differ in nothing else share one compilation; inductor keeps compilations on
    disk, too. Nothing is compiled unless the result on the example equals the function's own up to rounding.

    Cost: on a CPU some 20 to 40 ms an operation, the first time on a machine; else a recording, 1 ms an operation. The
    steps of a recurrence are operations of their own, so that a window of 35 tokens has thousands: more than
    `MOST_OPERATIONS` are refused before anything is recorded.

    Args:
        function: Pure function of tensors. What it closes over stays as it is.
        example: Arguments like those to come.

    Raises:
        NotCompiledError: If there is no compiler, Python looks at numbers, there are too many operations, or the
            results differ.

    Example:
        >>> import torch
        >>> def step(x, rate):
        ...     return x - rate * x.cos()
        >>> compiled = CompiledFunction(step, torch.ones(3), torch.tensor(0.5))
        >>> bool((compiled(torch.zeros(3), torch.tensor(2.0)) == -2).all())
        True
    """

    @torch.no_grad()
    def __init__(self, function: Callable[..., Any], *example: Any) -> None:
        from torch._subclasses import FakeTensorMode  # neither at the start of every command
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, structure = pytree.tree_flatten(example)
        inputs = _contiguous(leaves)

        def flat(*tensors: Tensor) -> list[Tensor]:
            results, self._outputs = pytree.tree_flatten(function(*pytree.tree_unflatten(tensors, structure)))
            return results

        try:
            # First of all as it is, so that what layouts make once and keep is there: each recording then has it alike.
            expected, others = flat(*inputs), [_nudged(value) for value in inputs]
            with _Counted() as counted:
                nudged = flat(*others)
            if counted.operations > MOST_OPERATIONS:
                most = f"{MOST_OPERATIONS:,} compiled"
                raise NotCompiledError(f"{counted.operations:,} operations are more than the {most}")
            # On tensors without numbers: `tolist`, or a size that depends on them, would be a constant of the graph.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            without = [fake.from_tensor(value) for value in inputs]
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*without)
            self._constants = _lift_constants(graph)
            self._handed_on = _drop_handed_on(graph)
            _keep_small_results(graph)
            self._run = _compiled_graph(graph, [*inputs, *self._constants])
        except NotCompiledError:
            raise
        except Exception as error:  # a compiler may fail in any way, and the function works without it
            said = str(error).strip().splitlines()
            raise NotCompiledError(f"{type(error).__name__}{': ' if said else ''}{said[0] if said else ''}") from error
        if not all(map(_agree, self._flat(inputs), expected, nudged)):
            raise NotCompiledError("the compiled function gives other numbers")

    def __call__(self, *arguments: Any) -> Any:
        """The result for arguments like the example's."""
        return pytree.tree_unflatten(self._flat(pytree.tree_leaves(arguments)), self._outputs)

    def repeat(self, carry: Any, fixed: Any, changing: Iterable[Tensor]) -> Any:
        """The result after several calls, of a function (carry, fixed, changing) → (result, carry).

        Args:
            carry: Carry before the first call.
            fixed: Argument of all calls.
            changing: Argument of each call, a tensor.
        """
        leaves, rest = pytree.tree_leaves(carry), pytree.tree_leaves(fixed)
        found: list[Tensor] = []
        for each in changing:
            found = self._flat([*leaves, *rest, each])
            leaves = found[len(found) - len(leaves) :]
        return pytree.tree_unflatten(found, self._outputs)

    def _flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = [*_contiguous(tensors), *self._constants]
        made = iter(self._run(*known))
        return [next(made) if source is None else known[source] for source in self._handed_on]


class _Counted(TorchDispatchMode):
    """Counts the operations that are made within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says no types there
        self.operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return operation(*args, **(kwargs or {}))


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
    return constants


def _drop_handed_on(graph: fx.GraphModule) -> list[int | None]:
    """Takes the inputs that the graph hands on as they are out of its outputs: for each output that input, or None."""
    inputs = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, list)
    output.args = ([node for node in results if node not in inputs],)
    return [inputs.get(node) for node in results]


def _keep_small_results(graph: fx.GraphModule) -> None:
    """Lets every result that much wider ones are computed from have memory of its own.

    Inductor would compute it anew inside their loops: a power of the step count at every coordinate. Constants are left
    to it: it knows that all their numbers are one, and gives them strides of their own.
    """
    changing: set[fx.Node] = set()
    for node in list(graph.graph.nodes):
        if node.target not in _FILLED and (node.op == "placeholder" or not changing.isdisjoint(node.all_input_nodes)):
            changing.add(node)
        value = node.meta.get("val")
        small = node in changing and node.op == "call_function" and isinstance(value, Tensor) and not _is_view(node)
        if small and value.is_contiguous() and _widest(node) >= WIDER * max(value.numel(), 1):
            with graph.graph.inserting_after(node):
                # A view by strides needs memory to look at.
                view = torch.ops.aten.as_strided.default
                kept = graph.graph.call_function(view, (node, list(value.shape), list(value.stride())))
                changing.add(kept)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.recompile()


def _is_view(node: fx.Node) -> bool:
    """Whether a result lies in the memory of another, maybe as one of several parts."""
    if node.target is operator.getitem:
        (source, *_) = node.args
        return isinstance(source, fx.Node) and _is_view(source)
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _widest(node: fx.Node) -> int:
    """Numbers in the largest result computed from this one or from a view of it."""
    widest = 0
    for user in node.users:
        value = user.meta.get("val")
        widest = max(widest, value.numel() if isinstance(value, Tensor) else 0, _widest(user) if _is_view(user) else 0)
    return widest


def _compiled_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """The graph compiled, or an equal one that has been before."""
    kinds = tuple((value.shape, value.stride(), value.dtype, value.device) for value in inputs)
    key = graph.code, kinds, torch.get_num_threads()
    if key not in _compiled:
        # Imported here: inductor takes seconds, and symbolic shapes, which nothing here has, half a one.
        from torch import _inductor
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        _log.info("compiling a graph of %d operations", len(graph.graph.nodes) - len(inputs))
        # Inductor keeps on disk only what it has compiled in such a context.
        fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        with tracing(TracingContext(fake)):
            # Inputs made fake here have the sizes that they have; those that inductor makes have symbols for them.
            static: list[Any] = [fake.from_tensor(value, static_shapes=True) for value in inputs]
            _compiled[key] = _without_cut_files(lambda: _inductor.compile(graph, static))
    return _compiled[key]


def _without_cut_files(compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What inductor compiles, after the libraries that a kill has cut short are deleted.

    It looks for a library by its name, and makes none anew that is there. Without this a resumed run would stay eager.
    """
    deleted = set[str]()
    while True:
        try:
            return compiled()
        except (ImportError, OSError) as error:  # "FOLDER/NAME.so: file too short"
            found = re.match(r"(\S+\.so): ", str(error))
            if found is None or found[1] in deleted or not os.path.isfile(found[1]):
                raise
            deleted.add(found[1])
            os.unlink(found[1])


def _contiguous(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in the strides that the graph is compiled for, whatever an expanded or transposed one came with."""
    return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]


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


def in_order(after: Carry, before: Carry) -> Carry:
    """The next carry with its names in the order of the last, so that one step's result is the next one's argument."""
    groups = {kind: {name: after.state.groups[kind][name] for name in own} for kind, own in before.state.groups.items()}
    coordinates = {name: after.state.coordinates[name] for name in before.state.coordinates}
    shared = {name: after.state.shared[name] for name in before.state.shared}
    state = after.state._replace(coordinates=coordinates, groups=groups, shared=shared)
    return Carry(after.params, {name: after.aux[name] for name in before.aux}, state)
