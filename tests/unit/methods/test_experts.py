"""Steps of methods on a mixture of experts whose experts alone have adapters: our layers against transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.config.model import Kernels, LoraConfig
from ftcli.generation.decoding import _PackedAdapters
from ftcli.methods.grpo.losses import StepShape
from ftcli.methods.grpo.policy import PolicyScores, scored_loss
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.model.fused import stack_of
from ftcli.model.lora import apply_lora
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from tests.quantized import PLAN
from tests.small_models import build
from tests.unit.methods.grpo.test_policy import batch
from tests.unit.methods.preference.steps import PADDED, UNPADDED, Result, objective_of, perturb, require_same, step

ON_EXPERTS = LoraConfig.model_validate({"r": 4, "target_modules": ["experts.gate_up_proj", "experts.down_proj"]})
LN2 = math.log(2)
FAMILIES = ["qwen3_moe", "gpt_oss", pytest.param("qwen2_moe", marks=pytest.mark.long)]


def adapted(model_type: str) -> Any:
    model, _ = apply_lora(build(model_type), ON_EXPERTS, PLAN, seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".experts." in name for name in trained)
    perturb(model)
    return model.train()


def on(kernels: Kernels, model: Any, objective: Any) -> None:
    """Puts the model on these, as a run would: as one stack of layers where they allow it."""
    done = patch(model, kernels)
    assert all(entry.on for entry in done.table)
    stack = stack_of(model, torch.float32)
    assert isinstance(stack, str) is (kernels == "off")
    objective._stack = None if isinstance(stack, str) else stack


@pytest.mark.parametrize("batches", [PADDED, UNPADDED], ids=["padded", "unpadded"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_dpo_is_that_of_transformers_layers(model_type: str, batches: Batches) -> None:
    found = []
    for kernels in ("off", "reference"):
        model = adapted(model_type)
        objective = objective_of(model, batches=batches if kernels == "reference" else PADDED, beta=0.3)
        on(kernels, model, objective)  # type: ignore[arg-type]
        found.append(step(objective, model, [[0, 2], [1]]))
    require_same(found[1], found[0], rel=2e-5)
    assert found[0][0] != pytest.approx(LN2, abs=1e-4)  # the reference is another model


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_grpo_is_that_of_transformers_layers(model_type: str, layout: Any) -> None:
    def of(kernels: Kernels, layout: Any) -> Result:
        model = adapted(model_type)
        device = torch.device("cpu")
        ours = PolicyScores(model, Batches(layout, "a test"), pad_token_id=0, temperature=0.7, device=device)
        on(kernels, model, ours)
        grpo = GrpoConfig(temperature=0.7, max_completion_length=7, beta=0.04)
        loss, _ = scored_loss(ours, grpo, batch(), StepShape(1, 1))
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    require_same(of("reference", layout), of("off", "padded"), rel=2e-5)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(5, 250, (2, 9), generator=torch.Generator().manual_seed(5))
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_on_experts_are_off_where_they_are_disabled(model_type: str) -> None:
    """Also in a block of the generation engine's, in which layers hold them packed."""
    base = logits(build(model_type))
    model = adapted(model_type).eval()
    patch(model, "reference")
    before = logits(model)
    assert (before - base).norm() > 1e-2 * base.norm()
    packed = _PackedAdapters(model, torch.float32)
    with packed.held():
        assert torch.equal(logits(model), before)
        with model.disable_adapter():
            assert (logits(model) - base).norm() < 1e-5 * base.norm()
        assert torch.equal(logits(model), before)
    with model.disable_adapter():
        assert (logits(model) - base).norm() < 1e-5 * base.norm()


def test_adapters_that_do_nothing_are_no_other_model_than_the_reference() -> None:
    model = adapted("qwen3_moe")
    objective = objective_of(model, beta=0.3)
    on("reference", model, objective)
    first = step(objective, model, [[0, 1]])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert step(objective, model, [[0, 1]])[0] == pytest.approx(LN2, abs=1e-5)
    assert first[0] != pytest.approx(LN2, abs=1e-4)
