"""Recurrent cells: the laws of the contract, the printed equations, the papers' counts, PyTorch's own cells."""

import re

import laws
import oracles
import pytest
import torch
from implementations import CELLS, GATE_BIASED, SQUARE, normal, seeded

from l2lopt import cells, optimisers
from l2lopt.cells.coupled_gru import coupling
from l2lopt.cells.stacked import Stacked
from l2lopt.core.errors import UserError

each_cell = pytest.mark.parametrize("cell", [pytest.param(seeded(make()), id=name) for name, make in CELLS.items()])


@pytest.mark.parametrize("name", CELLS)
def test_follows_its_equations(name):
    laws.assert_follows_its_equations(seeded(CELLS[name]()), oracles.CELLS[name])


@each_cell
@pytest.mark.parametrize("index", [[5, 3, 1, 0, 2, 4], [4], [2, 2, 0]], ids=["permuted", "one", "repeated"])
def test_columns_do_not_see_each_other(cell, index):
    laws.assert_columns_do_not_see_each_other(cell, index)


@each_cell
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_trailing_shape_is_kept(cell, shape):
    laws.assert_trailing_shape_is_kept(cell, shape)


@each_cell
def test_changes_nothing(cell):
    laws.assert_cell_changes_nothing(cell)


@each_cell
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_gradients_are_right(cell, steps, batch):
    laws.assert_gradients_are_right(cell, batch, steps)


@each_cell
def test_maps(cell):
    laws.assert_cell_maps(cell)


def count(name, *sizes, **options):
    """Trainable numbers of layers of the given (input, hidden) sizes."""
    layers = [cells.make(name, *size, **options) for size in sizes]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


FORMULAS = {
    "rnn": lambda N, M: M * N + M * M + M,
    "gru": lambda N, M: 3 * (M * N + M * M + M),
    "lstm": lambda N, M: 4 * (M * N + M * M + M),
    "sru": lambda N, M: 3 * M * N + 4 * M,
    "t-lstm": lambda N, M: 3 * (2 * M * N + M),
    "fastgrnn": lambda N, M: 2 * (M * N + M * M + M) + 2,
    "leaky": lambda N, M: M * N + M * M + 2 * M,
    "irc-gru": lambda N, M: 3 * M * N + N * M + N,
    "irc-lstm": lambda N, M: 4 * M * N + N * M + N,
    "irc-sru": lambda N, M: 3 * M * N + N + M,
    "irc-t-lstm": lambda N, M: 3 * M * N + N + M,
    "irc-fastgrnn": lambda N, M: 2 * M * N + N * M + N + 1,
    "ihc-gru": lambda N, M: 5 * M * N + N * N + N,
    "ihc-lstm": lambda N, M: 6 * M * N + N * N + N,
    "ihc-sru": lambda N, M: 4 * M * N + N * N + N + M,
    "ihc-t-lstm": lambda N, M: 4 * M * N + N * N + N + M,
    "ihc-fastgrnn": lambda N, M: 4 * M * N + N * N + N + 1,
    "no-irc-gru": lambda N, M: 3 * M * N,
    "no-irc-lstm": lambda N, M: 4 * M * N,
    "no-irc-sru": lambda N, M: 3 * M * N,
    "no-irc-t-lstm": lambda N, M: 3 * M * N,
    "no-irc-fastgrnn": lambda N, M: 2 * M * N + 1,
    "coupled-gru": lambda N, M: 3 * M * N + 4 * M * M + 7 * M,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_parameter_count_is_table_1s_formula(name):
    sizes = [(5, 5)] if name in SQUARE else [(3, 5), (7, 2)]
    assert [count(name, size) for size in sizes] == [FORMULAS[name](*size) for size in sizes]


L2L, DRAW, SRU_LAYERS = [(20, 20)], [(100, 800)], 3 * [(1150, 1150)]
TWO_LAYERS, LANGUAGE_MODEL = 2 * [(650, 650)], [(400, 1150), (1150, 1150), (1150, 400)]


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("lstm", L2L, 3_280),
        ("ihc-lstm", L2L, 2_820),
        ("lstm", DRAW, 2_883_200),
        ("ihc-lstm", DRAW, 490_100),
        ("gru", TWO_LAYERS, 5_073_900),
        ("t-lstm", TWO_LAYERS, 5_073_900),
        ("irc-gru", TWO_LAYERS, 3_381_300),
        ("irc-t-lstm", TWO_LAYERS, 2_537_600),
        ("irc-t-lstm", 3 * TWO_LAYERS[:1], 3_806_400),
        ("fastgrnn", TWO_LAYERS, 3_382_604),
        ("irc-fastgrnn", TWO_LAYERS, 2_536_302),
        ("fastgrnn", TWO_LAYERS[:1], 1_691_302),
        ("irc-fastgrnn", TWO_LAYERS[:1], 1_268_151),
        ("sru", SRU_LAYERS, 11_916_300),
        ("irc-sru", SRU_LAYERS, 11_909_400),
        ("lstm", LANGUAGE_MODEL, 20_200_800),
        ("ihc-lstm", LANGUAGE_MODEL, 16_262_700),
    ],
)
def test_parameter_count_of_the_papers_models(name, layers, expected):
    assert count(name, *layers) == expected


@pytest.mark.parametrize(
    ("plain", "simplified", "layers", "saved"),
    [
        ("gru", "irc-gru", TWO_LAYERS, "33.4%"),
        ("t-lstm", "irc-t-lstm", TWO_LAYERS, "50.0%"),
        ("fastgrnn", "irc-fastgrnn", TWO_LAYERS, "25.0%"),
        ("fastgrnn", "irc-fastgrnn", TWO_LAYERS[:1], "25.0%"),
        ("sru", "irc-sru", SRU_LAYERS, "0.06%"),
    ],
)
def test_reductions_of_table_2(plain, simplified, layers, saved):
    decimals = len(saved.partition(".")[2]) - 1
    assert f"{1 - count(simplified, *layers) / count(plain, *layers):.{decimals}%}" == saved


def test_gamma_is_n_by_m():
    """As U_V; the paper prints M by N."""
    shapes = {name: tuple(value.shape) for name, value in cells.make("ihc-lstm", 3, 5).named_parameters()}
    assert shapes["highway.gamma"] == shapes["highway.feedback.weight_h"] == (3, 5)


@pytest.mark.parametrize(
    ("last", "plain", "simplified", "saved"),
    [((400, 1150), 24_853_800, 15_099_450, 0.392), ((1150, 400), 20_200_800, 16_262_700, 0.195)],
    ids=["as printed", "as built"],
)
def test_the_papers_language_models_count_the_last_layer_as_400_to_1150(last, plain, simplified, saved):
    counts = [count(name, *LANGUAGE_MODEL[:2], last) for name in ("lstm", "ihc-lstm")]
    assert counts == [plain, simplified]
    assert abs(1 - counts[1] / counts[0] - saved) < 5e-4


def test_the_papers_draw_takes_gamma_as_n_by_n_on_what_is_fed_back():
    """0.42M, 85.4 % fewer; under eq. 53 it is 83.0 %."""
    for gamma_on, expected, saved in (("uvh", 420_100, 0.854), ("h", 490_100, 0.830)):
        simplified = count("ihc-lstm", *DRAW, gamma_on=gamma_on)
        assert simplified == expected
        assert abs(1 - simplified / count("lstm", *DRAW) - saved) < 5e-4


def test_parameter_count_of_the_options():
    assert [count("gru", (3, 5), biases=biases) for biases in ("none", "one", "two")] == [120, 135, 150]
    assert count("ihc-lstm", (3, 5), gate_input=False) == 6 * 15
    assert count("ihc-lstm", (3, 5), gate_input=False, gamma_on="uvh") == 5 * 15 + 9
    assert [count("leaky", (3, 5), recurrent=on, step="scalar") for on in (True, False)] == [15 + 25 + 5 + 1, 15 + 1]
    assert count("gru", (3, 5), activation="linear") == count("gru", (3, 5))
    assert count("coupled-gru", (3, 5), coupled=False) == count("gru", (3, 5), biases="two")


@pytest.mark.parametrize("name", ["gru", *GATE_BIASED])
def test_gate_bias_adds_trainable_biases_at_one(name):
    """+1 on a share that is kept, −1 on a share of the new state and on the SRU's share of c."""
    plain, biased = (cells.make(name, 5, 5, gate_bias=on) for on in (False, True))
    added = dict(biased.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    values = {key.removeprefix("core."): biased.get_parameter(key).tolist() for key in added}
    sign = -1.0 if name.endswith("gru") else 1.0
    assert values == {"gate_bias": [sign] * 5} | ({"highway_bias": [-1.0] * 5} if name.endswith("sru") else {})


def test_gate_bias_of_a_kept_share_is_plus_one():
    assert cells.make("gru", 3, 2, update="kept", gate_bias=True).get_parameter("gate_bias").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", cells.CELLS | cells.PAIR_CELLS)
def test_initial_values_lie_in_pytorchs_range(name):
    cell = cells.make(name, 25, 25)
    for key, parameter in cell.named_parameters():
        assert parameter.abs().max() <= 0.2, key
        assert parameter.numel() < 500 or parameter.abs().max() > 0.19, key
    values = torch.cat([parameter.detach().flatten() for parameter in cell.parameters()])
    assert abs(values.mean()) < 0.02


def test_the_published_matrices_are_those_of_a_fastgrnn_alone():
    lstm = cells.make("lstm", 3, 100)
    before = {key: value.detach().clone() for key, value in lstm.named_parameters()}
    fast = cells.make("fastgrnn", 100, 40)
    cells.init_as_published(Stacked([lstm, fast]))
    for key, value in lstm.named_parameters():
        laws.assert_same(value.detach(), before[key])
    assert float(fast.weight_x.detach().std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("name", cells.CELLS)
def test_the_published_initial_values(name):
    """α = 0.881, β = 0.731, κ = 0.018 and FastGRNN's matrices of standard deviation 0.1; the rest stays."""
    cell = cells.make(name, 40, 40)
    plain = {key: value.detach().clone() for key, value in cell.named_parameters()}
    assert cells.init_as_published(cell) is cell
    for key, value in cell.named_parameters():
        last = key.rpartition(".")[-1]
        if last in ("alpha", "beta", "kappa"):
            expected = {"alpha": 0.881, "beta": 0.731, "kappa": 0.018}[last]
            laws.assert_close(torch.sigmoid(value.detach()), torch.full_like(value, expected), 1e-3 / expected)
        elif name.endswith("fastgrnn") and value.dim() == 2:
            assert value.std().item() == pytest.approx(0.1, rel=0.1)
            assert value.abs().max() > 0.2
        else:
            laws.assert_same(value.detach(), plain[key])


def test_lstm_is_torchs_with_the_two_biases_added():
    ours, theirs = seeded(cells.LSTM(3, 4)), torch.nn.LSTMCell(3, 4).double()
    split = normal(16, seed=5)
    theirs.load_state_dict(
        {
            "weight_ih": ours.weight_x.detach(),
            "weight_hh": ours.weight_h.detach(),
            "bias_ih": split,
            "bias_hh": ours.bias.detach() - split,
        }
    )
    x, state = normal(6, 3, 8), {"h": normal(4, 8, seed=1), "c": normal(4, 8, seed=2)}
    expected = (state["h"].T, state["c"].T)
    for step in x:
        h, state = ours(step, state)
        expected = theirs(step.T, expected)
        laws.assert_close((h, state["h"], state["c"]), (expected[0].T, expected[0].T, expected[1].T))


def torchs(theirs, **weights):
    """PyTorch's cell in float64 with the given weights."""
    theirs.double().load_state_dict({name: value.detach() for name, value in weights.items()})
    return theirs


def assert_equal_outputs(ours, theirs, x, h):
    """Along x [T, N, ...]: our cell, features first, and PyTorch's, features last, with the one state h."""
    state, expected = {"h": h}, h.T
    for step in x:
        h, state = ours(step, state)
        expected = theirs(step.T, expected)
        laws.assert_close((h, state["h"]), (expected.T, expected.T))


def test_gru_kept_after_two_is_torchs():
    ours = seeded(cells.GRU(3, 4, update="kept", reset="after", biases="two"))
    weights = {"weight_ih": ours.weight_x, "weight_hh": ours.weight_h, "bias_ih": ours.bias, "bias_hh": ours.bias_h}
    assert_equal_outputs(ours, torchs(torch.nn.GRUCell(3, 4), **weights), normal(6, 3, 8), normal(4, 8, seed=1))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_rnn_is_torchs_with_the_two_biases_added(activation):
    ours, split = seeded(cells.RNN(3, 4, activation)), normal(4, seed=5)
    weights = {"weight_ih": ours.weight_x, "weight_hh": ours.weight_h, "bias_ih": split, "bias_hh": ours.bias - split}
    theirs = torchs(torch.nn.RNNCell(3, 4, nonlinearity=activation), **weights)
    assert_equal_outputs(ours, theirs, normal(6, 3, 8), normal(4, 8, seed=1))


def test_the_new_and_the_kept_share_are_the_same_gru_with_the_gates_sign_turned():
    new, kept = seeded(cells.GRU(3, 4)), seeded(cells.GRU(3, 4, update="kept"))
    with torch.no_grad():
        for parameter in kept.parameters():
            parameter[4:8] *= -1
    x, state = laws.columns(new)
    laws.assert_close(kept(x, state), new(x, state))


@pytest.mark.parametrize("name", ["t-lstm", "irc-t-lstm"])
def test_what_the_t_lstm_remembers_beside_c(name):
    """Table I's keeps x_{t−1}; the simplified one keeps h_{t−1} (eq. 40), not x_{t−1} as the authors' code has it."""
    cell, x = seeded(cells.make(name, 3, 3)), normal(3, 5)
    h, state = cell(x, cell.initial_state(x))
    remembered = {"t-lstm": ("x", x), "irc-t-lstm": ("h", h)}[name]
    assert set(state) == {remembered[0], "c"}
    laws.assert_same(state[remembered[0]], remembered[1])


# From the GRU to the simplified one, eqs. 4 to 15


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_leaky_step_is_one_of_gradient_descent(recurrent):
    """Eq. 6 beside eq. 10: h' = h − ξ∇L with L = ½‖h − a‖² for the a of this step."""
    cell = seeded(cells.make("leaky", 3, 4, step="scalar", recurrent=recurrent))
    x, h = normal(3, 5), normal(4, 5, seed=1).requires_grad_()
    back = cell.weight_h @ h + cell.bias[:, None] if recurrent else 0
    a = torch.tanh(cell.weight_x @ x + back).detach()
    (gradient,) = torch.autograd.grad(0.5 * (h - a).square().sum(), h)
    laws.assert_close(cell(x, {"h": h})[0], h - torch.sigmoid(cell.step) * gradient)


def test_the_leaky_form_tends_to_the_differential_equation():
    """Eqs. 4-6: for small steps ξ, h(t) = a + (h(0) − a) exp(−t), the path of dh/dt = −h + a; the error is O(ξ)."""
    cell, x, h = seeded(cells.make("leaky", 3, 4, recurrent=False)), normal(3, 5), normal(4, 5, seed=1)
    a, errors = torch.tanh(cell.weight_x @ x).detach(), []
    for steps in (100, 200):
        with torch.no_grad():
            cell.step.fill_(torch.logit(torch.tensor(1 / steps, dtype=torch.float64)))
        state = {"h": h}
        for _ in range(steps):
            _, state = cell(x, state)
        errors.append((state["h"].detach() - (a + (h - a) * torch.tensor(-1.0).double().exp())).abs().max().item())
    assert errors[0] < 0.01
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("activation", ["tanh", "linear"])
def test_a_gru_whose_gates_are_constant_is_the_leaky_form(activation):
    """Eq. 3 is eq. 8 with i as ξ, where r lets all of h through."""
    leaky, gru = (seeded(cells.make(name, 3, 4, activation=activation)) for name in ("leaky", "gru"))
    with torch.no_grad():
        gru.weight_x.copy_(torch.cat([torch.zeros(8, 3), leaky.weight_x]))
        gru.weight_h.copy_(torch.cat([torch.zeros(8, 4), leaky.weight_h]))
        gru.bias.copy_(torch.cat([torch.full((4,), 1e3), leaky.step, leaky.bias]))
    x, state = laws.columns(leaky)
    laws.assert_close(gru(x, state), leaky(x, state))


def constant_lstm(f):
    """An LSTM of three units whose gates i = 0.9 and f and whose candidate depend on neither input nor output."""
    cell = seeded(cells.make("lstm", 3, 3))
    gates = torch.logit(torch.tensor([0.9, f], dtype=torch.float64)).repeat_interleave(3)
    with torch.no_grad():
        cell.weight_x.zero_()
        cell.weight_h.zero_()
        cell.bias[:6] = gates
    return cell, torch.tanh(cell.bias[6:9]).detach()[:, None]


@pytest.mark.parametrize("f", [0.05, 0.9, 0.99])
def test_what_an_lstm_remembers_is_bounded_also_where_f_is_above_1_minus_i(f):
    """Section VI fears that c grows uncontrollably there: it tends to i a / (1 − f), and f = σ(·) is below 1."""
    cell, a = constant_lstm(f)
    x, state = normal(3, 5), {"h": normal(3, 5, seed=1), "c": 100 * normal(3, 5, seed=2)}
    start, steps = state["c"], 400
    for _ in range(steps):
        _, state = cell(x, state)
    limit = 0.9 * a / (1 - f)
    laws.assert_close(state["c"].detach(), limit + f**steps * (start - limit))
    assert (state["c"].abs() > a.abs()).all() == (f > 1 - 0.9)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_grus_state_is_bounded_by_its_first_one_and_1(scale):
    """Its update gate couples what is kept and what is taken: a mean of h and a tanh, with weights that sum to 1."""
    cell = seeded(cells.make("gru", 3, 4))
    with torch.no_grad():
        for value in cell.parameters():
            value.mul_(scale)
    state = {"h": 3 * normal(4, 5, seed=1)}
    bound = state["h"].abs().clamp(min=1)
    for step in range(50):
        _, state = cell(scale * normal(3, 5, seed=step), state)
        assert (state["h"].abs() <= bound * (1 + 1e-12)).all()


def test_what_an_lstm_remembers_is_the_leaky_form_where_f_is_1_minus_i():
    """Eq. 20 is eq. 8 with i as ξ only there."""
    cell = constant_lstm(0.1)[0]
    leaky, c = seeded(cells.make("leaky", 3, 3)), normal(3, 5, seed=2)
    with torch.no_grad():
        leaky.weight_x.zero_()
        leaky.weight_h.zero_()
        leaky.bias.copy_(cell.bias[6:9])
        leaky.step.fill_(torch.logit(torch.tensor(0.9, dtype=torch.float64)))
    x = normal(3, 5)
    laws.assert_close(cell(x, {"h": c, "c": c})[1]["c"], leaky(x, {"h": c})[1]["h"])


@pytest.mark.parametrize("core", cells.CORES)
def test_without_irc_is_the_irc_with_alpha_0(core):
    """To the bit, whatever is fed back."""
    plain, irc = (seeded(cells.make(f"{name}-{core}", 5, 5, gate_bias=True)) for name in ("no-irc", "irc"))
    irc.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        irc.highway.alpha.fill_(-1e3)
    x, state = laws.columns(plain)
    laws.assert_same(irc(x, state), plain(x, state))


def test_without_recurrence_the_gru_is_a_sum_over_time():
    """Eqs. 13, 14 and 17: h_T = Π(1−i)∘h_0 + Σ_t Π_{s>t}(1−i_s)∘i_t∘r_t∘a_t, gates and candidates functions of x_t."""
    cell, xs, h = seeded(cells.make("no-irc-gru", 3, 4)), normal(6, 3, 5), normal(4, 5, seed=1)
    i, r = torch.sigmoid(cell.core.weight_v @ xs).chunk(2, 1)
    later = torch.cat([(1 - i).flip(0).cumprod(0).flip(0)[1:], torch.ones(1, 4, 5)])
    expected = (1 - i).prod(0) * h + (later * i * r * (cell.core.weight_x @ xs)).sum(0)
    state = {"h": h}
    for x in xs:
        _, state = cell(x, state)
    laws.assert_close(state["h"], expected)


# Pairs


def pairs(coupled=True):
    return seeded(cells.make("coupled-gru", 3, 4, coupled=coupled)), normal(6, 3, 2, 5), normal(4, 2, 5, seed=1)


def run(cell, xs, h):
    outputs, state = [], {"h": h}
    for x in xs:
        h, state = cell(x, state)
        laws.assert_same(state["h"], h)
        outputs.append(h.detach())
    return torch.stack(outputs)


def test_exchanged_sides_give_exchanged_outputs():
    cell, xs, h = pairs()
    laws.assert_close(run(cell, xs.flip(2), h.flip(1)), run(cell, xs, h).flip(2))


def test_equal_sides_give_equal_outputs():
    """And those of one side alone, as c∘h̃ + (1−c)∘h̃ = h̃."""
    cell, xs, h = pairs()
    outputs = run(cell, xs[:, :, :1].expand(6, 3, 2, 5), h[:, :1].expand(4, 2, 5))
    laws.assert_close(outputs[:, :, 0], outputs[:, :, 1])
    single = seeded(cells.make("coupled-gru", 3, 4, coupled=False))
    for name, parameter in single.named_parameters():
        parameter.data = cell.get_parameter(name).detach()[:12]
    laws.assert_close(run(single, xs[:, :, [0, 0]], h[:, [0, 0]]), outputs)


@pytest.mark.parametrize("coupled", [True, False])
def test_sides_see_each_other_only_when_coupled(coupled):
    cell, xs, h = pairs(coupled)
    other = xs.index_copy(2, torch.tensor([1]), normal(6, 3, 1, 5, seed=9))
    difference = (run(cell, xs, h) - run(cell, other, h))[:, :, 0].abs().max()
    assert difference > 1e-3 if coupled else difference == 0


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_the_coupling_is_the_share_of_the_others_candidate(least):
    """What of h̄ comes from the other side, found from a step: with z = 0, h' = h̃ + c∘(h̃_other − h̃)."""
    cell, xs, h = pairs()
    cell.least_coupling = least
    with torch.no_grad():
        cell.bias[4:8] = -1e3
    single = seeded(cells.make("coupled-gru", 3, 4, coupled=False))
    for name, parameter in single.named_parameters():
        parameter.data = cell.get_parameter(name).detach()[:12]
    new, own = (each(xs[0], {"h": h})[0].detach() for each in (cell, single))
    found = coupling(dict(cell.named_parameters()), h, least).detach()
    laws.assert_close(found.expand(4, 2, 5), (new - own) / (own.flip(1) - own), 1e-9)
    assert found.min() > least
    if least:
        laws.assert_close(found, 0.3 + 0.7 * coupling(dict(cell.named_parameters()), h).detach())


def test_siamese_is_torchs_gru_on_each_side():
    ours, xs, h = pairs(coupled=False)
    weights = {"weight_ih": ours.weight_x, "weight_hh": ours.weight_h, "bias_ih": ours.bias, "bias_hh": ours.bias_h}
    theirs, outputs = torchs(torch.nn.GRUCell(3, 4), **weights), run(ours, xs, h)
    for side in (0, 1):
        expected = h[:, side].T
        for x, output in zip(xs, outputs, strict=True):
            expected = theirs(x[:, side].T, expected)
            laws.assert_close(output[:, side], expected.detach().T)


# As an optimiser's cell


@pytest.mark.parametrize("name", cells.CELLS)
def test_is_a_cell_of_the_coordinatewise_optimiser(name):
    optimiser = seeded(optimisers.make("coordinatewise", cell=name, hidden_size=4))
    laws.assert_batch_rows_are_separate_runs(optimiser)
    laws.assert_permutes_with_its_coordinates(optimiser)


def test_an_optimisers_cell_takes_its_options():
    choice = {"name": "ihc-lstm", "gamma_on": "uvh", "gate_input": False, "gate_bias": True}
    cell = optimisers.make("coordinatewise", cell=choice, hidden_size=4).cell
    assert cell.get_parameter("highway.gamma").shape == (4, 4)
    assert {name for name, _ in cell.named_parameters()} == {
        "highway.feedback.weight_h",
        "highway.gamma",
        "core.weight_v",
        "core.weight_x",
        "core.gate_bias",
    }


def test_an_optimiser_takes_no_cell_on_pairs():
    with pytest.raises(UserError, match="cell: expected a known name, found 'coupled-gru'"):
        optimisers.make("coordinatewise", cell="coupled-gru")


# Mistakes


@pytest.mark.parametrize(("input_size", "hidden_size", "name"), [(0, 4, "input_size"), (3, -1, "hidden_size")])
def test_sizes_are_positive(input_size, hidden_size, name):
    with pytest.raises(UserError, match=f"{name}: expected at least 1, found"):
        cells.make("lstm", input_size, hidden_size)


@pytest.mark.parametrize("name", SQUARE)
def test_sizes_must_be_equal(name):
    with pytest.raises(UserError, match=f"cell '{name}': .*found input_size 3 and hidden_size 4; make them equal"):
        cells.make(name, 3, 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gru", {"update": "old"}, "cell 'gru': update: expected 'new' or 'kept', found 'old'"),
        ("gru", {"reset": True}, "cell 'gru': reset: expected 'before' or 'after', found True"),
        ("gru", {"biases": 2}, "cell 'gru': biases: expected 'none', 'one' or 'two', found 2"),
        ("irc-lstm", {"gate_bias": "yes"}, "cell 'irc-lstm': gate_bias: expected a valid boolean, found 'yes'"),
        ("irc-lstm", {"gate_input": True}, "cell 'irc-lstm': gate_input: expected a known key"),
        ("ihc-lstm", {"gamma_on": "v"}, "cell 'ihc-lstm': gamma_on: expected 'h' or 'uvh', found 'v'"),
        ("lstm", {"gate_bias": True}, "cell 'lstm': gate_bias: expected a known key"),
        ("rnn", {"activation": "sine"}, "cell 'rnn': activation: expected 'tanh' or 'relu', found 'sine'"),
        ("gru", {"activation": "sine"}, "cell 'gru': activation: expected 'tanh', 'relu' or 'linear', found 'sine'"),
        ("coupled-gru", {"least_coupling": 1.0}, "least_coupling: expected from 0 to below 1, found 1.0"),
        ("coupled-gru", {"least_coupling": -0.1}, "least_coupling: expected from 0 to below 1, found -0.1"),
        (
            "coupled-gru",
            {"least_coupling": 0.3, "coupled": False},
            "least_coupling: expected 0 without coupling, found 0.3",
        ),
        ("leaky", {"step": "two"}, "cell 'leaky': step: expected 'vector' or 'scalar', found 'two'"),
        ("no-irc-gru", {"gate_input": False}, "cell 'no-irc-gru': gate_input: expected a known key"),
        ("irc-grru", {}, "did you mean 'irc-gru'"),
    ],
)
def test_unknown_options_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        cells.make(name, 3, 4, **options)


@pytest.mark.parametrize("name", cells.CELLS | cells.PAIR_CELLS)
@pytest.mark.parametrize("shape", [(2, 3), (4, 2), ()], ids=["features last", "too many features", "no axis"])
def test_inputs_of_another_size_are_refused(name, shape):
    """Before the first step and in every step, with what was expected, what came and what to do."""
    cell = cells.make(name, 3, 3)
    state = cell.initial_state(torch.zeros(3, 2))
    message = re.escape(
        f"cell: x: expected 3 features on axis 0, found shape {shape}; put the features first: x.movedim"
    )
    for call in (cell.initial_state, lambda x: cell(x, state)):
        with pytest.raises(UserError, match=message):
            call(torch.zeros(shape))


@pytest.mark.parametrize("name", cells.CELLS | cells.PAIR_CELLS)
def test_states_of_another_shape_are_refused(name):
    """Another batch (one that would broadcast, too), another rank, a missing entry and one too many."""
    cell = cells.make(name, 3, 3)
    state = cell.initial_state(torch.zeros(3, 2, 5))
    one, rank = ({key: value[..., :size] for key, value in state.items()} for size in (1, 5))
    rank = {key: value.flatten(1) for key, value in rank.items()}
    for wrong in (one, rank, {}, state | {"more": torch.zeros(3, 2, 5)}):
        with pytest.raises(UserError, match=r"cell: state: expected shapes \{.*; start with the cell's initial_state"):
            cell(torch.zeros(3, 2, 5), wrong)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 5), (3, 5, 2)])
def test_pairs_that_are_none_are_refused(shape):
    x = torch.zeros(shape)
    with pytest.raises(UserError, match=r"coupled-gru: x: expected \[N, 2, ...\], found shape .*stack left and right"):
        cells.make("coupled-gru", 3, 4).initial_state(x)


def test_the_published_initial_values_are_those_of_every_layer():
    stacked = cells.init_as_published(cells.make("stacked", 4, 4, cell="irc-gru", layers=3))
    found = [value.detach().unique().tolist() for name, value in stacked.named_parameters() if name.endswith("alpha")]
    assert found == [[2.0]] * 3
