"""Parameters of tests by tier: `make test` takes the telling ones, `make test-families` the others; CI runs both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent


def further(*values: Any) -> list[Any]:
    """Parameters of which a test has enough in `make test` without them."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


#: Seeds of a run that learns. CI takes the first; that the others learn as well is for `make test-seeds`.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in (1, 2))]


def telling(kinds: Mapping[str, Any], *names: str) -> list[Any]:
    """Every one of ``kinds``, a value or a tuple of them by its id, of which `make test` takes those of these names.

    Raises:
        KeyError: a name that is none of them.
    """
    kinds = {name: value if isinstance(value, tuple) else (value,) for name, value in kinds.items()}
    taken = {name: kinds[name] for name in names}
    return [
        pytest.param(*value, id=name, marks=() if name in taken else pytest.mark.long) for name, value in kinds.items()
    ]


def in_turn(many: Sequence[Any], few: Sequence[Any], *, whole: Collection[Any] = (), ids: Any = str) -> list[Any]:
    """Pairs of one of ``many`` and one of ``few``. Of these `make test` takes one for each of ``many``, in turn, and
    all for those that are ``whole``. Those of ``many`` that take long do so with each of ``few``.
    """
    pairs, turn = [], 0
    for one in many:
        mark = getattr(one, "marks", ())
        value = one.values[0] if hasattr(one, "marks") else one
        for place, other in enumerate(few):
            long = not mark and value not in whole and place != turn % len(few)
            marks = (*mark, pytest.mark.long) if long else mark
            pairs.append(pytest.param(value, other, id=f"{ids(value)}-{ids(other)}", marks=marks))
        turn += not mark
    return pairs


#: Where a case computes something; elsewhere a grid takes no time.
GRIDS = ("ops", "e2e", *(f"unit/{room}" for room in ("export", "generation", "methods", "model", "plan", "train")))


def thin_grids(items: Sequence[pytest.Item]) -> None:
    """Of a test's grid (two parameters or more) `make test` takes as many cases as have each value once, and `make
    test-families` the rest; of one that is marked ``whole_grid``, all.
    """
    grids: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        if not (isinstance(item, pytest.Function) and hasattr(item, "callspec") and path.startswith(GRIDS)):
            continue
        if not any(item.get_closest_marker(name) for name in ("gpu", "long", "families", "whole_grid")):
            grids.setdefault((path, item.originalname), []).append(item)
    for grid in grids.values():
        for item in _rest(grid):
            item.add_marker(pytest.mark.long)


def _rest(grid: list[pytest.Function]) -> list[pytest.Function]:
    """Those of which each value is in another, which is taken: a value is what one ``parametrize`` gives."""
    values = [set(_values(item)) for item in grid]
    left, taken = set().union(*values), set()
    while left:
        best = max(range(len(grid)), key=lambda place: (len(values[place] & left), -place))
        left -= values[best]
        taken.add(best)
    return [item for place, item in enumerate(grid) if place not in taken]


def _values(item: pytest.Function) -> Iterator[tuple[str, tuple[int, ...]]]:
    params = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield ",".join(names), tuple(id(params.pop(name, None)) for name in names)
    yield from ((name, (id(value),)) for name, value in params.items())  # of fixtures
