"""Mutated configs: each is built, with its first step, or refused in one line that names the key."""

import contextlib
import inspect
import logging
from math import prod

import pytest
import tomli_w
from mutations import JUNK, HangError, changed, is_refusal, limit, source

import optimisees
from l2lopt import cells, estimators, optimisers
from l2lopt.core import memory
from l2lopt.core.errors import UserError
from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import Config, TrainConfig
from l2lopt.storage import toml_file
from l2lopt.torch_optim.registry import TORCH
from l2lopt.training.meta_train import meta_train
from l2lopt.training.train import train

LONGEST = 30
"""Seconds that a case may take; none takes one on a machine that is free."""
META = {
    "label": "x",
    "seed": 0,
    "threads": 1,
    "device": "cpu",
    "backend": "auto",
    "optimisee": {"name": "quadratic", "size": 3, "dtype": "float32"},
    "mixed_with": [{"name": "mlp", "hidden": [2], "activation": "relu", "batch_size": 8, "heldout": 0.2}],
    "optimiser": {
        "name": "coordinatewise",
        "cell": {"name": "lstm"},
        "hidden_size": 3,
        "inputs": [{"name": "log-and-sign", "p": 5.0}, "rnnprop", "log-step"],
        "rule": {"name": "direction-and-magnitude", "step_size": 0.1},
        "head_scale": 0.1,
    },
    "unroll": {
        "length": [2, 3],
        "truncation": 2,
        "curriculum": 0,
        "scaling": 0.5,
        "targets": {"next": 1.0, "same": 0.5, "heldout": 0.0},
        "estimator": {"name": "backprop", "order": 1},
    },
    "meta": {"updates": 1, "rate": 0.01, "warm_up": 0, "schedule": "cosine", "final": 0.0, "clip": 1.0, "batch": 1},
    "validation": {"seeds": 1, "horizons": [2], "split": "train", "rows": 1},
    "evaluation": {
        "seeds": 1,
        "steps": 4,
        "horizons": [2],
        "tuning_seeds": 1,
        "backend": "eager",
        "multipliers": [0.5],
        "baselines": [
            {"optimiser": "adam", "rates": [0.1]},
            {"optimiser": {"name": "sgd"}, "rates": [0.1], "schedule": "cosine", "label": "y"},
            {"optimiser": "torch.optim:RMSprop", "rates": [0.1]},
        ],
    },
}
TRAIN = {
    "label": "x",
    "seed": 0,
    "threads": 1,
    "optimisee": {"name": "mlp", "hidden": [2], "activation": "relu", "batch_size": 8, "heldout": 0.2},
    "optimiser": {"name": "adam", "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8},
    "train": {
        "steps": 2,
        "evaluate_every": 1,
        "checkpoint_every": 1,
        "clip": 1.0,
        "schedule": "cosine",
        "warm_up": 1,
        "patience": 2,
        "average": 1,
        "patience_to_average": 2,
    },
}
OPTIMISEES = ["quadratic", "mlp", "convnet", "language-model", "transformer", "sequence-labelling"]
ESTIMATORS = ["blockwise", "backprop", "es", "pes", {"name": "es", "pairs": 1}, {"name": "blockwise", "block": 4}]
OPTIMISERS: list = [{"name": "muon", "lr": 0.1, "momentum": 0.9}, {"name": "adamw", "lr": 0.1, "weight_decay": 0.1}]
OPTIMISERS += ["torch.optim.Adam", "torch.optim.LBFGS", "normalised-muon", {"weights": "lstm"}, "coordinatewise"]
SETS = [
    "a=1\nb=2",
    "a",
    "=",
    "a.=1",
    ".a=1",
    "=1",
    "seed=",
    "seed=1 # x",
    "label=[[[",
    "seed.a=1",
    "label='",
    "a" * 9000,
]
SETS += ["label=" + "[" * 3000, "optimiser={name='adam',lr=inf}", "label=\ud800", "threads=0x10", "seed=1_0", "seed=01"]
SETS += ["label=\x00", "label=$x$", "optimisee=quadratic\n[unroll]\nlength=3", "seed=" + "9" * 5000]


def option_names():
    """Name of an entry of any registry → the names of its options."""
    tables = [optimisees.OPTIMISEES, optimisers.OPTIMISERS, optimisers.INPUTS, optimisers.RULES, optimisers.DIRECTIONS]
    tables += [cells.CELLS, estimators.ESTIMATORS, TORCH]
    return {name: list(inspect.signature(entry).parameters) for table in tables for name, entry in table.items()}


def small(name, folder):
    """An optimisee's table that costs milliseconds."""
    own = {
        "mlp": {"hidden": [2], "batch_size": 8},
        "convnet": {"channels": [2], "hidden": 3, "batch_size": 8},
        "transformer": {"width": 4, "layers": 1, "window": 5, "batch_size": 2},
        "language-model": {"embedding_size": 3, "hidden_size": 3, "layers": 1, "window": 4, "batch_size": 2},
        "sequence-labelling": {"hidden_size": 2, "embedding_size": 2, "layers": 1, "batch_size": 2},
    }.get(name, {})
    texts = {part: str(folder / f"{part}.txt") for part in ("train", "valid", "test")}
    data = {"transformer": "files", "language-model": "files", "sequence-labelling": "conll"}.get(name)
    named = {} if data is None else {"data": {"name": data, **texts}}
    return {"name": name, **own, **named}


def write_texts(folder):
    """Texts that are both: lines of words, and tokens in columns with their labels."""
    for part in ("train", "valid", "test"):
        (folder / f"{part}.txt").write_text("cat B-N\nsat O\n\nmat B-N\nfat O\n\n" * 12, encoding="utf-8")


def case(seed, folder, options):
    """The kind of a config and where it comes from: a mapping, a file, or a file with changes."""
    draw = source(seed, "config")
    kind, base = draw.choice([(Config, META), (TrainConfig, TRAIN)])
    base = {**base}
    if draw.random() < 0.5:
        base["optimisee"] = small(draw.choice(OPTIMISEES), folder)
    if kind is Config and draw.random() < 0.5:
        base["unroll"] = {**base["unroll"], "estimator": draw.choice(ESTIMATORS)}
        base["mixed_with"] = []
    if kind is TrainConfig and draw.random() < 0.5:
        base["optimiser"] = draw.choice(OPTIMISERS)
    form = draw.random()
    if form < 0.6:
        return kind, changed(base, draw, options), []
    path = folder / "config.toml"
    if form < 0.8:
        path.write_text(tomli_w.dumps(base), encoding="utf-8")
        if draw.random() < 0.6:
            return kind, path, [draw.choice(SETS)]
        key = draw.choice(["label", "seed", "optimisee.name", "optimiser.name", "device", "train.steps", "meta.batch"])
        with contextlib.suppress(TypeError):  # TOML has no such value
            return kind, path, [toml_file.assignment(key, draw.choice(JUNK))]
        return kind, path, []
    text = bytearray(tomli_w.dumps(base).encode())
    for _ in range(draw.choice((1, 1, 2, 5))):
        spot = draw.randrange(len(text))
        text[spot : spot + draw.randrange(3)] = draw.choice(
            [b"", b"[", b"]", b"{", b'"', b"\n", b"=", b".", b"\xff", b"\x00", b"0", b"-", b"e9", b"inf", b"[" * 4000]
        )
    path.write_bytes((b"\xef\xbb\xbf" if draw.random() < 0.2 else b"") + bytes(text))
    return kind, path, []


def first_step(kind, config):
    """One step of what the config describes, with no more than a step or two of everything."""
    if kind is TrainConfig:
        built = build.build_training(config)
        once = {"steps": 1, "epochs": None, "warm_up": min(config.train.warm_up, 1)}
        if cheap([built.optimisee]) and config.train.epochs is None:
            train(built.optimisee, built.factory, config.train.model_copy(update=once), seed=config.seed)
        return
    built = build.build(config)
    unroll = config.unroll.model_copy(update={"length": 2, "truncation": None})
    meta = config.meta.model_copy(update={"updates": 1, "batch": 1, "validate_every": 1, "checkpoint_every": 1})
    pairs = getattr(built.estimator, "pairs", 1)
    if cheap(built.optimisees) and pairs < 5 and sum(p.numel() for p in built.optimiser.parameters()) < 10**5:
        meta_train(built.optimiser, built.optimisees, built.estimator, meta, unroll, score=lambda _: {"any": 0.0})


def cheap(problems):
    return all(sum(prod(value.shape) for value in problem.init(0)[0].values()) < 10**4 for problem in problems)


def answered(seed, folder, options):
    """Whether a case is built (True) or refused (False); any other end is a failure of the test."""
    kind, given, changes = case(seed, folder, options)
    try:
        with limit(LONGEST):
            config = configs.load(given, changes, kind=kind)
            again = folder / "again.toml"
            again.write_text(configs.dump(config), encoding="utf-8")
            assert configs.load(again, kind=kind) == config, "another config when it is read again"
            first_step(kind, config)
    except UserError as error:
        if is_refusal(error):
            return False
        raise
    return True


def answers(seeds, folder):
    """How many cases are built and how many refused; whatever else happens is reported with its seed."""
    write_texts(folder)
    options, ends, failures = option_names(), {True: 0, False: 0}, []
    with contextlib.chdir(folder):
        for seed in seeds:
            try:
                ends[answered(seed, folder, options)] += 1
            except (Exception, HangError) as error:
                failures.append(f"{seed}: {type(error).__name__}: {str(error)[:200]}")
            build.device.cache_clear()
    assert not failures, f"{len(failures)} of {len(seeds)}:\n" + "\n".join(failures)
    return ends[True], ends[False]


@pytest.fixture(autouse=True)
def quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL, "l2lopt")
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)  # the same on every machine


def test_mutated_configs_are_built_or_refused(tmp_path):
    built, refused = answers(range(120), tmp_path)
    assert built > 10
    assert refused > 50


@pytest.mark.huge
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_mutated_configs(tmp_path, part, capsys):
    built, refused = answers(range(500 * part, 500 * (part + 1)), tmp_path)
    with capsys.disabled():
        print(f" part {part}: {built} built, {refused} refused")  # noqa: T201  # the counts are what the dose is for
