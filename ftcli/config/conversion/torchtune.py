"""torchtune's YAML. Its components are named by Python paths; what each of them does stands here."""

from __future__ import annotations

import re

from ftcli.config.conversion import preferences, sources
from ftcli.config.conversion import rules as r
from ftcli.config.conversion.draft import Draft, is_off, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialects import VALUES
from ftcli.plain import JsonMap

#: Builders of datasets: where their rows are, our layout, and whether prompts are trained unless said otherwise.
_DATASETS: dict[str, tuple[str | None, str | None, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": (None, None, False),
    "instruct_dataset": (None, None, False),
    "text_completion_dataset": (None, "text", False),
}
#: Builders of pairs: where their rows are, and which columns have another name than ours.
_PAIRS: dict[str, tuple[str | None, dict[str, str]]] = {
    "preference_dataset": (None, {}),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", {}),
    "stack_exchange_paired_dataset": (
        "lvwerra/stack-exchange-paired", {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    ),
}  # fmt: skip
#: Settings of datasets that are read with their builder.
_OF_DATASETS = (
    "source", "data_files", "split", "name", "column", "conversation_column", "conversation_style", "train_on_input",
    "column_map.input", "column_map.output", "column_map.instruction", "column_map.conversations",
    "column_map.prompt", "column_map.chosen", "column_map.rejected",
)  # fmt: skip
_STYLES = {"openai": "messages", "sharegpt": "sharegpt"}
_SCHEDULES = ("cosine", "linear", "constant")
#: torchtune's names of projections in the layers of transformers.
_MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: What only its recipes of rewards and distillation have.
_OTHERS = {"reward_fn", "rl_loss", "reward_and_value_model", "teacher_model", "ppo_batch_size"}
#: Its losses of pairs, as the method and the loss are called here; RSO's gamma is a beta.
_PREFERENCES = {"DPOLoss": ("dpo", "sigmoid"), "RSOLoss": ("dpo", "hinge"), "SimPOLoss": ("simpo", "simpo")}
_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")


def _before(draft: Draft) -> None:
    sections = {given.outermost for given in draft.given.values()}
    if "optimizer" not in sections:
        help = "recipes of fine-tuning are converted, not those of generation, evaluation and quantization"
        raise draft.refuse(None, "this recipe of torchtune has no optimizer: it trains nothing", help)
    loss = draft.given.get("loss._component_")
    name = _name(draft.said("loss._component_"))
    if name in _PREFERENCES:
        method, ours = _PREFERENCES[name]
        draft.put("train.method", method, loss, f"torchtune: {name}")
        preferences.choose(draft, loss, [ours])
    elif sections & _OTHERS or "ref_checkpointer" in sections or re.search("PO|RSO", name):
        help = "those of SFT and of pairs (DPOLoss, RSOLoss, SimPOLoss) are, with LoRA, QLoRA and without"
        raise draft.refuse(loss, f"recipes of rewards and distillation, and the loss `{name}`, are not converted", help)
    builder, model = _name(draft.said("model._component_")), draft.given.get("model._component_")
    draft.full = not re.match(r"(q?lora|dora)_", builder)
    if builder.startswith("dora_") or truth(draft.said("model.use_dora")):
        draft.put("lora.use_dora", True, model)
    if builder.startswith("qlora_"):
        draft.put("quantization.method", "nf4", model)


def _name(path: object) -> str:
    return str(path or "").rpartition(".")[2]


def _attention_modules(draft: Draft, given: ForeignSetting) -> None:
    names = [str(name) for name in sources.listed(given.value)]
    ours = list(dict.fromkeys(_MODULES.get(name, name) for name in names))
    if truth(draft.said("model.apply_lora_to_mlp")):
        ours += ["gate_proj", "up_proj", "down_proj"]
    draft.put("lora.target_modules", "all-linear" if len(ours) == 7 else ours, given)


def _dataset(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        section, builder = given.section, _name(given.value)
        if builder in _PAIRS and preferences.wanted(draft):
            _pairs(draft, given, key, builder)
            return
        if builder not in _DATASETS:
            draft.unusable(given, f"the dataset `{builder}`", f"name its rows in {key}: a file, or hub:ORG/NAME")
            return
        where, layout, prompts = _DATASETS[builder]
        layout = layout or _STYLES.get(str(draft.said(f"{section}.conversation_style")))
        _put(draft, given, key, where, _columns(draft, section, layout))
        if key != "data.train":
            return
        sources.layouts(draft, {layout}, given)
        if layout == "alpaca":
            sources.alpaca_remark(draft, given)
        trained = draft.given.get(f"{section}.train_on_input")
        if truth(trained.value) if trained is not None else prompts:
            default = "torchtune's default for these rows" if trained is None else None
            draft.put("data.loss_on", "all", trained, default)

    return rule


def _put(draft: Draft, given: ForeignSetting, key: str, where: str | None, columns: JsonMap) -> None:
    """Drafts the rows that a builder's settings name; those of ``where`` if they name none."""
    said = {name: draft.said(f"{given.section}.{name}") for name in ("source", "data_files", "split", "name")}
    more = {"columns": columns, "split": said["split"], "name": said["name"]}
    files = sources.listed(said["data_files"] or said["source"] or where) or [None]
    sources.put(draft, key, [sources.source(draft, given, path, **more) for path in files], given)


def _pairs(draft: Draft, given: ForeignSetting, key: str, builder: str) -> None:
    """Rows of pairs: messages, but for those of Stack Exchange, which lie in a folder of their dataset."""
    where, columns = _PAIRS[builder]
    start = f"{given.section}."
    named = {name: str(draft.said(f"{start}column_map.{name}") or "") for name in ("prompt", "chosen", "rejected")}
    columns = {**columns, **{ours: theirs for ours, theirs in named.items() if theirs and ours != theirs}}
    _put(draft, given, key, where, columns)
    if builder == "stack_exchange_paired_dataset":
        preferences.plain_texts(draft, given, f"`{builder}`, which reads the folder data/rl of its dataset")
    if truth(draft.said(f"{start}train_on_input")):
        draft.unusable(given, "`train_on_input` of pairs", "the answers alone are compared")


def _of_dataset(draft: Draft, given: ForeignSetting) -> None:
    """Settings of a dataset are read with its builder."""
    if f"{given.outermost}._component_" not in draft.given:
        draft.lost(given, f"`{given.outermost}` names no `_component_` that would read it")


def _columns(draft: Draft, section: str, layout: str | None) -> dict[str, str]:
    """Our name of a column: theirs."""
    start = f"{section}.column_map."
    found = {name.removeprefix(start): str(g.value) for name, g in draft.given.items() if name.startswith(start)}
    if layout is None and "output" in found:
        found = {{"input": "prompt", "output": "completion"}.get(name, name): theirs for name, theirs in found.items()}
    turns, text = draft.said(f"{section}.conversation_column"), draft.said(f"{section}.column")
    if turns:
        found["messages" if layout == "messages" else "conversations"] = str(turns)
    if text and layout == "text":
        found["text"] = str(text)
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _optimizer(draft: Draft, given: ForeignSetting) -> None:
    """By its Python path, or by the name of its class. What the class decays unless told otherwise is written out."""
    path, name = str(given.value), _name(given.value)
    words = VALUES["train.optim"]
    known = words.get(path) or words.get(name) or {"SGD": "sgd", "Adam": "adamw_torch"}.get(name)
    if known is None:
        choices = draft.schema.choices(draft.schema.at(("train", "optim")) or {})
        draft.unusable(given, f"the optimizer `{path}`", f"AdamW is used; train.optim is one of {', '.join(choices)}")
        return
    fused = known == "adamw_torch" and truth(draft.said("optimizer.fused"))
    draft.put("train.optim", "adamw_torch_fused" if fused else known, given)
    decays = name not in ("SGD", "Adam")
    draft.default("train.weight_decay", 0.01 if decays else 0.0)
    if not decays and not is_off(draft.said("optimizer.weight_decay")):
        help = "train.weight_decay: 0 switches it off"
        draft.differs(given, f"{name} adds the decay to the gradients; here it is decoupled, as AdamW's", help)


def _betas(draft: Draft, given: ForeignSetting) -> None:
    if isinstance(given.value, list) and len(given.value) == 2:
        draft.put("train.adam_beta1", given.value[0], given)
        draft.put("train.adam_beta2", given.value[1], given)
    else:
        draft.unusable(given, f"betas: {given.value}", "write train.adam_beta1 and train.adam_beta2")


def _schedule(draft: Draft, given: ForeignSetting) -> None:
    known = next((word for word in _SCHEDULES if word in _name(given.value)), None)
    if known is None:
        help = "the rate stays as it is; see train.lr_scheduler_type"
        draft.unusable(given, f"the schedule `{_name(given.value)}`", help)
    else:
        warms = known == "constant" and draft.said("lr_scheduler.num_warmup_steps")
        draft.put("train.lr_scheduler_type", "constant_with_warmup" if warms else known, given)


def _length(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "data.max_seq_len")
    draft.put("data.overlong", "truncate", given, "as torchtune does")


def _limit(draft: Draft, given: ForeignSetting) -> None:
    if draft.said("epochs") in (None, 1):
        draft.take(given, "train.max_steps")
    else:
        draft.unusable(given, "a limit for each epoch", "train.max_steps is one of the whole run")


def _logger(draft: Draft, given: ForeignSetting) -> None:
    if "WandB" in _name(given.value):
        r.wandb(draft, given, *(f"{given.section}.{part}" for part in ("project", "entity", "group")))
    elif "TensorBoard" in _name(given.value):
        draft.put("logging.tensorboard", True, given)
    elif _name(given.value) not in ("DiskLogger", "StdoutLogger"):
        draft.lost(given, "see the section logging for what there is", harmless=True)


def _loss(draft: Draft, given: ForeignSetting) -> None:
    if not preferences.wanted(draft) and _name(given.value) not in _LOSSES:
        draft.unusable(given, f"the loss `{_name(given.value)}`", "cross-entropy of each trained token is the loss")


def _gamma(draft: Draft, given: ForeignSetting) -> None:
    """SimPO's margin; RSO calls its beta so."""
    if draft.get("preference.loss") == "hinge":
        draft.take(given, "preference.beta")
    else:
        preferences.gamma(draft, given)


def _after(draft: Draft) -> None:
    if "train.max_grad_norm" not in draft.values:
        draft.put("train.max_grad_norm", r.UNCLIPPED, comment="torchtune does not clip unless told to; 1.0 is usual")
    if draft.said("optimizer.lr") is None:
        draft.put("train.learning_rate", 1e-3, comment="the default of torch's optimizers")
    if "data.max_seq_len" not in draft.values:
        what = "torchtune sets no length: rows over data.max_seq_len (2048) are an error here"
        draft.remark(what, "set data.max_seq_len")
    if draft.get("model.dtype") == "bfloat16":
        r.full_in_bf16(draft)
    r.all_linear(draft)
    simpo = draft.get("preference.loss") == "simpo"
    preferences.finish(draft, 2.0 if simpo else 0.1, drops=False)


RULES = r.Rules(
    computed={
        "model.lora_attn_modules": _attention_modules,
        "model.apply_lora_to_mlp": r.read,
        "tokenizer.max_seq_len": _length,
        "dataset.max_seq_len": _length,
        **{f"{section}.{name}": _of_dataset for section in ("dataset", "dataset_val") for name in _OF_DATASETS},
        "dataset._component_": _dataset("data.train"),
        "dataset_val._component_": _dataset("data.eval"),
        "loss._component_": _loss,
        "loss.beta": r.to("preference.beta"),
        "loss.gamma": _gamma,
        "loss.label_smoothing": preferences.smoothing,
        "ref_checkpointer.checkpoint_dir": r.unless(
            lambda draft, given: given.value == draft.said("checkpointer.checkpoint_dir"), preferences.reference
        ),
        "optimizer._component_": _optimizer,
        "optimizer.betas": _betas,
        "clip_grad_norm": r.unless(lambda _, given: given.value in ("inf", ".inf"), r.clipping),
        "lr_scheduler._component_": _schedule,
        "metric_logger._component_": _logger,
        "metric_logger.name": r.run_name,
        "output_dir": r.unless(lambda _, given: "${" in str(given.value), r.to("run.output_dir")),
        "max_steps_per_epoch": _limit,
        "enable_activation_checkpointing": r.checkpointing,
    },
    before=_before,
    after=_after,
    defaults={"lora.r": 8, "lora.alpha": 16, "train.weight_decay": 0.01, "train.lr_scheduler_type": "constant"},
    trainer=False,
)
