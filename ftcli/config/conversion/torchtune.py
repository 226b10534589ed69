"""torchtune's YAML. Its components are named by Python paths; what each of them does stands here."""

from __future__ import annotations

import re

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialect_values import VALUES
from ftcli.tables.dialects import words_of

#: Builders of datasets: where their rows are, our layout, and whether prompts are trained unless said otherwise.
_DATASETS: dict[str, tuple[str | None, str | None, bool]] = {
    "alpaca_dataset": ("hub:tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("hub:yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("hub:Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": (None, None, False),
    "instruct_dataset": (None, None, False),
    "text_completion_dataset": (None, "text", False),
}
_STYLES = {"openai": "messages", "sharegpt": "sharegpt"}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
#: torchtune's names of projections in the layers of transformers.
_MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_UNCLIPPED = 1e9
#: What only its recipes of preferences, rewards and distillation have.
_OTHERS = ("reward_fn", "rl_loss", "ref_checkpointer", "reward_and_value_model", "teacher_model", "ppo_batch_size")


def _before(draft: Draft) -> None:
    builder = str(draft.said("model._component_") or "").rpartition(".")[2]
    if not _any(draft, "optimizer"):
        help = "recipes of fine-tuning are converted, not those of generation, evaluation and quantization"
        raise draft.refuse(None, "this recipe of torchtune has no optimizer: it trains nothing", help)
    if any(_any(draft, name) for name in _OTHERS):
        raise draft.refuse(
            None, "recipes of preferences and rewards are not converted", "those of SFT, LoRA and QLoRA are"
        )
    if re.match(r"(q?lora|dora)_", builder):
        draft.put("lora.r", 8, comment="torchtune's default")
        draft.put("lora.alpha", 16, comment="torchtune's default")
    if builder.startswith("dora_") or truth(draft.said("model.use_dora")):
        draft.put("lora.use_dora", True, draft.given.get("model._component_"))
    if builder.startswith("qlora_") or truth(draft.said("model.quantize_base")):
        draft.put("quantization.method", "nf4", draft.given.get("model._component_"))


def _any(draft: Draft, name: str) -> bool:
    return any(given.partition(".")[0] == name for given in draft.given)


def _attention_modules(draft: Draft, given: ForeignSetting) -> None:
    names = [str(name) for name in given.value] if isinstance(given.value, list) else [str(given.value)]
    ours = list(dict.fromkeys(_MODULES.get(name, name) for name in names))
    if truth(draft.said("model.apply_lora_to_mlp")):
        ours += ["gate_proj", "up_proj", "down_proj"]
    draft.put("lora.target_modules", "all-linear" if len(ours) == 7 else ours, given)


def _head(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.lost(given, "the head has no adapter; lora.modules_to_save: [lm_head] trains it whole")


def _dataset(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        section = given.section
        builder = str(given.value).rpartition(".")[2]
        if builder not in _DATASETS:
            draft.unusable(given, f"the dataset `{builder}`", f"name its rows in {key}: a file, or hub:ORG/NAME")
            return
        where, layout, prompts = _DATASETS[builder]
        source, files = draft.said(f"{section}.source"), draft.said(f"{section}.data_files")
        path = str(files or where or source or "")
        column = draft.said(f"{section}.column")
        columns = {"text": str(column)} if column and layout == "text" else {}
        columns |= _column_map(draft, section)
        split = draft.said(f"{section}.split")
        name = draft.said(f"{section}.name")
        item = sources.source(draft, given, path.removeprefix("hub:"), columns=columns, split=split, name=name)
        sources.put(draft, key, [item], given)
        if key != "data.train":
            return
        sources.layouts(
            draft, {_STYLES.get(str(draft.said(f"{section}.conversation_style")), layout or "") or None}, given
        )
        if layout == "alpaca":
            sources.alpaca_remark(draft, given)
        trained = draft.said(f"{section}.train_on_input")
        if truth(trained) if trained is not None else prompts:
            draft.put("data.loss_on", "all", draft.given.get(f"{section}.train_on_input"), _if(trained is None))

    return rule


def _if(default: bool) -> str | None:
    return "torchtune's default for these rows" if default else None


def _column_map(draft: Draft, section: str) -> dict[str, str]:
    start = f"{section}.column_map."
    found = {
        name.removeprefix(start): str(given.value) for name, given in draft.given.items() if name.startswith(start)
    }
    ours = {"input": "prompt", "output": "completion"} if "output" in found else {"conversations": "conversations"}
    return {ours.get(theirs, theirs): column for theirs, column in found.items() if ours.get(theirs, theirs) != column}


def _optimizer(draft: Draft, given: ForeignSetting) -> None:
    """By its Python path, or by the name of its class."""
    path = str(given.value)
    words = VALUES["train.optim"]
    known = words.get(path) or words.get(path.rpartition(".")[2]) or {"SGD": "sgd"}.get(path.rpartition(".")[2])
    if known is None:
        choices = draft.schema.choices(draft.schema.at(("train", "optim")) or {})
        draft.unusable(given, f"the optimizer `{path}`", f"AdamW is used; train.optim is one of {', '.join(choices)}")
        return
    fused = known == "adamw_torch" and truth(draft.said("optimizer.fused"))
    draft.put("train.optim", "adamw_torch_fused" if fused else known, given)


def _betas(draft: Draft, given: ForeignSetting) -> None:
    if isinstance(given.value, list) and len(given.value) == 2:
        draft.put("train.adam_beta1", given.value[0], given)
        draft.put("train.adam_beta2", given.value[1], given)


def _schedule(draft: Draft, given: ForeignSetting) -> None:
    name = str(given.value).rpartition(".")[2]
    known = next((ours for word, ours in _SCHEDULES.items() if word in name), None)
    if known is None:
        draft.unusable(given, f"the schedule `{name}`", "the rate falls linearly; see train.lr_scheduler_type")
    else:
        draft.put("train.lr_scheduler_type", known, given)


def _checkpoint(draft: Draft, given: ForeignSetting) -> None:
    draft.put("model.name_or_path", str(given.value).rstrip("/") or "/", given)


def _dtype(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "model.dtype")
    if str(given.value) in ("bf16", "bfloat16") and not any(key.startswith("lora.") for key in draft.values):
        help = "that takes 16 bytes a parameter for AdamW, there 8; lora trains less"
        draft.differs(given, "torchtune keeps weights and optimizer in bf16, ftcli in float32", help)


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
    name = str(given.value).rpartition(".")[2]
    if "WandB" in name:
        r.wandb(draft, given)
    elif "TensorBoard" in name:
        draft.put("logging.tensorboard", True, given)


def _output(draft: Draft, given: ForeignSetting) -> None:
    if "${" not in str(given.value):
        r.output_dir(draft, given)


def _after(draft: Draft) -> None:
    draft.default("train.weight_decay", 0.01)
    draft.default("train.lr_scheduler_type", "constant")
    if "train.max_grad_norm" not in draft.values:
        draft.put("train.max_grad_norm", _UNCLIPPED, comment="torchtune does not clip unless told to; 1.0 is usual")
    if "data.max_seq_len" not in draft.values:
        draft.remark(
            "torchtune sets no length: rows over data.max_seq_len (2048) are an error here", "set data.max_seq_len"
        )
    if any(key.startswith("lora.") for key in draft.values) and draft.get("lora.target_modules") is None:
        draft.remark("no LoRA modules are named: all linear layers are adapted", "list them in lora.target_modules")


RULES = r.Rules(
    rules={
        "model._component_": r.ignored,
        "model.lora_attn_modules": _attention_modules,
        "model.apply_lora_to_mlp": r.ignored,
        "model.apply_lora_to_output": _head,
        "model.quantize_base": r.ignored,
        "model.use_dora": r.ignored,
        "model.image_size": r.missing("vision towers are kept, and not trained; rows hold text"),
        "batch_size_val": r.to("eval.per_device_eval_batch_size"),
        "quantizer.groupsize": r.missing("quantization-aware training is not offered"),
        "custom_sharded_layers": r.several_gpus,
        "fsdp_cpu_offload": r.several_gpus,
        "tensor_parallel_dim": r.several_gpus,
        "data_parallel_shard_dim": r.several_gpus,
        "data_parallel_replicate_dim": r.several_gpus,
        "checkpointer.checkpoint_dir": _checkpoint,
        "tokenizer.max_seq_len": _length,
        "dataset._component_": _dataset("data.train"),
        "dataset_val._component_": _dataset("data.eval"),
        "dataset.packed": r.to("data.packing"),
        "dataset.max_seq_len": _length,
        "dataset.new_system_prompt": r.missing("write the system turn into the rows"),
        "optimizer._component_": _optimizer,
        "optimizer.lr": r.to("train.learning_rate"),
        "optimizer.betas": _betas,
        "optimizer.eps": r.to("train.adam_epsilon"),
        "optimizer.weight_decay": r.to("train.weight_decay"),
        "lr_scheduler._component_": _schedule,
        "lr_scheduler.num_warmup_steps": r.to("train.warmup_steps"),
        "metric_logger._component_": _logger,
        "metric_logger.name": r.run_name,
        "dtype": _dtype,
        "output_dir": _output,
        "seed": r.seed,
        "max_steps_per_epoch": _limit,
        "enable_activation_checkpointing": r.checkpointing,
        "enable_activation_offloading": r.offloading,
        "compile": r.kernels,
        "run_val_every_n_steps": r.steps("eval.every_steps", "evaluations"),
        "resume_from_checkpoint": r.ignored,
    },
    before=_before,
    after=_after,
    # Parts of components that are read with them, and settings of the process that nothing learnt depends on.
    silent=words_of(
        "_component_ path merges_file collate_fn source data_files split name column conversation_style train_on_input "
        "input output conversations fused checkpoint_files recipe_checkpoint model_type "
        "adapter_checkpoint filename_format max_filename safe_serialization log_dir project "
        "log_peak_memory_stats log_level device shuffle low_cpu_ram save_adapter_weights_only "
        "enabled cpu cuda profile_memory with_stack record_shapes with_flops wait_steps "
        "warmup_steps active_steps num_cycles num num_output_chunks optimizer_in_bwd ignore_index "
        "keep_last_n_checkpoints save_last_epoch_only prompt_template output_dir"
    ),
)
