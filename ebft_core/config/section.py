"""What every section of a run file is made of: its base class and the types of its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors; no value changes its type."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegative = Annotated[float, Field(ge=0.0)]
