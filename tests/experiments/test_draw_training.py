"""DRAW from the command line: training, its records, resuming, and pictures of samples."""

import json
import os
import re
import struct
from base64 import b64decode
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from killing import killed
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import called
from test_training import files

import l2lopt
from l2lopt.core.errors import UserError
from l2lopt.experiments import build
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.experiments.run_folder import saved
from l2lopt.report import figures
from optimisees.draw import figures as draw_figures

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _data(tmp_path, monkeypatch):
    """Files like MNIST's, of 30 + 12 images of 8×8."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    source = torch.Generator().manual_seed(0)
    for part, count in (("train", 30), ("t10k", 12)):
        images = torch.randint(256, (count, 8, 8), generator=source).byte()
        for kind, values in (("images-idx3", images), ("labels-idx1", torch.arange(count).byte() % 10)):
            header = struct.pack(f">4B{values.dim()}i", 0, 0, 8, values.dim(), *values.shape)
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())
    monkeypatch.setenv("L2LOPT_DATA", str(tmp_path / "data"))


@pytest.fixture
def _without_figures(monkeypatch):
    monkeypatch.setattr(figures, "training_curve", lambda *args, **options: [])


def config(**changes):
    sizes = {"hidden_size": 6, "latent_size": 3, "steps": 4, "read": 3, "write": 3, "batch_size": 10}
    return {
        "threads": 1,
        "optimisee": {"name": "draw", "dataset": "mnist", "decoder": "ihc-lstm", **sizes},
        "optimiser": {"name": "torch.optim.Adam", "lr": 0.01, "betas": [0.5, 0.999]},
        "train": {"epochs": 2, "clip": 5.0, "checkpoint_every": 2, **changes},
    }


@pytest.mark.usefixtures("_data")
def test_trains_and_paints_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "draw.toml").write_text(configs.dump(configs.load(config(), kind=TrainConfig)))
    run = tmp_path / "run"
    code, out, err = called(monkeypatch, capsys, "train", tmp_path / "draw.toml", "--run", run)
    assert (code, err) == (0, "")
    assert re.search(r"train: \d+/6 +bound [\d.]+ +test bound [\d.]+ +images/s \d", out)
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them the encoder's cell, [\d,]+ the decoder's", out)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    assert metrics["bound"] == metrics["loss"] == pytest.approx(metrics["reconstruction"] + metrics["kl"], rel=1e-5)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in lines} == {"train", "test"}
    assert all({"bound", "reconstruction", "kl"} <= line.keys() for line in lines)
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
    for name in ("samples", "reconstructions"):
        assert [event.step for event in events.Images(name)] == [0, 3, 6]
    monkeypatch.delenv("L2LOPT_DATA")  # a run is enough
    code, out, err = called(monkeypatch, capsys, "sample", run, "--count", 3)
    assert (code, err) == (0, "")
    png, gif = (run / "figures" / name for name in ("samples.png", "samples.gif"))
    assert out.split() == [str(png), str(gif)]
    with Image.open(png) as grid, Image.open(gif) as film:
        assert grid.size == (4 * 114 - 2, 3 * 114 - 2)
        assert film.n_frames == 5
    first = png.read_bytes()
    called(monkeypatch, capsys, "sample", run, "--count", 3)
    assert png.read_bytes() == first
    called(monkeypatch, capsys, "sample", run, "--count", 3, "--seed", 1)
    assert png.read_bytes() != first
    code, _, err = called(monkeypatch, capsys, "sample", run, "--prompt", "the")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected no prompt of a trained model of images, found --prompt; leave it out" in err
    (run / "model.safetensors").unlink()
    code, _, err = called(monkeypatch, capsys, "sample", run)
    assert (code, err.count("\n")) == (2, 1)
    assert "model.safetensors: expected a trained model of images, found nothing" in err


@pytest.mark.usefixtures("_data", "_without_figures")
def test_killed_and_resumed_equals_the_whole_run(tmp_path):
    settings = config(patience=9, epochs=4)
    l2lopt.train(settings, tmp_path / "whole")
    for moment in (1, 3, 4):
        killed(partial(l2lopt.train, settings, tmp_path / "run", resume=True), moment)
    l2lopt.train(settings, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.usefixtures("_data", "_without_figures")
@pytest.mark.parametrize("change", ["optimisee.attention=false", "optimisee.encoder=gru", "optimisee.binarise=sampled"])
def test_other_kinds_train(tmp_path, change):
    result = l2lopt.train(config(epochs=1), tmp_path / "run", changes=[change])
    assert result.diverged is None
    assert all(path.stat().st_size for path in l2lopt.sample_images(tmp_path / "run", 2))


@pytest.mark.usefixtures("_data", "_without_figures")
def test_a_study_shows_samples_side_by_side(tmp_path, monkeypatch, capsys):
    """A row of test images, and below it one for each run: what `sample_images` paints with the first seed's model."""
    written = configs.dump(configs.load(config(epochs=1), kind=TrainConfig))
    (tmp_path / "draw.toml").write_text(written)
    runs = [{"label": name, "changes": [f"optimisee.decoder={name}"]} for name in ("lstm", "ihc-lstm")]
    study = {"config": "draw.toml", "seeds": [0, 1], "samples": 3, "runs": [runs[0], {**runs[1], "versus": "lstm"}]}
    (tmp_path / "study.toml").write_text(tomli_w.dumps(study))
    folder, drawn = tmp_path / "study", []
    plain = draw_figures.rows_of_images
    monkeypatch.setattr(draw_figures, "rows_of_images", lambda *args: drawn.append(args[0]) or plain(*args))
    code, out, err = called(monkeypatch, capsys, "reproduce", tmp_path / "study.toml", "--run", folder)
    assert (code, err) == (0, "")
    assert out.split()[-2:] == [str(folder / "figures" / f"samples.{kind}") for kind in ("png", "svg")]
    (rows,) = drawn
    assert list(rows) == ["test images", "lstm", "ihc-lstm"]
    model = build.build_training(configs.load(folder / "lstm-0" / "config.toml", kind=TrainConfig)).optimisee
    params = saved(folder / "lstm-0", "a model")[1].params
    expected = {
        "test images": model.data.test_inputs[[0, 5, 11]] / 255,
        "lstm": model.sample_images(params, 3).images[-1],
    }
    for label, images in expected.items():
        pixels = np.asarray(Image.open(BytesIO(b64decode(rows[label]))))
        for index, image in enumerate(images):
            shown = pixels[:, 10 * index : 10 * index + 8].transpose(2, 0, 1)  # two pixels lie between
            assert np.array_equal(shown, (255 * image).round().expand(3, -1, -1).numpy())
    table = (folder / "table.md").read_text().splitlines()
    assert table[0] == "| | seeds | parameters | test bound | reconstruction | KL divergence | |"
    assert re.search(r"(better|\*\*worse\*\*) than lstm by \d+\.\d \(", table[3])
    facts = json.loads((folder / "table.json").read_text())
    assert facts["lstm"]["1"].keys() == {"parameters", "step", "loss", "bound", "reconstruction", "kl"}


@pytest.mark.usefixtures("_data")
def test_can_be_meta_trained_on(tmp_path):
    changes = ["meta.updates=2", "unroll.length=3", "validation.seeds=1", "validation.horizons=[3]"]
    learned = config()
    settings = {"threads": 1, "optimisee": learned["optimisee"], "optimiser": {"name": "coordinatewise"}}
    run = l2lopt.meta_train(settings, tmp_path / "run", changes=changes)
    assert (run / "optimiser.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimisee.decoder=lstmm", "cell: expected a known name, found 'lstmm'; did you mean 'lstm'?"),
        ("optimisee.binarise=yes", "binarise: expected 'no', 'threshold' or 'sampled', found 'yes'"),
        ("optimisee.read=1", "attention: size: expected at least 2, found 1"),
        ("optimisee.batch_size=31", "batch_size: expected from 1 to the 30 training samples, found 31"),
    ],
)
@pytest.mark.usefixtures("_data")
def test_mistakes_are_named(tmp_path, change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        l2lopt.train(config(), tmp_path / "run", changes=[change])
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif("L2LOPT_DATA" not in os.environ, reason="L2LOPT_DATA names no folder of data sets")
def test_the_small_config_begins_on_real_digits(tmp_path):
    changes = ["train.steps=2", "optimisee.evaluation_samples=50", "threads=1"]
    result = l2lopt.train(ROOT / "configs/draw-small.toml", tmp_path / "run", changes=changes)
    assert result.steps == 2
    assert 100 < result.metrics["bound"] < 784
