"""HTML that cannot be broken by what models say: text is escaped unless a function here made it.

:class:`Html` marks finished markup. Joining it with a plain string gives a plain string again, which the next
:func:`tag` escapes, so that a mistake shows as visible markup and never as a script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "line", "circle", "rect", "path", "polyline", "br"})


class Html(str):
    """Finished markup."""

    __slots__ = ()


def visible(value: str) -> str:
    """``value`` with control characters as their pictures (NUL as ␀) and other unprintable ones as �."""
    return _UNPRINTABLE.sub("\ufffd", _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])), value))


def escape(value: object) -> Html:
    """Any value as text of a page."""
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value)), quote=True))


def join(parts: Iterable[object], separator: str = "") -> Html:
    """Several pieces in a row."""
    return Html(separator.join(escape(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. ``class_`` is the attribute ``class``, ``stroke_width`` is ``stroke-width``; None is left out."""
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    if name in _VOID and not children:
        return Html(f"<{name}{opening}/>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = (), class_: str | None = None
) -> Html:
    """A table; ``numeric`` are the columns set to the right. It scrolls sideways on a narrow screen."""

    def cells(kind: str, row: Sequence[object]) -> Html:
        return tag("tr", *(tag(kind, cell, class_="n" if i in numeric else None) for i, cell in enumerate(row)))

    header = [tag("thead", cells("th", head))] if head else []
    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", *header, body, class_=class_), class_="scroll")
