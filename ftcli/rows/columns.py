"""Columns that the layout of a row does not read: which they are, and which of them say that the rows are for something
else than imitation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ftcli.config.data import DatasetConfig
from ftcli.errors import Finding
from ftcli.plain import JsonObject
from ftcli.rows.row import Row
from ftcli.tables import layouts, methods

_PAIR = re.compile(r"(^|_)(chosen|rejected)(_|$)", re.IGNORECASE)
#: Columns that call the answer of a row good or bad, as KTO is taught.
_VERDICTS = frozenset(
    ("label", "kto_tag", "desirable", "preferred", "accepted", "is_chosen", "is_correct", "correct", "passed")
)
#: Those that KTO reads without being told.
_READ_AS_LABEL = frozenset(("label", "kto_tag"))
#: What such columns say, in lower case.
BAD = frozenset(("false", "0", "0.0", "-1", "-1.0", "bad", "no", "undesirable", "rejected", "incorrect", "negative"))
GOOD = frozenset(("true", "1", "1.0", "good", "yes", "desirable", "chosen", "correct", "positive"))
#: Columns that rate it.
_RATINGS = frozenset(("score", "reward", "rating", "rank"))

_PROMPTS = ("prompt", "instruction", "question", "query", "request", "problem", "input", "user", "human", "source")
_ANSWERS = ("completion", "answer", "reply", "response", "output", "solution", "assistant", "target", "gpt", "bot")
_CHATS = ("conversation", "dialogue", "dialog", "chat", "turns", "chosen", "conversations", "messages")
_TEXTS = ("content", "document", "body", "article")


class UnreadColumns:
    """The columns of one source that its layout does not read.

    Args:
        layout: None for bare prompts.
        asked: The rows are asked, and nothing of them is imitated.

    Attributes:
        names: The columns in which some row has a value, in the order in which they came.
    """

    def __init__(self, source: DatasetConfig, layout: str | None, *, asked: bool = False) -> None:
        self.names: dict[str, None] = {}
        self._source = source
        self._known = layouts.row(layout) if layout is not None else None
        self._asked = asked
        self._chosen = any(_PAIR.search(name) for name in source.columns.values())
        self._rated: dict[str, float] = {}
        self._found: dict[str, tuple[str, str, Row]] = {}

    def look(self, row: Row) -> None:
        """Takes a row in."""
        read = self._read(row.fields)
        for name, value in row.fields.items():
            if name in read or value is None or value in ("", [], {}):
                continue
            self.names.setdefault(str(name))
            if name not in self._found:
                said = self._another(str(name).lower(), value)
                if said is not None:
                    self._found[str(name)] = (*said, row)

    def refusal(self) -> Finding | None:
        """FT408 where a column says that some of the rows are not to be imitated."""
        if not self._found:
            return None
        name, (what, method, row) = next(iter(self._found.items()))
        names = ", ".join(self._found)
        pairs = bool(_PAIR.search(name))
        instead = f"`columns: {{{'completion' if 'prompt' in row.fields else 'messages'}: chosen}}`" if pairs else ""
        take = f"to train on the chosen answers, write {instead}" if pairs else "keep the good rows only"
        mapped = f" (with `columns: {{label: {name}}}`)" if name.lower() in _VERDICTS - _READ_AS_LABEL else ""
        return Finding(
            "FT408",
            f"column {name!r} {what}, but every row would be {'matched' if self._asked else 'trained'} as a good one",
            row.origin,
            f"{methods.offered(method)}{mapped}; {take}, or, if the column means something else, write "
            f"`remove_columns: [{names}]` beside `path`",
        )

    def _read(self, fields: JsonObject) -> tuple[str, ...]:
        if self._known is None:
            return ("prompt", *layouts.chat_columns())
        plain = isinstance(fields.get("prompt"), str) and "completion" in self._known.columns
        return (*self._known.columns, *(() if plain else self._known.optional))

    def _another(self, name: str, value: Any) -> tuple[str, str] | None:
        """The meaning of the column, and the method that learns from it."""
        if self._known is None or not self._known.imitated:  # it says itself which answers are bad
            return None
        if _PAIR.search(name) and not self._asked:
            return None if self._chosen else ("belongs to preference pairs", "DPO")
        if not self._known.asks:
            return None
        if name in _VERDICTS and not isinstance(value, dict | list) and str(value).strip().lower() in BAD:
            return f"calls answers bad (here {value!r})", "KTO"
        if name in _RATINGS and not self._asked and _differs(value, self._rated.setdefault(name, _number(value))):
            return "rates the answers", "learning from ratings"
        return None


def _number(value: Any) -> float:
    """The value as a number; NaN for everything that is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else float("nan")
    except (ValueError, OverflowError):
        return float("nan")


def _differs(value: Any, first: float) -> bool:
    number = _number(value)
    return number != first and not math.isnan(number + first)


def unread_note(path: str, names: Sequence[str]) -> Finding:
    """FT409: columns of a source that nothing reads."""
    shown = ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    columns, verb = ("column", "is") if len(names) == 1 else ("columns", "are")
    help = "`columns` maps what should be read; `remove_columns` leaves out, without this note, what should not"
    return Finding("FT409", f"{path}: {columns} {shown} {verb} not read", None, help, "note")


def other_method(fields: JsonObject) -> tuple[str, str] | None:
    """The name of rows without a known layout, and the method that learns from them; None if nobody can say."""
    names = {str(name).lower() for name in fields}
    if {"chosen", "rejected"} <= names:
        return "preference pairs", "DPO"
    if {"completions", "labels"} <= names:
        return "steps with a label each", "PRM"
    return None


def has_label(fields: JsonObject) -> bool:
    """True if a column that KTO reads calls the row's answer good or bad."""
    return any(str(fields.get(name)).strip().lower() in GOOD | BAD for name in _READ_AS_LABEL)


def mapping(fields: JsonObject) -> str | None:
    """The ``columns`` that would make a known layout of a row; None where nobody can say."""
    by_name = {str(name).lower(): str(name) for name in fields}

    def first(words: Iterable[str], kind: type) -> str | None:
        named = (by_name[word] for word in words if word in by_name)
        return next((name for name in named if isinstance(fields[name], kind)), None)

    chat = first(_CHATS, list)
    if chat is not None:
        turns = fields[chat]
        shared = bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]
        return f"{{{'conversations' if shared else 'messages'}: {chat}}}"
    asked = first(_PROMPTS, str)
    answer = first(("chosen", *_ANSWERS) if "rejected" in by_name else _ANSWERS, str)
    if asked is not None and answer is not None:
        wanted = ("instruction", "output") if asked == "instruction" else ("prompt", "completion")
        pairs = [(ours, name) for ours, name in zip(wanted, (asked, answer), strict=True) if ours != name]
        return "{" + ", ".join(f"{ours}: {name}" for ours, name in pairs) + "}"
    text = first(_TEXTS, str)
    return None if text is None else f"{{text: {text}}}"
