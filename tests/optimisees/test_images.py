"""Images: every source gives the pixels and labels that were put in; what is missing or damaged is named."""

import hashlib
import logging
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import write_pictures
from PIL import Image
from safetensors import SafetensorError
from scipy.io import savemat
from torchvision.datasets import CIFAR10, MNIST, SVHN

from l2lopt.core.errors import UserError
from optimisees import autoencoder, mlp, resnet
from optimisees.data import image_folders, image_inputs, images


@pytest.fixture
def folder(tmp_path):
    return write_pictures(tmp_path / "pictures", size=(6, 4), train=4, test=2)


def pixels(path):
    with Image.open(path) as image:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def test_a_folder_gives_its_pixels_and_labels_in_order(folder):
    data = images.load(str(folder))
    assert [tuple(part.shape) for part in data] == [(12, 3, 4, 6), (12,), (6, 3, 4, 6), (6,)]
    assert data.train_targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for index, image in enumerate(data.test_inputs):
        name = f"test/{['ant', 'bee', 'cat'][index // 2]}/{index % 2}.png"
        assert torch.equal(image, pixels(folder / name))


def test_images_are_decoded_once_and_again_when_they_change(folder, caplog):
    caplog.set_level(logging.INFO, "l2lopt")

    def decodings():
        image_folders._decoded.cache_clear()
        caplog.clear()
        data = images.load(str(folder))
        return data, sum(record.message.startswith("decoding") for record in caplog.records)

    first, count = decodings()
    assert count == 1
    assert (folder.parent / ".l2lopt-cache" / "pictures-native.safetensors").is_file()
    assert "the decoded images are kept in" in caplog.text
    assert str(Path(".l2lopt-cache", "pictures-native.safetensors")) in caplog.text
    again, count = decodings()
    assert count == 0
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    path = folder / "train" / "ant" / "0.png"
    Image.new("RGB", (6, 4), (255, 0, 7)).save(path)
    os.utime(path, ns=(1, 1))
    changed, count = decodings()
    assert count == 1
    assert torch.equal(changed.train_inputs[0], pixels(path))
    (folder.parent / ".l2lopt-cache" / "pictures-native.safetensors").write_bytes(b"damage")
    assert decodings()[1] == 1


def test_where_the_folder_may_only_be_read_the_users_cache_is_taken(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    (folder.parent / ".l2lopt-cache").write_text("a file in the way")
    first = images.load(str(folder))
    assert len(list((tmp_path / "own" / "l2lopt").glob("pictures-native-*.safetensors"))) == 1
    image_folders._decoded.cache_clear()
    assert torch.equal(images.load(str(folder)).train_inputs, first.train_inputs)


def test_one_folder_is_split_at_random_once_and_for_all(folder):
    one, other = (images.load(str(folder / "train"), test_share=0.25) for _ in range(2))
    assert [len(part) for part in one] == [9, 9, 3, 3]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    together = torch.cat([one.train_inputs, one.test_inputs]).flatten(1).tolist()
    assert sorted(together) == sorted(images.load(str(folder)).train_inputs.flatten(1).tolist())
    whole = {tuple(row) for row in zip(map(tuple, together), torch.cat(one[1::2]).tolist(), strict=True)}
    data = images.load(str(folder))
    assert whole == set(
        zip(map(tuple, data.train_inputs.flatten(1).tolist()), data.train_targets.tolist(), strict=True)
    )


def test_images_of_several_sizes_are_scaled(folder):
    Image.new("L", (20, 10), 90).save(folder / "train" / "bee" / "2.png")
    with pytest.raises(UserError, match=r"bee/2\.png: expected 6×4 pixels, as .* has, found 20×10; give a size"):
        images.load(str(folder))
    data = images.load(str(folder), size=8)
    assert data.train_inputs.shape == (12, 3, 8, 8)
    assert data.train_inputs[6].unique().tolist() == [90]


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "cut short"])
def test_a_damaged_image_is_named(folder, content):
    path = folder / "train" / "cat" / "1.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:700] if content is None else content)
    with pytest.raises(UserError, match=r"cat/1\.jpg: expected a whole file, found damage"):
        images.load(str(folder), size=8)


def test_folders_that_do_not_fit_are_refused(folder, tmp_path):
    (folder / "test" / "ant").rename(folder / "test" / "dog")
    with pytest.raises(UserError, match=r"test/dog: expected a class of .*train"):
        images.load(str(folder))
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="expected folders of images"):
        images.load(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="found 12 to train of 12"):
        images.load(str(folder / "train"), test_share=0.0)
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        images.load("cifar-10")
    with pytest.raises(UserError, match="size: expected from 1 to 16 pixels, found 17"):
        images.load("photographs", size=17)
    with pytest.raises(UserError, match="size: expected none with digits"):
        mlp(size=4)


def test_images_of_a_set_are_scaled_by_their_means():
    whole, half = images.load("photographs"), images.load("photographs", size=8)
    wanted = whole.test_inputs[:50].double().unflatten(2, (8, 2)).unflatten(4, (8, 2)).mean((3, 5)).round()
    assert torch.equal(half.test_inputs[:50].double(), wanted)
    assert torch.equal(half.test_targets, whole.test_targets)
    assert half.train_inputs.dtype == torch.uint8
    assert half.train_inputs.shape[1:] == (3, 8, 8)


def test_photographs_are_cut_apart_for_training_and_testing():
    train, labels, test, test_labels = images.photographs()
    assert [tuple(part.shape) for part in (train, test)] == [(6136, 3, 16, 16), (1976, 3, 16, 16)]
    assert labels.bincount().tolist() == [3068] * 2
    assert test_labels.bincount().tolist() == [988] * 2
    # Neighbours overlap by half, along each row of 59 or 19 patches.
    assert torch.equal(train[0, :, :, 8:], train[1, :, :, :8])
    assert torch.equal(test[0, :, :, 8:], test[1, :, :, :8])
    assert not (train[58, :, :, 8:] == test[0, :, :, :8]).all()


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("cifar10", r"cifar10/\{train,test\}/<class>/\*\.jpg, or cifar-10-python\.tar\.gz"),
        ("mnist", r"train-images-idx3-ubyte.* in .*MNIST/raw"),
        ("svhn", r"train_32x32\.mat and test_32x32\.mat in .*svhn"),
    ],
)
def test_missing_data_says_which_files_go_where(dataset, named, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=rf"data: expected .*{named}.*set download = true"):
        images.load(dataset, data=str(tmp_path))

    def offline(*args):
        raise OSError("no network")

    for kind in (CIFAR10, MNIST, SVHN):
        monkeypatch.setattr(kind, "download", offline)
    with pytest.raises(
        UserError, match=rf"data: expected .*{named}.*no way to fetch it \(no network\); put them there"
    ):
        images.load(dataset, data=str(tmp_path), download=True)


def test_a_root_is_needed(monkeypatch, tmp_path):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    with pytest.raises(UserError, match="set L2LOPT_DATA or pass --data"):
        images.load("mnist")
    monkeypatch.setenv("L2LOPT_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match="none, which is no folder"):
        images.load("mnist")


def write_cifar10(folder, monkeypatch):
    """torchvision's files with three images each, and the sums it checks them by."""
    source = np.random.default_rng(0)
    folder.mkdir()
    lists = {"train_list": [], "test_list": []}
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        content = {"data": source.integers(0, 256, (3, 3072), dtype=np.uint8), "labels": [0, 9, 4]}
        (folder / name).write_bytes(pickle.dumps(content))
        sums = hashlib.md5((folder / name).read_bytes()).hexdigest()
        lists["test_list" if name == "test_batch" else "train_list"].append([name, sums])
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    meta = {
        "filename": "batches.meta",
        "key": "label_names",
        "md5": hashlib.md5((folder / "batches.meta").read_bytes()).hexdigest(),
    }
    for name, value in {**lists, "meta": meta}.items():
        monkeypatch.setattr(CIFAR10, name, value)
    return folder


def test_cifar10_from_torchvisions_files(tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py", monkeypatch)
    data = images.load("cifar10", data=str(tmp_path))
    assert [tuple(part.shape) for part in data] == [(15, 3, 32, 32), (15,), (3, 3, 32, 32), (3,)]
    raw = pickle.loads((folder / "data_batch_2").read_bytes())["data"]
    assert torch.equal(data.train_inputs[3:6].flatten(1), torch.from_numpy(raw))
    assert data.test_targets.tolist() == [0, 9, 4]
    (folder / "data_batch_3").write_bytes(b"not what it was")
    with pytest.raises(UserError, match="data_batch_3: expected a whole file"):
        images.load("cifar10", data=str(tmp_path))


def test_cifar10_is_fetched_where_asked(tmp_path, monkeypatch):
    """Up to the transfer itself: torchvision finds its archive there already, and unpacks it."""
    folder = write_cifar10(tmp_path / "cifar-10-batches-py", monkeypatch)
    archive = tmp_path / "root" / CIFAR10.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    data = images.load("cifar10", data=str(archive.parent), download=True)
    assert data.train_targets.tolist() == [0, 9, 4] * 5


def write_idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">4B{values.dim()}i", 0, 0, 8, values.dim(), *values.shape)
    path.write_bytes(header + values.numpy().tobytes())


def test_mnist(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    parts = {}
    for name, count in (("train", 5), ("t10k", 2)):
        parts[name] = (torch.randint(256, (count, 28, 28), dtype=torch.uint8), torch.arange(count, dtype=torch.uint8))
        write_idx(raw / f"{name}-images-idx3-ubyte", parts[name][0])
        write_idx(raw / f"{name}-labels-idx1-ubyte", parts[name][1])
    data = images.load("mnist", data=str(tmp_path))
    assert torch.equal(data.train_inputs[:, 0], parts["train"][0])
    assert torch.equal(data.test_inputs[:, 0], parts["t10k"][0])
    assert data.train_targets.tolist() == [0, 1, 2, 3, 4]
    (raw / "t10k-images-idx3-ubyte").write_bytes((raw / "t10k-images-idx3-ubyte").read_bytes()[:-1])
    with pytest.raises(UserError, match="t10k-images-idx3-ubyte: expected a whole file"):
        images.load("mnist", data=str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"t10k-labels-idx1": torch.arange(3)}, "t10k-labels-idx1-ubyte: .*3 labels for 2 images"),
        ({"train-labels-idx1": torch.tensor([0, 255, 3])}, "train-labels-idx1-ubyte: .*the label 255"),
        ({"train-images-idx3": torch.zeros(0, 28, 28)}, "train-images-idx3-ubyte: "),
        ({"train-images-idx3": torch.zeros(3, 0, 28)}, "train-images-idx3-ubyte: "),
        ({"train-labels-idx1": torch.arange(0)}, "train-labels-idx1-ubyte: "),
        ({"train-images-idx3": torch.zeros(28, 28)}, "train-images-idx3-ubyte: "),
        ({"train-labels-idx1": torch.zeros(3, 1)}, "train-labels-idx1-ubyte: "),
    ],
)
def test_mnist_that_does_not_fit_is_refused(tmp_path, change, named):
    raw = tmp_path / "MNIST" / "raw"
    for part, count in (("train", 3), ("t10k", 2)):
        write_idx(raw / f"{part}-images-idx3-ubyte", torch.zeros(count, 28, 28, dtype=torch.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(count, dtype=torch.uint8))
    assert len(images.load("mnist", data=str(tmp_path)).train_inputs) == 3
    for name, values in change.items():
        write_idx(raw / f"{name}-ubyte", values.to(torch.uint8))
    with pytest.raises(UserError, match=named):
        images.load("mnist", data=str(tmp_path))


@given(content=st.binary(max_size=30) | st.binary(max_size=20).map(lambda tail: b"\0\0\x08" + tail))
def test_bytes_that_are_no_idx_file_are_refused(tmp_path_factory, content):
    """A header of 16 bytes and 3 × 28 × 28 pixels do not come about by chance."""
    raw = tmp_path_factory.getbasetemp() / "idx" / "MNIST" / "raw"
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", torch.zeros(3, 28, 28, dtype=torch.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(3, dtype=torch.uint8))
    (raw / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError, match=r"MNIST/raw/train-\w+-idx\d-ubyte: expected a whole file"):
        images.load("mnist", data=str(raw.parent.parent))


def test_svhn(tmp_path, monkeypatch):
    (tmp_path / "svhn").mkdir()
    source = np.random.default_rng(0)
    pictures = {name: source.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8) for name in ("train", "test")}
    listed = {}
    for name, values in pictures.items():
        label, path = np.array([[1], [10], [3], [9]], dtype=np.uint8), tmp_path / "svhn" / f"{name}_32x32.mat"
        savemat(path, {"X": values, "y": label}, do_compression=True)
        listed[name] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", listed)
    data = images.load("svhn", data=str(tmp_path))
    assert data.test_targets.tolist() == [1, 0, 3, 9]
    assert data.test_targets.dtype == torch.int64
    assert torch.equal(data.train_inputs[2, 1], torch.from_numpy(pictures["train"][:, :, 1, 2]))
    assert data.train_inputs.is_contiguous()
    path = tmp_path / "svhn" / "test_32x32.mat"
    for content in (path.read_bytes()[:3000], b"", b"x" * 200):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"test_32x32\.mat: expected a whole file"):
            images.load("svhn", data=str(tmp_path))


def test_statistics_are_those_of_numpy():
    values = torch.randint(256, (7, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values[:, 2] = 8
    mean, deviation = image_inputs.statistics(values, torch.float64)
    assert mean.numpy() == pytest.approx(values.numpy().mean((0, 2, 3)), rel=1e-12)
    assert deviation[:2].numpy() == pytest.approx(values.numpy().std((0, 2, 3))[:2], rel=1e-12)
    assert deviation[2] == 1


def test_crop_and_flip_give_pieces_of_the_padded_images_or_their_mirror_images():
    values = torch.randint(1, 256, (40, 2, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    changed = image_inputs.crop_and_flip(values, torch.Generator().manual_seed(2), padding=2)
    assert changed.dtype == torch.uint8
    padded = np.pad(values.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    seen = set()
    for before, after in zip(padded, changed.numpy(), strict=True):
        fits = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if (before[:, top : top + 5, left : left + 6][:, :, :: -1 if mirrored else 1] == after).all()
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) > 20
    assert {mirrored for _, _, mirrored in seen} == {False, True}


@pytest.mark.skipif(not os.environ.get("L2LOPT_DATA"), reason="L2LOPT_DATA names no folder of data sets")
def test_the_real_mnist():
    data = images.load("mnist")
    assert data.train_inputs.shape[1:] == (1, 28, 28)
    assert set(data.train_targets.tolist()) == set(range(10))


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("L2LOPT_DATA"), reason="L2LOPT_DATA names no folder of data sets")
def test_the_real_cifar10():
    data = images.load("cifar10")
    assert [tuple(part.shape) for part in data] == [(50_000, 3, 32, 32), (50_000,), (10_000, 3, 32, 32), (10_000,)]
    assert data.train_targets.bincount().tolist() == [5000] * 10
    assert data.test_targets.bincount().tolist() == [1000] * 10
    assert image_inputs.statistics(data.train_inputs)[0].tolist() == pytest.approx([125.3, 123.0, 113.9], abs=1)


def test_images_without_classes_are_one_class(tmp_path):
    folder = write_pictures(tmp_path / "pictures", size=(6, 4), train=4)
    for path in sorted((folder / "train").glob("*/*.png")):
        path.rename(folder / f"{path.parent.name}{path.name}")
    for label in ("ant", "bee", "cat"):
        (folder / "train" / label).rmdir()
    (folder / "train").rmdir()
    data = images.load(str(folder), test_share=0.25)
    assert [len(part) for part in data] == [9, 9, 3, 3]
    assert not torch.cat(data[1::2]).any()
    found = sorted(torch.cat([data.train_inputs, data.test_inputs]).flatten(1).tolist())
    assert found == sorted(pixels(path).flatten().tolist() for path in folder.glob("*.png"))

    model = autoencoder(hidden=[2], dataset=str(folder), batch_size=2)  # which needs no classes
    assert next(iter(model.init(0)[0].values())).shape == (2, 6 * 4 * 3)
    with pytest.raises(UserError, match="expected at least two classes, found 1"):
        mlp(dataset=str(folder), batch_size=2)


def test_hidden_files_are_no_images(folder):
    before = images.load(str(folder))
    (folder / "train" / "ant" / "._0.png").write_bytes(b"\x00\x05\x16\x07")  # as macOS leaves them
    assert all(map(torch.equal, images.load(str(folder)), before))


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_is_above_0(folder, size):
    with pytest.raises(UserError, match=f"images: size: expected above 0, found {size}"):
        images.load(str(folder), size)


@pytest.mark.parametrize("kind", ["I;16", "I"])
def test_grey_values_of_sixteen_bits_are_scaled(tmp_path, kind):
    values = np.arange(0, 65_536, 1_024).reshape(8, 8)
    for label in ("a", "b"):
        (tmp_path / "grey" / label).mkdir(parents=True)
        for number in range(3):
            image = Image.fromarray(values.astype(np.uint16) if kind == "I;16" else values.astype(np.int32))
            image.save(tmp_path / "grey" / label / f"{number}.{'png' if kind == 'I;16' else 'tiff'}")
    found = images.load(str(tmp_path / "grey"))
    assert found.train_inputs[0, 0].tolist() == (values // 256).tolist()


@pytest.mark.parametrize(("most", "shift"), [(255, 0), (1_000, 2), (4_095, 4), (9_000, 6), (20_000, 8)])
@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_grey_values_are_scaled_by_the_bits_that_a_folder_uses(tmp_path, kind, most, shift):
    """As scans of 12 bits in files of 16, whose images would be black by the others' scale; the darkest by the same."""
    values = np.linspace(0, most, 64).astype(np.uint16 if kind == "png" else np.int32).reshape(8, 8)
    for label in ("a", "b"):
        (tmp_path / "grey" / label).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(values // (number + 1)).save(tmp_path / "grey" / label / f"{number}.{kind}")
    found = images.load(str(tmp_path / "grey"))
    every = torch.cat([found.train_inputs, found.test_inputs])[:, 0].sort(0).values
    assert every[-1].tolist() == (values >> shift).tolist()
    assert every[0].tolist() == (values // 3 >> shift).tolist()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    """Black strokes on nothing, as icons are, and a fully opaque image as it is."""
    strokes = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    strokes.putpixel((1, 2), (0, 0, 0, 255))
    strokes.putpixel((2, 2), (0, 0, 0, 102))
    for label in ("a", "b"):
        (tmp_path / "icons" / label).mkdir(parents=True)
        for number in range(3):
            strokes.convert(mode).save(tmp_path / "icons" / label / f"{number}.png")
    found = images.load(str(tmp_path / "icons")).train_inputs
    expected = torch.full((4, 4), 255, dtype=torch.uint8)
    expected[2, 1] = 0
    seen = found[0, 0].clone()
    assert mode == "P" or abs(int(seen[2, 2]) - 153) <= 1
    seen[2, 2] = expected[2, 2] = 0  # a palette has no half transparent black
    assert torch.equal(seen, expected)
    opaque = torch.randint(256, (4, 4, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    whole = Image.fromarray(opaque).convert("RGBA")
    assert np.array_equal(np.asarray(image_folders._on_white(whole)), opaque)


def test_a_class_may_be_called_train(folder, tmp_path):
    for label in ("bus", "train"):
        shutil.copytree(folder / "train" / "ant", tmp_path / "vehicles" / label)
    assert images.load(str(tmp_path / "vehicles")).train_targets.unique().tolist() == [0, 1]
    shutil.rmtree(folder / "test")
    with pytest.raises(UserError, match="test: expected folders of images"):
        images.load(str(folder))


def test_what_is_left_out_of_a_class_is_told(folder, caplog):
    ant = folder / "train" / "ant"
    for name in ("0.gif", "1.gif", "notes"):
        (ant / name).write_bytes(b"")
    (ant / "more").mkdir()
    Image.fromarray(np.zeros((4, 6), dtype=np.uint8)).save(ant / "9.pgm")
    assert len(images.load(str(folder)).train_inputs) == 13
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert told == f"{ant}: left out, beside 5 images: 2 .gif, 1 folders, 1 notes"


def test_grey_values_without_a_range_are_refused(folder):
    Image.fromarray(np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 6)).save(folder / "train" / "ant" / "f.tiff")
    with pytest.raises(UserError, match=r"f\.tiff: .*mode F, whose range is not known"):
        images.load(str(folder))


def test_a_link_to_nothing_is_named(folder):
    (folder / "train" / "ant" / "gone.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(UserError, match=r"gone\.png: expected a whole file"):
        images.load(str(folder))


def test_a_folder_without_images_beside_loose_ones_does_not_count(folder, tmp_path):
    (tmp_path / "loose" / ".git").mkdir(parents=True)
    (tmp_path / "loose" / "notes").mkdir()
    for number in range(6):
        shutil.copy(folder / "train" / "ant" / "0.png", tmp_path / "loose" / f"{number}.png")
    assert len(images.load(str(tmp_path / "loose")).train_inputs) == 5
    with pytest.raises(UserError, match="expected at least two classes, found 1"):
        resnet(dataset=str(tmp_path / "loose"), width=4, blocks=(1,))
    with pytest.raises(UserError, match="expected at least two classes, found 1"):
        mlp(dataset=str(tmp_path / "loose"))


def test_a_class_folder_without_images_is_told(folder, caplog):
    """Its images may be of another kind, or a folder deeper."""
    (folder / "train" / "ape").mkdir()
    (folder / "train" / "ape" / "0.gif").write_bytes(b"")
    (folder / "train" / "bat" / "more").mkdir(parents=True)
    (folder / "train" / ".git").mkdir()
    shutil.copy(folder / "train" / "ant" / "0.png", folder / "train" / "bat" / "more")
    assert images.load(str(folder)).train_targets.unique().tolist() == [0, 1, 2]
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert told.startswith(f"{folder / 'train'}: no classes, as no image lies in them directly")
    assert told.endswith("(of those that end in .bmp, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp): ape, bat")


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(folder, monkeypatch):
    def full(*args, **options):
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(image_folders, "save_file", full)
    assert len(images.load(str(folder)).train_inputs) == 12


def test_a_root_is_made_for_what_is_fetched(tmp_path, monkeypatch):
    monkeypatch.delenv("L2LOPT_DATA", raising=False)
    fetched = []
    monkeypatch.setitem(images._SETS, "mnist", lambda root, download: fetched.append((root.is_dir(), download)))
    images.load("mnist", data=str(tmp_path / "new" / "root"), download=True)
    assert fetched == [(True, True)]
    with pytest.raises(UserError, match=r"a folder that holds MNIST/raw/.*, found .*other, which is no folder; make"):
        images.load("mnist", data=str(tmp_path / "other"))


def test_every_class_has_a_training_image(folder):
    """A class of one image, which the random share for testing takes whole."""
    source = folder / "train"
    for label in sorted(path.name for path in source.iterdir())[1:]:
        for number, image in enumerate(sorted((source / label).iterdir())):
            if number:
                image.unlink()
    with pytest.raises(UserError, match="expected a training image of each class, found none of"):
        images.load(str(source), test_share=0.8)
