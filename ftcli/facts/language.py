"""The language model within a config.json: all of it, or the part of a multimodal model that is trained.

Multimodal models have the language model's config in ``text_config``, or flat beside ``vision_config`` (Qwen2-VL,
Qwen2.5-VL). What it leaves out is what transformers takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ftcli.plain import JsonMap, JsonObject
from ftcli.tables.families import MULTIMODAL, Multimodal, family_of

#: The content of a config.json.
Config: TypeAlias = JsonMap


def multimodal_of(config: Config) -> Multimodal | None:
    """The row of a multimodal checkpoint that is trained on text; None for a model of text, and for unknown ones."""
    return MULTIMODAL.get(str(config.get("model_type"))) if has_other_parts(config) else None


def has_other_parts(config: Config) -> bool:
    """True if the model takes more than text, or its language model is a part of it all the same."""
    return any(isinstance(config.get(key), Mapping) for key in ("text_config", "vision_config"))


def text_values(config: Config) -> JsonObject:
    """The language model's config, with its own ``model_type``, and what stands beside it in a multimodal one."""
    row = multimodal_of(config)
    inner = config.get("text_config")
    stated = {k: v for k, v in inner.items() if v is not None} if isinstance(inner, Mapping) else {}
    # What the inner config says is none is none, and not what is left out.
    none = dict.fromkeys(inner if isinstance(inner, Mapping) else ())
    values: JsonObject = {**none, **config, **stated}
    if row is not None:
        values["model_type"] = stated.get("model_type") or row.text
        # As transformers decides it: the outer value, unless only the inner one says yes.
        values["tie_word_embeddings"] = bool(
            stated.get("tie_word_embeddings") or config.get("tie_word_embeddings", row.tied)
        )
    family = family_of(str(values.get("model_type")))
    for key, default in family.defaults if family is not None else ():
        if values.get(key) is None:
            values[key] = default
    return values
