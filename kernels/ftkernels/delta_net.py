"""All of a gated delta net between its projections: filter, delta rule, gated norm, as one operation.

Legend: B batch, S tokens, Hk key heads, Hv value heads, K and V head sizes. What enters stands side by side, as one
product of the projections gives it (``ftkernels.lora_group``):

    joined = [q | k | v | z | b | a]          (B, S, 2 Hk K + 2 Hv V + 2 Hv)

    q, k, v = silu(conv([q | k | v]))         ``ftkernels.causal_conv``
    g, beta = gates(a, b)                     ``ftkernels.delta_gates``
    o = delta_rule(q, k, v, g, beta)          ``ftkernels.delta_rule``, q and k normalized
    y = w norm(o) silu(z)                     ``ftkernels.delta_gates``

Kept for backward: ``joined``, o, g and beta. The filter runs again there, which costs a reading and a writing of q, k
and v; every gradient is written where it belongs in that of ``joined``, so that none is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels import causal_conv, delta_gates
from ftkernels.delta_rule import delta_rule, delta_rule_backend
from ftkernels.delta_rule_backward import Kept, gradients, scan_back
from ftkernels.delta_rule_forward import DeltaInputs, DeltaTiles, delta_tiles, prepare, scan
from ftkernels.device import BackendName, rounded, store_dtype


@dataclass(frozen=True, slots=True)
class NetSizes:
    """Hk, Hv, K and V of the module docstring."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def parts(self) -> tuple[int, int, int, int, int, int]:
        """Columns of q, k, v, z, b and a."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return keys, keys, values, values, self.value_heads, self.value_heads


@dataclass(frozen=True, slots=True)
class NetWeights:
    """The weights of a net beside its projections: filter (C, W) and its bias (C,) or None, C = 2 Hk K + Hv V; A_log
    and dt_bias (Hv,); the norm's weight (V,) and epsilon.
    """

    filter: Tensor
    filter_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class NetParts(NamedTuple):
    """Views of ``joined``: queries, keys and values before the filter (..., C), the output's gate by head (..., Hv, V),
    write strengths and decays (..., Hv).
    """

    mixed: Tensor
    gate: Tensor
    strength: Tensor
    decay: Tensor


def parts_of(joined: Tensor, sizes: NetSizes) -> NetParts:
    """The parts of (..., the sum of ``sizes.parts``)."""
    q, k, v, z, b, a = sizes.parts
    mixed, gate, strength, decay = torch.split(joined, [q + k + v, z, b, a], dim=-1)
    return NetParts(mixed, gate.unflatten(-1, (sizes.value_heads, sizes.value_size)), strength, decay)


def heads_of(filtered: Tensor, sizes: NetSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head of what the filter gives (..., C)."""
    q, k, v = torch.split(filtered, sizes.parts[:3], dim=-1)
    keys = (sizes.key_heads, sizes.key_size)
    return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (sizes.value_heads, sizes.value_size))


def delta_net(
    joined: Tensor,
    weights: NetWeights,
    sizes: NetSizes,
    *,
    starts: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """(B, S, Hv * V), contiguous, in the dtype of ``joined``; the module docstring has the formulas.

    Args:
        joined: (B, S, the sum of ``sizes.parts``); copied unless contiguous.
        starts: (B or 1, S) int32: for each token the index of its document's first token. None: one document a row.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(joined, weights, sizes)
    heads = joined[..., : sizes.key_size], joined[..., : sizes.value_size]  # as the choice asks for their size
    if not delta_rule_backend(*heads, backend).is_triton or not joined.numel():
        return delta_net_reference(joined, weights, sizes, starts=starts)
    w = weights
    given = (w.filter, w.filter_bias, w.a_log, w.dt_bias, w.norm)
    out: Tensor = _DeltaNet.apply(joined, *given, sizes, w.eps, starts)  # type: ignore[no-untyped-call]
    return out


def delta_net_reference(
    joined: Tensor, weights: NetWeights, sizes: NetSizes, *, starts: Tensor | None = None
) -> Tensor:
    """The same in plain torch, differentiable."""
    _check(joined, weights, sizes)
    mixed, gate, strength, decay = parts_of(joined, sizes)
    filtered = causal_conv.causal_conv_reference(mixed, weights.filter, weights.filter_bias, starts=starts)
    gates = delta_gates.delta_gates_reference(decay, strength, weights.a_log, weights.dt_bias)
    out = delta_rule(*heads_of(filtered, sizes), *gates, starts=starts, backend="torch")
    return delta_gates.gated_norm_reference(out, gate, weights.norm, weights.eps).flatten(-2)


def _check(joined: Tensor, weights: NetWeights, sizes: NetSizes) -> None:
    if joined.dim() != 3 or joined.shape[-1] != sum(sizes.parts):
        raise ValueError(f"{tuple(joined.shape)} is not (B, S, {sum(sizes.parts)}), side by side {sizes.parts}")
    if weights.filter.shape[0] != sum(sizes.parts[:3]) or weights.norm.shape != (sizes.value_size,):
        found = tuple(weights.filter.shape), tuple(weights.norm.shape)
        raise ValueError(f"filter and norm {found} are not of {sum(sizes.parts[:3])} and {sizes.value_size} features")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call on the kernels: ``joined`` by its parts."""

    joined: Tensor
    sizes: NetSizes
    starts: Tensor | None

    def rule(self, filtered: Tensor, g: Tensor, beta: Tensor) -> tuple[DeltaInputs, DeltaTiles]:
        """The delta rule's operands."""
        s = self.sizes
        heads = heads_of(filtered, s)
        inputs = DeltaInputs(*heads, g, beta, self.starts, s.key_size**-0.5, normalize=True)
        return inputs, delta_tiles(s.value_size, filtered.dtype)


class _DeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        sizes: NetSizes,
        eps: float,
        starts: Tensor | None,
    ) -> Tensor:
        joined = joined.contiguous()
        call = _Call(joined, sizes, None if starts is None else starts.contiguous())
        _, z, b, a = parts_of(joined, sizes)
        gates = delta_gates.Gates(*(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2)))
        delta_gates.launch_gates((a, b, a_log, dt_bias), gates, None)
        inputs, tiles = call.rule(_filtered(call, weight, bias), *gates)
        made = scan(inputs, prepare(inputs, tiles), keep=False, tiles=tiles)
        assert made.out is not None
        attended = rounded(made.out, joined.dtype)
        out = torch.empty(attended.shape, dtype=store_dtype(joined.dtype), device=joined.device)
        delta_gates.launch_norm(attended, z, None, norm, eps, out, out, want_dw=False)
        ctx.save_for_backward(joined, weight, bias, a_log, dt_bias, norm, *gates, attended, starts)
        ctx.sizes, ctx.eps = sizes, eps
        return rounded(out, joined.dtype).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        joined, weight, bias, a_log, dt_bias, norm, g, beta, attended, starts = ctx.saved_tensors
        call = _Call(joined, ctx.sizes, None if starts is None else starts.contiguous())
        _, z, b, a = parts_of(joined, ctx.sizes)
        d_joined = torch.empty(joined.shape, dtype=store_dtype(joined.dtype), device=joined.device)
        _, dz, db, da = parts_of(d_joined, ctx.sizes)
        do = torch.empty(attended.shape, dtype=store_dtype(joined.dtype), device=joined.device)
        want_norm = ctx.needs_input_grad[5]
        dy = dy.unflatten(-1, attended.shape[-2:])
        d_norm = delta_gates.launch_norm(attended, z, dy, norm, ctx.eps, do, dz, want_dw=want_norm)
        grads = _rule_backward(call, _filtered(call, weight, bias), g, beta, rounded(do, joined.dtype))
        rates = delta_gates.launch_gates(
            (a, b, a_log, dt_bias), delta_gates.Gates(*grads[3:]), delta_gates.Gates(da, db)
        )
        want_filter = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        taps, first = [], 0
        for part, size in zip(grads[:3], ctx.sizes.parts[:3], strict=True):
            own = slice(first, first + size)
            bias_part = None if bias is None else bias[own]
            given = (joined[..., own], weight[own], bias_part, call.starts, part.flatten(-2))
            taps.append(causal_conv.backward(*given, want_dw=want_filter, into=d_joined[..., own])[1])
            first += size
        d_filter = torch.cat([tap for tap in taps if tap is not None]) if want_filter else None
        return (
            rounded(d_joined, joined.dtype),
            d_filter[:, :-1].to(weight.dtype) if d_filter is not None and ctx.needs_input_grad[1] else None,
            d_filter[:, -1].to(bias.dtype) if d_filter is not None and ctx.needs_input_grad[2] else None,
            rates[0].to(a_log.dtype),
            rates[1].to(dt_bias.dtype),
            None if d_norm is None else d_norm.to(norm.dtype),
            *[None] * 3,
        )


def _filtered(call: _Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The filter's output, made in forward and again in backward."""
    return rounded(
        causal_conv.forward(parts_of(call.joined, call.sizes).mixed, weight, bias, call.starts), call.joined.dtype
    )


def _rule_backward(call: _Call, filtered: Tensor, g: Tensor, beta: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv by head in the dtype of their tensors, dg and d_beta in float32."""
    inputs, tiles = call.rule(filtered, g, beta)
    chunks = prepare(inputs, tiles)
    again = scan(inputs, chunks, keep=True, tiles=tiles)
    assert again.x is not None
    assert again.states is not None
    back = scan_back(inputs, chunks, do, tiles)
    made = gradients(inputs, chunks, Kept(again.x, again.states), do, back, tiles)
    return (*(rounded(t, filtered.dtype) for t in (made.dq, made.dk, back.dv)), made.dg, made.d_beta)
