"""fp8 layers: state, joining, kernels and their self-check, what preflight counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from ftkernels.fp8 import joined_fp8, quantize_weight
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ftcli.assets import asset
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.errors import FtcliError
from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.model.fp8 import FP8_TOLERANCE, Fp8Linear
from ftcli.model.load import load_model
from ftcli.model.patch import patch
from ftcli.model.quantized import QuantizedLinear, check_weights
from ftcli.model.selfcheck import self_check
from ftcli.plan.precision import DtypePlan
from ftcli.plan.quantization import dequantized_bytes, weight_bytes
from tests.quantized import quantize_linears

FP8 = QuantizationConfig(method="fp8")
PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="a test")


def tiny(**change: Any) -> Any:
    """The bundled model as a run loads it."""
    model = ModelConfig(name_or_path="bundled:tiny-gemma2", tokenizer="bytes", **change)
    facts = read_facts(model, offline=True, origins=Origins(MapNode(None, {})))
    return load_model(model, facts, PLAN, device=torch.device("cpu"), seed=1, offline=True, quantization=FP8)


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def layer_of() -> tuple[Fp8Linear, Tensor]:
    """A layer with a bias, and the weight that it stands for."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": nn.Linear(64, 48)})
    assert quantize_linears(model, FP8) == 1
    layer: Any = model["proj"]
    assert isinstance(layer, Fp8Linear)
    return layer, layer.frozen_weight().dequantize(torch.float32)


def test_a_layer_computes_as_its_weight_object_both_ways() -> None:
    layer, dense = layer_of()
    x = torch.randn(3, 5, 64, requires_grad=True)
    y = layer(x)
    weight = layer.frozen_weight()
    assert torch.equal(y, weight.product(x.detach().view(-1, 64)).view(3, 5, 48) + layer.bias)
    dy = torch.randn(3, 5, 48)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx.view(-1, 64), weight.product_back(dy.view(-1, 48)))
    wanted = nn.functional.linear(x, dense, layer.bias)
    assert 1e-3 < float(((y - wanted).norm() / wanted.norm()).detach()) < 4e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.half(),
        lambda layer: layer.double(),
        copy.deepcopy,
        lambda layer: layer._replicate_for_data_parallel(),
    ],
    ids=["bfloat16", "half", "double", "deepcopy", "replicate"],
)
def test_state_survives_move_copy_and_replicate(move: Callable[[Any], Any]) -> None:
    layer, dense = layer_of()
    moved = move(layer)
    moved.check_state()
    assert [b.dtype for b in moved.buffers()] == [torch.float8_e4m3fn, torch.float32] * 2
    assert torch.equal(moved.frozen_weight().dequantize(torch.float32), dense)
    other, _ = layer_of()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.frozen_weight().dequantize(torch.float32), dense)


def _without(layer: Fp8Linear) -> None:
    layer._buffers["scale"] = None


def _cut(layer: Fp8Linear) -> None:
    layer.data = layer.data[:8]


def _other(layer: Fp8Linear) -> None:
    layer.hold(quantize_weight(torch.randn(8, 64)))


def _unwritten(layer: Fp8Linear) -> None:
    layer.scale = torch.rand(48)


def _stale(layer: Fp8Linear) -> None:
    layer.transposed = layer.transposed.flip(0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without, "scale gone"),
        (_cut, "a matrix and its transpose"),
        (_other, "shape \\(8, 64\\)"),
        (_unwritten, "not powers of two"),
        (_stale, "two copies of the weight differ"),
    ],
)
def test_a_layer_without_its_state_is_refused_by_name(damage: Callable[[Fp8Linear], None], said: str) -> None:
    layer, _ = layer_of()
    damage(layer)
    with pytest.raises(FtcliError, match=said) as caught:
        check_weights(nn.ModuleDict({"proj": layer}))
    (finding,) = caught.value.findings
    assert finding.code == "FT331"
    assert "proj: the fp8 weight (48, 64)" in finding.message


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 48)})
    with torch.no_grad():
        model["proj"].weight[3, 4] = float("inf")  # type: ignore[index]
    with pytest.raises(FtcliError, match=r"proj \(48, 64\).*not finite") as caught:
        quantize_linears(model, FP8)
    assert caught.value.findings[0].code == "FT323"


def test_the_model_is_quantized_as_it_is_loaded_or_drawn() -> None:
    plain = AutoModelForCausalLM.from_pretrained(asset("models", "tiny-gemma2"), dtype=torch.float32)
    loaded = tiny()
    quantized = [(name, module) for name, module in loaded.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(quantized) == 4 * 7
    for name, module in quantized:
        assert isinstance(module, Fp8Linear)
        original = plain.get_submodule(name).weight.detach()
        off = module.frozen_weight().dequantize(torch.float32) - original
        assert float(off.norm() / original.norm()) < 2.8e-2
    assert type(loaded.lm_head) is nn.Linear
    drawn = tiny(init="random")
    assert sum(isinstance(module, Fp8Linear) for module in drawn.modules()) == 4 * 7
    check_weights(drawn)


def test_preflight_counts_the_bytes_that_are_held() -> None:
    facts = read_facts(
        ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True, origins=Origins(MapNode(None, {}))
    )
    assert facts.shape is not None
    model = tiny()
    stored = sum(module.stored_bytes for module in model.modules() if isinstance(module, QuantizedLinear))
    held = stored + sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(FP8, facts.shape, 4) == held
    largest = max(linear.in_features * linear.out_features for linear in facts.shape.linears)
    half = replace(PLAN, parameter="bfloat16", compute="bfloat16")
    assert dequantized_bytes(FP8, facts.shape, PLAN, named_device("h200"), on_kernels=False) == 4 * largest
    assert dequantized_bytes(FP8, facts.shape, half, named_device("h200"), on_kernels=True) == 0  # multiplied as stored


def test_the_kernels_join_what_shares_an_input_and_undo_is_exact() -> None:
    model = adapted(tiny())
    layer = model.base_model.model.model.layers[0]
    before = copy.deepcopy({name: b for name, b in model.named_buffers() if "layers.0" in name})
    done = patch(model, "reference")
    assert not done.off
    groups = (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    )
    for group in groups:
        assert joined_fp8([module.base_layer.frozen_weight() for module in group]) is not None
    done.undo()
    after = {name: b for name, b in model.named_buffers() if "layers.0" in name}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    for group in groups:
        assert joined_fp8([module.base_layer.frozen_weight() for module in group]) is None


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def test_the_self_check_passes_and_still_sees_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tiny())
    check, done = self_check(model, patch(model, "reference"), "reference", _batch(), PLAN)
    assert check.passed
    assert check.tolerance == FP8_TOLERANCE
    done.undo()

    # One projection's columns in the place of another's: what a wrong stride would do.
    from ftkernels import lowrank
    from ftkernels.lowrank import base_forward

    def shuffled(plan: Any, x: Tensor, *rest: Any) -> Tensor:
        return base_forward(plan, x, *rest).roll(1, dims=1)

    applied = patch(model, "reference")
    monkeypatch.setattr(
        lowrank,
        "base_forward",
        lambda plan, x, *rest: (shuffled if len(plan.projections) > 1 else base_forward)(plan, x, *rest),
    )
    with pytest.raises(FtcliError, match="self-check failed"):
        self_check(model, applied, "reference", _batch(), PLAN)
