"""What the times of steps come to: tokens per second, and what the GPUs of a group do together and alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcli.pipeline.bench_result import SeveralGpus, TimedTokens, Timing
from ftcli.pipeline.options import BenchOptions
from ftcli.plan.batches import Batches

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup


def timed_batches(sizes: Sequence[int], batch: int, options: BenchOptions) -> list[Sequence[int]]:
    """The lengths of the rows of each micro-batch that is timed: of all but the first, if there are others."""
    first = min(options.steps, 1)
    return [sizes[step * batch : (step + 1) * batch] for step in range(first, options.steps + 1)]


def timing(
    micro_batches: Sequence[Sequence[int]],
    first: float,
    steady: Sequence[float],
    options: BenchOptions,
    peak_bytes: int,
    unit: int = 1,
) -> Timing:
    """Of the first step its seconds; of those after it what they achieve, with the lengths of their rows, and the
    memory that they needed. ``unit``: rows that are learnt from as one.
    """
    pairs = None if unit == 1 else sum(map(len, micro_batches)) / unit / _seconds(micro_batches, steady)
    median = statistics.median(steady)
    return Timing(
        steps=options.steps,
        first_step_only=options.steps == 0,
        tokens_per_second=tokens_per_second(micro_batches, steady),
        step_ms=1000 * median,
        step_ms_min=1000 * min(steady),
        step_ms_max=1000 * max(steady),
        first_step_seconds=first,
        peak_memory_bytes=peak_bytes,
        pairs_per_second=pairs,
    )


def _seconds(micro_batches: Sequence[Sequence[int]], steady: Sequence[float]) -> float:
    """What all steps take: of one size by their median, which a single slow step does not change."""
    alike = len({tuple(lengths) for lengths in micro_batches}) == 1
    return statistics.median(steady) * len(steady) if alike else sum(steady)


def timed_tokens(micro_batches: Sequence[Sequence[int]], batches: Batches, steady: Sequence[float]) -> TimedTokens:
    """Real tokens of the micro-batches, and those that were computed with what fills rows up."""
    shapes = [batches.shape(lengths) for lengths in micro_batches]
    real, computed = sum(map(sum, micro_batches)), sum(rows * width for rows, width in shapes)
    rate = computed / _seconds(micro_batches, steady)
    share = 1.0 - real / computed
    return TimedTokens(real, computed, rate, share, len(set(shapes)), batches.layout, batches.reason)


def rates_of_ranks(
    group: RankGroup, alone: float | None, micro_batches: Sequence[Sequence[int]], steady: Sequence[float], peak: int
) -> SeveralGpus:
    """All ranks' numbers; the same on each of them."""
    import torch

    tokens, seconds = float(sum(map(sum, micro_batches))), _seconds(micro_batches, steady)
    told = group.all_gather(torch.tensor([alone or 0.0, tokens, seconds, float(peak)], dtype=torch.float64))
    rows = [row.tolist() for row in told]
    in_all = sum(row[1] for row in rows) / max(row[2] for row in rows)
    peaks = tuple(int(row[3]) for row in rows)
    if alone is None:
        return SeveralGpus(group.size, in_all, None, (), None, peaks)
    each = tuple(row[0] for row in rows)
    return SeveralGpus(group.size, in_all, sum(each), each, in_all / sum(each), peaks)


def tokens_per_second(micro_batches: Sequence[Sequence[int]], steady: Sequence[float]) -> float:
    """Real tokens of all micro-batches over the time of their steps."""
    return sum(map(sum, micro_batches)) / _seconds(micro_batches, steady)
