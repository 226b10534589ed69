"""Which case may run beside those that are running, and the table of what came of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
#: A prediction may be wrong by this share of what was measured ...
MARGIN = 0.10
#: ... or by this many bytes, whichever is more: two of cuBLAS' workspaces, a matter of the tiny recipes alone.
SLACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Need:
    """What a case is predicted to take while it runs: bytes on the device, CUDA's own included, and pinned ones."""

    device_bytes: int
    pinned_bytes: int = 0


def next_to_start(pending: Sequence[Need], running: Iterable[Need], budget: Need) -> int | None:
    """Index of the first pending case that fits beside the running ones; None where none does.

    With nothing running the first starts in any case: alone it either fits or fails and is reported.
    """
    now = list(running)
    if pending and not now:
        return 0
    device = budget.device_bytes - sum(need.device_bytes for need in now)
    pinned = budget.pinned_bytes - sum(need.pinned_bytes for need in now)
    fits = (i for i, need in enumerate(pending) if need.device_bytes <= device and need.pinned_bytes <= pinned)
    return next(fits, None)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: prediction, measurement, or what went wrong.

    On a GPU ``predicted_bytes`` is the estimate without CUDA's own and ``measured_bytes`` the peak of torch's allocator
    (max_memory_allocated); ``predicted_total_bytes`` is the estimate with it, and ``measured_total_bytes`` what the
    allocator held at most (max_memory_reserved) and the process' CUDA context. On a CPU both pairs are the whole
    process: the estimate, and the peak of the resident set. ``spans`` are measured peaks by part of the run.
    """

    name: str
    phase: str = ""
    predicted_bytes: int = 0
    predicted_total_bytes: int = 0
    measured_bytes: int | None = None
    measured_total_bytes: int | None = None
    spans: dict[str, int] | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if not self.measured_bytes else self.predicted_bytes / self.measured_bytes

    @property
    def total_ratio(self) -> float | None:
        """The same with what CUDA takes itself."""
        return None if not self.measured_total_bytes else self.predicted_total_bytes / self.measured_total_bytes

    @property
    def good(self) -> bool:
        """Measured, and predicted within the margin."""
        if self.measured_bytes is None or self.error is not None:
            return False
        return abs(self.predicted_bytes - self.measured_bytes) <= max(MARGIN * self.measured_bytes, SLACK_BYTES)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "ratio": self.ratio, "total_ratio": self.total_ratio, "good": self.good}


def markdown(rows: Sequence[Row]) -> str:
    """The table for docs/performance.md, sizes in GiB."""
    lines = [
        "| case | predicted | measured | ratio | with CUDA's own: predicted | measured | ratio | peak, as predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.error is not None:
            lines.append(f"| {row.name} | {_gib(row.predicted_bytes)} | {_one_line(row.error)} | | | | | {row.phase} |")
            continue
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        cells = [
            row.name,
            _gib(row.predicted_bytes),
            _gib(row.measured_bytes),
            ratio if row.good else f"**{ratio}**",
            _gib(row.predicted_total_bytes),
            _gib(row.measured_total_bytes),
            f"{row.total_ratio:.3f}" if row.total_ratio is not None else "",
            row.phase,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    good = sum(row.good for row in rows)
    return "\n".join([*lines, "", f"{good} of {len(rows)} within {MARGIN:.0%}."])


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.2f}"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]
