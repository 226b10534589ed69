"""Every error that a check finds says what to do."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "ftcli"
#: Errors that were once without a help line. Position of `help` among the arguments of each way to make a finding.
CODES = {
    *("FT192", "FT255", "FT280", "FT303", "FT305", "FT403", "FT404", "FT413"),
    *("FT424", "FT432", "FT434", "FT451", "FT452", "FT762"),
}
POSITIONS = {"Finding": 3, "data_error": 3, "preflight_error": 3, "_error": 3, "single": 4, "error": 3}


def findings() -> list[tuple[str, str, bool]]:
    """Code, place and whether there is a help line, of each finding that the source makes."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            code = node.args[0].value
            if name in POSITIONS and isinstance(code, str) and code.startswith("FT"):
                helped = len(node.args) > POSITIONS[name] or any(k.arg == "help" for k in node.keywords)
                found.append((code, f"{path.relative_to(ROOT)}:{node.lineno}", helped))
    return found


def test_these_errors_have_a_help_line_wherever_they_are_made() -> None:
    made = [entry for entry in findings() if entry[0] in CODES]
    assert {code for code, _, _ in made} == CODES
    assert len(made) >= 12
    assert [place for _, place, helped in made if not helped] == []
