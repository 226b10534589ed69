"""Model families: one row a ``model_type``, with all that the program knows of how it is built.

The memory estimate, the rules about layers and the kernels read the same row. A ``model_type`` without a row still
trains, on transformers' own layers; the checks that need the row are reported as not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """The architecture of one ``model_type``.

    Attributes:
        block: ``pre``: two norms, each before its half of the layer. ``sandwich``: four, one before and one after each
            half.
        norm: The RMSNorm's form. ``gemma`` multiplies by (1 + weight) in float32 before it casts back, ``llama`` casts
            first.
        head_norm: Queries and keys are normalised by head, over head_dim, before the rotation.
        sub_norms: BitNet's two further norms, of width hidden_size and intermediate_size.
        joined: q, k, v are one linear layer, and so are gate and up.
        kernels: What ftcli's kernels stand in for: whole layers, the norms and attention alone (``parts``), or nothing.
        bias: Which projections have biases: none, q, k and v, or what the config's ``attention_bias`` says.
        mlp_bias: The config's ``mlp_bias`` is read.
        tied: Whether embedding and head are one matrix where the config does not say.
        head_dim: Features of a head where the config does not say; None: hidden_size over heads.
        activation: transformers' name of the MLP's activation where the config does not say.
        attention_softcap, final_softcap: Caps on scores and logits where the config does not say.
        full_attention_every: Where the config has a sliding window and no ``layer_types``: every n-th layer sees
            everything. None: every layer has the window.
        window_on_config: transformers' attention modules do not hold their window; it is read from the config.
        four_positions: Positions are given four times, for text and for time, height and width of images. Given once,
            they say nothing of documents.
        defaults: What transformers takes for values that released config.json files leave out.
    """

    block: Literal["pre", "sandwich"] = "pre"
    norm: Literal["llama", "gemma"] = "llama"
    head_norm: bool = False
    sub_norms: bool = False
    joined: bool = False
    kernels: Literal["layers", "parts", "none"] = "layers"
    bias: Literal["config", "qkv", "none"] = "none"
    mlp_bias: bool = False
    tied: bool = False
    head_dim: int | None = None
    activation: str = "silu"
    attention_softcap: float | None = None
    final_softcap: float | None = None
    full_attention_every: int | None = None
    window_on_config: bool = False
    four_positions: bool = False
    defaults: tuple[tuple[str, int], ...] = ()

    @property
    def norms(self) -> int:
        """Norms of width hidden_size in a layer."""
        return 4 if self.block == "sandwich" else 2

    @property
    def half_inputs(self) -> int:
        """Tensors of the residual stream that the halves of a layer are run again from: the input of each, and where
        the MLP's output is normalised that one too.
        """
        return 3 if self.block == "sandwich" else 2

    @property
    def most_sent(self) -> int:
        """Tensors that a layer on the kernels sends to the host at most, to be run again by halves: what these read,
        and attention's output.
        """
        return self.half_inputs + 1


_GEMMA = "gelu_pytorch_tanh"

TABLE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(bias="config", mlp_bias=True),
        "mistral": Family(window_on_config=True),
        "qwen2": Family(bias="qkv"),
        "qwen3": Family(bias="config", head_norm=True, head_dim=128),
        "gemma": Family(norm="gemma", bias="config", tied=True, head_dim=256, activation=_GEMMA),
        "gemma2": Family(
            "sandwich",
            "gemma",
            bias="config",
            tied=True,
            head_dim=256,
            activation=_GEMMA,
            attention_softcap=50.0,
            final_softcap=30.0,
            full_attention_every=2,
        ),
        "gemma3_text": Family(
            "sandwich",
            "gemma",
            head_norm=True,
            bias="config",
            tied=True,
            head_dim=256,
            activation=_GEMMA,
            full_attention_every=6,
            defaults=(
                ("vocab_size", 262_208),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("max_position_embeddings", 131_072),
                ("sliding_window", 4096),
            ),
        ),
        # The language models of multimodal checkpoints.
        "qwen2_vl_text": Family(bias="qkv", four_positions=True),
        "qwen2_5_vl_text": Family(bias="qkv", four_positions=True),
        "qwen3_vl_text": Family(bias="config", head_norm=True, head_dim=128),
        # Queries are scaled by their position.
        "ministral3": Family(kernels="none", head_dim=128, window_on_config=True),
        # One weight and one adapter for q, k and v, and one for gate and up: not the shapes of the fused functions.
        "phi3": Family(joined=True, kernels="parts"),
        "bitnet": Family(sub_norms=True, kernels="none", bias="config", activation="relu2"),
    }
)


def family_of(model_type: str) -> Family | None:
    """The row of a ``model_type``; None where there is none."""
    return TABLE.get(model_type)


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A checkpoint that takes more than text and is trained on text, through the class that has all its parts.

    The language model is trained; everything else is frozen and exported as it is.

    Attributes:
        senses: What the other parts are for.
        text: The language model's ``model_type`` where config.json does not say.
        tied: Whether embedding and head are one matrix where config.json does not say.
        towers: Code: a function of a :class:`ftcli.facts.towers.VisionConfig` and the config.json that counts the other
            parts' parameters. None where nothing is known of them.
    """

    senses: str
    text: str
    tied: bool = False
    towers: str | None = None


MULTIMODAL: Mapping[str, Multimodal] = MappingProxyType(
    {
        "gemma3": Multimodal("vision", "gemma3_text", tied=True, towers="ftcli.facts.towers:siglip"),
        "gemma4": Multimodal("vision and audio", "gemma4_text", tied=True),
        "mistral3": Multimodal("vision", "mistral", tied=True, towers="ftcli.facts.towers:pixtral"),
        "muse_glimmer": Multimodal("vision", "muse_glimmer_text"),
        "qwen2_vl": Multimodal("vision", "qwen2_vl_text", towers="ftcli.facts.towers:qwen2"),
        "qwen2_5_vl": Multimodal("vision", "qwen2_5_vl_text", towers="ftcli.facts.towers:qwen2_5"),
        "qwen3_vl": Multimodal("vision", "qwen3_vl_text", towers="ftcli.facts.towers:qwen3"),
        "qwen3_vl_moe": Multimodal("vision", "qwen3_vl_moe_text"),
        "qwen3_5": Multimodal("vision", "qwen3_5_text"),
        "qwen3_5_moe": Multimodal("vision", "qwen3_5_moe_text"),
    }
)

#: Code: what is known of a model whose family has no row, as a function of a :class:`ftcli.plan.measured.Question`.
MEASURED_BY = "ftcli.model.measure:measured"
