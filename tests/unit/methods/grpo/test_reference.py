"""The reference of GRPO: what a run started from, or what follows the policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from ftcli.methods.grpo.reference import Reference
from ftcli.methods.grpo.settings import GrpoConfig
from tests.small_models import build

IDS = torch.arange(5, 17).view(1, 12)


def logits(reference: Reference, model: Any) -> torch.Tensor:
    with torch.no_grad(), reference.at_hand() as other:
        found: torch.Tensor = (model if other is None else other)(input_ids=IDS, use_cache=False).logits
    return found


def grpo(**change: Any) -> GrpoConfig:
    return GrpoConfig(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, **change)


def moved(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def adapted() -> Any:
    config = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head", task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config)
    moved(model)
    return model


def test_of_adapters_it_is_the_base_until_it_follows(tmp_path: Path) -> None:
    model = adapted()
    reference = Reference(model, None, grpo(ref_model_mixup_alpha=1.0))
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(logits(reference, model), base)
    reference.follow(1)
    assert torch.equal(logits(reference, model), base)
    with torch.no_grad():
        then = model(input_ids=IDS, use_cache=False).logits
    reference.follow(2)
    moved(model)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    assert torch.equal(logits(reference, model), then)
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters()), "the policy is as it was"
    reference.save(tmp_path)
    again = Reference(model, None, grpo(ref_model_mixup_alpha=1.0))
    again.load(tmp_path)
    assert torch.equal(logits(again, model), then)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_a_second_model_is_mixed_as_in_trl(alpha: float, tmp_path: Path) -> None:
    model = build("llama")
    other = copy.deepcopy(model).requires_grad_(False)
    wanted = {name: one.detach().double().clone() for name, one in other.named_parameters()}
    reference = Reference(model, other, grpo(ref_model_mixup_alpha=alpha))
    for step in range(1, 5):
        moved(model)
        reference.follow(step)
        if step % 2 == 0:
            for name, one in model.named_parameters():
                wanted[name] = alpha * one.detach().double() + (1 - alpha) * wanted[name]
    for name, one in other.named_parameters():
        torch.testing.assert_close(one.double(), wanted[name], rtol=1e-5, atol=1e-7)
    reference.save(tmp_path)
    fresh = copy.deepcopy(model).requires_grad_(False)
    again = Reference(model, fresh, grpo(ref_model_mixup_alpha=alpha))
    again.load(tmp_path)
    assert torch.equal(logits(again, model), logits(reference, model))


def test_what_does_not_follow_writes_nothing(tmp_path: Path) -> None:
    reference = Reference(adapted(), None, GrpoConfig(beta=0.1))
    reference.follow(512)
    reference.save(tmp_path)
    assert not list(tmp_path.iterdir())
