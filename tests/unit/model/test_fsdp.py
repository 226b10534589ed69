"""What a rank keeps of a model that is loaded to be sharded, and the tensors that torch is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.fp8 import joined_fp8
from torch import nn

from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.facts.model import read_facts
from ftcli.model.backbone import decoder_layers
from ftcli.model.fp8 import fp8_linear
from ftcli.model.fsdp import (
    UNSHARDED_LAYERS,
    JoinedTensors,
    RankShards,
    has_shards_only,
    join_shared,
    prepare,
    rank_shards_of,
    unsharded_layers,
)
from ftcli.model.load import load_model
from ftcli.model.loss import forward_loss
from ftcli.model.quantized import QuantizedLinear, as_shardable, is_shardable
from ftcli.plan.precision import DtypePlan
from tests.quantized import quantize_linears
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="")
TINY = ModelConfig(name_or_path="bundled:tiny-gemma2", dtype="float32")


def loaded(method: str, parts: RankShards | None) -> Any:
    facts = read_facts(TINY, offline=True, origins=Origins(MapNode(None, {})))
    settings = QuantizationConfig(method=method)
    cpu = torch.device("cpu")
    return load_model(TINY, facts, PLAN, device=cpu, seed=0, offline=True, quantization=settings, shards=parts)


def test_all_byte_patterns_survive_what_torch_is_told() -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(256)
    pairs = torch.stack([every, torch.arange(256, dtype=torch.uint8).repeat_interleave(256)], 1).view(-1)
    told = as_shardable(pairs)
    assert told.dtype == torch.float32
    there = torch.empty_like(told)
    torch._foreach_copy_([there], [told])
    assert torch.equal(there.view(torch.uint8), pairs)
    assert not is_shardable(torch.empty(3, 6, dtype=torch.uint8))


@pytest.mark.parametrize("method", ["none", "nf4", "fp8"])
def test_both_ranks_parts_are_the_whole(method: str) -> None:
    whole = loaded(method, RankShards(0, 1, joins=True))
    halves = [loaded(method, RankShards(rank, 2, joins=True)) for rank in range(2)]
    kept = [rank_shards_of(model) for model in halves]
    wanted = rank_shards_of(whole)
    assert wanted is not None
    layers = [list(decoder_layers(model)) for model in (whole, *halves)]
    compared = 0
    for index, (layer, *parted) in enumerate(zip(*layers, strict=True)):
        assert has_shards_only(parted[0]) == (index >= UNSHARDED_LAYERS)
        for name, parameter in layer.named_parameters():
            own = [dict(each.named_parameters())[name] for each in parted]
            if parameter not in wanted.kept:
                continue
            rows = torch.cat([k.kept[p] for k, p in zip(kept, own, strict=True) if k is not None])
            assert torch.equal(rows.view(torch.int32), wanted.kept[parameter].view(torch.int32)), name
            assert own[0].untyped_storage().nbytes() <= 8  # nothing but a place
            compared += 1
    assert compared


def test_the_first_layers_compute_by_themselves_and_the_others_come_back() -> None:
    model = loaded("nf4", RankShards(1, 2, joins=True))
    ids = torch.arange(8)[None]
    count = len(decoder_layers(model))
    with unsharded_layers(model):
        assert len(decoder_layers(model)) == UNSHARDED_LAYERS
        assert torch.isfinite(forward_loss(model, {"input_ids": ids, "labels": ids}).loss)
    assert len(decoder_layers(model)) == count
    assert model.config.num_hidden_layers == count


def test_fp8_weights_of_one_input_stay_one_product_as_they_were_joined() -> None:
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    settings = QuantizationConfig(method="fp8")
    torch.manual_seed(0)
    for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
        for name in names:
            setattr(parent, name, fp8_linear(nn.Linear(32, 16, bias=False), settings, name))
    modules = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    before = [module.stored_bytes for module in modules]
    type(modules[0]).join(modules)
    joined = joined_fp8([module.frozen_weight() for module in modules])
    assert joined is not None
    join_shared(layer)
    told = joined_fp8([module.frozen_weight() for module in modules])
    assert told is not None
    assert torch.equal(told.transposed.float(), joined.transposed.float())
    assert torch.equal(told.data.float(), joined.data.float())
    assert [module.stored_bytes for module in modules] == before


@pytest.mark.parametrize("method", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("model_type", ["phi3", "glm4"])
def test_a_single_layer_for_several_outputs_is_one_parameter_as_it_is(model_type: str, method: str) -> None:
    """Phi-3 has one linear for q, k and v and one for gate and up; GLM-4 has the second, and q, k and v to join."""
    layer: Any = decoder_layers(build(model_type).requires_grad_(False))[0]
    if method != "none":
        quantize_linears(layer, QuantizationConfig(method=method))
    before = [_dense(module) for module in (layer.mlp.gate_up_proj, layer.self_attn.o_proj)]
    prepare(layer, joins=True)
    joints = [name for name, module in layer.named_modules() if isinstance(module, JoinedTensors)]
    wanted = {"none": ["self_attn.joint_q_proj_k_proj_v_proj"], "nf4": []}
    wanted["fp8"] = [*wanted["none"], "self_attn.joint_q_proj_k_proj_v_proj_columns"]
    assert joints == ([] if model_type == "phi3" else wanted[method])
    after = [_dense(module) for module in (layer.mlp.gate_up_proj, layer.self_attn.o_proj)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in layer.mlp.gate_up_proj.parameters())


def _dense(module: Any) -> torch.Tensor:
    weight = module.frozen_weight() if isinstance(module, QuantizedLinear) else module.weight
    return weight.detach().clone() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
