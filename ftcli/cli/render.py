"""Turns results and findings into text for people and JSON for scripts. Nothing here prints."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ftcli.errors import Finding, Origin
from ftcli.plain import JsonObject, Name, plain
from ftcli.units import number, size

_SEVERITY_STYLE = {"error": "1;31", "warning": "1;33", "note": "1;36"}

#: Of a longer source line only the part around the place that matters is shown.
_EXCERPT_WIDTH = 120
#: So many rows with the same trouble share a block, in which so many ranges of rows are named.
_MANY, _RANGES = 4, 12


_STEERING = ("Cc", "Cf", "Cs")
_KEPT = "\n\t\u200c\u200d"


class Style:
    """Colours on or off."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def paint(self, text: str, code: str) -> str:
        """`text` in the SGR style `code`, where colours are on."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._color and text else text


def findings_text(findings: Iterable[Finding], style: Style, most: int | None = None) -> str:
    """One block for each finding, in the format that the contract promises; above ``most`` of them the rest is counted.

    Rows of one file with the same trouble share a block where there are many. A remedy of many rows stands once, below
    the last of them.
    """
    groups = _alike(findings)
    shown = groups[:most]
    last = {(group[0].code, group[0].help): place for place, group in enumerate(shown)}
    blocks = []
    for place, (first, *others) in enumerate(shown):
        later = of_row(first) and last[first.code, first.help] > place
        blocks.append(_block(replace(first, help=None) if later else first, style, others))
    left = sum(len(group) for group in groups[len(shown) :])
    return "\n".join([*blocks, f"ftcli: {left:,} more; --json has them all"] if left else blocks)


def _alike(findings: Iterable[Finding]) -> list[list[Finding]]:
    """The findings in groups that one block shows: rows of one file whose messages differ by numbers at most."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for place, finding in enumerate(findings):
        key: tuple[object, ...] = (place,)
        if of_row(finding) and finding.origin is not None:
            said = re.sub(r"\d+", "0", finding.message)
            key = (finding.severity, finding.code, finding.help, finding.origin.source, said)
        groups.setdefault(key, []).append(finding)
    return [part for group in groups.values() for part in ([group] if len(group) >= _MANY else [[f] for f in group])]


def _lines_text(lines: Sequence[int]) -> str:
    """Row numbers, neighbours as a range: ``2 to 5, 9 and 40 more``."""
    ranges: list[list[int]] = []
    for line in sorted(set(lines)):
        if ranges and line == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], line]
        else:
            ranges.append([line])
    said = ", ".join(" to ".join(f"{end:,}" for end in each) for each in ranges[:_RANGES])
    left = sum(each[-1] - each[0] + 1 for each in ranges[_RANGES:])
    return f"{said} and {left:,} more" if left else said


def of_row(finding: Finding) -> bool:
    """True if a finding is about a row of data: there may be very many of these."""
    return finding.origin is not None and finding.origin.line is not None and finding.origin.excerpt is None


def _block(finding: Finding, style: Style, others: Sequence[Finding] = ()) -> str:
    origin = finding.origin
    source = clean(str(origin)) if origin is not None else "ftcli"
    label = style.paint(f"{finding.severity}[{finding.code}]", _SEVERITY_STYLE[finding.severity])
    lines = [f"{style.paint(source, '1')}: {label}: {clean(finding.message)}"]
    if origin is not None and origin.line is not None and origin.excerpt is not None:
        lines += _excerpt(origin, style)
    rows = [other.origin.line for other in others if other.origin is not None and other.origin.line is not None]
    if rows:
        lines.append(f"  likewise: {len(rows):,} more rows: {_lines_text(rows)}")
    if finding.help:
        first, *rest = finding.help.splitlines()
        lines.append(f"  {style.paint('help', '1;32')}: {clean(first)}")
        lines += [f"        {clean(line)}" for line in rest]
    return "\n".join(lines)


def _excerpt(origin: Origin, style: Style) -> list[str]:
    """The source line and the caret line below it."""
    assert origin.line is not None
    assert origin.excerpt is not None
    gutter = f"  {origin.line} | "
    start = (origin.column or 1) - 1
    text, start = _clipped(clean(origin.excerpt), start)
    lines = [style.paint(gutter, "2") + text]
    if origin.column is not None:
        length = max(1, min(origin.length, len(text) - start))
        pad = " " * _cells(text[:start])
        carets = "^" * max(1, _cells(text[start : start + length]))
        lines.append(style.paint(" " * (len(gutter) - 2) + "| ", "2") + pad + style.paint(carets, "1;31"))
    return lines


def _clipped(text: str, start: int) -> tuple[str, int]:
    """At most _EXCERPT_WIDTH characters of `text` around `start`, and where `start` went."""
    if len(text) <= _EXCERPT_WIDTH:
        return text, start
    first = max(0, min(start - _EXCERPT_WIDTH // 3, len(text) - _EXCERPT_WIDTH))
    head = "..." if first else ""
    tail = "..." if first + _EXCERPT_WIDTH < len(text) else ""
    return head + text[first : first + _EXCERPT_WIDTH] + tail, start - first + len(head)


def clean(text: str) -> str:
    """`text` without control characters, which could move the cursor or recolour the terminal."""
    return "".join(char if unicodedata.category(char) not in ("Cc", "Cf") else " " for char in text)


def terminal_text(text: str) -> str:
    """`text` as it may reach a terminal, its lines kept: characters that would steer it, or turn the direction of what
    is read, are shown as escapes. The two joiners stay: emoji and several scripts are written with them.

    Whatever a command prints passes here once, or :func:`clean`: a result when it is told, a line in its reporter, an
    answer of a model piece by piece. Colours are painted after.
    """
    return _without_steering(text, lambda char: char.encode("unicode_escape").decode("ascii"))


def _without_steering(text: str, escaped: Callable[[str], str]) -> str:
    return "".join(
        char if char in _KEPT or unicodedata.category(char) not in _STEERING else escaped(char) for char in text
    )


def _cells(text: str) -> int:
    """Terminal columns that `text` takes."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)


def finding_dict(finding: Finding) -> JsonObject:
    origin = finding.origin
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "help": finding.help,
        "source": origin.source if origin is not None else None,
        "line": origin.line if origin is not None else None,
        "column": origin.column if origin is not None else None,
        "length": origin.length if origin is not None and origin.line is not None else None,
    }


def document(command: str | None, exit_code: int, findings: Iterable[Finding], result: object | None) -> str:
    """The one JSON document of ``--json``."""
    content: JsonObject = {"ok": exit_code == 0, "exit_code": exit_code, "command": command}
    content["findings"] = [finding_dict(finding) for finding in findings]
    if result is not None:
        content["result"] = plain(result)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    # JSON's own escape means the same.
    return _without_steering(text, lambda c: json.dumps(c)[1:-1] if c > "\x7f" else f"\\u{ord(c):04x}")


def result_text(result: object) -> str:
    """Any result as aligned keys and values; nested results are indented, lists of flat records become tables."""
    return "\n".join(_lines(plain(result), 0))


def _lines(record: JsonObject, depth: int) -> list[str]:
    indent = "  " * depth
    width = max((len(_label(key)) for key, value in record.items() if not _is_nested(value)), default=0)
    lines = []
    for key, value in record.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{_label(key)}", *_lines(value, depth + 1)]
        elif _is_nested(value) and any(_is_nested(cell) for item in value for cell in item.values()):
            # A map in a cell would make the table wider than any terminal.
            lines += [f"{indent}{_label(key)}", *(line for item in value for line in _lines(item, depth + 1))]
        elif _is_nested(value):
            lines += [f"{indent}{_label(key)}", *table(value, indent + "  ")]
        elif value is not None and value not in ([], {}):
            lines.append(f"{indent}{_label(key):<{width}}  {_value(key, value)}")
    return lines


def _is_nested(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def table(records: list[JsonObject], indent: str = "") -> list[str]:
    """Records of the same keys as aligned columns under their names."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_label(key) for key in keys]]
    rows += [[_value(key, record.get(key)) for key in keys] for record in records]
    widths = [max(len(row[column]) for row in rows) for column in range(len(keys))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


#: Our keys are words; `q8_0`, `HF_HOME` and the like are somebody's names, as every :class:`ftcli.plain.Name` is.
_OURS = re.compile(r"[a-z]+(_[a-z]+)*")


def _label(key: str) -> str:
    if isinstance(key, Name):
        return key
    for suffix in ("_bytes", "_seconds", "_ms"):
        key = key.removesuffix(suffix)
    return key.replace("_", " ") if _OURS.fullmatch(key) else key


def _value(key: str, value: Any) -> str:
    key = "" if isinstance(key, Name) else key  # its ending says nothing of a unit
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_value(key, item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_value(name, item)}" for name, item in value.items()) or "-"
    if isinstance(value, int | float) and (key == "bytes" or key.endswith("_bytes")):
        return size(value)
    if isinstance(value, int | float) and key.endswith("_seconds"):
        return f"{value:.1f} s"
    if isinstance(value, float):
        text = f"{value:,.1f}" if abs(value) >= 1000 else number(value)
        return f"{text} ms" if key.endswith(("_ms", "_ms_min", "_ms_max")) else text
    if isinstance(value, int):
        return f"{value:,}"
    return clean(str(value))
