"""The learned rule in Triton: one step, and the way back through a window of steps, for blocks of coordinates.

Tiles are [features or hidden, coordinates], zero-padded to powers of two; z = [features; h; 1] is what the first
product takes (see `folding.Folded`). Numbers are read in their own dtype and computed with in float32.

What is fixed for an optimiser (a `Shape`) is compiled in. Names in capitals are such constants: F features, M hidden, P
and K the padded sizes of gates and of z; the …_AT say in which row of z an input's features begin, -1 where it is not
there; MOMENTA means, RNN and MOM their places in `memory`; DECAY is λ.
"""

import triton
import triton.language as tl

ADDITIVE: tl.constexpr = tl.constexpr(0)
BOUNDED: tl.constexpr = tl.constexpr(1)
GATED: tl.constexpr = tl.constexpr(2)
DIRECTED: tl.constexpr = tl.constexpr(3)


@triton.jit
def tanh(x):
    """Tanh x = ±(1 − e) / (1 + e) and its slope 4e / (1 + e)², with e = exp(−2|x|); the slope keeps its digits."""
    e = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + e)
    size = (1.0 - e) * inverse
    return tl.where(x < 0, -size, size), 4.0 * e * inverse * inverse


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def as_kept(x, pointer):
    """`x` in the dtype behind `pointer`, rounded to nearest: by hand to bfloat16, as the interpreter cuts bits off."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def put(z, rows, at: tl.constexpr, value):
    """`z` with `value` [B] in row `at`."""
    return tl.where((rows == at)[:, None], value[None, :], z)


@triton.jit
def look(
    z, rows, g, theta, finite, mask, memory, at, scalars, losses,
    LOG_AT: tl.constexpr, RNN_AT: tl.constexpr, MOM_AT: tl.constexpr, STEP_AT: tl.constexpr, THETA_AT: tl.constexpr,
    LOSS_AT: tl.constexpr, RNN: tl.constexpr, MOM: tl.constexpr, MOMENTA: tl.constexpr,
):  # fmt: skip
    """`z` with the features; the inputs' running values, at `at` of each of `memory`, move on where g is finite.

    `scalars` is a row of `scalars.table`, `losses` the two features of the row's loss.
    """
    kept = mask & finite
    if LOG_AT >= 0:
        least = tl.load(scalars + 1)
        size = tl.abs(g)
        z = put(z, rows, LOG_AT, tl.log(tl.maximum(size, least)) * tl.load(scalars + 2))
        sign = tl.where(g > 0, 1.0, -1.0)
        z = put(z, rows, LOG_AT + 1, tl.where(size >= least, sign, g / least))
    if RNN_AT >= 0:
        m = tl.load(memory[RNN] + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(memory[RNN + 1] + at, mask=mask, other=0.0).to(tl.float32)
        m += tl.load(scalars + 3) * (g - m)
        v = tl.load(scalars + 4) * v + tl.load(scalars + 5) * g * g
        tl.store(memory[RNN] + at, as_kept(m, memory[RNN]), mask=kept)
        tl.store(memory[RNN + 1] + at, as_kept(v, memory[RNN + 1]), mask=kept)
        scale = tl.sqrt(v) + tl.load(scalars + 6)
        z = put(z, rows, RNN_AT, m / scale * tl.load(scalars + 7))
        z = put(z, rows, RNN_AT + 1, g / scale * tl.load(scalars + 8))
    if STEP_AT >= 0:
        z = put(z, rows, STEP_AT, tl.zeros_like(g) + tl.load(scalars))
    if THETA_AT >= 0:
        z = put(z, rows, THETA_AT, theta)
    if LOSS_AT >= 0:
        z = put(z, rows, LOSS_AT, tl.zeros_like(g) + tl.load(losses))
        z = put(z, rows, LOSS_AT + 1, tl.zeros_like(g) + tl.load(losses + 1))
    if MOM_AT >= 0:
        v = tl.load(memory[MOM + MOMENTA] + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(scalars + 9) * v + tl.load(scalars + 10) * g * g
        tl.store(memory[MOM + MOMENTA] + at, as_kept(v, memory[MOM + MOMENTA]), mask=kept)
        scale = tl.sqrt(v) + tl.load(scalars + 11)
        for k in tl.static_range(MOMENTA):
            m = tl.load(memory[MOM + k] + at, mask=mask, other=0.0).to(tl.float32)
            m += tl.load(scalars + 12 + 2 * k) * (g - m)
            tl.store(memory[MOM + k] + at, as_kept(m, memory[MOM + k]), mask=kept)
            z = put(z, rows, MOM_AT + k, m / scale * tl.load(scalars + 13 + 2 * k))
    return z


@triton.jit
def weights_of(weights, P: tl.constexpr, K: tl.constexpr, IHC: tl.constexpr):
    """The products' tiles: four [P, K] on z; for an IHC-LSTM three [P, P] on v with their biases [P], else zeros."""
    gate, column, inner = tl.arange(0, P), tl.arange(0, K), tl.arange(0, P)
    first = weights + gate[:, None] * K + column[None, :]
    w0, w1, w2, w3 = tl.load(first), tl.load(first + P * K), tl.load(first + 2 * P * K), tl.load(first + 3 * P * K)
    second = weights + 4 * P * K + gate[:, None] * P + inner[None, :]
    bias = weights + 4 * P * K + 3 * P * P + gate
    if IHC:
        s0, s1, s2 = tl.load(second), tl.load(second + P * P), tl.load(second + 2 * P * P)
        b0, b1, b2 = tl.load(bias), tl.load(bias + P), tl.load(bias + 2 * P)
    else:
        s0, s1, s2, b0, b1, b2 = w0, w0, w0, gate, gate, gate
    return w0, w1, w2, w3, s0, s1, s2, b0, b1, b2


@triton.jit
def gates(z, tiles, IHC: tl.constexpr, PRECISION: tl.constexpr):
    """i, f, o, a, the slope of a and, of an IHC-LSTM, g, F(h) − x and v; all [P, B]."""
    w0, w1, w2, w3, s0, s1, s2, b0, b1, b2 = tiles
    if IHC:
        g = sigmoid(tl.dot(w0, z, input_precision=PRECISION))
        x = tl.dot(w2, z, input_precision=PRECISION)
        back = tl.dot(w1, z, input_precision=PRECISION) - x
        a = tl.dot(w3, z, input_precision=PRECISION)  # an IHC-LSTM's candidate is linear
        slope = a
        v = x + g * back
        f = sigmoid(tl.dot(s0, v, input_precision=PRECISION) + b0[:, None])
        i = sigmoid(tl.dot(s1, v, input_precision=PRECISION) + b1[:, None])
        o = sigmoid(tl.dot(s2, v, input_precision=PRECISION) + b2[:, None])
    else:
        i = sigmoid(tl.dot(w0, z, input_precision=PRECISION))
        f = sigmoid(tl.dot(w1, z, input_precision=PRECISION))
        o = sigmoid(tl.dot(w2, z, input_precision=PRECISION))
        a, slope = tanh(tl.dot(w3, z, input_precision=PRECISION))
        g, back, v = i, i, i
    return i, f, o, a, slope, g, back, v


@triton.jit
def head_of(weights, k: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    """The head's row k [P] and its bias."""
    start = weights + 4 * P * K + 3 * P * P + 3 * P
    return tl.load(start + k * P + tl.arange(0, P)), tl.load(start + 2 * P + k)


@triton.jit
def gate(o, theta, before, rule, k: tl.constexpr):
    """The sum in the gated rule's gate k: o + w_θ θ + w_g gate₋ + b."""
    return o + tl.load(rule + 2 + k) * theta + tl.load(rule + 4 + k) * before + tl.load(rule + k)


@triton.jit
def step(
    grads, params, update, skipped, h, c, memory, forget, input_, weights, rule, scalars, losses, scale,
    n, stride, blocks, total,
    F: tl.constexpr, M: tl.constexpr, P: tl.constexpr, K: tl.constexpr, B: tl.constexpr, IHC: tl.constexpr,
    RULE: tl.constexpr, NOMINAL: tl.constexpr,
    LOG_AT: tl.constexpr, RNN_AT: tl.constexpr, MOM_AT: tl.constexpr, STEP_AT: tl.constexpr, THETA_AT: tl.constexpr,
    LOSS_AT: tl.constexpr, RNN: tl.constexpr, MOM: tl.constexpr, MOMENTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step in place for all coordinates: the state moves on, `update` is written, `skipped` counted per block.

    A rule with a statistic leaves its direction in `update`. A row of n coordinates has `blocks` blocks, all rows
    `total`; `stride` is the distance between two features of the state.
    """
    rows, hidden, lanes = tl.arange(0, K), tl.arange(0, P), tl.arange(0, B)
    wide = tl.full([], 1, tl.int64)  # a product with it does not overflow
    tiles = weights_of(weights, P, K, IHC)
    head0, bias0 = head_of(weights, 0, P, K)
    head1, bias1 = head_of(weights, 1, P, K)
    for block in range(tl.program_id(0), total, tl.num_programs(0)):
        row = block // blocks
        column = (block % blocks) * B + lanes
        mask = column < n
        at = wide * row * n + column
        g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
        theta = tl.load(params + at, mask=mask, other=0.0).to(tl.float32)
        finite = g * g < float("inf")
        tl.store(skipped + block, tl.sum((mask & (finite == 0)).to(tl.int32), axis=0))
        g = tl.where(finite, g, 0.0)
        is_h = ((rows >= F) & (rows < F + M))[:, None]
        below = (rows - F).to(tl.int64)[:, None] * stride + at[None, :]
        z = tl.load(h + below, mask=is_h & mask[None, :], other=0.0).to(tl.float32)
        z = put(z, rows, F + M, tl.zeros_like(g) + 1.0)
        z = look(
            z, rows, g, theta, finite, mask, memory, at, scalars, losses + row * 2,
            LOG_AT, RNN_AT, MOM_AT, STEP_AT, THETA_AT, LOSS_AT, RNN, MOM, MOMENTA,
        )  # fmt: skip
        i, f, o, a, _, _, _, _ = gates(z, tiles, IHC, PRECISION)
        place = hidden.to(tl.int64)[:, None] * stride + at[None, :]
        there = (hidden < M)[:, None] & mask[None, :]
        c_before = tl.load(c + place, mask=there, other=0.0).to(tl.float32)
        c_after = f * c_before + i * a
        h_after = o * tanh(c_after)[0]
        moves = there & finite[None, :]
        tl.store(c + place, as_kept(c_after, c), mask=moves)
        tl.store(h + place, as_kept(h_after, h), mask=moves)
        o0 = tl.sum(head0[:, None] * h_after, axis=0) + bias0
        o1 = tl.sum(head1[:, None] * h_after, axis=0) + bias1
        if RULE == ADDITIVE:
            u = tl.load(scale) * o0
        elif RULE == BOUNDED:
            u = tl.load(scale) * tanh(o0)[0]
        elif RULE == GATED:
            forgot = tl.load(forget + at, mask=mask, other=0.0).to(tl.float32)
            let_in = tl.load(input_ + at, mask=mask, other=0.0).to(tl.float32)
            into_f, into_i = gate(o0, theta, forgot, rule, 0), gate(o1, theta, let_in, rule, 1)
            tl.store(forget + at, as_kept(sigmoid(into_f), forget), mask=mask & finite)
            tl.store(input_ + at, as_kept(sigmoid(into_i), input_), mask=mask & finite)
            u = -sigmoid(-into_f) * theta - sigmoid(into_i) * g
        else:
            if NOMINAL:
                o0 -= tl.sum(tl.where((rows == RNN_AT)[:, None], z, 0.0), axis=0)
            u = o0 * tl.exp(o1)
        tl.store(update + at, as_kept(tl.where(finite, u, 0.0), update), mask=mask)


@triton.jit
def squares(values, starts, sizes, sums, n, chunks, B: tl.constexpr, ROUNDS: tl.constexpr):
    """Each chunk's sum of squares in float64: chunk k of a row has `sizes[k]` values from `starts[k]` on."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    start, size = tl.load(starts + chunk), tl.load(sizes + chunk)
    total = tl.zeros([B], tl.float64)
    for turn in range(ROUNDS):
        lane = turn * B + tl.arange(0, B)
        value = tl.load(values + tl.full([], 1, tl.int64) * row * n + start + lane, mask=lane < size, other=0.0).to(
            tl.float64
        )
        total += value * value
    tl.store(sums + row * chunks + chunk, tl.sum(total, axis=0))


@triton.jit
def finish(
    update, grads, params, statistic, scale, starts, sizes, tensors, n, count,
    DECAY: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """S (d / R − λθ) in the place of d, 0 where the gradient is not finite; `tensors` says whose R a chunk takes."""
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
        if DECAY > 0:
            d -= DECAY * tl.load(params + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.where(g * g < float("inf"), step_size * d, 0.0)
        tl.store(update + at, as_kept(u, update), mask=mask)


@triton.jit
def add_up(total, value):
    """Adds a block's part to a program's own sum in float64."""
    tl.store(total, tl.load(total) + value.to(tl.float64))


@triton.jit
def replay(
    grads, sources, params, h, c, memory, forget, input_, running, weights, rule, scalars, losses, scale,
    statistic, pull, own, tensors, kept, sums, directions,
    n, stride, blocks, total, T, slots, width, count,
    F: tl.constexpr, M: tl.constexpr, P: tl.constexpr, K: tl.constexpr, B: tl.constexpr, IHC: tl.constexpr,
    RULE: tl.constexpr, NOMINAL: tl.constexpr,
    LOG_AT: tl.constexpr, RNN_AT: tl.constexpr, MOM_AT: tl.constexpr, STEP_AT: tl.constexpr, THETA_AT: tl.constexpr,
    LOSS_AT: tl.constexpr, RNN: tl.constexpr, MOM: tl.constexpr, MOMENTA: tl.constexpr, PRECISION: tl.constexpr,
    MEMORY: tl.constexpr, DECAY: tl.constexpr, PULLED: tl.constexpr, BACK: tl.constexpr, R: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """T steps forward and, with BACK, the way back (see `kernels.replay`), the time loop inside.

    A program keeps z's rows, c, θ and the gated rule's gates of `slots` steps in its own part of `kept`
    [programs, slots, R, B], the inputs' running values in `running`, and adds its blocks' derivatives in float64 to its
    row of `sums` [programs, SIZE], which is laid out as `weights` with 8 numbers behind. Without BACK it writes d / R
    to `directions` [T, rows, n]. `width` are the numbers of a row of `scalars`, `count` the tensors of a layout.
    """
    program = tl.program_id(0)
    rows, hidden, lanes = tl.arange(0, K), tl.arange(0, P), tl.arange(0, B)
    wide = tl.full([], 1, tl.int64)  # a product with it does not overflow
    tiles = weights_of(weights, P, K, IHC)
    head0, bias0 = head_of(weights, 0, P, K)
    head1, bias1 = head_of(weights, 1, P, K)
    base = kept + wide * program * slots * R * B
    of_z = rows[:, None] * B + lanes[None, :]
    of_h = (F + hidden)[:, None] * B + lanes[None, :]
    of_c = (F + M + hidden)[:, None] * B + lanes[None, :]
    of_theta, of_forget, of_input = (F + 2 * M) * B + lanes, (F + 2 * M + 1) * B + lanes, (F + 2 * M + 2) * B + lanes
    is_hidden = (hidden < M)[:, None]
    for block in range(program, total, tl.num_programs(0)):
        row = block // blocks
        column = (block % blocks) * B + lanes
        mask = column < n
        at = wide * row * n + column
        tensor = row * count + tl.load(tensors + column, mask=mask, other=0)
        place = hidden.to(tl.int64)[:, None] * stride + at[None, :]
        there = is_hidden & mask[None, :]
        tl.debug_barrier()  # the block before has been read
        tl.store(base + of_h, tl.load(h + place, mask=there, other=0.0).to(tl.float32), mask=is_hidden)
        tl.store(base + of_c, tl.load(c + place, mask=there, other=0.0).to(tl.float32), mask=is_hidden)
        tl.store(base + of_theta, tl.load(params + at, mask=mask, other=0.0).to(tl.float32))
        if RULE == GATED:
            tl.store(base + of_forget, tl.load(forget + at, mask=mask, other=0.0).to(tl.float32))
            tl.store(base + of_input, tl.load(input_ + at, mask=mask, other=0.0).to(tl.float32))
        mine = program * B + lanes
        for k in tl.static_range(MEMORY):
            tl.store(running[k] + mine, tl.load(memory[k] + at, mask=mask, other=0.0).to(tl.float32))
        tl.debug_barrier()

        for t in range(T):
            here, next_ = base + (t % slots) * R * B, base + ((t + 1) % slots) * R * B
            g = tl.load(grads + wide * t * stride + at, mask=mask, other=0.0).to(tl.float32)
            finite = g * g < float("inf")
            g = tl.where(finite, g, 0.0)
            theta = tl.load(here + of_theta)
            z = tl.load(here + of_z, mask=((rows >= F) & (rows < F + M))[:, None], other=0.0)
            z = put(z, rows, F + M, tl.zeros_like(g) + 1.0)
            z = look(
                z, rows, g, theta, finite, mask, running, mine, scalars + t * width,
                losses + (t * (stride // n) + row) * 2,
                LOG_AT, RNN_AT, MOM_AT, STEP_AT, THETA_AT, LOSS_AT, RNN, MOM, MOMENTA,
            )  # fmt: skip
            tl.store(here + of_z, z, mask=(rows < F)[:, None])
            i, f, o, a, _, _, _, _ = gates(z, tiles, IHC, PRECISION)
            h_before = tl.load(here + of_h, mask=is_hidden, other=0.0)
            c_before = tl.load(here + of_c, mask=is_hidden, other=0.0)
            c_after = f * c_before + i * a
            h_after = o * tanh(c_after)[0]
            o0 = tl.sum(head0[:, None] * h_after, axis=0) + bias0
            o1 = tl.sum(head1[:, None] * h_after, axis=0) + bias1
            if RULE == ADDITIVE:
                u = tl.load(scale + t) * o0
            elif RULE == BOUNDED:
                u = tl.load(scale + t) * tanh(o0)[0]
            elif RULE == GATED:
                forgot, let_in = tl.load(here + of_forget), tl.load(here + of_input)
                into_f, into_i = gate(o0, theta, forgot, rule, 0), gate(o1, theta, let_in, rule, 1)
                tl.store(next_ + of_forget, tl.where(finite, sigmoid(into_f), forgot))
                tl.store(next_ + of_input, tl.where(finite, sigmoid(into_i), let_in))
                u = -sigmoid(-into_f) * theta - sigmoid(into_i) * g
            else:
                if NOMINAL:
                    o0 -= tl.sum(tl.where((rows == RNN_AT)[:, None], z, 0.0), axis=0)
                d = o0 * tl.exp(o1) / tl.load(statistic + t * (stride // n) * count + tensor, mask=mask, other=1.0)
                u = tl.load(scale + t) * (d - DECAY * theta)
                if not BACK:
                    tl.store(directions + wide * t * stride + at, d, mask=mask)
            tl.store(next_ + of_theta, theta + tl.where(finite, u, 0.0))
            tl.store(next_ + of_h, tl.where(finite[None, :], h_after, h_before), mask=is_hidden)
            tl.store(next_ + of_c, tl.where(finite[None, :], c_after, c_before), mask=is_hidden)
            tl.debug_barrier()

        if BACK:
            a_theta, zero = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
            dh, dc = tl.zeros([P, B], tl.float32), tl.zeros([P, B], tl.float32)
            d_forget, d_input = zero, zero
            e0, e1, e2, e3, e4, e5 = zero, zero, zero, zero, zero, zero  # two head biases, four numbers of the rule
            of_head0, of_head1 = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
            d0, d1 = tl.zeros([P, K], tl.float32), tl.zeros([P, K], tl.float32)
            d2, d3 = tl.zeros([P, K], tl.float32), tl.zeros([P, K], tl.float32)
            if IHC:
                r0, r1, r2 = tl.zeros([P, P], tl.float32), tl.zeros([P, P], tl.float32), tl.zeros([P, P], tl.float32)
                q0, q1, q2 = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
            for backward in range(T):
                t = T - 1 - backward
                here = base + t * R * B
                g = tl.load(grads + wide * t * stride + at, mask=mask, other=0.0).to(tl.float32)
                finite = g * g < float("inf")
                g = tl.where(finite, g, 0.0)
                theta = tl.load(here + of_theta)
                z = tl.load(here + of_z, mask=(rows < F + M)[:, None], other=0.0)
                z = put(z, rows, F + M, tl.zeros_like(g) + 1.0)
                c_before = tl.load(here + of_c, mask=is_hidden, other=0.0)
                i, f, o, a, slope, g_in, back, v = gates(z, tiles, IHC, PRECISION)
                tanh_c, slope_c = tanh(f * c_before + i * a)
                h_after = o * tanh_c
                o0 = tl.sum(head0[:, None] * h_after, axis=0) + bias0
                o1 = tl.sum(head1[:, None] * h_after, axis=0) + bias1
                a_theta += tl.load(sources + wide * t * stride + at, mask=mask, other=0.0).to(tl.float32)
                acting = tl.where(finite, a_theta, 0.0)
                step_size = tl.load(scale + t)
                if RULE == ADDITIVE:
                    s0, s1, by_rule = step_size * acting, zero, zero
                elif RULE == BOUNDED:
                    s0, s1, by_rule = step_size * acting * tanh(o0)[1], zero, zero
                elif RULE == GATED:
                    forgot, let_in = tl.load(here + of_forget), tl.load(here + of_input)
                    into_f, into_i = gate(o0, theta, forgot, rule, 0), gate(o1, theta, let_in, rule, 1)
                    lost, let = sigmoid(-into_f), sigmoid(into_i)
                    s0 = (acting * theta + tl.where(finite, d_forget, 0.0)) * sigmoid(into_f) * lost
                    s1 = (tl.where(finite, d_input, 0.0) - acting * g) * let * (1.0 - let)
                    d_forget = tl.where(finite, tl.load(rule + 4) * s0, d_forget)
                    d_input = tl.where(finite, tl.load(rule + 5) * s1, d_input)
                    by_rule = tl.load(rule + 2) * s0 + tl.load(rule + 3) * s1 - acting * lost
                    e2, e3, e4, e5 = e2 + s0 * theta, e3 + s1 * theta, e4 + s0 * forgot, e5 + s1 * let_in
                else:
                    if NOMINAL:
                        o0 -= tl.sum(tl.where((rows == RNN_AT)[:, None], z, 0.0), axis=0)
                    step_at = t * (stride // n) * count + tensor
                    r = tl.exp(o1) / tl.load(statistic + step_at, mask=mask, other=1.0)
                    d = tl.where(finite, o0 * r, 0.0)
                    scaled = step_size * acting
                    whole = scaled
                    if PULLED:
                        kappa = tl.load(pull + step_at, mask=mask, other=0.0)
                        kappa += tl.load(own + step_at, mask=mask, other=0.0) * scaled * d
                        whole += kappa * d
                    s0, s1, by_rule = whole * r, whole * d, -DECAY * scaled
                    e2 += 10.0 * scaled * (d - DECAY * theta)
                e0, e1 = e0 + s0, e1 + s1
                of_head0 += tl.sum(s0[None, :] * h_after, axis=1)
                of_head1 += tl.sum(s1[None, :] * h_after, axis=1)
                dh_acting = tl.where(finite[None, :], dh, 0.0) + head0[:, None] * s0 + head1[:, None] * s1
                into_c = tl.where(finite[None, :], dc, 0.0) + dh_acting * o * slope_c
                p_o = dh_acting * tanh_c * o * (1.0 - o)
                p_f = into_c * c_before * f * (1.0 - f)
                p_i = into_c * a * i * (1.0 - i)
                p_a = into_c * i
                if IHC:
                    v_t = tl.trans(v)
                    r0 += tl.dot(p_f, v_t, input_precision=PRECISION)
                    r1 += tl.dot(p_i, v_t, input_precision=PRECISION)
                    r2 += tl.dot(p_o, v_t, input_precision=PRECISION)
                    q0, q1, q2 = q0 + tl.sum(p_f, axis=1), q1 + tl.sum(p_i, axis=1), q2 + tl.sum(p_o, axis=1)
                    second = weights + 4 * P * K + hidden[None, :] * P + hidden[:, None]
                    dv = tl.dot(tl.load(second), p_f, input_precision=PRECISION)
                    dv += tl.dot(tl.load(second + P * P), p_i, input_precision=PRECISION)
                    dv += tl.dot(tl.load(second + 2 * P * P), p_o, input_precision=PRECISION)
                    p0, p1, p2 = dv * back * g_in * (1.0 - g_in), dv * g_in, dv * (1.0 - g_in)
                else:
                    p0, p1, p2, p_a = p_i, p_f, p_o, p_a * slope
                z_t = tl.trans(z)
                d0 += tl.dot(p0, z_t, input_precision=PRECISION)
                d1 += tl.dot(p1, z_t, input_precision=PRECISION)
                d2 += tl.dot(p2, z_t, input_precision=PRECISION)
                d3 += tl.dot(p_a, z_t, input_precision=PRECISION)
                first = weights + hidden[None, :] * K + F + hidden[:, None]
                u0, u1 = tl.load(first, mask=is_hidden, other=0.0), tl.load(first + P * K, mask=is_hidden, other=0.0)
                u2 = tl.load(first + 2 * P * K, mask=is_hidden, other=0.0)
                u3 = tl.load(first + 3 * P * K, mask=is_hidden, other=0.0)
                below = tl.dot(u0, p0, input_precision=PRECISION) + tl.dot(u1, p1, input_precision=PRECISION)
                below += tl.dot(u2, p2, input_precision=PRECISION) + tl.dot(u3, p_a, input_precision=PRECISION)
                dh = below + tl.where(finite[None, :], 0.0, dh)
                dc = into_c * f + tl.where(finite[None, :], 0.0, dc)
                a_theta += by_rule
                if THETA_AT >= 0:
                    of_theta_row = weights + hidden * K + THETA_AT
                    a_theta += tl.sum(tl.load(of_theta_row)[:, None] * p0, axis=0)
                    a_theta += tl.sum(tl.load(of_theta_row + P * K)[:, None] * p1, axis=0)
                    a_theta += tl.sum(tl.load(of_theta_row + 2 * P * K)[:, None] * p2, axis=0)
                    a_theta += tl.sum(tl.load(of_theta_row + 3 * P * K)[:, None] * p_a, axis=0)

            to = sums + wide * program * SIZE
            to_first = to + hidden[:, None] * K + rows[None, :]
            add_up(to_first, d0)
            add_up(to_first + P * K, d1)
            add_up(to_first + 2 * P * K, d2)
            add_up(to_first + 3 * P * K, d3)
            if IHC:
                to_second = to + 4 * P * K + hidden[:, None] * P + hidden[None, :]
                add_up(to_second, r0)
                add_up(to_second + P * P, r1)
                add_up(to_second + 2 * P * P, r2)
                to_bias = to + 4 * P * K + 3 * P * P + hidden
                add_up(to_bias, q0)
                add_up(to_bias + P, q1)
                add_up(to_bias + 2 * P, q2)
            to_head = to + 4 * P * K + 3 * P * P + 3 * P
            add_up(to_head + hidden, of_head0)
            add_up(to_head + P + hidden, of_head1)
            add_up(to_head + 2 * P, tl.sum(e0, axis=0))
            add_up(to_head + 2 * P + 1, tl.sum(e1, axis=0))
            add_up(to_head + 2 * P + 2, tl.sum(e2, axis=0))
            add_up(to_head + 2 * P + 3, tl.sum(e3, axis=0))
            add_up(to_head + 2 * P + 4, tl.sum(e4, axis=0))
            add_up(to_head + 2 * P + 5, tl.sum(e5, axis=0))
