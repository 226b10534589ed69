"""tests/faults.md names tests that there are, and a test for every fault."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "faults.md"
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py))?::(test_\w+)`")


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    """The first two cells of each row of the page's tables, and file and name of its tests."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not re.match(r"\|[ \-|]*\||\| (fault|\|)", line):
            file, tests = "", []
            for there, name in NAMED.findall(line):
                file = there or file
                tests.append((file, name))
            found.append((line.rpartition("|")[0][:60], tests))
    return found


def test_every_test_that_the_page_names_is_there() -> None:
    for row, tests in rows():
        for file, name in tests:
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{row}: {file}::{name}"


def test_every_fault_has_a_test() -> None:
    assert len(rows()) == 16 + 9 + 7 + 21 + 12 + 8
    without = [row for row, tests in rows() if not tests]
    assert len(without) == 1, without
    assert "see below" in PAGE.read_text(encoding="utf-8")
