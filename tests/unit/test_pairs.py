"""All-pairs combinations leave no two choices apart, and are few."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairs import all_pairs


def test_any_two_choices_meet() -> None:
    choices = ("abc", (1, 2), "wxyz", (True, False))
    chosen = all_pairs(*choices)
    for (i, one), (j, other) in combinations(enumerate(choices), 2):
        assert {(each[i], each[j]) for each in chosen} == set(product(one, other))
    assert len(chosen) == len(set(chosen)) < 3 * 2 * 4 * 2 / 3


def test_two_parameters_are_the_full_product() -> None:
    assert all_pairs("ab", (1, 2, 3)) == list(product("ab", (1, 2, 3)))
