"""What unquoted words mean."""

from __future__ import annotations

import math

import pytest

from ftcli.config.yaml import number_hint, plain_scalar

MEANINGS = [
    ("1e-4", 1e-4), ("1E-4", 1e-4), (".5e-3", 5e-4), ("5.", 5.0), ("-2.5e+3", -2500.0), ("1.0", 1.0), ("0.0", 0.0),
    ("0", 0), ("-7", -7), ("+7", 7), ("0x1F", 31), ("0o17", 15),
    ("true", True), ("True", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
    ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("NO", "NO"),
    ("1:30", "1:30"), ("010", "010"), ("-08", "-08"), ("1_000", "1_000"), ("2024-01-01", "2024-01-01"),
    ("1e", "1e"), ("e5", "e5"), (".", "."), ("-", "-"), ("1.2.3", "1.2.3"), ("0x", "0x"), ("1,000", "1,000"),
    ("nan", "nan"), ("inf", "inf"), ("١", "١"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), MEANINGS)
def test_meaning_of_a_word(text: str, value: object) -> None:
    found = plain_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_infinity_and_nan_are_floats() -> None:
    assert plain_scalar(".inf") == math.inf
    assert plain_scalar("-.INF") == -math.inf
    found = plain_scalar(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_numbers_of_any_length_are_read() -> None:
    assert plain_scalar("9" * 300) == int("9" * 300)
    assert plain_scalar("9" * 100_000) == math.inf


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1:30", "one unit"),
        ("010", "write 10 without"),
        ("000", "write 0 without"),
        ("1_000", "write 1000"),
        ("1,000", "write 1000"),
        ("4k", "write the number out"),
        ("'3'", "write 3 without quotes"),
        ("1e-4", "write 1e-4 without quotes"),
    ],
)
def test_hint_for_text_where_a_number_belongs(text: str, said: str) -> None:
    assert said in str(number_hint(text))


def test_no_hint_for_words() -> None:
    assert number_hint("fast") is None
