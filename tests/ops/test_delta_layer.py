"""The operations of a gated delta net put together are transformers' layer, alone and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.causal_conv import causal_conv, inputs_at
from ftkernels.delta_gates import delta_gates, gated_norm
from ftkernels.delta_rule import delta_rule, delta_rule_ends
from ftkernels.delta_step import conv_step, delta_step
from torch import Tensor, nn

HEADS, SIZE = (2, 4), 32


@pytest.fixture
def layer() -> nn.Module:
    """Qwen3.5's, tiny, on the CPU."""
    pytest.importorskip("transformers.models.qwen3_5")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        linear_num_key_heads=HEADS[0],
        linear_num_value_heads=HEADS[1],
        linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE,
        layer_types=["linear_attention"],
    )
    made: nn.Module = Qwen3_5GatedDeltaNet(config, 0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def heads(mixed: Tensor) -> list[Tensor]:
    """q, k and v by head, views of the convolution's output."""
    widths = [HEADS[0] * SIZE, HEADS[0] * SIZE, HEADS[1] * SIZE]
    return [t.unflatten(-1, (-1, SIZE)) for t in mixed.split(widths, -1)]


def ours(layer: Any, hidden: Tensor, starts: Tensor | None = None) -> Tensor:
    kernels: Any = {"backend": "triton"}
    mixed = causal_conv(layer.in_proj_qkv(hidden), layer.conv1d.weight[:, 0], starts=starts, **kernels)
    gates = delta_gates(layer.in_proj_a(hidden), layer.in_proj_b(hidden), layer.A_log, layer.dt_bias, **kernels)
    out = delta_rule(*heads(mixed), *gates, starts=starts, **kernels)
    z = layer.in_proj_z(hidden).unflatten(-1, (-1, SIZE))
    normed = gated_norm(out, z, layer.norm.weight, layer.norm.variance_epsilon, **kernels)
    gave: Tensor = layer.out_proj(normed.flatten(-2))
    return gave


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, toward)]


def test_a_layer_forward_and_every_gradient(device: str, tools: Any, layer: nn.Module) -> None:
    layer.to(device)
    hidden = torch.randn(2, 70, 32, device=device, requires_grad=True)
    leaves = [hidden, *layer.parameters()]
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    found, wanted = with_gradients(ours(layer, hidden), leaves), with_gradients(layer(hidden), leaves)
    for name, one, other in zip(names, found, wanted, strict=True):
        # Gradients of decays are differences of sums that are nearly equal, here and there.
        assert tools.relative(one, other) <= (3e-5 if name in ("A_log", "dt_bias") else 1e-5), name


def test_packed_rows_are_rows_alone(device: str, tools: Any, layer: nn.Module) -> None:
    """Documents of 1, 2, 30 and 47 tokens in one row, forward and every gradient."""
    layer.to(device)
    lengths = [30, 1, 2, 47]
    hidden = torch.randn(1, sum(lengths), 32, device=device, requires_grad=True)
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(lengths))
    leaves = [hidden, *layer.parameters()]
    packed = with_gradients(ours(layer, hidden, begins[None].int().to(device)), leaves)
    alone = with_gradients(torch.cat([layer(document) for document in hidden.split(lengths, 1)], 1), leaves)
    for one, other in zip(packed, alone, strict=True):
        assert tools.relative(one, other) <= 1e-5


@torch.no_grad()
def test_a_prompt_and_steps_after_it(device: str, tools: Any, layer: Any) -> None:
    """The states that the prompt leaves go into pools; four steps from there are the rest of the sequence."""
    layer.to(device)
    hidden = torch.randn(2, 40, 32, device=device)
    projected, ends = layer.in_proj_qkv(hidden[:, :36]), torch.tensor([35], dtype=torch.int32, device=device)
    mixed = causal_conv(projected, layer.conv1d.weight[:, 0], backend="triton")
    a, b = layer.in_proj_a(hidden), layer.in_proj_b(hidden)
    g, beta = delta_gates(a, b, layer.A_log, layer.dt_bias, backend="triton")
    given = [*heads(mixed), g[:, :36], beta[:, :36]]
    last = [delta_rule_ends(*(t[at : at + 1] for t in given), ends, backend="triton").last for at in range(2)]
    before = [inputs_at(projected[at : at + 1], layer.conv1d.weight.shape[-1], ends) for at in range(2)]
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    inputs, states = torch.cat(before[::-1]).contiguous(), torch.cat(last[::-1]).contiguous()
    exact = layer(hidden)
    for token in range(36, 40):
        x = conv_step(
            layer.in_proj_qkv(hidden[:, token]), layer.conv1d.weight[:, 0], None, inputs, slots, backend="triton"
        )
        out = delta_step(*heads(x), g[:, token], beta[:, token], states, slots, backend="triton")
        z = layer.in_proj_z(hidden[:, token]).unflatten(-1, (-1, SIZE))
        normed = gated_norm(out, z, layer.norm.weight, layer.norm.variance_epsilon, backend="triton")
        assert tools.relative(layer.out_proj(normed.flatten(-2)), exact[:, token]) <= 1e-5
