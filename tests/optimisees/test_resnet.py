"""The residual networks: the paper's counts, ordinary training as it is elsewhere, the options one by one."""

import laws
import pytest
import torch
from implementations import normal, pictures, problem, small_resnet
from torch import nn
from torch.func import grad
from torchvision.models.resnet import BasicBlock as TheirBlock
from torchvision.models.resnet import ResNet as TheirResNet

from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout
from l2lopt.estimators import Backprop, Blockwise
from optimisees import resnet
from optimisees.classifiers.resnet import ResNet


@pytest.mark.parametrize(("width", "count"), [(64, 21_282_122), (16, 1_334_618)])
def test_the_counts_of_the_paper(width, count):
    with torch.device("meta"):
        model = ResNet(3, 10, (3, 4, 6, 3), width)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def theirs(state):
    """torchvision's ResNet-34 in CIFAR form with our parameters."""
    model = TheirResNet(TheirBlock, [3, 4, 6, 3], num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    names = [name for name in model.state_dict()]
    model.load_state_dict(dict(zip(names, state.values(), strict=True)))
    return model


def test_it_is_torchvisions_without_its_large_stem():
    """Modules are built in the same order, so the values follow one another alike."""
    torch.manual_seed(0)
    ours = ResNet(3, 10, (3, 4, 6, 3), 64)
    model, x = theirs(ours.state_dict()), normal(2, 3, 16, 16).float()
    for mode in (True, False):
        laws.assert_close(ours.train(mode)(x), model.train(mode)(x), 1e-5)
    laws.assert_close(list(ours.state_dict().values()), list(model.state_dict().values()), 1e-5)


def gradient(task, seed=0):
    found = grad(task.loss, has_aux=True)(*task.init(seed), task.batch("train", seed, 1))[0]
    return Layout.of(found).ravel(found)


@pytest.mark.parametrize("seeds", [0, (0, 1)])
def test_blockwise_equals_the_tape_on_images_in_bytes(seeds):
    task = problem("coordinatewise gated", "resnet on changed images", seeds=seeds, length=3)
    laws.assert_close(laws.run(Blockwise(), task).gradient, laws.run(Backprop(1), task).gradient, 1e-9)


def test_channels_last_gives_the_same_numbers():
    laws.assert_close(gradient(small_resnet(channels_last=True)), gradient(small_resnet()), 1e-9)


@pytest.mark.parametrize(("width", "told"), [(4, True), (8, False)])
def test_few_channels_do_not_lie_last_on_a_cpu(width, told, caplog):
    """Where they did, the gradient of the first shortcut broke the heap on processors with AVX2 alone."""

    def task(**options):
        return resnet((1, 1), width, pictures(), batch_size=5, heldout=0.3, evaluation_size=8, **options)

    with caplog.at_level("INFO", logger="l2lopt"):
        last = gradient(task(channels_last=True))
    assert ("channels_last" in caplog.text) == told
    if told:
        laws.assert_close(last, gradient(task()), 0.0)


def test_autocast_computes_in_bfloat16_and_keeps_loss_and_statistics():
    """Convolutions see bfloat16; the loss errs by as little as that has digits."""
    task, plain = (small_resnet(dtype="float32", autocast=on) for on in (True, False))
    params, aux = task.init(0)
    batch, seen = task.batch("train", 0, 0), []
    for layer in task._training.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    loss, moved = task.loss(params, aux, batch)
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == task.evaluate(params, aux, batch).dtype == torch.float32
    wanted, theirs = plain.loss(params, aux, batch)
    assert abs(loss - wanted) < 0.02 * wanted
    assert loss != wanted
    assert {value.dtype for value in moved.values()} == {torch.float32, torch.int64}
    laws.assert_close(moved["model.blocks.1.norm2.running_var"], theirs["model.blocks.1.norm2.running_var"], 0.05)
    assert gradient(task).dtype == torch.float32


def test_the_loss_of_a_step_is_the_ordinary_modules():
    task = small_resnet()
    params, aux = task.init(2)
    batch = task.batch("inner", 2, 3)
    module = task.factory().train()
    module.load_state_dict(params | aux)
    model = module.model
    mean, deviation = (part.view(3, 1, 1) for part in (module.mean, module.deviation))
    images = (batch["inputs"].double() - mean) / deviation
    laws.assert_close(task.loss(params, aux, batch)[0], nn.functional.cross_entropy(model(images), batch["targets"]))


def test_a_batch_is_a_few_of_the_images_in_bytes():
    batch = small_resnet().batch("train", 0, 0)
    assert (batch["inputs"].dtype, batch["inputs"].shape) == (torch.uint8, (5, 3, 8, 8))


def test_only_training_batches_are_changed():
    plain, changing = small_resnet(), small_resnet(crop_and_flip=True)
    for split, same in (("train", False), ("inner", False), ("heldout", True), ("test", True)):
        one, other = (task.batch(split, 0, 2) for task in (plain, changing))
        assert torch.equal(one["targets"], other["targets"])
        assert torch.equal(one["inputs"], other["inputs"]) == same
    assert not torch.equal(changing.batch("train", 0, 0)["inputs"], changing.batch("train", 1, 0)["inputs"])


def test_evaluation_samples_are_the_same_for_all_and_of_their_split():
    few, whole = small_resnet(evaluation_samples=7), small_resnet()
    for split in ("train", "test", "heldout"):
        one, other = (laws.whole(few, split, seed) for seed in (0, 0))
        assert one == other
        assert one.total() == 7
        assert one <= laws.whole(whole, split, 0)
    assert laws.whole(few, "train", 0) == laws.whole(few, "train", 5)
    assert laws.whole(few, "heldout", 0) != laws.whole(few, "heldout", 5)


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": []},
        {"blocks": (1, 0)},
        {"width": 0},
        {"blocks": (1,) * 5},
        {"evaluation_samples": 0},
        {"evaluation_size": 0},
        {"dataset": "elsewhere"},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(UserError):
        resnet(**{"dataset": pictures(), "batch_size": 4, "blocks": (1, 1), "width": 2} | options)
