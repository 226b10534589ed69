"""A row, what it means once it is understood, and how the faults of rows are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.plain import JsonObject

#: Faults of rows that are named one by one; more are counted by code. The command line shows the first hundred.
MAX_NAMED = 1000
NO_ROWS_HELP = "the file is empty, or `max_rows`, `split` or `name` leaves nothing of it: name another one"
BROKEN_HELP = "fix the row or remove it; data.max_bad_rows skips and counts a few of them"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``source`` as the recipe names it (a file of it, for a folder), ``number`` counted from 1.

    The number is the line in JSON Lines and CSV, and the position in every other layout. ``folder`` is where its file
    lies, to which the paths of its images are relative; None for a dataset of the Hub.
    """

    source: str
    number: int
    fields: JsonObject
    folder: str | None = None

    @property
    def origin(self) -> Origin:
        """The row's place, as ``file:row``."""
        return Origin(self.source, self.number)


def text_size(value: Any) -> int:
    """About how many characters a row's value holds, however deeply; everything else than text counts as eight."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list) and item and not isinstance(item[0], int | float):
            waiting += item
        else:
            size += 8 * len(item) if isinstance(item, list) else 8
    return size


#: Stands for an image in the content of a turn; Unicode has set it apart from all text.
IMAGE = "\ufdd0"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a row: the ``path`` that the row names, or its ``content``."""

    path: str | None = None
    content: bytes | None = None


#: A turn of a chat as its template takes it: ``role``, ``content``, ``tool_calls`` and whatever else the row has.
Message: TypeAlias = JsonObject
#: Values for a chat template's own switches, by name.
Switches = Mapping[str, bool | int | float | str]
#: Half-open character ranges of a text.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One row, understood: a chat (``messages``), plain ``text``, or tokens (``input_ids`` with ``labels``).

    Attributes:
        prompt_text: The leading part of ``text`` that is a prompt; None for text that is all one piece.
        implicit: No column holds the prompt: it is what this text and that of ``others`` begin with.
        tools: The functions that a chat may call, as JSON schemas.
        switches: The row's own values for switches of the chat template, over those of the recipe.
        completion_from: The message with which the completion of a chat begins; None: its last one.
        untrained: For each message that the row marks: the ranges of its content without loss, None for all of it.
        others: Further examples that the row makes; all are trained, or none is.
        value: A number that the row gives its answer, for methods that read one: 1 or -1 for a wanted or an unwanted
            one, or by how much it is the better one. 0 stands for none.
        images: Of a chat, in the order in which its contents hold :data:`IMAGE`.
    """

    row: Row
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prompt_text: str | None = None
    implicit: bool = False
    tools: tuple[JsonObject, ...] | None = None
    completion_from: int | None = None
    untrained: Mapping[int, Ranges | None] = field(default_factory=dict)
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    switches: Switches = field(default_factory=dict)
    others: tuple[Example, ...] = ()
    value: float = 0.0
    images: tuple[ImageSource, ...] = ()


class Misfit(Exception):
    """A row that does not fit its layout; the message says how."""


def column_names(fields: JsonObject) -> str:
    """The columns of a row, for messages."""
    return ", ".join(sorted(map(str, fields))) or "none"


def data_error(code: str, message: str, origin: Origin, help: str | None = None) -> FtcliError:
    """A single data finding with exit status 4."""
    return FtcliError.single(code, message, exit_code=ExitCode.DATA, origin=origin, help=help)


def surrogate(error: UnicodeEncodeError, row: Row) -> Finding:
    """FT412: a row's text holds half of a surrogate pair."""
    reason = f"a lone surrogate at character {error.start + 1} of its text: broken UTF-16"
    return Finding("FT412", reason, row.origin, "remove the character; emoji that were cut in two are the usual reason")


def raise_findings(findings: Sequence[Finding], uncounted: Counter[str] | None = None) -> None:
    """Raises all ``findings`` together; ``uncounted`` are further ones by code, too many to be named."""
    more = Counter(finding.code for finding in findings[MAX_NAMED:])
    more.update(uncounted or {})
    shown = list(findings[:MAX_NAMED])
    if more:
        kinds = ", ".join(f"{count:,} of {code}" for code, count in sorted(more.items()))
        shown.append(Finding(min(more), f"and {more.total():,} more rows like these ({kinds})"))
    if shown:
        raise FtcliError(shown, ExitCode.DATA)
