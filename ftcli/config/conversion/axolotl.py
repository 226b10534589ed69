"""axolotl's YAML: what its rows of the table of names do not say. Defaults are those of axolotl 0.18."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftcli.config.conversion import preferences, sources
from ftcli.config.conversion import rules as r
from ftcli.config.conversion.draft import Draft, is_off, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.yaml import ListNode, MapNode, plain_tree
from ftcli.plain import JsonObject, map_in

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text"}
#: What it calls who speaks where `roles` says nothing; ftcli reads the same words.
_SPEAKS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
#: Its columns of rows that are no conversations, and ours.
_COLUMNS = {
    "field": "text", "field_instruction": "instruction", "field_input": "input", "field_output": "output",
}  # fmt: skip
#: Columns of pairs: their prompt, chosen and rejected answer by the last part of `type`; whether they are strings.
_PAIRS: Mapping[str, tuple[tuple[str, str, str], bool]] = {
    "intel": (("question", "chosen", "rejected"), True),
    "icr": (("input", "chosen", "rejected"), True),
    "prompt_pairs": (("prompt", "chosen", "rejected"), True),
    "chat_template": (("input", "chosen", "rejected"), True),  # of bradley_terry
    "argilla": (("instruction", "chosen_response", "rejected_response"), True),
    "ultra": (("prompt", "chosen", "rejected"), False),
    "argilla_chat": (("prompt", "chosen", "rejected"), False),
    "default": (("messages", "chosen", "rejected"), False),
}  # fmt: skip
#: Columns of pairs that a dataset names itself.
_FIELDS = {
    "prompt": ("field_prompt", "field_messages"), "chosen": ("field_chosen",), "rejected": ("field_rejected",),
}  # fmt: skip
#: The same of labelled answers; where a conversation is in one column, it is that of the prompt, too.
_LABELLED: Mapping[str, tuple[tuple[str, str, str], bool]] = {
    "intel": (("question", "completion", "label"), True),
    "argilla": (("instruction", "completion", "label"), True),
    "prompt_pairs": (("prompt", "completion", "label"), True),
    "ultra": (("prompt", "completion", "label"), True),
    "argilla_chat": (("completion", "completion", "label"), False),
}
_LABELLED_FIELDS = {"prompt": ("field_prompt",), "completion": ("field_completion",), "label": ("field_label",)}
#: Keys of a dataset that are read below, or change nothing of what is learnt.
_READ = frozenset(
    (
        *_COLUMNS, "field_prompt", "field_chosen", "field_rejected", "path", "type", "name", "split", "revision",
        "data_files", "field_messages", "ds_type", "roles", "chat_template", "message_property_mappings",
        "message_field_role", "message_field_content", "field_completion", "field_label",
    )
)  # fmt: skip
#: Values of a dataset's keys that say what happens anyway.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",), "train_on_eot": ("turn",), "field_tools": ("tools",), "field_system": ("system",),
    "field_thinking": ("reasoning_content", "thinking"), "template_thinking_key": ("reasoning_content", "thinking"),
    "trust_remote_code": (False,), "shards": (1,), "drop_system_message": (False,), "split_thinking": (False,),
}  # fmt: skip
#: In names of plugins that compute the same, and faster.
_KERNELS = ("liger", "cut_cross_entropy", "kernels")
#: What to do about the others.
_HELP = {
    "roles_to_train": "data.loss_on is assistant, completion or all",
    "train_on_eos": "the token that ends each trained turn is trained",
}


def _before(draft: Draft) -> None:
    draft.full = is_off(draft.said("adapter"))
    rl, scores = draft.given.get("rl"), draft.given.get("reward_model")
    if scores is not None and truth(scores.value):
        draft.put("train.method", "reward", scores)
        return
    if rl is None or str(rl.value) not in ("dpo", "ipo", "kto", "orpo", "simpo"):
        return
    draft.put("train.method", "dpo" if rl.value == "ipo" else str(rl.value), rl)
    losses = draft.given.get("dpo_loss_type")
    if rl.value == "ipo":
        preferences.choose(draft, rl, ["ipo"])
    elif rl.value == "dpo" and losses is not None:
        preferences.choose(draft, losses, sources.listed(losses.value), draft.said("dpo_loss_weights"))
    elif rl.value == "simpo":
        preferences.default_cross_entropy(draft)


def _targets(draft: Draft, given: ForeignSetting) -> None:
    if given.value == "all-linear" or isinstance(given.value, list):
        if draft.get("lora.target_modules") != "all-linear":
            draft.put("lora.target_modules", given.value, given)
    else:
        help = "list the names of the modules; all linear layers are adapted"
        draft.unusable(given, "a pattern of module names", help)


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        items = given.tree.items if isinstance(given.tree, ListNode) else ()
        read = [
            _Dataset(draft, ForeignSetting(given.name, item, item.origin))
            for item in items
            if isinstance(item, MapNode)
        ]
        if len(read) < len(items) or not items:
            draft.unusable(given, "a dataset that is not a map in a list", f"name the file in {key}")
        sources.put(draft, key, [source for each in read for source in each.sources()], given)
        if preferences.wanted(draft):
            for each in read:
                each.tell_of_pairs()
            _templates_of(draft, read, given)
            return
        layouts = {each.layout() for each in read}
        if key == "data.train":
            sources.layouts(draft, layouts, given)
            _templates_of(draft, read, given)

    return rule


class _Dataset:
    """One of `datasets`."""

    def __init__(self, draft: Draft, given: ForeignSetting) -> None:
        self.draft, self.given = draft, given
        self.map: JsonObject = plain_tree(given.tree)
        mapped = self.map.get("message_property_mappings") or {}
        self.fields = {"role": self.map.get("message_field_role"), "content": self.map.get("message_field_content")}
        self.fields |= mapped if isinstance(mapped, dict) else {"?": mapped}

    def sources(self) -> list[JsonObject]:
        """Its files, or its dataset of the Hub, with what is known of the rows."""
        path, files = str(self.map.get("path") or ""), self.map.get("data_files")
        if files and sources.place(path) not in (None, path) and path not in ("json", "csv", "parquet"):
            self._tell(f"data_files of `{path}`", "download these files, and name them in data.train")
        self._tell_what_is_otherwise()
        more = {key: self.map.get(key) for key in ("name", "split", "revision")}
        paths = sources.listed(files) or [path]
        return [sources.source(self.draft, self.given, each, columns=self._columns(), **more) for each in paths]

    def _pairs(self) -> tuple[tuple[str, str, str], bool] | None:
        """The row of its kind of pairs; None for one that is not known."""
        kind = self.map.get("type")
        head, _, rest = str(kind).partition(".")
        if isinstance(kind, dict):
            return None
        if preferences.labelled(self.draft):
            return _LABELLED.get(rest)
        return _PAIRS.get("argilla_chat" if (head, rest) == ("chat_template", "argilla") else rest)

    def tell_of_pairs(self) -> None:
        """Notes the differences of pairs: strings, turns of other names, and prompts written by formats."""
        kind, pairs = self.map.get("type"), self._pairs()
        head = str(kind).partition(".")[0]
        if head in sources.TEMPLATES and self.draft.get("data.chat_template") is None:
            sources.named_template(self.draft, self.given, head)
        if pairs is None:
            name = kind if isinstance(kind, str) else "a prompt of its own"
            names = (
                "prompt, completion and label" if preferences.labelled(self.draft) else "prompt, chosen and rejected"
            )
            help = f"rows have {names}: docs/preference.md; columns renames"
            self._tell(f"rows of type `{name}`", help)
        elif pairs[1]:
            preferences.plain_texts(self.draft, self.given, f"type `{kind}`")
        elif kind == "chat_template.default":
            what = f"type `{kind}`: answers that are one message (a map), and prompts that are a string beside messages"
            preferences.odd_messages(self.draft, self.given, what)
        if any(value not in (None, key) for key, value in self.fields.items()):
            preferences.odd_messages(self.draft, self.given, "turns that have no role and content")

    def _columns_of_pairs(self) -> dict[str, str]:
        kind = self.map.get("type")
        said = {**self.map, **kind} if isinstance(kind, dict) else self.map
        fields = _LABELLED_FIELDS if preferences.labelled(self.draft) else _FIELDS
        usual, _ = self._pairs() or (tuple(fields), False)
        found = dict(zip(fields, usual, strict=True))
        for ours, names in fields.items():
            named = next((said[name] for name in names if said.get(name)), None)
            found[ours] = found[ours] if named is None else str(named)
        if found["prompt"] == found.get("completion"):
            return {"messages": found["prompt"]}
        return {ours: theirs for ours, theirs in found.items() if ours != theirs}

    def layout(self) -> str | None:
        """Our name of the layout; None where the columns have to say it."""
        kind = self.map.get("type")
        head, _, rest = str(kind or "").replace(":", ".").partition(".")
        if head == "alpaca":
            sources.alpaca_remark(self.draft, self.given)
        if head == "completion" and not rest:
            help = "data.overlong: split makes several rows of texts over data.max_seq_len"
            self.draft.differs(self.given, "axolotl splits texts that are longer than sequence_len", help)
        if head == "chat_template":
            return "sharegpt" if self.fields.get("role") == "from" else "messages"
        if kind is not None and (head not in _FORMATS or rest):
            name = kind if isinstance(kind, str) else "a prompt of its own"
            help = "docs/data.md has the layouts that there are; rename columns with data.train[].columns"
            self._tell(f"rows of type `{name}`", help)
        return _FORMATS.get(head)

    def _columns(self) -> dict[str, str]:
        """Our name of a column: theirs."""
        if preferences.wanted(self.draft):
            return self._columns_of_pairs()
        named = {ours: str(self.map[theirs]) for theirs, ours in _COLUMNS.items() if self.map.get(theirs)}
        if self.map.get("field_messages"):
            turns = "conversations" if self.fields.get("role") == "from" else "messages"
            named[turns] = str(self.map["field_messages"])
        return {ours: theirs for ours, theirs in named.items() if ours != theirs}

    def _tell_what_is_otherwise(self) -> None:
        names = {key: value for key, value in self.fields.items() if value and key != value}
        if names not in ({}, {"role": "from", "content": "value"}):
            help = "turns have role and content, or from and value: " + r.NO_COPIES
            self._tell(f"message_property_mappings: {names}", help)
        roles = self.map.get("roles") or {}
        said = [
            (str(word), role) for role, words in map_in(self.map, "roles").items() for word in sources.listed(words)
        ]
        if not isinstance(roles, dict) or any(_SPEAKS.get(word) != role for word, role in said):
            self._tell(f"roles: {roles}", "who speaks is user, assistant, system or tool: " + r.NO_COPIES)
        for key, value in self.map.items():
            if key not in _READ and value is not None and value not in _USUAL.get(key, ()):
                help = _HELP.get(key, "there is no counterpart: prepare the file so")
                self._tell(f"{key}: {value}" if key in _HELP else f"`{key}` of a dataset", help)

    def _tell(self, what: str, help: str) -> None:
        self.draft.unusable(self.given, what, help)


def _templates_of(draft: Draft, items: list[_Dataset], given: ForeignSetting) -> None:
    """A dataset's own template, which wins over that of the recipe; here all rows have one."""
    usual = draft.said("chat_template") or "the tokenizer's"
    named = {str(item.map.get("chat_template") or usual) for item in items}
    if not any(item.map.get("chat_template") for item in items):
        return
    if len(named) == 1:
        sources.named_template(draft, given, named.pop())
    else:
        help = "all rows are written by one template: data.chat_template, or the tokenizer's own"
        draft.unusable(given, f"datasets with templates of their own ({', '.join(sorted(named))})", help)


def _plugins(draft: Draft, given: ForeignSetting) -> None:
    others = [str(each) for each in sources.listed(given.value) if not any(word in str(each) for word in _KERNELS)]
    if others:
        draft.lost(given, f"what these change in training has no counterpart: {', '.join(others)}")
    else:
        draft.lost(given, "ftcli has kernels of its own", harmless=True)


def _total_batch(draft: Draft, given: ForeignSetting) -> None:
    micro = draft.said("micro_batch_size") or 1
    if isinstance(given.value, int) and isinstance(micro, int) and given.value % micro == 0:
        draft.put("train.gradient_accumulation_steps", given.value // micro, given)
        help = "on several GPUs axolotl divides by their number as well"
        draft.differs(given, "batch_size is rows a step, which became train.gradient_accumulation_steps", help)
    else:
        help = "write train.gradient_accumulation_steps: rows a step are that times the batch size"
        draft.unusable(given, f"batch_size: {given.value} is no multiple of micro_batch_size", help)


def _lowest_rate(draft: Draft, given: ForeignSetting) -> None:
    draft.put("train.lr_scheduler_type", "cosine_with_min_lr", given)
    draft.put("train.lr_scheduler_kwargs", {"min_lr_rate": given.value}, given)


def _after(draft: Draft) -> None:
    r.all_linear(draft)
    for key in ("lora.r", "lora.alpha"):
        draft.default(key, 8, "PEFT")
    if "train.warmup_steps" not in draft.values:
        draft.put("train.warmup_steps", 0.03, comment="axolotl's default, there at most 100 steps")
    if draft.said("learning_rate") is None:
        rate = "docs/preference.md has the default" if preferences.wanted(draft) else "here it is 2e-4"
        draft.remark(f"no learning rate: axolotl asks for one, and {rate}", "set train.learning_rate")
    r.float32_unless_half(draft, "fp16", "bfloat16", "float16")
    if draft.get("model.dtype") in (None, "auto", "bfloat16"):
        r.full_in_bf16(draft)
    if draft.said("wandb_mode") == "disabled" or draft.said("use_wandb") is False:
        draft.values.pop("logging.wandb", None)
    preferences.finish(draft)


def _orpo_alpha(draft: Draft, given: ForeignSetting) -> None:
    if "rl_beta" in draft.given:
        draft.lost(given, "rl_beta counts before it", harmless=True)
        return
    draft.take(given, "preference.beta")
    draft.differs(given, "`orpo_alpha` is preference.beta here", "it is the weight of the odds ratio in both")


RULES = r.Rules(
    computed={
        "lora_target_modules": _targets,
        "datasets": _datasets("data.train"),
        "test_datasets": _datasets("data.eval"),
        "chat_template": r.unless(
            lambda draft, given: given.value == "jinja" or "data.chat_template" in draft.values, sources.template
        ),
        "plugins": _plugins,
        "chat_template_jinja": sources.template,
        "warmup_ratio": r.unless_given("warmup_steps", "train.warmup_steps"),
        "warmup_steps": r.to("train.warmup_steps"),
        "batch_size": _total_batch,
        "lr_scheduler": r.unless_given("cosine_min_lr_ratio", "train.lr_scheduler_type"),
        "cosine_min_lr_ratio": _lowest_rate,
        "flash_attention": r.attention,
        "sdp_attention": r.attention,
        "flex_attention": r.attention,
        "xformers_attention": r.attention,
        "wandb_project": lambda draft, given: r.wandb(draft, given, "wandb_project", "wandb_entity", "wandb_group"),
        "wandb_name": r.run_name,
        "lora_model_dir": preferences.continued,
        "rl": r.read,
        "reward_model": r.read,
        "orpo_alpha": _orpo_alpha,
        "cpo_alpha": preferences.cross_entropy,
        "rpo_alpha": preferences.cross_entropy,
        "simpo_gamma": preferences.gamma,
        "dpo_label_smoothing": preferences.told_smoothing,
        "dpo_use_weighting": r.to("preference.use_weighting"),
        "dpo_loss_type": r.read,
        "dpo_loss_weights": r.read,
        "trl.beta": r.to("preference.beta"),
    },
    before=_before,
    after=_after,
    defaults={
        "data.max_seq_len": 512,
        "data.overlong": "drop",
        "train.lr_scheduler_type": "cosine",
        "train.optim": "adamw_torch_fused",
    },
)
