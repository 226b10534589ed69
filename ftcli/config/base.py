"""What every section of a recipe shares: frozen, strict, nothing unknown, no NaN."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

#: A YAML list. The outer container is lax (YAML has lists, frozen models hold tuples); its items stay strict.
Items = Annotated[tuple[T, ...], Field(strict=False)]

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections. Unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
