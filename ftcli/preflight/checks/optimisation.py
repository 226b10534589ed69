"""Rules of the section `train` about schedule and optimizer, and of the section `lora`."""

from __future__ import annotations

from collections.abc import Iterator

from ftcli.config.recipe import Recipe
from ftcli.facts.adapters import at_end, before_index
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.judging import regex_findings
from ftcli.preflight.checks.support import Installed, is_installed
from ftcli.tables import optimizers, quantizations, schedules


def check(context: Context, installed: Installed = is_installed) -> Findings:
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
        yield context.error(
            "FT253",
            "train.optim",
            f"train.optim: {train.optim} needs the package {row.package.name}, which is not installed",
            help=f"pip install '{row.package.install}'",
        )
    for name in optimizers.optimizer_settings():
        if context.says(f"train.{name}") and name not in row.reads:
            yield context.warning("FT259", f"train.{name}", f"train.{name} has no effect with optim: {train.optim}")
    if not row.schedule_free:
        return
    if train.lr_scheduler_type != schedules.CONSTANT:
        yield context.error(
            "FT273",
            "train.lr_scheduler_type",
            f"train.optim: {train.optim} replaces the learning-rate schedule, and lr_scheduler_type is "
            f"{train.lr_scheduler_type}",
            help=f"set train.lr_scheduler_type: {schedules.CONSTANT}; train.warmup_steps still warms up",
        )
    if train.adam_beta1 == 0 and "adam_beta1" in row.reads:
        yield context.error(
            "FT273",
            "train.adam_beta1",
            f"train.optim: {train.optim} divides by adam_beta1, which is 0",
            help="use a value above 0, such as 0.9",
        )


def _rounding(context: Context) -> Findings:
    """FT275: parameters in bfloat16, and how updates are rounded to them."""
    recipe, train = context.recipe, context.recipe.train
    if train.bf16_stochastic_round and not train.pure_bf16:
        yield context.error(
            "FT275",
            "train.bf16_stochastic_round",
            "train.bf16_stochastic_round rounds to parameters in bfloat16, and train.pure_bf16 is off",
            help="set train.pure_bf16: true too, or leave both out: parameters in float32 need no rounding",
        )
    if train.bf16_gradients:
        yield from _narrow_gradients(context)
    if not train.pure_bf16:
        return
    if recipe.lora is not None:
        yield context.error(
            "FT275",
            "train.pure_bf16",
            "train.pure_bf16 is for full fine-tuning; with a `lora` section the base is in the compute dtype anyway",
            help="remove train.pure_bf16; adapters stay in float32",
        )
    if recipe.lora is None and quantizations.row(recipe.quantization.method).quantize is not None:
        yield context.error(
            "FT275",
            "train.pure_bf16",
            f"train.pure_bf16 does not work with quantization.method: {recipe.quantization.method}",
            help="remove train.pure_bf16; its master weights stay in float32",
        )
    if recipe.model.dtype not in ("auto", "bfloat16"):
        yield context.error(
            "FT275",
            "model.dtype",
            f"train.pure_bf16 holds parameters in bfloat16, and model.dtype is {recipe.model.dtype}",
            help="use model.dtype: bfloat16",
        )
    wanted = "stochastic" if train.bf16_stochastic_round else "nearest"
    if wanted not in optimizers.row(train.optim).rounds:
        able = ", ".join(name for name in optimizers.names() if wanted in optimizers.row(name).rounds)
        how = "stochastically" if train.bf16_stochastic_round else "in bfloat16"
        yield context.error(
            "FT275", "train.optim", f"train.optim: {train.optim} cannot round updates {how}", help=f"use {able}"
        )


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
        yield context.error(
            "FT255",
            "train.lr_scheduler_type",
            f"lr_scheduler_type: {name} needs evaluations during training, and eval.every_steps is not set",
            help="set eval.every_steps, or use another schedule",
        )
    elif context.method.scores_tasks and not recipe.eval.tasks:
        yield context.error(
            "FT255",
            "train.lr_scheduler_type",
            f"lr_scheduler_type: {name} needs evaluations during training, and eval.tasks is empty",
            help="add a task to eval.tasks, or use another schedule",
        )


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
            yield context.error(
                "FT272", f"{key}.{argument}", f"the schedule {name} has no argument {argument}", help=has
            )
        elif not known.takes(value, train.learning_rate):
            yield context.error(
                "FT272",
                f"{key}.{argument}",
                f"{argument} {value} cannot be used by the schedule {name}",
                help=f"it must be {known.expected}",
            )
    for argument, known in row.arguments.items():
        left_out = argument not in given and known.default is not None
        if left_out and not known.takes(known.default, train.learning_rate):
            yield context.error(
                "FT272",
                "train.learning_rate",
                f"train.learning_rate {train.learning_rate:g} is not above {argument}, which is {known.default:g}",
                help=f"set {key}.{argument} below it, or use a larger learning rate",
            )
    missing = [argument for argument in row.required if argument not in given]
    if missing:
        yield context.error(
            "FT272", key, f"the schedule {name} needs {' and '.join(missing)}", help=f"as in {_example(row, missing)}"
        )
    if row.one_of and sum(argument in given for argument in row.one_of) != 1:
        yield context.error(
            "FT272",
            key,
            f"the schedule {name} needs exactly one of {' and '.join(row.one_of)}",
            help=f"as in {_example(row, row.one_of[-1:])}",
        )

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
        yield context.warning(
            "FT259",
            "train.warmup_steps",
            f"train.warmup_steps has no effect with lr_scheduler_type: {train.lr_scheduler_type}",
            help=f"use {schedules.CONSTANT_AFTER_WARMUP}" if constant else "remove it",
        )
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
        yield context.warning(
            "FT259", path, f"{path}: group_by_length has no effect with {why}: nothing is padded", help="remove it"
        )


def check_adapters(context: Context) -> Findings:
    """FT264 and FT274."""
    lora, train = context.recipe.lora, context.recipe.train
    if lora is None:
        if train.loraplus_lr_ratio is not None:
            yield context.error(
                "FT274",
                "train.loraplus_lr_ratio",
                "train.loraplus_lr_ratio needs adapters, and there is no `lora` section",
                help="remove it, or add a `lora` section",
            )
        return
    if lora.layers_pattern and lora.layers_to_transform is None:
        yield context.error(
            "FT274",
            "lora.layers_pattern",
            "lora.layers_pattern has no effect without lora.layers_to_transform",
            help="add layers_to_transform, or remove it",
        )
    if not lora.experts and lora.target_modules != "all-linear":
        yield context.warning(
            "FT259",
            "lora.experts",
            "lora.experts has no effect beside a list of target_modules: experts have adapters where it names them",
            help="remove it, or leave target_modules out",
        )
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
        yield context.error(
            "FT274",
            "lora.use_dora",
            f"use_dora does not work with quantization.method: {method}: DoRA needs the norm of each full weight",
            help=f"use quantization.method: {others}, or leave out use_dora",
        )
    if not lora.changes_base:
        return
    path, said = "lora.init_lora_weights", f"init_lora_weights: {lora.init_lora_weights}"
    if packed:
        yield context.error(
            "FT274",
            path,
            f"{said} changes the base weights, which quantization.method: {method} freezes",
            help=f"use {others}",
        )
    if lora.use_dora:
        yield context.error(
            "FT274",
            path,
            f"DoRA with {said} cannot be saved as a plain adapter of the base",
            help="leave one of the two out",
        )
