"""Grids of parameters: what `make test` takes of them."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import _rest

SIZES, NAMES = ("one", "two", "three"), ("a", "b")


def case(params: dict[str, Any], *axes: str) -> Any:
    marks = [pytest.mark.parametrize(axis, []).mark for axis in axes]
    return SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda name: iter(marks))


def taken(cases: list[Any]) -> list[dict[str, Any]]:
    left = _rest(cases)
    return [each.callspec.params for each in cases if each not in left]


def test_each_value_is_in_a_case_and_no_case_is_needless() -> None:
    found = taken([case({"size": size, "name": name}, "size", "name") for size, name in product(SIZES, NAMES)])
    assert {each["size"] for each in found} == set(SIZES)
    assert {each["name"] for each in found} == set(NAMES)
    assert len(found) == 3


def test_what_one_parametrize_gives_stays_whole() -> None:
    cases = [case({"size": size, "name": name}, "size, name") for size, name in product(SIZES, NAMES)]
    assert len(taken(cases)) == 6


def test_a_test_of_a_fixtures_parameter_alone_stays() -> None:
    assert len(taken([case({"device": "cpu"})])) == 1
    assert len(taken([case({"device": device}) for device in NAMES])) == 2
