"""What is saved is what was trained: by name, and bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ftcli.config.model import LoraConfig
from ftcli.errors import FtcliError
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.model.score_head import add_score_head
from ftcli.model.trained_weights import check_saved, load_weights, require_saveable, save_weights
from ftcli.plan.precision import DtypePlan
from tests.small_models import MULTIMODAL, STRUCTURES, TEXT, VOCABULARY, build, by_kind

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
KERNELS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone()}


def adapted(model_type: str, **options: Any) -> peft.PeftModel:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    torch.manual_seed(1)
    return peft.get_peft_model(build(model_type), peft.LoraConfig(**settings))


def one_step(model: Any) -> dict[str, torch.Tensor]:
    """Loss, backward, and a step of plain SGD; the gradients by name."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    forward_loss(model, batch()).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(parameters, lr=1e-3).step()
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("model_type", KERNELS)
def test_a_trained_norm_is_trained_and_saved_under_kernels(model_type: str, tmp_path: Path) -> None:
    """Issue 11, B1: the fused norm stood in the place of PEFT's wrapper, and the trained norm was not in the file."""
    plain, fused = adapted(model_type, modules_to_save=["norm"]), adapted(model_type, modules_to_save=["norm"])
    patch(fused, "reference")
    require_saveable(fused)
    wanted, found = one_step(plain), one_step(fused)
    assert set(found) == set(wanted)
    assert any(".norm.modules_to_save." in name for name in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name

    for model, folder in ((plain, tmp_path / "plain"), (fused, tmp_path / "fused")):
        save_weights(model, folder)
        check_saved(model, folder)
    again = peft.PeftModel.from_pretrained(build(model_type), str(tmp_path / "fused"))
    with torch.no_grad():
        loss = forward_loss(fused, batch()).loss.item()
        assert forward_loss(again.eval(), batch()).loss.item() == pytest.approx(loss, rel=1e-5)
        with fused.disable_adapter():
            without = forward_loss(fused, batch()).loss.item()
        assert without == pytest.approx(forward_loss(build(model_type), batch()).loss.item(), rel=1e-5)
    assert without != pytest.approx(loss, rel=1e-4)


def test_a_norm_that_is_taken_from_the_wrapper_is_found_before_the_first_step() -> None:
    model = adapted("llama", modules_to_save=["norm"])
    backbone = model.base_model.model.model
    backbone.norm = backbone.norm.modules_to_save["default"]
    with pytest.raises(FtcliError) as caught:
        require_saveable(model)
    assert caught.value.findings[0].code == "FT706"
    assert "base_model.model.model.norm.weight is trained and not saved" in str(caught.value)


@pytest.mark.parametrize("model_type", by_kind([*TEXT, *MULTIMODAL], STRUCTURES))
def test_every_family_saves_what_it_trains(model_type: str, tmp_path: Path) -> None:
    full = build(model_type)
    saves = any(name.endswith("norm") for name, _ in full.named_modules())
    lora = LoraConfig.model_validate({"r": 4, "modules_to_save": ["norm"] if saves else []})
    model, _ = apply_lora(build(model_type), lora, PLAN, seed=0)
    require_saveable(model)
    save_weights(model, tmp_path / "adapter")
    check_saved(model, tmp_path / "adapter")

    save_weights(full, tmp_path / "model")
    check_saved(full, tmp_path / "model")


@pytest.mark.parametrize("tied", [False, True])
def test_a_score_on_a_family_whose_experts_are_stored_one_by_one(tied: bool, tmp_path: Path) -> None:
    """Its names in files are others than in the model; it is loaded again, by ftcli and as a classifier."""
    models = [build("qwen2_moe", tie_word_embeddings=tied) for _ in range(2)]
    for seed, model in enumerate(models):
        add_score_head(model, seed)
    save_weights(models[0], tmp_path)
    check_saved(models[0], tmp_path)
    load_weights(models[1], tmp_path)
    assert torch.equal(models[0].score.weight, models[1].score.weight)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path).state_dict()
    for name, tensor in models[1].state_dict().items():
        assert name == "lm_head.weight" or torch.equal(classifier[name], tensor)
    with torch.no_grad():
        models[0].score.weight += 1
    with pytest.raises(FtcliError, match=r"score\.weight differs"):
        check_saved(models[0], tmp_path)


def test_saving_says_nothing_and_leaves_no_card_of_peft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the card that PEFT goes on with, its reader would warn where its head is empty."""
    hub = logging.getLogger("huggingface_hub")
    hub.addHandler(caplog.handler)  # it does not pass its records on
    try:
        save_weights(adapted("llama", r=2), tmp_path)
    finally:
        hub.removeHandler(caplog.handler)
    assert caplog.messages == []
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(sorted(tensors)[0])


def _change(tensors: dict[str, torch.Tensor]) -> None:
    tensors[sorted(tensors)[-1]].view(-1)[0] += 1e-6


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.ones(32)


@pytest.mark.parametrize(("damage", "said"), [(_drop, "not saved"), (_change, "differs"), (_add, "not part")])
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_damaged_file_is_found(
    damage: Callable[[dict[str, torch.Tensor]], None], said: str, kind: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = adapted("llama") if kind == "adapter" else build("llama")
    save_weights(model, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    damage(tensors)
    if kind == "model" and damage is _add:
        pytest.skip("transformers passes over a tensor that it has no place for")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FtcliError) as caught:
        check_saved(model, tmp_path)
    assert said in str(caught.value)
