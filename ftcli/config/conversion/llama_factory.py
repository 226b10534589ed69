"""LLaMA-Factory's YAML. Defaults are those of 0.9.6, and of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.plain import JsonObject

#: Its registry of datasets.
_INDEX = "dataset_info.json"
_MAX_INDEX = 2**22
_ALPACA = {
    "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
}  # fmt: skip
#: What an entry of the registry may say that is read below.
_READ = r.words("file_name hf_hub_url ms_hub_url om_hub_url formatting columns tags split subset num_samples")
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_OPENAI = {**_TAGS, "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def _before(draft: Draft) -> None:
    if "model_name_or_path" not in draft.given and "model" in draft.given:
        help = "write it in the form that has model_name_or_path and finetuning_type"
        raise draft.refuse(draft.given["model"], "LLaMA-Factory's recipes of version 1 are not converted", help)
    stage = draft.said("stage") or "sft"
    if stage not in ("sft", "pt"):
        help = "stages sft and pt are converted; for rewards begin with `ftcli recipes copy smoke-grpo`"
        raise draft.refuse(draft.given["stage"], f"the stage `{stage}` is not converted", help)
    kind = draft.said("finetuning_type") or "lora"
    if kind not in ("lora", "full"):
        help = "there are LoRA and full fine-tuning"
        raise draft.refuse(draft.given["finetuning_type"], f"finetuning_type `{kind}`", help)
    draft.full = kind == "full"
    rank = draft.said("lora_rank") or 8
    default = None if "lora_rank" in draft.given else "LLaMA-Factory's default"
    draft.put("lora.r", rank, draft.given.get("lora_rank"), default)
    twice = rank * 2 if isinstance(rank, int) else 16
    draft.put("lora.alpha", twice, comment="LLaMA-Factory's default: twice the rank")


def _is_text(draft: Draft) -> bool:
    """Whether it trains texts as they are."""
    return bool(draft.said("stage") == "pt")


def _targets(draft: Draft, given: ForeignSetting) -> None:
    if given.value == "all":
        draft.put("lora.target_modules", "all-linear", given)
    else:
        draft.take(given, "lora.target_modules")


def _bits(draft: Draft, given: ForeignSetting) -> None:
    if given.value in (4, "4"):
        draft.put("quantization.method", "nf4", given)
    elif not r.is_off(given.value):
        draft.lost(given, "of bitsandbytes' formats there is quantization.method: nf4; the base keeps its dtype")


def _pure_bf16(draft: Draft, given: ForeignSetting) -> None:
    r.switched_by("model.dtype", "bfloat16")(draft, given)
    if truth(given.value) and draft.full:
        draft.put("train.pure_bf16", True, given)


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        index = _index(draft)
        rows = draft.said("max_samples")
        items, found = [], set()
        for name in (str(each).strip() for each in names):
            item, layout = _registered(draft, given, name, index)
            items.append({**item, "max_rows": rows} if isinstance(rows, int) and item else item)
            found.add(layout)
        sources.put(draft, key, items, given)
        if key == "data.train":
            sources.layouts(draft, found, given)

    return rule


def _index(draft: Draft) -> JsonObject:
    """Its registry of datasets, where it lies in the folder that the recipe names; else nothing."""
    path = Path(str(draft.said("dataset_dir") or "data")) / _INDEX
    try:
        if path.stat().st_size > _MAX_INDEX:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _registered(draft: Draft, given: ForeignSetting, name: str, index: JsonObject) -> tuple[JsonObject, str | None]:
    entry = index.get(name)
    folder = str(draft.said("dataset_dir") or "data")
    layout = "text" if _is_text(draft) else None
    if not isinstance(entry, dict):
        help = f"{folder}/{_INDEX} says which file `{name}` is: write that file, or hub:ORG/NAME"
        draft.unusable(given, f"`{name}` is a name in LLaMA-Factory's list of datasets", help)
        return {"path": f"{folder}/{name}.json"}, layout
    columns, tags = (part if isinstance(part, dict) else {} for part in (entry.get("columns"), entry.get("tags")))
    if entry.get("ranking"):
        raise draft.refuse(given, f"the rows of `{name}` are preferences", "supervised recipes are converted")
    named, layout = (_text if layout else _conversation)(columns, tags, str(entry.get("formatting")))
    usual = _OPENAI if layout == "messages" else _TAGS
    odd = [f"{tag}: {value}" for tag, value in tags.items() if usual.get(tag, value) != value]
    odd += [key for key, value in entry.items() if key not in _READ and value]
    if odd:
        draft.unusable(
            given, f"`{name}` with {', '.join(odd)}", f"turns are {', '.join(usual.values())}: {r.NO_COPIES}"
        )
    path = f"{folder}/{entry['file_name']}" if entry.get("file_name") else str(entry.get("hf_hub_url") or name)
    rows = entry.get("num_samples") if isinstance(entry.get("num_samples"), int) else None
    more = {"split": entry.get("split"), "name": entry.get("subset"), "columns": named, "max_rows": rows}
    return sources.source(draft, given, path, **more), layout


def _text(columns: JsonObject, _tags: JsonObject, _formatting: str) -> tuple[dict[str, str], str]:
    """In the stage `pt` the column of prompts is the text."""
    column = str(columns.get("prompt") or "instruction")
    return ({} if column == "text" else {"text": column}), "text"


def _conversation(columns: JsonObject, tags: JsonObject, formatting: str) -> tuple[dict[str, str], str]:
    openai = formatting == "openai" or tags.get("role_tag") == "role"
    ours, layout = _ALPACA, "alpaca"
    if formatting in ("sharegpt", "openai"):
        layout = "messages" if openai else "sharegpt"
        ours = {"messages": "messages" if openai else "conversations", "system": "system", "tools": "tools"}
    return {ours[key]: str(value) for key, value in columns.items() if key in ours and ours[key] != value}, layout


def _packing(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.packing", True, given)
        if not truth(draft.said("neat_packing")) and not _is_text(draft):
            help = "that is neat_packing: true there"
            draft.differs(given, "packed rows see one another in LLaMA-Factory, and never do here", help)


def _thinking(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value) is False:
        draft.put("data.chat_template_kwargs", {"enable_thinking": False}, given)
        what = "enable_thinking: false moves the empty thought into the prompt there; here the chat template decides"
        draft.differs(given, what, "`ftcli check --show-sample 1` shows what is trained")


def _pissa(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        rounds = draft.said("pissa_iter") or 16
        draft.put("lora.init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}", given)


def _template(draft: Draft, given: ForeignSetting) -> None:
    if not _is_text(draft):
        sources.named_template(draft, given, str(given.value))


def _after(draft: Draft) -> None:
    if _is_text(draft):
        draft.put("data.format", "text", draft.given["stage"])
        if truth(draft.said("packing")) is not False:
            draft.put("data.packing", True, draft.given.get("packing"), "LLaMA-Factory's default for texts")
            help = "here a longer text is an error: split it in the file, or data.overlong: truncate loses its rest"
            what = "LLaMA-Factory joins texts and cuts the stream into blocks of cutoff_len, which loses nothing"
            draft.remark(what, help)
            return
    draft.default("data.overlong", "truncate")
    if draft.get("data.overlong") == "truncate":
        help = "rows that are too long are cut, as there; `data.overlong: drop` leaves them out"
        draft.remark("LLaMA-Factory cuts rows at cutoff_len without a word, prompt and answer in proportion", help)


RULES = r.Rules(
    rows=(
        *r.OF_TRANSFORMERS,
        ("peft_config.* dist_config.* kernel_config.* train_dataset model_class", r.read),
        ("stage finetuning_type lora_rank dataset_dir max_samples plot_loss overwrite_cache", r.read),
        ("lora_target", _targets),
        ("quantization_bit", _bits),
        ("quantization_method", r.lost("of its methods there is quantization.method: nf4", default="bnb")),
        ("quantization_type", r.lost("the 4-bit type is nf4", default="nf4")),
        ("dataset", _datasets("data.train")),
        ("eval_dataset", _datasets("data.eval")),
        ("template", _template),
        ("val_size", r.NO_SPLIT),
        ("train_on_prompt", r.switch("data.loss_on", "all")),
        ("mask_history", r.switch("data.loss_on", "completion")),
        ("packing neat_packing", _packing),
        ("enable_thinking", _thinking),
        ("pissa_init", _pissa),
        ("pissa_iter", r.read),
        ("pissa_convert", r.note("results are always saved as plain adapters of the base")),
        ("disable_shuffling", r.lost(r.SHUFFLED)),
        ("interleave_probs", r.lost("write `weight` beside the `path` of each source in data.train")),
        ("mix_strategy", r.note("rows of all sources are mixed; weights stand beside each source in data.train")),
        ("flash_attn", r.attention),
        ("pure_bf16", _pure_bf16),
        ("use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels", r.KERNELS),
        ("use_reentrant_gc use_fast_tokenizer include_effective_tokens_per_second data_shared_file_system", r.read),
        ("infer_backend export_dir export_size export_device export_legacy_format", r.note("`ftcli export` exports")),
        ("adapter_name_or_path", r.lost("adapters begin anew; a run of ftcli goes on from --resume PATH")),
        ("predict_with_generate", r.lost("write eval.tasks: {use: exact_match}, and others, judge what is generated")),
        ("model_max_length", r.lost("cutoff_len is data.max_seq_len")),
        ("resize_vocab add_tokens add_special_tokens", r.TOKENS),
        ("use_muon", r.switch("train.optim", "muon")),
        (
            "freeze_vision_tower freeze_multi_modal_projector",
            r.lost("vision towers are kept, and not trained; rows hold text", default=True),
        ),
        (
            "image_max_pixels image_min_pixels video_max_pixels video_fps video_maxlen media_dir",
            r.note("rows hold text"),
        ),
        ("do_sample temperature top_p max_new_tokens", r.OF_ITS_PROCESS),
    ),
    before=_before,
    after=_after,
    nulls=r.NULLS,
    defaults=MappingProxyType({"data.max_seq_len": 2048, "train.learning_rate": 5e-5, **r.TRAINER_DEFAULTS}),
)
