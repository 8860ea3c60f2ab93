"""The base class of the configuration's sections, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # limit of torch's CPU generator
Beta = Annotated[float, Field(ge=0, lt=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Precision = Literal["float32", "bfloat16"]
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2"]
LoraTargets = Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)]


class Section(BaseModel):
    """Base class of the sections: frozen, unknown keys rejected, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
