"""Modules that `lora.modules_to_save` trains whole are held in the dtype of what is trained, not of the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.model import LoraConfig
from ftcli.model.backbone import compute_context, hidden_states
from ftcli.model.lora import apply_lora, load_adapter
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.model.trained_weights import save_weights
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

SAVED = ("lm_head", "embed_tokens", "norm")
IDS = torch.randint(5, 250, (2, 12), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")


def plan_of(dtype: str) -> DtypePlan:
    return DtypePlan(dtype, "float32", dtype, dtype != "float32", "a test")


def adapted(dtype: str, model_type: str = "llama", saved: tuple[str, ...] = SAVED) -> Any:
    base = build(model_type).to(getattr(torch, dtype))
    lora = LoraConfig.model_validate({"r": 4, "modules_to_save": saved})
    return apply_lora(base, lora, plan_of(dtype), seed=0)[0]


def loss_of(model: Any, dtype: str) -> torch.Tensor:
    with compute_context(CPU, dtype, dtype != "float32"):
        loss: torch.Tensor = forward_loss(model, {"input_ids": IDS, "labels": IDS}, num_items=22).loss
    return loss


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_they_are_trained_in_float32_and_hand_on_the_base_dtype(dtype: str) -> None:
    """Issue 11: PEFT copies them in the base's dtype; in float16 the loss scale refused their gradients."""
    model = adapted(dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".modules_to_save." in name for name in trained) == 7
    assert {p.dtype for p in trained.values()} == {torch.float32}
    with compute_context(CPU, dtype, dtype != "float32"):
        assert hidden_states(model, {"input_ids": IDS}).tensor.dtype == getattr(torch, dtype)
    loss_of(model, dtype).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_on_the_kernels_they_do_the_same(model_type: str) -> None:
    saved = ("norm",) if model_type == "gemma2" else SAVED
    model = adapted("bfloat16", model_type, saved)
    loss_of(model, "bfloat16").backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    wanted = loss_of(model, "bfloat16").item()
    model.zero_grad()
    assert not patch(model, "reference").off
    with compute_context(CPU, "bfloat16", True):
        assert hidden_states(model, {"input_ids": IDS}).tensor.dtype == torch.bfloat16
    assert loss_of(model, "bfloat16").item() == pytest.approx(wanted, rel=1e-2)
    loss_of(model, "bfloat16").backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(plain)
    for name in found:
        if "modules_to_save" in name:
            assert found[name].dtype == torch.float32
            assert (found[name] - plain[name]).norm() <= 0.1 * plain[name].norm(), name


def test_an_adapter_loads_with_the_numbers_that_were_trained(tmp_path: Path) -> None:
    """Issue 11: rounded to the base's dtype, `eval` measured another model than training did."""
    model = adapted("bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 1e-4)
    wanted = loss_of(model.eval(), "bfloat16")
    save_weights(model, tmp_path)
    again = load_adapter(build("llama").to(torch.bfloat16), tmp_path)
    assert torch.equal(loss_of(again, "bfloat16"), wanted)
