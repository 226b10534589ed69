"""Whatever a layer keeps for backward, loss and gradients are the same bits."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

from ftcli.model.fused import FusedDecoderLayer
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.tables.policies import PolicyName
from tests.tiers import in_turn

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "youtu": (
        transformers.YoutuConfig,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
        },
    ),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}),
}


def adapted(name: str, kernels: Any, **lora: Any) -> peft.PeftModel:
    kind, extra = CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **extra}), attn_implementation="eager")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.1)
    patch(model, kernels)
    return model.train()


def gradients(model: peft.PeftModel, *, accumulated: int = 1) -> list[torch.Tensor]:
    """The loss, then every gradient of ``accumulated`` micro-batches that differ in length."""
    torch.manual_seed(2)
    loss = torch.zeros(())
    for length in (13, 7)[:accumulated]:
        ids = torch.randint(3, 96, (2, length))
        loss = forward_loss(model, {"input_ids": ids, "labels": ids.clone()}).loss
        loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("name", "kernels"), in_turn(list(CONFIGS), ["reference", "off"]))
def test_every_policy_gives_the_same_bits(name: str, kernels: str) -> None:
    wanted = gradients(adapted(name, kernels), accumulated=2)
    policies: tuple[PolicyName, ...] = ("selective", "offload")
    for policy in policies:
        model = adapted(name, kernels)
        use_checkpointing(model, policy)
        assert same(gradients(model, accumulated=2), wanted), policy
        model = adapted(name, kernels)
        use_checkpointing(model, policy, uncheckpointed_layers=2)
        assert same(gradients(model, accumulated=2), wanted), f"{policy} but in two layers"
    model = adapted(name, kernels)
    use_checkpointing(model, "offload", offloaded="layers")
    assert same(gradients(model, accumulated=2), wanted), "offload, whole layers"
    model = adapted(name, kernels)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):  # as transformers' trainer sets it for `true`
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = _checkpoint
    assert same(gradients(model, accumulated=2), wanted), "true"


def _checkpoint(function: Any, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_dropout_is_the_same_when_layers_run_again() -> None:
    policies: tuple[PolicyName, ...] = (False, "selective", "offload")
    runs = []
    for policy in policies:
        model = adapted("llama", "reference", lora_dropout=0.2)
        use_checkpointing(model, policy)
        runs.append(gradients(model))
    assert same(runs[1], runs[0])
    assert same(runs[2], runs[0])


def kept_elements(name: str, policy: PolicyName, **settings: Any) -> int:
    """Elements of distinct activations that autograd holds after a forward pass of the last layer alone."""
    model = adapted(name, "reference")
    use_checkpointing(model, policy, **settings)
    layer = model.base_model.model.model.layers[-1]
    assert isinstance(layer, FusedDecoderLayer)
    hidden = torch.randn(2, 13, 64).requires_grad_()
    angles = (torch.randn(1, 13, 16), torch.randn(1, 13, 16))
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= 2 * 13 * 16 and tensor.shape[-2] in (13, 26):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(hidden, position_embeddings=angles)
    out.sum().backward()
    return sum(found.values())


def test_policies_keep_less_in_turn() -> None:
    """`selective` leaves out gate and up (and x times their A); `offload` keeps the input of each half alone."""
    everything, selective, offload = (kept_elements("llama", policy) for policy in (False, "selective", "offload"))
    rows = 2 * 13
    assert everything - selective == rows * (2 * 96 + 2 * 16)
    assert offload == rows * 2 * 64
    for name in ("llama", "gemma2"):
        assert kept_elements(name, "offload", offloaded="layers") == rows * 64


def test_the_last_layers_are_the_ones_left_out() -> None:
    for policy in ("selective", "offload"):
        model = adapted("llama", "reference")
        use_checkpointing(model, policy, uncheckpointed_layers=1)  # type: ignore[arg-type]
        layers = model.base_model.model.model.layers
        assert [layer.selective or layer.offload is not None for layer in layers] == [True, True, False]
        assert kept_elements("llama", policy, uncheckpointed_layers=1) == kept_elements("llama", False)  # type: ignore[arg-type]
        assert kept_elements("llama", policy, uncheckpointed_layers=99) == kept_elements("llama", False)  # type: ignore[arg-type]


def test_the_mlp_of_a_layer_that_runs_again_whole_saves_as_under_true() -> None:
    """Llama's second forward stops in front of the MLP; Gemma-2's runs it for the input of its closing norm."""
    for name, wanted in (("llama", "input"), ("gemma2", "gate_up_once")):
        model = adapted(name, "reference")
        use_checkpointing(model, "offload", offloaded="layers")
        layer = model.base_model.model.model.layers[0]
        assert isinstance(layer, FusedDecoderLayer)
        assert (layer._mlp_save(), layer.offloaded_tensors) == (wanted, 1)
        use_checkpointing(model, "offload")
        assert (layer._mlp_save(), layer.offloaded_tensors) == ("input", 3 if name == "llama" else 4)


def test_policies_of_transformers_change_nothing_here() -> None:
    for policy in (True, False):
        model = adapted("llama", "off")
        assert use_checkpointing(model, policy) is None
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_evaluation_sends_nothing_away() -> None:
    model = adapted("llama", "reference").eval()
    offload = use_checkpointing(model, "offload")
    assert offload is not None
    with torch.no_grad():
        forward_loss(model, {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": torch.ones(1, 5).long()})
    assert offload.host_bytes == 0
