"""Patched models compute what unpatched ones do, keep PEFT's names, and come back exactly."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ftkernels.experts
import peft
import pytest
import torch
import transformers
from ftkernels.experts import lora_experts
from ftkernels.lora_qkv import _normed
from ftkernels.lowrank import weight_grads
from ftkernels.primitives import as_rows
from ftkernels.projection import Norm
from ftkernels.rms_norm import rms_norm
from torch import nn
from triton.runtime.errors import OutOfResources

from ftcli.config.model import Kernels, LoraConfig
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.model.backbone import base_of
from ftcli.model.fused import FusedDecoderLayer, norm_eps
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch, why_not_fused
from ftcli.model.routing import Routing, choice_of
from ftcli.model.selfcheck import self_check
from ftcli.plan.precision import DtypePlan
from ftcli.rows.row import Row
from ftcli.train.assembly import check_isolation
from tests.small_models import _DELTA, STRUCTURES, build, by_kind

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW_THEN_ALL = ["sliding_attention", "full_attention"]
#: Of 13 positions the later ones have another factor.
SCALED_BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "gemma3_text": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 5}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 5}),
    "phi3 rotated in part": (transformers.Phi3Config, {"partial_rotary_factor": 0.5}),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 16, "rope_parameters": SCALED_BY_POSITION}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (transformers.Olmo3Config, {"sliding_window": 5, "layer_types": WINDOW_THEN_ALL}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 7.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0156,
            "mlp_bias": True,
        },
    ),
    "exaone4": (transformers.Exaone4Config, {"head_dim": 16, "sliding_window": 5, "layer_types": WINDOW_THEN_ALL}),
    "exaone4 without window": (
        transformers.Exaone4Config,
        {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "cohere2": (
        transformers.Cohere2Config,
        {"head_dim": 16, "sliding_window": 5, "layer_types": WINDOW_THEN_ALL, "logit_scale": 0.25},
    ),
    "arcee": (transformers.ArceeConfig, {"head_dim": 16, "mlp_bias": True}),
    "helium": (transformers.HeliumConfig, {"head_dim": 16}),
    "vaultgemma": (transformers.VaultGemmaConfig, {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "jais2": (transformers.Jais2Config, {"head_dim": 16}),
    "apertus": (transformers.ApertusConfig, {}),
    "glm": (transformers.GlmConfig, {"head_dim": 16}),
    "glm4": (transformers.Glm4Config, {"head_dim": 16}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 5}),
    "stablelm": (transformers.StableLmConfig, {}),
    "stablelm in parallel": (transformers.StableLmConfig, {"use_parallel_residual": True, "use_qkv_bias": True}),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 16, "residual_dropout": 0.0, "attention_dropout": 0.0}),
    "ernie4_5": (transformers.Ernie4_5Config, {"head_dim": 16}),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, {"head_dim": 16}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 16, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, one layer without": (transformers.Qwen3MoeConfig, {"head_dim": 16, **EXPERTS, "mlp_only_layers": [0]}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    ),
    "mellum": (
        transformers.MellumConfig,
        {"head_dim": 16, **EXPERTS, "sliding_window": 5, "layer_types": WINDOW_THEN_ALL},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "glm4_moe, norms of queries and keys": (
        transformers.Glm4MoeConfig,
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {
            "head_dim": 16,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {**LATENT, "v_head_dim": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2, groups": (
        transformers.DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "v_head_dim": 16,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, LATENT),
    "glm4_moe_lite, queries of no latent": (
        transformers.Glm4MoeLiteConfig,
        {**LATENT, "q_lora_rank": None, "rope_interleave": False, "v_head_dim": 16, "attention_bias": True},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {**LATENT, "v_head_dim": 16, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "youtu": (transformers.YoutuConfig, {name: LATENT[name] for name in LATENT if "expert" not in name}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeTextConfig,
        {
            "head_dim": 16,
            **_DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig,
        {"head_dim": 16, **_DELTA, "layer_types": ["linear_attention", "full_attention"]},
    ),
}
#: With experts, whose adapters our own code chooses.
SPARSE = [name for name in CONFIGS if "moe" in name or name in ("mixtral", "mellum", "gpt_oss") or "deepseek" in name]
PLAN = DtypePlan("float32", "float32", "float32", False, "a test")


def plain(name: str, **changes: Any) -> transformers.PreTrainedModel:
    kind, extra = CONFIGS[name]
    config = kind(**{**SIZES, **extra, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def adapted(name: str, **lora: Any) -> peft.PeftModel:
    model = plain(name)
    if name in SPARSE:
        model, _ = apply_lora(model, LoraConfig(r=4, alpha=8), PLAN, seed=0)
    else:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
        model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.1)
    return model


#: Multimodal models all of whose layers attend.
ATTENDING_PARTS = ("gemma3", "mistral3", "muse_glimmer", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("name", [*ATTENDING_PARTS, "qwen3_5"])
def test_the_language_model_of_a_multimodal_model_is_on_the_kernels(name: str) -> None:
    base = build(name)
    model, _ = apply_lora(base, LoraConfig(r=4), PLAN, seed=0)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.1)
    loss, gradients = run(model)
    tower = base.config.vision_config._attn_implementation
    applied = patch(model, "reference")
    count = base.config.text_config.num_hidden_layers
    assert [entry.layer for entry in applied.table if entry.on] == [*(f"layers.{at}" for at in range(count)), "norm"]
    assert base.config.vision_config._attn_implementation == tower
    patched_loss, patched = run(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5)
    assert set(patched) == set(gradients)
    for key, wanted in gradients.items():
        assert (patched[key] - wanted).norm() <= 1e-4 * wanted.norm(), key
    applied.undo()
    assert base.config.text_config._attn_implementation == tower


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, kernels) for name in ATTENDING_PARTS for kernels in ("off", "reference")),
        ("qwen3_5", "reference"),  # transformers' own delta nets leak: tests/unit/model/test_leaking.py
    ],
)
def test_packed_documents_stay_apart_in_the_language_model_of_a_multimodal_model(name: str, kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in (24, 31, 40):
        ids = torch.randint(5, 250, (length,), generator=generator).tolist()
        rows.append(TokenizedRow(Row("d", length, {}), ids, list(ids)))
    model, _ = apply_lora(build(name), LoraConfig(r=4), PLAN, seed=0)
    patch(model, kernels)
    check_isolation(model, rows, PLAN, torch.device("cpu"), pad_token_id=0)  # raises FT443


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(3, 96, (2, 13))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def run(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = forward_loss(model, batch()).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", by_kind(CONFIGS, STRUCTURES))
def test_loss_gradients_names_generation_and_undo(name: str) -> None:
    model, ids = adapted(name), batch()["input_ids"]
    names = set(model.state_dict())
    loss, gradients = run(model)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)

    applied = patch(model, "reference")
    assert all(entry.on for entry in applied.table)
    assert set(model.state_dict()) == names
    patched_loss, patched = run(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5)
    assert set(patched) == set(gradients)
    for key, wanted in gradients.items():
        assert (patched[key] - wanted).norm() <= 1e-4 * wanted.norm(), key
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), tokens)

    applied.undo()
    assert not any(isinstance(module, FusedDecoderLayer) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, logits)


def test_norms_over_heads_neither_copy_their_input_nor_turn_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of place they cost a copy in each direction, and one of attention's output that is kept for backward."""
    norm = adapted("qwen3").get_submodule("base_model.model.model.layers.0.self_attn.q_norm")
    fused = torch.randn(2, 13, 8 * 16)  # q, k, v side by side, as one product writes them
    heads = fused[..., : 4 * 16].unflatten(-1, (4, 16)).transpose(1, 2)

    def like_the_kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert as_rows(x).tensor.data_ptr() == fused.data_ptr()
        return rms_norm(x, *args, **kwargs).contiguous()

    monkeypatch.setattr("ftkernels.lora_qkv.rms_norm", like_the_kernel)
    found = _normed(heads, Norm(norm.weight, norm_eps(norm)), "head", "auto")
    assert found.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found, norm(heads))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen2_moe"])
def test_disabled_adapters_give_the_base_model(name: str) -> None:
    """Without a cache: with one, layers in training hand calls on to transformers' own."""
    model, ids = adapted(name), batch()["input_ids"]
    with torch.no_grad():
        with model.disable_adapter():
            base = model(input_ids=ids, use_cache=False).logits
        patch(model, "reference")
        with model.disable_adapter():
            found = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, base, rtol=1e-5, atol=1e-6)
        assert (model(input_ids=ids, use_cache=False).logits - base).norm() > 1e-2 * base.norm()


def test_merged_adapters_of_experts_count_once() -> None:
    model, ids = adapted("qwen3_moe"), batch()["input_ids"]
    applied = patch(model, "reference")
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        applied.undo()
        model.merge_adapter()
        patch(model, "reference")
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = adapted("gemma2")
    patch(model, "reference")
    model.train()
    loss, gradients = run(model)
    base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    again, recomputed = run(model)
    assert again == loss
    for key, wanted in gradients.items():
        assert torch.equal(recomputed[key], wanted), key


def test_a_second_model_and_the_libraries_are_untouched() -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward
    first, second = adapted("llama"), adapted("llama")
    before = run(second)
    patch(first, "reference")
    assert LlamaDecoderLayer.forward is forward
    assert not any(isinstance(module, FusedDecoderLayer) for module in second.modules())
    after = run(second)
    assert after[0] == before[0]
    assert all(torch.equal(after[1][key], value) for key, value in before[1].items())


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"use_dora": True}, "DoRA"), ({"target_modules": ["q_proj"], "lora_bias": True}, "bias")],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_what_cannot_be_fused_stays_and_says_why(lora: dict[str, Any], words: str) -> None:
    model = adapted("llama", **lora)
    applied = patch(model, "reference")
    assert [entry.on for entry in applied.table] == [False, False]
    assert words in applied.table[0].reason


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_all_layers_stay_where_attention_would_not_hear_of_documents() -> None:
    """StableLM's layers hand attention nothing further: ours beside them would see past the documents of a row. And
    transformers' delta nets hear nothing of documents.
    """
    of_one = {"target_modules": ["model.layers.1.self_attn.q_proj"], "lora_bias": True}
    for name, alone in (("stablelm", True), ("llama", False), ("qwen3_5_text", True)):
        table = patch(adapted(name, **of_one), "reference").table
        assert [entry.on for entry in table if entry.layer.startswith("layers")] == [not alone, False]


#: What is special in full fine-tuning: heads that are the embedding and that are not, biases, capped scores and logits.
WHOLE = [
    *((name, {"tie_word_embeddings": tied}) for name in CONFIGS if name not in SPARSE for tied in (False, True)),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    *(pytest.param(name, {}, marks=pytest.mark.long) for name in SPARSE if name not in ("qwen3_moe", "gpt_oss")),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("name", "changes"), WHOLE, ids=str)
def test_full_fine_tuning_has_transformers_loss_and_every_gradient(name: str, changes: dict[str, Any]) -> None:
    model = plain(name, **changes)
    for parameter in model.parameters():  # norms and biases begin with ones and zeros
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    loss, gradients = run(model)
    assert set(gradients) == {key for key, weight in model.named_parameters() if weight.requires_grad}
    applied = patch(model, "reference")
    assert all(entry.on for entry in applied.table)
    patched_loss, patched = run(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5)
    assert set(patched) == set(gradients)
    for key, wanted in gradients.items():
        assert (patched[key] - wanted).norm() <= 1e-4 * wanted.norm(), key
    applied.undo()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("name", by_kind(CONFIGS))
def test_full_fine_tuning_gives_the_same_gradients_under_every_checkpointing_policy(name: str) -> None:
    def trained(policy: Any) -> tuple[float, dict[str, torch.Tensor]]:
        model = plain(name)
        patch(model, "reference")
        model.train()
        use_checkpointing(model, policy)
        if policy is True:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return run(model)

    loss, gradients = trained(False)
    for policy in (True, "selective", "offload"):
        again, recomputed = trained(policy)
        assert again == loss
        for key, wanted in gradients.items():
            assert torch.equal(recomputed[key], wanted), (policy, key)


def test_a_weight_that_is_trained_beside_an_adapter_is_refused() -> None:
    model = adapted("llama")
    base_of(model).get_decoder().layers[1].mlp.up_proj.base_layer.weight.requires_grad_(True)
    assert patch(model, "reference").off[0].reason == "mlp.up_proj: its base weight is trained beside an adapter"


@pytest.mark.parametrize("held", [1, 2**31], ids=["layer by layer", "all at once"])
def test_self_check_of_full_fine_tuning_names_the_layer_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr("ftcli.model.selfcheck._HELD_BYTES", held)
    model = plain("qwen3")
    check, applied = self_check(model, patch(model, "reference"), "reference", batch(), PLAN)
    assert check.passed
    assert all(parameter.grad is None for parameter in model.parameters())

    def of_half(*arguments: Any) -> Any:
        return [None if g is None else 0.5 * g for g in weight_grads(*arguments)]

    monkeypatch.setattr("ftkernels.lora_mlp.weight_grads", of_half)
    with pytest.raises(FtcliError, match=r"FT704.*gradient of mlp\.down_proj\.weight by 0\.5"):
        self_check(model, applied, "reference", batch(), PLAN)


def test_unknown_families_are_named() -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2)
    table = patch(transformers.AutoModelForCausalLM.from_config(config), "reference").table
    assert "gpt2" in table[0].reason


def test_off_changes_nothing_and_triton_insists() -> None:
    assert patch(adapted("llama"), "off").table == []
    with pytest.raises(FtcliError, match="FT705"):
        patch(adapted("llama", use_dora=True), "triton")


def test_a_linear_layer_of_another_kind_is_refused() -> None:
    assert "Bilinear" in (why_not_fused(nn.Bilinear(2, 2, 2)) or "")


def test_self_check_passes_and_leaves_the_model_as_it_was() -> None:
    model = adapted("gemma2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    applied = patch(model, "reference")
    check, again = self_check(model, applied, "reference", batch(), PLAN)
    assert check.passed
    assert check.worst.gradient > 0.0
    assert all(entry.on for entry in again.table)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_self_check_is_without_dropout_in_a_model_that_was_built_for_training() -> None:
    """As `model.init: random` builds it; the layers that ours stand in for have dropout of their own."""
    model = adapted("gemma2", lora_dropout=0.5).train()
    check, _ = self_check(model, patch(model, "reference"), "reference", batch(), PLAN)
    assert check.passed
    assert model.training


def test_a_kernel_that_does_not_fit_the_gpu_is_a_coded_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("llama")
    applied = patch(model, "reference")

    def too_large(*_: Any, **__: Any) -> None:
        raise OutOfResources(237568, 232448, "shared memory")

    monkeypatch.setattr(FusedDecoderLayer, "_mlp", too_large)
    with pytest.raises(FtcliError, match=r"FT704.*cannot be built for this GPU: out of resource: shared memory"):
        self_check(model, applied, "reference", batch(), PLAN)


class _Refusing(torch.autograd.Function):
    """A backward that a package refuses on this GPU."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> torch.Tensor:
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")


def test_a_package_of_transformers_that_refuses_the_gpu_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """FT190 of Qwen3.5 on an H200 where flash-linear-attention was installed: only transformers' layers take it."""
    model = adapted("llama")
    applied = patch(model, "reference")
    layer = type(applied.undo() or model.get_decoder().layers[1])
    applied, forward = patch(model, "reference"), layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, hidden, **kw: _Refusing.apply(forward(self, hidden, **kw)))
    with pytest.raises(FtcliError, match=r"FT704: transformers' own layer fails here.*on Hopper") as caught:
        self_check(model, applied, "reference", batch(), PLAN)
    assert caught.value.exit_code == 3


def test_self_check_names_the_layer_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("llama")
    applied = patch(model, "reference")
    half = FusedDecoderLayer._mlp_half

    def broken(self: FusedDecoderLayer, hidden: torch.Tensor, packs: Any) -> Any:
        out = half(self, hidden, packs)
        return out * 1.05 if self.self_attn.layer_idx == 1 else out

    monkeypatch.setattr(FusedDecoderLayer, "_mlp_half", broken)
    with pytest.raises(FtcliError, match=r"FT704.*layers\.1"):
        self_check(model, applied, "reference", batch(), PLAN)


def nearly_equal_scores(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of scores, or three, that differ by less than what our layers round otherwise here; the experts themselves
    have nothing in common.
    """
    for name, parameter in model.named_parameters():
        if name.endswith((".gate.weight", ".router.weight")):
            alike = 3 if base_of(model).config.num_experts_per_tok == 2 else 2  # so that the last chosen is one of them
            first = parameter.data[::alike].repeat_interleave(alike, 0)
            parameter.data.copy_(first + 1e-8 * torch.randn_like(first))
    mixture, chance = FusedDecoderLayer._mixture, torch.Generator().manual_seed(0)

    def rounded(self: FusedDecoderLayer, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        noise = 1e-6 * torch.randn(hidden.shape, generator=chance)
        return mixture(self, hidden * (1 + noise), *args)

    monkeypatch.setattr(FusedDecoderLayer, "_mixture", rounded)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe, one layer without", "olmoe", "granitemoe"])
def test_self_check_sends_tokens_where_they_went_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens between two experts go to the other one, whose gradients are others; that is nobody's fault. The weights'
    own gradient was left out of these tokens, which failed the check in float32.
    """
    model = adapted(name)
    nearly_equal_scores(model, monkeypatch)
    check, applied = self_check(model, patch(model, "reference"), "reference", batch(), PLAN)
    assert check.passed
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    assert routers
    assert not [router for router in routers if router._forward_hooks]
    monkeypatch.setattr("ftcli.model.selfcheck.same_routing", lambda _model: nullcontext())
    with pytest.raises(FtcliError, match="FT704"):
        self_check(model, applied, "reference", batch(), PLAN)


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_a_document_goes_to_its_experts_in_a_pack_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths round otherwise, which sends tokens between two experts to the other one; FT443 was said of
    small Qwen3.5 mixtures in bfloat16.
    """
    model = adapted(name)
    nearly_equal_scores(model, monkeypatch)
    monkeypatch.undo()  # its noise differs with each call
    mixture = FusedDecoderLayer._mixture

    def rounded(self: FusedDecoderLayer, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        chance = torch.Generator().manual_seed(hidden.shape[1])
        return mixture(self, hidden * (1 + 1e-6 * torch.randn(hidden.shape, generator=chance)), *args)

    monkeypatch.setattr(FusedDecoderLayer, "_mixture", rounded)
    ids = torch.randint(5, base_of(model).config.vocab_size, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [TokenizedRow(n, ids[n : n + length], ids[n : n + length]) for n, length in enumerate((19, 27, 40))]
    patch(model, "reference")
    check_isolation(model, rows, PLAN, torch.device("cpu"), pad_token_id=0)
    monkeypatch.setattr("ftcli.train.assembly.same_routing", lambda _model: nullcontext([]))
    with pytest.raises(FtcliError, match="FT443"):
        check_isolation(model, rows, PLAN, torch.device("cpu"), pad_token_id=0)


@pytest.mark.parametrize("turned", [False, True])
def test_a_routers_output_is_read_in_either_order(turned: bool) -> None:
    """Granite's routers return experts first in transformers 5.17."""
    scores, weights, index = torch.rand(3, 4), torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [1, 2]])
    output = (index, weights, scores) if turned else (scores, weights, index)
    found = choice_of(output)
    assert found[0] is weights
    assert found[1] is index
    hook = Routing()
    assert hook(nn.Identity(), (), output) is output
    again = hook(nn.Identity(), (), tuple(t.flip(1) if t is not scores else t for t in output))
    for held, first in zip(again, output, strict=True):
        assert torch.equal(held, first)


@pytest.mark.parametrize("wrong", ["_of_a", "_of_b"])
def test_self_check_still_finds_a_wrong_gradient_of_experts(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_moe")
    nearly_equal_scores(model, monkeypatch)
    right: Any = getattr(ftkernels.experts, wrong)
    monkeypatch.setattr(f"ftkernels.experts.{wrong}", lambda grad, stack: 1.01 * right(grad, stack))
    said = rf"FT704.*gradient of mlp\.experts\..*lora_{wrong[-1].upper()}\.default\.weight by 0\.01"
    with pytest.raises(FtcliError, match=said):
        self_check(model, patch(model, "reference"), "reference", batch(), PLAN)


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_self_check_of_trained_routers_leaves_out_tokens_between_experts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradient is another score's on the other side; the router's of all others is compared as any weight's."""
    model = plain(name)
    nearly_equal_scores(model, monkeypatch)
    check, applied = self_check(model, patch(model, "reference"), "reference", batch(), PLAN)
    assert check.passed
    right = ftkernels.experts.unit_backward

    def more(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found._replace(weights=1.01 * found.weights)

    monkeypatch.setattr("ftkernels.experts.unit_backward", more)
    with pytest.raises(FtcliError, match="FT704"):
        self_check(model, applied, "reference", batch(), PLAN)


def test_self_check_finds_a_wrong_gradient_of_the_routers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_moe")
    right = ftkernels.experts.unit_backward

    def half(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found._replace(weights=0.5 * found.weights)

    monkeypatch.setattr("ftkernels.experts.unit_backward", half)
    with pytest.raises(FtcliError, match="FT704"):
        self_check(model, patch(model, "reference"), "reference", batch(), PLAN)


def test_self_check_finds_tokens_that_go_to_wrong_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_moe")
    op = lora_experts

    def next_expert(x: torch.Tensor, index: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return op(x, (index + 1) % EXPERTS["num_experts"], *args, **options)

    monkeypatch.setattr("ftcli.model.experts.lora_experts", next_expert)
    with pytest.raises(FtcliError, match=r"FT704.*layers\.[01]"):
        self_check(model, patch(model, "reference"), "reference", batch(), PLAN)


def test_self_check_compares_outputs_and_not_only_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's output is scaled here, which the norm after it undoes: loss and gradients are right."""
    model = plain("llama", rms_norm_eps=1e-12)
    applied = patch(model, "reference")
    half = FusedDecoderLayer._mlp_half

    def scaled(self: FusedDecoderLayer, hidden: torch.Tensor, packs: Any) -> Any:
        out = half(self, hidden, packs)
        return out + 0.05 * out.detach() if self.self_attn.layer_idx == 1 else out

    monkeypatch.setattr(FusedDecoderLayer, "_mlp_half", scaled)
    with pytest.raises(FtcliError, match=r"FT704.*layers\.1 the output differs by 0\.05"):
        self_check(model, applied, "reference", batch(), PLAN)
