"""Damaged and foreign files: what loads is what was written, or else one line names the file; results are made anew."""

import json
import logging
import math
from contextlib import closing
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import HangError, changed, damaged, is_refusal, limit, source, with_header

import l2lopt
import optimisees
from l2lopt import estimators, optimisers
from l2lopt.core.digest import KEY, MARK, opened, sealed
from l2lopt.core.errors import UserError
from l2lopt.evaluation.free_runs import Curves
from l2lopt.evaluation.tuned_runs import OptimiserRun, TunedRun
from l2lopt.experiments import config as configs
from l2lopt.experiments import run_folder
from l2lopt.experiments.run_cache import FileCache, read_run, write_run
from l2lopt.parallel.jobs import load_result
from l2lopt.report import control_curves, figures, validation_curves
from l2lopt.storage import tensor_file
from l2lopt.storage.checkpoint import CheckpointFile
from l2lopt.storage.run_log import Records, write_json
from l2lopt.training.meta_train import meta_train
from l2lopt.training.settings import MetaTrainSettings, UnrollSettings
from l2lopt.training.train import TrainSettings, train
from l2lopt.weights import files
from optimisees.data import images
from optimisees.labelling.figures import read_labelled

LONGEST = 30
"""Seconds that a case may take; none takes one on a machine that is free."""
QUADRATIC = optimisees.make("quadratic", size=2)
CURVES = Curves([0, 3], {"train": torch.tensor([[1.5, 2.0], [0.5, math.nan]])}, torch.tensor([1.0, 2.0]), 0.25)
ROWS = {0: torch.tensor([1.5, 2.0]), 3: torch.tensor([0.5, math.nan])}
RUN = OptimiserRun("baseline", {"train": ROWS, "test": ROWS}, ROWS[0], 0.5, {"train": {3: TunedRun(0.1, 3)}}, ["edge"])
WORK = {"seed": 0, "evaluation": {"steps": 3, "horizons": [3]}}
RESULT = {"loss": 0.25, "step": 7, "curve": [0.5, 0.25]}


class Kind:
    """A kind of file: how it is written, and what is to come of reading it.

    Args:
        write: folder → path of the whole file.
        read: path → anything that tells what was read.
        exact: Whether a file that is read has exactly what was written.
        refusable: Whether a damaged file is refused; else it is made anew, or its broken parts are left out.
    """

    def __init__(self, write, read, exact=True, refusable=True):
        self.write, self.read, self.exact, self.refusable = write, read, exact, refusable


def network():
    return optimisers.make("coordinatewise", hidden_size=2, inputs=["log-and-sign"], rule="additive")


def write_weights(folder):
    files.save(network(), folder / "own.safetensors", {"meta_updates": 3})
    return folder / "own.safetensors"


def read_weights(path):
    header, rule = files.header(path), files.load(path)
    assert all(value.isfinite().all() and value.is_floating_point() for value in rule.phi().values())
    return header, bits(rule.phi())


def bits(tensors):
    return {name: (value.dtype, value.tolist()) for name, value in sorted(tensors.items())}


class StoppedError(Exception):
    """Stands for a kill."""


def trained(path, stop=math.inf):
    """The parameters after four steps, from the checkpoint if there is one."""

    def report(stage, done, *_):
        if done == stop:
            raise StoppedError

    settings = TrainSettings(steps=4, evaluate_every=2, checkpoint_every=1)
    factory, work = partial(torch.optim.Adam, lr=0.1), CheckpointFile(path, {"steps": 4})
    return bits(train(QUADRATIC, factory, settings, report=report, checkpoint=work).params)


def meta_trained(path, stop=math.inf):
    """φ after two meta-updates, from the checkpoint if there is one."""

    def report(stage, done, *_):
        if done == stop:
            raise StoppedError

    settings = MetaTrainSettings(updates=2, warm_up=0, checkpoint_every=1)
    given = network(), [QUADRATIC], estimators.make("backprop"), settings, UnrollSettings(length=4, truncation=2)
    work = CheckpointFile(path, {"updates": 2})
    return bits(meta_train(*given, score=lambda _: {"any": 0.0}, report=report, checkpoint=work).phi)


def interrupted(work):
    def write(folder):
        with pytest.raises(StoppedError):
            work(folder / "checkpoint.safetensors", stop=2)
        return folder / "checkpoint.safetensors"

    return write


def read_copy(work):
    """Work that goes on from a copy of the file, which it would replace."""

    def read(path):
        copy = path.with_name("copy.safetensors")
        copy.write_bytes(path.read_bytes())
        return work(copy)

    return read


def write_model(folder):
    data = {"optimisee": {"name": "quadratic", "size": 2}, "optimiser": "torch.optim.Adam", "train": {"steps": 1}}
    return l2lopt.train(data, folder / "run") and folder / "run" / "model.safetensors"


def read_model(path):
    choice, run = run_folder.saved(path.parent, "a model")
    return choice, bits(run.params)


def write_group(folder):
    cache = FileCache(folder / "group", {"a": 1})
    cache({"seeds": [1, 2]}, lambda checkpoint: CURVES)
    return next((folder / "group").iterdir())


def read_group(path):
    found = FileCache(path.parent, {"a": 1})({"seeds": [1, 2]}, lambda checkpoint: CURVES)
    return found.steps, repr({name: rows.tolist() for name, rows in found.losses.items()}), found.first.tolist()


def write_free_run(folder):
    write_run(folder / "free-run.json", WORK, RUN)
    return folder / "free-run.json"


def read_free_run(path):
    run = read_run(path, WORK) or RUN
    losses = {split: {step: row.tolist() for step, row in steps.items()} for split, steps in run.losses.items()}
    return run.kind, repr(losses), run.first.tolist(), run.seconds, run.chosen, run.warnings, run.cut


def write_result(folder):
    write_json(folder / "found.json", {"work": WORK, **RESULT}, seal=True)
    return folder / "found.json"


def write_records(folder):
    lines = [{"stage": "train", "step": step, "loss": 0.5} for step in range(6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def read_records(path):
    """The log goes on, and every line of it is one that a reader can use."""
    with closing(Records(path.parent, 3)) as records:
        records.write("train", 4, {"loss": 0.25})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1] == {"stage": "train", "step": 4, "loss": 0.25}
    assert all(line["step"] <= 4 and "stage" in line for line in lines)


def write_config(folder):
    (folder / "own.toml").write_text(configs.dump(configs.load("digits-coordinatewise")))
    return folder / "own.toml"


def write_csv(folder):
    lines = [
        ",".join(figures.COLUMNS),
        *(f"adam,baseline,{seed},{step},train,0.5" for seed in (0, 1) for step in (0, 5)),
    ]
    (folder / "evaluation.csv").write_text("\n".join(lines) + "\n")
    return folder / "evaluation.csv"


def write_controls(folder):
    lines = [",".join(control_curves.COLUMNS), *(f"matrix,step,factor,{step},1.5,1,2" for step in (1, 2, 3))]
    (folder / "controls.csv").write_text("\n".join(lines) + "\n")
    return folder / "controls.csv"


def write_validations(folder):
    lines = [{"stage": "validation", "step": step, "score": 0.5, "score/a": 0.25} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def write_summary(folder):
    write_json(folder / "evaluation.json", {"table": [{"mean": 0.5}], "horizons": [3], "cut": ["adam"]})
    return folder / "evaluation.json"


def write_labels(folder):
    example = {
        "place": "a",
        "classes": ["O"],
        "true": [0],
        "found": [0],
        "tokens": ["x"],
        "signals": None,
        "rate": None,
    }
    write_json(folder / "labels.json", {"example": example})
    return folder / "labels.json"


def write_mnist(folder):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2, *range(12)])
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    return raw / "train-images-idx3-ubyte"


def without_digest(write):
    """The same file as an earlier release wrote it."""

    def strip(header):
        own = header["__metadata__"]
        return {**header, "__metadata__": {key: json.dumps(opened_header(text)) for key, text in own.items()}}

    def opened_header(text):
        return {key: value for key, value in json.loads(text).items() if key not in (KEY, MARK)}

    def wrote(folder):
        path = write(folder)
        path.write_bytes(with_header(path.read_bytes(), strip))
        return path

    return wrote


KINDS = {
    "weights": Kind(write_weights, read_weights),
    "weights without a digest": Kind(without_digest(write_weights), read_weights, exact=False),
    "checkpoint of a training": Kind(interrupted(trained), read_copy(trained)),
    "checkpoint of a meta-training": Kind(interrupted(meta_trained), read_copy(meta_trained)),
    "checkpoint without a digest": Kind(without_digest(interrupted(trained)), read_copy(trained), exact=False),
    "meta-checkpoint without a digest": Kind(
        without_digest(interrupted(meta_trained)), read_copy(meta_trained), exact=False
    ),
    "model": Kind(write_model, read_model),
    "model without a digest": Kind(without_digest(write_model), read_model, exact=False),
    "group of runs": Kind(write_group, read_group, refusable=False),
    "free run": Kind(write_free_run, read_free_run, refusable=False),
    "result": Kind(write_result, lambda path: load_result(path, WORK) or RESULT, refusable=False),
    "records": Kind(write_records, read_records, exact=False, refusable=False),
    "config": Kind(write_config, configs.load, exact=False),
    "evaluation": Kind(write_csv, figures.read, exact=False),
    "controls": Kind(write_controls, control_curves.read_controls, exact=False),
    "validations": Kind(write_validations, validation_curves.read_validations, exact=False),
    "summary": Kind(write_summary, run_folder.evaluation_summary, exact=False),
    "labels": Kind(write_labels, read_labelled, exact=False),
    "images": Kind(write_mnist, lambda path: images.load("mnist", data=str(path.parents[2])), exact=False),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "l2lopt")


def answers(name, folder, seeds):
    """How many damaged files of a kind are read as they were, and how many are not; anything else fails."""
    kind, counts, failures = KINDS[name], [0, 0], []
    path = kind.write(folder)
    content, expected = path.read_bytes(), kind.read(path)
    for seed in seeds:
        path.write_bytes(damaged(content, source(seed, name)))
        refusal = None
        try:
            with limit(LONGEST):
                found = kind.read(path)
        except UserError as error:
            refusal = error
        except (Exception, HangError) as error:
            failures.append(f"{seed}: {type(error).__name__}: {str(error)[:200]}")
            continue
        counts[refusal is not None] += 1
        if refusal is None and kind.exact and found != expected:
            failures.append(f"{seed}: loaded, but not what was written")
        if refusal is not None and not (kind.refusable and is_refusal(refusal, path.name, "copy.", "labels-idx1")):
            failures.append(f"{seed}: {refusal}")
    path.write_bytes(content)
    assert kind.read(path) == expected if kind.exact else True
    assert not failures, f"{name}, {len(failures)} of {len(seeds)}:\n" + "\n".join(failures)
    return counts


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_or_made_anew(tmp_path, name):
    _, refused = answers(name, tmp_path, range(12))
    assert refused > 2 or not KINDS[name].refusable


@pytest.mark.huge
@pytest.mark.parametrize("name", KINDS)
def test_two_thousand_damaged_files(tmp_path, name, capsys):
    read, refused = answers(name, tmp_path, range(1000, 1120))
    with capsys.disabled():
        print(f" {name}: {read} read or made anew, {refused} refused")  # noqa: T201  # the counts are what the dose is for


@pytest.mark.parametrize("name", ["weights", "checkpoint of a training", "checkpoint of a meta-training", "model"])
def test_no_flipped_bit_of_a_body_loads(tmp_path, name):
    """Nor one in the key of the digest, without which a file would pass for one of an earlier release."""
    kind = KINDS[name]
    path = kind.write(tmp_path)
    content, draw = path.read_bytes(), source(0, "bits", name)
    begin = 8 + int.from_bytes(content[:8], "little")
    keys = [content.index(name) for name in (b'\\"digest\\"', b'\\"sealed\\"')]
    spots = [draw.randrange(begin, len(content)) for _ in range(5)] + [key + 3 for key in keys]
    for spot in spots:
        flipped = bytearray(content)
        flipped[spot] ^= 1
        path.write_bytes(bytes(flipped))
        with pytest.raises(UserError, match=r"\.safetensors: "):
            kind.read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["version", "release", "optimiser", "training", "work", "facts", KEY, MARK]


@settings(max_examples=40)
@given(header=JSON | st.dictionaries(st.sampled_from(FIELDS), JSON | st.just(1) | st.just({"name": "adam"})))
def test_a_whole_file_with_a_foreign_header_is_refused(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "foreign.safetensors"
    if not path.exists():
        write_weights(path.parent).rename(path)
    for key, read in (("l2lopt", files.load), ("l2lopt.checkpoint", lambda path: CheckpointFile(path, {}).load())):
        text = json.dumps(header)
        path.write_bytes(
            with_header(path.read_bytes(), lambda own, key=key, text=text: own | {"__metadata__": {key: text}})
        )
        with pytest.raises(UserError, match=r"foreign\.safetensors") as caught:
            read(path)
        assert is_refusal(caught.value)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(1000, 3000), marks=pytest.mark.huge)], ids=["few", "all"]
)
def test_a_mutated_description_under_a_right_digest_is_built_or_refused(tmp_path, seeds):
    """As somebody would write it who means harm: the digest fits, the description does not."""
    path = write_weights(tmp_path)
    header, tensors = tensor_file.read(path, "l2lopt", "", "")
    for seed in seeds:
        other = changed({"optimiser": header["optimiser"]}, source(seed, "description"))
        tensor_file.write(path, "l2lopt", header | other, tensors)
        try:
            with limit(LONGEST):
                read_weights(path)
        except UserError as error:
            assert is_refusal(error, path.name)  # noqa: PT017  # what is refused differs from case to case


def test_deep_json_is_refused(tmp_path):
    path = write_weights(tmp_path)
    deep = "[" * 100_000 + "]" * 100_000
    for text in (deep, '{"version": 1, "optimiser": ' + deep + "}"):
        path.write_bytes(
            with_header(path.read_bytes(), lambda own, text=text: own | {"__metadata__": {"l2lopt": text}})
        )
        with pytest.raises(UserError, match=r"own\.safetensors: expected a learned optimiser, found other tensors"):
            files.load(path)


def test_a_table_changes_with_its_digest():
    facts = {"a": (1, 2), 3: 0.1, "inf": math.inf}
    assert opened(sealed(facts)) == {"a": [1, 2], "3": 0.1, "inf": math.inf}
    with pytest.raises(ValueError, match="changed after it was written"):
        opened(sealed(facts) | {"3": 0.2})
    with pytest.raises(ValueError, match="changed"):
        opened(sealed(facts, {"x": torch.zeros(2)}), {"x": torch.zeros(2, dtype=torch.int32)})
    assert opened({"old": 1}) == {"old": 1}
    for key in (KEY, MARK):
        lost = sealed(facts)
        lost["another"] = lost.pop(key)
        with pytest.raises(ValueError, match="changed"):
            opened(lost)
