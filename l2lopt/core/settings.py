"""The base of every group of settings in a config, and the values that several groups choose from.

Settings do not import PyTorch, which takes seconds: a mistake in a config is answered before it is loaded.
"""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Split: TypeAlias = Literal["train", "inner", "heldout", "test"]
"""`train`: the training samples. `inner` and `heldout`: the same samples, divided anew by each seed, for meta-training
on samples that the inner steps did not see; where the data have a validation set, the training samples and that set.
`test`: never trained on."""
Schedule: TypeAlias = Literal["constant", "linear", "cosine", "exponential", "warm-up-stable-decay", "inverse"]
"""The way a multiplier falls after the warm-up."""


class Settings(BaseModel):
    """A frozen group of settings: typed, documented by the text below each field; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
