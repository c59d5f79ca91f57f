"""The laws that every implementation of a contract keeps, as named assertions."""

from collections import Counter
from typing import Any

import oracles
import pytest
import torch
from implementations import Problem, normal
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from l2lopt.core.layout import Layout
from l2lopt.core.types import Carry, OptimiserState, stack
from l2lopt.estimators.exchange import Playback, Recorder
from l2lopt.estimators.record import copies_of
from l2lopt.optimisee import BatchesOfRows, Optimisee, batch_rows, evaluate_rows, flat_loss, init_rows


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Equal pytrees: each leaf errs by at most `tolerance` times the leaf's largest number; 0 is bit for bit."""
    (actual, structure), (expected, wanted) = pytree.tree_flatten(actual), pytree.tree_flatten(expected)
    assert structure == wanted
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, Tensor):
            largest = e.double().nan_to_num(posinf=0, neginf=0).abs().max().item() if e.numel() else 0.0
            torch.testing.assert_close(a, e, rtol=0, atol=tolerance * largest, equal_nan=True)
        else:
            assert a == e


def assert_same(actual: Any, expected: Any) -> None:
    """Equal pytrees, bit for bit."""
    assert_close(actual, expected, 0.0)


def clone(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def as_lists(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.tolist, tree)


# Cells


def columns(cell: Any, count: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs [N, count] and a state such as the cell has after a step."""
    x = normal(cell.input_size, count, seed=10)
    state = cell(normal(cell.input_size, count, seed=11), cell.initial_state(x))[1]
    return x, {name: value.detach() for name, value in state.items()}


def assert_follows_its_equations(cell: Any, oracle: Any) -> None:
    """Three steps from the initial state, column by column, equal the scalar loop over the printed equations."""
    xs = normal(3, cell.input_size, 2, seed=12)
    state = cell.initial_state(xs[0])
    expected = [as_lists({name: value[:, k] for name, value in state.items()}) for k in range(2)]
    for x in xs:
        h, state = cell(x, state)
        for k in range(2):
            wanted, expected[k] = oracle(as_lists(dict(cell.named_parameters())), x[:, k].tolist(), expected[k])
            torch.testing.assert_close(h[:, k].tolist(), wanted, rtol=1e-12, atol=1e-14)
            for name, value in expected[k].items():
                torch.testing.assert_close(state[name][:, k].tolist(), value, rtol=1e-12, atol=1e-14)


def assert_columns_do_not_see_each_other(cell: Any, index: list[int]) -> None:
    """Any choice of columns, in any order, gives the same choice of outputs; a poisoned column poisons no other."""
    x, state = columns(cell)
    whole = cell(x, state)
    chosen = cell(x[:, index], {name: value[:, index] for name, value in state.items()})
    assert_close(chosen, pytree.tree_map(lambda t: t[:, index], whole))
    poison = torch.ones(6, dtype=torch.float64).index_fill(0, torch.tensor([1]), float("nan"))
    poisoned = cell(x * poison, {name: value * poison for name, value in state.items()})
    others = [0, 2, 3, 4, 5]
    assert_close(pytree.tree_map(lambda t: t[:, others], poisoned), pytree.tree_map(lambda t: t[:, others], whole))


def assert_trailing_shape_is_kept(cell: Any, shape: tuple[int, ...]) -> None:
    """[N, *shape] gives what its columns in a row give, reshaped; so does the initial state."""
    x, state = columns(cell, torch.Size(shape).numel())

    def reshape(tree: Any) -> Any:
        return pytree.tree_map(lambda t: t.reshape(t.shape[0], *shape), tree)

    assert_same(cell.initial_state(reshape(x)), reshape(cell.initial_state(x)))
    assert_close(cell(reshape(x), reshape(state)), reshape(cell(x, state)))


def assert_cell_changes_nothing(cell: Any) -> None:
    arguments = columns(cell)
    before = clone(arguments)
    assert_same(cell(*arguments), cell(*arguments))
    assert_same(arguments, before)


def assert_gradients_are_right(cell: Any, batch: int, steps: int) -> None:
    """Of all outputs along `steps` with respect to inputs, state and every parameter, against finite differences.

    In full for short runs, along random directions for long ones.
    """
    state = columns(cell, batch)[1]
    xs = normal(steps, cell.input_size, batch, seed=13)
    phi = {name: value.detach() for name, value in cell.named_parameters()}
    leaves, structure = pytree.tree_flatten((phi, xs, state))

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        phi, xs, state = pytree.tree_unflatten(leaves, structure)
        outputs = []
        for x in xs:
            h, state = functional_call(cell, phi, (x, state))
            outputs.append(h)
        return torch.stack(outputs) if outputs else xs * 1, *state.values()

    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=steps > 1)


def assert_cell_maps(cell: Any) -> None:
    """`vmap` over parameters, inputs and states at once equals one call after the other."""
    x, state = columns(cell)
    phi = {name: value.detach() for name, value in cell.named_parameters()}
    rows = [pytree.tree_map(lambda t, s=s: s * t, (phi, x, state)) for s in (1.0, -0.5)]

    def step(phi: Any, x: Tensor, state: Any) -> Any:
        return functional_call(cell, phi, (x, state))

    assert_close(vmap(step)(*stack(rows)), stack([step(*row) for row in rows]))


# Optimisers

LAYOUT = Layout(("matrix", "vector"), ((2, 2), (3,)))


def loss_at(params: Tensor) -> Tensor:
    """Some loss of each row, for rules that look at it."""
    return params.detach().square().sum(-1)


def roll(update: Any, state: Any, gradients: Tensor, params: Tensor) -> tuple[list[Tensor], Any]:
    """The updates along `gradients` [T, ..., n] and the last state."""
    updates = []
    for g in gradients:
        change, state = update(g, state, params, loss=loss_at(params))
        params = params + change
        updates.append(change.detach())
    return updates, pytree.tree_map(Tensor.detach, state)


def assert_optimiser_changes_nothing(optimiser: Any) -> None:
    g, params = normal(2, 7)
    state = roll(optimiser.update, optimiser.init(LAYOUT, like=g), normal(2, 7, seed=1), params)[1]
    before = clone((g, state, params, optimiser.phi()))
    assert_same(*(optimiser.update(g, state, params, loss=loss_at(params)) for _ in range(2)))
    assert_same((g, state, params, optimiser.phi()), before)


def assert_batch_rows_are_separate_runs(optimiser: Any) -> None:
    """Rows, separate runs and `vmap` over separate states give the same updates and the same coordinates."""
    gradients, params = normal(4, 3, 7), normal(3, 7, seed=1)
    single = optimiser.init(LAYOUT, like=params)
    rows, state = roll(optimiser.update, optimiser.init(LAYOUT, (3,), like=params), gradients, params)
    runs = [roll(optimiser.update, single, gradients[:, s], params[s]) for s in range(3)]

    def update(g: Tensor, state: Any, params: Tensor, loss: Tensor) -> Any:
        return optimiser.update(g, state, params, loss=loss)

    def mapped_update(g: Tensor, state: Any, params: Tensor, *, loss: Tensor) -> Any:
        return vmap(update)(g, state, params, loss)  # vmap takes a keyword's value whole, not row by row

    mapped, mapped_state = roll(mapped_update, stack([single] * 3), gradients, params)
    assert_close(rows, stack([updates for updates, _ in runs]))
    assert_close(mapped, rows)
    for name, value in state.coordinates.items():
        assert_close(value, torch.stack([last.coordinates[name] for _, last in runs], dim=-2))
        assert_close(mapped_state.coordinates[name].movedim(0, -2), value)
    if "skipped" in state.shared:
        assert state.shared["skipped"].shape == (3,)


def assert_permutes_with_its_coordinates(optimiser: Any) -> None:
    """Permuted coordinates get permuted updates.

    Any permutation, where coordinates meet nowhere; those within a tensor, where they meet in its means; those of a
    matrix's rows and of its columns, where they meet in rows, columns or functions of whole tensors.
    """
    gradients, params, recorder = normal(4, 7), normal(7, seed=1), Recorder(LAYOUT.exchange)
    state, meeting = optimiser.init(LAYOUT, like=params), recorder.begin()
    optimiser.update(gradients[0], state._replace(layout=LAYOUT.meeting(recorder)), params, loss=loss_at(params))
    across, within, lines = [5, 2, 6, 0, 4, 1, 3], [2, 0, 3, 1, 6, 4, 5], [3, 2, 1, 0, 6, 4, 5]
    meets = optimiser.groupings or not optimiser.coordinatewise
    in_lines = meeting.wholes or {"rows", "columns"} & {*optimiser.groupings}
    order = torch.tensor(lines if in_lines else within if meets else across)
    plain = roll(optimiser.update, state, gradients, params)[0]
    permuted = roll(optimiser.update, state, gradients[:, order], params[order])[0]
    assert_close(permuted, [u[order] for u in plain])


def assert_is_local(optimiser: Any) -> None:
    """A slice of the coordinates, updated by itself on what the whole's have met in, is that part of the update."""
    layout, kept = Layout(("a", "b", "c"), ((2, 2), (3,), (2,))), torch.tensor([1, 3, 4])
    gradients, params, losses = normal(4, 2, 9), normal(2, 9, seed=1), normal(4, 2, seed=2)
    state = optimiser.init(layout, (2,), like=params)
    recorder = Recorder(layout.exchange)
    part = layout.select(kept)
    groups = {
        kind: {name: copies_of(part, kind, value) for name, value in values.items()}
        for kind, values in state.groups.items()
    }
    block = OptimiserState(part, {k: v[..., kept] for k, v in state.coordinates.items()}, groups, state.shared)
    for grads, loss in zip(gradients, losses, strict=True):
        meeting = recorder.begin()
        update, state = optimiser.update(grads, state._replace(layout=layout.meeting(recorder)), params, loss=loss)
        meeting = meeting._replace(wholes={name: value[..., kept] for name, value in meeting.wholes.items()})
        block = block._replace(layout=part.meeting(Playback(meeting, {})))
        piece, block = optimiser.update(grads[:, kept], block, params[:, kept], loss=loss)
        assert_close(piece, update[:, kept])
        assert_close(block.coordinates, {name: value[..., kept] for name, value in state.coordinates.items()})
        met = {key.partition(".")[0] for key in (*meeting.means, *meeting.controls)}
        assert met <= set(optimiser.groupings)
        params = params + update


def assert_state_keeps_its_structure(optimiser: Any) -> None:
    """The same leaves in the same order after an update, so that a checkpoint can put them back."""
    params = normal(7)
    state = optimiser.init(LAYOUT, like=params)
    after = optimiser.update(normal(7, seed=1), state, params, loss=loss_at(params))[1]
    assert pytree.tree_structure(after) == pytree.tree_structure(state)
    assert [leaf.shape for leaf in pytree.tree_leaves(after)] == [leaf.shape for leaf in pytree.tree_leaves(state)]


def assert_comes_to_rest(optimiser: Any, fades: bool = True) -> None:
    """Without a gradient nothing moves: not before the first one, and less and less (if it `fades`) after the last.

    A row of the matrix and the whole vector have none. θ stays 0, so that no decay is in the updates.
    """
    silent, params = [2, 3, 4, 5, 6], torch.zeros(7, dtype=torch.float64)
    gradients = normal(300, 7)
    gradients[3:, silent] = 0.0
    start = optimiser.init(LAYOUT, like=params)

    def updates(gradients: Tensor) -> Tensor:
        state, found = start, []
        with torch.no_grad():
            for g in gradients:
                update, state = optimiser.update(g, state, params, loss=loss_at(params))
                found.append(update)
        return torch.stack(found)

    never = updates(gradients[:5].index_fill(-1, torch.tensor(silent), 0.0))
    assert never[:, silent].eq(0).all()
    assert never[:, :2].ne(0).all()
    moved = updates(gradients)[:, silent].abs().amax(-1)
    assert moved[:3].min() > 0
    assert not fades or moved[-1] < 1e-3 * moved[:3].min()


def assert_knows_its_end(optimiser: Any) -> None:
    """It steps otherwise towards another end where it says that it knows its end, and only there."""
    gradients, params = normal(4, 7), normal(7, seed=1)
    runs = [
        roll(optimiser.update, optimiser.init(LAYOUT, like=params, total_steps=total), gradients, params)[0]
        for total in (5, 9)
    ]
    assert optimiser.knows_end == any(not torch.equal(one, other) for one, other in zip(*runs, strict=True))


def assert_state_is_like(optimiser: Any, like: Tensor | None, dtype: torch.dtype) -> None:
    state = optimiser.init(LAYOUT, (2,), like=like)
    assert state.layout == LAYOUT
    assert {(value.dtype, value.shape[-2:]) for value in state.coordinates.values()} <= {(dtype, (2, 7))}


def assert_update_is_a_function_of_phi(optimiser: Any, other: Any) -> None:
    """`update_with` is `update` at one's own φ, the other optimiser's update at its φ, and differentiable."""
    gradients, params = normal(3, 7), normal(7, seed=1)
    state = optimiser.init(LAYOUT, like=params)

    def rolled(phi: Any) -> Tensor:
        current, theta = state, params
        for g in gradients:
            change, current = optimiser.update_with(phi, g, current, theta, loss=loss_at(theta))
            theta = theta + change
        return theta - params

    own = sum(roll(optimiser.update, state, gradients, params)[0])
    others = sum(roll(other.update, state, gradients, params)[0])
    assert_close(rolled(optimiser.phi()), own)
    assert_close(rolled(other.phi()), others)
    assert (own - others).abs().max() > 1e-6 or not optimiser.phi()
    derivative = grad(lambda phi: (rolled(phi) * normal(7, seed=2)).sum())(optimiser.phi())
    assert all(piece.isfinite().all() and piece.ne(0).any() for piece in derivative.values())


# Optimisees


def descend(optimisee: Optimisee, seed: int, start: Any, steps: range, rate: float = 0.01) -> list[Any]:
    """(params, aux) after each of the steps of plain gradient descent."""
    params, aux = start
    trail = []
    for step in steps:
        batch = optimisee.batch("inner", seed, step)
        grads, aux = grad(optimisee.loss, has_aux=True)(params, aux, batch)
        params = {name: value - rate * grads[name] for name, value in params.items()}
        trail.append((params, aux))
    return trail


def assert_pure(make: Any) -> None:
    """Equal arguments give equal results in any order and under any global seed; nothing passed in is changed."""
    random = torch.get_rng_state()
    optimisee = make()
    arguments = (*optimisee.init(3), optimisee.batch("train", 3, 1))
    before = clone(arguments)
    calls = [
        lambda: optimisee.init(3),
        lambda: optimisee.batch("train", 3, 1),
        lambda: optimisee.loss(*arguments),
        lambda: optimisee.evaluate(*arguments),
        lambda: grad(optimisee.loss, has_aux=True)(*arguments),
        lambda: list(optimisee.evaluation_batches("heldout", 3)),
    ]
    first = [clone(call()) for call in calls]
    assert torch.equal(torch.get_rng_state(), random)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        second = [call() for call in reversed(calls)][::-1]
    assert_same(second, first)
    assert_same(arguments, before)


def assert_loss_has_its_gradient(optimisee: Optimisee) -> None:
    """The derivative along a random direction, against central differences."""
    params, aux = optimisee.init(2)
    batch = optimisee.batch("train", 2, 1)
    direction = {name: normal(*value.shape, seed=20 + index) for index, (name, value) in enumerate(params.items())}
    gradient = grad(optimisee.loss, has_aux=True)(params, aux, batch)[0]
    derivative = sum((gradient[name] * direction[name]).sum() for name in params)
    step = 1e-6
    above, below = (
        optimisee.loss({name: value + sign * step * direction[name] for name, value in params.items()}, aux, batch)[0]
        for sign in (1, -1)
    )
    torch.testing.assert_close((above - below) / (2 * step), derivative, rtol=1e-5, atol=1e-7)


def assert_batch_is_a_function(make: Any) -> None:
    """Of split, seed and step: a fresh optimisee asked in another order gives the same."""
    keys = [
        (split, seed, step) for split in ("train", "inner", "heldout", "test") for seed in (0, 7) for step in (0, 5)
    ]
    one, other = make(), make()
    assert_same([other.batch(*key) for key in reversed(keys)][::-1], [one.batch(*key) for key in keys])


def assert_places_lead_to_the_batches(optimisee: Optimisee) -> None:
    """Samples at places that are drawn ahead for many runs are the batches of each run, seeds that come twice too."""
    seeds = (5, 0, 5)
    for split in ("train", "inner", "heldout", "test"):
        batches = BatchesOfRows(optimisee, split, seeds)
        batches.AHEAD = 3
        for step in (0, 1, 2, 3, 7, 8, 1):
            samples, places = batches.at(step, 2)
            assert places is None or 1 <= len(places) <= 2
            for later, at in enumerate([None] if places is None else places):
                found = samples if at is None else pytree.tree_map(lambda leaf, at=at: leaf[at], samples)
                assert_same(found, batch_rows(optimisee, split, seeds, step + later))
        indexed = optimisee.indexed_batches(split)
        if indexed is not None:
            drawn = [indexed.drawn(5, step, 1)[0] for step in range(2, 9)]
            assert_same(indexed.drawn(5, 2, 7), torch.stack(drawn))


def assert_rows_are_separate_runs(optimisee: Optimisee) -> None:
    """Loss, gradient and aux of rows under `vmap` equal those of one run after the other; so does the evaluation."""
    seeds = (0, 1, 5)
    layout, theta, aux = init_rows(optimisee, seeds)
    loss = flat_loss(optimisee, layout)
    batch = batch_rows(optimisee, "train", seeds, 2)

    def summed(theta: Tensor) -> Any:
        losses, moved = loss(theta, aux, batch)
        return losses.sum(), (losses, moved)

    derivative, (losses, moved) = grad(summed, has_aux=True)(theta)
    whole = evaluate_rows(optimisee, layout, "heldout", seeds, theta, moved)
    for row, seed in enumerate(seeds):
        params, start = optimisee.init(seed)
        arguments = (params, start, optimisee.batch("train", seed, 2))
        wanted, after = optimisee.loss(*arguments)
        assert_close(losses[row], wanted)
        assert_close({name: value[row] for name, value in moved.items()}, after)
        assert_close(layout.unravel(derivative[row]), grad(optimisee.loss, has_aux=True)(*arguments)[0])
        parts = [
            (optimisee.evaluate(params, after, part), n) for part, n in optimisee.evaluation_batches("heldout", seed)
        ]
        assert_close(whole[row], sum(value * n for value, n in parts) / sum(n for _, n in parts))


def assert_resumes(make: Any) -> None:
    """From any step, with nothing but parameters and aux, a fresh optimisee goes on bit for bit."""
    task = make()
    trail = [task.init(4), *descend(task, 4, task.init(4), range(4))]
    for step in range(1, 4):
        assert_same(descend(make(), 4, trail[step], range(step, 4)), trail[step + 1 :])


def samples(*batches: Any) -> Counter[tuple[float, ...]]:
    """How often each sample (inputs and target) occurs."""
    rows = [torch.cat([b["inputs"].flatten(1), b["targets"][:, None]], dim=1).tolist() for b in batches]
    return Counter(tuple(row) for part in rows for row in part)


def whole(optimisee: Any, split: Any, seed: int) -> Counter[tuple[float, ...]]:
    parts = list(optimisee.evaluation_batches(split, seed))
    assert [count for _, count in parts] == [len(part["targets"]) for part, _ in parts]
    return samples(*(part for part, _ in parts))


def assert_splits_share_out_the_samples(optimisee: Any) -> None:
    """`train` and `test` are the data; `inner` and `heldout` are disjoint, together `train`, and new for each seed."""
    data = optimisee.data
    assert whole(optimisee, "train", 0) == samples({"inputs": data.train_inputs, "targets": data.train_targets})
    assert whole(optimisee, "test", 0) == samples({"inputs": data.test_inputs, "targets": data.test_targets})
    parts = [{split: whole(optimisee, split, seed) for split in ("inner", "heldout")} for seed in (0, 1)]
    for part in parts:
        assert part["inner"] + part["heldout"] == whole(optimisee, "train", 0)
    assert parts[0]["heldout"] != parts[1]["heldout"]


def assert_epoch_visits_a_sample_at_most_once(optimisee: Any, split: Any) -> None:
    """And only samples of the split, in batches of full size; the next epoch has another order."""
    everything = whole(optimisee, split, 3)
    size = min(optimisee.batch_size, everything.total())
    length = everything.total() // size
    epochs = [[optimisee.batch(split, 3, step) for step in range(e * length, (e + 1) * length)] for e in (0, 1)]
    for epoch in epochs:
        assert {len(batch["targets"]) for batch in epoch} == {size}
        assert samples(*epoch) <= everything
    assert not torch.equal(epochs[0][0]["inputs"], epochs[1][0]["inputs"])


# Unrolls


def together(results: list[Any]) -> Any:
    """The sum of the pieces' meta-gradients."""
    return pytree.tree_map(lambda *pieces: sum(pieces), *[result.gradient for result in results])


def in_pieces(unroll: Any, problem: Problem, length: int) -> list[Any]:
    """Calls of `length` steps each, the carry handed over."""
    carry, state, results = problem.carry, unroll.init(problem.carry, problem.phi, 7), []
    for start in range(0, max(len(problem.steps), 1), length):
        result = unroll(problem.update, problem.loss, problem.phi, carry, problem.steps[start : start + length], state)
        carry, state = result.carry, result.state
        results.append(result)
    return results


def run(unroll: Any, problem: Problem) -> Any:
    (result,) = in_pieces(unroll, problem, max(len(problem.steps), 1))
    return result


def plain_run(problem: Problem) -> tuple[list[Tensor], Carry]:
    """The inner steps alone: each step's loss, and the carry after the last."""
    params, aux, state = problem.carry
    losses = []
    for step in problem.steps:
        theta = params.detach().requires_grad_()
        loss, aux = problem.loss(theta, aux, step.batch)
        (g,) = torch.autograd.grad(loss.sum(), theta)
        change, state = problem.update(problem.phi, g, state, params, loss=loss.detach())
        params = (params + change).detach()
        losses.append(loss.detach())
    return losses, Carry(params, aux, pytree.tree_map(Tensor.detach, state))


def assert_meta_gradient_is_exact(unroll: Any, problem: Problem, order: int, objective: str) -> None:
    """Value and gradient equal those of the meta-loss written as one function of φ under `torch.func`."""
    result = run(unroll, problem)
    gradient, value = oracles.meta_gradient(problem, order, objective)
    assert_close(result.value, value, 1e-9)
    assert_close(result.gradient, gradient, 1e-9)
    assert result.finite


def assert_runs_the_inner_loop(unroll: Any, problem: Problem) -> None:
    """Losses and carry, aux included, are those of the inner steps alone, and nothing hangs on the graph."""
    result = run(unroll, problem)
    losses, carry = plain_run(problem)
    assert_close(result.losses, torch.stack(losses))
    assert_close(result.carry, carry)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves((result.carry, result.value, result.gradient)))


def assert_rows_average(unroll: Any, rows: Problem, runs: list[Problem]) -> None:
    """Value and gradient of rows are the mean over separate unrolls."""
    result, separate = run(unroll, rows), [run(unroll, single) for single in runs]
    assert_close(result.value, sum(s.value for s in separate) / len(runs))
    assert_close(result.gradient, {name: g / len(runs) for name, g in together(separate).items()}, 1e-10)
    assert_close(result.losses, torch.stack([s.losses for s in separate], dim=1))


def assert_pieces_make_the_whole(unroll: Any, problem: Problem, length: int) -> None:
    """Value, losses and carry do not depend on where a run is cut into calls."""
    result, pieces = run(unroll, problem), in_pieces(unroll, problem, length)
    assert_close(sum(piece.value for piece in pieces), result.value)
    assert_close(torch.cat([piece.losses for piece in pieces]), result.losses)
    assert_close(pieces[-1].carry, result.carry)


def assert_truncation_sums_pieces(truncated: Any, unroll: Any, problem: Problem, length: int) -> None:
    """Truncated at K = `length`, the gradient is the sum over calls of K steps; value, losses, carry are unchanged."""
    result, plain = run(truncated, problem), run(unroll, problem)
    assert_close(result.gradient, together(in_pieces(unroll, problem, length)))
    assert_close((result.value, result.losses, result.carry), (plain.value, plain.losses, plain.carry))
    if length < len(problem.steps):
        assert max((result.gradient[name] - plain.gradient[name]).abs().max() for name in plain.gradient) > 1e-6
    else:
        assert_close(result.gradient, plain.gradient)


def assert_empty_unroll_gives_zeros(unroll: Any, problem: Problem) -> None:
    result = run(unroll, problem._replace(steps=[]))
    assert result.value == 0
    assert result.finite
    assert result.losses.numel() == 0
    assert_same(result.gradient, {name: torch.zeros_like(value) for name, value in problem.phi.items()})
    assert_same(result.carry, problem.carry)


def assert_samples_average_to_the_whole(make: Any, whole: Any, problem: Problem, draws: int) -> None:
    """The mean over draws of a sampling estimator is what another gives of all coordinates, to 5 standard errors."""
    exact, drawn = run(whole, problem).gradient, []
    for seed in range(draws):
        estimator = make()
        state = estimator.init(problem.carry, problem.phi, seed)
        drawn.append(estimator(*problem[:4], problem.steps, state).gradient)
    for name, value in exact.items():
        pieces = torch.stack([draw[name] for draw in drawn])
        error = pieces.std(0) / draws**0.5
        assert ((pieces.mean(0) - value).abs() <= 5 * error + 1e-12 * value.abs().max()).all()
        assert (pieces.std(0) > 0).any() or not value.any()


def assert_estimator_changes_nothing(unroll: Any, problem: Problem) -> None:
    before = clone(problem[2:])
    first = run(unroll, problem)
    assert_same(problem[2:], before)
    assert_same(vars(run(unroll, problem)), vars(first))


def assert_divergence_is_data(unroll: Any, problem: Problem, bad: float) -> None:
    """A loss that turns `bad` raises nothing and is reported; the same run without it is finite."""

    def spoilt(theta: Tensor, aux: Any, batch: Any) -> Any:
        loss, aux = problem.loss(theta, aux, batch)
        return (loss * bad if batch is problem.steps[-1].batch else loss), aux

    result = run(unroll, problem._replace(loss=spoilt))
    assert result.finite is False
    assert not result.losses[-1].isfinite().any()
    assert run(unroll, problem).finite is True


def assert_finite_differences_agree(unroll: Any, problem: Problem, directions: int = 3) -> None:
    """The derivative of the value along random directions of φ (an unroll of second order drops nothing)."""
    gradient, h = run(unroll, problem).gradient, 1e-5
    for seed in range(directions):
        along = {name: normal(*value.shape, seed=seed) for name, value in problem.phi.items()}

        def value(step: float, along: Any = along) -> float:
            phi = {name: phi + step * along[name] for name, phi in problem.phi.items()}
            return run(unroll, problem._replace(phi=phi)).value.item()

        derivative = sum((gradient[name] * along[name]).sum().item() for name in along)
        assert (value(h) - value(-h)) / (2 * h) == pytest.approx(derivative, rel=1e-6)
