"""What JSON says of a value: the one place where dataclasses become maps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ftcli.errors import ExitCode
from ftcli.plain import FLATTENED, LEFT_OUT, JsonObject, plain, plain_fields


@dataclass
class Record:
    path: Path
    value: float


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    part: Record | None = field(metadata=FLATTENED)
    notes: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    page: str | None = field(default=None, metadata=LEFT_OUT)
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Sized:
    width: int
    height: int

    def as_dict(self) -> JsonObject:
        return {**plain_fields(self), "area": self.width * self.height}


def test_everything_a_result_may_hold_becomes_json() -> None:
    class Scalar:
        def item(self) -> float:
            return 2.5

    result = {"a": Record(Path("x"), math.nan), "b": (1, {2: math.inf}), "c": ExitCode.DATA, "d": Scalar(), "e": None}
    assert plain(result) == {"a": {"path": "x", "value": None}, "b": [1, {"2": None}], "c": 4, "d": 2.5, "e": None}


def test_numbers_that_are_not_finite_are_null_and_words_stay() -> None:
    values = {"a": [float("nan"), 1.5], "b": {"c": float("-inf")}, "d": "nan"}
    assert plain(values) == {"a": [None, 1.5], "b": {"c": None}, "d": "nan"}


def test_parts_are_flattened_in_their_place_and_keys_without_a_value_left_out() -> None:
    full = plain(Whole("n", Record(Path("x"), 1.0), ("a",), "p", 0))
    assert list(full) == ["name", "path", "value", "notes", "page", "last"]
    assert full == {"name": "n", "path": "x", "value": 1.0, "notes": ["a"], "page": "p", "last": 0}
    assert plain(Whole("n", None)) == {"name": "n", "last": None}


def test_a_value_may_say_more_than_its_fields_wherever_it_stands() -> None:
    assert plain([Sized(2, 3)]) == [{"width": 2, "height": 3, "area": 6}]
