"""Scores of optimisers over tasks and seeds: steps to a target, interquartile means, profiles, bootstrap intervals.

A loss that is not finite counts as infinite everywhere: a run that diverged is never dropped, and it costs its
optimiser whatever an infinite loss costs. All numbers are float64, and none of the functions gives NaN.

References: Dahl et al., "Benchmarking neural network training algorithms" (AlgoPerf), 2023, for the steps to a target
and the profiles; Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice" (rliable),
2021, for interquartile means, bootstrap intervals stratified by task and the probability of improvement; Metz et al.,
"VeLO: training versatile learned optimizers by scaling up" (VeLOdrome), 2022, for the speed-up over a tuned baseline;
Schneider et al., "DeepOBS: a deep learning optimizer benchmark suite", 2019, for rates tuned with equal budgets.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST = 1e-12
"""Loss below which `log_losses` is no logarithm."""


class Interval(NamedTuple):
    """A number and its 95 % interval.

    Attributes:
        value: Number.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


class Duel(NamedTuple):
    """How often one optimiser's losses are below another's.

    Attributes:
        tasks: Number of tasks.
        below: Number of tasks on which the mean loss of the first is lower, with its bootstrap interval.
        above: Number of tasks on which it is higher; the rest are even, such as those where both diverged.
        improvement: Probability of improvement, with its bootstrap interval.
    """

    tasks: int
    below: Interval
    above: int
    improvement: Interval


def finite_or_infinite(losses: Tensor) -> Tensor:
    """The losses as float64, +∞ where they are not finite; −∞ as well, which no run can mean."""
    found = losses.double()
    return torch.where(found.isfinite(), found, torch.inf)


def log_losses(losses: Tensor) -> Tensor:
    """The logarithm ln ℓ as float64, and from ε = 10⁻¹² down ln ε − asinh(ε − ℓ): losses below 0 have an order, too.

    It rises with the loss everywhere; +∞ where the loss is not finite.
    """
    found = finite_or_infinite(losses)
    beyond = math.log(_LEAST) - (_LEAST - found).asinh()
    return torch.where(found > _LEAST, found.clamp(min=_LEAST).log(), beyond)


def loss_matrix(losses: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Recorded steps in their order, [K], and the losses there, [K, S], +∞ where they are not finite."""
    steps = sorted(losses)
    return torch.tensor(steps, dtype=torch.float64), torch.stack([finite_or_infinite(losses[step]) for step in steps])


def beginning(losses: Mapping[int, Tensor], first: Tensor) -> Tensor:
    """The loss of each seed before the first step, [S].

    The smaller one of the loss in training mode and, where step 0 was recorded, the one in test mode: with batch
    normalisation, whose statistics are then still untouched, the latter may be anything.

    Args:
        losses: Step → loss of each seed.
        first: Loss of each seed at step 0 in training mode.
    """
    begin = finite_or_infinite(first)
    return torch.minimum(begin, finite_or_infinite(losses[0])) if 0 in losses else begin


def diverged(losses: Mapping[int, Tensor], first: Tensor) -> Tensor:
    """Whether each seed's final loss is not finite or above its loss at the beginning, [S].

    Args:
        losses: Step → loss of each seed.
        first: Loss of each seed at step 0 in training mode.
    """
    final = finite_or_infinite(losses[max(losses)])
    return ~final.isfinite() | (final > beginning(losses, first))


def steps_to_target(steps: Tensor, means: Tensor, target: Tensor | float) -> Tensor:
    """The step at which a curve first is at or below its target; +∞ where it never is.

    Between the recorded steps the curve is a straight line. Where the record before is infinite, the step is that of
    the record at or below the target.

    Args:
        steps: Recorded steps, rising, [K].
        means: Curves, [K, ...]; usually means over seeds, since the target is one: the curves of single seeds cross it
            or not by the luck of their problem.
        target: Target of each curve, broadcast to [...].
    """
    reached = means <= target
    index = reached.double().argmax(0)  # the first of the greatest
    before = (index - 1).clamp_min(0)
    here, there = (means.gather(0, place[None])[0] for place in (index, before))
    drop = there - here
    # 0 where the first record is at the target already; 1 where the one before is infinite.
    part = torch.where(index > 0, ((there - target) / drop.where(drop > 0, 1)).nan_to_num(nan=1.0), 0.0)
    found = steps[before] + part.clamp(0, 1) * (steps[index] - steps[before])
    return torch.where(reached.any(0), found, torch.inf)


def speed_up(steps: Tensor, means: Tensor, target: Tensor | float, budget: int) -> Tensor:
    """Budget over steps to the target: 2 where half the steps suffice, 0 where the target is never reached.

    Args:
        steps: Recorded steps, rising, [K].
        means: Curves, [K, ...].
        target: Target of each curve, broadcast to [...]: the final loss of a baseline.
        budget: Steps of that baseline.
    """
    return budget / steps_to_target(steps, means, target).clamp_min(1)  # one step is the least that can be spent


def normalised(losses: Tensor, targets: Tensor, room: Tensor | float) -> Tensor:
    """(loss − target) / room, seed by seed: 0 is the target, 1 the beginning, below 0 better than the target.

    Unlike a ratio of losses this is the same for losses of any unit and offset, such as those of densities, which may
    be negative. The target is that of the same seed, which is the same problem: an optimiser that equals the target's
    has 0 whatever is made of the seeds, where from a mean of the targets skewed losses would differ.

    Args:
        losses: Losses, [..., S].
        targets: Losses of a baseline on the same problems, finite, [..., S].
        room: Mean loss at the beginning less the mean target, above 0, broadcast to [..., S].
    """
    return (finite_or_infinite(losses) - targets) / room


def interquartile_mean(values: Tensor) -> Tensor:
    """The mean of what is left along the last axis without the lowest and the highest quarter, each rounded down.

    Args:
        values: Values, [..., N], N at least 1; a quarter of them may be infinite before the mean is.
    """
    count = values.shape[-1]
    cut = count // 4
    return values.double().sort(-1).values[..., cut : count - cut].mean(-1)


def performance_profile(scores: Tensor, thresholds: Tensor) -> Tensor:
    """The share of scores at or above each threshold, [..., K]; it falls as the threshold rises.

    Args:
        scores: Scores, [..., N], higher is better.
        thresholds: Thresholds, [K].
    """
    return (scores[..., None, :] >= thresholds[:, None]).double().mean(-1)


def probability_of_improvement(a: Tensor, b: Tensor) -> Tensor:
    """The probability that a run of `a` on a task chosen at random has a lower loss than a run of `b`; ties are half.

    The mean over tasks of the share of the S² pairs of seeds, the statistic of Mann and Whitney.

    Args:
        a: Losses, [..., T, S].
        b: Losses, [..., T, S].
    """
    return _pairs(a, b).mean((-3, -2, -1))


def seed_draws(tasks: int, seeds: int, resamples: int, generator: torch.Generator) -> Tensor:
    """Indices of seeds drawn with replacement within every task, [B, T, S]: a bootstrap stratified by task.

    The tasks stay as they are: the intervals say what other seeds would change, not what other tasks would. All
    optimisers take the same draws, since runs of one seed share their problem.

    Args:
        tasks: T, the number of tasks.
        seeds: S, the number of seeds of each.
        resamples: B, the number of draws.
        generator: Source of randomness.
    """
    return torch.randint(seeds, (resamples, tasks, seeds), generator=generator)


def drawn(values: Tensor, draws: Tensor) -> Tensor:
    """The values of the drawn seeds, [B, T, S].

    Args:
        values: Value of each task and seed, [T, S].
        draws: Indices from `seed_draws`, [B, T, S].
    """
    return values.expand(draws.shape).gather(-1, draws)


def percentiles(resampled: Tensor) -> tuple[Tensor, Tensor]:
    """The 2.5th and 97.5th percentile along the first axis, rounded outwards to values that occurred.

    No interpolation: between a finite value and an infinite one it would give NaN.

    Args:
        resampled: Statistic of each resample, [B, ...].
    """
    ordered, last = resampled.sort(0).values, len(resampled) - 1
    return ordered[math.floor(0.025 * last)], ordered[math.ceil(0.975 * last)]


def interquartile_interval(values: Tensor, again: Tensor) -> Interval:
    """The interquartile mean over all tasks and seeds with its bootstrap interval.

    With few seeds it covers less than 95 %: about 90 % with five, measured on normal values of 15 tasks.

    Args:
        values: Value of each task and seed, [T, S].
        again: Values of each resample, [B, T, S].
    """
    low, high = percentiles(interquartile_mean(again.flatten(1)))
    return Interval(float(interquartile_mean(values.flatten())), float(low), float(high))


def duel(a: Tensor, b: Tensor, draws: Tensor) -> Duel:
    """How often the final losses of `a` are below those of `b`.

    Args:
        a: Loss of each task and seed, [T, S], finite or +∞.
        b: Loss of each task and seed, [T, S], finite or +∞.
        draws: Indices from `seed_draws`, [B, T, S].
    """
    below = int((a.mean(-1) < b.mean(-1)).sum())
    again, other = drawn(a, draws), drawn(b, draws)
    low, high = percentiles((again.mean(-1) < other.mean(-1)).sum(-1))
    chance = float(probability_of_improvement(a, b))
    pairs = _pairs(a, b)
    # How often a draw has each seed: the S² pairs of every draw would take S times the memory.
    weights = torch.zeros(draws.shape, dtype=torch.float64).scatter_add_(-1, draws, torch.ones(draws.shape).double())
    chances = torch.einsum("bts,tsr,btr->b", weights, pairs, weights) / pairs.numel()
    worse, better = percentiles(chances)
    above = int((a.mean(-1) > b.mean(-1)).sum())
    return Duel(len(a), Interval(below, int(low), int(high)), above, Interval(chance, float(worse), float(better)))


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """1 where a run of `a` has the lower loss, ½ where it is that of the run of `b`, else 0, [..., T, S, S]."""
    first, second = a[..., :, None], b[..., None, :]
    return (first < second).double() + 0.5 * (first == second).double()
