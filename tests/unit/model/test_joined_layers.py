"""Models whose checkpoints join projections (Phi-3: q, k, v and gate, up; GLM-4: gate, up) on the kernels, on base
weights of every kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.generation.generator import merged_model
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.fused import FusedDecoderLayer, stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.nf4 import NF4Linear
from ftcli.model.patch import patch
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.plan.precision import DtypePlan
from tests.quantized import NF4, SINGLE, load, packed_state, same_state
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
JOINED = ("phi3", "glm4")
METHODS = ("none", "nf4", "fp8")


def quantized(model_type: str, method: str) -> Any:
    model = build(model_type).requires_grad_(False)
    if method != "none":
        for name in layers_to_quantize(model):
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, quantize_linear(linear, QuantizationConfig(method=method), name))
    return model


def adapted(model_type: str, method: str = "none", **settings: Any) -> Any:
    """Adapters that say something on every linear layer."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    model = peft.get_peft_model(quantized(model_type, method), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def run(model: Any, *, stacked: bool = False) -> dict[str, Tensor]:
    """The loss of two rows, of which one has two documents, and all gradients."""
    ids = torch.randint(5, 250, (2, 21), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.arange(21), torch.cat([torch.arange(9), torch.arange(12)])])
    labels = ids.masked_fill(torch.arange(21) < 3, -100)
    stack = stack_of(model, torch.float32) if stacked else None
    assert not isinstance(stack, str)
    model.zero_grad()
    torch.manual_seed(4)  # of dropout
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    loss = forward_loss(model, batch, stack=stack).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def on_the_kernels(model: Any, backend: str) -> None:
    """Kernels in Triton's interpreter, which no recipe asks for, or their plain torch versions."""
    applied = patch(model, "reference")
    assert not applied.off
    for layer in decoder_layers(base_of(model)):
        assert isinstance(layer, FusedDecoderLayer)
        layer._backend = backend  # type: ignore[assignment]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", JOINED)
def test_loss_and_gradients_are_transformers_own(model_type: str, method: str, backend: str) -> None:
    model = adapted(model_type, method)
    wanted = run(model)
    on_the_kernels(model, backend)
    found = run(model)
    assert len(found) > 8
    close(found, wanted)
    stacked = run(model, stacked=True)  # adapters that are packed for all layers at once
    assert all(torch.equal(stacked[name], value) for name, value in found.items())


@pytest.mark.parametrize("model_type", JOINED)
def test_weights_that_are_trained_get_transformers_gradients(model_type: str) -> None:
    model = build(model_type).requires_grad_(True)
    wanted = run(model)
    on_the_kernels(model, "triton")
    close(run(model), wanted)


def test_an_adapter_on_one_of_the_joined_layers_alone() -> None:
    for target in ("qkv_proj", "gate_up_proj"):
        model = adapted("phi3", target_modules=[target], r=3)
        wanted = run(model)
        on_the_kernels(model, "triton")
        close(run(model), wanted)


@pytest.mark.parametrize("double_quant", [True, False])
def test_files_of_packed_joined_layers_are_read_as_what_quantizing_them_gives(
    double_quant: bool, tmp_path: Path
) -> None:
    """Files in bitsandbytes' layout, and those in full precision, quantized while they are read."""
    full, packed = tmp_path / "full", tmp_path / "packed"
    for folder in (full, packed):
        build("phi3").save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(full / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        parts = packed_state(tensor, double_quant) if layer.endswith("_proj") else {".weight": tensor}
        tensors |= {layer + key: part for key, part in parts.items()}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((full / "config.json").read_text())
    stored = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quant}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **stored}
    (packed / "config.json").write_text(json.dumps(config))
    read, own = load(packed), load(full, settings=NF4 if double_quant else SINGLE)
    layers = [name for name, module in own.named_modules() if isinstance(module, NF4Linear)]
    assert len(layers) == 2 * 4
    assert all(same_state(read.get_submodule(name), own.get_submodule(name)) for name in layers)
    on_the_kernels(read, "torch")
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, wanted = (model(input_ids=ids, use_cache=False).logits for model in (read, own))
    assert torch.allclose(found, wanted, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("policy", ["selective", True])
def test_checkpointed_layers_give_the_same_bits(policy: Any, method: str) -> None:
    model = adapted("phi3", method, lora_dropout=0.3).train()
    on_the_kernels(model, "torch")
    wanted = run(model)
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        use_checkpointing(model, policy)
    found = run(model)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("model_type", JOINED)
def test_a_second_model_has_the_adapters_of_joined_layers_in_its_weights(model_type: str) -> None:
    """On NF4, whose weights are dequantized into it."""
    model = adapted(model_type, "nf4").eval()
    patch(model, "reference")
    ids = torch.randint(5, 250, (1, 24), generator=torch.Generator().manual_seed(1))
    second = merged_model(model, PLAN, "reference")
    with torch.no_grad():
        wanted = base_of(model)(input_ids=ids, use_cache=False).logits
        found = second.model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))
    assert isinstance(decoder_layers(second.model)[0], FusedDecoderLayer)
