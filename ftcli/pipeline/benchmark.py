"""`ftcli bench`: what this machine makes of the recipe's training step, against its own arithmetic bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.config.training import LoggingConfig
from ftcli.errors import FtcliError, Origin
from ftcli.pipeline import bench_result
from ftcli.pipeline.bench_result import BenchOptions, BenchResult, Measured
from ftcli.pipeline.launch import launched, over_ranks
from ftcli.plain import JsonObject
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.tables import engines, methods, schedules
from ftcli.train.on_rows import row_method

if TYPE_CHECKING:
    from ftcli.data.order import Epochs
    from ftcli.facts.flops import StepFlops
    from ftcli.job import Job
    from ftcli.methods.preference.settings import PreferenceConfig
    from ftcli.plan.batches import Batches
    from ftcli.run.process_group import RankGroup
    from ftcli.train.assembly import Model
    from ftcli.train.loop import StepWatcher
    from ftcli.train.on_rows import RowMethod

#: The method whose steps are timed where the recipe's own are not.
_SUPERVISED = "sft"
#: A row of one token has none that is predicted.
SHORTEST = 2
_LOGNORMAL = "lognormal:"
_LONGEST = 10**9

#: Makes so many lengths in tokens, from 2 to the longest (longer ones are cut), of a seed: a function of these alone.
Lengths = Callable[[int, int, int], list[int]]


def bench(loaded: LoadedRecipe, session: Session, options: BenchOptions) -> BenchResult:
    """:func:`bench_step` in this process, or in each of the ranks that a launcher has started."""
    loaded = over_ranks(loaded, session.place)
    return launched(lambda group: bench_step(loaded, session, options, group), loaded, session)


def bench_step(
    loaded: LoadedRecipe, session: Session, options: BenchOptions, group: RankGroup | None = None
) -> BenchResult:
    """Times ``options.steps`` training steps after the first, on random weights of the recipe's true shape; without
    any, the first (``first_step_only``). The ranks of ``group`` take as many each by itself before.

    The bound is tokens/s over (matmul rate / operations per token), with the rate measured on this machine and the
    operations counted by :mod:`ftcli.facts.flops`. Products of weights as they are stored count at their own rate.
    """
    mix = None if options.lengths is None else lengths_of(options.lengths)
    report = _checked(loaded, session, options)
    left_out = _left_out(report, options)
    report = _of_first_layers(report, options, left_out)
    recipe = report.recipe
    sizes = _sizes(recipe, options, mix)
    measured = _measure(report, session, options, sizes, group)
    if (reason := without_graphs(loaded.recipe, recipe)) is not None:
        measured = replace(measured, cuda_graphs=reason)
    flops = _with_reference(bench_result.flops_of(report, options, sizes, left_out), report, sizes, options)
    stored = bench_result.stored_rate(flops, report)
    return BenchResult(
        recipe=str(loaded.path),
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
        predicted=bench_result.predicted_memory(report, options),
        bound=bench_result.arithmetic_bound(
            None if flops is None else flops.total,
            measured.timing.tokens_per_second,
            measured.matmul_tflops,
            stored,
        ),
    )


def lengths_of(text: str) -> Lengths:
    """``lognormal:MEAN,SIGMA``; the mean is that of the lengths before any cut. Raises FtcliError FT157 (exit 2)."""
    try:
        mean, sigma = (float(part) for part in text.removeprefix(_LOGNORMAL).split(","))
        sound = text.startswith(_LOGNORMAL) and SHORTEST <= mean <= _LONGEST and 0.0 <= sigma <= 4.0  # NaN is not
    except ValueError:
        sound = False
    if not sound:
        message = f"{text!r} names no mean of at least {SHORTEST} tokens, and a sigma from 0 to 4"
        help = "write lognormal:MEAN,SIGMA, as in lognormal:380,0.8"
        raise FtcliError.single("FT157", message, origin=Origin("--lengths"), help=help)
    around = math.log(mean) - sigma**2 / 2

    def drawn(count: int, longest: int, seed: int) -> list[int]:
        found = np.random.default_rng(seed).lognormal(around, sigma, count)
        return [int(length) for length in np.clip(np.rint(found), SHORTEST, longest)]

    return drawn


def without_graphs(asked: Recipe, timed: Recipe) -> str | None:
    """The reason why steps are timed without the graphs that the recipe asks for; None if the recipe's own will do."""
    if not asked.train.cuda_graphs or timed.train.cuda_graphs:
        return None
    tokens = timed.train.per_device_train_batch_size * timed.data.max_seq_len
    return f"a micro-batch of {tokens:,} tokens keeps the GPU busy"


def _checked(loaded: LoadedRecipe, session: Session, options: BenchOptions) -> PreflightReport:
    """Preflight of what is timed."""
    method, timed = methods.row(loaded.recipe.train.method), _timed(loaded.recipe)
    if method.name != timed:
        title = methods.row(timed).title
        session.reporter.info(f"what is timed are steps of {title} at this batch, not of {method.title}")
    shortened = replace(loaded, recipe=bench_recipe(loaded.recipe, options))
    prompt = options.prompt_of(shortened.recipe.data.max_seq_len)
    report = checked(shortened, session, "bench", prompt_tokens=prompt)
    plan = report.plan
    if options.lengths is None and plan.graphed and not plan.wholly_graphed:
        # All micro-batches are of the largest size, which no graph takes.
        shortened = replace(shortened, recipe=shortened.recipe.changed({"train.cuda_graphs": False}))
        report = checked(shortened, session, "bench", prompt_tokens=prompt)
    if report.checkpointing.requested == "auto":
        session.reporter.info(f"gradient_checkpointing: {report.checkpointing}")
    return report


def _left_out(report: PreflightReport, options: BenchOptions) -> int:
    """Layers that are not checkpointed: of fewer layers than the model has, the same share."""
    left_out, shape = report.checkpointing.uncheckpointed_layers, report.facts.shape
    if options.layers is None or shape is None:
        return left_out
    return left_out * options.layers // shape.num_layers


def _of_first_layers(report: PreflightReport, options: BenchOptions, left_out: int) -> PreflightReport:
    """Of fewer layers than the model has, ``left_out`` are not checkpointed, and graphs take as much less at once."""
    shape = report.facts.shape
    if options.layers is None or shape is None:
        return report
    report = replace(report, plan=report.plan.changed({"train.uncheckpointed_layers": left_out}))
    if report.memory is None:
        return report
    pool = report.memory.graph_pool_bytes * options.layers // shape.num_layers
    return replace(report, memory=replace(report.memory, graph_pool_bytes=pool))


def _timed(recipe: Recipe) -> str:
    """The method whose steps are timed."""
    return recipe.train.method if methods.row(recipe.train.method).timed else _SUPERVISED


def bench_recipe(recipe: Recipe, options: BenchOptions) -> Recipe:
    """The recipe with random weights, the bytes tokenizer and as many steps as are timed, and nothing but these: what
    is not evaluated is not in the memory estimate either.
    """
    method = _timed(recipe)
    own = method == recipe.train.method
    batch = options.batch or recipe.train.per_device_train_batch_size
    changes: JsonObject = {
        "model.init": "random",
        "model.tokenizer": "bytes",
        "data.max_seq_len": options.seq or recipe.data.max_seq_len,
        "data.format": recipe.data.format if own and method != _SUPERVISED else "auto",
        "train.method": method,
        "train.max_steps": _steps(recipe, options),
        "train.per_device_train_batch_size": batch,
        "train.gradient_accumulation_steps": 1,
        "train.warmup_steps": 0.0,
        "train.lr_scheduler_type": schedules.CONSTANT,
        "train.lr_scheduler_kwargs": {},
        "logging": LoggingConfig(every_steps=options.steps + 1),
        "eval.every_steps": None,
        "eval.tasks": (),
        "checkpoint.every_steps": None,
        "data.eval": (),
    }
    if not own:
        changes |= dict.fromkeys(methods.sections())
    elif recipe.preference is not None:
        changes["preference"] = _timed_preference(recipe, recipe.preference)
    return recipe.changed(changes)


def _timed_preference(recipe: Recipe, preference: PreferenceConfig) -> PreferenceConfig:
    """The section of what is timed: a reference is known ahead where the run would know it, whichever model it is."""
    from ftcli.methods.preference.checks import other_model

    asks = other_model(recipe) is not None
    sees_again = recipe.train.max_steps is None and recipe.train.num_train_epochs > 1
    if not asks and (preference.reference_cache != "auto" or not sees_again):
        return preference
    changed = {"reference": None, "reference_revision": None} if asks else {}
    return preference.model_copy(update={**changed, "reference_cache": "./ahead"})  # where nothing is written


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
    """Tokens of each row that is trained."""
    rows = _rows(recipe) * _steps(recipe, options) * recipe.launch.row_shares
    longest = recipe.data.max_seq_len
    return [longest] * rows if mix is None else mix(rows, longest, recipe.run.seed)


def _rows(recipe: Recipe) -> int:
    """Rows of a step of one process."""
    return recipe.train.per_device_train_batch_size * methods.row(recipe.train.method).unit


def _with_reference(
    flops: StepFlops | None, report: PreflightReport, sizes: Sequence[int], options: BenchOptions
) -> StepFlops | None:
    """Of pairs: the head meets the answers alone, and a reference that each step computes is a forward pass more. A
    reward model has no head, and compares with nothing.
    """
    recipe = report.recipe
    if flops is None or report.plan.method.unit == 1:
        return flops
    if report.plan.method.classifier:
        return replace(flops, head=0.0)
    from ftcli.methods.preference.checks import caches, compares
    from ftcli.methods.preference.settings import PreferenceConfig

    prompts = sum(map(options.prompt_of, sizes))
    answers = 1.0 - prompts / sum(sizes)
    settings = recipe.preference or PreferenceConfig()
    live = compares(recipe.train.method, settings) and not caches(recipe, "surely")
    passes = 2.0 if recipe.lora is not None else 3.0
    one, attention = (1.0 / passes, 2.0 / 7.0) if live else (0.0, 0.0)
    return replace(
        flops,
        linear=flops.linear * (1.0 + one),
        head=flops.head * answers * (1.0 + one),
        attention=flops.attention * (1.0 + attention),
    )


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
    from ftcli.train.build import why_not_graphed

    job = open_job(report, session)
    rate = measure_matmul_rate(job.device, getattr(torch, job.dtypes.compute))
    model = assembly.build_trainable(job, num_layers=options.layers)
    method, seed = row_method(report.plan.method), job.recipe.run.seed
    epochs = method.synthetic(synthetic_rows(sizes, job.vocab_size, seed), options.prompt, seed)
    kernels = assembly.put_on_kernels(job, model, epochs.sequences)
    batches = assembly.laid_out(job, model, epochs.sequences)
    last, alone = _steps(job.recipe, options), options.steps + 1 if _begin_alone(job.recipe) else 0
    timer, profiler = StepTimer(job.device), StepProfiler(job.device, last) if options.profile else None
    trainer = _train(job, model, method, epochs, options, [timer, profiler], group, alone)
    times = timer.times(alone + options.steps + 1)
    by_itself, together = StepTimes(times.seconds[:alone]), StepTimes(times.seconds[alone:])
    shared = job.recipe.launch.context_parallel_size  # of each row, a process has computed its part
    units = [unit for batch in trainer.objective.order(0) for unit in batch]
    ordered = [-(-size // shared) for unit in units for size in _lengths(epochs, unit, batches)]
    batch = _rows(job.recipe)
    micro_batches = bench_result.timed_batches(ordered[alone * batch :], batch, options)
    memory, peak = report.memory, trainer.peak_memory_bytes()
    several = None
    if group is not None:
        before = (
            bench_result.tokens_per_second(bench_result.timed_batches(ordered, batch, options), by_itself.steady)
            if alone
            else None
        )
        several = bench_result.rates_of_ranks(group, before, micro_batches, together.steady, peak)
    return Measured(
        timing=bench_result.timing(micro_batches, times.first, together.steady, options, peak, report.plan.method.unit),
        computing=bench_result.timed_tokens(micro_batches, batches, together.steady),
        device_memory=device_memory(job.device),
        matmul_tflops=rate / 1e12,
        profile=None if profiler is None else profiler.table(),
        gpu_time=None if profiler is None else profiler.busy(),
        kernels=kernels.summary(),
        self_check=kernels.self_check,
        cuda_graphs=trainer.cuda_graphs() or why_not_graphed(job, model) or "on",
        pinned_host_bytes=None if memory is None else memory.pinned_host_bytes,
        offloaded=None if memory is None else memory.offloaded,
        several=several,
    )


def _lengths(epochs: Epochs, unit: int, batches: Batches) -> list[int]:
    """Tokens of each row of a unit; those that a pair shares count once where they are computed once."""
    from ftcli.data.collate import lengths_once

    rows = epochs.members(unit)
    return lengths_once(rows).tolist() if batches.shares_prompts else [len(row.input_ids) for row in rows]


def _train(
    job: Job,
    model: Model,
    method: RowMethod,
    epochs: Epochs,
    options: BenchOptions,
    watching: Sequence[StepWatcher | None],
    group: RankGroup | None,
    alone: int,
) -> Any:
    """Takes all steps, the first ``alone`` without the other ranks; the loop that took them."""
    import torch

    from ftcli.train import assembly
    from ftcli.train.bench import Joining
    from ftcli.train.loop import TrainerHooks

    reference = assembly.build_reference(job, epochs.sequences) if method.needs_reference(job.recipe) else None
    if group is not None:
        assembly.form_group(job, group)
        assembly.shard_weights(job, model, group, reference)
    train = job.recipe.train
    reference = method.before_training(job, model, epochs, [], group, reference, keep=False)
    loop = method.build(job, model, epochs, TrainerHooks(None, 1, None), group, reference)
    loop.watchers += [watcher for watcher in watching if watcher is not None]
    if group is not None and alone:
        loop.watchers.append(Joining(loop.parallel, group, after=alone))
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    what = f"{options.steps + 1} steps of {train.per_device_train_batch_size} x {job.recipe.data.max_seq_len}"
    with job.reporter.progress(None, what):
        loop.run(None)
    return loop
