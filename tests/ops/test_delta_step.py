"""One token a row on pools of states: against whole sequences, whatever lies in other slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.causal_conv import causal_conv_reference
from ftkernels.delta_rule import delta_rule_reference
from ftkernels.delta_step import conv_step, conv_step_reference, delta_step, delta_step_reference
from torch import Tensor

NAN = float("nan")
#: Rows 1 and 3 are empty; the others' states lie in no order.
SLOTS = [4, -1, 0, -1, 2]


def pool_of(states: Tensor, slots: Tensor) -> Tensor:
    """Six slots with the rows' states, NaN in those of nobody."""
    pool = torch.full((6, *states.shape[1:]), NAN, dtype=states.dtype, device=states.device)
    live = slots >= 0
    pool[slots[live].long()] = states[live]
    return pool


@pytest.mark.parametrize("sizes", [(2, 4, 16, 32), (1, 3, 128, 128), (1, 1, 24, 40)])
def test_steps_go_on_where_a_sequence_ends(device: str, tools: Any, sizes: Any) -> None:
    """Five steps after a first state equal five tokens at once, and leave the state that those leave."""
    key_heads, heads, keys, values = sizes
    rows, slots = len(SLOTS), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    q, k = (torch.randn(rows, 8, key_heads, keys, device=device) for _ in range(2))
    v = torch.randn(rows, 8, heads, values, device=device)
    g, beta = -torch.rand(rows, 8, heads, device=device), torch.rand(rows, 8, heads, device=device)
    wide = [t.double() for t in (q, k, v, g, beta)]
    first, exact = delta_rule_reference(*(t[:, :3] for t in wide)).last, delta_rule_reference(*wide)
    pools, outs = [pool_of(first.float(), slots), pool_of(first, slots)], []
    for token in range(3, 8):
        given = [t[:, token] for t in (q, k, v, g, beta)]
        outs.append(delta_step(*given, pools[0], slots, backend="triton"))
        other = delta_step_reference(*(t.double() for t in given), pools[1], slots)
        assert tools.relative(outs[-1], other) <= 1e-6
    live = slots >= 0
    out = torch.stack(outs, 1)
    assert not out[~live].any()
    assert tools.relative(out[live], exact.out[live, 3:]) <= 1e-6
    for pool in pools:
        assert tools.relative(pool[slots[live].long()], exact.last[live]) <= 1e-6
        assert pool[[1, 3, 5]].isnan().all()  # slots of nobody are as they were


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(300, 4), (5, 2), (16, 8)])
def test_the_convolution_goes_on(device: str, tools: Any, channels: int, width: int, bias: bool) -> None:
    rows, slots = len(SLOTS), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    whole, weight = torch.randn(rows, width + 4, channels, device=device), torch.randn(channels, width, device=device)
    shift = torch.randn(channels, device=device) if bias else None
    states, x = whole.transpose(1, 2).contiguous(), whole[:, width - 1 :]
    first, last = states[..., : width - 1], states[..., 1 - width :]
    wide = None if shift is None else shift.double()
    exact = causal_conv_reference(whole.double(), weight.double(), wide)[:, width - 1 :]
    pools, outs = [pool_of(first, slots), pool_of(first.double(), slots)], []
    for token in range(5):
        outs.append(conv_step(x[:, token], weight, shift, pools[0], slots, backend="triton"))
        other = conv_step_reference(x[:, token].double(), weight.double(), wide, pools[1], slots)
        assert tools.relative(outs[-1], other) <= 1e-6
    live, out = slots >= 0, torch.stack(outs, 1)
    assert not out[~live].any()
    assert tools.relative(out[live], exact[live]) <= 1e-6
    for pool in pools:
        assert tools.relative(pool[slots[live].long()], last[live]) <= 1e-6
        assert pool[[1, 3, 5]].isnan().all()


def test_half_precision_beside_states_of_float32(device: str, tools: Any) -> None:
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    fused = torch.randn(2, 2 * 16 + 2 * 16 + 4 * 16, device=device).bfloat16()  # [q | k | v], as the convolution has it
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in fused.split([32, 32, 64], -1))
    g, beta = -torch.rand(2, 4, device=device), torch.rand(2, 4, device=device)
    pool = torch.randn(2, 4, 16, 16, device=device)
    wide = pool.double()
    out = delta_step(q, k, v, g, beta, pool, slots, backend="triton")
    exact = delta_step_reference(*(t.double() for t in (q, k, v, g, beta)), wide, slots)
    assert out.dtype == torch.bfloat16
    assert tools.relative(out, exact) < 4e-3
    assert tools.relative(pool, wide) < 1e-6
    inputs, weight = torch.randn(2, 128, 3, device=device), torch.randn(128, 4, device=device).bfloat16()
    exact = conv_step_reference(fused.double(), weight.double(), None, inputs.double(), slots)
    out = conv_step(fused, weight, None, inputs, slots, backend="triton")
    assert out.dtype == torch.bfloat16
    assert tools.relative(out, exact) < 4e-3


@pytest.mark.gpu
def test_a_graph_serves_other_slots() -> None:
    """Captured once, replayed with other slots, inputs and states."""
    slots = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    given = [torch.randn(2, 2, 64, device="cuda").bfloat16() for _ in range(3)]
    gates = [-torch.rand(2, 2, device="cuda"), torch.rand(2, 2, device="cuda")]
    x, weight = torch.randn(2, 64, device="cuda").bfloat16(), torch.randn(64, 4, device="cuda").bfloat16()
    pool, inputs = torch.randn(5, 2, 64, 64, device="cuda"), torch.randn(5, 64, 3, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        return delta_step(*given, *gates, pool, slots), conv_step(x, weight, None, inputs, slots)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for tensor in (*given, x):
        tensor.normal_()
    slots.copy_(torch.tensor([4, 2]))
    pools = pool.clone(), inputs.clone()
    graph.replay()
    exact = (
        delta_step_reference(*given, *gates, pools[0], slots),
        conv_step_reference(x, weight, None, pools[1], slots),
    )
    for value, truth in zip((*outs, pool, inputs), (*exact, *pools), strict=True):
        assert torch.allclose(value.float(), truth.float(), rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_refused() -> None:
    slots = torch.zeros(2, dtype=torch.int32)
    q, v, g = torch.zeros(2, 1, 16), torch.zeros(2, 2, 16), torch.zeros(2, 2)
    pool = torch.zeros(3, 2, 16, 16)
    with pytest.raises(ValueError, match="do not fit"):
        delta_step(q, q, v, g[:, :1], g, pool, slots)
    with pytest.raises(ValueError, match="pool"):
        delta_step(q, q, v, g, g, pool[:, :1], slots)
    with pytest.raises(ValueError, match="slots"):
        delta_step(q, q, v, g, g, pool, slots.long())
    with pytest.raises(ValueError, match="gaps"):
        delta_step(q, q, v, g, g, pool.transpose(2, 3), slots)
    with pytest.raises(ValueError, match="do not fit"):
        conv_step(torch.zeros(2, 6), torch.zeros(6, 4), None, torch.zeros(3, 6, 4), slots)
