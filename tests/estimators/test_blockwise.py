"""The blockwise unroll: equal to the tape's first order, and right on average when it samples coordinates."""

import math
from contextlib import contextmanager
from functools import partial
from itertools import product

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import (
    BLOCKWISE,
    LEARNED,
    MIXTURES,
    crossed,
    each,
    means_of_params,
    problem,
    with_means_constant,
)

from l2lopt.core import memory
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.core.memory import available_memory
from l2lopt.core.seeding import generator
from l2lopt.core.types import OptimiserState
from l2lopt.estimators import Backprop, Blockwise
from l2lopt.estimators.coordinate_sample import stratified
from l2lopt.estimators.locality import check_locality
from l2lopt.estimators.memory_plan import activations
from l2lopt.estimators.record import VectorPool

each_blockwise = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in BLOCKWISE.items()])
DIRECTION = "coordinatewise direction-and-magnitude"


@each_blockwise
@pytest.mark.parametrize("objective", ["loss", pytest.param("log-loss", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "mixture"), crossed(LEARNED, MIXTURES))
def test_meta_gradient_is_exact(make, objective, rule, mixture):
    """Against the `torch.func` oracle; means that depend on θ are constants."""
    task = problem(rule, mixture=mixture)
    task = with_means_constant(task, means_of_params(rule))
    laws.assert_meta_gradient_is_exact(make(objective=objective), task, 1, objective)


@pytest.mark.parametrize("rule", each(LEARNED))
def test_points_where_the_tape_points(rule):
    """Whatever it takes as a constant."""
    task = problem(rule)
    ours, tape = (
        torch.cat([piece.flatten() for piece in laws.run(estimator, task).gradient.values()])
        for estimator in (Blockwise(), Backprop())
    )
    assert torch.cosine_similarity(ours, tape, dim=0) > 0.98


@pytest.mark.parametrize("optimisee", ["quadratic", "module with batch norm"])
@pytest.mark.parametrize("truncation", [None, 1, 2, 3])
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_equals_the_tape(optimisee, truncation, seeds):
    task = problem(DIRECTION, optimisee, seeds=seeds, length=5)
    ours, tape = laws.run(Blockwise(truncation, block=7), task), laws.run(Backprop(window=truncation), task)
    laws.assert_close(vars(ours), vars(tape), 1e-10)


def test_a_mean_that_depends_on_the_parameters_is_a_constant_and_the_log_says_so(caplog):
    label = f"{DIRECTION} of lstm with every input"
    task = problem(label)
    with caplog.at_level("INFO", "l2lopt"):
        ours = laws.run(Blockwise(), task)
    assert "taken as constants, see its docstring: tensors.direction" in caplog.text
    whole = laws.run(Backprop(), task)
    laws.assert_close(ours.value, whole.value)
    laws.assert_close(ours.gradient, laws.run(Backprop(), with_means_constant(task)).gradient)
    assert any((ours.gradient[name] - whole.gradient[name]).abs().max() > 1e-6 for name in task.phi)


def test_a_record_in_bfloat16_is_what_the_optimiser_sees():
    """The run is that of rounded gradients, and the meta-gradient is that run's."""
    task = problem("coordinatewise gated")

    def rounded(phi, grads, state, params, *, loss=None):
        return task.update(phi, grads.bfloat16().double(), state, params, loss=loss)

    ours = laws.run(Blockwise(record="bfloat16"), task)
    tape = laws.run(Backprop(), task._replace(update=rounded))
    laws.assert_close([ours.value, ours.carry, ours.losses], [tape.value, tape.carry, tape.losses])
    laws.assert_close(ours.gradient, tape.gradient, 2e-2)  # the sources are rounded too


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coordinatewise additive", DIRECTION])
@pytest.mark.parametrize("seeds", [3, (3, 4)], ids=["run", "rows"])
def test_the_mean_over_samples_of_coordinates_is_the_whole(rule, seeds):
    task = problem(rule, "module with batch norm", seeds=seeds, length=2)
    laws.assert_samples_average_to_the_whole(partial(Blockwise, share=0.25), Blockwise(), task, 300)


def test_a_sample_leaves_the_run_as_it_is():
    task = problem(DIRECTION)
    sampled = Blockwise(share=0.3)
    ours = sampled(*task[:4], task.steps, sampled.init(task.carry, task.phi, 0))
    whole = laws.run(Blockwise(), task)
    laws.assert_same([ours.value, ours.carry, ours.losses], [whole.value, whole.carry, whole.losses])


def test_a_sample_without_a_state_is_refused():
    task = problem(length=1)
    with pytest.raises(UserError, match=r"estimator 'blockwise': .* pass what init gives"):
        Blockwise(share=0.3)(*task)


def test_every_window_draws_anew_and_the_state_tells_which():
    task, unroll = problem(length=4), Blockwise(2, share=0.3)
    state = unroll.init(task.carry, task.phi, 7)
    result = unroll(*task[:4], task.steps, state)
    assert result.state.tolist() == [7, 2]
    pieces = laws.in_pieces(unroll, task, 2)
    assert pieces[-1].state.tolist()[1] == 2
    again = unroll(*task[:4], task.steps, state)
    laws.assert_same(again.gradient, result.gradient)


@given(st.lists(st.integers(0, 40), max_size=6), st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_samples_are_stratified(sizes, share):
    layout = Layout(tuple(f"p{k}" for k in range(len(sizes))), tuple((size,) for size in sizes))
    places, weights = stratified(layout, share, generator("test", 1))
    sample = layout.select(places)
    assert sample.names == layout.names
    assert places.tolist() == sorted(set(places.tolist()))
    for size, count, own in zip(sizes, sample.sizes, sample.split(weights), strict=True):
        assert (count > 0) == (size > 0)
        assert min(size, 2) <= count <= max(share * size + 1, 2)
        assert share * size <= count
        assert own.sum().item() == pytest.approx(size)
    tensors = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    for number, part in enumerate(sample.split(places)):
        assert tensors[part].eq(number).all()


@pytest.mark.parametrize("options", [{"window": 0}, {"block": 0}, {"share": 0.0}, {"share": 1.5}])
def test_mistakes(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Blockwise(**options)


def test_vectors_are_used_again():
    task, unroll = problem(), Blockwise()
    laws.run(unroll, task)
    before = [row.data_ptr() for row in unroll.rows.made]
    laws.run(unroll, task)
    assert before == [row.data_ptr() for row in unroll.rows.made]
    other = problem("coordinatewise gated", "quadratic")
    laws.assert_same(vars(laws.run(unroll, other)), vars(laws.run(Blockwise(), other)))


def test_the_plan_counts_what_will_be_kept():
    """A vector for each gradient and source that the window's record then holds, and the bytes of each."""
    for mixture, record, share in product(MIXTURES, ["full", "bfloat16"], [1.0, 0.3]):
        task = problem(mixture=mixture, seeds=(0, 1), length=6)
        unroll = Blockwise(window=4, record=record, share=share)
        plan = unroll.plan(*task[:4], task.steps, 6)
        unroll(*task[:4], task.steps, unroll.init(task.carry, task.phi, 0))
        kept = unroll.rows.made
        assert plan.window == 4
        assert plan.vectors - 1 <= len(kept) <= plan.vectors  # the last source only where the window closes
        assert {row.numel() * row.element_size() for row in kept} == {plan.vector}
        assert plan.seconds > 0
        assert "free" in str(plan)


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    alone = available_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_memory(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.2)


def test_a_plan_that_does_not_fit_names_the_window_that_does(monkeypatch):
    task = problem()
    plan = Blockwise().plan(*task[:4], task.steps, 240)
    monkeypatch.setattr("l2lopt.estimators.blockwise.available_memory", lambda _: plan.state + 480 * plan.vector)
    with pytest.raises(UserError, match="truncation to at most 239,"):  # two vectors a step, and one
        Blockwise().plan(*task[:4], task.steps, 240)
    assert Blockwise(window=239).plan(*task[:4], task.steps, 300).window == 239
    Blockwise(spill="/nowhere").plan(*task[:4], task.steps, 240)  # the record lies in files
    monkeypatch.setattr("l2lopt.estimators.blockwise.available_memory", lambda _: 10)
    with pytest.raises(UserError, match="even one step"):
        Blockwise().plan(*task[:4], task.steps, 4)


def test_a_plan_whose_replay_is_too_much_names_a_window_that_fits(monkeypatch):
    """What the replay of a block keeps is less in a shorter window too."""
    task = problem()
    long, short = (Blockwise(window=window).plan(*task[:4], task.steps, 10**5) for window in (10**5, 100))
    assert short.memory < long.state
    monkeypatch.setattr("l2lopt.estimators.blockwise.available_memory", lambda _: short.memory)
    with pytest.raises(UserError, match="truncation to at most 100,"):
        Blockwise().plan(*task[:4], task.steps, 10**5)


def test_the_plan_counts_what_a_gradient_keeps():
    """Of a product in a sigmoid: the weight, the input and the output, each once."""
    weight, x = torch.zeros(300, 200, requires_grad=True), torch.zeros(100, 300)
    with activations() as held:
        torch.sigmoid(x @ weight).square().sum()
    assert sum(held) == 4 * (100 * 300 + 100 * 200)


def test_a_sparse_constant_is_not_counted():
    """Of the product with it autograd keeps the constant, whose memory is the model's."""
    features, adjacency = torch.zeros(4, 3, requires_grad=True), torch.eye(4).to_sparse()
    with activations() as held:
        torch.sparse.mm(adjacency, features).square().sum()
    assert sum(held) == 4 * 4 * 3


def test_a_loss_with_a_gradient_of_its_own_is_planned():
    """`torch.func`, as in physics-informed losses, knows no hooks of saved tensors."""
    task = problem(seeds=0)

    def steep(params, aux, batch):
        derivative = torch.func.grad(lambda scale: task.loss(scale * params, aux, batch)[0])
        return derivative(torch.ones((), dtype=params.dtype)).square(), aux

    plain, plan = (Blockwise().plan(task[0], loss, *task[2:4], task.steps, 4) for loss in (task.loss, steep))
    assert (plan.window, plan.vector, plan.vectors) == (plain.window, plain.vector, plain.vectors)

    def wrong(params, aux, batch):
        raise RuntimeError("a mistake of the loss")

    with pytest.raises(RuntimeError, match="a mistake of the loss"):
        Blockwise().plan(task[0], wrong, *task[2:4], task.steps, 4)


def test_the_plans_state_has_what_a_gradient_keeps(monkeypatch):
    task = problem()

    @contextmanager
    def many():
        yield [10**9]

    before = Blockwise().plan(*task[:4], task.steps, 4).state
    monkeypatch.setattr("l2lopt.estimators.blockwise.activations", many)
    monkeypatch.setattr("l2lopt.estimators.blockwise.available_memory", lambda _: 10**10)
    assert 10**9 - before <= Blockwise().plan(*task[:4], task.steps, 4).state - before < 10**9


@pytest.mark.parametrize(("limit", "left"), [("max", math.inf), ("1000", 1000 - 400 + 150)])
def test_a_containers_limit_counts(tmp_path, limit, left):
    for name, text in {
        "memory.max": limit,
        "memory.current": "400",
        "memory.stat": "anon 9\ninactive_file 150",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    assert memory._allowed(tmp_path) == left
    assert memory._allowed(tmp_path / "none") == math.inf


@pytest.mark.parametrize("count", [16_777_216, 16_777_220, 124_439_808])
def test_the_places_of_a_check_are_those_of_the_vector_whatever_its_size(count):
    """Float32 has no whole numbers from 2²⁴ on: the last place would be one too far."""
    values = torch.zeros(1).expand(count)
    state = OptimiserState(Layout(("w",), ((count,),)), {}, {}, {})
    assert check_locality(state, values, values, torch.zeros(())) is not None


def test_a_folder_for_the_record_that_cannot_be_made_ends_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    rows = VectorPool(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"spill = '.*file': expected a folder to write in, found .*; name another"):
        rows.keep(torch.ones(3), torch.float32)
