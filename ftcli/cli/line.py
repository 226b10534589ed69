"""The one line that shows how far something is, made for the width that there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftcli.remaining_time import Pace
from ftcli.units import duration, number

_SMALLEST_BAR, _LARGEST_BAR = 8, 40
Fields = Mapping[str, float | int | str]


@dataclass
class ProgressCount:
    """Something that is counted.

    Attributes:
        fields: The newest values, what matters most first.
        note: What is being done meanwhile, such as ``evaluating 3/10``.
    """

    description: str
    total: int | None
    done: int = 0
    fields: dict[str, float | int | str] = field(default_factory=dict)
    note: str = ""
    pace: Pace = field(default_factory=Pace)

    def advance(self, count: int) -> None:
        """``count`` more are done. The first ones are not timed: a resumed run begins with all that it did before."""
        began = self.done == 0 and count > 1
        self.done += count
        if self.done and not began:
            self.pace.note(self.done)

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
