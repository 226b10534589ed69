"""The rotation of queries and keys as metadata of a GGUF file: written, and read as whoever serves the file would."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.gguf import Value, no_place
from ftcli.plain import JsonMap, JsonObject
from ftcli.tables.gguf import Architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Kinds of layers, by transformers' names.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
#: Qwen3.5's sections, where its config.json says none.
_USUAL_SECTIONS = (11, 11, 10)
#: Kinds of rope scaling that the metadata can say; llama3's and LongRoPE's factors are tensors.
_AS_TENSORS = ("llama3", "longrope")
_SCALINGS = ("default", "linear", "yarn", *_AS_TENSORS)


def head_size(config: PretrainedConfig) -> int:
    """Features of a head."""
    c: Any = config
    return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)


def rotation_of(config: PretrainedConfig, architecture: Architecture) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """The metadata of the rotation, and its factors.

    Raises:
        FtcliError: FT756 where llama.cpp rotates otherwise.
    """
    c: Any = config
    stated = dict(c.rope_parameters or {})
    rope: JsonMap = stated.get(FULL, stated)
    if architecture.name == "hunyuan-dense":
        rope = _static(rope, head_size(config))
    kind = str(rope.get("rope_type", "default"))
    turned = int(head_size(config) * float(rope.get("partial_rotary_factor", 1.0)))
    _require_rotation(rope, stated, turned == head_size(config), architecture)
    values: dict[str, Value] = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": turned}
    if SLIDING in stated:
        values["rope.freq_base_swa"] = float(stated[SLIDING]["rope_theta"])
    if architecture.sections:
        values["rope.dimension_sections"] = _sections(rope, turned, architecture)
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    elif kind == "yarn":
        values |= _yarn(rope)
    tensors: dict[str, Tensor] = {}
    if kind == "llama3":
        tensors["rope_freqs.weight"] = _factors(config, turned, float(rope["rope_theta"]))
    elif kind == "longrope":
        values |= _longrope(config, rope)
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
    return values, tensors


def _require_rotation(rope: JsonMap, stated: JsonMap, turned: bool, architecture: Architecture) -> None:
    """Raises FT756 where llama.cpp rotates otherwise.

    Args:
        rope: Of layers that see everything, or of all.
        stated: Of all.
        turned: Whether a head is rotated as a whole.
    """
    kind, name = str(rope.get("rope_type", "default")), architecture.name
    if kind not in _SCALINGS:
        raise no_place(f"its rope scaling is {kind}")
    if kind in _AS_TENSORS and kind not in architecture.factors:
        raise no_place(f"its rope scaling is {kind}, which llama.cpp does not read in {name}")
    if not turned and not architecture.rotates_part:
        raise no_place(f"a part of each head is rotated, and llama.cpp's {name} rotates the whole")
    sliding: JsonMap = stated.get(SLIDING, {})
    if sliding.get("rope_type", "default") != "default":
        raise no_place(f"layers with a window have a rope scaling, {sliding['rope_type']}; llama.cpp has none there")
    if name == "olmo2" and sliding.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise no_place(f"layers with a window have a rope_theta of their own; llama.cpp's {name} knows one")


def _static(rope: JsonMap, head_dim: int) -> JsonMap:
    """HunYuan's scaling by ``alpha``, which config.json calls dynamic, as the larger base that it is."""
    alpha = rope.get("alpha")
    if rope.get("rope_type") != "dynamic" or not alpha:
        return rope
    theta = float(rope["rope_theta"]) * float(alpha) ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": theta}


def _sections(rope: JsonMap, turned: int, architecture: Architecture) -> list[int]:
    """Pairs of features that turn by time, height and width; in text all three are the position.

    Where they are interleaved, llama.cpp does not turn what is left over behind the shorter of them, and transformers
    does: two pairs of 64 in Qwen3-VL, none in Qwen3.5. So none is left over here, and text is computed as it was
    trained.
    """
    stated = [int(size) for size in rope.get("mrope_section", _USUAL_SECTIONS)]
    if architecture.interleaved and sum(stated) > turned:  # those of larger heads, at which llama.cpp aborts
        stated = [-(-turned // 6)] * 3
    if architecture.interleaved and any(pair >= 3 * stated[pair % 3] for pair in range(turned // 2)):
        stated = [max(*stated, -(-turned // 6))] * 3
    return [*stated, 0][:4]


def _yarn(rope: JsonMap) -> dict[str, Value]:
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
    }
    if not rope.get("truncate", True):
        raise no_place("its YaRN does not round the range of its ramp (truncate), and llama.cpp does")
    if rope.get("attention_factor") and not rope.get("mscale_all_dim"):
        values["rope.scaling.attn_factor"] = float(rope["attention_factor"]) / _yarn_factor(float(rope["factor"]))
    if rope.get("mscale_all_dim"):
        if rope.get("mscale", 1.0) != 1.0:
            raise no_place(f"its YaRN has mscale {rope['mscale']}, llama.cpp takes 1")
        values["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    if rope.get("llama_4_scaling_beta"):
        values["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    return values


def _yarn_factor(factor: float) -> float:
    """By how much YaRN multiplies cosine and sine where nothing else is said."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(config: PretrainedConfig, rope: JsonMap) -> dict[str, Value]:
    c: Any = config
    original = int(rope.get("original_max_position_embeddings") or c.max_position_embeddings)
    scale = c.max_position_embeddings / original
    stated = rope.get("attention_factor")
    factor = stated if stated else math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(factor),
    }


def _factors(config: PretrainedConfig, turned: int, base: float) -> Tensor:
    """By how much llama3's scaling slows each pair of features: (turned / 2,)."""
    scaled = rotary(config)
    plain = base ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    return (plain / scaled.double()).float()


def rotary(config: PretrainedConfig) -> Tensor:
    """The frequencies (turned / 2,) that transformers computes for a config's scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    result: Tensor = frequencies
    return result


def rope_said(values: JsonMap) -> JsonObject:
    """``rope_parameters`` that a file's metadata means."""
    rope: JsonObject = {"rope_type": values.get("rope.scaling.type", "default")}
    rope["rope_theta"] = values["rope.freq_base"]
    named = {
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
        "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        "attention.temperature_scale": "llama_4_scaling_beta",
    }
    rope |= {name: values[key] for key, name in named.items() if key in values}
    if "mscale_all_dim" in rope:
        rope["mscale"] = 1.0  # llama.cpp takes no other
    if rope["rope_type"] == "yarn" and "rope.scaling.attn_factor" in values:
        rope["attention_factor"] = values["rope.scaling.attn_factor"] * _yarn_factor(rope["factor"])
    if values["rope.dimension_count"] != values["attention.key_length"]:
        rope["partial_rotary_factor"] = values["rope.dimension_count"] / values["attention.key_length"]
    if "rope.dimension_sections" in values:
        rope["mrope_section"] = list(values["rope.dimension_sections"])[:3]
    if "rope.freq_base_swa" not in values:
        return rope
    return {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": values["rope.freq_base_swa"]}}
