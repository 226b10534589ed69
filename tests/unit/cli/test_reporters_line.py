"""The one line of progress, in every width."""

from __future__ import annotations

import io
from itertools import product

import pytest

from ftcli.cli.render import Style
from ftcli.cli.reporters import ProgressCount, TerminalReporter, line_text
from ftcli.units import Pace, duration

FIELDS: dict[str, float | int | str] = {
    "loss": 1.23456, "held-out": "0.4561", "lr": 1e-4, "tok/s": 2959, "memory": "12.3 GiB", "epoch": "0.45",
}  # fmt: skip


def counted(done: int = 45, total: int | None = 100, seconds: float = 2.0) -> ProgressCount:
    """A count that has come to ``done`` at ``seconds`` each."""
    now = [0.0]
    count = ProgressCount("train", total, pace=Pace(lambda: now[0]))
    for _ in range(done):
        now[0] += seconds
        count.advance(1)
    count.fields = dict(FIELDS)
    return count


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_count_and_remaining_time_are_there_however_narrow(width: int) -> None:
    text = line_text(counted(), width)
    assert len(text) <= width
    assert "45/100" in text
    assert "ETA 1m50s" in text


def test_what_fits_is_shown_in_the_order_of_what_matters() -> None:
    assert line_text(counted(), 20) == "45/100  ETA 1m50s"
    assert line_text(counted(), 40) == "train  45/100  ETA 1m50s  loss 1.235"
    assert line_text(counted(), 54) == "train  45/100  ETA 1m50s  loss 1.235  held-out 0.4561"
    assert line_text(counted(), 60) == "45/100  ETA 1m50s  loss 1.235  held-out 0.4561  lr 1e-4"
    assert line_text(counted(), 66) == "train  45/100  ETA 1m50s  loss 1.235  held-out 0.4561  lr 1e-4"
    wide = line_text(counted(), 200)
    assert wide.endswith(
        "45/100  ETA 1m50s  loss 1.235  held-out 0.4561  lr 1e-4  tok/s 2959  memory 12.3 GiB  epoch 0.45"
    )
    assert wide.startswith("train  " + "━" * 18 + "┄" * 22)


def test_no_line_is_longer_than_the_terminal() -> None:
    for count in (counted(), counted(3, None), counted(0), counted(100), counted(12_345, 1_000_000, 30)):
        for width, note in product(range(1, 220), ("", "evaluating 3/10")):
            count.note = note
            text = line_text(count, width)
            assert len(text) <= width
            if width >= 22:
                assert count.counted in text, width
                assert count.time.rpartition(" ")[2] in text, width
            if width >= 45:
                assert note in text, width


def test_even_large_numbers_keep_both_in_twenty_columns() -> None:
    assert line_text(counted(12_345, 100_000, 0.5), 20) == "12345/100000  12h10m"


def test_an_unknown_total_and_an_unknown_pace() -> None:
    assert line_text(counted(3, None), 21) == "train  3  loss 1.235"
    assert line_text(counted(1), 18) == "1/100  ETA ?"
    assert line_text(counted(100), 20) == "100/100  in 3m20s"


def test_a_resumed_count_is_not_timed_by_what_was_there_before() -> None:
    now = [0.0]
    count = ProgressCount("train", 1000, pace=Pace(lambda: now[0]))
    count.advance(900)
    for _ in range(4):
        now[0] += 10
        count.advance(1)
    assert count.time == "ETA 16m00s"


def test_a_count_inside_of_another_is_a_note_on_its_line() -> None:
    reporter = TerminalReporter(io.StringIO(), Style(color=False), quiet=False, color=False)
    with reporter.progress(10, "train") as outer:
        outer.advance()
        assert reporter.shown is not None
        with reporter.progress(8, "evaluating") as inner:
            inner.advance(3)
            outer.update(loss=1.0)
            assert line_text(reporter.shown, 44) == "train  1/10  ETA ?  evaluating 3/8  loss 1"
        assert reporter.shown.note == ""
    assert reporter.shown is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (45_240, "12h34m"), (273_600, "3d04h"), (-1, "0s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_pace_is_measured_from_the_first_count_and_follows_changes() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    now[0] = 60.0  # loading and compiling
    pace.note(1)
    assert pace.seconds_each is None
    for done in range(2, 12):
        now[0] += 1
        pace.note(done)
    assert pace.seconds_left(111) == pytest.approx(100)
    assert pace.seconds_left(None) is None
    for done in range(12, 200):
        now[0] += 5
        pace.note(done)
    assert pace.seconds_each == pytest.approx(5)
