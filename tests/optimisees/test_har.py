"""UCI HAR: its layout, its joined windows, and what becomes of damaged files."""

import os
from pathlib import Path

import laws
import pytest
import torch
from activities import LEFT_OUT, small_har

from l2lopt.core.errors import UserError
from optimisees.data import har


@pytest.fixture
def home(tmp_path):
    return small_har(tmp_path, recordings=2, windows=3)


def file(home, name):
    return home / har.FOLDER / name


def test_the_layout(home):
    windows = har.load(home)
    assert (windows.signals.shape, windows.signals.dtype) == ((5 * 3 * 2 * 3, 9, 128), torch.float32)
    assert windows.activities == ("WALKING", "SITTING", "LAYING")
    assert windows.labels.unique().tolist() == [0, 1, 2]
    assert sorted(set(windows.subjects.tolist())) == [1, 2, 4, 7, 9]
    first = [float(x) for x in file(home, "train/Inertial Signals/body_gyro_x_train.txt").read_text().split()[:128]]
    laws.assert_close(windows.signals[0, 3].double(), torch.tensor(first, dtype=torch.float32).double())


def test_changed_files_are_read_anew(home):
    before = har.load(home)
    assert har.load(home) is before
    path = file(home, "test/subject_test.txt")
    path.write_text(path.read_text().replace("7", "8"))
    assert set(har.load(home).subjects.tolist()) == {1, 2, 4, 8, 9}


def test_windows_join_to_the_signal_they_were_cut_from(home):
    windows = har.load(home)
    found = har.recordings(windows)
    assert [recording.signals.shape for recording in found] == [(9, 64 * 4)] * 30
    cut = torch.cat([recording.signals.unfold(1, 128, 64).movedim(1, 0) for recording in found])
    assert torch.equal(cut, windows.signals)
    assert torch.equal(torch.cat([recording.labels for recording in found]), windows.labels)
    of = [recording.subject for recording in found for _ in recording.labels]
    assert of == windows.subjects.tolist()
    assert har.recordings(windows.chosen(torch.zeros(len(windows.labels), dtype=torch.bool))) == []


def test_equal_signals_of_two_people_stay_apart():
    flat = har.Windows(torch.ones(2, 9, 128), torch.zeros(2).long(), torch.tensor([1, 2]), ("WALKING",))
    assert len(har.recordings(flat)) == 2
    assert len(har.recordings(flat._replace(subjects=torch.tensor([1, 1])))) == 1


def test_subjects_are_left_out_and_say_nothing_about_the_scale(home):
    train, test = har.load(home).split(LEFT_OUT)
    assert set(test.subjects.tolist()) == set(LEFT_OUT)
    assert not set(train.subjects.tolist()) & set(LEFT_OUT)
    scaled, moved = train.standardised(train), test.standardised(train)
    flat = scaled.signals.double().movedim(1, 0).flatten(1)
    assert flat.mean(1).abs().max() < 1e-6
    laws.assert_close(flat.std(1, correction=0), torch.ones(9, dtype=torch.float64), 1e-6)
    channel = train.signals[:, 4].double()
    expected = (test.signals[:, 4].double() - channel.mean()) / channel.std(correction=0)
    laws.assert_close(moved.signals[:, 4].double(), expected, 1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-3, 9.81])
def test_a_channel_that_is_constant_keeps_its_differences(value):
    signals = torch.randn(4, 2, 50, generator=torch.Generator().manual_seed(0))
    signals[:, 1] = value
    train = har.Windows(signals, torch.zeros(4).long(), torch.ones(4).long(), ("WALKING",))
    moved = train._replace(signals=signals + 0.25).standardised(train).signals[:, 1]
    laws.assert_close(moved, torch.full_like(moved, 0.25), 1e-5)


@pytest.mark.parametrize("left_out", [[], [3], [1, 2, 4, 7, 9]])
def test_subjects_that_cannot_be_left_out(home, left_out):
    with pytest.raises(UserError, match="some, but not all, of 1, 2, 4, 7, 9"):
        har.load(home).split(left_out)


SIGNAL = "test/Inertial Signals/total_acc_z_test.txt"


@pytest.mark.parametrize("name", [SIGNAL, "train/y_train.txt", "test/subject_test.txt", "activity_labels.txt"])
def test_a_missing_file_is_named(home, name):
    file(home, name).unlink()
    with pytest.raises(UserError, match=Path(name).name):
        har.load(home)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (SIGNAL, lambda text: ""),
        (SIGNAL, lambda text: text[: len(text) // 2]),
        (SIGNAL, lambda text: text.replace("e", "x", 1)),
        (SIGNAL, lambda text: "nan" + text[16:]),
        (SIGNAL, lambda text: "\n".join(text.splitlines()[:-1])),
        (SIGNAL, lambda text: "\n".join(line[16:] for line in text.splitlines())),
        (SIGNAL, lambda text: "ü" + text),
        ("train/y_train.txt", lambda text: text.replace("1", "9", 1)),
        ("train/y_train.txt", lambda text: text.replace("1", "0", 1)),
        ("train/y_train.txt", lambda text: text.replace("1", "1.5", 1)),
        ("test/subject_test.txt", lambda text: text + "1\n"),
        ("activity_labels.txt", lambda text: text.replace("2", "5")),
        ("activity_labels.txt", lambda text: ""),
    ],
    ids=[
        "empty",
        "cut",
        "letters",
        "nan",
        "a line short",
        "narrow",
        "not ascii",
        "unknown activity",
        "activity 0",
        "half",
        "a line long",
        "numbers",
        "no activities",
    ],
)
def test_a_malformed_file_is_named(home, name, damage):
    path = file(home, name)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=Path(name).name):
        har.load(home)


@pytest.mark.skipif("L2LOPT_DATA" not in os.environ, reason="needs L2LOPT_DATA")
def test_the_real_data():
    root = Path(os.environ["L2LOPT_DATA"])
    if not (root / har.FOLDER).is_dir():
        pytest.skip("needs UCI HAR in L2LOPT_DATA")
    windows = har.load(root)
    assert len(windows.activities) == 6
    assert windows.labels.unique().tolist() == list(range(6))
    assert len(har.recordings(windows)) < len(windows.labels) / 5
