"""The answer of `ftcli bench`: what is timed, and the rates that its numbers are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftcli.facts.flops import StepFlops, step_flops
from ftcli.plain import FLATTENED, JsonObject
from ftcli.plan.batches import Batches, Layout
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.quantization import why_dequantized
from ftcli.preflight.report import PreflightReport
from ftcli.tables import code_of, quantizations
from ftcli.tables.policies import PolicyName

if TYPE_CHECKING:
    from ftcli.model.selfcheck import SelfCheck
    from ftcli.run.process_group import RankGroup
    from ftcli.train.bench import DeviceMemory, GpuTime, ProfiledKernel


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a benchmark. None takes the recipe's value.

    Attributes:
        batch: Rows of a step, or pairs of them where the recipe learns from pairs.
        prompt: Tokens of a pair's prompt; None: a third of its shorter row.
        lengths: What the lengths of rows are drawn from (``lognormal:MEAN,SIGMA``); None: all have ``seq``.
        steps: Timed steps after the first; with 0 the first is reported.
    """

    batch: int | None = None
    seq: int | None = None
    prompt: int | None = None
    lengths: str | None = None
    layers: int | None = None
    steps: int = 10
    profile: bool = False

    def prompt_of(self, tokens: int) -> int:
        """Tokens of the prompt of a pair whose shorter row has so many."""
        return max(1, min(tokens // 3 if self.prompt is None else self.prompt, tokens - 1))


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a step (median, fastest, slowest) after the first, which is given in seconds; with
    ``first_step_only`` the numbers are the first one's. ``tokens_per_second`` counts real tokens, in steps of several
    sizes all of them in all their time; ``pairs_per_second`` is there where pairs are learnt from, whose shared tokens
    count once.
    """

    steps: int
    first_step_only: bool
    tokens_per_second: float
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    first_step_seconds: float
    peak_memory_bytes: int | None
    pairs_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """The tokens of the steps that were timed: real ones, and all that were computed, with what fills rows up, in so
    many different ``shapes`` of micro-batches.
    """

    real_tokens: int
    computed_tokens: int
    computed_tokens_per_second: float
    filler_share: float
    shapes: int
    layout: Layout
    layout_reason: str


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Several GPUs that train together, at the pace of the slowest, as against the same ones when each trained alone,
    at the same time. What is of each alone is None where they share each row or the weights, which none can train on
    alone.
    """

    gpus: int
    tokens_per_second_in_all: float
    tokens_per_second_alone: float | None
    tokens_per_second_of_each_alone: tuple[float, ...]
    share_of_single_gpus: float | None
    peak_memory_bytes_of_each: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of training steps.

    Attributes:
        profile, gpu_time: The kernels of one step by time, and how long the GPU worked, where a step was profiled.
        cuda_graphs: ``on``, or why not.
        pinned_host_bytes, offloaded: Pinned memory on the host, and which tensors of the layers it holds; None where
            there is no estimate.
    """

    timing: Timing = field(metadata=FLATTENED)
    computing: TimedTokens = field(metadata=FLATTENED)
    device_memory: DeviceMemory = field(metadata=FLATTENED)
    matmul_tflops: float
    profile: list[ProfiledKernel] | None
    gpu_time: GpuTime | None
    kernels: str
    self_check: SelfCheck | None
    cuda_graphs: str
    pinned_host_bytes: int | None = None
    offloaded: Offloaded | None = None
    several: SeveralGpus | None = None


@dataclass(frozen=True, slots=True)
class StoredRate:
    """Products of weights as they are stored: the method that has them here, their rate, and the share of a step's
    operations that run at it. ``method`` is None where there are none.
    """

    method: str | None = None
    tflops: float = 0.0
    share: float = 0.0

    def as_dict(self) -> JsonObject:
        found: JsonObject = {}
        for name in quantizations.multiplied_as_stored():
            tflops, share = (self.tflops, self.share) if name == self.method else (None, None)
            found |= {f"{name}_matmul_tflops": tflops, f"{name}_share_of_operations": share}
        return found


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """The memory estimate of what is timed; of fewer layers than the model has there is none.
    ``predicted_allocated_bytes`` is what ``peak_memory_bytes`` measures on a GPU, the allocator's peak;
    ``predicted_peak_bytes`` has what CUDA takes besides, and on a CPU the whole process.
    """

    predicted_peak_bytes: int | None = None
    predicted_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ArithmeticBound:
    """The arithmetic bound, and tokens per second as a share of it; None where the operations are not known."""

    flops_per_token: float | None = None
    bound_tokens_per_second: float | None = None
    share_of_bound: float | None = None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The answer of `ftcli bench`: the run, its measurements, and the numbers to compare them with."""

    recipe: str
    model: str
    device: str
    dtype: str
    batch: int
    seq: int
    lengths: str | None
    layers: int | None
    gradient_checkpointing: PolicyName
    uncheckpointed_layers: int
    measured: Measured = field(metadata=FLATTENED)
    stored: StoredRate = field(metadata=FLATTENED)
    predicted: PredictedMemory = field(metadata=FLATTENED)
    bound: ArithmeticBound = field(metadata=FLATTENED)


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


def predicted_memory(report: PreflightReport, options: BenchOptions) -> PredictedMemory:
    """The memory estimate; none of fewer layers than the model has."""
    memory = report.memory
    if memory is None or options.layers is not None:
        return PredictedMemory()
    return PredictedMemory(memory.total_bytes, memory.allocated_bytes if report.device.kind == "cuda" else None)


def stored_rate(flops: StepFlops | None, report: PreflightReport) -> StoredRate:
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
    return StoredRate(recipe.quantization.method, rate, (flops.linear + flops.recompute) / flops.total)


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
