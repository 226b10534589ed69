"""Model families: one row a ``model_type``, with all that the program knows of how it is built.

The memory estimate, the rules about layers and the kernels read the same row. A ``model_type`` without a row still
trains, on transformers' own layers; the checks that need the row are reported as not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ftcli.tables.architecture import PARALLEL, POST, SANDWICH, DeltaNets, Experts, Family, HeadNorms, Latents, Norms


def _sizes(experts: int, used: int, width: int | None = None) -> tuple[tuple[str, float | bool], ...]:
    """transformers' defaults of the number of experts, of those of a token, and of the features of each."""
    found = (("num_local_experts", experts), ("num_experts_per_tok", used))
    return found if width is None else (*found, ("moe_intermediate_size", width))


_GEMMA = "gelu_pytorch_tanh"
_BY_HEAD = HeadNorms()
_ATTENTION_BIAS = "attention_bias"

_GEMMA4 = Family(
    SANDWICH,
    "plain",
    head_norm=_BY_HEAD,
    value_norm="v_norm",
    global_heads=True,
    shared_keys="num_kv_shared_layers",
    layer_scalar="layer_scalar",
    qkv_bias=_ATTENTION_BIAS,
    o_bias=_ATTENTION_BIAS,
    tied=True,
    head_dim=256,
    activation=_GEMMA,
    window=1024,
    full_attention_every=6,
    defaults=(
        ("vocab_size", 262_144),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ),
)
#: transformers' defaults, of every family with latent attention.
_LATENT_SIZES = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
#: Experts beside shared ones, behind a few dense layers.
_BESIDE_SHARED = Experts(
    shared="shared_experts",
    count=("n_routed_experts", "num_local_experts"),
    shared_count="n_shared_experts",
    dense="first",
    cast_bytes=2,
    balanced=False,
    takes_names=True,
)

_QWEN_NETS = DeltaNets(
    module="linear_attn",
    entering=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    leaving="out_proj",
    attention_every=4,
    defaults=(
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 32),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("linear_conv_kernel_dim", 4),
    ),
)

TABLE: Mapping[str, Family] = {
    "llama": Family(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, mlp_bias="mlp_bias"),
    "mistral": Family(window=4096, window_on_config=True),
    "qwen2": Family(qkv_bias=True, windows_from="max_window_layers"),
    "qwen3": Family(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_norm=_BY_HEAD,
        head_dim=128,
        windows_from="max_window_layers",
    ),
    "qwen3_moe": Family(
        experts=Experts(dense="listed"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_norm=_BY_HEAD,
        window=4096,
        defaults=(("use_sliding_window", False), ("num_key_value_heads", 4), *_sizes(128, 8, 768)),
    ),
    "qwen2_moe": Family(
        experts=Experts(
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            shared_width="shared_expert_intermediate_size",
            dense="listed",
        ),
        qkv_bias="qkv_bias",
        not_with=("use_sliding_window",),
        defaults=(
            ("qkv_bias", True),
            ("shared_expert_intermediate_size", 5632),
            *_sizes(60, 4, 1408),
        ),
    ),
    "qwen3_vl_moe_text": Family(
        experts=Experts(dense="listed"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_norm=_BY_HEAD,
        four_positions=True,
        defaults=_sizes(60, 4, 1408),
    ),
    "glm4_moe": Family(
        experts=_BESIDE_SHARED,
        qkv_bias=_ATTENTION_BIAS,
        head_norm=HeadNorms(only_if="use_qk_norm"),
        rotary_share=0.5,
        defaults=(("n_shared_experts", 1), ("first_k_dense_replace", 1), *_sizes(128, 8, 1408)),
    ),
    "ernie4_5_moe": Family(
        experts=Experts(
            shared="shared_experts",
            count=("moe_num_experts", "num_experts"),
            used="moe_k",
            shared_count="moe_num_shared_experts",
            dense="outside",
            choice_bias=True,
            cast_bytes=4,
            takes_names=True,
        ),
        tied=True,
        rotary="pairs",
        not_with=("use_bias",),
        defaults=(
            ("moe_num_experts", 64),
            ("moe_k", 6),
            ("moe_intermediate_size", 1536),
            ("moe_num_shared_experts", 2),
        ),
    ),
    "deepseek_v2": Family(
        latents=Latents(q_rank=1536),
        experts=_BESIDE_SHARED,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        rotary="pairs",
        single_angles=True,
        complex_angles=True,
        only_with=(("rope_interleave", True),),
        defaults=(
            ("n_shared_experts", 2),
            ("first_k_dense_replace", 0),
            *_LATENT_SIZES,
            ("qk_nope_head_dim", 128),
            ("v_head_dim", 128),
            ("n_routed_experts", 64),
            ("moe_intermediate_size", 1407),
        ),
    ),
    "glm4_moe_lite": Family(
        latents=Latents(q_rank=768),
        experts=replace(_BESIDE_SHARED, dense="types_or_first"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        rotary="pairs",
        defaults=(
            ("n_shared_experts", 1),
            *_LATENT_SIZES,
            ("qk_nope_head_dim", 192),
            ("v_head_dim", 256),
            *_sizes(64, 4, 1536),
        ),
    ),
    "deepseek_v3": Family(  # Moonlight and Kanana-2 are of this type, too
        latents=Latents(q_rank=1536),
        experts=_BESIDE_SHARED,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        rotary="pairs",
        defaults=(
            ("n_shared_experts", 1),
            ("first_k_dense_replace", 3),
            *_LATENT_SIZES,
            ("qk_nope_head_dim", 128),
            ("v_head_dim", 128),
            *_sizes(256, 8, 2048),
        ),
    ),
    "youtu": Family(
        latents=Latents(q_rank=1536),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        rotary="pairs",
        tied=True,
        defaults=(*_LATENT_SIZES, ("qk_nope_head_dim", 128), ("v_head_dim", 128)),
    ),
    "mixtral": Family(
        experts=Experts(width="intermediate_size"),
        window_on_config=True,
        not_with=("router_jitter_noise",),
        defaults=_sizes(8, 2),
    ),
    "olmoe": Family(
        experts=Experts(width="intermediate_size"),
        head_norm=HeadNorms(span="width"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        not_with=("clip_qkv",),
        defaults=_sizes(64, 8),
    ),
    "granitemoe": Family(
        experts=Experts("block_sparse_moe", "router", width="intermediate_size"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        residual_multiplier="residual_multiplier",
        defaults=_sizes(8, 2),
    ),
    "mellum": Family(
        experts=Experts(dense="mlp_layer_types"),
        head_norm=_BY_HEAD,
        head_dim=128,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        window=1024,
        full_attention_every=1,  # without layer_types no layer has the window
        defaults=_sizes(64, 8, 896),
    ),
    "gpt_oss": Family(
        norm="plain",
        experts=Experts(
            router="router",
            width="intermediate_size",
            biases=True,
            transposed=True,
            interleaved=True,
            clamped=True,
        ),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_dim=64,
        window=128,
        full_attention_every=2,
        sinks=True,
        single_angles=True,
        only_with=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
        defaults=((_ATTENTION_BIAS, True), *_sizes(128, 4)),
    ),
    "gemma": Family(
        norm="gemma",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        tied=True,
        head_dim=256,
        activation=_GEMMA,
    ),
    "gemma2": Family(
        SANDWICH,
        "gemma",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        tied=True,
        head_dim=256,
        activation=_GEMMA,
        attention_softcap=50.0,
        final_softcap=30.0,
        window=4096,
        full_attention_every=2,
    ),
    "gemma3_text": Family(
        SANDWICH,
        "gemma",
        head_norm=_BY_HEAD,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        tied=True,
        head_dim=256,
        activation=_GEMMA,
        full_attention_every=6,
        defaults=(
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("max_position_embeddings", 131_072),
        ),
        window=4096,
    ),
    "gemma4_text": replace(
        _GEMMA4,
        layer_input="hidden_size_per_layer_input",
        window=512,
        experts=Experts(
            block="",
            router="router",
            used="top_k_experts",
            balanced=False,
            only_if="enable_moe_block",
            beside_mlp=(
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ),
        ),
        defaults=(*_GEMMA4.defaults, ("hidden_size_per_layer_input", 256)),
    ),
    # The language models of multimodal checkpoints.
    "gemma4_unified_text": _GEMMA4,
    "qwen2_vl_text": Family(qkv_bias=True, four_positions=True, windows_from="max_window_layers"),
    "qwen2_5_vl_text": Family(qkv_bias=True, four_positions=True, windows_from="max_window_layers"),
    "qwen3_vl_text": Family(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, head_norm=_BY_HEAD, head_dim=128),
    "qwen3_5_text": Family(
        norm="gemma",
        head_norm=_BY_HEAD,
        joined=("q_gate",),
        delta_nets=_QWEN_NETS,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_dim=256,
        rotary_share=0.25,
    ),
    "qwen3_5_moe_text": Family(
        norm="gemma",
        head_norm=_BY_HEAD,
        joined=("q_gate",),
        delta_nets=_QWEN_NETS,
        experts=Experts(
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            shared_width="shared_expert_intermediate_size",
        ),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_dim=256,
        rotary_share=0.25,
        defaults=(("shared_expert_intermediate_size", 512), *_sizes(256, 8, 512)),
    ),
    "ministral3": Family(head_dim=128, window_on_config=True, scaled_by_position=True),
    "phi3": Family(joined=("qkv", "gate_up"), window_on_config=True),
    "smollm3": Family(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        tied=True,
        unrotated="no_rope_layers",
    ),
    "olmo2": Family(POST, "plain", head_norm=HeadNorms(span="width"), qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS),
    "olmo3": Family(
        POST,
        "plain",
        head_norm=HeadNorms(span="width"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        window=4096,
        full_attention_every=4,
    ),
    "granite": Family(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        residual_multiplier="residual_multiplier",
    ),
    "arcee": Family(
        mlp=("up_proj", "down_proj"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        activation="relu2",
    ),
    "helium": Family(
        norm="plain",
        qkv_bias=_ATTENTION_BIAS,
        head_dim=128,
        mlp_bias="mlp_bias",
        rotary="pairs",
    ),
    "vaultgemma": Family(
        Norms("input_layernorm", None, "pre_feedforward_layernorm", None),
        "gemma",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        tied=True,
        head_dim=256,
        activation=_GEMMA,
        attention_softcap=50.0,
        final_softcap=30.0,
        window=4096,
        full_attention_every=2,
    ),
    "jais2": Family(
        norm="layer",
        norm_bias=True,
        mlp=("up_proj", "down_proj"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        activation="relu2",
        defaults=((_ATTENTION_BIAS, True), ("mlp_bias", True)),
    ),
    "apertus": Family(
        Norms("attention_layernorm", None, "feedforward_layernorm", None),
        head_norm=_BY_HEAD,
        mlp=("up_proj", "down_proj"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        activation="xielu",
        activation_parameters=2,
    ),
    "exaone4": Family(POST, head_norm=_BY_HEAD, window=4096, full_attention_every=4, unrotated="global"),
    "cohere2": Family(
        PARALLEL,
        "layer",
        parallel=True,
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        tied=True,
        window=4096,
        full_attention_every=4,
        rotary="pairs",
        repeated_angles=True,
        unrotated="global",
    ),
    "glm": Family(
        qkv_bias=_ATTENTION_BIAS,
        joined=("gate_up",),
        rotary="pairs",
        rotary_share=0.5,
        head_dim=128,
        defaults=((_ATTENTION_BIAS, True),),
    ),
    "glm4": Family(
        Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        qkv_bias=_ATTENTION_BIAS,
        joined=("gate_up",),
        rotary="pairs",
        rotary_share=0.5,
        head_dim=128,
        defaults=((_ATTENTION_BIAS, True),),
    ),
    "starcoder2": Family(
        norm="layer",
        norm_bias=True,
        mlp=("c_fc", "c_proj"),
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
        activation=_GEMMA,
        window_on_config=True,
        defaults=(("use_bias", True),),
    ),
    "stablelm": Family(
        norm="layer",
        norm_bias=True,
        parallel="use_parallel_residual",
        qkv_bias="use_qkv_bias",
        rotary_share=0.25,
        attention_alone=True,
        not_with=("qk_layernorm",),
    ),
    "seed_oss": Family(
        qkv_bias=_ATTENTION_BIAS,
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        head_dim=128,
        defaults=((_ATTENTION_BIAS, True),),
    ),
    "ernie4_5": Family(
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True, head_dim=128, rotary="pairs"
    ),
    "hunyuan_v1_dense": Family(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_norm=HeadNorms("query_layernorm", "key_layernorm", after_rotation=True),
    ),
    "muse_glimmer_text": Family(
        SANDWICH,
        "gemma",
        final_norm="plain",
        head_norm=HeadNorms("qk_norm", "qk_norm", weights=False),
        output_gate="gate_proj",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        head_dim=128,
        final_softcap=20.0,
        window=2048,
        full_attention_every=-4,
        unrotated="layer_rope_theta",
        query_multiplier="qk_scale_factor",
    ),
    "bitnet": Family(
        sub_norms=True, kernels="none", qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, activation="relu2"
    ),
}


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


MULTIMODAL: Mapping[str, Multimodal] = {
    "gemma3": Multimodal("vision", "gemma3_text", tied=True, towers="ftcli.facts.towers:siglip"),
    "gemma4": Multimodal("vision and audio", "gemma4_text", tied=True, towers="ftcli.facts.towers:gemma4"),
    "gemma4_unified": Multimodal(
        "vision and audio", "gemma4_unified_text", tied=True, towers="ftcli.facts.towers:gemma4_unified"
    ),
    "mistral3": Multimodal("vision", "mistral", tied=True, towers="ftcli.facts.towers:pixtral"),
    "muse_glimmer": Multimodal("vision", "muse_glimmer_text", towers="ftcli.facts.towers:muse_glimmer"),
    "qwen2_vl": Multimodal("vision", "qwen2_vl_text", towers="ftcli.facts.towers:qwen2"),
    "qwen2_5_vl": Multimodal("vision", "qwen2_5_vl_text", towers="ftcli.facts.towers:qwen2_5"),
    "qwen3_vl": Multimodal("vision", "qwen3_vl_text", towers="ftcli.facts.towers:qwen3"),
    "qwen3_vl_moe": Multimodal("vision", "qwen3_vl_moe_text", towers="ftcli.facts.towers:qwen3"),
    "qwen3_5": Multimodal("vision", "qwen3_5_text", towers="ftcli.facts.towers:qwen3_5"),
    "qwen3_5_moe": Multimodal("vision", "qwen3_5_moe_text", towers="ftcli.facts.towers:qwen3_5"),
}

#: Code: what is known of a model whose family has no row, as a function of a :class:`ftcli.plan.measured.Question`.
MEASURED_BY = "ftcli.model.measure:measured"
#: The same of towers that are trained, of families in :mod:`ftcli.tables.images`.
TOWER_MEASURED_BY = "ftcli.model.measure_tower:measured_tower"
