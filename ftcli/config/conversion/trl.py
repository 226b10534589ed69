"""TRL's YAML and command lines (`trl sft`). Defaults are those of TRL 1.16 and transformers 5."""

from __future__ import annotations

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.tree import ListNode, MapNode, plain_tree

#: Settings that only its trainers of preferences and rewards have.
_OTHER_TRAINERS = ("beta", "reward_funcs", "num_generations", "reward_model_path", "desirable_weight", "loss_weights")


def _before(draft: Draft) -> None:
    other = next((name for name in _OTHER_TRAINERS if name in draft.given), None)
    if other is not None:
        help = "`trl sft` is converted; for GRPO begin with `ftcli recipes copy smoke-grpo`"
        raise draft.refuse(draft.given[other], f"`{other}` is of another trainer than SFT", help)
    if truth(draft.said("use_peft")):
        draft.put("lora.r", 16, comment="TRL's default")
        draft.put("lora.alpha", 32, comment="TRL's default")
        draft.put("lora.dropout", 0.05, comment="TRL's default")


def _of_lora(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        if truth(draft.said("use_peft")):
            draft.take(given, key)
        else:
            draft.lost(given, "without use_peft: true there are no adapters", harmless=True)

    return rule


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    name, split = draft.said("dataset_config"), draft.said("dataset_train_split")
    path = str(given.value)
    sources.put(draft, "data.train", [sources.source(draft, given, path, name=name, split=split)], given)
    held_out = draft.given.get("dataset_test_split")
    evaluates = str(draft.said("eval_strategy") or "no") not in ("no", "False")
    if held_out is not None or evaluates:
        where = held_out or draft.given["eval_strategy"]
        if sources.place(path) == path:
            draft.lost(where, "a file has no splits: name a held-out file in data.eval")
            return
        split = str(held_out.value) if held_out is not None else "test"
        sources.put(draft, "data.eval", [sources.source(draft, given, path, name=name, split=split)], where)


def _mixture(draft: Draft, given: ForeignSetting) -> None:
    items = given.tree.items if isinstance(given.tree, ListNode) else ()
    maps = [plain_tree(item) for item in items if isinstance(item, MapNode)]
    found = []
    for each in maps:
        path = each.get("data_files") or each.get("path")
        for one in path if isinstance(path, list) else [path]:
            found.append(sources.source(draft, given, str(one), name=each.get("name"), split=each.get("split")))
    sources.put(draft, "data.train", found, given)


def _length(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "data.max_seq_len")


def _text_field(draft: Draft, given: ForeignSetting) -> None:
    train = draft.get("data.train")
    if given.value != "text" and isinstance(train, list):
        items = [{"path": item} if isinstance(item, str) else item for item in train]
        named = [{**item, "columns": {"text": str(given.value)}} for item in items]
        draft.put("data.train", named, given)


def _assistant(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.loss_on", "assistant", given)


def _completion(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.loss_on", "completion", given)
    elif truth(given.value) is False:
        draft.put("data.loss_on", "all", given)


def _after(draft: Draft) -> None:
    if truth(draft.said("use_peft")) and draft.get("lora.target_modules") is None:
        draft.put("lora.target_modules", ["q_proj", "v_proj"], comment="PEFT's default for most families")
        help = "all-linear, ftcli's default, adapts every linear layer and learns more"
        draft.remark("TRL names no LoRA modules, so PEFT adapts queries and values alone", help)
    if "data.loss_on" not in draft.values:
        help = "data.loss_on: all is what TRL does with rows of messages"
        draft.remark("TRL trains every token of `messages` rows; here it is the assistant's turns", help)
    draft.default("data.max_seq_len", 1024)
    draft.default("data.overlong", "truncate")
    draft.default("train.learning_rate", 2e-5)
    r.trainer_defaults(draft)


RULES = r.Rules(
    rules={
        **r.OF_TRANSFORMERS,
        "use_peft": r.ignored,
        "lora_r": _of_lora("lora.r"),
        "lora_alpha": _of_lora("lora.alpha"),
        "lora_dropout": _of_lora("lora.dropout"),
        "lora_target_modules": _of_lora("lora.target_modules"),
        "lora_modules_to_save": _of_lora("lora.modules_to_save"),
        "use_rslora": _of_lora("lora.use_rslora"),
        "load_in_4bit": lambda draft, given: _four_bit(draft, given),
        "bnb_4bit_quant_type": r.ignored,
        "torch_dtype": r.to("model.dtype"),
        "dtype": r.to("model.dtype"),
        "dataset_name": _dataset,
        "datasets": _mixture,
        "dataset_config": r.ignored,
        "dataset_train_split": r.ignored,
        "dataset_test_split": r.ignored,
        "dataset_text_field": _text_field,
        "max_length": _length,
        "max_seq_length": _length,
        "assistant_only_loss": _assistant,
        "completion_only_loss": _completion,
        "packing_strategy": r.harmless("rows that fit best share a pack, and never see one another"),
        "padding_free": r.harmless("data.padding_free: auto does that wherever attention can"),
        "do_eval": r.ignored,
        "config": r.ignored,
    },
    before=_before,
    after=_after,
)


def _four_bit(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("quantization.method", "nf4", given)
        if not truth(draft.said("use_bnb_nested_quant")):
            draft.put("quantization.double_quant", False, comment="TRL's default")
