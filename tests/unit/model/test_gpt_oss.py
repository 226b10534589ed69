"""gpt-oss on the kernels: what no other family has of it, against transformers in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.facts.shape import shape_of
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from tests.quantized import PLAN
from tests.small_models import build, config_of

IDS = torch.randint(5, 250, (2, 40), generator=torch.Generator().manual_seed(4))
Result = tuple[float, dict[str, Tensor]]


def adapted() -> Any:
    """Many gates and ups are beyond the clamp on either side, sinks count, and the window is shorter than a row."""
    base = build("gpt_oss")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                parameter.copy_(9 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(2 * torch.randn_like(parameter))
    model, _ = apply_lora(base, LoraConfig(r=3, alpha=6), PLAN, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()


def run(model: Any, rows: dict[str, Tensor], *, stack: Any = None) -> Result:
    model.zero_grad()
    loss = forward_loss(model, rows, stack=stack).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def rows() -> dict[str, Tensor]:
    labels = IDS.clone()
    labels[:, :7] = -100
    return {"input_ids": IDS, "labels": labels}


def require_close(found: Result, wanted: Result, bound: float = 1e-5) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= bound * gradient.norm(), name


def test_both_halves_of_the_clamp_are_reached() -> None:
    model, seen = adapted(), []
    experts = model.base_model.model.model.layers[0].mlp.experts
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    gate = experts._apply_gate
    experts._apply_gate = lambda both: (seen.append(both.detach()), gate(both))[1]
    run(model, rows())
    both = torch.cat(seen)
    for share in ((both[:, ::2] > 7), (both[:, 1::2] > 7), (both[:, 1::2] < -7)):
        assert 0.05 < share.float().mean() < 0.95


@pytest.mark.parametrize("policy", [False, True, "selective", "offload"])
def test_loss_and_every_gradient_are_transformers_under_every_policy(policy: Any) -> None:
    model = adapted()
    wanted = run(model, rows())
    assert all(entry.on for entry in patch(model, "reference").table)
    use_checkpointing(model, policy)
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    require_close(run(model, rows()), wanted)
    require_close(run(model, rows(), stack=stack_of(model, torch.float32)), wanted)


def test_packed_documents_give_what_each_gives_alone() -> None:
    """On transformers' layers they see each other. Losses are sums."""
    model = adapted()
    lengths = (13, 27)
    documents = IDS[:1].split(lengths, dim=1)
    alone = [run(model, {"input_ids": one, "labels": one.clone()}) for one in documents]
    wanted = (sum(loss for loss, _ in alone), {key: sum(found[key] for _, found in alone) for key in alone[0][1]})
    labels = IDS[:1].clone()
    labels[:, lengths[0]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = {"input_ids": IDS[:1], "labels": labels, "position_ids": positions}
    leaking = run(model, packed)
    assert leaking[0] != pytest.approx(wanted[0], rel=1e-3)
    patch(model, "reference")
    require_close(run(model, packed), wanted)
    require_close(run(model, packed, stack=stack_of(model, torch.float32)), wanted)


def test_another_clamp_is_no_layer_that_is_described() -> None:
    for change in ({"swiglu_limit": 6.0}, {"swiglu_alpha": 1.0}):
        assert shape_of({**config_of("gpt_oss").to_dict(), **change}) is None
    assert shape_of({**config_of("gpt_oss").to_dict(), "swiglu_limit": None}) is not None


@pytest.mark.parametrize(
    ("layers", "experts", "parameters", "active"),
    [(24, 32, 20_914_757_184, 4_187_440_704), (36, 128, 116_829_156_672, 5_711_982_912)],
    ids=["20b", "120b"],
)
def test_the_released_sizes(layers: int, experts: int, parameters: int, active: int) -> None:
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
    shape = shape_of(config.to_dict())
    assert shape is not None
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters
    assert (shape.parameters, shape.active_parameters) == (parameters, active)
