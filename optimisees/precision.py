"""Computing in bfloat16 where that is safe."""

import logging
import platform

import torch


def autocast(device: str | torch.device, enabled: bool) -> torch.autocast:
    """The context in which matrix products and convolutions are of bfloat16, on a processor that may emulate it.

    Args:
        device: Device of the model.
        enabled: Whether anything changes.
    """
    # Weights are used once a call: a cache of their casts would only keep them.
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def tell_if_emulated(device: str | torch.device, enabled: bool) -> None:
    """Says in the log that `autocast` costs time, where it does."""
    if enabled and torch.device(device).type == "cpu" and _emulates_bfloat16():
        logging.getLogger("l2lopt").info("this processor emulates bfloat16: optimisee.autocast=false is faster on it")


def _emulates_bfloat16() -> bool:
    """Whether this processor is of a kind that computes in bfloat16, but does not itself."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    return platform.machine() in ("x86_64", "AMD64") and not supported()
