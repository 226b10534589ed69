"""Resolves the unquoted words of a recipe by YAML 1.2's core rules, without the traps of YAML 1.1.

``true`` and ``false`` are the only booleans; ``yes``, ``no``, ``on`` and ``off`` are text. ``1e-4``, ``1E-4`` and
``.5e-3`` are numbers. ``1:30`` is text, not 90; ``010`` is text, because some readers take it for 8 and some for 10;
``1_000`` is text; a date is text. Where a number is asked for, such text is an error that says what to write.
"""

from __future__ import annotations

import re

from ftcli.config.tree import Scalar

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE = frozenset(("true", "True", "TRUE"))
_FALSE = frozenset(("false", "False", "FALSE"))
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_OCTAL = re.compile(r"0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))

#: Python refuses to read longer decimal integers; no recipe needs them.
_MAX_DIGITS = 400


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= _MAX_DIGITS else float(text)
    if _HEXADECIMAL.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text, 16)
    if _OCTAL.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text[2:], 8)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return float("nan") if text in _NAN else None


def number_hint(text: str) -> str | None:
    """Help for a text in the place of a number, if it looks like one."""
    if re.fullmatch(r"[-+]?[0-9]+:[0-5]?[0-9](:[0-5]?[0-9])*", text):
        return "a value such as 1:30 is not a number here; write it in one unit"
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        return f"write {text.lstrip('+-0') or '0'} without the leading zero"
    if re.fullmatch(r"[-+]?[0-9][0-9_,]*[0-9](\.[0-9]+)?", text):
        return f"write {text.replace('_', '').replace(',', '')}"
    if re.fullmatch(r"[0-9.]+ ?[kKmMgG]", text):
        return "write the number out, without a suffix"
    bare = text.strip().strip("'\"")
    return f"write {bare} without quotes" if _number(bare) is not None else None
