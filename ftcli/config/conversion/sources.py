"""Datasets as other tools name them, and as `data.train` and `data.eval` do."""

from __future__ import annotations

import re
from typing import Any

from ftcli.config.conversion.draft import Draft
from ftcli.config.conversion.source import ForeignSetting
from ftcli.paths import exists, expanded, unserved
from ftcli.plain import JsonObject

#: Our templates by the names that tools have for them. `alpaca`, `vicuna` and others are not there.
TEMPLATES = {
    "chatml": "chatml",
    "gemma": "gemma",
    "gemma2": "gemma",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral_v1": "mistral",
    "mistral_v2v3": "mistral",
}
_FILE = re.compile(r"(^[.~/])|\.(jsonl|json|csv|tsv|parquet|arrow)(\.gz)?$")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_SLICE = re.compile(r"([\w.-]+)(?:\[:(\d+)\])?")


def place(path: str) -> str | None:
    """What `path` is here: a file as it is, `hub:ORG/NAME`; None for names that say neither."""
    if _FILE.search(path) or unserved(path) is not None or exists(expanded(path)):
        return path
    return f"hub:{path}" if _HUB.fullmatch(path) else None


def source(draft: Draft, given: ForeignSetting, path: str, **more: Any) -> JsonObject:
    """One item of `data.train`: where rows are, and what else is known of them. What is None is left out."""
    found = place(path)
    if found is None:
        help = "write the file, or hub:ORG/NAME for a dataset of the Hub"
        draft.unusable(given, f"`{path}` is not a file, and the Hub wants ORG/NAME", help)
    item = {"path": found or path, **{key: value for key, value in more.items() if value not in (None, {}, "")}}
    split = item.get("split")
    if split is not None:
        _split(draft, given, item, str(split))
    if not item["path"].startswith("hub:"):
        for key in ("name", "revision", "split"):
            item.pop(key, None)
    return item


def _split(draft: Draft, given: ForeignSetting, item: JsonObject, split: str) -> None:
    """``train[:500]`` is the first 500 rows; other slices cannot be said."""
    found = _SLICE.fullmatch(split)
    if found is None:
        draft.unusable(
            given, f"the split `{split}`", "name a split, and max_rows for its first rows; the whole split is read"
        )
        item["split"] = split.partition("[")[0] or None
        return
    item["split"] = None if found[1] == "train" else found[1]
    if found[2]:
        item["max_rows"] = int(found[2])
    if item["split"] is None:
        del item["split"]


def put(draft: Draft, key: str, items: list[JsonObject], given: ForeignSetting) -> None:
    """Writes the list; an item of a path alone is that path."""
    draft.put(key, [item["path"] if set(item) == {"path"} else item for item in items], given)


def layouts(draft: Draft, found: set[str | None], given: ForeignSetting) -> None:
    """`data.format`, where all sources have the same; else the columns say it."""
    if len(found) == 1 and None not in found:
        draft.put("data.format", next(iter(found)), given)


def named_template(draft: Draft, given: ForeignSetting, name: str) -> None:
    """A chat template by its name elsewhere."""
    if name in ("tokenizer_default", "default", "auto") or name.startswith("tokenizer_default"):
        return
    if name in TEMPLATES:
        draft.put("data.chat_template", TEMPLATES[name], given)
        draft.differs(
            given,
            f"the template `{name}` is ftcli's of that name, not {draft.tool}'s",
            "leave data.chat_template out for the model's own; `ftcli check --show-sample 1` shows what is trained",
        )
        return
    help = "the tokenizer's own chat template is used; a .jinja file of yours can be named in data.chat_template"
    draft.unusable(given, f"there is no template `{name}` here", help)


def alpaca_remark(draft: Draft, given: ForeignSetting) -> None:
    """Tools that write Alpaca rows by the prompt of Stanford's paper train on another text than we do."""
    draft.differs(
        given,
        f"{draft.tool} writes Alpaca rows as `### Instruction: …`; here they are a chat in the model's template",
        "serve the model with its chat template; or write the prompt into the rows, as prompt and completion",
    )
