"""Unsloth: the YAML of its command line, and the arguments of its notebooks as YAML or JSON, or in the code."""

from __future__ import annotations

from ftcli.config.conversion import preferences, sources
from ftcli.config.conversion import rules as r
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting

_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Where the file says nothing: its command line, the arguments of its trainer, and transformers' own.
_COMMAND_LINE = {
    "lora.r": 64, "data.loss_on": "all", "train.num_train_epochs": 3.0, "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 4, "train.warmup_steps": 5, "train.weight_decay": 0.01,
    "train.learning_rate": 2e-4, "train.optim": "adamw_8bit",
}  # fmt: skip
_TRAINER = {
    "lora.r": 16, "train.num_train_epochs": 3.0, "train.per_device_train_batch_size": 4,
    "train.gradient_accumulation_steps": 2, "train.warmup_steps": 0.1, "train.weight_decay": 0.001,
    "train.learning_rate": 5e-5, "train.optim": "adamw_8bit",
}  # fmt: skip


def _is_command_line(draft: Draft) -> bool:
    """True for the YAML of `unsloth train`, whose defaults differ from a notebook's."""
    return any(name in draft.given for name in ("training_type", "num_epochs", "random_seed", "format_type", "dataset"))


def _before(draft: Draft) -> None:
    draft.full = draft.said("training_type") == "full" or bool(truth(draft.said("full_finetuning")))
    if truth(draft.said("load_in_4bit")) is not False and not truth(draft.said("load_in_8bit")):
        given = draft.given.get("load_in_4bit")
        draft.put("quantization.method", "nf4", given, None if given is not None else "Unsloth's default")
    preferences.of_trl(draft)


def _targets(draft: Draft, given: ForeignSetting) -> None:
    parts = given.value if isinstance(given.value, list) else str(given.value).split(",")
    names = [str(part).strip() for part in parts]
    draft.put("lora.target_modules", "all-linear" if set(names) in (set(_MODULES), {"all-linear"}) else names, given)


def _model(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "model.name_or_path")
    if str(given.value).endswith("-bnb-4bit"):
        help = "name the unquantized model for weights that can be merged without loss"
        draft.differs(given, "the repository holds weights in 4 bits, which are read as they are", help)


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    more = {"name": draft.said("hub_subset"), "split": draft.said("hub_split")} if given.leaf == "hub_dataset" else {}
    items = [sources.source(draft, given, path, **more) for path in sources.listed(given.value)]
    sources.put(draft, "data.train", items, given)


def _completions(draft: Draft, given: ForeignSetting) -> None:
    draft.put("data.loss_on", "auto" if draft.switched(given) else "all", given)


def _wandb(draft: Draft, given: ForeignSetting) -> None:
    if draft.switched(given):
        r.wandb(draft, given, "wandb_project")


def _after(draft: Draft) -> None:
    for key, value in (_COMMAND_LINE if _is_command_line(draft) else _TRAINER).items():
        draft.default(key, value)
    if "data.loss_on" not in draft.values and not preferences.wanted(draft):
        draft.put("data.loss_on", "all", comment="without train_on_responses_only it trains prompts, too")
        help = "data.loss_on: auto trains the answers alone, as train_on_responses_only does"
        draft.remark("a notebook without train_on_responses_only trains prompts, too, and so does this recipe", help)
    if "data.train" not in draft.values:
        draft.remark("the dataset is Python code in a notebook", "name its rows in data.train: a file, or hub:ORG/NAME")
    preferences.finish(draft)


RULES = r.Rules(
    computed={
        "model": _model,
        "model_name": _model,
        # The model's loaded length bounds the one that its trainer cuts pairs at.
        "max_seq_length": r.unless(
            lambda draft, _: preferences.wanted(draft) and "max_length" in draft.given, r.to("data.max_seq_len")
        ),
        "load_in_4bit": r.read,
        "target_modules": _targets,
        "dataset": _dataset,
        "hub_dataset": _dataset,
        "local_dataset": _dataset,
        "train_on_completions": _completions,
        "use_gradient_checkpointing": r.checkpointing,
        "chat_template": sources.template,
        "wandb_project": r.read,
        "enable_wandb": _wandb,
        **preferences.OF_TRL,
    },
    before=_before,
    after=_after,
    defaults={"lora.alpha": 16, "data.max_seq_len": 2048, "data.overlong": "truncate", "run.seed": 3407},
    nulls=frozenset({"max_grad_norm"}),
    flatten=True,
)
