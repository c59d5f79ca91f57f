"""UCI HAR as an activity per time step."""

import os

import laws
import pytest
import torch
from activities import LEFT_OUT, small_har

from l2lopt.core.errors import UserError
from optimisees.data import har
from optimisees.labelling.activities import activities, signals


@pytest.fixture
def home(tmp_path):
    return small_har(tmp_path, recordings=2, windows=3)


def test_every_second_half_is_in_the_signal_once_with_its_label(home):
    windows = har.load(home)
    found = signals(windows)
    assert sorted(found) == [1, 2, 4, 7, 9]
    for subject, (signal, labels) in found.items():
        mine = windows.chosen(windows.subjects == subject)
        recordings = 3 * 2
        assert signal.shape == (recordings * 64 * 4, 9)
        assert labels.tolist() == [k for k in range(3) for _ in range(2 * 64 * 4)]
        for place, row in enumerate(range(0, 3 * recordings, 3)):  # the first window of each recording
            begin = place * 64 * 4
            assert torch.equal(signal[begin : begin + 64], mine.signals[row, :, :64].T)
            for k in range(3):
                piece = signal[begin + 64 * (k + 1) : begin + 64 * (k + 2)]
                assert torch.equal(piece, mine.signals[row + k, :, 64:].T)


def test_a_step_has_the_label_of_the_window_whose_second_half_it_is():
    whole = torch.arange(9 * 256.0).view(9, 256)
    rows = whole.unfold(1, 128, 64).movedim(1, 0)
    windows = har.Windows(rows, torch.tensor([2, 0, 1]), torch.tensor([5, 5, 5]), ("a", "b", "c"))
    ((signal, labels),) = signals(windows).values()
    assert torch.equal(signal, whole.T)
    assert labels.tolist() == [2] * 128 + [0] * 64 + [1] * 64


def test_pieces_subjects_and_scale(home):
    data = activities(valid=[4], test=LEFT_OUT, length=1000, root=str(home))
    assert (data.classes, data.tokens, data.rate) == (("WALKING", "SITTING", "LAYING"), None, 50.0)
    assert data.train.lengths.tolist() == data.test.lengths.tolist() == [1000, 536] * 2
    assert data.valid.lengths.tolist() == [1000, 536]
    assert data.test.places(3, 100) == "subject 9, 22.00 s"
    own = signals(har.load(home))
    trained = har.load(home)
    trained = trained.chosen(torch.isin(trained.subjects, torch.tensor([1, 7]))).signals.double()
    mean, deviation = trained.mean((0, 2)), trained.std((0, 2), correction=0)
    for part, column, subject in ((data.train, 0, 1), (data.valid, 0, 4), (data.test, 2, 9)):
        expected = (own[subject][0][:1000].double() - mean) / deviation
        laws.assert_close(part.inputs[:, column].double(), expected, 1e-6)
    assert torch.equal(data.test.classes[:536, 3], own[9][1][1000:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "har: length: expected above 0"),
        ({"test": [3]}, "expected some, but not all, of 1, 2, 4, 7, 9, found 3"),
        ({"test": [1, 2], "valid": [4, 7, 9]}, "expected some, but not all, of 4, 7, 9"),
    ],
)
def test_mistakes(home, options, message):
    with pytest.raises(UserError, match=message):
        activities(**{"valid": [4], "test": [9], "root": str(home), **options})


@pytest.mark.slow
@pytest.mark.skipif("L2LOPT_DATA" not in os.environ, reason="L2LOPT_DATA names no folder of data sets")
def test_the_data_set():
    """Every activity in every part, and as many steps as windows' halves and one more a recording."""
    data = activities()
    windows = har.load(os.environ["L2LOPT_DATA"])
    steps = 64 * (len(windows.labels) + len(har.recordings(windows)))
    assert sum(int(part.lengths.sum()) for part in (data.train, data.valid, data.test)) == steps
    for part in (data.train, data.valid, data.test):
        assert part.classes.unique().tolist() == list(range(6))


def test_files_that_have_changed_are_read_again(tmp_path, monkeypatch):
    """By a relative name, too, in another folder."""
    found = []
    for number in (1, 2):
        (tmp_path / f"project{number}").mkdir()
        small_har(tmp_path / f"project{number}" / "data", recordings=number, windows=3)
        monkeypatch.chdir(tmp_path / f"project{number}")
        data = activities(valid=[4], test=LEFT_OUT, length=1000, root="data")
        found.append(int(data.train.lengths.sum()))
    assert found[1] == 2 * found[0]
