"""Rules between sections that need the recipe alone: data against training, evaluation, length, schedule."""

from __future__ import annotations

from ftcli.config.evaluation import TaskConfig
from ftcli.preflight.checks import optimisation
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.judging import function_findings, judge_findings
from ftcli.preflight.checks.support import Installed, is_installed
from ftcli.tables import exports, layouts, methods, policies, quantizations


def check(context: Context, installed: Installed = is_installed) -> Findings:
    """FT253 to FT259, FT264, FT266 to FT269, FT272 to FT275; FT451, FT452 and FT767 of evaluation tasks."""
    yield from _data(context)
    yield from _lengths(context)
    yield from optimisation.check(context, installed)
    yield from optimisation.check_adapters(context)
    yield from _tasks(context, installed)
    yield from _harness(context, installed)
    yield from _without_effect(context)
    yield from _export(context)


def _data(context: Context) -> Findings:
    data = context.recipe.data
    if (context.trains or context.command == "sample") and not data.train:
        yield context.error(
            "FT254", "data.train", "data.train names no file", help="add one, such as `train: [bundled:sample-chat]`"
        )
    if context.command == "eval" and not data.eval and not any(task.data for task in context.recipe.eval.tasks):
        yield context.error(
            "FT255",
            "data.eval",
            "data.eval names no file, so there is nothing to evaluate on",
            help="name held-out rows, such as `eval: [my-eval.jsonl]`",
        )
    if context.trains and context.recipe.eval.every_steps is not None and not data.eval:
        yield context.error(
            "FT255",
            "eval.every_steps",
            "eval.every_steps is set, and data.eval names no file to evaluate on",
            help="name held-out rows in data.eval, or remove eval.every_steps",
        )
    yield from _needs_evaluation(context)
    if data.format != "auto" and not layouts.row(data.format).takes_loss_on(data.loss_on):
        yield context.error(
            "FT256",
            "data.loss_on",
            f"data.loss_on: {data.loss_on} does not apply to rows of format {data.format}",
            help=f"use one of auto, {', '.join(layouts.row(data.format).loss_on)}",
        )


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
            yield context.error(
                "FT267",
                path,
                f"{path} {new} leaves no room for a prompt in data.max_seq_len {longest}",
                help=f"use less than {longest}, or a larger data.max_seq_len",
            )


def _tasks(context: Context, installed: Installed) -> Findings:
    recipe = context.recipe
    names: set[str] = set()
    for index, task in enumerate(recipe.eval.tasks):
        path = f"eval.tasks.{index}"
        name = task.label
        if name in names:
            yield context.error(
                "FT266",
                path,
                f"two eval tasks are named {name!r}; results would overwrite each other",
                help="add `name:`",
            )
        names.add(name)
        if not task.data and not recipe.data.eval and context.scores_tasks and context.command != "sample":
            yield context.error(
                "FT255",
                path,
                f"the task {name!r} has no data, and data.eval names no file",
                help="name its rows in the task (`data: [...]`), or held-out rows for all tasks in data.eval",
            )
        yield from judge_findings(context, path, task, installed)
        yield from _judge(context, path, task)


def _harness(context: Context, installed: Installed) -> Findings:
    if context.command in ("eval", "check") and context.recipe.eval.lm_eval and not installed("lm_eval"):
        yield context.error(
            "FT253",
            "eval.lm_eval",
            "eval.lm_eval needs the package lm_eval (lm-evaluation-harness), which is not installed",
            help="pip install 'ftcli[eval]'",
        )


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
        yield context.warning(
            "FT259",
            "eval.generate.temperature",
            "eval.generate.temperature has no effect without do_sample",
            help="add `do_sample: true`, or remove it",
        )
    quantization = quantizations.row(recipe.quantization.method)
    training = quantization.training
    of_training = () if recipe.lora is None or training is None else training.reads
    for name in type(recipe.quantization).model_fields:
        path = f"quantization.{name}"
        if name not in ("method", *quantization.reads) and context.says(path):
            readers = " or ".join(quantizations.methods_that_read(name))
            yield context.warning("FT259", path, f"{path} has no effect without method: {readers}")
        elif name in of_training and context.says(path):
            yield context.warning(
                "FT259", path, f"{path} has no effect with lora: the rounded weights are frozen", help="remove it"
            )
    setting = train.gradient_checkpointing
    policy = policies.as_recipe(setting)
    if train.uncheckpointed_layers and (setting == "auto" or not policies.row(setting).by_layer):
        path = "train.uncheckpointed_layers"
        yield context.warning("FT259", path, f"{path} has no effect with gradient_checkpointing: {policy}")
    if context.says("train.memory_budget_gib") and policy != "auto":
        path = "train.memory_budget_gib"
        yield context.warning("FT259", path, f"{path} has no effect with gradient_checkpointing: {policy}")
    yield from _never_reached(context)


def _never_reached(context: Context) -> Findings:
    recipe, steps = context.recipe, context.recipe.train.max_steps
    if steps is None or context.is_trial:
        return
    for path, every in (
        ("eval.every_steps", recipe.eval.every_steps),
        ("checkpoint.every_steps", recipe.checkpoint.every_steps),
    ):
        if every is not None and every > steps and context.says(path):
            yield context.warning(
                "FT259", path, f"{path} {every} is never reached: train.max_steps is {steps}", help="use less"
            )


def _export(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.lora is not None or not context.says("export.formats"):
        return
    for index, name in enumerate(recipe.export.formats):
        if exports.row(name).needs_adapter:
            yield context.error(
                "FT269",
                f"export.formats.{index}",
                "full fine-tuning has no adapter to export",
                help=f"use formats: [{', '.join(exports.names(needs_adapter=False))}], or add a `lora` section",
            )
