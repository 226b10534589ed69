"""axolotl's YAML. Defaults are those of axolotl 0.18."""

from __future__ import annotations

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.tree import ListNode, MapNode, plain_tree
from ftcli.plain import JsonObject

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text"}


def _before(draft: Draft) -> None:
    method = draft.said("rl") or ("reward model" if truth(draft.said("reward_model")) else None)
    if method:
        help = "supervised recipes are converted; for rewards begin with `ftcli recipes copy smoke-grpo`"
        raise draft.refuse(
            draft.given.get("rl") or draft.given.get("reward_model"), f"`{method}` is not converted", help
        )
    adapter = draft.said("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        raise draft.refuse(draft.given["adapter"], f"the adapter `{adapter}`", "there is LoRA: adapter: lora or qlora")
    if adapter:
        draft.put("lora.r", 8, comment="PEFT's default")
        draft.put("lora.alpha", 8, comment="PEFT's default")


def _four_bit(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("quantization.method", "nf4", given)


def _bitsandbytes(draft: Draft, given: ForeignSetting) -> None:
    said = given.value if isinstance(given.value, dict) else {}
    double = truth(said.get("bnb_4bit_use_double_quant"))
    if double is not None and truth(draft.said("load_in_4bit")):
        draft.put("quantization.double_quant", double, given)
    if said.get("bnb_4bit_quant_type", "nf4") != "nf4":
        draft.unusable(given, f"4-bit type `{said['bnb_4bit_quant_type']}`", "the 4-bit type is nf4")


def _targets(draft: Draft, given: ForeignSetting) -> None:
    if draft.get("lora.target_modules") == "all-linear":
        return
    if given.value == "all-linear":
        draft.put("lora.target_modules", "all-linear", given)
    elif isinstance(given.value, list):
        draft.put("lora.target_modules", given.value, given)
    else:
        draft.unusable(
            given, "a pattern of module names", "list the names of the modules; all linear layers are adapted"
        )


def _all_linear(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("lora.target_modules", "all-linear", given)


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        tree = given.tree
        if not isinstance(tree, ListNode):
            draft.unusable(given, "datasets that are not a list", "name the files in data.train")
            return
        items, found = [], set()
        for item in tree.items:
            if not isinstance(item, MapNode):
                draft.unusable(given, "a dataset that is not a map", "name the file in data.train")
                continue
            read = _Item(draft, ForeignSetting(given.name, item, item.origin))
            items += read.sources()
            found.add(read.layout())
        sources.put(draft, key, items, given)
        if key == "data.train":
            sources.layouts(draft, found, given)

    return rule


class _Item:
    """One of `datasets`."""

    def __init__(self, draft: Draft, given: ForeignSetting) -> None:
        self.draft = draft
        self.given = given
        self.map: JsonObject = plain_tree(given.tree)
        self.kind = str(self.map.get("type") or "")

    def sources(self) -> list[JsonObject]:
        """Its files, or its dataset of the Hub, with what is known of the rows."""
        path, files = str(self.map.get("path") or ""), self.map.get("data_files")
        more = {key: self.map.get(key) for key in ("name", "split", "revision")}
        if files:
            self._files_beside(path)
            paths = files if isinstance(files, list) else [files]
        else:
            paths = [path]
        self._masks()
        columns = self._columns()
        return [sources.source(self.draft, self.given, str(each), columns=columns, **more) for each in paths]

    def layout(self) -> str | None:
        """Our name of the layout; None where the columns have to say it."""
        head = self.kind.replace(":", ".").partition(".")[0]
        if head == "alpaca":
            sources.alpaca_remark(self.draft, self.given)
        if head == "chat_template":
            return "sharegpt" if self._is_sharegpt() else "messages"
        if head not in _FORMATS and self.map.get("type") is not None:
            name = head if isinstance(self.map["type"], str) else "a prompt of its own"
            help = "docs/data.md has the layouts that there are; rename columns with data.train[].columns"
            self.draft.unusable(self.given, f"rows of type `{name}`", help)
        return _FORMATS.get(head)

    def _files_beside(self, path: str) -> None:
        if sources.place(path) not in (None, path) and path not in ("json", "csv", "parquet"):
            self.draft.unusable(
                self.given, f"data_files of `{path}`", "download these files, and name them in data.train"
            )

    def _is_sharegpt(self) -> bool:
        mapping = self.map.get("message_property_mappings") or {}
        role = mapping.get("role", self.map.get("message_field_role", "role"))
        return bool(role == "from")

    def _columns(self) -> dict[str, str]:
        """Our name of a column: theirs."""
        named: dict[str, str] = {}
        messages = self.map.get("field_messages")
        ours = "conversations" if self._is_sharegpt() else "messages"
        if messages and messages != ours:
            named[ours] = str(messages)
        if self.map.get("field") and self.map["field"] != "text":
            named["text"] = str(self.map["field"])
        for theirs, name in (
            ("field_instruction", "instruction"),
            ("field_input", "input"),
            ("field_output", "output"),
        ):
            if self.map.get(theirs) and self.map[theirs] != name:
                named[name] = str(self.map[theirs])
        return named

    def _masks(self) -> None:
        trained = self.map.get("roles_to_train")
        if trained not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
            help = "data.loss_on is assistant, completion or all"
            self.draft.unusable(self.given, f"roles_to_train: {trained}", help)
        if self.map.get("train_on_eos") not in (None, "turn", "all"):
            help = "the token that ends each trained turn is trained"
            self.draft.unusable(self.given, f"train_on_eos: {self.map['train_on_eos']}", help)
        for key in ("shards", "drop_system_message", "split_thinking"):
            if self.map.get(key):
                self.draft.unusable(self.given, f"`{key}` of a dataset", "there is no counterpart: prepare the file so")


def _chat_template(draft: Draft, given: ForeignSetting) -> None:
    if given.value != "jinja":
        sources.named_template(draft, given, str(given.value))


def _template_text(draft: Draft, given: ForeignSetting) -> None:
    text = str(given.value)
    if text.endswith(".jinja") and "\n" not in text:
        draft.put("data.chat_template", text, given)
    else:
        draft.unusable(
            given, "a template inside of the recipe", "write it to a .jinja file, and name that in data.chat_template"
        )


def _inputs(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.loss_on", "all", given)


def _total_batch(draft: Draft, given: ForeignSetting) -> None:
    micro = draft.said("micro_batch_size") or 1
    if isinstance(given.value, int) and isinstance(micro, int) and micro and given.value % micro == 0:
        draft.put("train.gradient_accumulation_steps", given.value // micro, given)
        help = "on several GPUs axolotl divides by their number as well"
        draft.differs(given, "batch_size is rows a step, which became train.gradient_accumulation_steps", help)


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


def _after(draft: Draft) -> None:
    has_adapters = bool(draft.said("adapter"))
    if has_adapters and draft.get("lora.target_modules") is None:
        draft.remark("no LoRA modules are named: all linear layers are adapted", "list them in lora.target_modules")
    draft.default("data.max_seq_len", 512)
    draft.default("data.overlong", "drop")
    draft.default("train.lr_scheduler_type", "cosine")
    draft.default("train.optim", "adamw_torch_fused")
    if "train.warmup_steps" not in draft.values:
        draft.put("train.warmup_steps", 0.03, comment="axolotl's default, there at most 100 steps")
    if draft.said("learning_rate") is None:
        draft.remark("no learning rate: axolotl asks for one, and here it is 2e-4", "set train.learning_rate")


RULES = r.Rules(
    rules={
        **r.OF_TRANSFORMERS,
        "rl": r.ignored,
        "adapter": r.ignored,
        "reward_model": r.ignored,
        "load_in_4bit": _four_bit,
        "lora_target_modules": _targets,
        "lora_target_linear": _all_linear,
        "datasets": _datasets("data.train"),
        "test_datasets": _datasets("data.eval"),
        "pretraining_dataset": _pretraining,
        "val_set_size": r.no_split,
        "chat_template": _chat_template,
        "chat_template_jinja": _template_text,
        "train_on_inputs": _inputs,
        "batch_size": _total_batch,
        "lr_scheduler": _schedule,
        "cosine_min_lr_ratio": _lowest_rate,
        "early_stopping_patience": _patience,
        "flash_attention": r.attention,
        "sdp_attention": r.attention,
        "flex_attention": r.attention,
        "xformers_attention": r.attention,
        "s2_attention": r.missing("shifted sparse attention is not offered; attention is full"),
        "sample_packing": r.to("data.packing"),
        "eval_sample_packing": r.harmless("evaluation never packs"),
        "pad_to_sequence_len": r.harmless("batches are padded to their longest row, or packed"),
        "wandb_project": r.wandb,
        "wandb_entity": r.ignored,
        "wandb_watch": r.ignored,
        "wandb_log_model": r.ignored,
        "wandb_mode": r.ignored,
        "wandb_name": r.run_name,
        "wandb_run_id": r.ignored,
        "lora_mlp_kernel": r.kernels,
        "lora_qkv_kernel": r.kernels,
        "lora_o_kernel": r.kernels,
        "liger_rope": r.kernels,
        "liger_rms_norm": r.kernels,
        "liger_glu_activation": r.kernels,
        "liger_fused_linear_cross_entropy": r.kernels,
        "cut_cross_entropy": r.kernels,
        "plugins": r.harmless("ftcli has kernels of its own; whatever else the plugins do has no counterpart"),
        "strict": r.ignored,
        "debug": r.ignored,
        "local_rank": r.ignored,
        "eval_table_size": r.ignored,
        "evals_per_epoch": r.missing("write eval.every_steps: evaluations are counted in optimizer steps"),
        "saves_per_epoch": r.harmless("write checkpoint.every_steps (500 unless said): counted in optimizer steps"),
        "loss_watchdog_threshold": r.harmless("a loss that is not finite ends the run (exit 6)"),
        "loss_watchdog_patience": r.ignored,
        "special_tokens.pad_token": r.harmless("padding is never trained nor attended to; the tokenizer's own is used"),
        "special_tokens.*": r.missing(
            "tokens are those of the tokenizer: save one that has them, name it in model.tokenizer"
        ),
        "tokens.*": r.missing("tokens are those of the tokenizer: save one that has them, name it in model.tokenizer"),
        "eot_tokens": r.harmless("each trained turn ends with the token that the chat template ends it with"),
        "bnb_config_kwargs": _bitsandbytes,
        "unfrozen_parameters": r.missing("a part of the weights cannot be chosen: LoRA, or all of them"),
        "lora_target_parameters": r.missing("all-linear adapts experts too; list modules in lora.target_modules"),
        "quantize_moe_experts": r.harmless("quantization.method: nf4 stores experts in 4 bits, too"),
        "processor_type": r.missing("vision towers are kept, and not trained; rows hold text"),
        "skip_prepare_dataset": r.missing("images are not read; rows hold text"),
        "qat.*": r.missing("quantization-aware training is not offered"),
        "model_config.*": r.missing("the model's config.json decides"),
        "liger_layer_norm": r.kernels,
        "liger_rms_norm_gated": r.kernels,
        "use_kernels": r.kernels,
        "use_scattermoe": r.kernels,
        "use_sonicmoe": r.kernels,
        "experts_implementation": r.kernels,
        "fused_attn_kernel": r.kernels,
        "flash_attn_cross_entropy": r.kernels,
        "flash_attn_rms_norm": r.kernels,
        "flash_attn_fuse_mlp": r.kernels,
        "flex_attn_compile_kwargs.*": r.kernels,
        "hub_model_id": r.harmless("nothing is uploaded: `hf upload` takes the run's adapter/ or model/"),
    },
    before=_before,
    after=_after,
)
