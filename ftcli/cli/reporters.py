"""Reporters that show what library code reports: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from ftcli.cli.render import Style, findings_text, of_row
from ftcli.errors import Finding
from ftcli.reporting import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: A log shows a sign of life at least this often.
_SECONDS_BETWEEN_LINES = 30.0


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
            self._write(text)

    def warn(self, text: str) -> None:
        """A line that begins with `warning:`."""
        self._write(f"{self._style.paint('warning', '1;33')}: {text}")

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
    """Progress as lines: ``training 40/100  loss 1.213  learning_rate 0.0001``."""

    def __init__(self, total: int | None, description: str, write: Callable[[str], None]) -> None:
        self._total = total
        self._description = description
        self._write = write
        self._done = 0
        self._written_at = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Counts, with a line when none was written for a while."""
        self._done += count
        if time.monotonic() - self._written_at >= _SECONDS_BETWEEN_LINES:
            self._line("")

    def update(self, **fields: float | int | str) -> None:
        """A line with the fields."""
        self._line(fields_text(fields))

    def _line(self, fields: str) -> None:
        count = f"{self._done}/{self._total}" if self._total is not None else str(self._done)
        self._write(f"{self._description} {count}  {fields}".rstrip())
        self._written_at = time.monotonic()


class TerminalReporter(CollectingReporter):
    """As its base, with a live bar below the lines. Imports rich only when something is counted."""

    def __init__(self, stream: TextIO, style: Style, *, quiet: bool, color: bool) -> None:
        super().__init__(stream, style, quiet=quiet)
        self._color = color
        self._console: Console | None = None

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """A bar with the remaining time. A count inside of another is not shown."""
        if self._quiet or self._console is not None:
            yield SilentProgress()
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(file=self._stream, no_color=not self._color, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
        )
        try:
            with RichProgress(*columns, console=self._console, transient=False) as bar:
                yield _BarProgress(bar, bar.add_task(description, total=total, shown=""))
        finally:
            self._console = None

    def _write(self, text: str) -> None:
        if self._console is None:
            super()._write(text)
        else:
            self._console.out(text, highlight=False)


class _BarProgress:
    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, count: int = 1) -> None:
        self._bar.advance(self._task, count)

    def update(self, **fields: float | int | str) -> None:
        self._bar.update(self._task, shown=fields_text(fields))


def fields_text(fields: dict[str, float | int | str]) -> str:
    """``loss 1.213  learning_rate 0.0001``."""
    shown = ((name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in fields.items())
    return "  ".join(f"{name} {value}" for name, value in shown)
