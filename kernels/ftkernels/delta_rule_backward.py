"""Backward of the gated delta rule: the scan back over chunks, and the gradients of what chunks were made of.

The legend is that of ``ftkernels.delta_rule_forward``, whose scan has kept the x and the states; the formulas and their
names are in ``ftkernels.delta_rule``.

The first kernel owns a slice of the values of one value head, walks from the last chunk to the first with the gradient
of the state in registers, and writes dv and that gradient after each chunk. The second has a program for a chunk of a
key head, and adds up the gradients of q and k over its value heads. Neither uses atomics. Where a product's transpose
is needed, it is formed as a product of its own: Triton 3.4 to 3.7.0 miscompile ``dot(trans(accumulator), ...)`` on
Hopper (flash-linear-attention 640).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.delta_rule_forward import (
    CHUNK,
    Chunks,
    DeltaInputs,
    ScanTile,
    documents_of,
    precision_of,
    starts_stride,
    tile_rows,
)
from ftkernels.device import interpreting, on_device_of, store_dtype, triton_store_dtype


@triton.jit
def _scan_back_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    inverse_ptr,
    scores_ptr,
    rows_ptr,
    decay_ptr,
    d_last_ptr,
    dv_ptr,
    d_states_ptr,
    d_first_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    do_stride_b,
    do_stride_s,
    do_stride_h,
    S,
    heads,
    chunks,
    vectors,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line, first_value = tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V) * BLOCK_V
    batch, head = line // heads, line % heads
    key_head = head // GROUP
    place, lane = tl.arange(0, C), line.to(tl.int64)
    square = place[:, None] * C + place[None, :]
    state_at = tl.arange(0, K)[:, None] * V + first_value + tl.arange(0, BLOCK_V)[None, :]
    d_state = tl.zeros((K, BLOCK_V), tl.float32)
    if d_last_ptr is not None:
        d_state = tl.load(d_last_ptr + lane * (K * V) + state_at)
    for back in range(chunks):
        chunk = chunks - 1 - back
        row = chunk * C
        at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
        q = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
        k = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(
            do_ptr, batch, head, row, do_stride_b, do_stride_s, do_stride_h, S, first_value, BLOCK_V, C
        )
        do = tl.load(at, mask=there, other=0.0).to(CD)
        square_at = (lane * chunks + chunk) * (C * C) + square
        rows_at = rows_ptr + lane * (chunks * C) + row + place
        after = d_state.to(CD)
        d_states_at = d_states_ptr + (lane * chunks + chunk) * (K * V) + state_at
        tl.store(d_states_at, d_state.to(d_states_ptr.dtype.element_ty))
        dx = tl.dot(k, after, input_precision=PRECISION) * tl.load(rows_at + 2 * vectors)[:, None]
        dx = tl.dot(tl.trans(tl.load(scores_ptr + square_at).to(CD)), do, dx, input_precision=PRECISION)
        dv = tl.dot(tl.trans(tl.load(inverse_ptr + square_at).to(CD)), dx.to(CD), input_precision=PRECISION)
        at, there = tile_rows(dv_ptr, batch, head, row, S * heads * V, heads * V, V, S, first_value, BLOCK_V, C)
        tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=there)
        d_state *= tl.load(decay_ptr + lane * chunks + chunk)
        seen = (do.to(tl.float32) * tl.load(rows_at + 3 * vectors)[:, None]).to(CD)
        d_state = tl.dot(tl.trans(q), seen, d_state, input_precision=PRECISION)
        taken = (dv * -tl.load(rows_at + vectors)[:, None]).to(CD)
        d_state = tl.dot(tl.trans(k), taken, d_state, input_precision=PRECISION)
    if d_first_ptr is not None:
        tl.store(d_first_ptr + lane * (K * V) + state_at, d_state)


@triton.jit
def _gradient_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    x_ptr,
    dv_ptr,
    states_ptr,
    d_states_ptr,
    rows_ptr,
    norms_ptr,
    decay_ptr,
    starts_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    d_beta_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    do_stride_b,
    do_stride_s,
    do_stride_h,
    starts_stride,
    S,
    key_heads,
    chunks,
    vectors,
    scale,
    NORMALIZE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    chunk, batch, key_head = pid % chunks, pid // chunks // key_heads, pid // chunks % key_heads
    heads = key_heads * GROUP
    row, place = chunk * C, tl.arange(0, C)
    q_at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
    k_at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
    q, k = tl.load(q_at, mask=there, other=0.0).to(CD), tl.load(k_at, mask=there, other=0.0).to(CD)
    norms_at = norms_ptr + (batch * key_heads + key_head).to(tl.int64) * (chunks * C) + row + place
    q_norm = tl.load(norms_at)
    k_norm = tl.load(norms_at + tl.num_programs(0).to(tl.int64) * C)
    document = documents_of(starts_ptr, batch, starts_stride, row, S, C)
    same = document[:, None] == document[None, :]
    seen = same & (place[:, None] >= place[None, :])
    turned_seen = same & (place[:, None] <= place[None, :])
    within = place.to(tl.int64)[:, None] * (heads * V) + tl.arange(0, BLOCK_V)[None, :]
    state_at = tl.arange(0, K)[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
    dq, dk = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        lane = (batch * heads + head).to(tl.int64)
        rows_at = rows_ptr + lane * (chunks * C) + row + place
        total, beta = tl.load(rows_at), tl.load(rows_at + 4 * vectors)
        pair = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        pair *= beta[None, :] * k_norm[None, :]
        turned_pair = tl.exp(tl.where(turned_seen, total[None, :] - total[:, None], float("-inf")))
        turned_pair *= (beta * k_norm)[:, None]
        do_at, _ = tile_rows(do_ptr, batch, head, row, do_stride_b, do_stride_s, do_stride_h, S, 0, BLOCK_V, C)
        token = ((batch.to(tl.int64) * S + row) * heads + head) * V
        x_at, dv_at = x_ptr + token + within, dv_ptr + token + within
        before = states_ptr + (lane * chunks + chunk) * (K * V) + state_at
        after = d_states_ptr + (lane * chunks + chunk) * (K * V) + state_at

        # Through the outputs.
        by_state = tl.zeros((C, K), tl.float32)
        pairs, turned = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        for first in range(0, V, BLOCK_V):
            do = tl.load(do_at + first, mask=there, other=0.0).to(CD)
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            state = tl.load(before + first).to(CD)
            by_state = tl.dot(do, tl.trans(state), by_state, input_precision=PRECISION)
            pairs = tl.dot(do, tl.trans(x), pairs, input_precision=PRECISION)
            turned = tl.dot(x, tl.trans(do), turned, input_precision=PRECISION)
        part = by_state * tl.load(rows_at + 3 * vectors)[:, None]
        part = tl.dot((pairs * pair * q_norm[:, None]).to(CD), k, part, input_precision=PRECISION)
        dq += part
        d_total = tl.sum(q.to(tl.float32) * part, 1)
        column = tl.dot((turned * turned_pair * q_norm[None, :]).to(CD), q, input_precision=PRECISION)

        # Through the values that the state predicts, and the inverse.
        by_state = tl.zeros((C, K), tl.float32)
        pairs, turned = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        d_beta = tl.zeros((C,), tl.float32)
        for first in range(0, V, BLOCK_V):
            dv = tl.load(dv_at + first, mask=there, other=0.0).to(CD)
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            state = tl.load(before + first).to(CD)
            by_state = tl.dot(dv, tl.trans(state), by_state, input_precision=PRECISION)
            pairs = tl.dot(dv, tl.trans(x), pairs, input_precision=PRECISION)
            turned = tl.dot(x, tl.trans(dv), turned, input_precision=PRECISION)
            d_beta += tl.sum(dv.to(tl.float32) * x.to(tl.float32), 1)
        pairs = tl.where(place[:, None] > place[None, :], -pairs * pair * k_norm[:, None], 0.0)
        part = -by_state * tl.load(rows_at + vectors)[:, None]
        part = tl.dot(pairs.to(CD), k, part, input_precision=PRECISION)
        dk += part
        d_total += tl.sum(k.to(tl.float32) * part, 1)
        turned = tl.where(place[:, None] < place[None, :], -turned * turned_pair * k_norm[None, :], 0.0)
        column = tl.dot(turned.to(CD), k, column, input_precision=PRECISION)

        # Through the state that the chunk leaves.
        by_state = tl.zeros((C, K), tl.float32)
        kept = tl.zeros((K,), tl.float32)
        for first in range(0, V, BLOCK_V):
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            d_state = tl.load(after + first).to(CD)
            state = tl.load(before + first).to(tl.float32)
            by_state = tl.dot(x, tl.trans(d_state), by_state, input_precision=PRECISION)
            kept += tl.sum(state * d_state.to(tl.float32), 1)
        part = by_state * tl.load(rows_at + 2 * vectors)[:, None]
        end = tl.sum(tl.sum(k.to(tl.float32) * part, 1), 0)
        end += tl.sum(kept, 0) * tl.load(decay_ptr + lane * chunks + chunk)
        column += part
        dk += column
        d_total -= tl.sum(k.to(tl.float32) * column, 1)
        d_total += tl.where(place == C - 1, end, 0.0)

        dg = tl.sum(tl.where(turned_seen, d_total[None, :], 0.0), 1)
        line = (batch.to(tl.int64) * S + row + place) * heads + head
        tl.store(dg_ptr + line, dg, mask=row + place < S)
        tl.store(d_beta_ptr + line, d_beta / beta, mask=row + place < S)
    if NORMALIZE:
        wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
        q_rate = q_norm * q_norm / (scale * scale)
        dq -= wide_q * (q_rate * tl.sum(wide_q * dq, 1))[:, None]
        dk -= wide_k * (k_norm * k_norm * tl.sum(wide_k * dk, 1))[:, None]
    at, there = tile_rows(dq_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=there)
    at, there = tile_rows(dk_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    tl.store(at, dk.to(dk_ptr.dtype.element_ty), mask=there)


class ScannedBack(NamedTuple):
    """dv (B, S, Hv, V) and the gradients of the states after each chunk (B, Hv, N, K, V), in the operands' dtype; that
    of the first state (B, Hv, K, V), float32, or None.
    """

    dv: Tensor
    d_states: Tensor
    d_first: Tensor | None


def scan_back(
    inputs: DeltaInputs, chunks: Chunks, do: Tensor, d_last: Tensor | None, *, want_first: bool, tile: ScanTile
) -> ScannedBack:
    """Walks back over the chunks from ``d_last`` (B, Hv, K, V), float32 and contiguous, or from zero."""
    batch, length, _, width = inputs.q.shape
    heads, values, device = inputs.v.shape[2], inputs.v.shape[3], inputs.q.device
    stored = store_dtype(inputs.v.dtype)
    made = ScannedBack(
        torch.empty((batch, length, heads, values), dtype=stored, device=device),
        torch.empty((batch, heads, inputs.chunks, width, values), dtype=stored, device=device),
        torch.empty((batch, heads, width, values), dtype=torch.float32, device=device) if want_first else None,
    )
    with on_device_of(do):
        _scan_back_kernel[(batch * heads * (values // tile.values),)](
            inputs.q,
            inputs.k,
            do,
            chunks.inverse,
            chunks.scores,
            chunks.rows,
            chunks.decay,
            d_last,
            made.dv,
            made.d_states,
            made.d_first,
            *inputs.q.stride()[:3],
            *inputs.k.stride()[:3],
            *do.stride()[:3],
            length,
            heads,
            inputs.chunks,
            batch * heads * inputs.chunks * CHUNK,
            GROUP=inputs.group,
            K=width,
            V=values,
            BLOCK_V=tile.values,
            C=CHUNK,
            CD=triton_store_dtype(inputs.q.dtype),
            PRECISION=precision_of(inputs.q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return made


@dataclass(frozen=True, slots=True)
class Kept:
    """The x and the states before each chunk, as ``ftkernels.delta_rule_forward.Scanned``."""

    x: Tensor
    states: Tensor


def gradient_tile(values: int) -> ScanTile:
    """Values that the second kernel multiplies at once, its warps and the stages of its loops."""
    return ScanTile(values, 4, 1) if interpreting() else ScanTile(min(values, 64), 8, 1)


class Gradients(NamedTuple):
    """dq, dk (B, S, Hk, K) in the operands' dtype, dg and d_beta (B, S, Hv) float32."""

    dq: Tensor
    dk: Tensor
    dg: Tensor
    d_beta: Tensor


def gradients(
    inputs: DeltaInputs, chunks: Chunks, kept: Kept, do: Tensor, back: ScannedBack, tile: ScanTile
) -> Gradients:
    """The gradients of q, k, g and beta."""
    batch, length, key_heads, width = inputs.q.shape
    heads, values, device = inputs.v.shape[2], inputs.v.shape[3], inputs.q.device
    stored = store_dtype(inputs.q.dtype)
    made = Gradients(
        torch.empty((batch, length, key_heads, width), dtype=stored, device=device),
        torch.empty((batch, length, key_heads, width), dtype=stored, device=device),
        torch.empty((batch, length, heads), dtype=torch.float32, device=device),
        torch.empty((batch, length, heads), dtype=torch.float32, device=device),
    )
    with on_device_of(do):
        _gradient_kernel[(batch * key_heads * inputs.chunks,)](
            inputs.q,
            inputs.k,
            do,
            kept.x,
            back.dv,
            kept.states,
            back.d_states,
            chunks.rows,
            chunks.norms,
            chunks.decay,
            inputs.starts,
            *made,
            *inputs.q.stride()[:3],
            *inputs.k.stride()[:3],
            *do.stride()[:3],
            starts_stride(inputs),
            length,
            key_heads,
            inputs.chunks,
            batch * heads * inputs.chunks * CHUNK,
            inputs.scale,
            NORMALIZE=inputs.normalize,
            GROUP=inputs.group,
            K=width,
            V=values,
            BLOCK_V=tile.values,
            C=CHUNK,
            CD=triton_store_dtype(inputs.q.dtype),
            PRECISION=precision_of(inputs.q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return made
