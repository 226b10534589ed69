"""Dense attention over the longest sequence that trains: 343,040 tokens of Llama-3.1-8B, in the layout of the joint
projection, against plain torch where that can be had.

Upstream gradients are zero but for the last queries', so that these alone decide every gradient. About ten seconds and
40 GB on an H200; the peak of the backward pass is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ftkernels.device import gpu_of
from torch import Tensor

from ftcli.model.attention import ftcli_attention_forward
from ftcli.plan.attention import AttentionCall, choose_attention

pytestmark = [pytest.mark.gpu, pytest.mark.whole_card]

TOKENS, Q_HEADS, K_HEADS, SIZE, LAST = 343_040, 32, 8, 128, 32


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last queries of one group of heads, float32: q (G, LAST, D), k and v (S, D) -> (G, LAST, D)."""
    length = k.shape[0]
    scores = q @ k.t() * SIZE**-0.5
    later = torch.arange(length, device=q.device)[None] > torch.arange(length - LAST, length, device=q.device)[:, None]
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().float() - wanted).norm() / wanted.norm())


def test_the_last_queries_see_all_keys(record_property: Callable[[str, object], None]) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 75e9:
        pytest.skip("needs a GPU of 80 GB")
    torch.manual_seed(0)
    module = torch.nn.Module()
    joint = torch.randn(1, TOKENS, Q_HEADS + 2 * K_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    q, k, v = (
        part.transpose(1, 2).detach().requires_grad_() for part in joint.split((Q_HEADS, K_HEADS, K_HEADS), dim=2)
    )
    call = AttentionCall(dtype="bfloat16", head_dim=SIZE)
    record_property("backend", choose_attention(gpu_of(q.device), call).backend)
    out, _ = ftcli_attention_forward(module, q, k, v, None, scaling=SIZE**-0.5)
    upstream = torch.zeros_like(out)
    upstream[:, -LAST:] = torch.randn_like(upstream[:, -LAST:])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    record_property("backward allocates, bytes a token", round(peak / TOKENS))
    # Gradients of q, k and v; those of q once more in float32, of k and v once more for every query head.
    assert peak <= 1.05 * TOKENS * SIZE * (2 * (Q_HEADS + 2 * K_HEADS) + 4 * Q_HEADS + 2 * 2 * Q_HEADS)
    group = Q_HEADS // K_HEADS
    for head in (0, K_HEADS - 1):
        heads = slice(head * group, (head + 1) * group)
        ends = [q[0, heads, -LAST:], k[0, head], v[0, head]]
        leaves = [end.detach().float().requires_grad_() for end in ends]
        wanted = _reference(*leaves)
        exact = torch.autograd.grad(wanted, leaves, upstream[0, -LAST:, heads].transpose(0, 1).float())
        assert _error(out[0, -LAST:, heads].transpose(0, 1), wanted.detach()) < 1e-2
        for found, gradient in zip((dq[0, heads, -LAST:], dk[0, head], dv[0, head]), exact, strict=True):
            assert _error(found, gradient) < 2e-2
    assert int(dq[:, :, :-LAST].count_nonzero()) == 0
