"""Work that processes share out, with the other processes played by the test."""

import pytest
import torch

from l2lopt.parallel import processes


@pytest.mark.parametrize("here", [0, 1, 2])
def test_results_come_back_in_the_order_of_their_numbers(monkeypatch, here):
    made = []

    def work(number):
        made.append(number)
        return torch.tensor(10 * number)

    def gather(parts, own):
        assert own.keys() == {number for number in range(7) if number % 3 == here}
        parts[:] = [{number: torch.tensor(10 * number) for number in range(rank, 7, 3)} for rank in range(3)]

    monkeypatch.setattr(processes, "rank", lambda: here)
    monkeypatch.setattr(processes, "ranks", lambda: 3)
    monkeypatch.setattr(processes.dist, "all_gather_object", gather)
    assert [int(result) for result in processes.share_out(work, 7)] == [0, 10, 20, 30, 40, 50, 60]
    assert made == list(range(here, 7, 3))
