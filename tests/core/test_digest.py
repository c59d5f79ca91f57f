"""Digests are of what a tensor holds, however it lies in memory."""

import torch

from l2lopt.core.digest import bytes_of


def test_a_single_element_of_any_stride_has_its_bytes():
    values = torch.arange(6).view(3, 2)
    for part in (values[:1, 1], values[1:2, ::2], values.T[1:, 2:], torch.as_strided(values, (1,), (2,), 3)):
        assert bytes(bytes_of(part)) == bytes(bytes_of(part.clone(memory_format=torch.contiguous_format)))
        assert bytes(bytes_of(part)) == int(part).to_bytes(8, "little")
    assert bytes(bytes_of(values.T)) == values.T.contiguous().numpy().tobytes()
