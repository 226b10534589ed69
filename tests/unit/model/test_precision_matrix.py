"""Every base dtype with every adapter dtype, under autocast and without: no dtype error, and stated error bounds.

What is compared with: the same model, its base weights as they are stored (rounded, dequantized), everything else in
float64. Bounds are those of the compute dtype: products of a 2-layer model and their gradients, relative Frobenius.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.model.backbone import base_of, compute_context
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.model.quantized import QuantizedLinear
from tests.quantized import quantize_linears

pytestmark = pytest.mark.whole_grid  # the matrix of dtypes is promised
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32, "initializer_range": 0.1,
}  # fmt: skip
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 8e-2), "float16": (3e-3, 2e-2)}


def build(base: str, adapter: str) -> peft.PeftModel:
    """A model as training holds it: the frozen base stored as ``base``, adapters in ``adapter`` with B not zero."""
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return with_adapters(transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, base)), adapter)


def with_adapters(model: Any, adapter: str) -> peft.PeftModel:
    """LoRA on all linears, in the dtype ``adapter``, B not zero."""
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, adapter))
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def quantized(method: Any, adapter: str, stored: str, *, dense: bool = False) -> peft.PeftModel:
    """A model with a quantized base, the rest of it in ``stored``; or its twin of the dequantized weights."""
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, stored))
    assert quantize_linears(model, QuantizationConfig(method=method)) == 14
    if dense:
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
                plain.weight = torch.nn.Parameter(module.frozen_weight().dequantize(torch.float32))
                model.set_submodule(name, plain)
    return with_adapters(model, adapter)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 48, (1, 6), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone()}


def loss_and_gradients(model: Any, compute: str, *, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with compute_context(CPU, compute, autocast):
        loss = forward_loss(model, batch()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def exact(model: peft.PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The same numbers in float64."""
    return loss_and_gradients(copy.deepcopy(model).double(), "float32", autocast=False)


@cache
def exact_of(base: str, adapter: str) -> tuple[Tensor, dict[str, Tensor]]:
    return exact(build(base, adapter))


@cache
def exact_of_twin(method: str, adapter: str, stored: str) -> tuple[Tensor, dict[str, Tensor]]:
    return exact(quantized(method, adapter, stored, dense=True))


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "plain"])
@pytest.mark.parametrize("adapter", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", ["float32", "bfloat16", "float16"])
def test_no_pair_of_dtypes_clashes(base: str, adapter: str, autocast: bool, kernels: Any) -> None:
    if not autocast and kernels == "off" and base != adapter:
        pytest.skip("PEFT's own layers promise nothing for mixed dtypes without autocast; no plan asks it of them")
    compute = "bfloat16" if base == "float32" and autocast else base
    model = build(base, adapter)
    wanted_loss, wanted = exact_of(base, adapter)
    patch(model, kernels)
    model.train()
    loss, gradients = loss_and_gradients(model, compute, autocast=autocast)
    rounded = "bfloat16" if "bfloat16" in (compute, adapter) else compute
    loss_bound, gradient_bound = BOUNDS[rounded]
    assert loss.dtype in (torch.float32, torch.float64)
    assert apart(loss, wanted_loss) < loss_bound
    assert set(gradients) == set(wanted)
    for name, gradient in gradients.items():
        assert gradient.dtype == getattr(torch, adapter), name
        assert apart(gradient, wanted[name]) < gradient_bound, name

    model.eval()
    with torch.no_grad(), compute_context(CPU, compute, autocast):
        assert apart(forward_loss(model, batch()).loss, wanted_loss) < loss_bound
    assert base_of(model).get_input_embeddings().weight.dtype == getattr(torch, base)


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("adapter", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_quantized_bases_with_every_adapter_dtype(method: str, stored: str, adapter: str, kernels: Any) -> None:
    """Against the dequantized twin in float64; fp8 rounds activations and gradients to 3 bits as well."""
    autocast = stored == "bfloat16" or adapter == "bfloat16"
    model = quantized(method, adapter, stored)
    wanted_loss, wanted = exact_of_twin(method, adapter, stored)
    patch(model, kernels)
    model.train()
    loss, gradients = loss_and_gradients(model, "bfloat16" if autocast else "float32", autocast=autocast)
    loss_bound, gradient_bound = BOUNDS["bfloat16" if autocast else "float32"] if method == "nf4" else (3e-2, 3.5e-1)
    assert loss.dtype == torch.float32
    assert apart(loss, wanted_loss) < loss_bound
    assert set(gradients) == set(wanted)
    for name, gradient in gradients.items():
        assert gradient.dtype == getattr(torch, adapter), name
        assert apart(gradient, wanted[name]) < gradient_bound, name
    model.eval()
    with torch.no_grad(), compute_context(CPU, "bfloat16" if autocast else "float32", autocast):
        assert apart(forward_loss(model, batch()).loss, wanted_loss) < loss_bound
