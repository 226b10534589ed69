"""Regular expressions of a recipe."""

from __future__ import annotations

import re

from ftcli.preflight.checks.context import Context, Findings


def regex_findings(context: Context, path: str, pattern: str, *, group: bool = False) -> Findings:
    """FT264 for what Python's ``re`` cannot compile and, with ``group``, for an expression without a group."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # numbers and brackets without end
        yield context.error("FT264", path, f"not a regular expression: {error}", help="test it with Python's re")
        return
    if group and compiled.groups == 0:
        yield context.error("FT264", path, "the expression has no group to extract", help="put (...) around the answer")
