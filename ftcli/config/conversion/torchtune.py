"""torchtune's YAML. Its components are named by Python paths; what each of them does stands here."""

from __future__ import annotations

import re
from types import MappingProxyType

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialect_values import VALUES

#: Builders of datasets: where their rows are, our layout, and whether prompts are trained unless said otherwise.
_DATASETS: dict[str, tuple[str | None, str | None, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": (None, None, False),
    "instruct_dataset": (None, None, False),
    "text_completion_dataset": (None, "text", False),
}
_STYLES = {"openai": "messages", "sharegpt": "sharegpt"}
_SCHEDULES = ("cosine", "linear", "constant")
#: torchtune's names of projections in the layers of transformers.
_MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: What only its recipes of preferences, rewards and distillation have.
_OTHERS = ("reward_fn", "rl_loss", "ref_checkpointer", "reward_and_value_model", "teacher_model", "ppo_batch_size")
_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")


def _before(draft: Draft) -> None:
    if not _any(draft, "optimizer"):
        help = "recipes of fine-tuning are converted, not those of generation, evaluation and quantization"
        raise draft.refuse(None, "this recipe of torchtune has no optimizer: it trains nothing", help)
    if any(_any(draft, name) for name in _OTHERS) or re.search(
        "DPO|PPO|GRPO|RSO", _name(draft.said("loss._component_"))
    ):
        help = "those of SFT, LoRA and QLoRA are"
        raise draft.refuse(None, "recipes of preferences and rewards are not converted", help)
    builder, model = _name(draft.said("model._component_")), draft.given.get("model._component_")
    draft.full = not re.match(r"(q?lora|dora)_", builder)
    draft.put("lora.r", 8, comment="torchtune's default")
    draft.put("lora.alpha", 16, comment="torchtune's default")
    if builder.startswith("dora_") or truth(draft.said("model.use_dora")):
        draft.put("lora.use_dora", True, model)
    if builder.startswith("qlora_") or truth(draft.said("model.quantize_base")):
        draft.put("quantization.method", "nf4", model)


def _any(draft: Draft, name: str) -> bool:
    return any(given.partition(".")[0] == name for given in draft.given)


def _name(path: object) -> str:
    """The last part of a Python path."""
    return str(path or "").rpartition(".")[2]


def _attention_modules(draft: Draft, given: ForeignSetting) -> None:
    names = [str(name) for name in given.value] if isinstance(given.value, list) else [str(given.value)]
    ours = list(dict.fromkeys(_MODULES.get(name, name) for name in names))
    if truth(draft.said("model.apply_lora_to_mlp")):
        ours += ["gate_proj", "up_proj", "down_proj"]
    draft.put("lora.target_modules", "all-linear" if len(ours) == 7 else ours, given)


def _dataset(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        section, builder = given.section, _name(given.value)
        if builder not in _DATASETS:
            draft.unusable(given, f"the dataset `{builder}`", f"name its rows in {key}: a file, or hub:ORG/NAME")
            return
        where, layout, prompts = _DATASETS[builder]
        said = {name: draft.said(f"{section}.{name}") for name in ("source", "data_files", "column", "split", "name")}
        style = str(draft.said(f"{section}.conversation_style"))
        layout = layout or _STYLES.get(style)
        columns = _columns(draft, section, layout, said["column"])
        files = said["data_files"] or said["source"] or where
        found = [
            sources.source(draft, given, str(path), columns=columns, split=said["split"], name=said["name"])
            for path in (files if isinstance(files, list) else [files])
        ]
        sources.put(draft, key, found, given)
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


def _columns(draft: Draft, section: str, layout: str | None, text: object) -> dict[str, str]:
    """Our name of a column: theirs."""
    start = f"{section}.column_map."
    found = {name.removeprefix(start): str(g.value) for name, g in draft.given.items() if name.startswith(start)}
    if layout is None and "output" in found:
        found = {{"input": "prompt", "output": "completion"}.get(name, name): theirs for name, theirs in found.items()}
    turns = draft.said(f"{section}.conversation_column")
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
    if not decays and not r.is_off(draft.said("optimizer.weight_decay")):
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


def _cycles(draft: Draft, given: ForeignSetting) -> None:
    if given.value != 0.5:
        draft.put("train.lr_scheduler_kwargs", {"num_cycles": given.value}, given)


def _dtype(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "model.dtype")
    if str(given.value) in ("bf16", "bfloat16"):
        r.full_in_bf16(draft)


def _length(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "data.max_seq_len")
    draft.put("data.overlong", "truncate", given, "as torchtune does")


def _limit(draft: Draft, given: ForeignSetting) -> None:
    if isinstance(given.value, int) and given.value > 0:
        if draft.said("epochs") in (None, 1):
            draft.put("train.max_steps", given.value, given)
        else:
            draft.unusable(given, "a limit for each epoch", "train.max_steps is one of the whole run")


def _logger(draft: Draft, given: ForeignSetting) -> None:
    if "WandB" in _name(given.value):
        r.wandb(draft, given, *(f"{given.section}.{part}" for part in ("project", "entity", "group")))
    elif "TensorBoard" in _name(given.value):
        draft.put("logging.tensorboard", True, given)
    elif _name(given.value) not in ("DiskLogger", "StdoutLogger"):
        draft.lost(given, "see the section logging for what there is", harmless=True)


def _output(draft: Draft, given: ForeignSetting) -> None:
    if "${" not in str(given.value):
        r.OUTPUT(draft, given)


def _loss(draft: Draft, given: ForeignSetting) -> None:
    if _name(given.value) not in _LOSSES:
        draft.unusable(given, f"the loss `{_name(given.value)}`", "cross-entropy of each trained token is the loss")


def _after(draft: Draft) -> None:
    if "train.max_grad_norm" not in draft.values:
        draft.put("train.max_grad_norm", r.UNCLIPPED, comment="torchtune does not clip unless told to; 1.0 is usual")
    if draft.said("optimizer.lr") is None:
        draft.put("train.learning_rate", 1e-3, comment="the default of torch's optimizers")
    if "data.max_seq_len" not in draft.values:
        what = "torchtune sets no length: rows over data.max_seq_len (2048) are an error here"
        draft.remark(what, "set data.max_seq_len")
    if not draft.full and draft.get("lora.target_modules") is None:
        draft.remark("no LoRA modules are named: all linear layers are adapted", "list them in lora.target_modules")


_KEYS_OF_DATA = (
    "source data_files split name column conversation_column conversation_style train_on_input column_map.input "
    "column_map.output column_map.instruction column_map.conversations"
)
RULES = r.Rules(
    rows=(
        ("model._component_ model.apply_lora_to_mlp model.quantize_base model.use_dora", r.read),
        ("model.lora_attn_modules", _attention_modules),
        ("model.lora_rank", r.to("lora.r")),
        ("model.lora_alpha", r.to("lora.alpha")),
        ("model.lora_dropout", r.to("lora.dropout")),
        (
            "model.apply_lora_to_output",
            r.lost("the head has no adapter; lora.modules_to_save: [lm_head] trains it whole"),
        ),
        (
            "model.image_size tokenizer.image_size tokenizer.max_num_tiles",
            r.lost("vision towers are kept, and not trained; rows hold text"),
        ),
        ("quantizer.*", r.lost("quantization-aware training is not offered")),
        ("custom_sharded_layers fsdp_cpu_offload data_parallel_shard_dim", r.SEVERAL_GPUS),
        ("data_parallel_replicate_dim", r.lost("it is launch.dp_replicate_size, with --gpus N", default=1)),
        ("context_parallel_dim", r.lost("it is launch.context_parallel_size, with --gpus N", default=1)),
        (
            "tensor_parallel_dim tensor_parallel_plan tensor_parallel_plan._component_",
            r.lost("one layer is not split over GPUs; launch.engine: fsdp shards the weights (--gpus N)", default=1),
        ),
        ("checkpointer.checkpoint_dir", lambda d, g: d.put("model.name_or_path", str(g.value).rstrip("/") or "/", g)),
        ("checkpointer.adapter_checkpoint", r.lost("adapters begin anew; a run goes on from --resume PATH")),
        (
            "tokenizer.prompt_template tokenizer.prompt_template.*",
            r.lost("rows are written by the chat template alone"),
        ),
        ("tokenizer.max_seq_len dataset.max_seq_len", _length),
        ("dataset._component_", _dataset("data.train")),
        ("dataset_val._component_", _dataset("data.eval")),
        ("dataset dataset_val", lambda d, g: d.unusable(g, "a list of datasets", "name each of them in data.train")),
        (" ".join(f"dataset.{key} dataset_val.{key}" for key in _KEYS_OF_DATA.split()), r.read),
        ("dataset.packed", r.to("data.packing")),
        ("dataset.split_across_pack", r.lost("a row is never split over packs")),
        ("dataset.add_eos", r.lost("each text ends with the token that ends texts", default=True)),
        ("dataset.new_system_prompt dataset_val.new_system_prompt", r.lost("write the system turn into the rows")),
        ("dataset_val.packed dataset_val.max_seq_len", r.note("evaluation never packs, and has training's length")),
        ("shuffle", r.lost(r.SHUFFLED, default=True)),
        (
            "collate_fn",
            lambda d, g: r.read(d, g) if "padded_collate_sft" in str(g.value) else r.lost(r.NO_COPIES)(d, g),
        ),
        ("loss._component_", _loss),
        ("optimizer._component_", _optimizer),
        ("optimizer.lr", r.to("train.learning_rate")),
        ("optimizer.betas", _betas),
        ("optimizer.eps", r.to("train.adam_epsilon")),
        ("optimizer.weight_decay", r.to("train.weight_decay")),
        ("optimizer.fused optimizer.foreach optimizer_in_bwd", r.read),
        ("clip_grad_norm", lambda d, g: r.clipping(d, g) if g.value not in ("inf", ".inf") else None),
        ("lr_scheduler._component_", _schedule),
        ("lr_scheduler.num_warmup_steps", r.to("train.warmup_steps")),
        ("lr_scheduler.num_cycles", _cycles),
        ("metric_logger._component_", _logger),
        ("metric_logger.name", r.run_name),
        ("dtype", _dtype),
        ("output_dir", _output),
        ("seed", r.seed),
        ("max_steps_per_epoch", _limit),
        ("enable_activation_checkpointing", r.checkpointing),
        ("enable_activation_offloading", r.switch("train.gradient_checkpointing", "offload")),
        ("compile", r.KERNELS),
        ("run_val_every_n_steps", r.steps("eval.every_steps", "evaluations")),
        ("batch_size", r.to("train.per_device_train_batch_size")),
        ("batch_size_val", r.to("eval.per_device_eval_batch_size")),
        ("log_every_n_steps", r.to("logging.every_steps")),
        ("resume_from_checkpoint", r.lost("a run goes on by itself; --resume PATH takes a checkpoint of ftcli")),
        ("save_every_n_epochs", r.note("write checkpoint.every_steps: counted in optimizer steps")),
        ("save_every_n_steps", r.steps("checkpoint.every_steps", "checkpoints")),
        ("keep_last_n_checkpoints", r.to("checkpoint.keep_last")),
        # Files and settings of the process that nothing learnt depends on.
        ("profiler.* checkpointer.* dataloader.* metric_logger.*", r.read),
        (
            "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.merges_path tokenizer.vocab_path",
            r.read,
        ),
        ("loss.num_output_chunks loss.ignore_index log_peak_memory_stats log_level device low_cpu_ram", r.read),
        ("save_adapter_weights_only save_last_epoch_only base_model_path model_type cudnn_deterministic_mode", r.read),
        ("enable_async_checkpointing enable_kv_cache", r.read),
    ),
    before=_before,
    after=_after,
    defaults=MappingProxyType({"train.weight_decay": 0.01, "train.lr_scheduler_type": "constant"}),
    trainer=False,
)
