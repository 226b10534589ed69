"""Unsloth: the YAML of its command line, and the arguments of its notebooks as YAML or JSON."""

from __future__ import annotations

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting

_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chatml": "messages",
    "conversational": "messages",
    "raw": "text",
}
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _is_command_line(draft: Draft) -> bool:
    """Whether it is the YAML of `unsloth train`, whose defaults are others than a notebook's."""
    return any(name in draft.given for name in ("training_type", "num_epochs", "random_seed", "format_type", "dataset"))


def _before(draft: Draft) -> None:
    full = draft.said("training_type") == "full" or truth(draft.said("full_finetuning"))
    if full:
        return
    draft.put("lora.r", 64 if _is_command_line(draft) else 16, comment="Unsloth's default")
    draft.put("lora.alpha", 16, comment="Unsloth's default")
    if truth(draft.said("load_in_4bit")) is not False and not truth(draft.said("load_in_8bit")):
        given = draft.given.get("load_in_4bit")
        draft.put("quantization.method", "nf4", given, None if given is not None else "Unsloth's default")


def _of_lora(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        if "lora.r" in draft.values:
            draft.take(given, key)

    return rule


def _targets(draft: Draft, given: ForeignSetting) -> None:
    parts = given.value if isinstance(given.value, list) else str(given.value).split(",")
    names = [str(part).strip() for part in parts]
    if "lora.r" in draft.values:
        draft.put("lora.target_modules", "all-linear" if set(names) == set(_MODULES) else names, given)


def _model(draft: Draft, given: ForeignSetting) -> None:
    name = str(given.value)
    draft.put("model.name_or_path", name, given)
    if name.endswith(("-bnb-4bit", "-unsloth-bnb-4bit")):
        help = "name the unquantized model for weights that can be merged without loss"
        draft.differs(given, "the repository holds weights in 4 bits, which are read as they are", help)


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    paths = given.value if isinstance(given.value, list) else [given.value]
    found = [sources.source(draft, given, str(path)) for path in paths]
    sources.put(draft, "data.train", found, given)


def _hub_dataset(draft: Draft, given: ForeignSetting) -> None:
    paths = given.value if isinstance(given.value, list) else [given.value]
    split = draft.said("hub_split")
    sources.put(draft, "data.train", [sources.source(draft, given, str(path), split=split) for path in paths], given)


def _format(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value) in _FORMATS:
        draft.put("data.format", _FORMATS[str(given.value)], given)
    elif given.value != "auto":
        draft.unusable(given, f"rows of format `{given.value}`", "the columns say it: data.format: auto")


def _completions(draft: Draft, given: ForeignSetting) -> None:
    draft.put("data.loss_on", "auto" if truth(given.value) else "all", given)


def _zero_is_none(key: str, what: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        if given.value not in (0, -1, None):
            r.steps(key, what)(draft, given)

    return rule


def _after(draft: Draft) -> None:
    draft.default("data.max_seq_len", 2048)
    draft.default("data.overlong", "truncate")
    draft.default("run.seed", 3407)
    if _is_command_line(draft):
        draft.default("data.loss_on", "all")
        draft.default("train.num_train_epochs", 3.0)
        draft.default("train.per_device_train_batch_size", 2)
        draft.default("train.gradient_accumulation_steps", 4)
        draft.default("train.warmup_steps", 5)
        draft.default("train.weight_decay", 0.01)
    elif "data.loss_on" not in draft.values:
        help = "train_on_responses_only does as ftcli does; data.loss_on: all trains prompts as well"
        draft.remark("a notebook without train_on_responses_only trains prompts, too", help)
    if "data.train" not in draft.values:
        draft.remark("the dataset is Python code in a notebook", "name its rows in data.train: a file, or hub:ORG/NAME")


RULES = r.Rules(
    rules={
        **r.OF_TRANSFORMERS,
        "model": _model,
        "model_name": _model,
        "training_type": r.ignored,
        "full_finetuning": r.ignored,
        "load_in_4bit": r.ignored,
        "r": _of_lora("lora.r"),
        "lora_r": _of_lora("lora.r"),
        "lora_alpha": _of_lora("lora.alpha"),
        "lora_dropout": _of_lora("lora.dropout"),
        "use_rslora": _of_lora("lora.use_rslora"),
        "target_modules": _targets,
        "dataset": _dataset,
        "hub_dataset": _hub_dataset,
        "hub_split": r.ignored,
        "local_dataset": _dataset,
        "format_type": _format,
        "train_on_completions": _completions,
        "batch_size": r.to("train.per_device_train_batch_size"),
        "gradient_accumulation": r.to("train.gradient_accumulation_steps"),
        "use_gradient_checkpointing": r.checkpointing,
        "save_steps": _zero_is_none("checkpoint.every_steps", "checkpoints"),
        "random_state": r.seed,
        "random_seed": r.seed,
        "use_loftq": r.missing("LoftQ is not offered; adapters begin as zero"),
        "loftq_config": r.missing("LoftQ is not offered; adapters begin as zero"),
        "enable_wandb": lambda draft, given: r.wandb(draft, given) if truth(given.value) else None,
        "wandb_project": r.ignored,
        "tensorboard_dir": r.ignored,
        "bias": lambda draft, given: None if given.value == "none" else draft.lost(given, "biases are not trained"),
        "dtype": lambda draft, given: draft.take(given, "model.dtype"),
        "fast_inference": r.ignored,
        "gpu_memory_utilization": r.ignored,
        "dataset_text_field": r.ignored,
        "dataset_num_proc": r.ignored,
        "vision_all_linear": r.missing("vision towers are kept, and not trained"),
        "finetune_vision_layers": r.ignored,
        "finetune_language_layers": r.ignored,
        "finetune_attention_modules": r.ignored,
        "finetune_mlp_modules": r.ignored,
    },
    before=_before,
    after=_after,
    flatten=True,
)
