"""What a benchmark is compared with: the memory estimate, and the machine's arithmetic for the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.config.recipe import Recipe
from ftcli.facts.flops import StepFlops, step_flops
from ftcli.pipeline.bench_result import ArithmeticBound, PredictedMemory, StoredRate
from ftcli.pipeline.options import BenchOptions
from ftcli.plan.quantization import why_dequantized
from ftcli.preflight.report import PreflightReport
from ftcli.tables import code_of, quantizations


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
    """Of what is timed: a training step, or evaluation."""
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
