"""Several processes give one process's parameters: under DDP, and under FSDP2 with each its own shard."""

import io
from copy import deepcopy
from functools import partial

import laws
import processes
import pytest
import torch
from implementations import DOUBLES, OPTIMISERS, hierarchical, normal
from torch import distributed, nn
from torch.utils import _pytree as pytree

from l2lopt import LearnedOptimizer, UserError, optimisers, parameter_groups
from l2lopt.torch_optim import sharding

# The depth is a place in the flat vector, and parameters that lie otherwise have a vector of their own.
STEERED = "hierarchical without depth"
EVERY = OPTIMISERS | DOUBLES | {STEERED: partial(hierarchical, "depth")}
RECIPE = "coordinatewise direction-and-magnitude"
RULES = [
    RECIPE,
    f"{RECIPE} by fan-in",
    "normalised-adam",
    "normalised-muon",
    STEERED,
    "muon",
    "coordinatewise additive",
    "adamw",
    "coordinatewise direction-and-magnitude of lstm with every input",
]


def model_of(dtype=torch.float64, seed=0):
    """Tensors whose first axis two processes share unevenly, or leave one of them nothing of."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def sharded(model, *shape, layers=(2, slice(None))):
    """By FSDP2, layer by layer; of two dimensions of processes, the first repeats."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("repeated", "cut")[-max(len(shape), 1) :]
    mesh = init_device_mesh("cpu", shape or (distributed.get_world_size(),), mesh_dim_names=names)
    for layer in layers:
        fully_shard(model if isinstance(layer, slice) else model[layer], mesh=mesh)
    return model


MODELS = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": sharded,
    "FSDP2 of one cut twice": lambda model: sharded(model, 1, 2),
    "FSDP2 repeated": lambda model: sharded(model, 2, 1),
    "FSDP2 of a layer": partial(sharded, layers=[0]),
}


def is_cut(value):
    return isinstance(value, torch.distributed.tensor.DTensor)


def whole(value):
    """A tensor that may lie across processes, in one piece."""
    return value.detach().full_tensor() if is_cut(value) else value.detach()


def backward(model, step, alone=False):
    """The gradients and the loss of this process's part of a batch of 12."""
    rank, count = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    x = normal(12, 4, seed=step).chunk(count)[rank].to(next(model.parameters()).dtype)
    model.zero_grad()
    loss = (model(x) - x.sum(-1, keepdim=True).sin()).square().mean()
    loss.backward()
    for param in model.parameters() if not isinstance(model, nn.parallel.DistributedDataParallel) and not alone else ():
        if not is_cut(param):  # FSDP2 leaves alone what is not its own
            distributed.all_reduce(param.grad)
            param.grad /= count
    return loss.detach()


def descend(model, optimizer, steps, alone=False):
    for step in steps:
        loss = backward(model, step, alone)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        optimizer.step(loss=loss)


def assert_same_parameters(together, alone, tolerance):
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        laws.assert_close(whole(ours), theirs.detach(), tolerance)


def pickled(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def one_process(rank, made, rule, dtype, steps, tolerance, **options):
    alone, together = model_of(dtype), MODELS[made](model_of(dtype))
    rule = EVERY[rule]().to(dtype)
    descend(alone, LearnedOptimizer(alone.parameters(), rule, **options), range(steps), alone=True)
    descend(together, LearnedOptimizer(together.parameters(), rule, **options), range(steps))
    assert_same_parameters(together, alone, tolerance)
    assert all(not torch.equal(*pair) for pair in zip(alone.parameters(), model_of(dtype).parameters(), strict=True))


def crossed(unmarked):
    """Every model and rule; all but `unmarked` are slow."""
    pairs = [(made, rule) for made in MODELS for rule in RULES]
    return pytest.mark.parametrize(
        ("made", "rule"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in unmarked)) for pair in pairs]
    )


@crossed(unmarked=[])
def test_fifty_steps_give_one_processs_parameters(made, rule):
    processes.run(one_process, 2, made, rule, torch.float64, 50, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("made", [made for made in MODELS if made != "FSDP2 of a layer"])
def test_norms_over_all_coordinates_are_those_of_whole_parameters(made):
    """Where all parameters are sharded: those that are not have a vector, and so norms, of their own."""
    processes.run(one_process, 2, made, "dowg", torch.float64, 50, 1e-7)


@crossed(unmarked=[("DDP", RECIPE)])
def test_a_step_in_float32_gives_one_processs_parameters(made, rule):
    processes.run(one_process, 2, made, rule, torch.float32, 1, 1e-6)


def zero_redundancy(rank, rule):
    """Each process steps some of the parameters: of one of them there is the state in one process alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    alone, together = model_of(), nn.parallel.DistributedDataParallel(model_of())
    rule = EVERY[rule]().double()
    descend(alone, LearnedOptimizer(alone, rule, steps=20), range(20), alone=True)
    groups = parameter_groups(together.module, by_role=True)
    optimizer = ZeroRedundancyOptimizer(groups, LearnedOptimizer, weights=rule, steps=20)
    descend(together, optimizer, range(20))
    assert_same_parameters(together, alone, 1e-7)
    mine = {id(param) for param, state in optimizer.optim.state.items() if state}
    assert 0 < len(mine) < 6


@pytest.mark.parametrize(
    "rule",
    ["normalised-muon", *[pytest.param(name, marks=pytest.mark.slow) for name in RULES if name != "normalised-muon"]],
)
def test_zero_redundancy_gives_one_processs_parameters(rule):
    """Of whole tensors: nothing has to be gathered."""
    processes.run(zero_redundancy, 2, rule)


def in_pieces(rank):
    """The processes hold unequal parts, and must cut them at the same tensors to meet in their sums."""
    from l2lopt.torch_optim import blocks

    blocks.BLOCK = 6
    one_process(rank, "FSDP2", RECIPE, torch.float64, 5, 1e-7, state_dtype="bfloat16")


@pytest.mark.slow
def test_a_state_in_bfloat16_is_cut_alike_everywhere():
    processes.run(in_pieces, 2)


def states(rank):
    """What `state[p]` holds, with a coordinate skipped; and that it can be loaded again, cut or whole."""
    alone, together = model_of(), sharded(model_of())
    rule = OPTIMISERS[RECIPE]()
    first, second = (LearnedOptimizer(model.parameters(), rule) for model in (alone, together))
    for step in range(3):
        backward(alone, step, alone=True)
        backward(together, step)
        alone[0].weight.grad[0, 1] = torch.nan
        if rank == 0:
            together[0].weight.grad.to_local()[0, 1] = torch.nan
        first.step()
        second.step()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        (cut,) = ours.placements
        for key, value in first.state[theirs].items():
            mine = second.state[ours][key]
            if key in ("step", "skipped", "statistic", "vector"):
                laws.assert_close(mine, value, 1e-9)
            else:
                assert (mine.shape, mine.placements[0].dim) == (value.shape, cut.dim + value.dim() - theirs.dim())
                laws.assert_close(whole(mine), value, 1e-9)
    assert first.state[alone[0].weight]["skipped"].item() == 3
    descend(alone, first, range(3, 5), alone=True)
    for taken in (lambda value: value, deepcopy, pickled, whole):
        saved = second.state_dict()
        saved["state"] = pytree.tree_map_only(torch.Tensor, taken, saved["state"])
        model = sharded(model_of())
        model.load_state_dict(together.state_dict())
        other = LearnedOptimizer(model.parameters(), rule)
        other.load_state_dict(saved)
        descend(model, other, range(3, 5))
        assert_same_parameters(model, alone, 1e-7)


@pytest.mark.slow
def test_a_state_lies_as_its_parameter_does():
    processes.run(states, 2)


def guarded(rank):
    """Where the update of one process is not finite, or its loss has diverged, all go over."""
    for reason in ("update", "loss"):
        model = sharded(model_of())
        optimizer = LearnedOptimizer(model.parameters(), OPTIMISERS["coordinatewise additive"](), fallback="adam")
        descend(model, optimizer, range(1))
        backward(model, 1)
        if reason == "update" and rank == 1:
            optimizer.state[model[0].weight]["cell.h"].to_local().fill_(torch.nan)
        optimizer.step(loss=torch.tensor(1e9 if reason == "loss" and rank == 1 else 1.0))
        assert optimizer.param_groups[0]["fallen_back"]
        assert all(whole(param).isfinite().all() for param in model.parameters())
        descend(model, optimizer, range(2, 4))


@pytest.mark.slow
def test_the_guard_acts_everywhere_at_once():
    processes.run(guarded, 2)


def tensor_parallel(rank, rule):
    """Weights cut along either axis, a bias that is repeated, and plain parameters beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    together, plan = deepcopy(alone), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(together, init_device_mesh("cpu", (2,)), plan)
    for model in (alone, together):
        descend(model, LearnedOptimizer(model.parameters(), EVERY[rule]()), range(10), alone=True)
    placements = [str(param.placements[0]) for param in together.parameters() if is_cut(param)]
    assert placements == ["S(0)", "S(0)", "S(1)", "R"]
    assert_same_parameters(together, alone, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_tensor_parallel_layers_are_sharded_ones_too(rule):
    processes.run(tensor_parallel, 2, rule)


class Centred(optimisers.SGD):
    """Takes the gradients' mean off, which is no statistic of a tensor."""

    coordinatewise = False

    def update(self, grads, state, params, *, loss=None):
        return super().update(grads - grads.mean(), state, params)


def refused(rank):
    model = sharded(model_of())
    optimizer = LearnedOptimizer(model.parameters(), Centred(0.1))
    backward(model, 0)
    with pytest.raises(
        UserError, match=r"sharded parameters: expected a rule .* means over groups only, found Centred; choose"
    ):
        optimizer.step()
    assert_same_parameters(model, model_of(), 0.0)
    elsewhere = dict(sharded(model_of().to("meta")).named_parameters())
    with pytest.raises(
        UserError, match=r"sharded parameter '0.weight': expected on cpu, as the mesh is, found on meta"
    ):
        sharding.layout_of(elsewhere)


def cut_twice(rank):
    """By tensor parallelism, and on top of it along the same axis by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cut", "parallel"))
    model = parallelize_module(nn.Linear(4, 6).double(), mesh["parallel"], ColwiseParallel())
    fully_shard(model, mesh=mesh["cut"])
    optimizer = LearnedOptimizer(model.parameters(), optimisers.adam(0.1))
    model(normal(4, 4)).sum().backward()
    with pytest.raises(UserError, match=r"sharded parameter: expected cut or repeated along each dimension"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("task", [refused, cut_twice])
def test_what_cannot_be_cut_is_refused(task):
    processes.run(task, 2)


# Distributed checkpoints

OPTIONS = {"cut": {}, "flat": {"flatten_optimizer_state_dict": True}}


def made_for_checkpoint(seed=0, rule=RULES[-1]):
    model = sharded(model_of(seed=seed)) if distributed.get_world_size() > 1 else model_of(seed=seed)
    groups = [
        {"params": [*model[0].parameters(), *model[4].parameters()], "weight_decay": 0.01},
        {"params": model[2].parameters(), "weights": {"name": "adam", "lr": 0.01}},
    ]
    return model, LearnedOptimizer(groups, EVERY[rule](), fallback="adam", lr=0.5)


def saved(rank, folder, options, rule=RULES[-1]):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = made_for_checkpoint(rule=rule)
    descend(model, optimizer, range(3))
    both = get_state_dict(model, optimizer, options=StateDictOptions(**OPTIONS[options]))
    checkpoint.save(dict(zip(("model", "optimizer"), both, strict=True)), checkpoint_id=folder)


def loaded(rank, folder, options, rule=RULES[-1]):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(**OPTIONS[options])
    model, optimizer = made_for_checkpoint(1, rule)
    both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    checkpoint.load(both, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options
    )
    descend(model, optimizer, range(3, 6))
    alone = model_of()
    groups = [
        {"params": [*alone[0].parameters(), *alone[4].parameters()], "weight_decay": 0.01},
        {"params": alone[2].parameters(), "weights": {"name": "adam", "lr": 0.01}},
    ]
    descend(alone, LearnedOptimizer(groups, EVERY[rule](), lr=0.5), range(6), alone=True)
    assert_same_parameters(model, alone, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (2, 1), (1, 2)], ids=str)
def test_a_distributed_checkpoint_goes_on_in_any_number_of_processes(counts, options, tmp_path):
    processes.run(saved, counts[0], tmp_path / "checkpoint", options)
    processes.run(loaded, counts[1], tmp_path / "checkpoint", options)


def through_the_whole(rank):
    """The full state, as one file has it, put into every process's part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model, optimizer = made_for_checkpoint()
    descend(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True)
    both = get_state_dict(model, optimizer, options=options)
    other, another = made_for_checkpoint(seed=1)
    set_state_dict(other, another, model_state_dict=both[0], optim_state_dict=both[1], options=options)
    for each in ((model, optimizer), (other, another)):
        descend(*each, range(3, 6))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        laws.assert_close(whole(ours), whole(theirs), 1e-9)


@pytest.mark.slow
def test_a_full_state_goes_on():
    processes.run(through_the_whole, 2)
