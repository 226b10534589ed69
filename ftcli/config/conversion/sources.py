"""Datasets as other tools name them, and as `data.train` and `data.eval` do."""

from __future__ import annotations

import re
from typing import Any

from ftcli.config.conversion.draft import Draft, is_url
from ftcli.config.conversion.source import ForeignSetting
from ftcli.paths import exists, expanded
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
    """Our name of `path`: a file as it is, `hub:ORG/NAME`; None for other names and for addresses."""
    if is_url(path):
        return None
    if _FILE.search(path) or exists(expanded(path)):
        return path
    return f"hub:{path}" if _HUB.fullmatch(path) else None


def source(draft: Draft, given: ForeignSetting, path: object, **more: Any) -> JsonObject:
    """One item of `data.train`: where rows are, and what else is known of them. Nothing where they lie at an address
    that is not read, and where it is no name at all.
    """
    if not isinstance(path, str) or is_url(path) or not path:
        what = f"`{path}` is not read" if path else "a dataset without a path"
        draft.unusable(given, what, "download it, and name the file; or write hub:ORG/NAME")
        return {}
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
        help = "name a split, and max_rows for its first rows; the whole split is read"
        draft.unusable(given, f"the split `{split}`", help)
    name = split.partition("[")[0]
    item["split"] = name
    if not name or (found is not None and name == "train"):
        del item["split"]
    if found is not None and found[2]:
        item["max_rows"] = int(found[2])


def put(draft: Draft, key: str, items: list[JsonObject], given: ForeignSetting) -> None:
    """Writes the list; an item of a path alone is that path."""
    found = [item["path"] if set(item) == {"path"} else item for item in items if item]
    if found:
        draft.put(key, found, given)


def layouts(draft: Draft, found: set[str | None], given: ForeignSetting) -> None:
    """`data.format`, where all sources have the same; else the columns say it."""
    if len(found) == 1 and None not in found:
        draft.put("data.format", next(iter(found)), given)


def listed(value: object) -> list[Any]:
    """A list as it is, one value as a list of it, nothing as an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def template(draft: Draft, given: ForeignSetting) -> None:
    """The setting is a chat template: its name, its file, or written out."""
    named_template(draft, given, str(given.value))


def named_template(draft: Draft, given: ForeignSetting, name: str) -> None:
    """A chat template by its name elsewhere, or written out."""
    if name.endswith(".jinja") and "\n" not in name:
        draft.put("data.chat_template", name, given)
        return
    if "{%" in name or "{{" in name:
        help = "write it to a .jinja file, and name that in data.chat_template; until then it is the tokenizer's own"
        draft.unusable(given, "a template inside of the recipe", help)
        return
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
