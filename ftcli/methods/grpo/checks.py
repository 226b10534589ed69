"""Rules of the section `grpo`: TRL's batch arithmetic, lengths, and rewards; and the memory of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ftcli.config.evaluation import RewardConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.generation import MOST_ROWS, MOST_WAITING
from ftcli.judges import missing_answer, reserved_column
from ftcli.methods.distill.checks import (
    column_findings,
    length_findings,
    teacher_bytes,
    teacher_findings,
    teacher_model,
)
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.paths import expanded
from ftcli.plan.run import Generation, MethodMemory, OtherModel, RunPlan
from ftcli.preflight.checks.context import Context, Findings, Found, NotMade
from ftcli.preflight.checks.data import FirstRows
from ftcli.preflight.checks.judging import class_findings, function_findings, judge_findings
from ftcli.tables import judges, layouts


def check(context: Context) -> Found:
    """For commands that train with it: FT260 to FT265, FT270, FT274, FT276 to FT281, FT288; FT451, FT452 for files."""
    grpo = context.recipe.grpo
    if context.method.section is None:
        return
    if grpo is None:
        help = "add one with num_generations and rewards; `ftcli recipes show smoke-grpo` is an example"
        yield context.error("FT260", "", "`ftcli grpo` needs the section `grpo`", help=help)
        return
    yield from length_findings(context, grpo, "grpo")
    rules = _batch, reference_findings, _clips, _unread_settings, _sampling, _stops
    for rule in (*rules, _early_stopping, _environment, _teacher, _server):
        yield from rule(context, grpo)
    yield from check_rewards(context)


def check_rewards(context: Context) -> Findings:
    """For whatever asks the rewards: FT263 to FT265, FT280; FT451, FT452 for files."""
    if context.recipe.rewards and not any(reward.weight for reward in context.recipe.rewards):
        yield context.error(
            "FT263",
            "grpo.rewards",
            "every reward in grpo.rewards has weight 0, so nothing is rewarded",
            help="leave weight out of one of them: it is 1 then",
        )
    for index, reward in enumerate(context.recipe.rewards):
        yield from _reward(context, f"grpo.rewards.{index}", reward)


def check_rows(context: Context, first: FirstRows) -> Findings:
    """FT453 for rewards that compare with a column which the rows of ``data.train`` do not have; FT454 for columns of
    names that are taken.
    """
    grpo = context.recipe.grpo
    if grpo is None:
        return
    yield from column_findings(grpo, "grpo", first)
    columns = set.intersection(*(set(row.fields) for row in first.rows))
    taken = reserved_column(columns)
    if taken is not None:
        yield replace(taken, origin=first.rows[0].origin)
    if first.layout is not None and layouts.row(first.layout).asks:
        columns.add("answer")  # judges get the row's answer under this name
    for reward in grpo.rewards:
        missing = missing_answer(reward, columns)
        if missing is not None:
            yield replace(missing, origin=first.rows[0].origin)


def _batch(context: Context, grpo: GrpoConfig) -> Findings:
    # TRL 1.16, GRPOConfig.__post_init__: one generation batch serves steps_per_generation micro-batches, which is the
    # accumulation unless set, and must hold whole groups.
    train, group = context.recipe.train, grpo.num_generations
    rows, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    processes = context.recipe.launch.num_processes
    steps, own = grpo.micro_batches(accumulation), grpo.steps_per_generation is not None
    key = "grpo.steps_per_generation" if own else "train.gradient_accumulation_steps"
    if own and steps % accumulation:
        yield context.error(
            "FT261",
            key,
            f"{key} {steps} is not a multiple of train.gradient_accumulation_steps {accumulation}: an optimizer step "
            "would learn from completions of two policies",
            help=f"use {key}: {accumulation * -(-steps // accumulation)}",
        )
        return
    batch = rows * steps * processes
    if batch % group == 0:
        return
    spread = f"{rows} × {steps}" + (f" × {processes} processes" if processes > 1 else "")
    by = accumulation if own else 1
    fitting = next(s for s in range(steps + by, steps + by * group + 1, by) if rows * s * processes % group == 0)
    yield context.error(
        "FT261",
        "grpo.num_generations",
        f"grpo.num_generations {group} does not divide the generation batch of {batch} completions ({spread}: "
        f"per_device_train_batch_size × {key.rpartition('.')[2]})",
        help=f"use {key}: {fitting}"
        + (f", or grpo.num_generations: {_divisor(batch, group)}" if _divisor(batch, group) else ""),
    )


def _divisor(batch: int, below: int) -> int | None:
    return next((n for n in range(min(below, batch), 1, -1) if batch % n == 0), None)


#: Losses that clip no ratio, and the keys that they do not read.
_UNREAD_CLIPS = {
    "cispo": ("epsilon", "delta"),
    "sapo": ("epsilon", "epsilon_high", "delta"),
    "vespo": ("epsilon", "epsilon_high", "delta", "importance_sampling_level"),
}


def _clips(context: Context, grpo: GrpoConfig) -> Findings:
    """FT270 and FT276. TRL 1.16, GRPOTrainer._compute_loss."""
    if grpo.epsilon_high is not None and grpo.epsilon_high < grpo.epsilon:
        message = f"grpo.epsilon_high {grpo.epsilon_high:g} is below grpo.epsilon {grpo.epsilon:g}"
        help = "clip-higher means an upper clip above the lower one, such as 0.28 over 0.2"
        yield context.error("FT270", "grpo.epsilon_high", message, help=help)
    loss = grpo.loss_type
    for name in _UNREAD_CLIPS.get(loss, ()):
        if context.says(f"grpo.{name}"):
            message = f"grpo.{name} is not read by grpo.loss_type: {loss}"
            yield context.error("FT276", f"grpo.{name}", message, help="remove it")
    if loss == "cispo" and (grpo.epsilon_high is None or grpo.epsilon_high < 1):
        yield context.error(
            "FT276",
            "grpo.epsilon_high",
            "grpo.loss_type: cispo caps the ratio itself at grpo.epsilon_high, "
            + ("which is not set" if grpo.epsilon_high is None else f"and {grpo.epsilon_high:g} is below every ratio"),
            help="use grpo.epsilon_high: 5.0",
        )
    highest = 1 + (grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high)
    if grpo.delta is not None and grpo.delta <= highest and "delta" not in _UNREAD_CLIPS.get(loss, ()):
        message = f"grpo.delta {grpo.delta:g} is not above the upper clip, {highest:g}: it would bound every ratio"
        yield context.error("FT270", "grpo.delta", message, help="4 is a common value")
    if loss == "luspo" and grpo.importance_sampling_level == "token":
        message = "grpo.loss_type: luspo is meant for one ratio per completion, and importance_sampling_level is token"
        help = "use grpo.importance_sampling_level: sequence"
        yield context.warning("FT276", "grpo.importance_sampling_level", message, help=help)


#: Settings that nothing reads, by what else is said: the key, when, and that in words.
_UNREAD: tuple[tuple[str, Callable[[GrpoConfig], bool], str], ...] = (
    ("scale_rewards", lambda g: g.advantage_estimator.startswith("reinforce"), "which scales over all completions"),
    ("scale_rewards", lambda g: _is_gdpo(g), "where each reward is scaled in its group"),
    (
        "advantage_estimator",
        lambda g: _is_gdpo(g) and g.advantage_estimator != "grpo",
        "where each reward is by itself",
    ),
    (
        "max_resample_times",
        lambda g: g.advantage_estimator == "reinforce_plus_plus" or g.teacher_coef > 0,
        "where groups without spread teach, too",
    ),
    ("overlong_penalty", lambda g: g.overlong_buffer is None, "without grpo.overlong_buffer"),
    ("use_bias_correction_kl", lambda g: not g.beta, "without grpo.beta"),
    ("sync_ref_model", lambda g: not g.beta, "without grpo.beta, where there is no reference"),
    ("ref_model_mixup_alpha", lambda g: not g.sync_ref_model, "without grpo.sync_ref_model"),
    ("ref_model_sync_steps", lambda g: not g.sync_ref_model, "without grpo.sync_ref_model"),
    (
        "steps_ahead",
        lambda g: g.steps_ahead > 0 and g.server is None,
        "without grpo.server: on one GPU sampling beside training gains nothing (docs/performance.md)",
    ),
    ("steps_ahead", lambda g: g.steps_ahead > 0 and g.environment is not None, "with grpo.environment"),
    *(
        (name, lambda g: not g.teacher_coef, "without grpo.teacher_coef")
        for name in ("teacher", "teacher_revision", "teacher_quantization", "teacher_column")
    ),
)


def _is_gdpo(grpo: GrpoConfig) -> bool:
    return grpo.multi_objective_aggregation == "normalize_then_sum"


def _unread_settings(context: Context, grpo: GrpoConfig) -> Findings:
    """FT276."""
    for name, unread, why in _UNREAD:
        if unread(grpo) and context.says(f"grpo.{name}"):
            yield context.error("FT276", f"grpo.{name}", f"grpo.{name} is not read {why}", help="remove it")
    if grpo.overlong_buffer is not None and grpo.overlong_buffer >= grpo.max_completion_length:
        message = (
            f"grpo.overlong_buffer {grpo.overlong_buffer} is not below grpo.max_completion_length "
            f"{grpo.max_completion_length}: every completion would be punished"
        )
        help = f"a quarter of the length is common: {max(1, grpo.max_completion_length // 4)}"
        yield context.error("FT276", "grpo.overlong_buffer", message, help=help)


def _environment(context: Context, grpo: GrpoConfig) -> Findings:
    """FT451 and FT452 for the file of an environment, which is not run; FT263 where nothing could be rewarded."""
    settings = grpo.environment
    if settings is None:
        if not grpo.rewards and not grpo.teacher_coef:
            help = "add `- use: exact_match`"
            yield context.error("FT263", "grpo.rewards", "grpo.rewards is empty, so nothing is rewarded", help=help)
        return
    yield from class_findings(context, "grpo.environment.file", settings.file)
    if not settings.weight and not any(reward.weight for reward in grpo.rewards):
        message = "grpo.environment.weight is 0, and there is no other reward, so nothing is rewarded"
        yield context.error("FT263", "grpo.environment.weight", message, help="remove it: it is 1 then")


def other_model(recipe: Recipe) -> OtherModel | None:
    """The teacher, where it is another model."""
    grpo = recipe.grpo
    return None if grpo is None or not grpo.teacher_coef else teacher_model(recipe, grpo, "grpo")


def _teacher(context: Context, grpo: GrpoConfig) -> Findings:
    """FT274, FT276 and FT288."""
    if not grpo.teacher_coef:
        return
    yield from teacher_findings(context, grpo, "grpo", alone=not (grpo.rewards or grpo.environment))
    if grpo.teacher_column is not None and grpo.environment is not None:
        message = "grpo.teacher_column is not read where an environment writes the prompts"
        yield context.error("FT276", "grpo.teacher_column", message, help="remove it")


def _server(context: Context, grpo: GrpoConfig) -> Found:
    """FT276 for what a server cannot be given; whether it answers is seen when training begins."""
    if grpo.server is None:
        return
    lora, processes = context.recipe.lora, context.recipe.launch.num_processes
    for refused, why in (
        (lora is None, "gets adapters, and all weights are trained: add lora"),
        (lora is not None and lora.changes_base, "has the base as it was, which init_lora_weights changes"),
        (processes > 1, "is asked by one process, and launch.num_processes says more"),
    ):
        if refused:
            message, help = f"grpo.server {why}", "remove grpo.server, and rollouts are sampled here"
            yield context.error("FT276", "grpo.server", message, help=help)
    if context.command == "check":
        yield NotMade("grpo.server", "it is asked when training begins")


def _early_stopping(context: Context, grpo: GrpoConfig) -> Findings:
    """FT279: stops that no run of this length reaches."""
    stops, steps, path = grpo.early_stopping, context.recipe.train.max_steps, "grpo.early_stopping"
    if stops is None:
        return
    if stops.reward is None and stops.entropy is None:
        message = f"{path} names neither reward nor entropy, so nothing ends training"
        yield context.warning("FT279", path, message, help="add `reward: {}` or `entropy: {}`, or remove it")
    if stops.reward is not None and steps is not None:
        window, patience = stops.reward.window, stops.reward.patience
        train = context.recipe.train
        sets = grpo.micro_batches(train.gradient_accumulation_steps) // train.gradient_accumulation_steps
        needed = window * (1 + patience) * grpo.num_iterations * max(1, sets)
        if needed > steps:
            yield context.warning(
                "FT279",
                f"{path}.reward",
                f"{path}.reward needs {needed} steps ({1 + patience} measurements of {window} rollouts), and "
                f"train.max_steps is {steps}",
                help="lower window or patience",
            )
    if stops.entropy is not None and steps is not None and stops.entropy.patience > steps:
        message = f"{path}.entropy needs {stops.entropy.patience} steps, and train.max_steps is {steps}"
        yield context.warning("FT279", f"{path}.entropy", message, help="lower patience")


def _sampling(context: Context, grpo: GrpoConfig) -> Findings:
    """FT277: completions from a distribution that the log-probabilities of training are not those of."""
    for name, on in (("top_p", grpo.top_p < 1), ("top_k", grpo.top_k > 0)):
        if on:
            value = f"grpo.{name}: {getattr(grpo, name):g}"
            yield context.error(
                "FT277",
                f"grpo.{name}",
                f"{value} samples from some of the tokens, while training's log-probabilities cover all of them: the "
                "gradients would be those of another policy",
                help=f"remove grpo.{name}; grpo.temperature counts in both",
            )


def _stops(context: Context, grpo: GrpoConfig) -> Findings:
    """FT281. TRL 1.16, GRPOTrainer._generate_and_score_completions: whole is what ends with a token."""
    if grpo.stop_strings and grpo.mask_truncated_completions:
        message = "grpo.mask_truncated_completions would leave completions that end at a stop string out of the loss"
        yield context.error("FT281", "grpo.stop_strings", message, help="remove one of them")


def reference_findings(context: Context, grpo: GrpoConfig) -> Findings:
    """FT274 for adapters that take over a part of the base, where the base is what `grpo.beta` compares with, and for
    such as are to be mixed with earlier ones.
    """
    lora = context.recipe.lora
    if lora is not None and grpo.beta and grpo.sync_ref_model and grpo.ref_model_mixup_alpha < 1:
        message = (
            f"grpo.ref_model_mixup_alpha {grpo.ref_model_mixup_alpha:g} would mix A and B of adapters each for itself, "
            "which is no mixture of what they add"
        )
        help = "use grpo.ref_model_mixup_alpha: 1, with which the reference is the policy of some steps ago"
        yield context.error("FT274", "grpo.ref_model_mixup_alpha", message, help=help)
    if lora is None or not lora.changes_base or not grpo.beta:
        return
    yield context.error(
        "FT274",
        "lora.init_lora_weights",
        f"init_lora_weights: {lora.init_lora_weights} changes the base weights, which grpo.beta uses as the reference "
        "(the model without adapters)",
        help="use grpo.beta: 0, or another init_lora_weights",
    )


def _reward(context: Context, path: str, reward: RewardConfig) -> Findings:
    if (reward.use is None) == (reward.file is None):
        yield context.error(
            "FT263",
            path,
            "a reward needs either `use` (built in) or `file` (yours)"
            + ("" if reward.use is None else ", and this one has both"),
            help="write `- use: exact_match` or `- file: rewards.py:score`",
        )
        return
    yield from judge_findings(context, path, reward)
    reads = ("args",) if reward.use is None else judges.row(reward.use).reads
    yield from _unread(context, path, reward, reads)
    if reward.file is not None:
        yield from function_findings(context, f"{path}.file", reward.file)


def _unread(context: Context, path: str, reward: RewardConfig, reads: Collection[str]) -> Findings:
    """FT265: options that this kind of reward never reads."""
    kind = "file" if reward.use is None else f"use: {reward.use}"
    for name in ("answer", "extract", "args"):
        if name not in reads and context.says(f"{path}.{name}"):
            help = "remove it"
            yield context.error("FT265", f"{path}.{name}", f"`{name}` is not read by a reward with `{kind}`", help=help)


def memory(plan: RunPlan) -> MethodMemory:
    """The completions of a generation batch are made together, as many as GRPO decodes at once. The loss takes
    log-probabilities from hidden states.

    Full fine-tuning with ``beta`` needs a second model as reference, sharded like the first. Adapters need none: they
    can be switched off. A teacher that is another model stays beside the policy, sharded like it; reward models do,
    too, in bfloat16, whole on each GPU.
    """
    recipe, train = plan.recipe, plan.recipe.train
    settings = recipe.grpo
    if settings is None:
        return MethodMemory(seq_len=recipe.data.max_seq_len)
    seq_len = settings.max_prompt_length + settings.max_completion_length
    second = recipe.lora is None and settings.beta > 0
    completions = train.per_device_train_batch_size * settings.micro_batches(train.gradient_accumulation_steps)
    rows = min(completions, MOST_ROWS)
    waiting = min(completions - rows, MOST_WAITING) if settings.environment else 0
    return MethodMemory(
        seq_len=seq_len,
        loss_bytes=plan.log_prob_bytes(train.per_device_train_batch_size * settings.max_completion_length),
        reference_bytes=(plan.model_bytes if second else 0) + _reward_bytes(settings) + teacher_bytes(plan, settings),
        generation=None if settings.server else Generation(rows, settings.max_prompt_length, seq_len, waiting),
    )


def _reward_bytes(settings: GrpoConfig) -> int:
    """The weights of the recipe's reward models as they are stored; 0 for folders that are not there."""
    folders = {reward.model for reward in settings.rewards if reward.file is None and reward.model is not None}
    return sum(path.stat().st_size for folder in folders for path in expanded(folder).glob("*.safetensors"))
