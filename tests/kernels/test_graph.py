"""Recording of pure functions and what happens to the recorded graph, without a compiler but for one test."""

import numpy as np
import pytest
import torch
from torch import _inductor, nn

from l2lopt.kernels import graph
from l2lopt.kernels.graph import CompiledFunction, NotCompiledError


def step(x, rates):
    return {"after": x - rates["lr"] * x.cos(), "handed on": (rates, x)}


def test_a_compiled_function_gives_what_the_function_gives():
    example = torch.ones(3, 1, dtype=torch.float64).expand(3, 2)  # one of other strides
    compiled = CompiledFunction(step, example, {"lr": torch.tensor(0.5)})
    x, rates = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2), {"lr": torch.tensor(2.0)}
    found, wanted = compiled(x, rates), step(x, rates)
    torch.testing.assert_close(found["after"], wanted["after"], rtol=1e-14, atol=1e-14)
    assert found["handed on"][0]["lr"] is rates["lr"]
    assert found["handed on"][1] is x


def test_repeated_calls_hand_the_carry_on(as_recorded):
    def step(carry, fixed, index):
        return carry["x"].sum(), {"x": carry["x"] * fixed + index, "count": carry["count"] + 1}

    carry = {"x": torch.tensor([1.0, 2.0]), "count": torch.tensor(0)}
    compiled = CompiledFunction(step, carry, torch.tensor(2.0), torch.tensor(1.0))
    found, after = compiled.repeat(carry, torch.tensor(2.0), torch.tensor([1.0, 0.0, 5.0]))
    assert found.item() == 16.0  # [1, 2] → [3, 5] → [6, 10]
    assert after["x"].tolist() == [17.0, 25.0]
    assert after["count"].item() == 3


def test_functions_that_differ_in_tensors_share_a_compilation(as_recorded):
    def scaled(rate):
        kept = torch.tensor(rate)
        return CompiledFunction(lambda x: x * kept + torch.tensor(rate), torch.ones(2))

    found = [scaled(rate)(torch.ones(2)) for rate in (0.5, 2.0)]
    assert len(as_recorded) == 1
    assert [values.tolist() for values in found] == [[1.0, 1.0], [4.0, 4.0]]
    CompiledFunction(lambda x: x * 3.0, torch.ones(2))
    CompiledFunction(lambda x: x * 3.0, torch.ones(3))
    CompiledFunction(lambda x: x * 3.0, torch.ones(3, dtype=torch.float64))
    assert len(as_recorded) == 4


def test_a_parameter_that_changes_in_place_is_seen(as_recorded):
    layer = nn.Linear(2, 1)
    compiled = CompiledFunction(layer, torch.ones(2))
    with torch.no_grad():
        layer.weight.fill_(3.0)
        layer.bias.fill_(1.0)
    assert compiled(torch.ones(2)).tolist() == [7.0]


def test_gradients_are_recorded(as_recorded):
    compiled = CompiledFunction(torch.func.grad(lambda x: (x**3).sum()), torch.ones(2))
    assert compiled(torch.tensor([1.0, 2.0])).tolist() == [3.0, 12.0]


@pytest.mark.parametrize("function", [lambda x: x if x.sum() > 0 else -x, lambda x: x * float(x.sum())])
def test_python_that_looks_at_numbers_is_refused(as_recorded, function):
    with pytest.raises(NotCompiledError, match=r"Error|Exception"):
        CompiledFunction(function, torch.ones(2))


def test_a_function_of_too_many_operations_is_refused_before_it_is_recorded(as_recorded, monkeypatch):
    """Operations as they are made count, those of gradients too."""

    def powers(x):
        return x.cos() * x * x

    monkeypatch.setattr(graph, "MOST_OPERATIONS", 3)
    CompiledFunction(powers, torch.ones(2))
    monkeypatch.setattr(graph, "MOST_OPERATIONS", 2)
    with pytest.raises(NotCompiledError, match=r"^3 operations are more than the 2 compiled$"):
        CompiledFunction(powers, torch.ones(2))
    with pytest.raises(NotCompiledError, match="operations"):
        CompiledFunction(torch.func.grad(lambda x: x.cos().sum()), torch.ones(2))
    assert len(as_recorded) == 1


def test_a_compiler_that_is_missing_or_wrong_is_told(as_recorded, monkeypatch):
    def missing(recorded, inputs):
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(_inductor, "compile", missing)
    with pytest.raises(NotCompiledError, match=r"^RuntimeError: no compiler$"):
        CompiledFunction(torch.cos, torch.ones(2))
    monkeypatch.setattr(_inductor, "compile", lambda recorded, inputs: lambda x: [x.sin()])
    with pytest.raises(NotCompiledError, match="other numbers"):
        CompiledFunction(torch.cos, torch.ones(2))


def test_what_is_computed_once_stays_out_of_wide_loops(as_recorded):
    """A power of the step count has memory of its own; a product as wide as its users has none."""

    def function(x, step):
        wide = x * 2
        return wide * (0.9**step)

    example = torch.ones(64), torch.tensor(3)
    CompiledFunction(function, *example)
    (recorded,) = as_recorded
    kept = recorded.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    assert [node.args[0].target.overloadpacket for node in kept] == [torch.ops.aten.pow]
    torch.testing.assert_close(
        CompiledFunction(function, *example)(torch.ones(64), torch.tensor(1)), torch.full((64,), 1.8)
    )


def test_constants_get_no_memory_of_their_own(as_recorded):
    """Inductor gives a constant strides of its own; a small result of a kept one is kept all the same."""

    def function(x, step):
        constant, power = torch.full((2,), 3.0).exp(), 0.9**step
        return x * constant * torch.ones_like(power).exp() * power * power.cos()

    CompiledFunction(function, torch.ones(64, 2), torch.tensor(3))
    kept = as_recorded[0].graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    assert [node.args[0].target.overloadpacket for node in kept] == [torch.ops.aten.pow, torch.ops.aten.cos]


@pytest.mark.parametrize("rows", [1, 2])
def test_parts_of_a_small_result_are_the_right_ones(rows):
    """A part of a single row is contiguous, but does not begin where its memory does."""

    def function(groups, values):
        sizes = (0.9**groups / (values.view(rows, 4, 16).square().mean(-1) + 1e-3).sqrt()).split(1, dim=-1)
        return torch.cat([size.expand(rows, 16) for size in sizes], -1) * values

    CompiledFunction(function, torch.rand(rows, 4), torch.randn(rows, 64))


def weighted_by_a_list(x, keep):
    return x * torch.tensor([1.0 + value for value in keep.tolist()])


def of_those_kept(x, keep):
    return x[keep > 0].square().sum()


def over_their_number(x, keep):
    return x.sum() / len(x[keep > 0])


def counted_by_numpy(x, keep):
    return x * torch.from_numpy(np.bincount(keep.numpy(), minlength=3)).to(x.dtype)


def of_the_values_there_are(x, keep):
    return x.sum() * len(keep.unique())


DEPENDENT = [weighted_by_a_list, of_those_kept, over_their_number, counted_by_numpy, of_the_values_there_are]


@pytest.mark.parametrize("function", DEPENDENT)
@pytest.mark.parametrize("derive", [False, True])
def test_what_depends_on_the_numbers_of_whole_ones_is_refused(as_recorded, function, derive):
    """A nudge leaves them as they are, so that the comparison on the example would not see it."""
    made = torch.func.grad(lambda x, keep: function(x, keep).sum()) if derive else function
    with pytest.raises(NotCompiledError):
        CompiledFunction(made, torch.ones(3), torch.tensor([0, 1, 2]))
    assert as_recorded == []


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_library_that_a_kill_has_cut_short_is_made_anew(tmp_path, error):
    cut, whole = tmp_path / "cut.so", tmp_path / "whole.so"
    cut.touch()
    whole.touch()

    def compiled(path):
        if path.exists():
            raise error(f"{path}: file too short")
        return "made"

    assert graph._without_cut_files(lambda: compiled(cut)) == "made"
    assert whole.exists()


def test_a_library_that_is_not_there_or_no_better_anew_is_told_of(tmp_path):
    path, tries = tmp_path / "whole.so", []

    def compiled(said):
        tries.append(said)
        path.touch()
        raise ImportError(said)

    for said, count in (("libgomp.so.1: cannot open", 1), ("/gone.so: no file", 1), (f"{path}: undefined symbol", 2)):
        tries.clear()
        with pytest.raises(ImportError, match=said):
            graph._without_cut_files(lambda said=said: compiled(said))
        assert len(tries) == count
