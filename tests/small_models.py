"""A small random model of every kind of checkpoint that people fine-tune, built from transformers' own configs.

The values are those of released checkpoints where a value changes the arithmetic (multipliers, caps, shared experts,
norms by head), and as small as they can be where it only changes a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

#: A family of each kind of layer: `make test` goes through these, and `make test-families` through the rest.
KINDS = (
    "llama", "qwen3", "gemma2", "gemma3_text", "bitnet", "phi3", "smollm3", "olmo3", "granite", "cohere2", "starcoder2",
    "qwen3_5_text", "qwen3_moe", "gemma4_text",
)  # fmt: skip


#: And of each kind of model around them: experts of other forms, states, convolutions for linear layers, towers.
STRUCTURES = (*KINDS, "gpt_oss", "deepseek_v3", "mamba2", "nemotron_h", "gpt2", "gemma3", "qwen3_5")


def by_kind(names: Iterable[str], kinds: Sequence[str] = KINDS) -> list[Any]:
    """``names`` as parameters of a test; those that are not of ``kinds`` take long all together."""
    return [name if name.split()[0] in kinds else pytest.param(name, marks=pytest.mark.long) for name in names]


VOCABULARY = 264

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEADS: dict[str, Any] = {"head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 8,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
#: What its mixture of experts has otherwise than TEXT's.
GEMMA4_MIXTURE: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
#: What Gemma-4's smaller models have in each layer.
_OF_EACH_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}

#: Ministral-3's factor of queries, which of 256 positions the later ones have.
SCALED_BY_POSITION: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}

#: What a type needs besides, or has otherwise. None takes a common value away.
TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {**_HEADS, "sliding_window": 16},
    "ministral3": {**_HEADS, "rope_parameters": SCALED_BY_POSITION},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3": {**_HEADS},
    "qwen3_moe": {**_EXPERTS, **_HEADS, "decoder_sparse_step": 1},
    "qwen3_next": {**_EXPERTS, **_HEADS, **_DELTA, "shared_expert_intermediate_size": 24, "num_hidden_layers": 4},
    "gemma": {**_HEADS, "tie_word_embeddings": True},
    "gemma2": {**_HEADS, "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_HEADS, "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma4_text": {**_GEMMA4, **_OF_EACH_LAYER, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_unified_text": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": 16},
    "cohere": {"logit_scale": 0.0625, "use_qk_norm": True},
    "cohere2": {**_HEADS, "logit_scale": 0.25, "sliding_window": 16},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156,
    },
    "granite_swa": {"sliding_window": 16, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "arcee": {**_HEADS},
    "helium": {**_HEADS},
    "vaultgemma": {**_HEADS, "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "jais2": {**_HEADS},
    "apertus": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "mellum": {**_EXPERTS, **_HEADS, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "smollm3": {},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
    "glm": {**_HEADS},
    "glm4": {**_HEADS},
    "seed_oss": {**_HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm4_moe": {**_ROUTED, **_HEADS},
    "ernie4_5_moe": {
        **_HEADS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
    },
    "deepseek_v2": {**_LATENT, **_ROUTED},
    "glm4_moe_lite": {**_LATENT, **_ROUTED, "num_hidden_layers": 3},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "youtu": {**_LATENT},
    "exaone4": {**_HEADS, "sliding_window": 16},
    "ernie4_5": {**_HEADS},
    "hunyuan_v1_dense": {**_HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {**_HEADS, "sliding_window": 16, "tie_word_embeddings": True, "num_hidden_layers": 4},
    "nemotron_h": {
        **_HEADS,
        **_ROUTED,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": None,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {
        **_HEADS,
        **_MAMBA,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 0.04,
        "embedding_multiplier": 5.6,
        "key_multiplier": 0.5,
    },
    "recurrent_gemma": {
        **_HEADS,
        "tie_word_embeddings": True,
        "lru_width": 32,
        "attention_window_size": 16,
        "num_hidden_layers": 3,
        "max_position_embeddings": None,
    },
    "jamba": {
        **_MAMBA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8, "intermediate_size": None},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "llama4_text": {
        **_HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 64,
    },
    "bitnet": {},
    "qwen3_5_text": {**_HEADS, **_DELTA, "num_hidden_layers": 4},
    "qwen3_5_moe_text": {
        **_HEADS,
        **_DELTA,
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
    },
}

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
}
_MROPE = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

_NO_SOUND: dict[str, Any] = {"video_token_id": 262, "audio_token_id": 263, "boa_token_id": 258, "eoa_token_index": 257}

#: Checkpoints that also take images: text config, vision config, and what stands beside them.
MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**_HEADS, "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 8},
        {**_VISION},
        {"mm_tokens_per_image": 4, "image_token_index": 259, "boi_token_index": 260, "eoi_token_index": 261},
    ),
    "mistral3": ({**_HEADS, "model_type": "mistral"}, {**_VISION, "model_type": "pixtral", "head_dim": 8}, {}),
    "qwen2_vl": (
        {"rope_parameters": _MROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2},
        {"image_token_id": 259, "video_token_id": 260},
    ),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, {**_QWEN_VISION}, {"image_token_id": 259, "video_token_id": 260}),
    "qwen3_vl": (
        {**_HEADS, "rope_parameters": _MROPE},
        {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"image_token_id": 259, "video_token_id": 260},
    ),
    "qwen3_5": (
        {**_HEADS, **_DELTA, "num_hidden_layers": 4},
        {**_QWEN_VISION, "num_position_embeddings": 16},
        {"image_token_id": 259, "video_token_id": 260},
    ),
    "muse_glimmer": (
        {**_HEADS, "sliding_window": 16, "num_hidden_layers": 4},
        {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
        {"image_token_id": 259, "video_token_id": 260, "out_hidden_size": 64, "projector_hidden_size": 32},
    ),
    "qwen3_vl_moe": (
        {**_HEADS, **_EXPERTS, "rope_parameters": _MROPE},
        {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"image_token_id": 259, "video_token_id": 260},
    ),
    "qwen3_5_moe": (
        {**_HEADS, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 4},
        {**_QWEN_VISION, "num_position_embeddings": 16},
        {"image_token_id": 259, "video_token_id": 260},
    ),
    "gemma4": (
        {**_GEMMA4, **_OF_EACH_LAYER, "num_kv_shared_layers": 3},
        {**_VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 256},
        {"image_token_id": 259, "boi_token_id": 260, "eoi_token_id": 261, **_NO_SOUND},
    ),
    "gemma4_unified": (
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"mm_embed_dim": 16, "patch_size": 4, "mm_posemb_size": 8, "output_proj_dims": 16},
        {"image_token_id": 259, "boi_token_id": 260, "eoi_token_id": 261, **_NO_SOUND},
    ),
}


_SCAN: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

#: Further families of text, which are trained like those above and not listed in docs/models.md.
FURTHER: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **_SCAN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention"],
    },
    "bamba": {**_SCAN, "attn_layer_indices": [1]},
    "falcon_mamba": {"state_size": 8, "intermediate_size": None},
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 16,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "rwkv": {"context_length": 256, "intermediate_size": None},
    "falcon": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "gptj": {**_GPT, "rotary_dim": 8, "n_inner": 48},
    "codegen": {**_GPT, "rotary_dim": 8},
    "gpt_bigcode": {**_GPT},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {},
    "persimmon": {"num_key_value_heads": 4},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {**_HEADS},
    "apertus": {},
    "arcee": {},
    "helium": {**_HEADS},
    "diffllama": {},
}


def adapted_everywhere(model: Any, *, rank: int = 4, targets: Any = "all-linear", **settings: Any) -> Any:
    """``model`` with adapters on every linear layer, as PEFT does it; with experts as ftcli has it put them there."""
    import peft

    from ftcli.config.model import LoraConfig
    from ftcli.model.lora import apply_lora
    from ftcli.plan.precision import DtypePlan

    if any(parameter.dim() == 3 and ".experts." in name for name, parameter in model.named_parameters()):
        plan = DtypePlan("float32", "float32", "float32", False, "a test")
        return apply_lora(model, LoraConfig(r=rank, alpha=2 * rank), plan, seed=0)[0]
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, lora)


def config_of(model_type: str, **change: Any) -> Any:
    """transformers' config of the small model, of text with values changed."""
    from transformers import AutoConfig

    if model_type not in MULTIMODAL:
        own = TEXT[model_type] if model_type in TEXT else FURTHER[model_type]
        config = AutoConfig.for_model(model_type, **_with_common({**own, **change}))
        for key in [key for key, value in change.items() if value is None]:
            setattr(config, key, None)  # which is another thing than the default, as of q_lora_rank
        return config
    text, vision, beside = MULTIMODAL[model_type]
    ids = {name: _COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tied = text.get("tie_word_embeddings", False)
    return AutoConfig.for_model(
        model_type, text_config=_with_common(text), vision_config=vision, tie_word_embeddings=tied, **ids, **beside
    )


def build_sparse(model_type: str) -> Any:
    """The small model with experts, of a family that has some, or may have some."""
    return build(model_type, **(GEMMA4_MIXTURE if model_type == "gemma4_text" else {}))


def build(model_type: str, *, seed: int = 0, **change: Any) -> Any:
    """The small model, of text with values of its config changed; its weights let every part of it count."""
    import torch
    import transformers

    config = config_of(model_type, **change)
    kind = transformers.AutoModelForImageTextToText if model_type in MULTIMODAL else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # As they are drawn, layers hardly change the residual stream, and a fault in one would drown.
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.A_log"):  # as they are drawn, hardly a state outlives the next token
                parameter.sub_(4.0)
            if model_type.startswith("gemma4"):  # whose scores have no other scale than that of queries
                parameter.mul_({"q_norm": 0.2, "post_per_layer_input_norm": 0.3}.get(name.split(".")[-2], 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # which is 1 as it is made
                buffer.mul_(0.75)
    return model


def _with_common(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**_COMMON, **values}.items() if value is not None}
