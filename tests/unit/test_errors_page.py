"""docs/errors.md and the source name the same codes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    raised = set()
    for path in (ROOT / "ftcli").rglob("*.py"):
        raised |= set(re.findall(r'"(FT\d{3})"', path.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (FT\d{3}) \S", page, re.MULTILINE)
    assert sorted(entries) == sorted(raised)
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if section.startswith("FT"):
            assert "**Remedy:** " in section, section[:40]
