"""GGUF: how llama.cpp builds each family, and the types that its files store weights in.

What is said here was read in llama.cpp's own sources (0c1e570 of 2026, through llama-cpp-python 0.3.36) and found to
hold by running each family there: docs/export.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_QKV = ("q_proj", "k_proj", "v_proj")
_LLAMA3 = ("llama3",)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model that llama.cpp builds for a value of the metadata ``general.architecture``.

    Attributes:
        permuted: It rotates neighbouring features of a head, where transformers rotates those half a head apart: the
            rows of q and k are stored in that order.
        shifted: It multiplies by a norm's weight, where transformers multiplies by (1 + weight).
        tied: It has no head but the embedding.
        window: It has layers that see a window. Elsewhere every layer sees everything.
        windowed_at: It has windows in models of so many layers, and none in others. None: in any.
        unrotated_every: It rotates nothing in every so manieth layer.
        large_layers: With so many layers it divides scores by sqrt(hidden_size / heads) in place of sqrt(head_dim).
            None: always by sqrt(head_dim).
        biases: Layers, by their last name, whose bias it reads.
        all_biases: It cannot do without any of these.
        epsilon: The config's name of the norms' epsilon. LayerNorm's has other names than RMSNorm's.
        scales: Names of factors of the arithmetic, there and in the config. There 0 is none.
        rotates_part: It can rotate the first features of a head alone.
        factors: Kinds of rope scaling that it reads as tensors.
        sections: It wants rope sections of text, height, width.
        interleaved: These take turns, feature by feature.
        delta_nets: Layers between those that attend are gated delta nets: the value heads of a key head lie as far
            apart as there are key heads, and the norm of what they give is no ``shifted`` one.
        head_dim: A head's size is read; None: it is always hidden_size over heads.
        experts: It chooses among experts, and weighs those it has chosen by what a softmax over all gives (``raw``), by
            that brought to a sum of one (``normalised``), or by a softmax over these (``chosen``). None: it has none.
        transposed: transformers has stacks of experts as (E, in, out) and of gate and up projection each second column,
            with biases.
        varied: Layers without a window have heads of another size and number, and the last layers may take keys and
            values of earlier ones (Gemma-4).
        own_head: It has no head but a matrix of its own.
        only_in: The one program that builds it, where llama.cpp itself does not.
        merges: What it calls a tokenizer of merges of text with spaces as ``▁``. None: such a one is told by scores.
        named_as: The architecture whose tensors have the same names, where the gguf library does not know this one.
        fault: What is wrong with how llama.cpp computes it, whatever file it reads; None: nothing that is known.
    """

    name: str
    permuted: bool = False
    shifted: bool = False
    tied: bool = False
    window: bool = False
    large_layers: int | None = None
    windowed_at: int | None = None
    unrotated_every: int | None = None
    biases: tuple[str, ...] = _QKV
    all_biases: bool = False
    epsilon: str = "rms_norm_eps"
    scales: tuple[tuple[str, str], ...] = ()
    rotates_part: bool = False
    factors: tuple[str, ...] = ()
    sections: bool = False
    interleaved: bool = False
    delta_nets: bool = False
    head_dim: bool = True
    activation: str = "silu"
    experts: Literal["raw", "normalised", "chosen"] | None = None
    transposed: bool = False
    varied: bool = False
    own_head: bool = False
    only_in: str | None = None
    merges: str | None = None
    named_as: str | None = None
    fault: str | None = None


_GELU = "gelu_pytorch_tanh"
_EPSILON = "llama.cpp never reads the epsilon of qwen2vl's norms, and computes with whatever lies there"
_ALL_BIASES = (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
_NORM_BIASES = ("input_layernorm", "post_attention_layernorm", "norm")

#: By ``model_type`` of the language model.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=True, biases=_ALL_BIASES, factors=_LLAMA3),
    "mistral": Architecture("llama", permuted=True, biases=_ALL_BIASES, factors=_LLAMA3),
    "ministral3": Architecture("mistral3", permuted=True, biases=_ALL_BIASES, factors=_LLAMA3),
    "qwen2": Architecture("qwen2", head_dim=False),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", shifted=True, tied=True, activation=_GELU),
    "gemma2": Architecture("gemma2", shifted=True, tied=True, window=True, large_layers=46, activation=_GELU),
    "gemma3_text": Architecture("gemma3", shifted=True, window=True, large_layers=62, activation=_GELU),
    "gemma4_text": Architecture(
        "gemma4", tied=True, window=True, activation=_GELU, experts="normalised", varied=True, merges="gemma4"
    ),
    "gemma4_unified_text": Architecture(
        "gemma4", tied=True, window=True, activation=_GELU, varied=True, merges="gemma4"
    ),
    "gpt_oss": Architecture(
        "gpt-oss", window=True, biases=(*_QKV, "o_proj", "router"), experts="chosen", transposed=True
    ),
    "qwen2_vl_text": Architecture("qwen2vl", sections=True, head_dim=False, fault=_EPSILON),
    "qwen2_5_vl_text": Architecture("qwen2vl", sections=True, head_dim=False, fault=_EPSILON),
    "qwen3_vl_text": Architecture("qwen3vl", sections=True, interleaved=True),
    "qwen3_5_text": Architecture(
        "qwen35", shifted=True, biases=(), rotates_part=True, sections=True, interleaved=True, delta_nets=True
    ),
    "phi3": Architecture("phi3", biases=(), head_dim=False, rotates_part=True, factors=("longrope",)),
    "smollm3": Architecture("smollm3", permuted=True, unrotated_every=4),
    "olmo2": Architecture("olmo2", head_dim=False, own_head=True),
    "olmo3": Architecture("olmo2", window=True, head_dim=False, own_head=True),
    "granite": Architecture(
        "granite",
        permuted=True,
        biases=_ALL_BIASES,
        factors=_LLAMA3,
        scales=(
            ("logit_scale", "logits_scaling"),
            ("residual_scale", "residual_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("attention.scale", "attention_multiplier"),
        ),
    ),
    "arcee": Architecture("arcee", permuted=True, activation="relu2", factors=_LLAMA3),
    "jais2": Architecture(
        "jais2",
        biases=(*_QKV, "o_proj", "up_proj", "down_proj", *_NORM_BIASES),
        all_biases=True,
        epsilon="layer_norm_eps",
        activation="relu2",
    ),
    "apertus": Architecture("apertus", biases=(*_QKV, "o_proj"), own_head=True, activation="xielu", factors=_LLAMA3),
    "exaone4": Architecture("exaone4", window=True, windowed_at=64, head_dim=False, factors=_LLAMA3),
    "cohere2": Architecture(
        "cohere2",
        tied=True,
        window=True,
        head_dim=False,
        epsilon="layer_norm_eps",
        scales=(("logit_scale", "logit_scale"),),
    ),
    "glm": Architecture("chatglm", head_dim=False, rotates_part=True),
    "glm4": Architecture("glm4", rotates_part=True),
    "starcoder2": Architecture(
        "starcoder2",
        biases=(*_QKV, "o_proj", "c_fc", "c_proj", *_NORM_BIASES),
        all_biases=True,
        head_dim=False,
        epsilon="norm_epsilon",
        activation=_GELU,
    ),
    "stablelm": Architecture(
        "stablelm",
        biases=(*_QKV, *_NORM_BIASES),
        head_dim=False,
        own_head=True,
        epsilon="layer_norm_eps",
        rotates_part=True,
    ),
    "seed_oss": Architecture("seed_oss"),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "mixtral": Architecture("llama", permuted=True, biases=_ALL_BIASES, factors=_LLAMA3, experts="normalised"),
    "qwen2_moe": Architecture("qwen2moe", head_dim=False, experts="raw", own_head=True),
    "qwen3_moe": Architecture("qwen3moe", experts="normalised"),
    "bitnet": Architecture("bitnet", tied=True, biases=(), head_dim=False),
}
#: By ``model_type`` and activation, where that makes another architecture. Microsoft's fork of llama.cpp has this one
#: (its ``build_bitnet_158``); llama.cpp's own ``bitnet`` computes SiLU.
BY_ACTIVATION: Mapping[tuple[str, str], Architecture] = {
    ("bitnet", "relu2"): Architecture(
        "bitnet-b1.58",
        tied=True,
        biases=(),
        head_dim=False,
        activation="relu2",
        only_in="bitnet.cpp",
        named_as="bitnet",
    ),
}


#: Why a model is not written whose layers have norms on their inputs.
NORMS_OF_LAYERS = "llama.cpp has no norms on the inputs of single layers (quantization.use_rms_norm)"
#: What to do with a model that cannot be written.
INSTEAD = "export safetensors, which transformers and vLLM serve"


def unknown_architecture(model_type: str) -> str:
    """The reason why a model of a family without a row is not written."""
    return f"ftcli does not know how llama.cpp builds a model_type {model_type}"


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type of a file's matrices.

    Attributes:
        error: Largest error of a weight, as a share of the largest one in its block of 32 (of the weight itself for
            the 16-bit ones); 0 for float32. A test holds it.
        steps: The largest number that a block's scale is multiplied by: the scale is float16, whose own error counts so
            often where it is subnormal.
        logits: Largest relative error of the logits that passes.
        outer: The type of embedding and head where that is another.
        quantized_by: ``llama-quantize`` makes it, from a file of this type; None: the gguf library does.
        block: Weights of a block, which rows are made of; rows of another length are float16.
        ternary: It has three values a block, so it is for weights that have no more (``quantization.method: bitnet``).
        weighed: It is rounded by an importance matrix of the run's rows, whatever ``export.gguf.imatrix`` says.
    """

    ggml: str
    file_type: int
    error: float
    logits: float
    outer: str | None = None
    quantized_by: str | None = None
    block: int = 1
    steps: int = 1
    ternary: bool = False
    weighed: bool = False


TYPES: Mapping[str, StoredType] = {
    "f32": StoredType("F32", 0, 0.0, 1e-5),
    "f16": StoredType("F16", 1, 2.0**-11, 0.02),
    "bf16": StoredType("BF16", 32, 2.0**-8, 0.1),
    "q8_0": StoredType("Q8_0", 7, 0.0045, 0.25, block=32, steps=127),
    "q5_1": StoredType("Q5_1", 9, 0.036, 0.5, outer="q8_0", block=32, steps=31),
    "q5_0": StoredType("Q5_0", 8, 0.0636, 0.5, outer="q8_0", block=32, steps=16),
    "q4_1": StoredType("Q4_1", 3, 0.071, 0.8, outer="q8_0", block=32, steps=15),
    "q4_0": StoredType("Q4_0", 2, 0.127, 0.8, outer="q8_0", block=32, steps=8),
    "tq2_0": StoredType("TQ2_0", 37, 2.0**-11, 0.02, outer="f16", block=256, ternary=True),
    "tq1_0": StoredType("TQ1_0", 36, 2.0**-11, 0.02, outer="f16", block=256, ternary=True),
    "q6_k": StoredType("Q6_K", 18, 0.0, 0.5, quantized_by="bf16"),
    "q5_k_m": StoredType("Q5_K_M", 17, 0.0, 0.5, quantized_by="bf16"),
    "q5_k_s": StoredType("Q5_K_S", 16, 0.0, 0.5, quantized_by="bf16"),
    "q4_k_m": StoredType("Q4_K_M", 15, 0.0, 0.8, quantized_by="bf16"),
    "q4_k_s": StoredType("Q4_K_S", 14, 0.0, 0.8, quantized_by="bf16"),
    "q3_k_m": StoredType("Q3_K_M", 12, 0.0, 1.0, quantized_by="bf16"),
    "iq4_xs": StoredType("IQ4_XS", 30, 0.0, 0.8, quantized_by="bf16", weighed=True),
    "iq3_m": StoredType("IQ3_M", 27, 0.0, 1.0, quantized_by="bf16", weighed=True),
    "iq2_m": StoredType("IQ2_M", 29, 0.0, 1.2, quantized_by="bf16", weighed=True),
}


def type_names() -> tuple[str, ...]:
    """Values of ``export.gguf.types``."""
    return tuple(TYPES)


def architecture_of(model_type: str, activation: str = "") -> Architecture | None:
    """The row of a language model; None if ftcli does not know how llama.cpp builds it. ``activation``: the MLP's, by
    transformers' name, where it is known.
    """
    return BY_ACTIVATION.get((model_type, activation)) or ARCHITECTURES.get(model_type)
