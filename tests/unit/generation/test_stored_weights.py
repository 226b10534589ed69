"""Bases that are stored quantized, with adapters on them: as they are, and merged into a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ftcli.config.model import QuantizationConfig
from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.decoding import Forward
from ftcli.generation.engine import Engine
from ftcli.generation.generator import copied_bytes, merged_model
from ftcli.generation.requests import GenerationRequest
from ftcli.model.fp8 import fp8_linear
from ftcli.model.nf4 import nf4_linear
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
PROMPTS = ((5, 6, 7, 8), tuple(range(9, 80)), (200,))


def quantized(method: str) -> Any:
    """Llama with adapters that say something on a quantized base."""
    base = build("llama").requires_grad_(False)
    make: Any = nf4_linear if method == "nf4" else fp8_linear
    for name, module in list(base.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            base.model.layers.set_submodule(name, make(module, QuantizationConfig(method=method), name))
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def said(model: Any) -> list[list[int]]:
    engine = Engine(Forward(model, PLAN, CPU), EngineLayout(3, 3 * pages_of(120) + 1, False), 120, PLAN, CPU)
    return [one[0].tokens for one in engine.complete([GenerationRequest(prompt, 16) for prompt in PROMPTS])]


def generated(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
                eos_token_id=[-1], pad_token_id=0,
            )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_unmerged_it_says_what_generate_says(method: str, kernels: Any) -> None:
    model = quantized(method)
    expected = generated(model)
    patch(model, kernels)
    assert said(model) == expected


def test_nf4_is_merged_into_a_dequantized_copy_and_stays_as_it_is() -> None:
    model = quantized("nf4")
    expected = generated(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    second = merged_model(model, PLAN, "reference")
    assert said(second.model) == expected
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    elements = sum(layer.linear.weight.numel() for layer in second.layers)
    assert copied_bytes(model, PLAN) == 4 * elements


def test_fp8_is_never_merged() -> None:
    """Its products round what goes in: a copy would sample from another policy than the one that is trained."""
    assert copied_bytes(quantized("fp8"), PLAN) is None
