"""Rules between sections that need the recipe alone: data against training, evaluation, length, schedule; and those of
the sections `train`, about schedule and optimizer, and `lora`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftcli.config.evaluation import TaskConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.adapters import at_end, before_index
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.judging import function_findings, judge_findings, regex_findings
from ftcli.preflight.checks.support import Installed, is_installed
from ftcli.tables import exports, layouts, methods, optimizers, policies, quantizations, schedules


def check(context: Context, installed: Installed = is_installed) -> Findings:
    """FT253 to FT259, FT264, FT266 to FT269, FT272 to FT275; FT451, FT452 and FT767 of evaluation tasks."""
    yield from _data(context)
    yield from _lengths(context)
    yield from check_optimisation(context, installed)
    yield from check_adapters(context)
    yield from _tasks(context, installed)
    yield from _harness(context, installed)
    yield from _without_effect(context)
    yield from _export(context)


def _data(context: Context) -> Findings:
    data = context.recipe.data
    if (context.trains or context.command == "sample") and not data.train:
        help = "add one, such as `train: [bundled:sample-chat]`"
        yield context.error("FT254", "data.train", "data.train names no file", help=help)
    if context.command == "eval" and not data.measures and not any(task.data for task in context.recipe.eval.tasks):
        message = "data.eval names no file, so there is nothing to evaluate on"
        yield context.error("FT255", "data.eval", message, help="name held-out rows, such as `eval: [my-eval.jsonl]`")
    tasks = context.recipe.eval.tasks if context.recipe.eval.tasks_every_steps is not None else ()
    asked_apart = bool(tasks) and all(task.data for task in tasks)
    if context.trains and context.recipe.eval.every_steps is not None and not data.measures and not asked_apart:
        message = "eval.every_steps is set, and data.eval names no file to evaluate on"
        help = "name held-out rows in data.eval, or remove eval.every_steps"
        yield context.error("FT255", "eval.every_steps", message, help=help)
    yield from _needs_evaluation(context)
    yield from _tasks_while_training(context)
    if data.format != "auto" and not layouts.row(data.format).takes_loss_on(data.loss_on):
        message = f"data.loss_on: {data.loss_on} does not apply to rows of format {data.format}"
        help = f"use one of auto, {', '.join(layouts.row(data.format).loss_on)}"
        yield context.error("FT256", "data.loss_on", message, help=help)


def _tasks_while_training(context: Context) -> Findings:
    """FT255 and FT259: tasks that are to be scored while training, and cannot be or are anyway."""
    settings, path = context.recipe.eval, "eval.tasks_every_steps"
    every = settings.tasks_every_steps
    if every is None or not context.trains:
        return
    if context.method.scores_tasks:
        message = f"{path} has no effect with {context.method.title}, which scores tasks at each evaluation"
        yield context.warning("FT259", path, message, help="remove it")
    elif not settings.tasks:
        message = f"{path} is set, and eval.tasks names no task"
        yield context.error("FT255", path, message, help="add one, such as `tasks: [{use: exact_match}]`")
    elif settings.every_steps is None or every % settings.every_steps:
        message = f"{path} {every} is no multiple of eval.every_steps {settings.every_steps or '(not set)'}"
        yield context.error("FT255", path, message, help=f"set eval.every_steps: {every}, or a divisor of it")


def _needs_evaluation(context: Context) -> Findings:
    """FT255: what looks at evaluations during training, where there are none."""
    recipe = context.recipe
    asked = (
        ("train.early_stopping", recipe.train.early_stopping is not None),
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
    )
    for path, wanted in asked:
        if wanted and context.trains and recipe.eval.every_steps is None:
            message = f"{path} needs evaluations during training, and eval.every_steps is not set"
            yield context.error("FT255", path, message, help=f"set eval.every_steps, or remove {path}")
    metric, path = recipe.train.metric_for_best_model, "train.metric_for_best_model"
    if metric is None or not context.trains:
        return
    known = methods.measures(context.method, recipe)
    if not any(wanted for _, wanted in asked):
        message = f"{path} is read by early stopping and checkpoint.keep_best, and the recipe asks for neither"
        yield context.error("FT255", path, message, help=f"set checkpoint.keep_best: true, or remove {path}")
    elif metric not in known:
        message = f"{path} {metric} is not measured while {context.method.title} trains"
        yield context.error("FT255", path, message, help=f"use one of {', '.join(known)}")


def _lengths(context: Context) -> Findings:
    recipe = context.recipe
    if context.command == "sample" or (context.scores_tasks and recipe.eval.tasks):
        longest, new = recipe.data.max_seq_len, recipe.eval.generate.max_new_tokens
        path = "eval.generate.max_new_tokens"
        if context.command == "sample" and recipe.grpo is not None and recipe.grpo.max_completion_length == new:
            path = "grpo.max_completion_length"  # `ftcli sample` generates as GRPO does where a recipe has both
        if new >= longest and recipe.eval.generate.overflow == "end":
            message = f"{path} {new} leaves no room for a prompt in data.max_seq_len {longest}"
            yield context.error("FT267", path, message, help=f"use less than {longest}, or a larger data.max_seq_len")


def _tasks(context: Context, installed: Installed) -> Findings:
    recipe = context.recipe
    names: set[str] = set()
    for index, task in enumerate(recipe.eval.tasks):
        path = f"eval.tasks.{index}"
        name = task.label
        if name in names:
            message = f"two eval tasks are named {name!r}; results would overwrite each other"
            yield context.error("FT266", path, message, help="add `name:`")
        names.add(name)
        if not task.data and not recipe.data.measures and context.scores_tasks and context.command != "sample":
            help = "name its rows in the task (`data: [...]`), or held-out rows for all tasks in data.eval"
            yield context.error("FT255", path, f"the task {name!r} has no data, and data.eval names no file", help=help)
        yield from judge_findings(context, path, task, installed)
        yield from _judge(context, path, task)


def _harness(context: Context, installed: Installed) -> Findings:
    if context.command in ("eval", "check") and context.recipe.eval.lm_eval and not installed("lm_eval"):
        yield context.lacks("eval.lm_eval", "eval.lm_eval", "lm_eval (lm-evaluation-harness)", "ftcli[eval]")


def _judge(context: Context, path: str, task: TaskConfig) -> Findings:
    """FT767 for two judges, or options that no judge reads; FT451 and FT452 for the user's function."""
    if task.file is None:
        if task.args:
            yield context.error("FT767", f"{path}.args", "`args` is only read with `file`", help="remove it")
        return
    if task.use is not None:
        message = f"the task {task.label!r} has two judges: `use: {task.use}` and `file`"
        yield context.error("FT767", path, message, help="remove one of them, or make two tasks")
    if context.scores_tasks:
        yield from function_findings(context, f"{path}.file", task.file)


def _without_effect(context: Context) -> Findings:
    recipe = context.recipe
    train, generate = recipe.train, recipe.eval.generate
    if context.says("eval.generate.temperature") and not generate.do_sample:
        help = "add `do_sample: true`, or remove it"
        yield context.no_effect("eval.generate.temperature", "without do_sample", help)
    quantization = quantizations.row(recipe.quantization.method)
    training = quantization.training
    of_training = () if recipe.lora is None or training is None else training.reads
    for name in type(recipe.quantization).model_fields:
        path = f"quantization.{name}"
        if name not in ("method", *quantization.reads) and context.says(path):
            readers = " or ".join(quantizations.methods_that_read(name))
            yield context.no_effect(path, f"without method: {readers}")
        elif name in of_training and context.says(path):
            yield context.no_effect(path, "with lora: the rounded weights are frozen", "remove it")
    setting = train.gradient_checkpointing
    policy = policies.as_recipe(setting)
    if train.uncheckpointed_layers and (setting == "auto" or not policies.row(setting).by_layer):
        yield context.no_effect("train.uncheckpointed_layers", f"with gradient_checkpointing: {policy}")
    if context.says("train.memory_budget_gib") and policy != "auto":
        yield context.no_effect("train.memory_budget_gib", f"with gradient_checkpointing: {policy}")
    yield from _never_reached(context)


def _never_reached(context: Context) -> Findings:
    recipe, steps = context.recipe, context.recipe.train.max_steps
    if steps is None or context.is_trial:
        return
    for path, every in (
        ("eval.every_steps", recipe.eval.every_steps),
        ("eval.tasks_every_steps", recipe.eval.tasks_every_steps),
        ("checkpoint.every_steps", recipe.checkpoint.every_steps),
    ):
        if every is not None and every > steps and context.says(path):
            message = f"{path} {every} is never reached: train.max_steps is {steps}"
            yield context.warning("FT259", path, message, help="use less")


def _export(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.lora is not None or not context.says("export.formats"):
        return
    for index, name in enumerate(recipe.export.formats):
        if exports.row(name).needs_adapter:
            message = "full fine-tuning has no adapter to export"
            help = f"use formats: [{', '.join(exports.names(needs_adapter=False))}], or add a `lora` section"
            yield context.error("FT269", f"export.formats.{index}", message, help=help)


def check_optimisation(context: Context, installed: Installed = is_installed) -> Findings:
    """FT253, FT255, FT259, FT268, FT272, FT273 and FT275."""
    if context.work != "train":
        return
    yield from _optimizer(context, installed)
    yield from _rounding(context)
    yield from _schedule(context)
    yield from _arguments(context)
    yield from _warm_up(context)
    yield from _grouping(context)


def _optimizer(context: Context, installed: Installed) -> Findings:
    train = context.recipe.train
    row = optimizers.row(train.optim)
    if row.package is not None and not installed(row.package.name):
        yield context.lacks("train.optim", f"train.optim: {train.optim}", row.package.name, row.package.install)
    for name in optimizers.optimizer_settings():
        if context.says(f"train.{name}") and name not in row.reads:
            yield context.no_effect(f"train.{name}", f"with optim: {train.optim}")
    if not row.schedule_free:
        return
    if train.lr_scheduler_type != schedules.CONSTANT:
        message = (
            f"train.optim: {train.optim} replaces the learning-rate schedule, and lr_scheduler_type is "
            f"{train.lr_scheduler_type}"
        )
        help = f"set train.lr_scheduler_type: {schedules.CONSTANT}; train.warmup_steps still warms up"
        yield context.error("FT273", "train.lr_scheduler_type", message, help=help)
    if train.adam_beta1 == 0 and "adam_beta1" in row.reads:
        message = f"train.optim: {train.optim} divides by adam_beta1, which is 0"
        yield context.error("FT273", "train.adam_beta1", message, help="use a value above 0, such as 0.9")


def _rounding(context: Context) -> Findings:
    """FT275: parameters in bfloat16, and how updates are rounded to them."""
    recipe, train = context.recipe, context.recipe.train
    if train.bf16_stochastic_round and not train.pure_bf16:
        message = "train.bf16_stochastic_round rounds to parameters in bfloat16, and train.pure_bf16 is off"
        help = "set train.pure_bf16: true too, or leave both out: parameters in float32 need no rounding"
        yield context.error("FT275", "train.bf16_stochastic_round", message, help=help)
    if train.bf16_gradients:
        yield from _narrow_gradients(context)
    if not train.pure_bf16:
        return
    if recipe.lora is not None:
        message = (
            "train.pure_bf16 is for full fine-tuning; with a `lora` section the base is in the compute dtype anyway"
        )
        help = "remove train.pure_bf16; adapters stay in float32"
        yield context.error("FT275", "train.pure_bf16", message, help=help)
    if recipe.lora is None and quantizations.row(recipe.quantization.method).quantize is not None:
        message = f"train.pure_bf16 does not work with quantization.method: {recipe.quantization.method}"
        help = "remove train.pure_bf16; its master weights stay in float32"
        yield context.error("FT275", "train.pure_bf16", message, help=help)
    if recipe.model.dtype not in ("auto", "bfloat16"):
        message = f"train.pure_bf16 holds parameters in bfloat16, and model.dtype is {recipe.model.dtype}"
        yield context.error("FT275", "model.dtype", message, help="use model.dtype: bfloat16")
    wanted = "stochastic" if train.bf16_stochastic_round else "nearest"
    if wanted not in optimizers.row(train.optim).rounds:
        able = ", ".join(name for name in optimizers.names() if wanted in optimizers.row(name).rounds)
        how = "stochastically" if train.bf16_stochastic_round else "in bfloat16"
        help = f"use {able}"
        yield context.error("FT275", "train.optim", f"train.optim: {train.optim} cannot round updates {how}", help=help)


def _narrow_gradients(context: Context) -> Findings:
    """FT275: gradients in bfloat16 of parameters in float32."""
    recipe, train, key = context.recipe, context.recipe.train, "train.bf16_gradients"
    if recipe.lora is not None:
        said = "is for full fine-tuning, and there is a `lora` section"
        yield context.error("FT275", key, f"{key} {said}", help=f"remove {key}; adapters' gradients are small")
    elif quantizations.row(recipe.quantization.method).quantize is not None:
        said = f"does not work with quantization.method: {recipe.quantization.method}"
        yield context.error("FT275", key, f"{key} {said}", help=f"remove {key}")
    if train.pure_bf16:
        said = "keeps parameters in float32, and train.pure_bf16 holds them and their gradients in bfloat16"
        yield context.error("FT275", key, f"{key} {said}", help="choose one of the two")
    if recipe.model.dtype not in ("auto", "bfloat16"):
        said = f"rounds gradients to the dtype of the products, and model.dtype is {recipe.model.dtype}"
        yield context.error("FT275", "model.dtype", f"{key} {said}", help="use model.dtype: bfloat16")
    if optimizers.row(train.optim).build_own is None:
        able = ", ".join(name for name in optimizers.names() if optimizers.row(name).build_own is not None)
        said = f"train.optim: {train.optim} cannot read gradients in bfloat16 for parameters in float32"
        yield context.error("FT275", "train.optim", said, help=f"use {able}")


def _schedule(context: Context) -> Findings:
    """FT255: a schedule that looks at evaluations, where there are none."""
    recipe = context.recipe
    name = recipe.train.lr_scheduler_type
    if not schedules.row(name).by_evaluations or not context.trains:
        return
    if recipe.eval.every_steps is None:
        message = f"lr_scheduler_type: {name} needs evaluations during training, and eval.every_steps is not set"
        help = "set eval.every_steps, or use another schedule"
        yield context.error("FT255", "train.lr_scheduler_type", message, help=help)
    elif context.method.scores_tasks and not recipe.eval.tasks:
        message = f"lr_scheduler_type: {name} needs evaluations during training, and eval.tasks is empty"
        help = "add a task to eval.tasks, or use another schedule"
        yield context.error("FT255", "train.lr_scheduler_type", message, help=help)


def _arguments(context: Context) -> Findings:
    """FT272: arguments that the schedule does not have, lacks, or cannot use."""
    train = context.recipe.train
    name, given = train.lr_scheduler_type, train.lr_scheduler_kwargs
    row, key, usable = schedules.row(name), "train.lr_scheduler_kwargs", True
    for argument, value in given.items():
        known = row.arguments.get(argument)
        usable = usable and known is not None and known.takes(value, train.learning_rate)
        if known is None:
            has = f"{name} takes: {', '.join(row.arguments)}" if row.arguments else f"{name} takes none"
            message = f"the schedule {name} has no argument {argument}"
            yield context.error("FT272", f"{key}.{argument}", message, help=has)
        elif not known.takes(value, train.learning_rate):
            message = f"{argument} {value} cannot be used by the schedule {name}"
            yield context.error("FT272", f"{key}.{argument}", message, help=f"it must be {known.expected}")
    for argument, known in row.arguments.items():
        left_out = argument not in given and known.default is not None
        if left_out and not known.takes(known.default, train.learning_rate):
            message = f"train.learning_rate {train.learning_rate:g} is not above {argument}, which is {known.default:g}"
            help = f"set {key}.{argument} below it, or use a larger learning rate"
            yield context.error("FT272", "train.learning_rate", message, help=help)
    missing = [argument for argument in row.required if argument not in given]
    if missing:
        help = f"as in {_example(row, missing)}"
        yield context.error("FT272", key, f"the schedule {name} needs {' and '.join(missing)}", help=help)
    if row.one_of and sum(argument in given for argument in row.one_of) != 1:
        message = f"the schedule {name} needs exactly one of {' and '.join(row.one_of)}"
        yield context.error("FT272", key, message, help=f"as in {_example(row, row.one_of[-1:])}")

    if usable and train.max_steps is not None:
        lengths = schedules.stages(name, given, train.warmup_steps, train.max_steps)
        problem = schedules.stages_too_long(name, lengths, train.max_steps)
        if problem is not None:
            yield context.error("FT272", key, problem, help=schedules.SHORTER)


def _example(row: schedules.LearningRateSchedule, arguments: list[str] | tuple[str, ...]) -> str:
    values = ", ".join(f"{name}: {row.arguments[name].example:g}" for name in arguments)
    return f"lr_scheduler_kwargs: {{{values}}}"


def _warm_up(context: Context) -> Findings:
    train, steps = context.recipe.train, context.recipe.train.max_steps
    warms_up = schedules.row(train.lr_scheduler_type).warms_up or optimizers.row(train.optim).warms_up
    if not warms_up and train.warmup_steps > 0:
        constant = train.lr_scheduler_type == schedules.CONSTANT and not optimizers.row(train.optim).schedule_free
        help = f"use {schedules.CONSTANT_AFTER_WARMUP}" if constant else "remove it"
        yield context.no_effect("train.warmup_steps", f"with lr_scheduler_type: {train.lr_scheduler_type}", help)
    if not context.trains or steps is None:
        return
    for key, problem, remedy in long_warm_ups(context.recipe, steps, f"train.max_steps {steps}"):
        # A run that is shortened on the command line is a trial: this is a warning then.
        is_error = key == "train.warmup_steps" and not context.is_trial
        yield (context.error if is_error else context.warning)("FT268", key, problem, help=remedy)


def long_warm_ups(recipe: Recipe, steps: int, training: str) -> Iterator[tuple[str, str, str]]:
    """Key, problem and remedy of each warm-up that is not over before ``steps`` are, which ``training`` names."""
    train, rounding = recipe.train, recipe.quantization.lambda_warmup_steps
    warms_up = schedules.row(train.lr_scheduler_type).warms_up or optimizers.row(train.optim).warms_up
    if warms_up and train.warmup_steps >= max(steps, 1):
        problem = f"train.warmup_steps {train.warmup_steps:g} is not less than {training}"
        never = "the learning rate would never reach its peak"
        yield "train.warmup_steps", f"{problem}: {never}", "use fewer, or a fraction such as 0.1"
    if rounding >= steps:
        problem = f"quantization.lambda_warmup_steps {rounding} is not less than {training}"
        never = "the model that is saved rounds everything, and no step of training did"
        yield "quantization.lambda_warmup_steps", f"{problem}: {never}", "use fewer, or train longer"


def _grouping(context: Context) -> Findings:
    recipe, path = context.recipe, "train.train_sampling_strategy"
    why = "data.packing" if recipe.data.packing else "per_device_train_batch_size: 1"
    if recipe.train.train_sampling_strategy == "group_by_length" and (
        recipe.data.packing or recipe.train.per_device_train_batch_size == 1
    ):
        message = f"{path}: group_by_length has no effect with {why}: nothing is padded"
        yield context.warning("FT259", path, message, help="remove it")


def check_adapters(context: Context) -> Findings:
    """FT264 and FT274."""
    lora, train = context.recipe.lora, context.recipe.train
    if lora is None:
        if train.loraplus_lr_ratio is not None:
            message = "train.loraplus_lr_ratio needs adapters, and there is no `lora` section"
            yield context.error("FT274", "train.loraplus_lr_ratio", message, help="remove it, or add a `lora` section")
        return
    if lora.layers_pattern and lora.layers_to_transform is None:
        message = "lora.layers_pattern has no effect without lora.layers_to_transform"
        yield context.error("FT274", "lora.layers_pattern", message, help="add layers_to_transform, or remove it")
    if not lora.experts and lora.target_modules != "all-linear":
        why = "beside a list of target_modules: experts have adapters where it names them"
        yield context.no_effect("lora.experts", why, "remove it, or leave target_modules out")
    if isinstance(lora.exclude_modules, str):
        yield from regex_findings(context, "lora.exclude_modules", lora.exclude_modules)
    for index, pattern in enumerate(lora.layers_pattern):
        yield from regex_findings(context, f"lora.layers_pattern.{index}", before_index(pattern))
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            yield from regex_findings(context, f"lora.{key}", at_end(pattern))
    yield from _kinds(context)


def _kinds(context: Context) -> Findings:
    """Yields conflicts of DoRA, and of initial values that take over a part of the base weights."""
    recipe, lora = context.recipe, context.recipe.lora
    assert lora is not None
    method = recipe.quantization.method
    packed = quantizations.row(method).freezes_base
    others = " | ".join(quantizations.names(freezes_base=False))
    if lora.use_dora and packed:
        message = f"use_dora does not work with quantization.method: {method}: DoRA needs the norm of each full weight"
        help = f"use quantization.method: {others}, or leave out use_dora"
        yield context.error("FT274", "lora.use_dora", message, help=help)
    if not lora.changes_base:
        return
    path, said = "lora.init_lora_weights", f"init_lora_weights: {lora.init_lora_weights}"
    if packed:
        message = f"{said} changes the base weights, which quantization.method: {method} freezes"
        yield context.error("FT274", path, message, help=f"use {others}")
    if lora.use_dora:
        message = f"DoRA with {said} cannot be saved as a plain adapter of the base"
        yield context.error("FT274", path, message, help="leave one of the two out")
