"""Values of JSON as text for people, and text of models and data made safe for a page.

What JSON holds may be anything. Text is made printable here and escaped by :class:`markupsafe.Markup`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup, escape

Show = Callable[[float], str]


def percent(value: float) -> str:
    """A share as ``12.3%``."""
    return f"{100 * value:.1f}%"


def count(value: object) -> str:
    """An integer as ``1,234``."""
    return f"{value:,}" if isinstance(value, int) else "–"


def as_text(value: Any) -> str:
    """A value of a recipe or manifest in a line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value) or "–"
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if item not in (None, False, {}, [], ())}
        if set(kept) == {"path"}:  # a dataset of which nothing else is said
            return as_text(kept["path"])
        return ", ".join(f"{key}: {as_text(item)}" for key, item in kept.items()) or "–"
    return str(value)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")


def page_text(value: str) -> str:
    """``value`` with control characters as their pictures (NUL as ␀) and other unprintable ones as �."""
    if value.isprintable():  # far quicker than looking for them, and a page has thousands of values
        return value
    return _UNPRINTABLE.sub("\ufffd", _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])), value))


def printable(value: object) -> object:
    """Finished markup as it is; everything else as :func:`page_text`, which is still to be escaped."""
    return value if isinstance(value, Markup) else page_text(str(value))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element of a drawing. ``class_`` is the attribute ``class``, ``stroke_width`` is ``stroke-width``.

    Children and attributes are escaped unless they are markup; an attribute that is None is left out.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    # Plain text is put together from escaped parts: Markup's own format and join parse and escape anew in each call.
    opening = "".join([f' {key}="{escape(printable(value))}"' for key, value in pairs])
    inside = "".join([escape(printable(child)) for child in children])
    return Markup(f"<{name}{opening}>{inside}</{name}>")  # noqa: S704 every part is escaped
