"""Foretells how long a run takes and what it costs, from its tokens and what was measured (`ftcli check --price`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftcli.facts.flops import step_flops
from ftcli.plan.run import RunPlan
from ftcli.tables import speeds


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a recipe's rows: of an epoch of training, its rows or packs, and of the held-out rows; not ``exact``
    where they are reckoned from the size of files.
    """

    tokens: float
    rows: float
    held_out: float = 0.0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of all processes together, within a share, as ``measured_on`` these devices."""

    tokens_per_second: float
    within: float
    measured_on: tuple[str, ...] = speeds.MEASURED


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long a run takes, without downloads, loading, compilation, tasks and checkpoints, and what it costs.

    Attributes:
        tokens: Tokens that are trained on, in ``steps`` optimizer steps.
        within: How far seconds and cost may lie off, as a share.
    """

    steps: int
    tokens: int
    tokens_per_second: float
    seconds: float
    within: float
    price: float
    cost: float
    exact: bool


def why_unknown(plan: RunPlan) -> str | None:
    """The reason why nothing can be foretold of a run; None where something can."""
    if plan.method.name != "sft":
        return f"steps of {plan.method.title} are not foretold, those of supervised fine-tuning are"
    if plan.recipe.quantization.method == "bitnet":
        return "steps of BitNet models are not foretold"
    if plan.dtypes.compute == "float32":
        return "steps in float32 are not foretold, those in 16 bits are"
    if plan.device.dense_tflops is None:
        return f"the rate of {plan.device.name} is not in the table; name a GPU with --as"
    if plan.facts.shape is None:
        return f"the operations of {plan.facts.name} are not known"
    return None


def speed_of(plan: RunPlan, tokens_at_once: float) -> Speed:
    """Tokens per second where micro-batches hold so many tokens. Only where :func:`why_unknown` is None."""
    recipe, facts, train = plan.recipe, plan.facts, plan.recipe.train
    rows = train.per_device_train_batch_size
    policy = train.checkpointing
    length = max(2, round(tokens_at_once / rows)) if not recipe.data.packing else recipe.data.max_seq_len
    flops = step_flops(
        facts,
        recipe.lora,
        seq_len=min(length, recipe.data.max_seq_len),
        gradient_checkpointing=policy,
        uncheckpointed_layers=train.uncheckpointed_layers,
    )
    assert flops is not None
    assert plan.device.dense_tflops is not None
    active = facts.active_parameters or facts.parameters or 0
    share = speeds.share_of(facts.text_type, active, experts=plan.shape.has_experts)
    if flops.recompute:
        share *= speeds.CHECKPOINTED
    if recipe.quantization.method == "fp8":
        share *= speeds.FP8
    if not plan.execution.on_kernels:
        share *= speeds.OFF_KERNELS
    halvings = math.log2(speeds.FULL_TOKENS / max(tokens_at_once, 1))
    share *= max(0.5, 1 - speeds.A_HALVING * max(0.0, halvings))
    ranks = recipe.launch.num_processes
    rate = share * speeds.PRODUCTS * plan.device.dense_tflops * 1e12 / flops.total
    rate *= ranks * (speeds.TOGETHER if ranks > 1 else 1.0)
    known = plan.device.name in speeds.MEASURED or any(name in plan.device.name.lower() for name in speeds.MEASURED)
    known = known and recipe.lora is not None and ranks <= 2
    return Speed(rate, speeds.WITHIN if known else speeds.ELSEWHERE)


def forecast(plan: RunPlan, counted: TokenCounts, price: float) -> Forecast:
    """How long a run over these rows takes, at ``price`` for a GPU and hour. Only where :func:`why_unknown` is None."""
    recipe, train = plan.recipe, plan.recipe.train
    rows, mean = counted.rows, counted.tokens / max(counted.rows, 1)
    if recipe.data.packing:
        rows, mean = max(1.0, counted.tokens / (0.98 * recipe.data.max_seq_len)), 0.98 * recipe.data.max_seq_len
    each = train.per_device_train_batch_size
    batch = each * train.gradient_accumulation_steps * recipe.launch.row_shares
    an_epoch = math.ceil(rows / batch)
    steps = train.max_steps or max(1, math.ceil(an_epoch * train.num_train_epochs))
    tokens = min(steps * batch, rows * steps / an_epoch) * mean
    speed = speed_of(plan, min(each, rows) * mean)
    every = recipe.eval.every_steps
    evaluations = 1 + (0 if every is None else 1 + (steps - 1) // every)
    measured = evaluations * counted.held_out / speeds.EVALUATION if recipe.data.eval else 0.0
    seconds = (tokens + measured) / speed.tokens_per_second
    cost = price * recipe.launch.num_processes * seconds / 3600
    return Forecast(steps, round(tokens), speed.tokens_per_second, seconds, speed.within, price, cost, counted.exact)
