"""What tests of recorded graphs share."""

import pytest
from torch import _inductor

from l2lopt.kernels import graph


@pytest.fixture
def as_recorded(monkeypatch):
    """The recorded graphs in the place of compiled ones, which take ten seconds each; the list of them."""
    graphs = []
    monkeypatch.setattr(_inductor, "compile", lambda recorded, inputs: graphs.append(recorded) or recorded)
    monkeypatch.setattr(graph, "_compiled", {})
    return graphs
