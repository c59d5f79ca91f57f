"""Weights of `small_fc_lopt` as PyLO publishes them: a safetensors file of an MLP, with its sizes in a JSON file.

Format, of `PyTorchModelHubMixin`: `model.safetensors` with `network.input`, `network.linear_0`, … and `network.output`,
each a `weight` [out, in] and a `bias` [out] in PyTorch's order, and `config.json` with `input_size`, `hidden_size` and
`hidden_layers`. PyLO (Janson et al. 2025, arXiv:2506.10315) keeps the decays in its code, as do we in `DECAYS`.
Nothing is unpickled. Files that are pickles, and the msgpack files of Celo and Celo2, are not read.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.optimisers import Optimiser
from l2lopt.optimisers.small_fc import FEATURES, TIMES
from l2lopt.storage import tensor_file

FILE, CONFIG = "model.safetensors", "config.json"
"""Names of the files in a repository of the hub."""
DECAYS: Mapping[str, Sequence[float]] = {
    "momenta_decay": (0.15216392, 0.14245212, 0.06812963),
    "squares_decay": (0.01079706,),
    "factored_decay": (0.18621896, -0.10864615, -0.06185547),
}
"""The learned decays b of the weights that PyLO publishes as `btherien/mulo`, of which its code has one set."""
_WHAT, _AGAIN = "an MLP of PyLO's small_fc_lopt", "get the repository again, such as btherien/mulo"


def load_small_fc(
    path: str | Path,
    *,
    decays: Mapping[str, Sequence[float]] = DECAYS,
    step_scale: float = 0.01,
    exponent_scale: float = 0.001,
    rests: bool = True,
) -> Optimiser:
    """The learned optimiser of a file of PyLO's, as `optimisers.SmallFC`.

    `l2lopt.save` writes it in our own format, which `LearnedOptimizer`, configs and the command line take.

    Args:
        path: Folder with `model.safetensors` and perhaps `config.json`, or a safetensors file.
        decays: Learned decays by their names in φ.
        step_scale: PyLO's `step_mult`.
        exponent_scale: PyLO's `exp_mult`.
        rests: Whether coordinates without a gradient come to rest; with False the published rule to the letter.

    Raises:
        UserError: For a missing or damaged file, tensors of other names, shapes or types, numbers that are not finite,
            or sizes that are not those of `config.json`.

    Example:
        >>> import l2lopt
        >>> from l2lopt.weights.small_fc import load_small_fc
        >>> rule = load_small_fc("mulo")  # after `hf download btherien/mulo --local-dir mulo`  # doctest: +SKIP
        >>> l2lopt.save(rule, "mulo/l2lopt.safetensors")  # doctest: +SKIP
    """
    given = Path(os.path.expanduser(path))  # not `Path.expanduser`, which raises for a user that is none
    file = given / FILE if os.path.isdir(given) else given
    _, tensors = tensor_file.read_any(file, _WHAT, _AGAIN)
    first = tensors.get("network.input.weight")
    if first is None or first.dim() != 2 or not first.shape[0]:
        raise UserError(str(file), expected=_WHAT, found="other tensors", remedy=_AGAIN)
    layers = 1 + sum(name.startswith("network.linear_") and name.endswith(".weight") for name in tensors)
    hidden = first.shape[0]
    _check_config(file.with_name(CONFIG), {"hidden_size": hidden, "hidden_layers": layers - 1})
    rule = optimisers.make(
        "small-fc",
        hidden_size=hidden,
        hidden_layers=layers,
        step_scale=step_scale,
        exponent_scale=exponent_scale,
        rests=rests,
    )
    names = ["input", *(f"linear_{number}" for number in range(layers - 1)), "output"]
    parts = [(f"layers.{number}", f"network.{name}") for number, name in enumerate(names)]
    ours = {f"{theirs}.{kind}": f"{own}.{kind}" for own, theirs in parts for kind in ("weight", "bias")}
    phi = rule.phi()
    tensor_file.check_tensors(file, {name: phi[own] for name, own in ours.items()}, tensors, _AGAIN, any_float=True)
    found = {own: tensors[name] for name, own in ours.items()}
    for name in DECAYS:
        values = torch.tensor(decays.get(name, ()), dtype=torch.float64)
        if values.shape != phi[name].shape or not values.isfinite().all():
            expected = f"{len(phi[name])} finite numbers"
            raise UserError(f"decays: {name}", expected=expected, found=str(decays.get(name)), remedy="change them")
        found[name] = values
    rule.load_state_dict(found)
    return rule


def _check_config(path: Path, sizes: Mapping[str, int]) -> None:
    """Compares the sizes of the tensors with those of `config.json`, where there is one."""
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        said = {name: config.get(name) for name in ("input_size", *sizes)}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(str(path), expected="a table of sizes", found=str(error), remedy=_AGAIN) from None
    there = {"input_size": FEATURES + len(TIMES), **sizes}
    if said != there:
        raise UserError(str(path), expected=f"the sizes of the tensors, {there}", found=str(said), remedy=_AGAIN)
