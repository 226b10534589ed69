"""Layers with multi-head latent attention: transformers' numbers on every base, and documents kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ftkernels.device import interpreting
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.data.tokens import TokenizedRow
from ftcli.facts.shape import shape_of
from ftcli.model.backbone import base_of, decoder_layers, hidden_states
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.layers import FusedLatentLayer
from ftcli.model.patch import patch
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.plan.execution import choose_layers
from ftcli.plan.precision import DtypePlan
from ftcli.tables.policies import PolicyName
from ftcli.train.assembly import check_isolation
from tests.small_models import adapted_everywhere, build
from tests.unit.model.test_delta_layer import alone, packed, relative, require_same, toward, with_gradients

LENGTH = 40
#: Values as wide as keys, with queries from a latent; and narrower ones, with queries of none, in halves.
EQUAL: dict[str, Any] = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16}
OTHER: dict[str, Any] = {
    "q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip


def model_of(
    model_type: str = "glm4_moe_lite",
    *,
    lora: bool = True,
    kernels: str = "reference",
    base: str = "none",
    **change: Any,
) -> Any:
    """With adapters on every linear layer and expert that change what it computes, or bare."""
    model: Any = build(model_type, **{**EQUAL, **change})
    if base != "none":
        settings = QuantizationConfig(method=base)
        for name in layers_to_quantize(model):
            model.set_submodule(name, quantize_linear(model.get_submodule(name), settings, name))
    if lora:
        torch.manual_seed(1)
        model = adapted_everywhere(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.03)
    if kernels != "off":
        assert all(entry.on for entry in patch(model, kernels).table)
        assert all(isinstance(layer, FusedLatentLayer) for layer in decoder_layers(base_of(model)))
    return model.train()


def ids(rows: int = 1) -> Tensor:
    return torch.randint(5, 250, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def weights(rows: int = 1) -> Tensor:
    return toward((rows, LENGTH, 32))


@pytest.mark.parametrize("change", [{}, OTHER], ids=["equal", "other"])
@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "deepseek_v3"])
def test_hidden_states_and_every_gradient_are_transformers(model_type: str, change: dict[str, Any]) -> None:
    wanted = with_gradients(model_of(model_type, kernels="off", **change), ids(2), weights(2))
    found = with_gradients(model_of(model_type, **change), ids(2), weights(2))
    linears = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_up_proj"]
    linears += ["q_proj"] if change else ["q_a_proj", "q_b_proj"]
    assert all(any(each in name for name in found[1]) for each in linears if each != "gate_up_proj")
    require_same(found, wanted)


@pytest.mark.parametrize("change", [{}, OTHER], ids=["equal", "other"])
def test_weights_that_are_trained_whole_have_transformers_gradients(change: dict[str, Any]) -> None:
    wanted = with_gradients(model_of("youtu", lora=False, kernels="off", **change), ids(2), weights(2))
    found = with_gradients(model_of("youtu", lora=False, **change), ids(2), weights(2))
    assert any("kv_a_layernorm" in name for name in found[1])
    require_same(found, wanted)


@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_a_quantized_base_gives_what_its_own_layers_do(base: str) -> None:
    wanted = with_gradients(model_of("youtu", base=base, kernels="off"), ids(2), weights(2))
    found = with_gradients(model_of("youtu", base=base), ids(2), weights(2))
    assert len(found[1]) == 2 * 2 * 8
    require_same(found, wanted, 1e-5 if base == "nf4" else 0.02)


@pytest.mark.parametrize("change", [{}, OTHER], ids=["equal", "other"])
def test_packed_is_alone_wherever_a_document_begins(change: dict[str, Any]) -> None:
    """In float64, in which nothing else differs: routers would compute in float32."""
    model, tokens, toward_ = model_of("youtu", **change).double(), ids(), weights().double()
    for boundary in (1, 2, 17, LENGTH - 1):
        lengths = (boundary, LENGTH - boundary)
        found = with_gradients(model, tokens, toward_, **packed(lengths))
        require_same(found, alone(model, lengths, tokens, toward_), 1e-11)


def test_a_changed_document_changes_no_bit_of_the_others() -> None:
    rows = [TokenizedRow(number, row, row) for number, row in enumerate(ids(3).tolist())]
    plan = DtypePlan("float32", None, "float32", False, "a test")
    for change in ({}, OTHER):
        check_isolation(model_of(lora=False, **change), rows, plan, torch.device("cpu"), pad_token_id=0)


@pytest.mark.parametrize("change", [{}, OTHER], ids=["equal", "other"])
def test_every_policy_and_the_stack_give_the_same_bits(change: dict[str, Any]) -> None:
    wanted = with_gradients(model_of(**change), ids(2), weights(2))
    policies: tuple[PolicyName, ...] = ("selective", "offload")
    for policy in policies:
        model = model_of(**change)
        use_checkpointing(model, policy)
        require_same(with_gradients(model, ids(2), weights(2)), wanted, 0.0)
    model = model_of(**change)
    stack = stack_of(model, torch.float32)
    assert not isinstance(stack, str)
    model.zero_grad()
    states = hidden_states(model, {"input_ids": ids(2)}, stack).tensor
    (states * weights(2)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    require_same((states.detach(), gradients), wanted, 0.0)


def of_kernels(model: Any) -> Any:
    """The latents' norms, projections and heads on the interpreted kernels."""
    if not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    for layer in decoder_layers(base_of(model)):
        layer._backend = "triton"
    return model


@pytest.mark.parametrize("lengths", [(LENGTH,), (13, 1, 26)])
@pytest.mark.parametrize("change", [{}, OTHER], ids=["equal", "other"])
def test_interpreted_kernels_compute_what_plain_torch_does(change: dict[str, Any], lengths: Sequence[int]) -> None:
    given = packed(lengths)
    plain = with_gradients(model_of("youtu", **change), ids(), weights(), **given)
    found = with_gradients(of_kernels(model_of("youtu", **change)), ids(), weights(), **given)
    require_same(found, plain)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side: str) -> None:
    model, own = (model_of(lora=False, kernels=kernels).eval() for kernels in ("reference", "off"))
    tokens, lengths = ids(3), (LENGTH, 21, 3)
    mask = torch.zeros(3, LENGTH, dtype=torch.int64)
    where = [slice(LENGTH - n, None) if side == "left" else slice(0, n) for n in lengths]
    for row, part in enumerate(where):
        mask[row, part] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        found, wanted = (hidden_states(each, given).tensor for each in (model, own))
        for row, part in enumerate(where):
            by_itself = hidden_states(model, {"input_ids": tokens[row : row + 1, part]}).tensor[0]
            assert relative(found[row, part], by_itself) <= 1e-5
            assert relative(found[row, part], wanted[row, part]) <= 1e-5


def test_values_that_are_wider_than_keys_stay_on_transformers_layers() -> None:
    values = {**build("youtu").config.to_dict(), "v_head_dim": 24}
    shape = shape_of(values)
    choice = choose_layers("youtu", shape, "silu", "reference", device="cpu", gpu=None)
    assert choice.code == "transformers"
    assert choice.reason == "values of 24 features are wider than keys of 16"
