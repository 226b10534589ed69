"""LLaMA-Factory's YAML: what its rows of the table of names do not say. Defaults are those of 0.9.6."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ftcli.config.conversion import preferences, sources
from ftcli.config.conversion import rules as r
from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.plain import JsonObject, map_in, parsed_map

#: Its registry of datasets.
_INDEX = "dataset_info.json"
_MAX_INDEX = 2**22
_ALPACA = {
    "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
}  # fmt: skip
_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
#: What an entry of the registry may say that is read below.
_READ = frozenset(
    (
        "file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "formatting", "columns", "tags", "split", "subset",
        "num_samples", "ranking",
    )
)  # fmt: skip
#: What it calls the parts of a turn, and who speaks.
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "system_tag": "system",
}  # fmt: skip
_OPENAI = {**_TAGS, "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def _before(draft: Draft) -> None:
    if "model_name_or_path" not in draft.given and "model" in draft.given:
        help = "write it in the form that has model_name_or_path and finetuning_type"
        raise draft.refuse(draft.given["model"], "LLaMA-Factory's recipes of version 1 are not converted", help)
    draft.full = draft.said("finetuning_type") == "full"
    stage, loss = draft.given.get("stage"), draft.given.get("pref_loss")
    if stage is not None and stage.value == "kto":
        draft.put("train.method", "kto", stage)
    if stage is not None and stage.value == "rm":
        draft.put("train.method", "reward", stage)
    if stage is not None and stage.value == "dpo":
        name = str(loss.value) if loss is not None else "sigmoid"
        draft.put("train.method", name if name in ("orpo", "simpo") else "dpo", stage)
        preferences.choose(draft, loss, [name])


def _is_text(draft: Draft) -> bool:
    """True if it trains texts as they are."""
    return bool(draft.said("stage") == "pt")


def _datasets(key: str) -> r.Rule:
    def rule(draft: Draft, given: ForeignSetting) -> None:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        index, rows = _index(draft), draft.said("max_samples")
        found = [_registered(draft, given, str(name).strip(), index) for name in names]
        items = [{**item, "max_rows": rows} if isinstance(rows, int) and item else item for item, _ in found]
        sources.put(draft, key, items, given)
        if key == "data.train":
            sources.layouts(draft, {layout for _, layout in found}, given)

    return rule


def _folder(draft: Draft) -> str:
    said = draft.said("dataset_dir")
    return said if isinstance(said, str) else "data"


def _index(draft: Draft) -> JsonObject:
    """Its registry of datasets, where it lies in the folder that the recipe names; else nothing."""
    path = Path(_folder(draft)) / _INDEX
    with suppress(OSError):
        if path.stat().st_size <= _MAX_INDEX:
            return parsed_map(path.read_bytes()) or {}
    return {}


def _registered(draft: Draft, given: ForeignSetting, name: str, index: JsonObject) -> tuple[JsonObject, str | None]:
    """The dataset of this name, and its layout where that is known."""
    folder, entry = _folder(draft), index.get(name)
    if not isinstance(entry, dict):
        help = f"{folder}/{_INDEX} says which file `{name}` is: write that file, or hub:ORG/NAME"
        draft.unusable(given, f"`{name}` is a name in LLaMA-Factory's list of datasets", help)
        path = f"{folder}/{name}.json"
        return {} if "://" in path else {"path": path}, "text" if _is_text(draft) else None
    labels = preferences.labelled(draft)
    pairs = preferences.wanted(draft) and not labels
    if pairs != bool(entry.get("ranking")):
        what = "no pairs: `ranking` is not true" if pairs else "pairs, and the stage is none that learns from them"
        raise draft.refuse(given, f"the rows of `{name}` are {what}", "name rows that the stage trains on")
    tags = map_in(entry, "tags")
    layout, names = _layout(draft, str(entry.get("formatting")), tags)
    usual = _OPENAI if layout == "messages" else _TAGS
    odd = [f"{tag}: {value}" for tag, value in tags.items() if usual.get(tag, value) != value]
    odd += [key for key, value in entry.items() if key not in _READ and value]
    if odd:
        help = f"turns are {', '.join(usual.values())}: {r.NO_COPIES}"
        draft.unusable(given, f"`{name}` with {', '.join(odd)}", help)
    path = f"{folder}/{entry['file_name']}" if entry.get("file_name") else str(entry.get("hf_hub_url") or name)
    columns = {**({"prompt": "instruction"} if pairs or layout == "text" else {}), **map_in(entry, "columns")}
    names = _pairs(draft, given, name, columns, str(entry.get("formatting"))) if pairs else names
    names = {**names, "kto_tag": "kto_tag"} if labels else names
    named = {names[key]: str(value) for key, value in columns.items() if key in names and names[key] != value}
    rows = entry.get("num_samples") if isinstance(entry.get("num_samples"), int) else None
    more = {"split": entry.get("split"), "name": entry.get("subset"), "columns": named, "max_rows": rows}
    return sources.source(draft, given, path, **more), None if preferences.wanted(draft) else layout


def _pairs(draft: Draft, given: ForeignSetting, name: str, columns: JsonObject, formatting: str) -> dict[str, str]:
    """Our names of the columns of pairs; their strings and turns are told, which are written otherwise here."""
    if formatting in ("sharegpt", "openai"):
        what = f"turns of `{name}` (from and value; answers that are one message)"
        preferences.odd_messages(draft, given, what)
        columns.setdefault("messages", "conversations")
        return {**{key: key for key in _PAIRS if key != "prompt"}, "messages": "prompt"}
    preferences.plain_texts(draft, given, f"`{name}`")
    if columns.get("query"):
        help = "join both in the prompt of each row"
        draft.unusable(given, f"`query: {columns['query']}` of `{name}`, which follows the prompt", help)
    return _PAIRS


def _layout(draft: Draft, formatting: str, tags: JsonObject) -> tuple[str, dict[str, str]]:
    """Our name of the layout, and of its columns. In the stage `pt` the column of prompts is the text."""
    if _is_text(draft):
        return "text", {"prompt": "text"}
    if formatting not in ("sharegpt", "openai"):
        return "alpaca", _ALPACA
    openai = formatting == "openai" or tags.get("role_tag") == "role"
    return ("messages", {**_SHAREGPT, "messages": "messages"}) if openai else ("sharegpt", _SHAREGPT)


def _packing(draft: Draft, given: ForeignSetting) -> None:
    if draft.switched(given):
        draft.put("data.packing", True, given)
        if not truth(draft.said("neat_packing")) and not _is_text(draft):
            help = "that is neat_packing: true there"
            draft.differs(given, "packed rows see one another in LLaMA-Factory, and never do here", help)


def _pissa(draft: Draft, given: ForeignSetting) -> None:
    if draft.switched(given):
        rounds = draft.said("pissa_iter") or 16
        draft.put("lora.init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}", given)


def _adapter(draft: Draft, given: ForeignSetting) -> None:
    preferences.continued(draft, given, draft.said("model_name_or_path"))


def _ld_alpha(draft: Draft, given: ForeignSetting) -> None:
    draft.take(given, "preference.ld_alpha")
    help = "so the loss begins at ln 2; LLaMA-Factory's begins elsewhere"
    draft.differs(given, "`ld_alpha` weighs the tokens of policy and reference here, there the policy's alone", help)


def _cross_entropy(draft: Draft, given: ForeignSetting) -> None:
    preferences.cross_entropy(draft, given)
    if "preference.sft_weight" in draft.values:
        help = "there each answer counts alike, however long"
        draft.differs(given, "`pref_ftx` weighs the cross-entropy of each token of the chosen answers here", help)


def _after(draft: Draft) -> None:
    rank = draft.get("lora.r")
    if "lora.alpha" not in draft.values:
        twice = rank * 2 if isinstance(rank, int) else 16
        draft.put("lora.alpha", twice, comment="LLaMA-Factory's default: twice the rank")
    if draft.full and truth(draft.said("pure_bf16")):
        draft.put("train.pure_bf16", True, draft.given["pure_bf16"])
    if _is_text(draft):
        draft.put("data.format", "text", draft.given["stage"])
        if truth(draft.said("packing")) is not False:
            draft.put("data.packing", True, draft.given.get("packing"), "LLaMA-Factory's default for texts")
            help = "here a longer text is an error; data.overlong: split makes several rows of it"
            what = "LLaMA-Factory joins texts and cuts the stream into blocks of cutoff_len, which loses nothing"
            draft.remark(what, help)
            return
    preferences.finish(draft, prompts=False, drops=not preferences.scored(draft))
    draft.default("data.overlong", "truncate")
    if draft.get("data.overlong") == "truncate":
        help = "rows that are too long are cut, as there; `data.overlong: drop` leaves them out"
        draft.remark("LLaMA-Factory cuts rows at cutoff_len without a word, prompt and answer in proportion", help)


RULES = r.Rules(
    computed={
        "dataset": _datasets("data.train"),
        "eval_dataset": _datasets("data.eval"),
        "template": r.unless(lambda draft, _: _is_text(draft), sources.template),
        "packing": _packing,
        "pissa_init": _pissa,
        "pissa_iter": r.read,
        "flash_attn": r.attention,
        "adapter_name_or_path": _adapter,
        "pref_loss": r.read,
        "pref_ftx": _cross_entropy,
        "dpo_label_smoothing": preferences.smoothing,
        "simpo_gamma": preferences.gamma,
        "ld_alpha": _ld_alpha,
        "ref_model": preferences.reference,
    },
    before=_before,
    after=_after,
    defaults={"lora.r": 8, "data.max_seq_len": 2048, "train.learning_rate": 5e-5, **r.TRAINER_DEFAULTS},
    nulls=frozenset({"max_grad_norm"}),
)
