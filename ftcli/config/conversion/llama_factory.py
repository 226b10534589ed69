"""LLaMA-Factory's YAML. Defaults are those of 0.9.6, and of transformers."""

from __future__ import annotations

import json
from pathlib import Path

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.plain import JsonObject

#: What its registry of datasets calls a conversation of `from` and `value`, and one of OpenAI's form.
_INDEX = "dataset_info.json"
_MAX_INDEX = 2**22


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
        raise draft.refuse(
            draft.given["finetuning_type"], f"finetuning_type `{kind}`", "there are LoRA and full fine-tuning"
        )
    if kind == "lora":
        rank = draft.said("lora_rank") or 8
        default = None if "lora_rank" in draft.given else "LLaMA-Factory's default"
        draft.put("lora.r", rank, draft.given.get("lora_rank"), default)
        draft.put(
            "lora.alpha", rank * 2 if isinstance(rank, int) else 16, comment="LLaMA-Factory's default: twice the rank"
        )


def _targets(draft: Draft, given: ForeignSetting) -> None:
    if given.value == "all":
        draft.put("lora.target_modules", "all-linear", given)
    else:
        draft.take(given, "lora.target_modules")


def _bits(draft: Draft, given: ForeignSetting) -> None:
    if given.value in (4, "4"):
        draft.put("quantization.method", "nf4", given)
    elif given.value not in (None, "none"):
        r.eight_bit(draft, ForeignSetting(given.name, given.tree, given.origin))
        draft.lost(given, "of bitsandbytes' formats there is quantization.method: nf4")


def _pure_bf16(draft: Draft, given: ForeignSetting) -> None:
    r.switched_by("model.dtype", "bfloat16")(draft, given)
    if truth(given.value) and draft.said("finetuning_type") == "full":
        draft.put("train.pure_bf16", True, given)


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        index = _index(draft)
        rows = draft.said("max_samples")
        items, found = [], set()
        for name in (str(each).strip() for each in names):
            item, layout = _registered(draft, given, name, index)
            items.append(item if not isinstance(rows, int) else {**item, "max_rows": rows})
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
    if not isinstance(entry, dict):
        help = f"{folder}/{_INDEX} says which file `{name}` is: write that file, or hub:ORG/NAME"
        draft.unusable(given, f"`{name}` is a name in LLaMA-Factory's list of datasets", help)
        return {"path": f"{folder}/{name}.json"}, None
    columns, sharegpt = entry.get("columns") or {}, entry.get("formatting") == "sharegpt"
    ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    tags = entry.get("tags") or {}
    openai = sharegpt and tags.get("role_tag") == "role"
    if sharegpt:
        ours = {"messages": "messages" if openai else "conversations", "system": "system", "tools": "tools"}
    named = {ours[key]: str(value) for key, value in columns.items() if key in ours and ours[key] != value}
    layout = ("messages" if openai else "sharegpt") if sharegpt else "alpaca"
    path = f"{folder}/{entry['file_name']}" if entry.get("file_name") else str(entry.get("hf_hub_url") or name)
    more = {"split": entry.get("split"), "name": entry.get("subset"), "columns": named}
    return sources.source(draft, given, path, **more), layout


def _prompts(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.loss_on", "all", given)


def _history(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("data.loss_on", "completion", given, "mask_history: the last answer alone")


def _packing(draft: Draft, given: ForeignSetting) -> None:
    if not truth(given.value):
        return
    draft.put("data.packing", True, given)
    if not truth(draft.said("neat_packing")):
        help = "that is neat_packing: true there"
        draft.differs(given, "packed rows see one another in LLaMA-Factory, and never do here", help)


def _weights(draft: Draft, given: ForeignSetting) -> None:
    draft.lost(given, "write `weight` beside the `path` of each source in data.train")


def _after(draft: Draft) -> None:
    draft.default("data.max_seq_len", 2048)
    draft.default("data.overlong", "truncate")
    draft.default("train.learning_rate", 5e-5)
    if draft.said("stage") == "pt":
        draft.put("data.format", "text", draft.given.get("stage"))
    r.trainer_defaults(draft)
    remark = "rows that are too long are cut, as there; `data.overlong: drop` leaves them out"
    if draft.get("data.overlong") == "truncate":
        draft.remark("LLaMA-Factory cuts rows at cutoff_len without a word, prompt and answer in proportion", remark)


RULES = r.Rules(
    rules={
        **r.OF_TRANSFORMERS,
        "stage": r.ignored,
        "finetuning_type": r.ignored,
        "lora_rank": r.ignored,
        "lora_target": _targets,
        "quantization_bit": _bits,
        "quantization_method": r.ignored,
        "dataset": _datasets("data.train"),
        "eval_dataset": _datasets("data.eval"),
        "dataset_dir": r.ignored,
        "max_samples": r.ignored,
        "template": lambda draft, given: sources.named_template(draft, given, str(given.value)),
        "val_size": r.no_split,
        "train_on_prompt": _prompts,
        "mask_history": _history,
        "packing": _packing,
        "neat_packing": _packing,
        "interleave_probs": _weights,
        "mix_strategy": r.harmless("rows of all sources are mixed; weights stand beside each source in data.train"),
        "flash_attn": r.attention,
        "pure_bf16": _pure_bf16,
        "use_unsloth": r.kernels,
        "enable_liger_kernel": r.kernels,
        "do_train": r.ignored,
        "do_eval": r.ignored,
        "overwrite_output_dir": r.harmless("`ftcli train --resume never` starts over, and keeps the old run"),
        "adapter_name_or_path": r.missing("training goes on from a checkpoint of ftcli with --resume PATH"),
        "plot_loss": r.ignored,
        "predict_with_generate": r.missing("write eval.tasks: {use: exact_match}, and others, judge what is generated"),
    },
    before=_before,
    after=_after,
)
