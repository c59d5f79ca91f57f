"""The learned rule in Triton: one step for blocks of coordinates, and the helpers that the replay shares.

Tiles are [features or hidden, coordinates], zero-padded to powers of two; z = [features; h; 1] is the argument of the
first product (see `folding.Folded`). Numbers are read in their own dtype and computed with in float32.

`S` holds all that is fixed for an optimiser, `packing.Constants`; it is compiled in. Helpers are inlined, and an
intermediate result that a caller does not use costs nothing.
"""

import triton
import triton.language as tl

from l2lopt.kernels.triton import packing
from l2lopt.optimisers import rules

ADDITIVE: tl.constexpr = tl.constexpr(packing.ADDITIVE)
BOUNDED: tl.constexpr = tl.constexpr(packing.BOUNDED)
GATED: tl.constexpr = tl.constexpr(packing.GATED)
# Columns of `packing.table`, in the order of its names.
(
    LOG_STEP, LEAST, PER_P, M_NEW, V_OLD, V_NEW, RNN_EPS, M_UNBIAS, G_UNBIAS,
    MOM_V_OLD, MOM_V_NEW, MOM_EPS,
) = (tl.constexpr(packing.SLOTS.index(name)) for name in packing.SLOTS)  # fmt: skip
MOMENTUM: tl.constexpr = tl.constexpr(len(packing.SLOTS))
LEAST_DIRECTION: tl.constexpr = tl.constexpr(rules.LEAST)


@triton.jit
def tanh(x):
    """Tanh x = ±(1 − e) / (1 + e) and its derivative 4e / (1 + e)², e = exp(−2|x|); the derivative keeps its digits."""
    # e is at most 1; exp(2x) would overflow, and ∞ / ∞ is not a number.
    e = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + e)
    size = (1.0 - e) * inverse
    return tl.where(x < 0, -size, size), 4.0 * e * inverse * inverse


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x))."""
    # exp may overflow where x is very negative: 1 / ∞ = 0 is right there.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def rounded(x, pointer):
    """`x` in the dtype behind `pointer`, rounded to nearest: by hand to bfloat16, as the interpreter cuts bits off."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # Half to even: ties go up only where the last bit that stays is 1.
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def put(z, rows, at: tl.constexpr, value):
    """`z` with `value` [B] in row `at`."""
    # A tile cannot be indexed: one row is set by a choice over all of them.
    return tl.where((rows == at)[:, None], value[None, :], z)


@triton.jit
def average(pointer, at, old, new, value, mask, kept):
    """Moves a running mean on to old · mean + new · value where `kept`; returns the mean after it for all."""
    mean = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    mean = old * mean + new * value
    tl.debug_barrier()  # several warps may load a mean that one of them stores
    tl.store(pointer + at, rounded(mean, pointer), mask=kept)
    return mean


@triton.jit
def approach(pointer, at, new, value, mask, kept):
    """Moves a running mean on to mean + new · (value − mean) where `kept`; returns the mean after it for all."""
    mean = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    mean += new * (value - mean)
    tl.debug_barrier()
    tl.store(pointer + at, rounded(mean, pointer), mask=kept)
    return mean


@triton.jit
def look(z, rows, g, theta, finite, mask, memory, at, scalars, losses, S: tl.constexpr):
    """`z` with the features; the inputs' running means, at `at` of each of `memory`, move on where g is finite.

    `scalars` is a row of `packing.table`, `losses` the two features of the row's loss.
    """
    kept = mask & finite
    if S.LOG_AT >= 0:
        least = tl.load(scalars + LEAST)
        size = tl.abs(g)
        z = put(z, rows, S.LOG_AT, tl.log(tl.maximum(size, least)) * tl.load(scalars + PER_P))
        sign = tl.where(g > 0, 1.0, -1.0)
        z = put(z, rows, S.LOG_AT + 1, tl.where(size >= least, sign, g / least))
    if S.RNN_AT >= 0:
        m = approach(memory[S.RNN], at, tl.load(scalars + M_NEW), g, mask, kept)
        old, new = tl.load(scalars + V_OLD), tl.load(scalars + V_NEW)
        scale = tl.sqrt(average(memory[S.RNN + 1], at, old, new * g, g, mask, kept)) + tl.load(scalars + RNN_EPS)
        z = put(z, rows, S.RNN_AT, m / scale * tl.load(scalars + M_UNBIAS))
        z = put(z, rows, S.RNN_AT + 1, g / scale * tl.load(scalars + G_UNBIAS))
    if S.STEP_AT >= 0:
        z = put(z, rows, S.STEP_AT, tl.zeros_like(g) + tl.load(scalars + LOG_STEP))
    if S.THETA_AT >= 0:
        z = put(z, rows, S.THETA_AT, theta)
    if S.LOSS_AT >= 0:
        z = put(z, rows, S.LOSS_AT, tl.zeros_like(g) + tl.load(losses))
        z = put(z, rows, S.LOSS_AT + 1, tl.zeros_like(g) + tl.load(losses + 1))
    if S.MOM_AT >= 0:
        MOMENTA: tl.constexpr = S.MOMENTA
        old, new = tl.load(scalars + MOM_V_OLD), tl.load(scalars + MOM_V_NEW)
        v = average(memory[S.MOM + MOMENTA], at, old, new * g, g, mask, kept)
        scale = tl.sqrt(v) + tl.load(scalars + MOM_EPS)
        for k in tl.static_range(MOMENTA):
            m = approach(memory[S.MOM + k], at, tl.load(scalars + MOMENTUM + 2 * k), g, mask, kept)
            z = put(z, rows, S.MOM_AT + k, m / scale * tl.load(scalars + MOMENTUM + 2 * k + 1))
    return z


@triton.jit
def layers(weights, S: tl.constexpr):
    """The products' tiles: four [P, K] on z; for an IHC-LSTM three [P, P] on v with their biases [P], else any."""
    P: tl.constexpr = S.P
    K: tl.constexpr = S.K
    gate, column, inner = tl.arange(0, P), tl.arange(0, K), tl.arange(0, P)
    first = weights + gate[:, None] * K + column[None, :]
    w0, w1, w2, w3 = tl.load(first), tl.load(first + P * K), tl.load(first + 2 * P * K), tl.load(first + 3 * P * K)
    second = weights + 4 * P * K + gate[:, None] * P + inner[None, :]
    bias = weights + 4 * P * K + 3 * P * P + gate
    if S.IHC:
        s0, s1, s2 = tl.load(second), tl.load(second + P * P), tl.load(second + 2 * P * P)
        b0, b1, b2 = tl.load(bias), tl.load(bias + P), tl.load(bias + 2 * P)
    else:
        s0, s1, s2, b0, b1, b2 = w0, w0, w0, gate, gate, gate
    return w0, w1, w2, w3, s0, s1, s2, b0, b1, b2


@triton.jit
def head(weights, S: tl.constexpr):
    """The head's two rows [P] and their biases."""
    P: tl.constexpr = S.P
    start = weights + 4 * P * S.K + 3 * P * P + 3 * P
    row = start + tl.arange(0, P)
    return tl.load(row), tl.load(row + P), tl.load(start + 2 * P), tl.load(start + 2 * P + 1)


@triton.jit
def gates(z, tiles, S: tl.constexpr):
    """i, f, o, a, the derivative of a and, of an IHC-LSTM, g, F(h) − x and v; all [P, B]."""
    w0, w1, w2, w3, s0, s1, s2, b0, b1, b2 = tiles
    if S.IHC:
        g = sigmoid(tl.dot(w0, z, input_precision=S.PRECISION))
        x = tl.dot(w2, z, input_precision=S.PRECISION)
        back = tl.dot(w1, z, input_precision=S.PRECISION) - x
        a = tl.dot(w3, z, input_precision=S.PRECISION)  # an IHC-LSTM's candidate is linear
        by_a = a
        v = x + g * back
        f = sigmoid(tl.dot(s0, v, input_precision=S.PRECISION) + b0[:, None])
        i = sigmoid(tl.dot(s1, v, input_precision=S.PRECISION) + b1[:, None])
        o = sigmoid(tl.dot(s2, v, input_precision=S.PRECISION) + b2[:, None])
    else:
        i = sigmoid(tl.dot(w0, z, input_precision=S.PRECISION))
        f = sigmoid(tl.dot(w1, z, input_precision=S.PRECISION))
        o = sigmoid(tl.dot(w2, z, input_precision=S.PRECISION))
        a, by_a = tanh(tl.dot(w3, z, input_precision=S.PRECISION))
        g, back, v = i, i, i
    return i, f, o, a, by_a, g, back, v


@triton.jit
def cell_forward(i, f, o, a, c):
    """One step c' = f∘c + i∘a, h' = o∘tanh c': returns h', c', tanh c' and the derivative of the latter."""
    c_after = f * c + i * a
    tanh_c, by_c = tanh(c_after)
    return o * tanh_c, c_after, tanh_c, by_c


@triton.jit
def gate(o, theta, before, rule, k: tl.constexpr):
    """The argument of the gated rule's gate k: o + w_θ θ + w_g gate₋ + b."""
    return o + tl.load(rule + 2 + k) * theta + tl.load(rule + 4 + k) * before + tl.load(rule + k)


@triton.jit
def share(g, adam):
    """The share of its update that a coordinate of gradient g and Adam's direction `adam` takes, `rules.activity`."""
    return tl.where(g == 0, tl.minimum(tl.abs(adam) / LEAST_DIRECTION, 1.0), 1.0)


@triton.jit
def activity(g, z, rows, S: tl.constexpr):
    """`share` by the features in z; 1 for the gated rule."""
    adam = tl.zeros_like(g)
    if S.RULE == GATED:
        adam += 1.0
    elif S.RNN_AT >= 0:
        adam += tl.sum(tl.where((rows == S.RNN_AT)[:, None], z, 0.0), axis=0)
    return share(g, adam)


@triton.jit
def rule_forward(h, heads, z, rows, g, theta, forgot, let_in, rule, scale, S: tl.constexpr):
    """The update [B], or the direction of a rule with a statistic, and three numbers that `backward` needs.

    These are the derivative of tanh; the gates f, i and 1 − f, of which the first two are the next memory; or
    o₀ − m̂/√v̂ and exp o₁. Any number stands for those that a rule does not have.
    """
    head0, head1, bias0, bias1 = heads
    # Sums: `tl.dot` would need the head's rows padded to 16, and there are two at most.
    o0 = tl.sum(head0[:, None] * h, axis=0) + bias0
    o1 = tl.sum(head1[:, None] * h, axis=0) + bias1
    first, second, third = o0, o1, o1
    if S.RULE == ADDITIVE:
        u = tl.load(scale) * o0
    elif S.RULE == BOUNDED:
        value, first = tanh(o0)
        u = tl.load(scale) * value
    elif S.RULE == GATED:
        into_f, into_i = gate(o0, theta, forgot, rule, 0), gate(o1, theta, let_in, rule, 1)
        # 1 − f is σ of the negative: f is near 1, and the difference would lose its digits.
        first, second, third = sigmoid(into_f), sigmoid(into_i), sigmoid(-into_f)
        u = -third * theta - tl.load(scale) * second * g
    else:
        if S.NOMINAL:
            first = o0 - tl.sum(tl.where((rows == S.RNN_AT)[:, None], z, 0.0), axis=0)
        second = tl.exp(o1)
        u = first * second
    return u, first, second, third


@triton.jit
def step(
    grads, thetas, update, skipped, state, memory, weights, rule, scalars, losses, scale,
    n, stride, blocks, total, S: tl.constexpr,
):  # fmt: skip
    """One step in place for all coordinates: the state moves on, `update` is written, `skipped` counted per block.

    A rule with a statistic leaves its direction in `update`. A row of n coordinates has `blocks` blocks, all rows
    `total`; `stride` is the distance between two features of the state.
    """
    B: tl.constexpr = S.B
    h, c, forget, input_ = state
    rows, hidden, lanes = tl.arange(0, S.K), tl.arange(0, S.P), tl.arange(0, B)
    wide = tl.full([], 1, tl.int64)  # a product with it does not overflow
    tiles, heads = layers(weights, S), head(weights, S)
    for block in range(tl.program_id(0), total, tl.num_programs(0)):
        row = block // blocks
        column = (block % blocks) * B + lanes
        mask = column < n
        at = wide * row * n + column
        g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
        theta = tl.load(thetas + at, mask=mask, other=0.0).to(tl.float32)
        # By the square, which v takes; NaN compares false, so it is caught as well.
        finite = g * g < float("inf")
        tl.store(skipped + block, tl.sum((mask & (finite == 0)).to(tl.int32), axis=0))
        g = tl.where(finite, g, 0.0)
        is_h = ((rows >= S.F) & (rows < S.F + S.M))[:, None]
        # Rows that are not h's point outside the state; the mask keeps them from being read.
        below = (rows - S.F).to(tl.int64)[:, None] * stride + at[None, :]
        z = tl.load(h + below, mask=is_h & mask[None, :], other=0.0).to(tl.float32)
        z = put(z, rows, S.F + S.M, tl.zeros_like(g) + 1.0)
        z = look(z, rows, g, theta, finite, mask, memory, at, scalars, losses + row * 2, S)
        i, f, o, a, _, _, _, _ = gates(z, tiles, S)
        place = hidden.to(tl.int64)[:, None] * stride + at[None, :]
        there = (hidden < S.M)[:, None] & mask[None, :]
        c_before = tl.load(c + place, mask=there, other=0.0).to(tl.float32)
        h_after, c_after, _, _ = cell_forward(i, f, o, a, c_before)  # c is read late: across products it would spill
        moves = there & finite[None, :]
        # In place without a race: no other program has these coordinates.
        tl.store(c + place, rounded(c_after, c), mask=moves)
        tl.store(h + place, rounded(h_after, h), mask=moves)
        forgot, let_in = theta, theta
        if S.RULE == GATED:
            forgot = tl.load(forget + at, mask=mask, other=0.0).to(tl.float32)
            let_in = tl.load(input_ + at, mask=mask, other=0.0).to(tl.float32)
        u, first, second, _ = rule_forward(h_after, heads, z, rows, g, theta, forgot, let_in, rule, scale, S)
        if S.RULE == GATED:
            tl.store(forget + at, rounded(first, forget), mask=mask & finite)
            tl.store(input_ + at, rounded(second, input_), mask=mask & finite)
        if not S.DIRECTED:  # a rule with a statistic counts coordinates at rest: see `finish`
            u *= activity(g, z, rows, S)
        tl.store(update + at, rounded(tl.where(finite, u, 0.0), update), mask=mask)


@triton.jit
def squares(values, starts, sizes, sums, n, chunks, B: tl.constexpr, ROUNDS: tl.constexpr):
    """Each chunk's sum of squares in float64: chunk k of a row has `sizes[k]` values from `starts[k]` on."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    start, size = tl.load(starts + chunk), tl.load(sizes + chunk)
    # A chunk has one program, so no atomic addition and always the same order.
    total = tl.zeros([B], tl.float64)
    for turn in range(ROUNDS):
        lane = turn * B + tl.arange(0, B)
        at = tl.full([], 1, tl.int64) * row * n + start + lane
        value = tl.load(values + at, mask=lane < size, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + row * chunks + chunk, tl.sum(total, axis=0))


@triton.jit
def finish(
    update, grads, thetas, memory, scalars, statistic, scale, starts, sizes, tensors, n, count,
    S: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Replaces d by S_t (a d / R − λθ), and by 0 where the gradient is not finite.

    a is `share`, of the running means after the step; `tensors` says whose R a chunk takes.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    start, size = tl.load(starts + chunk), tl.load(sizes + chunk)
    step_size = tl.load(scale)
    measured = tl.load(statistic + row * count + tl.load(tensors + chunk)).to(tl.float32)
    for turn in range(ROUNDS):
        lane = turn * B + tl.arange(0, B)
        mask = lane < size
        at = tl.full([], 1, tl.int64) * row * n + start + lane
        g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(update + at, mask=mask, other=0.0).to(tl.float32) / measured
        adam = tl.zeros_like(g)
        if S.RNN_AT >= 0:
            # Read where there is no gradient only: elsewhere they do not count.
            silent = mask & (g == 0)
            v = tl.load(memory[S.RNN + 1] + at, mask=silent, other=0.0).to(tl.float32)
            adam = tl.load(memory[S.RNN] + at, mask=silent, other=0.0).to(tl.float32)
            adam = adam / (tl.sqrt(v) + tl.load(scalars + RNN_EPS)) * tl.load(scalars + M_UNBIAS)
        d *= share(g, adam)
        if S.DECAY > 0:
            d -= S.DECAY * tl.load(thetas + at, mask=mask, other=0.0).to(tl.float32)
        # d is 0 already where g is not finite, but weight decay is not.
        u = tl.where(g * g < float("inf"), step_size * d, 0.0)
        tl.store(update + at, rounded(u, update), mask=mask)
