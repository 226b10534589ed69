"""Method, hyperparameters and cost of a run, as rows of its card."""

from __future__ import annotations

import re

from ftcli.plain import JsonMap
from ftcli.run.report.settings import changed, settings_by_section
from ftcli.run.report.values import as_text, is_number, map_in, maps
from ftcli.tables import methods, quantizations

#: What everybody looks for, changed or not.
_ALWAYS = (
    "lora.r",
    "lora.alpha",
    "lora.dropout",
    "lora.target_modules",
    "data.max_seq_len",
    "train.learning_rate",
    "train.lr_scheduler_type",
    "train.warmup_steps",
    "train.optim",
    "train.weight_decay",
)
_SECTIONS = ("lora", "quantization", "data", "train")
#: Told in other words, or places on the user's disk; so are the rewards of training methods.
_ELSEWHERE = (
    "data.train",
    "data.eval",
    "data.chat_template",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.max_steps",
    "train.num_train_epochs",
)
#: What is surely a path is never told, whatever the key.
_PATH = re.compile(r"(~|\.{1,2})?/")


def training_rows(recipe: JsonMap, manifest: JsonMap, summary: JsonMap) -> list[tuple[str, str]]:
    """Names and values: how it was trained, with what settings, for how long, and on what."""
    device, plan = map_in(manifest, "device"), map_in(manifest, "dtype_plan")
    rows = [("method", _method(recipe)), ("effective batch", _batch(recipe, manifest))]
    if is_number(summary.get("steps")):
        tokens = f", {summary['tokens']:,} tokens" if is_number(summary.get("tokens")) else ""
        rows.append(("steps", f"{summary['steps']:,}{tokens}"))
    rows += [*_settings(recipe), ("rewards", _rewards(recipe))]
    rows += [("seed", as_text(map_in(recipe, "run").get("seed"))), ("device", as_text(device.get("name")))]
    quantized = map_in(recipe, "quantization").get("method")
    frozen = {"linear layers": quantized} if recipe.get("lora") and quantizations.is_stored(quantized) else {}
    others = "other parameters" if frozen else "parameters"
    dtypes = {
        **frozen,
        others: plan.get("parameter"),
        "adapters": plan.get("adapter"),
        "computed in": plan.get("compute"),
    }
    rows.append(("dtypes", ", ".join(f"{name} {as_text(value)}" for name, value in dtypes.items() if value)))
    return [(name, value) for name, value in rows if value not in ("", "–")]


def _method(recipe: JsonMap) -> str:
    kind = "LoRA" if recipe.get("lora") else "full fine-tuning"
    quantized = map_in(recipe, "quantization").get("method")
    if quantizations.is_stored(quantized) and recipe.get("lora"):
        return f"{kind} on a base in {quantized}"
    return f"{kind}, weights rounded in every product ({quantized})" if quantizations.is_stored(quantized) else kind


def _batch(recipe: JsonMap, manifest: JsonMap) -> str:
    """Rows of an optimizer step, over all processes: the manifest counts what each of them accumulates."""
    train = map_in(recipe, "train")
    size, accumulated = (train.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    together = manifest.get("micro_batches", accumulated)
    if not isinstance(size, int) or not isinstance(together, int):
        return ""
    return f"{size * together} = {size} x {together} micro-batches"


def _settings(recipe: JsonMap) -> list[tuple[str, str]]:
    sections = methods.sections()
    every = settings_by_section({name: recipe.get(name) for name in (*_SECTIONS, *sections)})
    values = {f"{section}.{one.key}": one.value for section, rows in every.items() for one in rows}
    always = (*_ALWAYS, *(name for method in methods.TABLE.values() for name in method.told))
    names = dict.fromkeys([*(name for name in always if name in values), *(one.key for one in changed(every))])
    elsewhere = (*_ELSEWHERE, *(f"{section}.rewards" for section in sections))
    return [(name, values[name]) for name in names if name not in elsewhere and not _PATH.match(values[name])]


def _rewards(recipe: JsonMap) -> str:
    """Built-in rewards by name, the user's by the function's: the file's path is nobody's business."""
    rewards = [one for section in methods.sections() for one in maps(map_in(recipe, section).get("rewards"))]
    names = [str(one.get("use") or str(one.get("file")).rpartition(":")[2]) for one in rewards]
    return ", ".join(f"{name} (weight {as_text(one.get('weight'))})" for name, one in zip(names, rewards, strict=True))
