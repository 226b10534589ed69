"""Unsloth: the YAML of its command line, and the arguments of its notebooks as YAML or JSON, or in the code."""

from __future__ import annotations

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting

_FORMATS = {
    "alpaca": "alpaca", "sharegpt": "sharegpt", "chatml": "messages", "conversational": "messages", "raw": "text",
}  # fmt: skip
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Where the file says nothing: its command line, the arguments of its trainer, and transformers' own.
_COMMAND_LINE = {
    "data.loss_on": "all", "train.num_train_epochs": 3.0, "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 4, "train.warmup_steps": 5, "train.weight_decay": 0.01,
    "train.learning_rate": 2e-4, "train.optim": "adamw_8bit",
}  # fmt: skip
_TRAINER = {
    "train.num_train_epochs": 3.0, "train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2,
    "train.warmup_steps": 0.1, "train.weight_decay": 0.001, "train.learning_rate": 5e-5, "train.optim": "adamw_8bit",
}  # fmt: skip


def _is_command_line(draft: Draft) -> bool:
    """Whether it is the YAML of `unsloth train`, whose defaults are others than a notebook's."""
    return any(name in draft.given for name in ("training_type", "num_epochs", "random_seed", "format_type", "dataset"))


def _before(draft: Draft) -> None:
    draft.full = draft.said("training_type") == "full" or bool(truth(draft.said("full_finetuning")))
    draft.put("lora.r", 64 if _is_command_line(draft) else 16, comment="Unsloth's default")
    draft.put("lora.alpha", 16, comment="Unsloth's default")
    if truth(draft.said("load_in_4bit")) is not False and not truth(draft.said("load_in_8bit")):
        given = draft.given.get("load_in_4bit")
        draft.put("quantization.method", "nf4", given, None if given is not None else "Unsloth's default")


def _targets(draft: Draft, given: ForeignSetting) -> None:
    parts = given.value if isinstance(given.value, list) else str(given.value).split(",")
    names = [str(part).strip() for part in parts]
    draft.put("lora.target_modules", "all-linear" if set(names) in (set(_MODULES), {"all-linear"}) else names, given)


def _model(draft: Draft, given: ForeignSetting) -> None:
    draft.put("model.name_or_path", str(given.value), given)
    if str(given.value).endswith(("-bnb-4bit", "-unsloth-bnb-4bit")):
        help = "name the unquantized model for weights that can be merged without loss"
        draft.differs(given, "the repository holds weights in 4 bits, which are read as they are", help)


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    paths = given.value if isinstance(given.value, list) else [given.value]
    split = draft.said("hub_split") if given.leaf == "hub_dataset" else None
    sources.put(draft, "data.train", [sources.source(draft, given, str(path), split=split) for path in paths], given)


def _format(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value) in _FORMATS:
        draft.put("data.format", _FORMATS[str(given.value)], given)
    elif given.value != "auto":
        draft.unusable(given, f"rows of format `{given.value}`", "the columns say it: data.format: auto")


def _save_steps(draft: Draft, given: ForeignSetting) -> None:
    if given.value not in (0, -1):
        r.steps("checkpoint.every_steps", "checkpoints")(draft, given)


def _wandb(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        r.wandb(draft, given, "wandb_project")


def _layers(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value) is False:
        draft.lost(given, "list the modules that are adapted in lora.target_modules")


def _after(draft: Draft) -> None:
    for key, value in (_COMMAND_LINE if _is_command_line(draft) else _TRAINER).items():
        draft.default(key, value)
    if "data.loss_on" not in draft.values:
        draft.put("data.loss_on", "all", comment="without train_on_responses_only it trains prompts, too")
        help = "data.loss_on: auto trains the answers alone, as train_on_responses_only does"
        draft.remark("a notebook without train_on_responses_only trains prompts, too, and so does this recipe", help)
    if "data.train" not in draft.values:
        draft.remark("the dataset is Python code in a notebook", "name its rows in data.train: a file, or hub:ORG/NAME")


RULES = r.Rules(
    rows=(
        *r.OF_TRANSFORMERS,
        ("model model_name", _model),
        ("training_type full_finetuning load_in_4bit hub_split tensorboard_dir wandb_project", r.read),
        ("r lora_r", r.to("lora.r")),
        ("lora_alpha", r.to("lora.alpha")),
        ("lora_dropout", r.to("lora.dropout")),
        ("target_modules", _targets),
        ("dataset hub_dataset local_dataset", _dataset),
        ("format_type", _format),
        ("train_on_completions", lambda d, g: d.put("data.loss_on", "auto" if truth(g.value) else "all", g)),
        ("batch_size", r.to("train.per_device_train_batch_size")),
        ("gradient_accumulation", r.to("train.gradient_accumulation_steps")),
        ("use_gradient_checkpointing", r.checkpointing),
        ("save_steps", _save_steps),
        ("random_state random_seed", r.seed),
        ("use_loftq loftq_config init_lora_weights", r.lost("LoftQ is not offered; adapters begin as zero")),
        ("enable_wandb", _wandb),
        ("enable_tensorboard", r.switch("logging.tensorboard", True)),
        ("bias", r.lost("biases are not trained", default="none")),
        ("dtype", r.to("model.dtype")),
        ("dataset_text_field", r.lost("write columns: {text: NAME} beside its path in data.train", default="text")),
        ("dataset_num_proc", r.to("data.num_proc")),
        ("max_length", r.to("data.max_seq_len")),
        ("finetune_language_layers finetune_attention_modules finetune_mlp_modules", _layers),
        ("vision_all_linear finetune_vision_layers", r.note("vision towers are kept, and not trained")),
        ("fast_inference gpu_memory_utilization float8_kv_cache unsloth_tiled_mlp use_exact_model_name", r.read),
        ("load_in_16bit", r.read),
        ("max_lora_rank device_map fix_tokenizer", r.read),
        ("completion_only_loss", r.switch("data.loss_on", "completion")),
        ("assistant_only_loss", r.switch("data.loss_on", "assistant")),
        ("packing", r.to("data.packing")),
        ("label_names prediction_loss_only", r.read),
    ),
    before=_before,
    after=_after,
    nulls=r.NULLS,
    defaults={"data.max_seq_len": 2048, "data.overlong": "truncate", "run.seed": 3407},
    flatten=True,
)
