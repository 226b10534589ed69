"""Times the real training step: the trainer of `ftcli train`, on synthetic tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from ftkernels.fp8 import multiply_rows, quantize_fp8

from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.row import Row
from ftcli.train.loop import StepWatcher

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup
    from ftcli.train.parallel import Parallel

#: Shapes (rows, inner, columns) of the matmul probe: large enough to reach the machine's rate, by device kind.
MATMUL_CUDA = (8192, 8192, 8192)
MATMUL_CPU = (1024, 1024, 1024)
_LONG_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step in order; the first includes whatever is set up lazily."""

    seconds: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.seconds[0]

    @property
    def steady(self) -> tuple[float, ...]:
        """Seconds of the steps after the first; of the first, if there is no other."""
        return self.seconds[1:] or self.seconds

    @property
    def median(self) -> float:
        """Median seconds of the steady steps."""
        return statistics.median(self.steady)


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """A kernel (an operator on a CPU) of one step: how often it ran, and for how long in all."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """From the step's first kernel to the end of its last, and how much of that any kernel ran."""

    span_ms: float
    busy_ms: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak of torch's allocator, and the device memory in use now, CUDA's context and other processes included. None on
    a CPU.
    """

    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None


class StepTimer(StepWatcher):
    """Times each step. On a GPU with CUDA events, so that nothing waits that would not wait in training."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._marks: list[float] = []

    def start(self) -> None:
        """Starts the clock: weights are on the device, nothing has run."""
        self._mark()

    def stepped(self, step: int) -> None:
        """Takes the time of a step."""
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times(self, steps: int) -> StepTimes:
        """The first ``steps`` steps."""
        if self._cuda:
            torch.cuda.synchronize()
            events = pairwise(self._events[: steps + 1])
            return StepTimes(tuple(float(a.elapsed_time(b)) / 1000.0 for a, b in events))
        return StepTimes(tuple(b - a for a, b in pairwise(self._marks[: steps + 1])))


class Joining(StepWatcher):
    """Ranks that train each by itself for ``after`` steps, and together from then on."""

    def __init__(self, parallel: Parallel, group: RankGroup, after: int) -> None:
        self._parallel, self._group, self._after = parallel, group, after
        parallel.reduces = False

    def start(self) -> None:
        """All begin at the same time."""
        self._group.agree("alone")

    def stepped(self, step: int) -> None:
        """From the next step on gradients are added up."""
        if step == self._after:
            self._group.agree("together")
            self._parallel.reduces = True


class StepProfiler(StepWatcher):
    """Records one step with torch's profiler. The caller leaves that step out of the timing."""

    def __init__(self, device: torch.device, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._step = step

    def begin(self, step: int) -> None:
        """Starts before the chosen step."""
        if step + 1 == self._step:
            self._profile.start()

    def stepped(self, step: int) -> None:
        """Stops after it."""
        if step == self._step:
            self._profile.stop()

    def table(self, rows: int = 40) -> list[ProfiledKernel]:
        """Kernels (operators on a CPU) by total time."""
        found = []
        for event in self._profile.key_averages():
            micros = event.self_device_time_total if event.device_type.name == "CUDA" else 0.0
            if not torch.cuda.is_available():
                micros = event.self_cpu_time_total
            if micros and not event.is_user_annotation:  # a range around kernels that are listed themselves
                found.append(ProfiledKernel(event.key, event.count, micros / 1000.0))
        return sorted(found, key=lambda row: -row.ms)[:rows]

    def busy(self) -> GpuTime | None:
        """The part of the step that the GPU worked; None without a GPU."""
        events = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        if not events:
            return None
        return GpuTime((max(end for _, end in events) - min(events)[0]) / 1e3, covered(events) / 1e3)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, which may overlap: kernels on several streams do."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def synthetic_tokens(rows: int, seq_len: int, vocab_size: int, seed: int) -> list[TokenizedRow]:
    """``rows`` sequences of ``seq_len`` random ids, every position but the first supervised."""
    return synthetic_rows([seq_len] * rows, vocab_size, seed)


def synthetic_rows(lengths: Sequence[int], vocab_size: int, seed: int) -> list[TokenizedRow]:
    """A sequence of random ids for each of ``lengths``, every position but the first supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (sum(lengths),), generator=generator).tolist()
    ends = list(accumulate(lengths))
    rows = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return [TokenizedRow(Row("synthetic", i + 1, {}), row, [IGNORE_INDEX, *row[1:]]) for i, row in enumerate(rows)]


def measure_matmul_rate(device: torch.device, dtype: torch.dtype, repeats: int = 10) -> float:
    """Operations per second of a large dense product of random numbers in ``dtype`` (median of ``repeats``)."""
    m, k, n = MATMUL_CUDA if device.type == "cuda" else MATMUL_CPU
    left = torch.randn((m, k), device=device, dtype=dtype)
    right = torch.randn((k, n), device=device, dtype=dtype)
    return 2.0 * m * k * n / _median(partial(torch.mm, left, right), device, repeats)


def measure_fp8_rate(device: torch.device, repeats: int = 10) -> float:
    """The same for operands in e4m3, as ``quantization.method: fp8`` multiplies them; quantizing is not timed."""
    m, k, n = MATMUL_CUDA if device.type == "cuda" else MATMUL_CPU
    left, right = (quantize_fp8(torch.randn(shape, device=device)) for shape in ((m, k), (n, k)))
    return 2.0 * m * k * n / _median(partial(multiply_rows, left, right, torch.bfloat16), device, repeats)


def _median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of ``work`` after three times that do not count.

    One time is enough on a CPU without instructions for the dtype, which takes a second for a product in bfloat16.
    """
    if _timed(work, device) > _LONG_SECONDS and device.type == "cpu":
        return _timed(work, device)
    return statistics.median([_timed(work, device) for _ in range(repeats + 2)][2:])


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes on the device."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1000.0
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def device_memory(device: torch.device) -> DeviceMemory:
    """Reads a GPU's memory; nothing is known of a CPU's."""
    if device.type != "cuda":
        return DeviceMemory()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(torch.cuda.max_memory_reserved(device), total - free)
