"""`ftcli bench`: what this machine makes of the recipe's training step, against its own arithmetic bound."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ftcli.config import LoggingConfig, Recipe
from ftcli.config.load import LoadedRecipe
from ftcli.data.lengths import Lengths, lengths_of
from ftcli.facts.batches import Batches
from ftcli.facts.flops import StepFlops, step_flops
from ftcli.facts.quantization import why_dequantized
from ftcli.pipeline.bench_result import (
    ArithmeticBound,
    BenchResult,
    HostMemory,
    Measured,
    Predicted,
    Profiled,
    SeveralGpus,
    StoredRate,
    TimedTokens,
    Timing,
)
from ftcli.pipeline.checking import checked
from ftcli.pipeline.options import BenchOptions
from ftcli.preflight.checks.context import Command
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.tables import code_of, engines, quantizations, schedules

if TYPE_CHECKING:
    from ftcli.run.group import RankGroup


def bench_step(
    loaded: LoadedRecipe, session: Session, options: BenchOptions, group: RankGroup | None = None
) -> BenchResult:
    """Times ``options.steps`` training steps (or evaluation batches) after the first, on random weights of the recipe's
    true shape. Without any, the first is reported, with all that is set up in it (``first_step_only``).

    The bound is tokens/s over (matmul rate / operations per token), with the rate measured on this machine and the
    operations counted by :mod:`ftcli.facts.flops`. Products of weights as they are stored count at their own rate.

    The ranks of ``group`` take as many steps each by itself before, which is what the steps together are held against.
    """
    mix = None if options.lengths is None else lengths_of(options.lengths)
    shortened = replace(loaded, recipe=bench_recipe(loaded.recipe, options))
    command: Command = "bench --eval" if options.evaluation else "bench"
    report = checked(shortened, session, command)
    setup = report.setup
    if options.lengths is None and setup.trains and setup.graphed and not setup.wholly_graphed:
        # All micro-batches are of the largest size, which no graph takes.
        train = shortened.recipe.train.model_copy(update={"cuda_graphs": False})
        shortened = replace(shortened, recipe=shortened.recipe.model_copy(update={"train": train}))
        report = checked(shortened, session, command)
    if report.checkpointing.requested == "auto":
        session.reporter.info(f"gradient_checkpointing: {report.checkpointing}")
    left_out = report.checkpointing.uncheckpointed_layers
    if options.layers is not None and report.facts.shape is not None:  # the same share of them
        left_out = left_out * options.layers // report.facts.shape.num_layers
        report = replace(report, setup=report.setup.changed({"train.uncheckpointed_layers": left_out}))
    recipe = report.recipe
    sizes = _sizes(recipe, options, mix)
    if options.evaluation:
        measured = _measure_evaluation(report, session, options, sizes)
    else:
        measured = _measure(report, session, options, sizes, group)
    flops = step_flops(
        report.facts,
        recipe.lora,
        seq_len=round(sum(size**2 for size in sizes) / sum(sizes)),  # of the row that a token is in, on average
        num_layers=options.layers,
        gradient_checkpointing=report.checkpointing.policy,
        uncheckpointed_layers=left_out,
    )
    operations = None if flops is None else _forward(flops, recipe) if options.evaluation else flops.total
    stored = _stored_rate(flops, report, options)
    return BenchResult(
        recipe=str(loaded.path),
        mode="evaluation" if options.evaluation else "training",
        model=recipe.model.name_or_path,
        device=report.device.name,
        dtype=report.plan.compute,
        batch=recipe.train.per_device_train_batch_size,
        seq=recipe.data.max_seq_len,
        lengths=options.lengths,
        layers=options.layers,
        gradient_checkpointing=report.checkpointing.policy,
        uncheckpointed_layers=left_out,
        measured=measured,
        stored=stored,
        predicted=_predicted(report, options),
        bound=_bound(operations, measured.timing.tokens_per_second, measured.matmul_tflops, stored),
    )


def bench_recipe(recipe: Recipe, options: BenchOptions) -> Recipe:
    """The recipe with random weights, the bytes tokenizer and as many steps as are timed, and nothing but these: what
    is not evaluated is not in the memory estimate either.
    """
    model = recipe.model.model_copy(update={"init": "random", "tokenizer": "bytes"})
    data = recipe.data.model_copy(update={"max_seq_len": options.seq or recipe.data.max_seq_len})
    train = recipe.train.model_copy(
        update={
            "max_steps": _steps(recipe, options),
            "per_device_train_batch_size": options.batch or recipe.train.per_device_train_batch_size,
            "gradient_accumulation_steps": 1,
            "warmup_steps": 0.0,
            "lr_scheduler_type": schedules.CONSTANT,
            "lr_scheduler_kwargs": {},
        }
    )
    logging = LoggingConfig(every_steps=options.steps + 1)
    if not options.evaluation:
        data = data.model_copy(update={"eval": ()})
    return recipe.model_copy(
        update={
            "model": model,
            "data": data,
            "train": train,
            "logging": logging,
            "eval": recipe.eval.model_copy(
                update={
                    "every_steps": None,
                    "per_device_eval_batch_size": train.per_device_train_batch_size,
                    "tasks": (),
                }
            ),
            "checkpoint": recipe.checkpoint.model_copy(update={"every_steps": None}),
        }
    )


def _steps(recipe: Recipe, options: BenchOptions) -> int:
    """All steps: the first, those that are timed, and one to record. Ranks with rows of their own begin with as many,
    each alone.
    """
    timed = 1 + options.steps
    return (2 * timed if _begin_alone(recipe) else timed) + options.profile


def _begin_alone(recipe: Recipe) -> bool:
    launch = recipe.launch
    return launch.num_processes > 1 and launch.context_parallel_size == 1 and not engines.row(launch.engine).spreads


def _sizes(recipe: Recipe, options: BenchOptions, mix: Lengths | None) -> list[int]:
    """Tokens of each row that is trained or evaluated."""
    rows = recipe.train.per_device_train_batch_size * _steps(recipe, options) * recipe.launch.row_shares
    longest = recipe.data.max_seq_len
    return [longest] * rows if mix is None else mix.sample(rows, longest, recipe.run.seed)


def _micro_batches(sizes: Sequence[int], batch: int, options: BenchOptions) -> list[Sequence[int]]:
    """The lengths of the rows of each micro-batch that is timed: of all but the first, if there are others."""
    first = min(options.steps, 1)
    return [sizes[step * batch : (step + 1) * batch] for step in range(first, options.steps + 1)]


def _measure(
    report: PreflightReport, session: Session, options: BenchOptions, sizes: Sequence[int], group: RankGroup | None
) -> Measured:
    import torch

    from ftcli.job import open_job
    from ftcli.pipeline import build
    from ftcli.trainers.bench import (
        Joining,
        StepProfiler,
        StepTimer,
        StepTimes,
        device_memory,
        measure_matmul_rate,
        synthetic_rows,
    )
    from ftcli.trainers.graphed import why_not_graphed
    from ftcli.trainers.hooks import TrainerHooks
    from ftcli.trainers.sft import build_sft_trainer
    from ftcli.trainers.together import numbers_agreed

    job = open_job(report, session)
    batch = job.recipe.train.per_device_train_batch_size
    rate = measure_matmul_rate(job.device, getattr(torch, job.plan.compute))
    model = build.build_trainable(job, num_layers=options.layers)
    tokens = synthetic_rows(sizes, job.vocab_size, job.recipe.run.seed)
    kernels = build.put_on_kernels(job, model, tokens)
    batches = build.laid_out(job, model, tokens)
    timer = StepTimer(job.device)
    last, alone = _steps(job.recipe, options), options.steps + 1 if _begin_alone(job.recipe) else 0
    profiler = StepProfiler(job.device, last) if options.profile else None
    if group is not None:
        group.form(job.device, numbers_agreed(1, batch))
        build.spread(job, model, group)
    with tempfile.TemporaryDirectory(prefix="ftcli-") as scratch:
        trainer = build_sft_trainer(job, model, tokens, TrainerHooks(None, 1, None), scratch, group)
        trainer.add_callback(timer)
        if group is not None and alone:
            trainer.add_callback(Joining(trainer, group, after=alone))
        if profiler is not None:
            trainer.add_callback(profiler)
        if job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.device)
        with session.reporter.progress(None, f"{options.steps + 1} steps of {batch} x {job.recipe.data.max_seq_len}"):
            trainer.train()
    times = timer.times(alone + options.steps + 1)
    by_itself, together = StepTimes(times.seconds[:alone]), StepTimes(times.seconds[alone:])
    shared = job.recipe.launch.context_parallel_size  # of each row, a process has computed its part
    ordered = [-(-sizes[row] // shared) for row in trainer.sampler()]
    micro_batches = _micro_batches(ordered[alone * batch :], batch, options)
    memory, peak = report.memory, trainer.peak_memory_bytes()
    several = None
    if group is not None:
        before = _rate(_micro_batches(ordered, batch, options), by_itself.steady) if alone else None
        several = _several(group, before, micro_batches, together.steady, peak)
    return Measured(
        timing=_timing(micro_batches, times.first, together.steady, options, peak),
        computing=_computing(micro_batches, batches, together.steady),
        device_memory=device_memory(job.device),
        matmul_tflops=rate / 1e12,
        profiled=Profiled(None, None) if profiler is None else Profiled(profiler.table(), profiler.busy()),
        kernels=kernels.summary(),
        self_check=kernels.self_check,
        cuda_graphs=trainer.cuda_graphs() or why_not_graphed(job, model) or "on",
        host=HostMemory(None, None) if memory is None else HostMemory(memory.pinned_host_bytes, memory.offloaded),
        several=several,
    )


def _several(
    group: RankGroup, alone: float | None, micro_batches: Sequence[Sequence[int]], steady: Sequence[float], peak: int
) -> SeveralGpus:
    """All ranks' numbers; the same on each of them."""
    import torch

    tokens, seconds = float(sum(map(sum, micro_batches))), _seconds(micro_batches, steady)
    told = group.gather(torch.tensor([alone or 0.0, tokens, seconds, float(peak)], dtype=torch.float64))
    rows = [row.tolist() for row in told]
    in_all = sum(row[1] for row in rows) / max(row[2] for row in rows)
    peaks = tuple(int(row[3]) for row in rows)
    if alone is None:
        return SeveralGpus(group.size, in_all, None, (), None, peaks)
    each = tuple(row[0] for row in rows)
    return SeveralGpus(group.size, in_all, sum(each), each, in_all / sum(each), peaks)


def _rate(micro_batches: Sequence[Sequence[int]], steady: Sequence[float]) -> float:
    """Tokens per second."""
    return sum(map(sum, micro_batches)) / _seconds(micro_batches, steady)


def _measure_evaluation(
    report: PreflightReport, session: Session, options: BenchOptions, sizes: Sequence[int]
) -> Measured:
    """The loss of `ftcli eval`: the frozen model on the kernels, no gradients, the head in chunks."""
    import torch

    from ftcli.evaluate.suite import Evaluator
    from ftcli.job import open_job
    from ftcli.pipeline.build import build_trainable
    from ftcli.pipeline.evaluation import freeze_on_kernels
    from ftcli.trainers.bench import measure_matmul_rate, synthetic_rows
    from ftcli.trainers.watch import peak_memory_bytes

    job = open_job(report, session)
    batch = job.recipe.train.per_device_train_batch_size
    rate = measure_matmul_rate(job.device, getattr(torch, job.plan.compute))
    model = build_trainable(job, num_layers=options.layers)
    rows = synthetic_rows(sizes, job.vocab_size, job.recipe.run.seed)
    kernels = freeze_on_kernels(job, model, rows)
    evaluator = Evaluator(job, rows)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    seconds = []
    for step in range(options.steps + 1):
        began = time.perf_counter()
        evaluator.loss_of(model, rows[step * batch : (step + 1) * batch])  # waits for the device: it gives numbers
        seconds.append(time.perf_counter() - began)
    micro_batches, steady = _micro_batches(sizes, batch, options), seconds[1:] or seconds
    return Measured(
        timing=_timing(micro_batches, seconds[0], steady, options, peak_memory_bytes()),
        computing=_computing(micro_batches, job.batches(model), steady),
        device_memory=None,
        matmul_tflops=rate / 1e12,
        profiled=None,
        kernels=kernels.summary(),
        self_check=kernels.self_check,
        cuda_graphs="nothing is trained",
        host=None,
    )


def _timing(
    micro_batches: Sequence[Sequence[int]],
    first: float,
    steady: Sequence[float],
    options: BenchOptions,
    peak_bytes: int,
) -> Timing:
    """Of the first step its seconds; of those after it what they achieve, with the lengths of their rows, and the
    memory that they needed.
    """
    median = statistics.median(steady)
    return Timing(
        steps=options.steps,
        first_step_only=options.steps == 0,
        tokens_per_second=_rate(micro_batches, steady),
        step_ms=1000 * median,
        step_ms_min=1000 * min(steady),
        step_ms_max=1000 * max(steady),
        first_step_seconds=first,
        peak_memory_bytes=peak_bytes,
    )


def _seconds(micro_batches: Sequence[Sequence[int]], steady: Sequence[float]) -> float:
    """What all steps take: of one size by their median, which a single slow step does not change."""
    alike = len({tuple(lengths) for lengths in micro_batches}) == 1
    return statistics.median(steady) * len(steady) if alike else sum(steady)


def _computing(micro_batches: Sequence[Sequence[int]], batches: Batches, steady: Sequence[float]) -> TimedTokens:
    shapes = [batches.shape(lengths) for lengths in micro_batches]
    real, computed = sum(map(sum, micro_batches)), sum(rows * width for rows, width in shapes)
    rate = computed / _seconds(micro_batches, steady)
    share = 1.0 - real / computed
    return TimedTokens(real, computed, rate, share, len(set(shapes)), batches.layout, batches.reason)


def _predicted(report: PreflightReport, options: BenchOptions) -> Predicted:
    memory = report.memory
    if memory is None or options.layers is not None:
        return Predicted()
    return Predicted(memory.total_bytes, memory.allocated_bytes if report.device.kind == "cuda" else None)


def _forward(flops: StepFlops, recipe: Recipe) -> float:
    """Operations per token of the forward pass, out of a training step's."""
    passes = 2.0 if recipe.lora is not None else 3.0  # a frozen weight has no gradient of its own
    return (flops.linear + flops.head) / passes + flops.adapters / 3.0 + flops.attention * 2.0 / 7.0


def _stored_rate(flops: StepFlops | None, report: PreflightReport, options: BenchOptions) -> StoredRate:
    """The rate of this machine's products of weights as they are stored, and the share of a step that runs at it."""
    recipe = report.recipe
    products = quantizations.row(recipe.quantization.method).products
    if (
        products is None
        or products.measure_rate is None
        or flops is None
        or why_dequantized(recipe.quantization, report.plan, report.device) is not None
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


def _bound(
    operations: float | None, tokens_per_second: float, matmul_tflops: float, stored: StoredRate
) -> ArithmeticBound:
    if operations is None:
        return ArithmeticBound()
    seconds = (1.0 - stored.share) / matmul_tflops
    if stored.share:
        seconds += stored.share / stored.tflops
    bound = 1e12 / (operations * seconds)
    return ArithmeticBound(operations, bound, tokens_per_second / bound)
