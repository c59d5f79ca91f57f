"""Exact first-order meta-gradients in bounded memory: run without a tape, then go back block by block."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import islice
from math import ceil
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from l2lopt.core.errors import UserError
from l2lopt.core.types import (
    BlockUpdate,
    Carry,
    Layout,
    Loss,
    OptimiserState,
    Params,
    Pull,
    Replay,
    Step,
    Update,
    Window,
    detach,
    generator,
)
from l2lopt.estimators.base import MetaGradient, Unroll, UnrollState
from l2lopt.estimators.loss_and_gradient import Measured, Objective, gradient_of, measure, term
from l2lopt.estimators.memory_plan import Plan, activations, available_memory
from l2lopt.estimators.record import Record, Rows
from l2lopt.parallel.threads import one_each, share_out

Result = TypeVar("Result")
AT_ONCE = 2**19
"""Coordinates times steps that a replay keeps, some 600 bytes each."""
_CONSTANT_STATISTIC = "the rule's statistic over a tensor is taken as a constant; the estimator taped differentiates it"


class Blockwise(Unroll):
    """Backpropagation through the unrolled optimisation, of first order, at one vector of memory a step.

    Gradients and losses are constants in first order, so coordinates meet nowhere but in what their optimiser shares,
    and that is recorded and taken as a constant too. The steps run forward without a tape and keep, of each, the
    gradient g_t and, where it is another vector, the source q_t = ∂(meta-loss)/∂θ_t. Then every block of coordinates
    is replayed on its own, with (u_t, s_{t+1}) = m_φ(g_t, s_t, θ_t), θ_{t+1} = θ_t + u_t and the adjoint run down from
    a_T = q_T, s̄_T = 0:

        a_t = q_t + a_{t+1} (1 + ∂u_t/∂θ_t) + s̄_{t+1} ∂s_{t+1}/∂θ_t
        s̄_t = s̄_{t+1} ∂s_{t+1}/∂s_t + a_{t+1} ∂u_t/∂s_t
        dφ += a_{t+1} ∂u_t/∂φ + s̄_{t+1} ∂s_{t+1}/∂φ

    Equal to `Taped` of first order to rounding. The replay is the update's own if it is a `BlockUpdate`, else
    autograd's. A statistic that a rule takes over a tensor depends on all blocks: where the update has a `pull`, a
    first pass over the blocks adds up what the statistic of each step does to the meta-loss, and the replay takes its
    slope from that; otherwise the slope is left out.

    With `share` below 1 only a random share of each tensor's coordinates is recorded and replayed, drawn anew for
    every window and weighted by its inverse: the mean over draws is the whole meta-gradient.

    Memory: T vectors of n numbers, 2T if the meta-loss looks at other batches than the next step's, and a block's
    replay; `plan` says how much that is. The vectors are used again by the next call, so calls must not overlap.

    Args:
        truncation: K, the steps of a window; None for the whole call.
        objective: "loss" or "log-loss".
        share: of the coordinates, in (0, 1].
        record: numbers of the record: "full", the gradient's own, or "bfloat16". The optimiser sees them as stored.
        block: coordinates replayed at once, at most: fewer in windows of more than some hundred steps, so that what a
            block's replay keeps stays at some hundred megabytes. An update that says how many it takes (on a GPU) is
            given so many.
        spill: a folder for the record, as memory-mapped files; none: in memory.
    """

    def __init__(
        self,
        truncation: int | None = None,
        objective: Objective = "loss",
        share: float = 1.0,
        record: Literal["full", "bfloat16"] = "full",
        block: int = 8192,
        spill: str | None = None,
    ) -> None:
        for name, value in (("truncation", truncation), ("block", block)):
            if value is not None and value < 1:
                raise UserError(name, expected="at least 1", found=str(value), remedy="change the value")
        if not 0 < share <= 1:
            raise UserError("share", expected="a number in (0, 1]", found=str(share), remedy="change the value")
        self.truncation, self.objective = truncation, objective
        self.share, self.record, self.block = share, record, block
        self.rows = Rows(spill)

    def init(self, carry: Carry, phi: Params, seed: int) -> UnrollState:
        """The seed of the draws and the number of windows so far, where coordinates are drawn."""
        return torch.tensor([seed, 0]) if self.share < 1 else ()

    def __call__(
        self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[Step], state: UnrollState = ()
    ) -> MetaGradient:
        """Runs and differentiates; see `Unroll.__call__`."""
        phi, way = detach(phi), _way(update)
        gradient = {name: torch.zeros_like(piece, dtype=torch.float64) for name, piece in phi.items()}
        value = carry.params.new_zeros(())
        losses: list[Tensor] = []
        params, aux, optimiser_state = detach(carry)
        known: list[tuple[Measured, Tensor]] = []  # what the last step measured, and its slopes
        window: _Open | None = None

        def close() -> None:
            if window is not None:
                window.record.sources(known)
                for name, piece in self._replayed(phi, window, way).items():
                    gradient[name] += piece

        for index, step in enumerate(steps):
            seen = next((m for m, _ in known if m.batch is step.batch), None)
            seen = seen or measure(loss, params, aux, step.batch)
            if window is None or (self.truncation and index % self.truncation == 0):
                close()
                window, state = self._open(optimiser_state, params, state)
                optimiser_state = way.own(optimiser_state)
            else:
                window.record.sources(known, seen)
            losses.append(seen.loss)
            with torch.no_grad():
                grads = window.record.stored(seen.grads)
                change, optimiser_state = way.advance(phi, grads, optimiser_state, params, seen.loss)
                params, aux = params + change, seen.aux
                window.record.step(grads, seen.loss, optimiser_state.shared)
            known = []
            for target in step.targets:
                measured = measure(loss, params, aux, target.batch)
                piece, slope = term(measured, target.weight, self.objective)
                value = value + piece
                known.append((measured, slope))
        close()
        summed = {name: piece.to(phi[name].dtype) for name, piece in gradient.items()}
        finite = all(bool(t.isfinite().all()) for t in (value, params, *summed.values()))
        trajectory = torch.stack(losses) if losses else carry.params.new_zeros(0)
        return MetaGradient(value, summed, Carry(params, aux, optimiser_state), trajectory, finite, state)

    def plan(self, update: Update, loss: Loss, phi: Params, carry: Carry, steps: Iterable[Step], length: int) -> Plan:
        """What a call of `length` steps from `carry` will take; runs a gradient and the replay of a block.

        Args:
            update: see `Unroll.__call__`, as are `loss`, `phi` and `carry`.
            loss: of the optimisee.
            phi: the meta-parameters.
            carry: where the run stands.
            steps: the first two are looked at.
            length: of the call.

        Raises:
            UserError: where its memory is not there; see `Plan.check`.
        """
        phi, carry, way = detach(phi), detach(carry), _way(update)
        size, numbers = carry.params.shape[-1], carry.params.numel()
        window = max(1, min(length, self.truncation or length))
        dtype = torch.bfloat16 if self.record == "bfloat16" else carry.params.dtype
        drawn = sum(_count(self.share, part) for part in carry.state.layout.sizes) * (numbers // max(size, 1))
        step, *following = islice(steps, 2)
        others = sum(all(target.batch is not later.batch for later in following) for target in step.targets)
        with activations() as held:
            measure(loss, carry.params, carry.aux, step.batch)
        gradient, seen = _timed(lambda: measure(loss, carry.params, carry.aux, step.batch))
        few = min(size, self._block(window, way))
        part = carry.state._replace(
            layout=carry.state.layout.between(0, few),
            coordinates={name: value[..., :few].clone() for name, value in carry.state.coordinates.items()},
        )
        theta, grads = carry.params[..., :few], seen.grads[..., :few]
        with torch.no_grad():
            forward, (_, after) = _seconds(lambda: way.advance(phi, grads, way.own(part), theta, seen.loss))
        several = 4
        probe = Window(
            part,
            theta,
            torch.stack([grads] * several),
            torch.stack([grads] * several),
            torch.stack([seen.loss] * several),
            [after.shared] * several,
        )
        back, _ = _seconds(lambda: way.replay(phi, probe))
        if way.pull is not None:
            pull = way.pull
            back += _seconds(lambda: pull(phi, probe))[0]
        threads = torch.get_num_threads() if way.threaded else 1
        work = (numbers * forward + drawn * back / several) / max(theta.numel(), 1) / threads
        state = sum(value.numel() * value.element_size() for value in carry.state.coordinates.values())
        blank = way.threaded and all(_blank(value) for value in carry.state.coordinates.values())
        if way.at_once is None:
            kept = 4 * state * few * window * threads // max(numbers, 1)  # a replay keeps about four states a step
        else:
            kept = 3 * few * window * carry.params.element_size()  # gradients, sources, pulls
        plan = Plan(
            window=window,
            vector=drawn * dtype.itemsize,
            per_step=1 + bool(others),
            state=(1 if blank else 2) * state + max(kept, sum(held)) + 6 * numbers * carry.params.element_size(),
            available=available_memory(carry.params.device),
            spilt=self.rows.folder is not None,
            seconds=length * ((1 + others) * gradient + work),
            notes=(_CONSTANT_STATISTIC,) if way.pull is None and "statistic" in carry.state.shared else (),
        )
        plan.check()
        return plan

    def _open(self, optimiser_state: OptimiserState, params: Tensor, state: UnrollState) -> "tuple[_Open, UnrollState]":
        """An empty window at the present place, and the unroll's own state after the draw."""
        self.rows.clear()
        dtype = torch.bfloat16 if self.record == "bfloat16" else params.dtype
        if self.share == 1:
            record = Record(optimiser_state, params, self.rows, dtype)
            return _Open(record, None, optimiser_state.layout.sizes), state
        seed, count = state.tolist()
        source = generator("coordinates", seed, count)
        select, weights, layout = stratified(optimiser_state.layout, self.share, source)
        part = optimiser_state._replace(
            layout=layout,
            coordinates={
                name: value.index_select(-1, select.to(value.device))
                for name, value in optimiser_state.coordinates.items()
            },
        )
        record = Record(part, params, self.rows, dtype, select.to(params.device))
        return _Open(record, weights.to(params), optimiser_state.layout.sizes), state + torch.tensor([0, 1])

    def _replayed(self, phi: Params, window: "_Open", way: "_Way") -> dict[str, Tensor]:
        """The window's meta-gradient in float64, block after block; first the pull of its statistics, if it has one."""
        record = window.record
        pull = way.pull
        if pull is not None and record.state.layout.size:
            # Of n coordinates m are replayed, each with the weight n/m: two of them meet with another chance than one
            # meets itself. pull − own·p_i has the mean Σp / n over samples even where it multiplies what i has.
            whole = torch.tensor(window.sizes, dtype=torch.float64).clamp(min=1)
            pairs = (whole - 1) / (torch.tensor(record.state.layout.sizes) - 1).clamp(min=1)
            pairs = torch.where(whole > 1, pairs, 1.0)
            sums = self._summed(window, way, lambda part: {"pull": pull(phi, part)})["pull"]
            factor, own = (pairs / whole).to(sums), ((pairs - 1) / whole).to(sums)
            for index, shared in enumerate(record.shared):
                pulls = {"pull": sums[index] * factor, "own": own.expand_as(sums[index])}
                record.shared[index] = shared | {name: value.to(shared["statistic"]) for name, value in pulls.items()}
        return self._summed(window, way, lambda part: way.replay(phi, part))

    def _summed(self, window: "_Open", way: "_Way", function: Callable[[Window], Params]) -> Params:
        """What a function gives for every block, by name, summed in float64 and in a fixed order."""
        size = window.record.state.layout.size
        block = self._block(len(window.record.grads), way)
        blocks = range(0, size, block)
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


class _Open(NamedTuple):
    """A window under way, the weights [m] of its coordinates if they are a sample, the sizes of the whole tensors."""

    record: Record
    weights: Tensor | None
    sizes: Sequence[int]


class _Way(NamedTuple):
    """How an update is run forward and gone back through."""

    advance: Update
    replay: Replay
    own: Callable[[OptimiserState], OptimiserState]
    threaded: bool
    pull: Pull | None = None
    at_once: int | None = None


def _way(update: Update) -> _Way:
    if not isinstance(update, BlockUpdate):
        return _Way(update, taped_replay(update), lambda state: state, False)
    back = update.replay or taped_replay(update.update)
    threaded = update.replay is not None and update.at_once is None
    return _Way(update.advance, back, _copy, threaded, update.pull, update.at_once)


def _added(total: Params, pieces: Params) -> Params:
    """The sums in float64."""
    return {name: piece.double() + total.get(name, 0.0) for name, piece in pieces.items()}


def _copy(state: OptimiserState) -> OptimiserState:
    """A state that may be overwritten; blank numbers, which take no memory, are left to be made when written to."""
    own = {name: value if _blank(value) else value.clone() for name, value in state.coordinates.items()}
    return state._replace(coordinates=own)


def _blank(value: Tensor) -> bool:
    """Whether it is one column expanded to all."""
    return value.shape[-1] > 1 and value.stride(-1) == 0


def taped_replay(update: Update) -> Replay:
    """The replay of any update on autograd's tape: about 0.5 KB a coordinate of the block and step for an LSTM."""

    def replay(phi: Params, window: Window) -> Params:
        leaves = {name: value.detach().requires_grad_() for name, value in phi.items()}
        return gradient_of(_moved(update, leaves, window), leaves)

    return replay


@torch.enable_grad()
def _moved(update: Update, phi: Params, window: Window) -> Tensor:
    """Σ_t q_t θ_{t+1} over a block's steps, whose slopes are those of the meta-loss."""
    state, params, total = window.state, window.params, torch.zeros(())
    for grads, source, loss, after in zip(window.grads, window.sources, window.losses, window.shared, strict=True):
        change, state = update(phi, grads, state, params, loss, after)
        params = params + change
        total = total + (source * params).sum()
    return total


def taped_pull(update: Update) -> Pull:
    """∂(meta-loss)/∂(statistic) of any update that takes its statistic from `after`, on autograd's tape."""

    def pull(phi: Params, window: Window) -> Tensor:
        given = [
            dict(shared) | {"statistic": shared["statistic"].detach().requires_grad_()} for shared in window.shared
        ]
        total = _moved(update, phi, window._replace(shared=given))
        leaves = {str(t): shared["statistic"] for t, shared in enumerate(given)}
        return torch.stack(list(gradient_of(total, leaves).values())).double()

    return pull


def stratified(layout: Layout, share: float, source: torch.Generator) -> tuple[Tensor, Tensor, Layout]:
    """A random share of every tensor's coordinates, at least two where there are two, without replacement.

    Returns:
        Their places [m], rising; the inverse of the chance each had [m]; and the layout of the sample, which keeps all
        names.
    """
    places, weights, counts, first = [], [], [], 0
    for size in layout.sizes:
        count = _count(share, size)
        places.append(first + torch.randperm(size, generator=source)[:count].sort().values)
        weights.append(torch.full((count,), size / max(count, 1), dtype=torch.float64))
        counts.append((count,))
        first += size
    empty = torch.empty(0)
    return (
        torch.cat([empty.long(), *places]),
        torch.cat([empty.double(), *weights]),
        Layout(layout.names, tuple(counts), fan_ins=layout.fan_ins),
    )


def _count(share: float, size: int) -> int:
    """How many of a tensor's coordinates a share of them are."""
    return max(ceil(share * size), min(size, 2))


def _seconds(function: Callable[[], Result]) -> tuple[float, Result]:
    """How long it takes the second time, and what it gives."""
    function()
    return _timed(function)


def _timed(function: Callable[[], Result]) -> tuple[float, Result]:
    """How long it takes, a GPU's work included, and what it gives."""
    _wait()
    start = time.perf_counter()
    result = function()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
