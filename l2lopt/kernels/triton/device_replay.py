"""A window's replay in Triton: T steps forward and backward for blocks of coordinates, the time loops inside.

Conventions and helpers are those of `device`. A program keeps its own numbers of each step: z's features, h, c, θ and
the gated rule's gates, R numbers a coordinate, in this order.
"""

import triton
import triton.language as tl

from l2lopt.kernels.triton.device import (
    BOUNDED,
    GATED,
    activity,
    cell_forward,
    gates,
    head,
    layers,
    look,
    put,
    rule_forward,
)


@triton.jit
def places(S: tl.constexpr):
    """The offsets in a step's numbers of z, h, c, θ and the gated rule's two gates."""
    B: tl.constexpr = S.B
    rows, hidden, lanes = tl.arange(0, S.K), tl.arange(0, S.P), tl.arange(0, B)
    of_z = rows[:, None] * B + lanes[None, :]
    of_h = (S.F + hidden)[:, None] * B + lanes[None, :]
    of_c = (S.F + S.M + hidden)[:, None] * B + lanes[None, :]
    first = (S.F + 2 * S.M) * B + lanes
    return of_z, of_h, of_c, first, first + B, first + 2 * B


@triton.jit
def start(base, state, thetas, memory, running, mine, at, place, mask, S: tl.constexpr):
    """Copies the state and θ before the first step."""
    MEMORY: tl.constexpr = S.MEMORY
    h, c, forget, input_ = state
    _, of_h, of_c, of_theta, of_forget, of_input = places(S)
    is_hidden = (tl.arange(0, S.P) < S.M)[:, None]
    there = is_hidden & mask[None, :]
    tl.debug_barrier()  # the block before has been read
    # Lanes past the end are stored as 0: the sums run over all lanes, and old memory may hold NaN.
    tl.store(base + of_h, tl.load(h + place, mask=there, other=0.0).to(tl.float32), mask=is_hidden)
    tl.store(base + of_c, tl.load(c + place, mask=there, other=0.0).to(tl.float32), mask=is_hidden)
    tl.store(base + of_theta, tl.load(thetas + at, mask=mask, other=0.0).to(tl.float32))
    if S.RULE == GATED:
        tl.store(base + of_forget, tl.load(forget + at, mask=mask, other=0.0).to(tl.float32))
        tl.store(base + of_input, tl.load(input_ + at, mask=mask, other=0.0).to(tl.float32))
    for k in tl.static_range(MEMORY):
        tl.store(running[k] + mine, tl.load(memory[k] + at, mask=mask, other=0.0).to(tl.float32))
    tl.debug_barrier()


@triton.jit
def gates_before(here, any_, S: tl.constexpr):
    """The gated rule's two gates before a step, for other rules `any_`."""
    _, _, _, _, of_forget, of_input = places(S)
    forgot, let_in = any_, any_
    if S.RULE == GATED:
        forgot, let_in = tl.load(here + of_forget), tl.load(here + of_input)
    return forgot, let_in


@triton.jit
def gradient(grads, at, mask):
    """The gradient with 0 where it is not finite, and where it is."""
    g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
    finite = g * g < float("inf")
    return tl.where(finite, g, 0.0), finite


@triton.jit
def forward(
    base, grads, running, mine, tiles, heads, rule, scalars, losses, scale, statistic,
    t, at, row, each, tensor, mask, width, count, S: tl.constexpr,
):  # fmt: skip
    """Step t from its numbers to those of the next step."""
    R: tl.constexpr = S.R * S.B
    here, next_ = base + t * R, base + (t + 1) * R
    rows, is_hidden = tl.arange(0, S.K), (tl.arange(0, S.P) < S.M)[:, None]
    of_z, of_h, of_c, of_theta, of_forget, of_input = places(S)
    g, finite = gradient(grads, at, mask)
    theta = tl.load(here + of_theta)
    z = tl.load(here + of_z, mask=((rows >= S.F) & (rows < S.F + S.M))[:, None], other=0.0)
    z = put(z, rows, S.F + S.M, tl.zeros_like(g) + 1.0)
    z = look(z, rows, g, theta, finite, mask, running, mine, scalars + t * width, losses + (t * each + row) * 2, S)
    # The features alone: h is in its rows already, from the step before.
    tl.store(here + of_z, z, mask=(rows < S.F)[:, None])
    i, f, o, a, _, _, _, _ = gates(z, tiles, S)
    h_before = tl.load(here + of_h, mask=is_hidden, other=0.0)
    c_before = tl.load(here + of_c, mask=is_hidden, other=0.0)
    h_after, c_after, _, _ = cell_forward(i, f, o, a, c_before)
    forgot, let_in = gates_before(here, theta, S)
    u, first, second, _ = rule_forward(h_after, heads, z, rows, g, theta, forgot, let_in, rule, scale + t, S)
    if S.RULE == GATED:
        tl.store(next_ + of_forget, tl.where(finite, first, forgot))
        tl.store(next_ + of_input, tl.where(finite, second, let_in))
    u *= activity(g, z, rows, S)
    if S.DIRECTED:
        # 1 past the end: a division by 0 there would bring NaN into sums over all lanes.
        measured = tl.load(statistic + t * each * count + tensor, mask=mask, other=1.0)
        u = tl.load(scale + t) * (u / measured - S.DECAY * theta)
    tl.store(next_ + of_theta, theta + tl.where(finite, u, 0.0))
    tl.store(next_ + of_h, tl.where(finite[None, :], h_after, h_before), mask=is_hidden)
    tl.store(next_ + of_c, tl.where(finite[None, :], c_after, c_before), mask=is_hidden)
    tl.debug_barrier()


@triton.jit
def rule_backward(
    acting, finite, g, theta, active, gates_before, numbers, d_gates, sums, rule, step_size, statistics, step_at, mask,
    S: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """The outputs' adjoints, θ's by way of the rule, the gates' from here on, and the sums of the rule's gradients.

    `acting` is the update's adjoint, 0 where a coordinate is skipped; `active` is `activity`; `numbers` are those of
    `rule_forward`.
    """
    first, second, third = numbers
    d_forget, d_input = d_gates
    e2, e3, e4, e5, e6 = sums
    whole = step_size * acting
    s0 = whole * active
    s1, by_rule = tl.zeros_like(s0), tl.zeros_like(s0)
    if S.RULE == BOUNDED:
        s0 = s0 * first
    elif S.RULE == GATED:
        forgot, let_in = gates_before
        # `third` is 1 − f with all its digits, which a difference would lose, as f is near 1.
        s0 = (acting * theta + tl.where(finite, d_forget, 0.0)) * first * third
        s1 = (tl.where(finite, d_input, 0.0) - whole * g) * second * (1.0 - second)
        d_forget = tl.where(finite, tl.load(rule + 4) * s0, d_forget)
        d_input = tl.where(finite, tl.load(rule + 5) * s1, d_input)
        by_rule = tl.load(rule + 2) * s0 + tl.load(rule + 3) * s1 - acting * third
        e2, e3, e4, e5 = e2 + s0 * theta, e3 + s1 * theta, e4 + s0 * forgot, e5 + s1 * let_in
        e6 -= 10.0 * whole * second * g
    elif S.DIRECTED:
        statistic, pull, own = statistics
        r = second / tl.load(statistic + step_at, mask=mask, other=1.0)
        d = tl.where(finite, first * r, 0.0)
        scaled = s0
        if PULLED:
            kappa = tl.load(pull + step_at, mask=mask, other=0.0)
            kappa += tl.load(own + step_at, mask=mask, other=0.0) * scaled * d
            s0 += kappa * d
        s0, s1, by_rule = s0 * r, s0 * d, -S.DECAY * whole
        e2 += 10.0 * (scaled * d - S.DECAY * whole * theta)
    return s0, s1, by_rule, (d_forget, d_input), (e2, e3, e4, e5, e6)


@triton.jit
def highway_backward(weights, v, parts, g_in, back, of_second, S: tl.constexpr):
    """The adjoints of the first product of an IHC-LSTM from those of the arguments of i, f, o, a.

    With them the gradients of the second layers, this step's added. The weights are read again, transposed: kept in
    registers they would spill.
    """
    P: tl.constexpr = S.P
    hidden = tl.arange(0, P)
    p_i, p_f, p_o, p_a = parts
    r0, r1, r2, q0, q1, q2 = of_second
    v_t = tl.trans(v)
    r0 += tl.dot(p_f, v_t, input_precision=S.PRECISION)
    r1 += tl.dot(p_i, v_t, input_precision=S.PRECISION)
    r2 += tl.dot(p_o, v_t, input_precision=S.PRECISION)
    q0, q1, q2 = q0 + tl.sum(p_f, axis=1), q1 + tl.sum(p_i, axis=1), q2 + tl.sum(p_o, axis=1)
    second = weights + 4 * P * S.K + hidden[None, :] * P + hidden[:, None]
    dv = tl.dot(tl.load(second), p_f, input_precision=S.PRECISION)
    dv += tl.dot(tl.load(second + P * P), p_i, input_precision=S.PRECISION)
    dv += tl.dot(tl.load(second + 2 * P * P), p_o, input_precision=S.PRECISION)
    return dv * back * g_in * (1.0 - g_in), dv * g_in, dv * (1.0 - g_in), p_a, (r0, r1, r2, q0, q1, q2)


@triton.jit
def products_backward(weights, z, parts, of_first, S: tl.constexpr):
    """The adjoints of h and of θ as a feature from those of the first product's parts, and the layers' gradients.

    This step is added to these. The weights are read again, transposed: kept in registers they would spill.
    """
    P: tl.constexpr = S.P
    K: tl.constexpr = S.K
    hidden = tl.arange(0, P)
    p0, p1, p2, p3 = parts
    d0, d1, d2, d3 = of_first
    z_t = tl.trans(z)
    d0 += tl.dot(p0, z_t, input_precision=S.PRECISION)
    d1 += tl.dot(p1, z_t, input_precision=S.PRECISION)
    d2 += tl.dot(p2, z_t, input_precision=S.PRECISION)
    d3 += tl.dot(p3, z_t, input_precision=S.PRECISION)
    # Behind h's columns lies the bias: without the mask it would get into the padding of dh.
    first, is_hidden = weights + hidden[None, :] * K + S.F + hidden[:, None], (hidden < S.M)[:, None]
    u0, u1 = tl.load(first, mask=is_hidden, other=0.0), tl.load(first + P * K, mask=is_hidden, other=0.0)
    u2 = tl.load(first + 2 * P * K, mask=is_hidden, other=0.0)
    u3 = tl.load(first + 3 * P * K, mask=is_hidden, other=0.0)
    below = tl.dot(u0, p0, input_precision=S.PRECISION) + tl.dot(u1, p1, input_precision=S.PRECISION)
    below += tl.dot(u2, p2, input_precision=S.PRECISION) + tl.dot(u3, p3, input_precision=S.PRECISION)
    B: tl.constexpr = S.B
    by_theta = tl.zeros([B], tl.float32)
    if S.THETA_AT >= 0:
        of_theta = weights + hidden * K + S.THETA_AT
        by_theta += tl.sum(tl.load(of_theta)[:, None] * p0, axis=0)
        by_theta += tl.sum(tl.load(of_theta + P * K)[:, None] * p1, axis=0)
        by_theta += tl.sum(tl.load(of_theta + 2 * P * K)[:, None] * p2, axis=0)
        by_theta += tl.sum(tl.load(of_theta + 3 * P * K)[:, None] * p3, axis=0)
    return below, by_theta, (d0, d1, d2, d3)


@triton.jit
def cell_backward(dh_acting, dc, finite, c_before, cell, S: tl.constexpr):
    """The adjoint of c' of the coordinates that act, and those of the arguments of i, f, o, a."""
    tanh_c, by_c, i, f, o, a, by_a = cell
    into_c = tl.where(finite[None, :], dc, 0.0) + dh_acting * o * by_c
    p_o = dh_acting * tanh_c * o * (1.0 - o)
    p_f = into_c * c_before * f * (1.0 - f)
    p_i = into_c * a * i * (1.0 - i)
    p_a = into_c * i
    if not S.IHC:
        p_a = p_a * by_a
    return into_c, (p_i, p_f, p_o, p_a)


@triton.jit
def zeros(S: tl.constexpr):
    """The sums of the gradients of two biases, five numbers of the rule, the head and the first layers."""
    P: tl.constexpr = S.P
    K: tl.constexpr = S.K
    # Biases and the rule's numbers are summed per lane: across lanes once a block, not at every step.
    B: tl.constexpr = S.B
    zero, line = tl.zeros([B], tl.float32), tl.zeros([P], tl.float32)
    d0, d1 = tl.zeros([P, K], tl.float32), tl.zeros([P, K], tl.float32)
    d2, d3 = tl.zeros([P, K], tl.float32), tl.zeros([P, K], tl.float32)
    return (zero, zero), (zero, zero, zero, zero, zero), (line, line), (d0, d1, d2, d3)


@triton.jit
def second_zeros(S: tl.constexpr):
    """The sums of the gradients of an IHC-LSTM's second layers and their biases."""
    P: tl.constexpr = S.P
    r0, r1, r2 = tl.zeros([P, P], tl.float32), tl.zeros([P, P], tl.float32), tl.zeros([P, P], tl.float32)
    line = tl.zeros([P], tl.float32)
    return r0, r1, r2, line, line, line


@triton.jit
def add_up(total, value):
    """Adds a block's part to a program's own sum in float64."""
    # No other program has this sum, so a plain load and store do, in one order.
    tl.store(total, tl.load(total) + value.to(tl.float64))


@triton.jit
def add_all(to, of_first, of_head, of_bias, of_rule, S: tl.constexpr):
    """Adds the gradients of a block to a program's, which are laid out as the packed weights."""
    P: tl.constexpr = S.P
    K: tl.constexpr = S.K
    rows, hidden = tl.arange(0, K), tl.arange(0, P)
    to_first = to + hidden[:, None] * K + rows[None, :]
    for k in tl.static_range(4):
        add_up(to_first + k * P * K, of_first[k])
    to_head = to + 4 * P * K + 3 * P * P + 3 * P
    for k in tl.static_range(2):
        add_up(to_head + k * P + hidden, of_head[k])
        add_up(to_head + 2 * P + k, tl.sum(of_bias[k], axis=0))
    for k in tl.static_range(5):
        add_up(to_head + 2 * P + 2 + k, tl.sum(of_rule[k], axis=0))


@triton.jit
def add_second(to, of_second, S: tl.constexpr):
    """The same for an IHC-LSTM's second layers."""
    P: tl.constexpr = S.P
    hidden = tl.arange(0, P)
    to_second = to + 4 * P * S.K + hidden[:, None] * P + hidden[None, :]
    to_bias = to + 4 * P * S.K + 3 * P * P + hidden
    for k in tl.static_range(3):
        add_up(to_second + k * P * P, of_second[k])
        add_up(to_bias + k * P, of_second[3 + k])


@triton.jit
def backward(
    base, to, grads, sources, weights, tiles, heads, rule, scale, statistics,
    T, stride, at, each, tensor, mask, count, S: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """All steps of a block from the last to the first, each computed again from its numbers; adds to the sums."""
    R: tl.constexpr = S.R * S.B
    rows, is_hidden = tl.arange(0, S.K), (tl.arange(0, S.P) < S.M)[:, None]
    wide = tl.full([], 1, tl.int64)
    of_z, _h, of_c, of_theta, _f, _i = places(S)
    # The loop carries these in the order of their definition: with the large ones first more registers spill.
    B: tl.constexpr = S.B
    P: tl.constexpr = S.P
    a_theta = tl.zeros([B], tl.float32)
    dh, dc = tl.zeros([P, B], tl.float32), tl.zeros([P, B], tl.float32)
    d_gates = (a_theta, a_theta)
    of_bias, of_rule, of_head, of_first = zeros(S)
    if S.IHC:
        of_second = second_zeros(S)
    head0, head1, _, _ = heads
    for turn in range(T):
        t = T - 1 - turn
        here, now = base + t * R, wide * t * stride + at
        g, finite = gradient(grads, now, mask)
        theta = tl.load(here + of_theta)
        z = tl.load(here + of_z, mask=(rows < S.F + S.M)[:, None], other=0.0)
        z = put(z, rows, S.F + S.M, tl.zeros_like(g) + 1.0)
        c_before = tl.load(here + of_c, mask=is_hidden, other=0.0)
        i, f, o, a, by_a, g_in, back, v = gates(z, tiles, S)
        h_after, _c, tanh_c, by_c = cell_forward(i, f, o, a, c_before)
        forgot, let_in = gates_before(here, theta, S)
        _u, first, second, third = rule_forward(h_after, heads, z, rows, g, theta, forgot, let_in, rule, scale + t, S)
        a_theta += tl.load(sources + now, mask=mask, other=0.0).to(tl.float32)
        acting = tl.where(finite, a_theta, 0.0)
        s0, s1, by_rule, d_gates, of_rule = rule_backward(
            acting, finite, g, theta, activity(g, z, rows, S), (forgot, let_in), (first, second, third), d_gates,
            of_rule, rule, tl.load(scale + t), statistics, t * each * count + tensor, mask, S, PULLED,
        )  # fmt: skip
        of_bias = (of_bias[0] + s0, of_bias[1] + s1)
        by_head0, by_head1 = tl.sum(s0[None, :] * h_after, axis=1), tl.sum(s1[None, :] * h_after, axis=1)
        of_head = (of_head[0] + by_head0, of_head[1] + by_head1)
        dh_acting = tl.where(finite[None, :], dh, 0.0) + head0[:, None] * s0 + head1[:, None] * s1
        cell = (tanh_c, by_c, i, f, o, a, by_a)
        into_c, parts = cell_backward(dh_acting, dc, finite, c_before, cell, S)
        if S.IHC:
            p0, p1, p2, p3, of_second = highway_backward(weights, v, parts, g_in, back, of_second, S)
            parts = (p0, p1, p2, p3)
        below, by_theta, of_first = products_backward(weights, z, parts, of_first, S)
        # A skipped coordinate has 0 below: its adjoints pass the step as they are.
        dh = below + tl.where(finite[None, :], 0.0, dh)
        dc = into_c * f + tl.where(finite[None, :], 0.0, dc)
        a_theta += by_rule
        if S.THETA_AT >= 0:
            a_theta += by_theta
    add_all(to, of_first, of_head, of_bias, of_rule, S)
    if S.IHC:
        add_second(to, of_second, S)


@triton.jit
def replay(
    grads, sources, thetas, state, memory, running, weights, rule, scalars, losses, scale, statistics, tensors,
    kept, sums, n, stride, blocks, total, T, width, count, S: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """T steps forward and backward (see `kernels.cpu.replay`).

    A program keeps the numbers of each step and of the end in its own part of `kept` [programs, T + 1, R, B] and the
    inputs' running means in `running`, and adds its blocks' gradients in float64 to its row of `sums` [programs, SIZE].
    `width` is the number of columns of `scalars`, `count` that of a layout's tensors; `statistics` are R and, with
    PULLED, the two factors of its adjoint.
    """
    B: tl.constexpr = S.B
    program = tl.program_id(0)
    hidden, lanes = tl.arange(0, S.P), tl.arange(0, B)
    wide = tl.full([], 1, tl.int64)  # a product with it does not overflow
    tiles, heads = layers(weights, S), head(weights, S)
    base, mine = kept + wide * program * (T + 1) * (S.R * B), program * B + lanes
    each = stride // n
    for block in range(program, total, tl.num_programs(0)):
        row = block // blocks
        column = (block % blocks) * B + lanes
        mask = column < n
        at = wide * row * n + column
        tensor = row * count + tl.load(tensors + column, mask=mask, other=0)
        place = hidden.to(tl.int64)[:, None] * stride + at[None, :]
        start(base, state, thetas, memory, running, mine, at, place, mask, S)
        for t in range(T):
            now = wide * t * stride + at
            forward(
                base, grads, running, mine, tiles, heads, rule, scalars, losses, scale, statistics[0],
                t, now, row, each, tensor, mask, width, count, S,
            )  # fmt: skip
        backward(
            base, sums + wide * program * S.SIZE, grads, sources, weights, tiles, heads, rule, scale, statistics,
            T, stride, at, each, tensor, mask, count, S, PULLED,
        )  # fmt: skip
