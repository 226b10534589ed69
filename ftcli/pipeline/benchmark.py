"""`ftcli bench`: what this machine makes of the recipe's training step, against its own arithmetic bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.config.training import LoggingConfig
from ftcli.data.lengths import Lengths, lengths_of
from ftcli.pipeline.bench_rates import (
    arithmetic_bound,
    flops_of,
    operations_per_token,
    predicted_memory,
    rates_of_ranks,
    stored_rate,
    timed_batches,
    timed_tokens,
    timing,
    tokens_per_second,
)
from ftcli.pipeline.bench_result import BenchResult, HostMemory, Measured, ProfiledStep
from ftcli.pipeline.options import BenchOptions
from ftcli.preflight.checks.context import Command
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.tables import engines, methods, schedules

if TYPE_CHECKING:
    from ftcli.data.tokens import TokenizedRow
    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup
    from ftcli.train.assembly import Model
    from ftcli.train.loop import StepWatcher

#: The method whose steps are timed, whatever the recipe trains by.
_TIMED = "sft"


def bench_step(
    loaded: LoadedRecipe, session: Session, options: BenchOptions, group: RankGroup | None = None
) -> BenchResult:
    """Times ``options.steps`` training steps (or evaluation batches) after the first, on random weights of the recipe's
    true shape. Without any, the first is reported, with all that is set up in it (``first_step_only``).

    The bound is tokens/s over (matmul rate / operations per token), with the rate measured on this machine and the
    operations counted by :mod:`ftcli.facts.flops`. Products of weights as they are stored count at their own rate.

    The ranks of ``group`` take as many steps each by itself before, which is what the steps together are compared with.
    """
    mix = None if options.lengths is None else lengths_of(options.lengths)
    report = _checked(loaded, session, options)
    left_out = _left_out(report, options)
    if options.layers is not None and report.facts.shape is not None:
        report = replace(report, plan=report.plan.changed({"train.uncheckpointed_layers": left_out}))
    recipe = report.recipe
    sizes = _sizes(recipe, options, mix)
    if options.evaluation:
        measured = _measure_evaluation(report, session, options, sizes)
    else:
        measured = _measure(report, session, options, sizes, group)
    flops = flops_of(report, options, sizes, left_out)
    stored = stored_rate(flops, report, options)
    return BenchResult(
        recipe=str(loaded.path),
        mode="evaluation" if options.evaluation else "training",
        model=recipe.model.name_or_path,
        device=report.device.name,
        dtype=report.dtypes.compute,
        batch=recipe.train.per_device_train_batch_size,
        seq=recipe.data.max_seq_len,
        lengths=options.lengths,
        layers=options.layers,
        gradient_checkpointing=report.checkpointing.policy,
        uncheckpointed_layers=left_out,
        measured=measured,
        stored=stored,
        predicted=predicted_memory(report, options),
        bound=arithmetic_bound(
            operations_per_token(flops, recipe, options),
            measured.timing.tokens_per_second,
            measured.matmul_tflops,
            stored,
        ),
    )


def _checked(loaded: LoadedRecipe, session: Session, options: BenchOptions) -> PreflightReport:
    """Preflight of what is timed."""
    method = methods.row(loaded.recipe.train.method)
    if method.name != _TIMED:
        title = methods.row(_TIMED).title
        session.reporter.info(f"what is timed are steps of {title} at this batch, not of {method.title}")
    shortened = replace(loaded, recipe=bench_recipe(loaded.recipe, options))
    command: Command = "bench --eval" if options.evaluation else "bench"
    report = checked(shortened, session, command)
    plan = report.plan
    if options.lengths is None and plan.trains and plan.graphed and not plan.wholly_graphed:
        # All micro-batches are of the largest size, which no graph takes.
        train = shortened.recipe.train.model_copy(update={"cuda_graphs": False})
        shortened = replace(shortened, recipe=shortened.recipe.model_copy(update={"train": train}))
        report = checked(shortened, session, command)
    if report.checkpointing.requested == "auto":
        session.reporter.info(f"gradient_checkpointing: {report.checkpointing}")
    return report


def _left_out(report: PreflightReport, options: BenchOptions) -> int:
    """Layers that are not checkpointed: of fewer layers than the model has, the same share."""
    left_out, shape = report.checkpointing.uncheckpointed_layers, report.facts.shape
    if options.layers is None or shape is None:
        return left_out
    return left_out * options.layers // shape.num_layers


def bench_recipe(recipe: Recipe, options: BenchOptions) -> Recipe:
    """The recipe with random weights, the bytes tokenizer and as many supervised steps as are timed, and nothing but
    these: what is not evaluated is not in the memory estimate either.
    """
    model = recipe.model.model_copy(update={"init": "random", "tokenizer": "bytes"})
    data = recipe.data.model_copy(update={"max_seq_len": options.seq or recipe.data.max_seq_len, "format": "auto"})
    train = recipe.train.model_copy(
        update={
            "method": _TIMED,
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
            **{section: None for section in methods.sections() if recipe.train.method != _TIMED},
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
    return launch.num_processes > 1 and launch.context_parallel_size == 1 and not engines.row(launch.engine).shards


def _sizes(recipe: Recipe, options: BenchOptions, mix: Lengths | None) -> list[int]:
    """Tokens of each row that is trained or evaluated."""
    rows = recipe.train.per_device_train_batch_size * _steps(recipe, options) * recipe.launch.row_shares
    longest = recipe.data.max_seq_len
    return [longest] * rows if mix is None else mix.sample(rows, longest, recipe.run.seed)


def _measure(
    report: PreflightReport, session: Session, options: BenchOptions, sizes: Sequence[int], group: RankGroup | None
) -> Measured:
    import torch

    from ftcli.job import open_job
    from ftcli.train import assembly
    from ftcli.train.bench import (
        StepProfiler,
        StepTimer,
        StepTimes,
        device_memory,
        measure_matmul_rate,
        synthetic_rows,
    )
    from ftcli.train.graphed import why_not_graphed

    job = open_job(report, session)
    rate = measure_matmul_rate(job.device, getattr(torch, job.dtypes.compute))
    model = assembly.build_trainable(job, num_layers=options.layers)
    rows = synthetic_rows(sizes, job.vocab_size, job.recipe.run.seed)
    kernels = assembly.put_on_kernels(job, model, rows)
    batches = assembly.laid_out(job, model, rows)
    last, alone = _steps(job.recipe, options), options.steps + 1 if _begin_alone(job.recipe) else 0
    timer, profiler = StepTimer(job.device), StepProfiler(job.device, last) if options.profile else None
    trainer = _train(job, model, rows, options, [timer, profiler], group, alone)
    times = timer.times(alone + options.steps + 1)
    by_itself, together = StepTimes(times.seconds[:alone]), StepTimes(times.seconds[alone:])
    shared = job.recipe.launch.context_parallel_size  # of each row, a process has computed its part
    ordered = [-(-sizes[row] // shared) for batch in trainer.objective.order(0) for row in batch]
    batch = job.recipe.train.per_device_train_batch_size
    micro_batches = timed_batches(ordered[alone * batch :], batch, options)
    memory, peak = report.memory, trainer.peak_memory_bytes()
    several = None
    if group is not None:
        before = tokens_per_second(timed_batches(ordered, batch, options), by_itself.steady) if alone else None
        several = rates_of_ranks(group, before, micro_batches, together.steady, peak)
    return Measured(
        timing=timing(micro_batches, times.first, together.steady, options, peak),
        computing=timed_tokens(micro_batches, batches, together.steady),
        device_memory=device_memory(job.device),
        matmul_tflops=rate / 1e12,
        profiled=ProfiledStep(None, None) if profiler is None else ProfiledStep(profiler.table(), profiler.busy()),
        kernels=kernels.summary(),
        self_check=kernels.self_check,
        cuda_graphs=trainer.cuda_graphs() or why_not_graphed(job, model) or "on",
        host=HostMemory(None, None) if memory is None else HostMemory(memory.pinned_host_bytes, memory.offloaded),
        several=several,
    )


def _train(
    job: Job,
    model: Model,
    rows: Sequence[TokenizedRow],
    options: BenchOptions,
    watching: Sequence[StepWatcher | None],
    group: RankGroup | None,
    alone: int,
) -> Any:
    """Takes all steps, the first ``alone`` without the other ranks; the loop that took them."""
    import torch

    from ftcli.methods.sft.objective import build_sft
    from ftcli.train import assembly
    from ftcli.train.bench import Joining
    from ftcli.train.loop import TrainerHooks

    if group is not None:
        assembly.form_group(job, group)
        assembly.shard_weights(job, model, group)
    train = job.recipe.train
    loop = build_sft(job, model, rows, TrainerHooks(None, 1, None), group)
    loop.watchers += [watcher for watcher in watching if watcher is not None]
    if group is not None and alone:
        loop.watchers.append(Joining(loop.parallel, group, after=alone))
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    what = f"{options.steps + 1} steps of {train.per_device_train_batch_size} x {job.recipe.data.max_seq_len}"
    with job.reporter.progress(None, what):
        loop.run(None)
    return loop


def _measure_evaluation(
    report: PreflightReport, session: Session, options: BenchOptions, sizes: Sequence[int]
) -> Measured:
    """The loss of `ftcli eval`: the frozen model on the kernels, no gradients, the head in chunks."""
    import torch

    from ftcli.evaluate.suite import Evaluator
    from ftcli.job import open_job
    from ftcli.pipeline.evaluation import freeze_on_kernels
    from ftcli.train.assembly import build_trainable
    from ftcli.train.bench import measure_matmul_rate, synthetic_rows
    from ftcli.train.watch import peak_memory_bytes

    job = open_job(report, session)
    batch = job.recipe.train.per_device_train_batch_size
    rate = measure_matmul_rate(job.device, getattr(torch, job.dtypes.compute))
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
    micro_batches, steady = timed_batches(sizes, batch, options), seconds[1:] or seconds
    return Measured(
        timing=timing(micro_batches, seconds[0], steady, options, peak_memory_bytes()),
        computing=timed_tokens(micro_batches, job.batches(model), steady),
        device_memory=None,
        matmul_tflops=rate / 1e12,
        profiled=None,
        kernels=kernels.summary(),
        self_check=kernels.self_check,
        cuda_graphs="nothing is trained",
        host=None,
    )
