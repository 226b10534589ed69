"""axolotl's YAML. Defaults are those of axolotl 0.18."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.tree import ListNode, MapNode, plain_tree
from ftcli.plain import JsonObject

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text"}
#: What it calls who speaks where `roles` says nothing; ftcli reads the same words.
_SPEAKS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
#: Keys of a dataset that are read below, or change nothing of what is learnt.
_READ = r.words(
    "path type name split revision data_files field field_messages field_instruction field_input field_output ds_type "
    "chat_template message_property_mappings message_field_role message_field_content roles roles_to_train train_on_eos"
)
#: Values of a dataset's keys that say what happens anyway.
_USUAL: dict[str, tuple[Any, ...]] = {
    "train_on_eot": ("turn",),
    "field_tools": ("tools",),
    "field_system": ("system",),
    "field_thinking": ("reasoning_content", "thinking"),
    "template_thinking_key": ("reasoning_content", "thinking"),
    "trust_remote_code": (False,),
    "shards": (1,),
    "drop_system_message": (False,),
    "split_thinking": (False,),
}
#: Its columns of rows that are no conversations, and ours.
_COLUMNS = {
    "field": "text", "field_instruction": "instruction", "field_input": "input", "field_output": "output",
}  # fmt: skip


def _before(draft: Draft) -> None:
    for name in ("rl", "reward_model", "process_reward_model"):
        if not r.is_off(draft.said(name)):
            method = draft.said(name) if name == "rl" else name.replace("_", " ")
            help = "supervised recipes are converted; for rewards begin with `ftcli recipes copy smoke-grpo`"
            raise draft.refuse(draft.given[name], f"`{method}` is not converted", help)
    adapter = draft.said("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise draft.refuse(draft.given["adapter"], f"the adapter `{adapter}`", "there is LoRA: adapter: lora or qlora")
    draft.full = adapter is None
    draft.put("lora.r", 8, comment="PEFT's default")
    draft.put("lora.alpha", 8, comment="PEFT's default")
    if adapter == "qlora":
        draft.put("quantization.method", "nf4", draft.given["adapter"])


def _bitsandbytes(draft: Draft, given: ForeignSetting) -> None:
    said = given.value if isinstance(given.value, dict) else {}
    double = truth(said.get("bnb_4bit_use_double_quant"))
    if double is not None and truth(draft.said("load_in_4bit")):
        draft.put("quantization.double_quant", double, given)
    if said.get("bnb_4bit_quant_type", "nf4") != "nf4":
        draft.unusable(given, f"4-bit type `{said['bnb_4bit_quant_type']}`", "the 4-bit type is nf4")


def _targets(draft: Draft, given: ForeignSetting) -> None:
    if given.value == "all-linear" or isinstance(given.value, list):
        if draft.get("lora.target_modules") != "all-linear":
            draft.put("lora.target_modules", given.value, given)
    else:
        help = "list the names of the modules; all linear layers are adapted"
        draft.unusable(given, "a pattern of module names", help)


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        tree = given.tree
        if not isinstance(tree, ListNode):
            draft.unusable(given, "datasets that are not a list", "name the files in data.train")
            return
        read = []
        for item in tree.items:
            if isinstance(item, MapNode):
                read.append(_Item(draft, ForeignSetting(given.name, item, item.origin)))
            else:
                draft.unusable(given, "a dataset that is not a map", "name the file in data.train")
        sources.put(draft, key, [source for item in read for source in item.sources()], given)
        layouts = {item.layout() for item in read}
        if key == "data.train":
            sources.layouts(draft, layouts, given)
            _templates_of(draft, read, given)

    return rule


class _Item:
    """One of `datasets`."""

    def __init__(self, draft: Draft, given: ForeignSetting) -> None:
        self.draft = draft
        self.given = given
        self.map: JsonObject = plain_tree(given.tree)
        self.kind = str(self.map.get("type") or "")
        self.mapping = self.map.get("message_property_mappings") or {}

    def sources(self) -> list[JsonObject]:
        """Its files, or its dataset of the Hub, with what is known of the rows."""
        path, files = str(self.map.get("path") or ""), self.map.get("data_files")
        more = {key: self.map.get(key) for key in ("name", "split", "revision")}
        if files and sources.place(path) not in (None, path) and path not in ("json", "csv", "parquet"):
            self._tell(f"data_files of `{path}`", "download these files, and name them in data.train")
        self._masks()
        paths = (files if isinstance(files, list) else [files]) if files else [path]
        columns = self._columns()
        return [sources.source(self.draft, self.given, str(each), columns=columns, **more) for each in paths]

    def layout(self) -> str | None:
        """Our name of the layout; None where the columns have to say it."""
        head, _, rest = self.kind.replace(":", ".").partition(".")
        if head == "alpaca":
            sources.alpaca_remark(self.draft, self.given)
        if head == "chat_template":
            return "sharegpt" if self._is_sharegpt() else "messages"
        if self.map.get("type") is not None and (head not in _FORMATS or rest):
            name = self.kind if isinstance(self.map["type"], str) else "a prompt of its own"
            help = "docs/data.md has the layouts that there are; rename columns with data.train[].columns"
            self._tell(f"rows of type `{name}`", help)
        return _FORMATS.get(head)

    def _is_sharegpt(self) -> bool:
        role = self.mapping.get("role", self.map.get("message_field_role")) if isinstance(self.mapping, dict) else None
        return bool(role == "from")

    def _columns(self) -> dict[str, str]:
        """Our name of a column: theirs."""
        named = {ours: str(self.map[theirs]) for theirs, ours in _COLUMNS.items() if self.map.get(theirs)}
        if self.map.get("field_messages"):
            named["conversations" if self._is_sharegpt() else "messages"] = str(self.map["field_messages"])
        return {ours: theirs for ours, theirs in named.items() if ours != theirs}

    def _masks(self) -> None:
        trained = self.map.get("roles_to_train", ["assistant"])
        if trained is not None and {_SPEAKS.get(str(role), role) for role in trained} != {"assistant"}:
            self._tell(f"roles_to_train: {trained}", "data.loss_on is assistant, completion or all")
        if self.map.get("train_on_eos") not in (None, "turn"):
            self._tell(f"train_on_eos: {self.map['train_on_eos']}", "the token that ends each trained turn is trained")
        said = {"role": self.map.get("message_field_role"), "content": self.map.get("message_field_content")}
        said |= self.mapping if isinstance(self.mapping, dict) else {"?": self.mapping}
        names = {key: value for key, value in said.items() if value and key != value}
        if names not in ({}, {"role": "from", "content": "value"}):
            help = "turns have role and content, or from and value: " + r.NO_COPIES
            self._tell(f"message_property_mappings: {names}", help)
        roles = self.map.get("roles") or {}
        if not isinstance(roles, dict) or any(
            _SPEAKS.get(word) != role for role, words in roles.items() for word in words
        ):
            self._tell(f"roles: {roles}", "who speaks is user, assistant, system or tool: " + r.NO_COPIES)
        for key, value in self.map.items():
            if key not in _READ and value is not None and value not in _USUAL.get(key, ()):
                self._tell(f"`{key}` of a dataset", "there is no counterpart: prepare the file so")

    def _tell(self, what: str, help: str) -> None:
        self.draft.unusable(self.given, what, help)


def _templates_of(draft: Draft, items: list[_Item], given: ForeignSetting) -> None:
    """A dataset's own template, which wins over that of the recipe; here all rows have one."""
    named = {str(item.map.get("chat_template") or draft.said("chat_template") or "") for item in items}
    if not any(item.map.get("chat_template") for item in items):
        return
    if len(named) == 1:
        sources.named_template(draft, given, named.pop())
    else:
        help = "all rows are written by one template: data.chat_template, or the tokenizer's own"
        draft.unusable(given, f"datasets with templates of their own ({', '.join(sorted(named))})", help)


def _chat_template(draft: Draft, given: ForeignSetting) -> None:
    if given.value != "jinja" and "data.chat_template" not in draft.values:
        sources.named_template(draft, given, str(given.value))


def _total_batch(draft: Draft, given: ForeignSetting) -> None:
    micro = draft.said("micro_batch_size") or 1
    if isinstance(given.value, int) and isinstance(micro, int) and micro and given.value % micro == 0:
        draft.put("train.gradient_accumulation_steps", given.value // micro, given)
        help = "on several GPUs axolotl divides by their number as well"
        draft.differs(given, "batch_size is rows a step, which became train.gradient_accumulation_steps", help)
    else:
        help = "write train.gradient_accumulation_steps: rows a step are that times the batch size"
        draft.unusable(given, f"batch_size: {given.value} is no multiple of micro_batch_size", help)


def _lowest_rate(draft: Draft, given: ForeignSetting) -> None:
    draft.put("train.lr_scheduler_type", "cosine_with_min_lr", given)
    draft.put("train.lr_scheduler_kwargs", {"min_lr_rate": given.value}, given)


def _schedule(draft: Draft, given: ForeignSetting) -> None:
    if "cosine_min_lr_ratio" not in draft.given:
        draft.take(given, "train.lr_scheduler_type")


def _patience(draft: Draft, given: ForeignSetting) -> None:
    if isinstance(given.value, int) and given.value > 0:
        draft.put("train.early_stopping", {"patience": given.value}, given)


def _pretraining(draft: Draft, given: ForeignSetting) -> None:
    raise draft.refuse(given, "pretraining on a stream is not converted", "name files of text in data.train")


def _warmup_share(draft: Draft, given: ForeignSetting) -> None:
    if "warmup_steps" not in draft.given:
        draft.take(given, "train.warmup_steps")


def _after(draft: Draft) -> None:
    if not draft.full and draft.get("lora.target_modules") is None:
        draft.remark("no LoRA modules are named: all linear layers are adapted", "list them in lora.target_modules")
    if "train.warmup_steps" not in draft.values:
        draft.put("train.warmup_steps", 0.03, comment="axolotl's default, there at most 100 steps")
    if draft.said("learning_rate") is None:
        draft.remark("no learning rate: axolotl asks for one, and here it is 2e-4", "set train.learning_rate")
    if draft.get("model.dtype") in (None, "auto", "bfloat16"):
        r.full_in_bf16(draft)
    for name in ("wandb_mode", "use_wandb"):
        if draft.said(name) in ("disabled", False):
            draft.values.pop("logging.wandb", None)


_SCHEMA_DEFAULTS = {
    "data.max_seq_len": 512,
    "data.overlong": "drop",
    "train.lr_scheduler_type": "cosine",
    "train.optim": "adamw_torch_fused",
}
RULES = r.Rules(
    rows=(
        *r.OF_TRANSFORMERS,
        ("rl reward_model process_reward_model adapter", r.read),
        ("bf16", r.half("fp16", "bfloat16", "float16")),
        ("load_in_4bit", r.switch("quantization.method", "nf4")),
        ("lora_target_modules", _targets),
        ("lora_target_linear", r.switch("lora.target_modules", "all-linear")),
        ("lora_fan_in_fan_out lora_on_cpu qlora_sharded_model_loading", r.OF_ITS_PROCESS),
        ("lora_model_dir", r.lost("adapters begin anew; a run of ftcli goes on from --resume PATH")),
        ("lora_target_parameters", r.lost("all-linear adapts experts too; list modules in lora.target_modules")),
        ("peft_use_rslora", r.to("lora.use_rslora")),
        ("datasets", _datasets("data.train")),
        ("test_datasets", _datasets("data.eval")),
        ("pretraining_dataset", _pretraining),
        ("val_set_size", r.NO_SPLIT),
        ("shuffle_merged_datasets", r.lost(r.SHUFFLED, default=True)),
        ("shuffle_before_merging_datasets", r.note(r.SHUFFLED)),
        ("dataset_prepared_path dataset_shard_num dataset_keep_in_memory hf_use_auth_token", r.read),
        ("chat_template", _chat_template),
        ("chat_template_jinja", lambda draft, given: sources.named_template(draft, given, str(given.value))),
        ("train_on_inputs", r.switch("data.loss_on", "all")),
        ("default_system_message", r.lost("write the system turn into the rows")),
        ("eval_sequence_len", r.lost("evaluation has the limit of training: data.max_seq_len")),
        ("warmup_ratio", _warmup_share),
        ("warmup_steps", r.to("train.warmup_steps")),
        ("batch_size", _total_batch),
        ("lr_scheduler", _schedule),
        ("cosine_min_lr_ratio", _lowest_rate),
        ("early_stopping_patience", _patience),
        ("flash_attention sdp_attention flex_attention xformers_attention", r.attention),
        ("eager_attention", r.switch("model.attention", "eager")),
        ("s2_attention", r.lost("shifted sparse attention is not offered; attention is full")),
        ("sample_packing", r.to("data.packing")),
        ("eval_sample_packing", r.note("evaluation never packs")),
        (
            "pad_to_sequence_len pad_to_multiple_of batch_flattening",
            r.note("batches are padded to their longest row, or packed"),
        ),
        ("wandb_project", lambda draft, given: r.wandb(draft, given, "wandb_project", "wandb_entity", "wandb_group")),
        ("wandb_entity wandb_group wandb_watch wandb_log_model wandb_mode wandb_run_id use_wandb", r.read),
        ("wandb_name", r.run_name),
        ("use_tensorboard", r.switch("logging.tensorboard", True)),
        ("lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel liger_rope liger_rms_norm", r.KERNELS),
        ("liger_glu_activation liger_fused_linear_cross_entropy cut_cross_entropy liger_layer_norm", r.KERNELS),
        ("liger_rms_norm_gated use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel", r.KERNELS),
        ("flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flex_attn_compile_kwargs.*", r.KERNELS),
        ("chunked_cross_entropy chunked_cross_entropy_num_chunks gemma4_hybrid_attn_impl", r.KERNELS),
        ("plugins", r.note("ftcli has kernels of its own; whatever else the plugins do has no counterpart")),
        ("strict eval_table_size loss_watchdog_patience otel_metrics_host otel_metrics_port", r.read),
        ("evals_per_epoch", r.lost("write eval.every_steps: evaluations are counted in optimizer steps")),
        ("saves_per_epoch", r.note("write checkpoint.every_steps (500 unless said): counted in optimizer steps")),
        ("loss_watchdog_threshold", r.note("a loss that is not finite ends the run (exit 6)")),
        ("special_tokens.pad_token", r.note("padding is never trained nor attended to; the tokenizer's own is used")),
        ("special_tokens.* tokens tokens.* added_tokens_overrides.*", r.TOKENS),
        ("eot_tokens", r.note("each trained turn ends with the token that the chat template ends it with")),
        ("bnb_config_kwargs", _bitsandbytes),
        ("unfrozen_parameters", r.lost("a part of the weights cannot be chosen: LoRA, or all of them")),
        ("quantize_moe_experts", r.lost("stacks of experts stay in the compute dtype under quantization.method: nf4")),
        ("processor_type freeze_mm_modules", r.lost("vision towers are kept, and not trained; rows hold text")),
        ("skip_prepare_dataset", r.lost("images are not read; rows hold text")),
        ("qat.*", r.lost("quantization-aware training is not offered")),
        ("model_config.* overrides_of_model_config.*", r.lost("the model's config.json decides")),
        ("model_type tokenizer_type base_model_config", r.note("they are read from the model's files")),
        ("is_llama_derived_model is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model", r.read),
        ("gptq", r.lost("weights that are quantised already are not read; quantization.method: nf4 does it")),
        ("dataset_processes dataset_num_proc", r.to("data.num_proc")),
    ),
    before=_before,
    after=_after,
    defaults=MappingProxyType(_SCHEMA_DEFAULTS),
)
