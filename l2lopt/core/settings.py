"""The base of every group of settings in a config."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings: typed, documented by the text below each field; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
