"""Optimisees and optimisers that a script hands over as objects: how a config names them, and that they are the same.

A config is text, so an object is in it as a table with name = "python" and what tells the object from others: its size,
digests of its samples and batches, its first loss. Whoever goes on with the run hands the object over again; it is
compared with the table, and what differs is said.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import optimisees
from l2lopt import optimisers
from l2lopt.core.digest import bytes_of
from l2lopt.core.errors import UserError
from l2lopt.core.layout import Layout, Params
from l2lopt.core.registry import Choice
from l2lopt.core.seeding import generator
from l2lopt.core.settings import Settings
from l2lopt.core.types import Aux, Batch, detach
from l2lopt.optimisee import Optimisee, Split
from l2lopt.optimisers import Optimiser
from l2lopt.torch_optim.registry import TORCH
from l2lopt.weights import files

NAME = "python"
"""The name of objects in a config."""


class Source(NamedTuple):
    """What a run is made from.

    Attributes:
        config: Anything that `config.load` reads.
        optimisees: The objects that the config's tables with name = "python" stand for; empty if it has none.
        optimiser: The object that `optimiser` in the config stands for, or None.
    """

    config: str | Path | Mapping[str, Any] | Settings
    optimisees: tuple[Optimisee, ...] = ()
    optimiser: Optimiser | None = None


def source(
    given: str | Path | Mapping[str, Any] | Settings | Optimisee | Sequence[Optimisee],
    optimiser: Choice | Path | Optimiser | None = None,
    *,
    is_trained: bool = False,
) -> Source:
    """The source of a run: a config as it is, or the config of these objects.

    Args:
        given: A config, or an optimisee, or several, of which the first is the one that optimisers are compared on.
        optimiser: The optimiser of an optimisee: a name, a table of the name and its options, the name or path of
            weights, a folder that `meta_train` has left, or an optimiser.
        is_trained: Whether the run trains the optimiser: it then begins with initial values, and cannot be an object.

    Raises:
        UserError: For an optimiser beside a config, which names its own; for what is no optimisee.
    """
    if isinstance(given, str | Path | Mapping | Settings):
        if optimiser is not None:
            remedy = "set optimiser in the config, or in changes"
            raise UserError("optimiser", expected="none beside a config", found=repr(optimiser), remedy=remedy)
        return Source(given)
    objects = listed([given] if given is None else given)
    first, *others = [describe(optimisee) for optimisee in objects]
    config: dict[str, Any] = {"optimisee": first, "device": str(_device(objects[0]))}
    if others:
        config["mixed_with"] = others
    if isinstance(optimiser, Optimiser | Path) and is_trained:
        remedy = 'give its name and options, such as {"name": "coordinatewise", "hidden_size": 20}'
        found = f"a {type(optimiser).__name__}"
        raise UserError("optimiser", expected="one to be meta-trained from the start", found=found, remedy=remedy)
    if isinstance(optimiser, Optimiser):
        config |= {"optimiser": _describe_optimiser(optimiser), "label": type(optimiser).__name__.lower()}
        return Source(config, objects, optimiser)
    if optimiser is not None:
        config["optimiser"] = optimiser if is_trained else _choice(optimiser)
    return Source(config, objects)


def listed(given: Any) -> tuple[Optimisee, ...]:
    """The optimisees of an argument that may be one, several or None.

    Raises:
        UserError: For anything else, and for an optimisee that breaks the contract.
    """
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for optimisee in found:
        if not isinstance(optimisee, Optimisee):
            kind, remedy = f"a {type(optimisee).__name__}", "make one with l2lopt.make_optimisee"
            raise UserError("optimisee", expected="an Optimisee", found=kind, remedy=remedy)
        optimisees.check_optimisee(optimisee)
    if given is not None and not found:
        raise UserError("optimisee", expected="at least one", found="none", remedy="give one")
    return found


def matched(objects: Sequence[Optimisee], choices: Sequence[Choice], device: torch.device) -> list[Optimisee | None]:
    """For each of a config's choices the object that it stands for; None for one that is a name.

    Raises:
        UserError: If an object is missing, is not the one that the config describes, or is on another device.
    """
    wanted = [choice for choice in choices if is_object(choice)]
    if len(wanted) != len(objects):
        expected = f"{len(wanted) or 'none'} made in Python, as the config says"
        remedy = (
            "pass them from Python: themselves to l2lopt.meta_train and train, optimisee=… to evaluate and load_trained"
        )
        remedy = remedy if wanted else "leave optimisee out, or change the config"
        raise UserError("optimisee", expected=expected, found=str(len(objects) or "none"), remedy=remedy)
    for optimisee, choice in zip(objects, wanted, strict=True):
        _compare("optimisee", choice, describe(optimisee), "pass the one that the run was made with")
        if (place := _device(optimisee)) != device:
            remedy = "set device in make_optimisee, and nowhere else"
            raise UserError("device", expected=f"{place}, the optimisee's", found=str(device), remedy=remedy)
    following = iter(objects)
    return [next(following) if is_object(choice) else None for choice in choices]


def matched_optimiser(optimiser: Optimiser | None, choice: Choice) -> Optimiser | None:
    """The object that a config's optimiser stands for; None if that is a name.

    Raises:
        UserError: If the object is missing, or is not the one that the config describes.
    """
    if optimiser is not None:
        _compare("optimiser", choice, _describe_optimiser(optimiser), "pass the one that the run was made with")
    elif is_object(choice):
        remedy = "pass that one as optimiser=…"
        raise UserError("optimiser", expected="one made in Python", found="none", remedy=remedy)
    return optimiser


def class_of(choice: Choice) -> type[Optimisee]:
    """The class that a choice builds; of an object the registered one of its class's name, else `Optimisee`."""
    if not is_object(choice):
        return optimisees.class_of(choice)
    kind = None if isinstance(choice, str) else choice.get("type")
    registered = map(optimisees.class_of, optimisees.OPTIMISEES)
    return next((found for found in registered if found.__name__ == kind), Optimisee)


def describe(optimisee: Optimisee) -> dict[str, Any]:
    """An optimisee as a config's table: its name and what tells it from others.

    Beside the optimisee's own fingerprint that is its class, the number of its parameters and a digest of their names,
    shapes and roles; a digest of the first batches, which shows the batch size, their order and what is held out; one
    of the first samples of each evaluation and of how many there are; the norm of the first initial values and the loss
    there on the first batch, to four digits; and at a point near these values, where no tensor is 0, the loss, the
    gradient's norm, the norm of the loss's own state after a step, and the loss in test mode with it, to three digits.
    These show the model, its initial values and both losses.
    """
    params, aux = optimisee.init(0)
    layout = Layout.of(params)
    batch, second = (optimisee.batch("train", 0, step) for step in range(2))
    loss, _ = optimisee.loss(params, aux, batch)
    return {
        "name": NAME,
        "type": type(optimisee).__name__,
        "parameters": layout.size,
        "layout": _digest([layout.names, [list(shape) for shape in layout.shapes], sorted(optimisee.roles().items())]),
        "batches": _digest([batch, second, *(_batch(optimisee, split) for split in ("inner", "heldout"))]),
        "evaluations": _digest([_evaluation(optimisee, split) for split in ("train", "heldout", "test")]),
        "first_norm": f"{sum(float(value.detach().double().square().sum()) for value in params.values()) ** 0.5:.4g}",
        "first_loss": f"{float(loss.detach()):.4g}",
        "nearby": _nearby(optimisee, layout, params, aux, batch),
        **optimisee.fingerprint(),
    }


def _nearby(optimisee: Optimisee, layout: Layout, params: Params, aux: Aux, batch: Batch) -> str:
    """Losses, the gradient's norm and that of the state after a step, at initial values with a little noise added.

    Where the last layer begins at 0, the first loss is that of any model. How running statistics follow the batches
    shows in the state alone.
    """
    source, near = generator("nearby", 0), dict[str, Tensor]()
    for (name, value), fan_in in zip(params.items(), layout.fan_ins, strict=True):
        noise = torch.randn(value.shape, generator=source).to(value) / max(fan_in, 1) ** 0.5
        near[name] = (value.detach() + noise / 2).requires_grad_()
    if not near:
        return ""
    first, after = optimisee.loss(near, aux, batch)
    found, after = [first], detach(after)
    grads = torch.autograd.grad(found[0], list(near.values()), materialize_grads=True, allow_unused=True)
    norms = [
        torch.stack([value.double().square().sum() for value in values]).sum().sqrt()
        for values in (grads, [value for value in after.values() if value.is_floating_point()])
        if values
    ]
    found += norms
    with torch.no_grad():
        for split in ("train", "test"):
            try:
                found.append(optimisee.evaluate(near, after, next(iter(optimisee.evaluation_batches(split, 0)))[0]))
            except UserError:  # no samples
                continue
            break
    # Three digits: a sum's rounding, which depends on the number of threads, must not make another problem of it.
    return " ".join(f"{float(value.detach()):.3g}" for value in found)


def _batch(optimisee: Optimisee, split: Split) -> Any:
    """The first batch of a split, or None where it has no samples."""
    try:
        return optimisee.batch(split, 0, 0)
    except UserError:
        return None


def _evaluation(optimisee: Optimisee, split: Split) -> Any:
    """The first batch of an evaluation and the number of all samples, or None where there are none."""
    first, samples = None, 0
    try:
        for batch, count in optimisee.evaluation_batches(split, 0):  # one at a time: a split may be large
            first, samples = batch if first is None else first, samples + count
    except UserError:
        return None
    return first, samples


def _describe_optimiser(optimiser: Optimiser) -> dict[str, Any]:
    return {"name": NAME, "type": type(optimiser).__name__, "digest": files.digest(optimiser)}


def _choice(optimiser: Any) -> Any:
    """An optimiser's choice as a config has it, also for weights: a folder of a run, a file, or a shipped name."""
    named = isinstance(optimiser, str) and optimiser in {**optimisers.OPTIMISERS, **TORCH}
    if named or not isinstance(optimiser, str | Path):
        return optimiser
    if os.path.isdir(optimiser):
        return {"weights": str(Path(optimiser) / "optimiser.safetensors")}
    is_weights = isinstance(optimiser, Path) or optimiser.endswith(".safetensors") or optimiser in files.list_weights()
    return {"weights": str(optimiser)} if is_weights else optimiser


def is_object(choice: Choice) -> bool:
    """Whether a config's choice stands for an object that was made in Python."""
    return (choice if isinstance(choice, str) else choice.get("name")) == NAME


def _compare(where: str, choice: Choice, found: Mapping[str, Any], remedy: str) -> None:
    """Refuses an object that is not what a config's table says, with what differs."""
    wanted = {"name": choice} if isinstance(choice, str) else choice
    differing = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
    if differing:
        pairs = [", ".join(f"{key} = {table.get(key)}" for key in differing) for table in (wanted, found)]
        raise UserError(where, expected=pairs[0], found=pairs[1], remedy=remedy)


def _device(optimisee: Optimisee) -> torch.device:
    """The device of an optimisee's parameters."""
    return next((value.device for value in optimisee.init(0)[0].values()), torch.device("cpu"))


def _digest(tree: Any) -> str:
    """A digest of tensors and plain values, in the order of their tree."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            found.update(bytes_of(leaf))
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
