"""Reporters that show what library code reports: one live line on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from ftcli.cli.render import Style, clean, findings_text, of_row, terminal_text
from ftcli.errors import Finding
from ftcli.reporting import Progress, SilentProgress
from ftcli.units import Pace, duration, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


#: A log shows a sign of life at least this often.
_SECONDS_BETWEEN_LINES = 30.0
#: How often the live line is drawn in a second.
_REFRESHES = 4


class CollectingReporter:
    """Prints plain lines to `stream`, and keeps the findings for the JSON document."""

    def __init__(self, stream: TextIO, style: Style, *, quiet: bool) -> None:
        self.findings: list[Finding] = []
        self._helped: set[tuple[str, str | None]] = set()
        self._stream = stream
        self._style = style
        self._quiet = quiet

    def info(self, text: str) -> None:
        """A line, unless quiet."""
        if not self._quiet:
            self._write(terminal_text(text))

    def warn(self, text: str) -> None:
        """A line that begins with `warning:`."""
        self._write(f"{self._style.paint('warning', '1;33')}: {terminal_text(text)}")

    def finding(self, finding: Finding) -> None:
        """The finding's block; notes only when not quiet."""
        self.findings.append(finding)
        if finding.severity != "note" or not self._quiet:
            told = of_row(finding) and (finding.code, finding.help) in self._helped
            self._helped.add((finding.code, finding.help))
            self._write(findings_text([replace(finding, help=None) if told else finding], self._style))

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """Lines at each update, and at least every half minute."""
        yield SilentProgress() if self._quiet else PlainProgress(total, description, self._write)

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class PlainProgress:
    """Progress as lines: ``training 40/100  loss 1.213  lr 0.0001  ETA 3m05s``."""

    def __init__(self, total: int | None, description: str, write: Callable[[str], None]) -> None:
        self._count = ProgressCount(description, total)
        self._write = write
        self._written_at = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Counts, with a line when none was written for a while."""
        self._count.advance(count)
        if time.monotonic() - self._written_at >= _SECONDS_BETWEEN_LINES:
            self._line("")

    def update(self, **fields: float | int | str) -> None:
        self._line(fields_text(fields))

    def _line(self, fields: str) -> None:
        count = self._count
        parts = (f"{count.description} {count.counted}", fields, count.time)
        self._write(clean("  ".join(filter(None, parts))))
        self._written_at = time.monotonic()


class TerminalReporter(CollectingReporter):
    """Reports on a terminal, with one live line (``shown``) below the others. Imports rich only when something is
    counted.
    """

    def __init__(self, stream: TextIO, style: Style, *, quiet: bool, color: bool) -> None:
        super().__init__(stream, style, quiet=quiet)
        self._color = color
        self._console: Console | None = None
        self.shown: ProgressCount | None = None

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """A line with the remaining time. A count inside of another is a note on that one's line."""
        if self._quiet:
            yield SilentProgress()
        elif self.shown is not None:
            inner = _Noted(self.shown, ProgressCount(description, total))
            try:
                yield inner
            finally:
                inner.end()
        else:
            with self._live(ProgressCount(description, total)) as progress:
                yield progress

    @contextmanager
    def _live(self, count: ProgressCount) -> Iterator[Progress]:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, no_color=not self._color, highlight=False)
        self.shown = count
        try:
            with Live(_Line(count), console=self._console, refresh_per_second=_REFRESHES):
                yield count
        finally:
            self._console = self.shown = None

    def _write(self, text: str) -> None:
        if self._console is None:
            super()._write(text)
        else:
            self._console.out(text, highlight=False)


class _Line:
    """A count as rich draws it: anew for each refresh, in the width that the terminal has then."""

    def __init__(self, count: ProgressCount) -> None:
        self._count = count

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        yield Text(clean(line_text(self._count, options.max_width)), no_wrap=True, overflow="crop")


class _Noted:
    """A count inside of another one, on its line."""

    def __init__(self, outer: ProgressCount, inner: ProgressCount) -> None:
        self._outer = outer
        self._inner = inner
        self._before = outer.note
        self._show()

    def advance(self, count: int = 1) -> None:
        self._inner.advance(count)
        self._show()

    def update(self, **fields: float | int | str) -> None:
        """Only the count is shown."""

    def end(self) -> None:
        self._outer.note = self._before

    def _show(self) -> None:
        self._outer.note = f"{self._inner.description} {self._inner.counted}"


_SMALLEST_BAR, _LARGEST_BAR = 8, 40
Fields = Mapping[str, float | int | str]


@dataclass
class ProgressCount:
    """Something that is counted, with the newest values, what matters most first, and a ``note`` on what is done
    meanwhile.
    """

    description: str
    total: int | None
    done: int = 0
    fields: dict[str, float | int | str] = field(default_factory=dict)
    note: str = ""
    pace: Pace = field(default_factory=Pace)

    def advance(self, count: int = 1) -> None:
        """``count`` more are done. The first ones are not timed: a resumed run begins with all that it did before."""
        began = self.done == 0 and count > 1
        self.done += count
        if self.done and not began:
            self.pace.note(self.done)

    def update(self, **fields: float | int | str) -> None:
        self.fields = fields

    @property
    def counted(self) -> str:
        """``45/100``, or ``45`` where nobody knows how many there are."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"

    @property
    def time(self) -> str:
        """``ETA 3m05s``, ``in 46s`` at the end; nothing where it is unknown."""
        if self.total is not None and self.done >= self.total:
            return f"in {duration(self.pace.elapsed)}"
        left = self.pace.seconds_left(self.total)
        return "" if left is None else f"ETA {duration(left)}"


def line_text(count: ProgressCount, width: int) -> str:
    """The line in at most ``width`` columns: count and time always, then what fits of the rest, in this order: the
    note, the fields, the description, a bar.
    """
    time = count.time or ("ETA ?" if count.total is not None else "")
    essential = [count.counted, time]
    if _length(essential) > width:
        essential[1] = time.rpartition(" ")[2]
    if _length(essential) > width:
        return " ".join(filter(None, essential))[:width]
    details: list[str] = []
    for text in filter(None, (count.note, *_texts(count.fields))):
        if _length([*essential, *details, text]) > width:
            break
        details.append(text)
    named = [count.description, *essential, *details]
    if _length(named) > width:
        return "  ".join(filter(None, [*essential, *details]))
    room = min(_LARGEST_BAR, width - _length(named) - 2)
    bar = [_bar(count, room)] if room >= _SMALLEST_BAR and count.total else []
    return "  ".join(filter(None, [count.description, *bar, *essential, *details]))


def fields_text(fields: Fields) -> str:
    """``loss 1.213  lr 0.0001``."""
    return "  ".join(_texts(fields))


def _texts(fields: Fields) -> list[str]:
    shown = ((name, number(value) if isinstance(value, float) else str(value)) for name, value in fields.items())
    return [f"{name} {value}" for name, value in shown]


def _length(parts: list[str]) -> int:
    return len("  ".join(filter(None, parts)))


def _bar(count: ProgressCount, width: int) -> str:
    assert count.total
    full = min(width, round(width * count.done / count.total))
    return "━" * full + "┄" * (width - full)
