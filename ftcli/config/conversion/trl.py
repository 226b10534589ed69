"""TRL's YAML and command lines, alignment-handbook's too: what its rows of the table of names do not say.

Defaults are TRL 1.16's and transformers 5's.
"""

from __future__ import annotations

from ftcli.config.conversion import preferences, sources
from ftcli.config.conversion import rules as r
from ftcli.config.conversion.draft import Draft, is_off, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.yaml import plain_tree
from ftcli.plain import JsonObject, maps

#: Keys of a dataset of a mixture that are read below, or change nothing of what is learnt.
_READ = ("data_files", "path", "id", "name", "config", "split", "weight", "columns", "data_dir")


def _before(draft: Draft) -> None:
    draft.full = not truth(draft.said("use_peft"))
    preferences.of_trl(draft)
    if preferences.wanted(draft):
        draft.default("train.learning_rate", 1e-4 if preferences.scored(draft) else 1e-6)


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    paths = sources.listed(given.value)

    def put(key: str, split: str | None, where: ForeignSetting) -> None:
        name = draft.said("dataset_config")
        sources.put(draft, key, [sources.source(draft, given, path, name=name, split=split) for path in paths], where)

    put("data.train", draft.said("dataset_train_split"), given)
    held_out = draft.given.get("dataset_test_split")
    if held_out is None and is_off(draft.said("eval_strategy")):
        return
    where = held_out or draft.given["eval_strategy"]
    if not all(isinstance(path, str) and sources.place(path) != path for path in paths):
        draft.lost(where, "a file has no splits: name a held-out file in data.eval")
        return
    put("data.eval", str(held_out.value) if held_out is not None else "test", where)


def _mixture(draft: Draft, given: ForeignSetting) -> None:
    """TRL's list of datasets, and alignment-handbook's, where a weight is the share of rows that is drawn."""
    found: list[JsonObject] = []
    for each in maps(plain_tree(given.tree)):
        path = each.get("data_files") or each.get("path") or each.get("id")
        more = {"name": each.get("name") or each.get("config"), "split": each.get("split")}
        found += [sources.source(draft, given, one, **more) for one in sources.listed(path) or [None]]
        _share(draft, given, str(path), each.get("weight"))
        for key in (key for key in each if key not in _READ):
            draft.unusable(given, f"`{key}` of a dataset", "there is no counterpart: prepare the file so")
    if not found:
        draft.unusable(given, "a mixture without datasets", "name the files in data.train")
    sources.put(draft, "data.train", found, given)


def _share(draft: Draft, given: ForeignSetting, path: str, share: object) -> None:
    if share not in (None, 1):
        help = "write max_rows beside its path in data.train; all rows are trained"
        draft.unusable(given, f"the share {share} of the rows of `{path}`", help)


def _mixer(draft: Draft, given: ForeignSetting) -> None:
    """alignment-handbook's older form: datasets with the share of rows that is drawn, splits beside it."""
    shares = given.value if isinstance(given.value, dict) else {}
    configs = draft.said("dataset_configs")
    names = configs if isinstance(configs, list) else [None] * len(shares)
    held: dict[str, list[JsonObject]] = {"data.train": [], "data.eval": []}
    for (path, share), name in zip(shares.items(), names, strict=False):
        _share(draft, given, str(path), share)
        for split in sources.listed(draft.said("dataset_splits")) or ["train"]:
            key = "data.eval" if "test" in str(split) else "data.train"
            held[key].append(sources.source(draft, given, path, name=name, split=split))
    for key, items in held.items():
        sources.put(draft, key, items, given)


def _length(draft: Draft, given: ForeignSetting) -> None:
    if not is_off(given.value):
        draft.take(given, "data.max_seq_len")
        return
    draft.left_out |= {"data.max_seq_len", "data.overlong"}
    help = "set data.max_seq_len to the length of the longest row; rows over 2048 are an error until then"
    draft.differs(given, f"{given.name}: null cuts nothing in TRL", help)


def _completion(draft: Draft, given: ForeignSetting) -> None:
    loss_on = "completion" if draft.switched(given) else "all"
    if truth(given.value) is not None and draft.get("data.loss_on") != "assistant":
        draft.put("data.loss_on", loss_on, given)


def _template(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value).endswith(".jinja"):
        draft.put("data.chat_template", str(given.value), given)
    else:
        help = "save that tokenizer's template as a .jinja file, and name it in data.chat_template"
        draft.unusable(given, f"the template of the tokenizer `{given.value}`", help)


def _dtype(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value) != "float32" or truth(draft.said("bf16")) is False:
        draft.take(given, "model.dtype")


def _after(draft: Draft) -> None:
    if truth(draft.said("load_in_4bit")):
        draft.default("quantization.double_quant", False)
    if not draft.full and draft.get("lora.target_modules") is None:
        draft.put("lora.target_modules", ["q_proj", "v_proj"], comment="PEFT's default for most families")
        help = "all-linear, ftcli's default, adapts every linear layer and learns more"
        draft.remark("TRL names no LoRA modules, so PEFT adapts queries and values alone", help)
    if "data.train" not in draft.values:
        draft.remark("no dataset is named that could be read", "name rows in data.train: a file, or hub:ORG/NAME")
    if not preferences.wanted(draft):
        _supervised(draft)
    r.float32_unless_half(draft, "fp16", "dtype", "torch_dtype")
    if "bfloat16" in str(draft.said("dtype") or draft.said("torch_dtype")):
        r.full_in_bf16(draft)
    preferences.finish(draft)


def _supervised(draft: Draft) -> None:
    """Drafts which column and which tokens are trained."""
    text, train = draft.said("dataset_text_field"), draft.get("data.train")
    if text not in (None, "text") and train:
        items = [{"path": item} if isinstance(item, str) else item for item in train]
        draft.put("data.train", [{**item, "columns": {"text": str(text)}} for item in items])
    mixed = {"dataset_mixture.datasets", "dataset_mixer"} & set(draft.given)
    if "data.loss_on" not in draft.values and mixed:
        draft.put("data.loss_on", "all", comment="TRL trains every token of conversations; auto: the answers")
    elif "data.loss_on" not in draft.values:
        help = "data.loss_on: all is what TRL does with rows of messages"
        draft.remark("TRL trains every token of `messages` rows; here it is the assistant's turns", help)


RULES = r.Rules(
    computed={
        "dataset_name": _dataset,
        "datasets": _mixture,
        "dataset_mixture.datasets": _mixture,
        "dataset_mixer": _mixer,
        "max_length": _length,
        "max_seq_length": _length,
        "completion_only_loss": _completion,
        "chat_template": sources.template,
        "chat_template_path": _template,
        "dtype": _dtype,
        "torch_dtype": _dtype,
        **preferences.OF_TRL,
    },
    before=_before,
    after=_after,
    defaults={
        "lora.r": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "data.max_seq_len": 1024,
        "data.overlong": "truncate",
        "train.learning_rate": 2e-5,
        **r.TRAINER_DEFAULTS,
    },
    nulls=frozenset({"max_grad_norm", "max_length", "max_seq_length"}),
)
