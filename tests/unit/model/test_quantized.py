"""Quantized layers: what they compute, their state, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from ftkernels.nf4 import quantize_nf4
from torch import nn
from transformers import AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.model.fused import projection_of
from ftcli.model.nf4 import NF4Linear
from ftcli.model.patch import patch, why_not_fused
from ftcli.model.quantized import check_weights
from tests.quantized import NF4, SINGLE, TINY, layer_of, load, same_state


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


@pytest.mark.parametrize("settings", [NF4, SINGLE], ids=["double", "single"])
def test_a_layer_computes_as_its_dequantized_weight(settings: QuantizationConfig) -> None:
    layer, dense = layer_of(settings)
    x, y = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    out, wanted = layer(x), dense(y)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_a_layer_keeps_no_dense_weight_for_backward() -> None:
    layer, _ = layer_of()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert max(sizes, default=0) <= 2 * 64
    assert not hasattr(layer, "dense")
    assert list(layer.parameters()) == [layer.bias]


def test_autocast_decides_the_dtype() -> None:
    layer, dense = layer_of()
    x = torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = layer(x), dense(x)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.half(),
        lambda layer: layer.double(),
        lambda layer: layer.to("cpu"),
        copy.deepcopy,
        lambda layer: layer._replicate_for_data_parallel(),
        lambda layer: nn.Sequential(layer).to("cpu", torch.float16)[0],
    ],
    ids=["bfloat16", "half", "double", "device", "deepcopy", "replicate", "inside a model"],
)
@pytest.mark.parametrize("settings", [NF4, SINGLE], ids=["double", "single"])
def test_state_survives_move_copy_and_replicate(settings: QuantizationConfig, move: Callable[[Any], Any]) -> None:
    layer, _ = layer_of(settings)
    kept = copy.deepcopy(layer)
    moved = move(layer)
    assert same_state(moved, kept)
    assert torch.equal(moved.frozen_weight().dequantize(torch.float32), kept.frozen_weight().dequantize(torch.float32))


def test_a_state_dict_carries_all_of_it() -> None:
    (layer, _), (other, _) = layer_of(), layer_of()
    assert not same_state(layer, other)
    other.load_state_dict(layer.state_dict())
    assert same_state(layer, other)


def _without(layer: NF4Linear, name: str) -> NF4Linear:
    layer._buffers[name] = None
    return layer


def _bare_replica(layer: NF4Linear) -> NF4Linear:
    replica = layer._replicate_for_data_parallel()
    replica._buffers = {}
    return replica


@pytest.mark.parametrize(
    ("lose", "what"),
    [
        (lambda layer: layer.to("meta"), "meta"),
        (lambda layer: layer.to("meta").to_empty(device="cpu"), "never written"),
        (_bare_replica, "packed, absmax, table, nested_absmax"),
        (lambda layer: _without(layer, "nested_offset"), "nested_offset gone"),
        (lambda layer: _without(layer, "absmax"), "absmax gone"),
        (lambda layer: setattr(layer, "absmax", layer.absmax.float()) or layer, "absmax must be"),
        (lambda layer: setattr(layer, "packed", layer.packed[:-1].clone()) or layer, "data must be 1536"),
    ],
    ids=["meta", "to_empty", "replicate", "offset", "scales", "rounded scales", "cut"],
)
def test_state_lost_by_move_copy_or_replicate_is_refused_at_build(lose: Callable[[Any], Any], what: str) -> None:
    layer, _ = layer_of()
    model = nn.ModuleDict({"proj": lose(layer)})
    for buffer in model.buffers():
        if what == "never written" and buffer.is_floating_point():
            buffer.fill_(7.0)  # whatever lay there
    with pytest.raises(FtcliError) as caught:
        check_weights(model)
    (finding,) = caught.value.findings
    assert finding.code == "FT331"
    assert "proj" in finding.message
    assert "(48, 64)" in finding.message
    assert what in finding.message


def test_a_raw_packed_tensor_is_refused_at_build_with_layer_name_and_shapes(reference: Any) -> None:
    """Elsewhere: "mat1 and mat2 shapes cannot be multiplied (2158x4096 and 1x8388608)"."""
    model = copy.deepcopy(reference)
    linear = model.model.layers[1].mlp.up_proj
    packed = quantize_nf4(linear.weight).data.view(1, -1)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    for kernels in ("off", "auto", "reference"):
        with pytest.raises(FtcliError) as caught:
            patch(model, kernels)  # type: ignore[arg-type]
        (finding,) = caught.value.findings
        assert finding.code == "FT331"
        for part in ("model.layers.1.mlp.up_proj", "uint8", "(1, 65536)", "(512, 256)"):
            assert part in finding.message


def test_merging_into_a_packed_weight_is_refused() -> None:
    model = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(FtcliError) as caught:
        model.merge_and_unload()
    assert caught.value.findings[0].code == "FT332"
    assert "model.layers.0.self_attn.q_proj" in caught.value.findings[0].message
    with pytest.raises(TypeError):
        nn.functional.linear(torch.zeros(1, 256), model.base_model.model.model.layers[0].mlp.up_proj.weight)


def test_kernels_get_the_weight_object() -> None:
    model = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0]
    assert why_not_fused(layer.self_attn.q_proj) is None
    assert why_not_fused(layer.mlp.up_proj) is None
    projection = projection_of(layer.self_attn.q_proj)
    assert projection.rank == 2
    assert torch.equal(projection.weight.dequantize(torch.float32), layer.self_attn.q_proj.base_layer.frozen_weight().dequantize(torch.float32))  # fmt: skip  # noqa: E501
    assert projection_of(layer.mlp.up_proj).rank == 0


def test_layers_on_the_kernels_compute_what_modules_compute() -> None:
    """Loss and gradients of a whole model, the fused layers' plain torch form against transformers' layers."""
    torch.manual_seed(0)
    model = peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    ids = torch.randint(0, 256, (2, 24))

    def losses() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, wanted = losses()
    applied = patch(model, "reference")
    assert all(entry.on for entry in applied.table)
    fused, found = losses()
    applied.undo()
    assert fused == pytest.approx(plain, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-4, name
    assert losses()[0] == plain
