"""The windows of a text that a language model is trained on, one after another (Merity et al. 2018)."""

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def cut_windows(rows: int, window: int, seed: int | None) -> tuple[int, ...]:
    """The rows at which the windows of an epoch begin, and the end of the last one.

    Without a seed every window is `window` tokens long. With a seed lengths are drawn: max(5, int N(base, 5²)), where
    base is `window` with probability 0.95, else half of it. A last window of a single token joins the one before.

    Args:
        rows: Number of tokens in a column.
        window: Length of a full window.
        seed: Seed of the lengths, or None.
    """
    if seed is None:
        ends = torch.arange(window, max(rows, window), window)
    else:
        source, most = torch.Generator().manual_seed(seed), rows // 5 + 1
        base = torch.where(torch.rand(most, generator=source) < 0.95, window, window / 2)
        lengths = (base + 5 * torch.randn(most, generator=source)).int().clamp(min=5)
        ends = lengths.cumsum(0)
    begins = [0, *ends[ends < rows].tolist(), rows]
    if len(begins) > 2 and begins[-1] - begins[-2] == 1:
        del begins[-2]
    return tuple(begins)
