"""The rates of a benchmark: tokens per second of steps and ranks, beside the estimate and the arithmetic bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcli.config.recipe import Recipe
from ftcli.facts.flops import StepFlops, step_flops
from ftcli.pipeline.bench_result import ArithmeticBound, PredictedMemory, SeveralGpus, StoredRate, TimedTokens, Timing
from ftcli.pipeline.options import BenchOptions
from ftcli.plan.batches import Batches
from ftcli.plan.quantization import why_dequantized
from ftcli.preflight.report import PreflightReport
from ftcli.tables import code_of, quantizations

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
    """Seconds of the first step; of those after it the rate, with the lengths of their rows, and the memory. ``unit``
    rows are learnt from as one.
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
    """Seconds of all steps: of one size by their median, which a single slow step does not change."""
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


def flops_of(
    report: PreflightReport, options: BenchOptions, sizes: Sequence[int], uncheckpointed_layers: int
) -> StepFlops | None:
    """Operations of a training step on rows of ``sizes`` tokens; None where the model's shape is not known."""
    return step_flops(
        report.facts,
        report.recipe.lora,
        seq_len=round(sum(size**2 for size in sizes) / sum(sizes)),  # of the row that a token is in, on average
        num_layers=options.layers,
        gradient_checkpointing=report.checkpointing.policy,
        uncheckpointed_layers=uncheckpointed_layers,
    )


def operations_per_token(flops: StepFlops | None, recipe: Recipe, options: BenchOptions) -> float | None:
    """Operations per token of a training step, or of evaluation."""
    if flops is None:
        return None
    return _forward(flops, recipe) if options.evaluation else flops.total


def predicted_memory(report: PreflightReport, options: BenchOptions) -> PredictedMemory:
    """The memory estimate; none of fewer layers than the model has."""
    memory = report.memory
    if memory is None or options.layers is not None:
        return PredictedMemory()
    return PredictedMemory(memory.total_bytes, memory.allocated_bytes if report.device.kind == "cuda" else None)


def _forward(flops: StepFlops, recipe: Recipe) -> float:
    """Operations per token of the forward pass, out of a training step's."""
    passes = 2.0 if recipe.lora is not None else 3.0  # a frozen weight has no gradient of its own
    return (flops.linear + flops.head) / passes + flops.adapters / 3.0 + flops.attention * 2.0 / 7.0


def stored_rate(flops: StepFlops | None, report: PreflightReport, options: BenchOptions) -> StoredRate:
    """The rate of this machine's products of weights as they are stored, and the share of a step that runs at it."""
    recipe = report.recipe
    products = quantizations.row(recipe.quantization.method).products
    if (
        products is None
        or products.measure_rate is None
        or flops is None
        or why_dequantized(recipe.quantization, report.dtypes, report.device) is not None
    ):
        return StoredRate()
    from ftcli.job import device_of

    rate = code_of(products.measure_rate)(device_of(report)) / 1e12
    # What checkpointing runs again is linear layers for the most part.
    share = (
        flops.linear / 2.0 / _forward(flops, recipe)
        if options.evaluation
        else (flops.linear + flops.recompute) / flops.total
    )
    return StoredRate(recipe.quantization.method, rate, share)


def arithmetic_bound(
    operations: float | None, tokens_per_second: float, matmul_tflops: float, stored: StoredRate
) -> ArithmeticBound:
    """Tokens per second that the measured rates allow, and the share of them that was reached."""
    if operations is None:
        return ArithmeticBound()
    seconds = (1.0 - stored.share) / matmul_tflops
    if stored.share:
        seconds += stored.share / stored.tflops
    bound = 1e12 / (operations * seconds)
    return ArithmeticBound(operations, bound, tokens_per_second / bound)
