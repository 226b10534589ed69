"""Timing by CUDA events, interleaved between contenders, and the machine's own measured rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Roofline:
    """What this machine reaches: bytes a second of a large copy, floating-point operations a second of a large
    product.
    """

    copy_bytes: float
    matmul_flops: float


class Clock:
    """Median milliseconds of functions, timed in turn so that drift and clocks meet all of them alike."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds
        self._flush = torch.empty(1 << 26, dtype=torch.int32, device=device) if device.type == "cuda" else None

    def medians(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median milliseconds of each function over the rounds; the first two calls of each are not counted."""
        for function in functions.values():
            function()
            function()
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.rounds):
            for name, function in functions.items():
                samples[name].append(self._once(function))
        return {name: statistics.median(values) for name, values in samples.items()}

    def _once(self, function: Callable[[], object]) -> float:
        if self._flush is None:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        self._flush.zero_()  # nothing is left in L2
        torch.cuda._sleep(4_000_000)  # the host gets ahead, so launches are not timed
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def measure_roofline(clock: Clock, dtype: torch.dtype, *, tiny: bool) -> Roofline:
    """Copy bandwidth (read plus written bytes) and matmul rate, measured here and now."""
    elements, edge = (1 << 16, 64) if tiny else (1 << 29, 8192)
    source = torch.zeros(elements, dtype=torch.bfloat16, device=clock.device)
    target = torch.empty_like(source)
    a = torch.randn(edge, edge, device=clock.device).to(dtype)
    out = torch.empty_like(a)
    times = clock.medians({"copy": lambda: target.copy_(source), "mm": lambda: torch.mm(a, a, out=out)})
    return Roofline(2 * 2 * elements / (times["copy"] * 1e-3), 2 * edge**3 / (times["mm"] * 1e-3))
