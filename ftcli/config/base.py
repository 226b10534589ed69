"""The base class of all sections of a recipe: frozen, strict, without unknown keys or NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from ftcli.paths import unserved

T = TypeVar("T")

#: A YAML list. The outer container is lax (YAML has lists, frozen models hold tuples); its items stay strict.
Items = Annotated[tuple[T, ...], Field(strict=False)]

#: The kind of pydantic's error for a path with a ``scheme://``.
UNSERVED = "unserved"


def served(value: str) -> str:
    """A path of this machine. Raises pydantic's error of kind :data:`UNSERVED` for one with another ``scheme://``."""
    if unserved(value) is not None:
        raise PydanticCustomError(UNSERVED, "a path of this machine")
    return value


#: Of text that is the path of something, or may be one.
Served = AfterValidator(served)
PathText = Annotated[str, Field(min_length=1), Served]

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections. Unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Word:
    """Annotates a ``str`` that must be one of the names of a table: ``Annotated[str, Word(methods.names)]``. Like a
    ``Literal``, in its errors and in the JSON Schema, but the table is asked each time.
    """

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names = names

    def names(self) -> tuple[str, ...]:
        """The words that are allowed now."""
        return tuple(self._names())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not a function, of which pydantic would call every exception an error of its own, Ctrl-C included.
        return core_schema.no_info_plain_validator_function(
            self._checked, serialization=core_schema.simple_ser_schema("str")
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.names())}

    def _checked(self, value: Any) -> str:
        names = self.names()
        if isinstance(value, str) and value in names:
            return value
        *first, last = (repr(name) for name in names)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise PydanticKnownError("literal_error", {"expected": expected})
