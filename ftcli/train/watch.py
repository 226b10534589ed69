"""Watches numbers of a step for NaN and infinity without waiting for the device, and names the rows they came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError, Origin

_ROWS_SHOWN = 32

#: From the index of a training row to the places in data files that it came from (several in a packed row).
RowOrigins = Callable[[int], Sequence[Origin]]


@dataclass(frozen=True, slots=True)
class WatchedNumber:
    """A number of one step; ``arrived`` is None where it never left the host. ``rows`` index the training rows."""

    step: int
    name: str
    rows: tuple[int, ...]
    value: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def copy_of(cls, step: int, name: str, rows: tuple[int, ...], value: Tensor) -> WatchedNumber:
        """Starts to copy ``value`` to the host. Reading it would wait for all queued work; this does not wait."""
        value = value.detach()
        if not value.is_cuda:
            return cls(step, name, rows, value, None)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, name, rows, host, arrived)

    def number(self) -> float:
        """The number; waits for its own copy only."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.value)

    def require_finite(self, origins: RowOrigins) -> None:
        """Raises FtcliError FT702 (exit 6), naming the batch's rows, when the number is NaN or infinite."""
        number = self.number()
        if math.isfinite(number):
            return
        rows = row_list(origin for row in self.rows for origin in origins(row))
        raise FtcliError.single(
            "FT702",
            f"{self.name} is {number} at step {self.step}: training has diverged"
            + (f"; rows of that batch: {rows}" if rows else ""),
            exit_code=ExitCode.DIVERGED,
            help="look at those rows; lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm. "
            "Checkpoints hold finite numbers only: the last one was written before this step",
        )


def row_list(origins: Iterable[Origin]) -> str:
    """``train.jsonl:3, 17, 20; more.jsonl:4``: the rows of each file, by rising number; at most 32 in all."""
    by_source: dict[str, list[int]] = {}
    for origin in origins:
        by_source.setdefault(origin.source, []).append(origin.line or 0)
    parts, left = [], _ROWS_SHOWN
    for source, numbers in by_source.items():
        shown = sorted(set(numbers))[: max(left, 0)]
        left -= len(shown)
        if shown:
            parts.append(f"{source}:{', '.join(str(number) for number in shown)}")
    hidden = sum(len(set(numbers)) for numbers in by_source.values()) - _ROWS_SHOWN
    return "; ".join(parts) + (f" and {hidden} more" if hidden > 0 else "")


def peak_memory_bytes() -> int:
    """Peak bytes allocated on the GPU, or this process' peak resident set on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
