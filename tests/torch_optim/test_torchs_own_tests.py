"""PyTorch's own tests of its optimisers (`TestOptimRenewed`, test/test_optim.py), transcribed, over every shipped rule.

The names are those of the tests there; what they need of `common_optimizers` comes from the installed wheel. What they
ask for and is refused by design stands in `REFUSED`, by name. Left out are tests of what the rules do not have or the
CPU cannot show:

- of PyTorch's tables and classes: test_optim_infos_do_not_specify_global_cliquey_kwargs,
  test_second_order_optims_return_consistent_types, test_defaults_changed_to_foreach;
- of options that are refused: test_foreach_*, test_fused_*, test_capturable_*, test_*_differentiable;
- of sparse gradients, which are refused: test_rosenbrock_sparse;
- of GPUs: test_forloop_goes_right_direction_multigpu, test_peak_memory_foreach, test_cpu_load_state_dict,
  test_state_dict_with_cuda_params, and the large tensors.
"""

from copy import deepcopy

import laws
import pytest
import torch
from implementations import normal
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torchs_tests import SOME, closure_of, common_optimizers, each_input, each_rule, tensors

from l2lopt import LearnedOptimizer, UserError, list_weights


@pytest.mark.slow
@each_rule
def test_errors(make):
    for error in common_optimizers().get_error_inputs_for_all_optims("cpu", torch.float32):
        given = error.optimizer_error_input
        params, message = given.params, error.error_regex
        if params is None:  # the one where PyTorch's classes look at the rate before the parameters
            params, message = [nn.Parameter(torch.ones(1))], "lr: expected one number"
        expected = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
        with expected(error.error_type, match=message):
            make(params, **given.kwargs)


@each_input
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("scheduled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forloop_goes_right_direction(make, contiguous, scheduled, request):
    some = request.node.callspec.id.startswith(SOME)
    schedules = [()]
    if scheduled:
        (schedules,) = (info.scheduler_inputs for info in common_optimizers().optim_db if info.name == "SGD")
    for constructors in schedules if some else schedules[:1]:
        weight, bias, given = tensors(contiguous)
        optimizer = make([weight, bias])
        closure, schedulers = closure_of(optimizer, weight, bias, given), [s(optimizer) for s in constructors]
        first = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                scheduler.step(loss.detach()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        assert closure().item() < first


@each_rule
def test_param_group_with_lrscheduler_goes_right_direction(make):
    weight, bias, given = tensors()
    optimizer = make([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
    closure, scheduler = closure_of(optimizer, weight, bias, given), StepLR(optimizer, gamma=0.9, step_size=1)
    first = closure().item()
    for _ in range(20):
        optimizer.step(closure)
        scheduler.step()
    assert closure().item() < first
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.9**20, 0.01 * 0.9**20])


@each_rule
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(make, shape):
    runs = []
    for lr in (0.5, torch.full(shape, 0.5)):
        weight, bias, given = tensors()
        optimizer = make([weight, bias], lr=lr)
        for _ in range(5):
            optimizer.step(closure_of(optimizer, weight, bias, given))
        runs.append((weight.detach(), bias.detach()))
        if isinstance(lr, torch.Tensor):
            assert optimizer.param_groups[0]["lr"] is lr  # not changed, and still the caller's
            assert lr.item() == 0.5
    laws.assert_close(runs[0], runs[1], 1e-6)


@each_rule
def test_param_groups_weight_decay(make):
    """A group's decay shrinks its parameters, exactly so where nothing else does."""
    weight, bias, given = tensors()
    optimizer = make([{"params": [weight], "weight_decay": 0.01}, {"params": [bias]}])
    closure = closure_of(optimizer, weight, bias, given)
    first = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    assert closure().item() < first
    still, decayed = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = make([{"params": [still]}, {"params": [decayed], "weight_decay": 0.1}])
    still.grad, decayed.grad = torch.zeros(3, 2), torch.zeros(3, 2)
    optimizer.step(loss=1.0)
    laws.assert_close(still.detach() - decayed.detach(), torch.full((3, 2), 0.1), 1e-6)


@each_rule
def test_param_groups_lr(make):
    weight, bias, given = tensors()
    other = nn.Parameter(torch.randn(2))
    before, optimizer = (
        other.detach().clone(),
        make([{"params": [weight, bias], "lr": 0.5}, {"params": other}], lr=1e-28),
    )
    closure = closure_of(optimizer, weight, bias, given)
    first = closure().item()
    for _ in range(20):
        loss = closure()
        other.grad = torch.rand(2)
        optimizer.step(loss=loss)
    assert closure().item() < first
    torch.testing.assert_close(other.detach(), before)


REFUSED = {
    "test_complex, test_complex_2d": (torch.complex64, {}, "expected a dense real gradient, found strided complex64"),
    "test_rosenbrock_sparse": (torch.float32, {"sparse": True}, "expected a dense real gradient, found sparse_coo"),
    **{
        f"tests of {name}": (torch.float32, {name: True}, f"{name}: expected False, found True")
        for name in ("maximize", "foreach", "fused", "capturable", "differentiable")
    },
}
"""What is refused by design, as PyTorch's tests name it → dtype, option and message."""


@each_rule
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_by_design(make, what):
    dtype, options, message = REFUSED[what]
    param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    param.grad = torch.ones_like(param).to_sparse() if "sparse" in options else torch.ones_like(param)
    with pytest.raises(UserError, match=message):
        make([param], **{name: value for name, value in options.items() if name != "sparse"}).step(loss=1.0)
    assert param.detach().eq(1).all()


@each_input
def test_step_is_noop_when_params_have_no_grad(make):
    weight, bias, _ = tensors()
    before = weight.detach().clone(), bias.detach().clone()
    optimizer = make([weight, bias])
    optimizer.step(lambda: torch.tensor([1]))
    laws.assert_same((weight.detach(), bias.detach()), before)


@each_input
@pytest.mark.parametrize("shape", [(5, 1), (7, 4), ()])
def test_step_is_noop_for_zero_grads(make, shape):
    """But for the decay, by which every coordinate shrinks by one factor; rules without a decay leave all bits."""
    param = nn.Parameter(torch.randn(shape))
    before, optimizer = param.detach().clone(), make([param])
    for _ in range(3):
        param.grad = torch.zeros(shape)
        optimizer.step(lambda: torch.tensor([1]))
    factors = param.detach() / before
    assert factors.min() > 0.3
    torch.testing.assert_close(factors, factors.flatten()[0].expand(shape))
    rule = optimizer.rules[optimizer.param_groups[0]["weights"]]
    decays = (
        getattr(getattr(rule, "rule", getattr(rule, "harness", rule)), "weight_decay", 0.0)
        or optimizer.param_groups[0]["weight_decay"]
    )
    assert bool(decays) != torch.equal(param.detach(), before)


@pytest.mark.parametrize("name", list_weights())
def test_rows_of_an_embedding_that_nothing_uses_stay(name):
    """The padding's among them; weights of dead units likewise. Beside the decay nothing moves them."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(50, 4, padding_idx=0), nn.Linear(4, 3)
    with torch.no_grad():
        layer.bias[2] = -100.0
    rows, dead = embedding.weight.detach().clone(), layer.weight[2].detach().clone()
    optimizer = LearnedOptimizer([*embedding.parameters(), *layer.parameters()], name)
    for step in range(30):
        optimizer.zero_grad()
        loss = layer(embedding(torch.tensor([0, 3, 5, 1 + step % 2]))).relu().sub(1.0).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    used = torch.zeros(50, dtype=torch.bool).index_fill(0, torch.tensor([1, 2, 3, 5]), True)
    after = embedding.weight.detach()
    assert after[0].eq(0).all()  # θ = 0, so that not even the decay moves it
    shrunk = after[~used][1:] / rows[~used][1:]
    torch.testing.assert_close(shrunk, shrunk[0, 0].expand_as(shrunk))
    assert 0.5 < shrunk[0, 0] < 1.0
    moved = (after[used] - shrunk[0, 0] * rows[used]).abs().amax(1) > 1e-4
    assert moved.sum() >= 3  # a row whose units are all off has no gradient either
    torch.testing.assert_close(layer.weight[2].detach() / dead, shrunk[0, 0].expand(4), rtol=0.5, atol=0.0)
    assert (layer.weight[2].detach() / dead).std() < 1e-5


@each_input
def test_grads_are_never_inplaced_into(make):
    weight, bias, given = tensors()
    optimizer = make([weight, bias])
    loss = closure_of(optimizer, weight, bias, given)()
    before = [param.grad.clone() for param in (weight, bias)]
    versions = [param.grad._version for param in (weight, bias)]
    optimizer.step(loss=loss)
    assert [param.grad._version for param in (weight, bias)] == versions
    laws.assert_same([weight.grad, bias.grad], before)


@each_rule
def test_mixed_device_dtype(make):
    """Parameters of two dtypes move as each kind by itself would."""
    one, two = nn.Parameter(normal(4, 3).float()), nn.Parameter(normal(4, 3, seed=1))
    pair = deepcopy([one, two])
    grads = [normal(4, 3, seed=2 + k) for k in range(4)]
    together, *apart = (
        make(params) for params in ([("one", one), ("two", two)], [("one", pair[0])], [("two", pair[1])])
    )
    for g in grads:
        for param in (one, two, *pair):
            param.grad = g.to(param.dtype)
        for optimizer in (together, *apart):
            optimizer.step(loss=1.0)
    laws.assert_same([one.detach(), two.detach()], [value.detach() for value in pair])


@each_rule
def test_gradscaler(make):
    """An infinite gradient is a step that is left out; all others are those without a scaler."""
    runs = []
    for scaled in (True, False):
        weight, bias, given = tensors()
        optimizer, scaler = make([weight, bias]), torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for step in range(4):
            if step == 2 and not scaled:
                continue
            optimizer.zero_grad()
            loss = (weight.mv(given) + bias).pow(2).sum()
            scaler.scale(loss).backward()
            if step == 2:
                weight.grad[0, 0] = torch.inf
            scaler.step(optimizer, loss=loss)
            scaler.update()
        runs.append((weight.detach(), bias.detach()))
    laws.assert_close(runs[0], runs[1], 1e-6)
