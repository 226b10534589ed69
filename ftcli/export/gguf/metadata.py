"""A model's shape, its arithmetic and the rotation of queries and keys as metadata of a GGUF file: written, and read as
whoever serves the file would.

:func:`metadata_of` writes, :func:`take_description` reads: a file is verified with a model that is built from what the
file says, so a wrong value shows in its logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import Finding
from ftcli.facts.layers import Attention
from ftcli.facts.model import activation_of
from ftcli.facts.shape import shape_of
from ftcli.gguf import (
    ReadFile,
    Value,
    no_place,
)
from ftcli.plain import JsonMap, JsonObject
from ftcli.tables.families import family_of
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


def with_common_values(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` without what single layers have, beside which transformers does not give what most have."""
    common = deepcopy(config)
    if hasattr(common, "_heterogeneity_spec"):
        common.per_layer_config = None
    return common


def head_size(config: PretrainedConfig) -> int:
    """Features of a head."""
    c: Any = config
    return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)


def rotation_of(config: PretrainedConfig, architecture: Architecture) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """The metadata of the rotation, and its factors. Raises FtcliError FT756 where llama.cpp rotates otherwise."""
    c: Any = config
    stated = dict(c.rope_parameters or {})
    rope: JsonMap = stated.get(FULL, stated)
    if architecture.name == "hunyuan-dense":
        rope = _static(rope, head_size(config))
    kind = str(rope.get("rope_type", "default"))
    if architecture.varied:
        return _proportional(config, stated)
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
        values |= _yarn(rope, architecture)
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


def _proportional(config: PretrainedConfig, stated: JsonMap) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Gemma-4's: in layers that see everything the first pairs of features turn, and the others get a factor that lets
    them stand still.
    """
    rope, sliding = stated[FULL], stated[SLIDING]
    if rope.get("rope_type") != "proportional" or sliding.get("rope_type", "default") != "default":
        raise no_place(f"its rope scalings are {rope.get('rope_type')} and {sliding.get('rope_type')}")
    window, wide = _head_sizes(config)
    if float(sliding.get("partial_rotary_factor", 1.0)) != 1.0 or rope.get("factor", 1.0) != 1.0:
        raise no_place("its layers with a window rotate a part of each head, or positions are scaled")
    turned = int(wide * float(rope.get("partial_rotary_factor", 1.0)) / 2)
    values: dict[str, Value] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": window,
    }
    return values, {"rope_freqs.weight": torch.tensor([1.0] * turned + [_STILL] * (wide // 2 - turned))}


def _head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Features of a head in layers with a window, and in those that see everything."""
    sizes = {attention.window is None: attention.head_dim for attention, _ in _layers(config)}
    return sizes[False], sizes[True]


def _layers(config: PretrainedConfig) -> list[tuple[Attention, int]]:
    """The attention of each layer, and the width of its MLP."""
    shape = shape_of(config.to_dict())
    layers = () if shape is None else shape.layers
    found = [(layer.attention, layer.mlp_width) for layer in layers if layer.attention is not None]
    if {attention.window is None for attention, _ in found} != {True, False}:
        raise no_place("it has layers of one kind alone")
    return found


def _varied(config: PretrainedConfig) -> dict[str, Value]:
    """Metadata in which Gemma-4's layers differ."""
    c: Any = with_common_values(config)
    layers, (window, wide) = _layers(config), _head_sizes(config)
    shared = int(getattr(c, "num_kv_shared_layers", None) or 0)
    first = len(layers) - shared
    if shared and [attention.window is None for attention, _ in layers[max(first - 2, 0) : first]] != [False, True]:
        raise no_place("llama.cpp takes shared keys of the last two layers before: one with a window, and one without")
    values: dict[str, Value] = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": window,
        "attention.value_length_swa": window,
        "attention.shared_kv_layers": shared,
        "attention.head_count_kv": [attention.kv_heads for attention, _ in layers],
        "feed_forward_length": [width for _, width in layers],
        "embedding_length_per_layer_input": int(getattr(c, "hidden_size_per_layer_input", None) or 0),
    }
    if getattr(c, "enable_moe_block", False):
        values |= {
            "expert_count": int(c.num_experts),
            "expert_used_count": int(c.top_k_experts),
            "expert_feed_forward_length": int(c.moe_intermediate_size),
        }
    return values


def _varied_said(values: JsonMap, file: ReadFile) -> JsonObject:
    """Gemma-4's layers as a file describes them, by the config's names."""
    kv_heads, widths = values["attention.head_count_kv"], values["feed_forward_length"]
    full = [at for at, sliding in enumerate(values["attention.sliding_window_pattern"]) if not sliding]
    first = values["block_count"] - values["attention.shared_kv_layers"]
    plain = next(at for at in range(values["block_count"]) if at not in full)
    of_full = {"head_dim": values["attention.key_length"], "num_key_value_heads": kv_heads[full[0]]}
    factors = file.read("rope_freqs.weight")
    rope = {"rope_type": "proportional", "rope_theta": values["rope.freq_base"]}
    rope["partial_rotary_factor"] = float((factors == 1.0).sum()) / len(factors)
    return {
        "head_dim": values["attention.key_length_swa"],
        "num_key_value_heads": kv_heads[plain],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": values["attention.shared_kv_layers"],
        "hidden_size_per_layer_input": values["embedding_length_per_layer_input"],
        "attention_k_eq_v": any(f"blk.{at}.attn_v.weight" not in file.names for at in full if at < first),
        "enable_moe_block": "expert_count" in values,
        "top_k_experts": values.get("expert_used_count"),
        "per_layer_config": dict.fromkeys(full, of_full),
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": values["rope.freq_base_swa"]}},
    }


def _yarn(rope: JsonMap, architecture: Architecture) -> dict[str, Value]:
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
    }
    if not rope.get("truncate", True) and architecture.name != "gpt-oss":
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


#: A config's names of what files say of every model.
_SAID = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
#: The same of experts.
_EXPERTS_SAID = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
#: The same of gated delta nets. Heads of keys and of values have one size.
_DELTA_NETS_SAID = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
#: transformers' epsilon of the length of their queries and keys.
_L2_EPSILON = 1e-6
#: Architectures that cap logits.
_CAPPED = ("gemma2", "gemma3", "gemma4")
#: A factor that slows a pair of features until it does not turn, as llama.cpp's own converter writes it.
_STILL = 1e30
#: What is known of gpt-oss: its YaRN has a ramp from 8.09 to 17.40 there, llama.cpp one from 8 to 18.
_RAMP = (
    "llama.cpp rounds the range of YaRN's ramp, which this model does not: distant tokens are seen a little elsewhere"
)
#: Room for float32 arithmetic in comparing what should be equal.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Description:
    """The metadata of a file.

    Attributes:
        warnings: Where llama.cpp computes something other than transformers.
        fault: What it computes otherwise of this model whatever the file says; None: nothing that is known.
    """

    values: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    warnings: tuple[Finding, ...]
    fault: str | None = None


def metadata_of(config: PretrainedConfig, architecture: Architecture) -> Description:
    """The metadata of a language model. Raises FtcliError FT756 for arithmetic that llama.cpp does not have."""
    common = with_common_values(config)
    c: Any = common
    head_dim = head_size(common)
    _require_arithmetic(common, architecture)
    windowed = window_layers(common)
    context, warnings = _context(common, architecture, windowed)
    values: dict[str, Value] = {
        "context_length": context,
        **{key: int(getattr(c, name)) for key, name in _SAID.items()},
        "attention.head_count_kv": int(getattr(c, "num_key_value_heads", None) or c.num_attention_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        _epsilon(architecture): float(getattr(c, architecture.epsilon)),
        "vocab_size": int(c.vocab_size),
        **{key: float(getattr(c, name)) for key, name in architecture.scales},
    }
    if has_windows(architecture, len(windowed)):
        values["attention.sliding_window"] = int(c.sliding_window) if any(windowed) else 0
        values["attention.sliding_window_pattern"] = windowed
    elif architecture.name == "phi3":
        values["attention.sliding_window"] = 0  # it wants the key, and applies none
    if architecture.varied:
        values |= _varied(config)
    elif architecture.experts:
        values |= _experts(c, architecture)
    if architecture.delta_nets:
        values |= _delta_nets(c, architecture)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(c, key, None):
            values[key] = float(getattr(c, key))
    rotation, tensors = rotation_of(config, architecture)
    fault = None if (c.rope_parameters or {}).get("truncate", True) else _RAMP
    if fault is not None:
        warnings = (*warnings, Finding("FT757", f"in the file's model {fault}", severity="warning"))
    return Description({**values, **rotation}, tensors, warnings, fault)


def _epsilon(architecture: Architecture) -> str:
    """The key of the norms' epsilon."""
    return f"attention.layer_norm_{'rms_' if architecture.epsilon == 'rms_norm_eps' else ''}epsilon"


def has_windows(architecture: Architecture, layers: int) -> bool:
    """True if llama.cpp lets layers of a model of so many see a window."""
    return architecture.window and architecture.windowed_at in (None, layers)


def _experts(c: Any, architecture: Architecture) -> dict[str, Value]:
    """Number of experts, of chosen experts, and their width."""
    if getattr(c, "mlp_only_layers", None) or getattr(c, "decoder_sparse_step", 1) != 1:
        raise no_place(f"not every layer has experts, and in llama.cpp's {architecture.name} every layer does")
    chosen = architecture.experts == "chosen"
    if not chosen and getattr(c, "norm_topk_prob", True) != (architecture.experts == "normalised"):
        raise no_place(f"norm_topk_prob is {c.norm_topk_prob}, and llama.cpp's {architecture.name} computes the other")
    count = getattr(c, "num_local_experts", None) or c.num_experts
    said = {key: getattr(c, name) for key, name in _EXPERTS_SAID.items() if hasattr(c, name)}
    if architecture.transposed:
        said["expert_feed_forward_length"] = c.intermediate_size
    return {key: int(value) for key, value in {**said, "expert_count": count}.items()}


def _delta_nets(c: Any, architecture: Architecture) -> dict[str, Value]:
    """Sizes of gated delta nets, and the layers that are such.

    Of a regular order of layers the interval is said, too, which is all that older llama.cpp reads. Of another one it
    takes every fourth layer to attend then, and does not find their tensors.
    """
    if c.linear_key_head_dim != c.linear_value_head_dim:
        raise no_place(
            f"its delta nets have keys of {c.linear_key_head_dim} and values of {c.linear_value_head_dim}; llama.cpp's "
            f"{architecture.name} has both alike"
        )
    if not math.isclose(c.rms_norm_eps, _L2_EPSILON, rel_tol=ROUNDING):
        raise no_place(
            f"rms_norm_eps is {c.rms_norm_eps:g}, which llama.cpp's {architecture.name} takes for the length of keys "
            f"and queries as well, and transformers takes {_L2_EPSILON:g} there"
        )
    recurrent = [kind == LINEAR for kind in c.layer_types]
    values: dict[str, Value] = {
        **{key: int(getattr(c, name)) for key, name in _DELTA_NETS_SAID.items()},
        "ssm.inner_size": int(c.linear_value_head_dim * c.linear_num_value_heads),
        "attention.recurrent_layers": recurrent,
    }
    every = recurrent.index(False) + 1 if False in recurrent else 0
    if every and recurrent == [(layer + 1) % every != 0 for layer in range(len(recurrent))]:
        values["full_attention_interval"] = every
    return values


def usual_activation(config: PretrainedConfig) -> str:
    """The MLP's activation, by the name that most configs call it by."""
    name = str(activation_of(config.to_dict(), family_of(str(config.model_type))))
    return "silu" if name == "swish" else name


def window_layers(config: PretrainedConfig) -> list[bool]:
    """True for each layer that attends to a window only."""
    c: Any = config
    if not getattr(c, "sliding_window", None):
        return [False] * c.num_hidden_layers
    types = getattr(c, "layer_types", None)
    return [kind == SLIDING for kind in types] if types else [True] * c.num_hidden_layers


def _context(
    config: PretrainedConfig, architecture: Architecture, windowed: list[bool]
) -> tuple[int, tuple[Finding, ...]]:
    """Up to which length llama.cpp computes what was trained."""
    c: Any = config
    longest = int(c.max_position_embeddings)
    if has_windows(architecture, len(windowed)) or not any(windowed) or c.sliding_window >= longest:
        return longest, ()
    message = (
        f"llama.cpp has no sliding window for {architecture.name}: the file limits the context to {c.sliding_window} "
        f"tokens in place of {longest}, up to which it computes what was trained"
    )
    return int(c.sliding_window), (Finding("FT757", message, severity="warning"),)


def _require_arithmetic(config: PretrainedConfig, architecture: Architecture) -> None:
    c: Any = config
    head_dim = head_size(config)
    if not architecture.head_dim and head_dim * c.num_attention_heads != c.hidden_size:
        raise no_place(f"in {architecture.name} heads times head_dim must be hidden_size")
    large = architecture.large_layers == c.num_hidden_layers
    built_in = c.hidden_size // c.num_attention_heads if large else head_dim
    wanted = getattr(c, "query_pre_attn_scalar", None) or head_dim
    if wanted != built_in:
        raise no_place(f"query_pre_attn_scalar is {wanted}; llama.cpp hard-codes {built_in} for this architecture")
    activation = usual_activation(config)
    if activation != architecture.activation:
        raise no_place(f"its activation is {activation}; llama.cpp computes {architecture.activation}")
    if architecture.own_head and c.tie_word_embeddings:
        raise no_place(f"it has tied embeddings; llama.cpp's {architecture.name} needs a separate head")
    _require_layers(config, architecture)
    for _, name in architecture.scales:
        if not getattr(c, name):
            raise no_place(f"its {name} is 0, which llama.cpp takes for none")
    if architecture.name != "gemma2" and getattr(c, "attn_logit_softcapping", None):
        raise no_place(f"llama.cpp does not cap scores in {architecture.name}")
    if architecture.name not in _CAPPED and getattr(c, "final_logit_softcapping", None):
        raise no_place(f"llama.cpp does not cap logits in {architecture.name}")


def _require_layers(config: PretrainedConfig, architecture: Architecture) -> None:
    """Raises FT756 where llama.cpp has windows or rotates in other layers."""
    c: Any = config
    layers, every, name = int(c.num_hidden_layers), architecture.unrotated_every, architecture.name
    if every is not None and list(c.no_rope_layers) != unrotated(every, layers):
        raise no_place(
            f"no_rope_layers is {list(c.no_rope_layers)}; llama.cpp's {name} rotates all but every {every}th layer"
        )
    if architecture.windowed_at is not None and any(window_layers(config)) != has_windows(architecture, layers):
        raise no_place(
            f"llama.cpp's {name} has windows in models of {architecture.windowed_at} layers and in no others; this one "
            f"of {layers} has {'some' if any(window_layers(config)) else 'none'}"
        )


def unrotated(every: int, layers: int) -> list[int]:
    """``no_rope_layers`` of a model that rotates all but every so manieth layer: 0 for one that it does not."""
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def config_changes(values: JsonMap, architecture: Architecture) -> JsonObject:
    """Changes to a language model's config that a file's metadata means: each value is taken from the file alone."""
    changes: JsonObject = {
        **{name: values[key] for key, name in _SAID.items()},
        "num_key_value_heads": values["attention.head_count_kv"],
        architecture.epsilon: values[_epsilon(architecture)],
        "vocab_size": values["vocab_size"],
        **{name: values[key] for key, name in architecture.scales},
    }
    if architecture.head_dim:
        changes["head_dim"] = values["attention.key_length"]
    if architecture.name == "gemma2":
        changes["attn_logit_softcapping"] = values.get("attn_logit_softcapping")
    if architecture.unrotated_every is not None:
        changes["no_rope_layers"] = unrotated(architecture.unrotated_every, values["block_count"])
    if architecture.name in _CAPPED:
        changes["final_logit_softcapping"] = values.get("final_logit_softcapping")
    if has_windows(architecture, values["block_count"]):
        pattern = values["attention.sliding_window_pattern"]
        changes["layer_types"] = [SLIDING if sliding else FULL for sliding in pattern]
        changes["sliding_window"] = values["attention.sliding_window"] or None
    if architecture.experts and not architecture.varied:
        changes["norm_topk_prob"] = architecture.experts == "normalised"
    changes |= {name: values[key] for key, name in _EXPERTS_SAID.items() if key in values}
    if architecture.delta_nets:
        changes |= {name: values[key] for key, name in _DELTA_NETS_SAID.items()}
        changes["linear_value_head_dim"] = values["ssm.inner_size"] // values["ssm.time_step_rank"]
        changes["layer_types"] = [LINEAR if recurrent else FULL for recurrent in values["attention.recurrent_layers"]]
    if architecture.transposed:
        changes["num_local_experts"] = changes.pop("num_experts")
        changes["intermediate_size"] = changes.pop("moe_intermediate_size")
    if not architecture.varied:
        changes["rope_parameters"] = rope_said(values)
    return changes


def take_description(config: PretrainedConfig, file: ReadFile, architecture: Architecture) -> list[str]:
    """Takes everything that ``file`` says of the language model into ``config``; problems are what it cannot say so."""
    values, text = file.values, config.get_text_config()
    said = {k.removeprefix(f"{architecture.name}."): v for k, v in values.items() if k.startswith(architecture.name)}
    changes = config_changes(said, architecture)
    problems: list[str] = []
    if architecture.varied:
        changes |= _varied_said(said, file)
        text.per_layer_config = None  # or what most layers have could not be set
    elif "rope_freqs.weight" in file.names:
        turned = said["rope.dimension_count"]
        plain = said["rope.freq_base"] ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        found = plain / file.read("rope_freqs.weight").double()
        if not torch.allclose(found, rotary(text).double(), rtol=ROUNDING, atol=0.0):
            problems.append("the rotary frequencies differ")
    if any(name.startswith("rope_f") for name in file.names) and not architecture.varied:
        changes.pop("rope_parameters")
    elif "truncate" in text.rope_parameters:  # llama.cpp's own fault, which a file cannot mend
        changes["rope_parameters"]["truncate"] = text.rope_parameters["truncate"]
    for key, value in changes.items():
        setattr(text, key, value)
    return problems
