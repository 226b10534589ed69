"""TRL's YAML and command lines (`trl sft`), alignment-handbook's too. Defaults are TRL 1.16's and transformers 5's."""

from __future__ import annotations

from types import MappingProxyType

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.tree import ListNode, MapNode, plain_tree
from ftcli.plain import JsonObject

#: Settings that only its trainers of preferences and rewards have.
_OTHER_TRAINERS = (
    "beta", "reward_funcs", "num_generations", "reward_model_path", "desirable_weight", "loss_weights", "ref_model",
    "max_prompt_length", "max_completion_length", "precompute_ref_log_probs", "rpo_alpha", "simpo_gamma",
)  # fmt: skip
_CUT = "rows that are too long are cut, as there; `data.overlong: drop` leaves them out"


def _before(draft: Draft) -> None:
    other = next((name for name in _OTHER_TRAINERS if name in draft.given), None)
    if other is not None:
        help = "`trl sft` is converted; for GRPO begin with `ftcli recipes copy smoke-grpo`"
        raise draft.refuse(draft.given[other], f"`{other}` is of another trainer than SFT", help)
    draft.full = not truth(draft.said("use_peft"))
    for key, value in (("lora.r", 16), ("lora.alpha", 32), ("lora.dropout", 0.05)):
        draft.put(key, value, comment="TRL's default")


def _dataset(draft: Draft, given: ForeignSetting) -> None:
    name, split = draft.said("dataset_config"), draft.said("dataset_train_split")
    path = str(given.value)
    sources.put(draft, "data.train", [sources.source(draft, given, path, name=name, split=split)], given)
    held_out = draft.given.get("dataset_test_split")
    if held_out is None and r.is_off(draft.said("eval_strategy")):
        return
    where = held_out or draft.given["eval_strategy"]
    if sources.place(path) == path:
        draft.lost(where, "a file has no splits: name a held-out file in data.eval")
        return
    split = str(held_out.value) if held_out is not None else "test"
    sources.put(draft, "data.eval", [sources.source(draft, given, path, name=name, split=split)], where)


def _mixture(draft: Draft, given: ForeignSetting) -> None:
    """TRL's list of datasets, and alignment-handbook's, where a weight is the share of rows that is drawn."""
    items = given.tree.items if isinstance(given.tree, ListNode) else ()
    found: list[JsonObject] = []
    for each in (plain_tree(item) for item in items if isinstance(item, MapNode)):
        path = each.get("data_files") or each.get("path") or each.get("id")
        more = {"name": each.get("name") or each.get("config"), "split": each.get("split")}
        for one in path if isinstance(path, list) else [path]:
            found.append(sources.source(draft, given, str(one), **more))
        _share(draft, given, str(path), each.get("weight"))
        known = ("data_files", "path", "id", "name", "config", "split", "weight", "columns", "data_dir")
        for key in (key for key in each if key not in known):
            draft.unusable(given, f"`{key}` of a dataset", "there is no counterpart: prepare the file so")
    sources.put(draft, "data.train", found, given)


def _share(draft: Draft, given: ForeignSetting, path: str, share: object) -> None:
    if share not in (None, 1, 1.0):
        help = "write max_rows beside its path in data.train; all rows are trained"
        draft.unusable(given, f"the share {share} of the rows of `{path}`", help)


def _mixer(draft: Draft, given: ForeignSetting) -> None:
    """alignment-handbook's older form: datasets with the share of rows that is drawn, splits beside it."""
    shares = given.value if isinstance(given.value, dict) else {}
    splits = draft.said("dataset_splits") or ["train"]
    configs = draft.said("dataset_configs")
    names = configs if isinstance(configs, list) else [None] * len(shares)
    held: dict[str, list[JsonObject]] = {"data.train": [], "data.eval": []}
    for (path, share), name in zip(shares.items(), names, strict=False):
        _share(draft, given, str(path), share)
        for split in splits if isinstance(splits, list) else [splits]:
            key = "data.eval" if "test" in str(split) else "data.train"
            held[key].append(sources.source(draft, given, str(path), name=name, split=split))
    for key, items in held.items():
        sources.put(draft, key, items, given)


def _length(draft: Draft, given: ForeignSetting) -> None:
    if not r.is_off(given.value):
        draft.take(given, "data.max_seq_len")
        return
    draft.left_out |= {"data.max_seq_len", "data.overlong"}
    help = "set data.max_seq_len to the length of the longest row; rows over 2048 are an error until then"
    draft.differs(given, f"{given.name}: null cuts nothing in TRL", help)


def _completion(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value) is not None and draft.get("data.loss_on") != "assistant":
        draft.put("data.loss_on", "completion" if truth(given.value) else "all", given)


def _four_bit(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("quantization.method", "nf4", given)
        if not truth(draft.said("use_bnb_nested_quant")):
            draft.put("quantization.double_quant", False, comment="TRL's default")


def _template(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value).endswith(".jinja"):
        draft.put("data.chat_template", str(given.value), given)
    else:
        help = "save that tokenizer's template as a .jinja file, and name it in data.chat_template"
        draft.unusable(given, f"the template of the tokenizer `{given.value}`", help)


def _dtype(draft: Draft, given: ForeignSetting) -> None:
    if str(given.value) != "float32" or truth(draft.said("bf16")) is False:
        draft.take(given, "model.dtype")


def _packs(draft: Draft, given: ForeignSetting) -> None:
    if given.value in ("wrapped", "bfd_split", "bfd-requeue"):
        help = "here no row sees another, and data.overlong says what becomes of long rows: split them in the file"
        draft.differs(given, f"packing_strategy: {given.value} trains all of a long row, in pieces", help)


def _after(draft: Draft) -> None:
    if not draft.full and draft.get("lora.target_modules") is None:
        draft.put("lora.target_modules", ["q_proj", "v_proj"], comment="PEFT's default for most families")
        help = "all-linear, ftcli's default, adapts every linear layer and learns more"
        draft.remark("TRL names no LoRA modules, so PEFT adapts queries and values alone", help)
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
    if "bfloat16" in str(draft.said("dtype") or draft.said("torch_dtype")):
        r.full_in_bf16(draft)


_DEFAULTS = {"data.max_seq_len": 1024, "data.overlong": "truncate", "train.learning_rate": 2e-5, **r.TRAINER_DEFAULTS}
RULES = r.Rules(
    rows=(
        *r.OF_TRANSFORMERS,
        ("use_peft config bnb_4bit_quant_storage dataset_config dataset_configs", r.read),
        ("dataset_train_split dataset_test_split dataset_splits ignore_bias_buffers", r.read),
        ("lora_task_type", r.lost("causal language models are trained", default="CAUSAL_LM")),
        ("lora_target_parameters", r.lost("all-linear adapts experts too; list modules in lora.target_modules")),
        ("load_in_4bit", _four_bit),
        ("bnb_4bit_quant_type", r.lost("the 4-bit type is nf4", default="nf4")),
        ("bf16", r.half("fp16", "dtype", "torch_dtype")),
        ("torch_dtype dtype", _dtype),
        ("dataset_name", _dataset),
        ("datasets dataset_mixture.datasets", _mixture),
        ("dataset_mixer", _mixer),
        ("dataset_mixture.seed", r.read),
        ("test_split_size dataset_mixture.test_split_size", r.NO_SPLIT),
        (
            "streaming dataset_streaming dataset_mixture.streaming",
            r.lost("rows are read whole; see data.train[].streaming"),
        ),
        ("dataset_kwargs", r.lost("rows are prepared by data.format and the chat template")),
        ("dataset_text_field", r.read),
        ("max_length max_seq_length", _length),
        ("assistant_only_loss", r.switch("data.loss_on", "assistant")),
        ("completion_only_loss", _completion),
        ("chat_template", lambda draft, given: sources.named_template(draft, given, str(given.value))),
        ("chat_template_path", _template),
        ("packing_strategy", _packs),
        ("eval_packing", r.note("evaluation never packs")),
        ("padding_free pad_to_multiple_of", r.note("data.padding_free: auto does that wherever attention can")),
        ("truncation_mode", r.lost("data.overlong: truncate keeps the start", default="keep_start")),
        ("shuffle_dataset", r.note(r.SHUFFLED)),
        ("loss_type", r.lost("the loss is the negative log-likelihood of each token", default=("nll", "chunked_nll"))),
        ("pad_token", r.note("padding is never trained nor attended to; the tokenizer's own is used")),
        ("eos_token", r.TOKENS),
        ("model_init_kwargs", r.lost("the model's config.json decides; see the section model")),
        ("lora_model_dir", r.lost("adapters begin anew; a run of ftcli goes on from --resume PATH")),
    ),
    before=_before,
    after=_after,
    defaults=MappingProxyType(_DEFAULTS),
    nulls=MappingProxyType({**r.NULLS, "max_length": _length, "max_seq_length": _length}),
)
