"""Where progress and words go."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from ftcli.cli import reporters
from ftcli.cli.render import Style
from ftcli.cli.reporters import CollectingReporter, TerminalReporter
from ftcli.errors import Finding
from ftcli.reporting import Reporter, Session, SilentReporter

PLAIN = Style(color=False)


def test_progress_in_a_log_is_a_line_for_each_update() -> None:
    stream = io.StringIO()
    with CollectingReporter(stream, PLAIN, quiet=False).progress(4, "train") as progress:
        progress.advance()
        progress.advance(2)
        progress.update(loss=1.23456, learning_rate=1e-4, phase="warm-up")
        progress.advance()
    assert stream.getvalue() == "train 3/4  loss 1.235  learning_rate 1e-4  phase warm-up\n"


def test_progress_without_a_total() -> None:
    stream = io.StringIO()
    with CollectingReporter(stream, PLAIN, quiet=False).progress(None, "read") as progress:
        progress.advance(5)
        progress.update()
    assert stream.getvalue() == "read 5\n"


def test_a_log_shows_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 31.0, 31.0, 40.0])  # of this module alone: threads of other tests ask for the time as well
    monkeypatch.setattr(reporters, "time", SimpleNamespace(monotonic=lambda: next(now)))
    stream = io.StringIO()
    with CollectingReporter(stream, PLAIN, quiet=False).progress(3, "eval") as progress:
        for _ in range(3):
            progress.advance()
    assert stream.getvalue() == "eval 2/3\n"


def test_quiet_keeps_warnings_and_drops_the_rest() -> None:
    stream = io.StringIO()
    reporter = CollectingReporter(stream, PLAIN, quiet=True)
    reporter.info("words")
    reporter.warn("careful")
    reporter.finding(Finding("FT1", "a note", severity="note"))
    reporter.finding(Finding("FT2", "a warning", severity="warning"))
    with reporter.progress(2, "train") as progress:
        progress.update(loss=1.0)
    assert stream.getvalue() == "warning: careful\nftcli: warning[FT2]: a warning\n"
    assert [finding.code for finding in reporter.findings] == ["FT1", "FT2"]


def test_bar_on_a_terminal_with_lines_above_it() -> None:
    stream = io.StringIO()
    reporter = TerminalReporter(stream, PLAIN, quiet=False, color=False)
    reporter.info("before")
    with reporter.progress(2, "train [1]") as progress:
        progress.advance(2)
        progress.update(loss=0.5)
        reporter.info("between [not markup]")
        with reporter.progress(9, "inner") as inner:
            inner.advance()
    reporter.info("after")
    text = stream.getvalue()
    assert text.startswith("before\n")
    assert "between [not markup]" in text
    assert "train [1]" in text
    assert "2/2" in text
    assert "loss 0.5" in text
    assert text.endswith("after\n")


def test_reporters_are_what_libraries_are_promised() -> None:
    chosen: list[Reporter] = [SilentReporter(), CollectingReporter(io.StringIO(), PLAIN, quiet=False)]
    for reporter in chosen:
        with reporter.progress(1, "x") as progress:
            progress.advance()
            progress.update(a=1)
        reporter.info("x")
        reporter.warn("x")
        reporter.finding(Finding("FT1", "m"))
    assert Session().reporter is not Session().reporter
