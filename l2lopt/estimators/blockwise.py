"""Exact first-order meta-gradients in bounded memory: run without a tape, then go back block by block."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, reduce
from itertools import islice
from math import ceil
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from l2lopt.core.choices import checks_words
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Params
from l2lopt.core.precision import for_sums, widest
from l2lopt.core.seeding import generator
from l2lopt.core.types import Carry, InnerStep, Loss, OptimiserState, Update, detach
from l2lopt.estimators.base import EstimatorState, MetaGradient, MetaGradientEstimator, check_state
from l2lopt.estimators.coordinate_sample import mean_adjoint, sample_size, stratified
from l2lopt.estimators.dependencies import Dependencies, dependencies
from l2lopt.estimators.exchange import Alone
from l2lopt.estimators.locality import check_locality
from l2lopt.estimators.loss_and_gradient import LossAndGradient, Objective, loss_and_gradient, target_terms
from l2lopt.estimators.memory_plan import Plan, activations, available_memory, seconds_of, timed
from l2lopt.estimators.record import Record, VectorPool, first_of
from l2lopt.estimators.replay import autograd_replay, emptied, taped_mean_adjoint, through_the_networks
from l2lopt.estimators.window import AdjointOfMean, BlockAdjoints, BlockUpdate, MeanAdjoint, Replay, Window
from l2lopt.parallel.threads import one_each, share_out

AT_ONCE = 2**19
"""Coordinates times steps that a replay keeps, some 750 bytes each."""
CHECKED = 2
"""Steps of an estimator's first call at which a slice is computed again: at the first, bias-corrected means are ±1."""
Tables: TypeAlias = Mapping[str, Tensor]


class Blockwise(MetaGradientEstimator):
    """Backpropagation through the unrolled optimisation, of first order, at one vector of memory a step.

    Gradients and losses are constants in first order, so coordinates meet only where their optimiser lets them: in
    means over groups, functions of whole tensors and networks per group (`core.groupings`), which are recorded. The
    steps run forward without a tape and keep, of each, the gradient g_t and, where it is another vector, the source
    q_t = ∂(meta-loss)/∂θ_t. Then every block of coordinates is replayed on its own, with
    (u_t, s_{t+1}) = m_φ(g_t, s_t, θ_t), θ_{t+1} = θ_t + u_t and the adjoint run down from a_T = q_T, s̄_T = 0:

        a_t = q_t + a_{t+1} (1 + ∂u_t/∂θ_t) + s̄_{t+1} ∂s_{t+1}/∂θ_t
        s̄_t = s̄_{t+1} ∂s_{t+1}/∂s_t + a_{t+1} ∂u_t/∂s_t
        dφ += a_{t+1} ∂u_t/∂φ + s̄_{t+1} ∂s_{t+1}/∂φ

    Equal to `Backprop` of first order to rounding, unless a mean is taken as a constant. The replay is the update's own
    if it is a `BlockUpdate`, else autograd's. What the coordinates meet in is treated by what it depends on:

    - gradients alone: a constant of first order, exact without further work;
    - φ through the update: its adjoint sums over all blocks and must be known before the replay. A `BlockUpdate` may
      tell it from the updates of the window, recorded in one vector more a step; else a first pass over the blocks
      finds it, with a walk through the window for each such mean of a step;
    - θ, or itself through the state, or φ where a network per group reads it: the adjoints of different steps would
      have to wait for one another across blocks. It is taken as a constant, and a line in the log says so;
    - a network per group: the blocks give the adjoints of its outputs, and backpropagation goes through its steps once.

    With `share` below 1 only a random share of each tensor's coordinates is recorded and replayed, drawn anew for
    every window and weighted by its inverse: the mean over draws is the whole meta-gradient. It is not quite where a
    mean whose adjoint is found goes into another one, as in no rule of this library.

    Memory: T vectors of n numbers, T more if the meta-loss looks at other batches than the next step's, T more where
    updates are recorded, T more for each function of whole tensors (hierarchical 1, small-fc 3), and a block's replay;
    `plan` says how much that is. The vectors are used again by the next call, so calls must not overlap.

    Args:
        window: K, the steps of a window; None for the whole call.
        objective: "loss" or "log-loss".
        share: Share of the coordinates that is replayed, in (0, 1].
        record: Numbers of the record: "full", the gradient's own, or "bfloat16". The optimiser sees the gradients as
            they are stored; sources and updates are rounded for the meta-gradient alone.
        block: Coordinates replayed at once, at most: fewer in windows of more than some hundred steps, so that what a
            block's replay keeps stays at some hundred megabytes. An update that says how many it takes (on a GPU) is
            given so many.
        spill: A folder for the record, as memory-mapped files; none: in memory.
    """

    old_options: ClassVar[dict[str, str]] = {"truncation": "window"}

    @checks_words
    def __init__(
        self,
        window: int | None = None,
        objective: Objective = "loss",
        share: float = 1.0,
        record: Literal["full", "bfloat16"] = "full",
        block: int = 8192,
        spill: str | None = None,
    ) -> None:
        for name, value in (("window", window), ("block", block)):
            if value is not None and value < 1:
                raise UserError(name, expected="at least 1", found=str(value), remedy="change the value")
        if not 0 < share <= 1:
            raise UserError("share", expected="a number in (0, 1]", found=str(share), remedy="change the value")
        self.window, self.objective = window, objective
        self.share, self.record, self.block = share, record, block
        self.rows = VectorPool(spill)
        self._checked: tuple[Update | None, int] = (None, 0)
        self._dependencies: tuple[Update, Dependencies] | None = None

    def init(self, carry: Carry, phi: Params, seed: int) -> EstimatorState:
        """The seed of the draws and the number of windows so far, where coordinates are drawn."""
        return torch.tensor([seed, 0]) if self.share < 1 else ()

    def __call__(
        self,
        update: Update,
        loss: Loss,
        phi: Params,
        carry: Carry,
        steps: Iterable[InnerStep],
        state: EstimatorState = (),
    ) -> MetaGradient:
        """Runs and differentiates; see `MetaGradientEstimator`."""
        phi, way = detach(phi), _way(update)
        # float64, as many blocks and windows are summed: the rounding then hardly depends on how they are cut.
        gradient = {name: torch.zeros_like(piece, dtype=widest(piece.device)) for name, piece in phi.items()}
        value = carry.params.new_zeros((), dtype=for_sums(carry.params.dtype))
        losses: list[Tensor] = []
        params, aux, optimiser_state = detach(carry)
        layout = optimiser_state.layout
        # What the last step measured, and its weights in the meta-loss.
        known: list[tuple[LossAndGradient, Tensor]] = []
        window: _OpenWindow | None = None

        def close() -> None:
            if window is not None:
                window.record.sources(known)
                for name, piece in self._replayed(phi, window, way).items():
                    gradient[name] += piece

        for index, step in enumerate(steps):
            seen = next((m for m, _ in known if m.batch is step.batch), None)
            seen = seen or loss_and_gradient(loss, params, aux, step.batch)
            if window is None or (self.window and index % self.window == 0):
                close()
                window, state = self._open(optimiser_state, params, state, way)
                # update_ works in place, and the record keeps the window's first state: the run goes on with a copy.
                optimiser_state = way.copied(optimiser_state)
            else:
                window.record.sources(known, seen)
            losses.append(seen.loss)
            with torch.no_grad():
                # Rounded as the record gives them back: the replay then sees what the steps were made with.
                grads = window.record.stored(seen.grads)
                check = check_locality(optimiser_state, grads, params, seen.loss) if self._unchecked(update) else None
                before = window.record.begin(optimiser_state)
                change, optimiser_state = way.update_(phi, grads, before, params, loss=seen.loss)
                # The recording layout is the window's: in the carry it would keep a record alive.
                optimiser_state = optimiser_state._replace(layout=layout)
                if check is not None:
                    check(way.update, phi, change, window.record.recorder.meeting)
                params, aux = params + change, seen.aux
                window.record.step(grads, seen.loss, change)
            measured = [loss_and_gradient(loss, params, aux, target.batch) for target in step.targets]
            pieces, weights = target_terms(measured, step.targets, self.objective)
            value = sum(pieces, value)
            known = list(zip(measured, weights, strict=True))
        close()
        summed = {name: piece.to(phi[name].dtype) for name, piece in gradient.items()}
        finite = all(bool(t.isfinite().all()) for t in (value, params, *summed.values()))
        trajectory = torch.stack(losses) if losses else carry.params.new_zeros(0)
        return MetaGradient(value, summed, Carry(params, aux, optimiser_state), trajectory, finite, state)

    def plan(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[InnerStep], length: int
    ) -> Plan:
        """What a call of `length` steps from `carry` will take; runs a gradient and the replay of a block.

        Args:
            update: Update of the optimiser.
            loss: Loss of the optimisee.
            phi: The meta-parameters.
            carry: State of the run before the call.
            steps: The first two are looked at.
            length: Number of steps of the call.

        Raises:
            UserError: Where its memory is not there; see `Plan.check`.
        """
        phi, carry, way = detach(phi), detach(carry), _way(update)
        size, numbers = carry.params.shape[-1], carry.params.numel()
        window = max(1, min(length, self.window or length))
        dtype = torch.bfloat16 if self.record == "bfloat16" else carry.params.dtype
        drawn = sum(sample_size(self.share, part) for part in carry.state.layout.sizes) * (numbers // max(size, 1))
        step, *following = islice(steps, 2)
        others = sum(all(target.batch is not later.batch for later in following) for target in step.targets)
        watch = activations()
        # `torch.func` within a loss refuses to be watched; any other error comes again in the call that is not.
        with suppress(RuntimeError), watch as held:
            loss_and_gradient(loss, carry.params, carry.aux, step.batch)
        gradient, seen = timed(lambda: loss_and_gradient(loss, carry.params, carry.aux, step.batch))
        few = min(size, self._block(window, way))
        alone = Alone()
        part = first_of(carry.state, few)._replace(layout=carry.state.layout.slice(0, few).meeting(alone))
        theta, grads = carry.params[..., :few], seen.grads[..., :few]
        with torch.no_grad():
            forward, _ = seconds_of(lambda: way.update_(phi, grads, way.copied(part), theta, loss=seen.loss))
        several = 4
        alike = torch.stack([grads] * several)
        losses = torch.stack([seen.loss] * several)
        probe = Window(part, theta, alike, alike, losses, [alone.meeting] * several, alike.clone())
        back = self._seconds_back(way, phi, probe)
        threads = torch.get_num_threads() if way.threaded else 1
        work = (numbers * forward + drawn * back / several) / max(theta.numel(), 1) / threads
        state = sum(value.numel() * value.element_size() for value in carry.state.coordinates.values())
        blank = way.threaded and all(_blank(value) for value in carry.state.coordinates.values())
        # A replay keeps about four states a step; one by a kernel the gradients, the sources and the updates.
        each = 4 * state * threads / max(numbers, 1) if way.at_once is None else 3 * carry.params.element_size()
        plan = Plan(
            window=window,
            vector=drawn * dtype.itemsize,
            per_step=1 + bool(others) + way.keeps_updates + len(alone.meeting.wholes),
            fixed=(1 if blank else 2) * state + 6 * numbers * carry.params.element_size(),
            kept=lambda steps: max(int(each * steps * min(size, self._block(steps, way))), sum(held)),
            available=available_memory(carry.params.device),
            spilt=self.rows.folder is not None,
            seconds=length * ((1 + others) * gradient + work),
        )
        plan.check()
        return plan

    def _unchecked(self, update: Update) -> bool:
        """Whether to compute a slice of this step again, to see that the update obeys the law of locality."""
        # Compared by ==: a bound method is another object each time it is asked for.
        last, count = self._checked if self._checked[0] == update else (update, 0)
        self._checked = last, count + 1
        return count < CHECKED

    def _seconds_back(self, way: "_Way", phi: Params, probe: Window) -> float:
        """How long it takes to go back through a block's window."""
        seconds, _ = seconds_of(lambda: way.replay(phi, probe, {}))
        for key in way.linked or ():
            seconds += seconds_of(partial(way.mean_adjoint, phi, probe, {}, key))[0]
        return seconds

    def _open(
        self, optimiser_state: OptimiserState, params: Tensor, state: EstimatorState, way: "_Way"
    ) -> "tuple[_OpenWindow, EstimatorState]":
        """An empty window at the present step, and the estimator's state after the draw."""
        self.rows.clear()
        dtype = torch.bfloat16 if self.record == "bfloat16" else params.dtype
        select, weights = None, None
        if self.share < 1:
            check_state("estimator 'blockwise'", state)
            source = generator("coordinates", *state.tolist())
            select, drawn = stratified(optimiser_state.layout, self.share, source)
            weights, state = drawn.to(params), state + torch.tensor([0, 1])
        record = Record(optimiser_state, params, self.rows, dtype, select, way.keeps_updates)
        return _OpenWindow(record, weights), state

    def _replayed(self, phi: Params, window: "_OpenWindow", way: "_Way") -> Tables:
        """The window's meta-gradient in float64, block after block; first the adjoints of its means, if they have any.

        Of parameters that lie across processes each process replays its part, and the sums are over all of them.
        """
        record = window.record
        shards = record.whole.shards
        adjoints: dict[str, MeanAdjoint] = {}
        # Means that depend on others first: the pass for a mean needs the adjoints of those it goes into.
        for key in self._linked(phi, window, way):
            sums = self._summed(window, way, partial(_mean_adjoint, way, phi, adjoints, key))
            if sums:
                adjoints[key] = mean_adjoint(record.whole, record.layout, key, sums[""])
        found = self._summed(window, way, lambda part: _named(way.replay(phi, part, adjoints)))
        controls = {key: found.pop(f"controls {key}") for key in record.meetings[0].controls if found}
        if shards is not None:
            # Collective: each process has replayed its own coordinates alone.
            found = {name: shards.total(value) for name, value in found.items()}
            controls = {name: shards.total(value) for name, value in controls.items()}
        if controls:
            networks = through_the_networks(way.update, phi, emptied(record.window(0, 0), record.groups), controls)
            found = _added(found, networks)
        return found

    def _linked(self, phi: Params, window: "_OpenWindow", way: "_Way") -> tuple[str, ...]:
        """The means whose adjoints are to be found, in the order of the passes."""
        record = window.record
        if way.linked is not None or not (record.meetings[0].means or record.meetings[0].wholes):
            return way.linked or ()
        if self._dependencies is None or self._dependencies[0] != way.update:
            found = dependencies(way.update, phi, record.window(0, min(4, record.layout.size)))
            self._dependencies = way.update, found
            if found.constant:
                logging.getLogger("l2lopt").info(
                    "blockwise: taken as constants, see its docstring: %s", ", ".join(found.constant)
                )
        return self._dependencies[1].linked

    def _summed(self, window: "_OpenWindow", way: "_Way", function: Callable[[Window], Tables]) -> Params:
        """What a function gives for every block, by name, summed in float64 and in a fixed order."""
        size = window.record.layout.size
        block = self._block(len(window.record.grads), way)
        # A process without coordinates has an empty block: it must come to every sum over the processes.
        blocks = range(0, size if window.record.whole.shards is None else max(size, 1), block)
        # Not by the number of threads: then neither the order of the sums nor their bits depend on it.
        few = min(max(len(blocks) // 32, 1), 16)

        def run(index: int) -> Params:
            """The sum over a few blocks that follow one another, so that few sums are kept."""
            total: Params = {}
            for low in blocks[index * few : (index + 1) * few]:
                pieces = function(window.record.window(low, min(low + block, size), window.weights))
                total = _added(total, pieces)
            return total

        with one_each() as threads:
            parts = share_out(run, ceil(len(blocks) / few), threads if way.threaded else 1)
        return reduce(_added, parts, {})

    def _block(self, steps: int, way: "_Way") -> int:
        """Coordinates replayed at once in a window of `steps`."""
        if way.at_once is not None:
            return max(256, way.at_once // max(steps, 1))
        return min(self.block, max(256, AT_ONCE // max(steps, 1)))


class _OpenWindow(NamedTuple):
    """A window under way, and the weights [m] of its coordinates if they are a sample."""

    record: Record
    weights: Tensor | None


class _Way(NamedTuple):
    """How an update is run forward and gone back through."""

    update: Update
    update_: Update
    replay: Replay
    copied: Callable[[OptimiserState], OptimiserState]
    threaded: bool
    linked: tuple[str, ...] | None
    mean_adjoint: AdjointOfMean
    keeps_updates: bool = False
    at_once: int | None = None


def _way(update: Update) -> _Way:
    if not isinstance(update, BlockUpdate):
        return _Way(
            update, update, autograd_replay(update), lambda state: state, False, None, taped_mean_adjoint(update)
        )
    if not update.local:
        raise UserError(
            "estimator 'blockwise'",
            expected="a rule whose coordinates meet in means over groups or declared functions of whole tensors",
            found="one that says coordinatewise = False",
            remedy="use the estimator 'backprop', or layout.tensors.mean, layout.whole and the like in its update",
        )
    plain = update.update
    return _Way(
        plain,
        update.update_,
        update.replay or autograd_replay(plain),
        _copy,
        update.replay is not None and update.at_once is None,
        update.linked,
        update.mean_adjoint or taped_mean_adjoint(plain),
        update.mean_adjoint is not None and bool(update.linked),
        update.at_once,
    )


def _mean_adjoint(way: _Way, phi: Params, adjoints: Mapping[str, MeanAdjoint], key: str, window: Window) -> Params:
    """A block's part of a mean's adjoint, in a table of one."""
    return {"": way.mean_adjoint(phi, window, adjoints, key)}


def _named(found: BlockAdjoints) -> Params:
    """Meta-gradient and adjoints of controls in one table, to be summed."""
    return found.phi | {f"controls {key}": value for key, value in found.controls.items()}


def _added(total: Tables, pieces: Tables) -> Params:
    """The sums in float64, where the device knows it."""
    return {name: piece.to(widest(piece.device)) + total.get(name, 0.0) for name, piece in pieces.items()}


def _copy(state: OptimiserState) -> OptimiserState:
    """A state that may be overwritten; blank numbers, which take no memory, are left to be made when written to."""
    copies = {name: value if _blank(value) else value.clone() for name, value in state.coordinates.items()}
    return state._replace(coordinates=copies)


def _blank(value: Tensor) -> bool:
    """Whether it is one column expanded to all."""
    return value.shape[-1] > 1 and value.stride(-1) == 0
