"""Backward of the gated delta rule: the scan back over chunks, and the gradients of what chunks were made of.

The legend is that of ``ftkernels.delta_rule_forward``, whose scan has kept the x and the states; the formulas and their
names are in ``ftkernels.delta_rule``.

The first kernel owns a slice of the values of one value head, walks from the last chunk to the first with the gradient
of the state in registers, and writes dv and that gradient after each chunk. Two others have a program for a chunk of
a key head, and add up over its value heads: one what is owed to the later tokens of pairs, dq and a part of dk, and one
what is owed to the earlier. The last, in float32 alone, sums what of the decay's gradient is owed to pairs. None uses
atomics. Where a product's
transpose is needed, it is formed as a product of its own: Triton 3.4 to 3.7.0 miscompile
``dot(trans(accumulator), ...)`` on Hopper (flash-linear-attention 640).
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
    DeltaTiles,
    documents_of,
    precision_of,
    starts_stride,
    tile_rows,
)
from ftkernels.device import on_device_of, store_dtype, triton_store_dtype


@triton.jit
def _scan_back_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    inverse_ptr,
    scores_ptr,
    rows_ptr,
    decay_ptr,
    dv_ptr,
    d_states_ptr,
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
    for back in range(chunks):
        chunk = chunks - 1 - back
        row, kept = chunk * C, tl.load(decay_ptr + lane * chunks + chunk)
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
        d_state *= kept
        seen = (do.to(tl.float32) * tl.load(rows_at + 3 * vectors)[:, None]).to(CD)
        d_state = tl.dot(tl.trans(q), seen, d_state, input_precision=PRECISION)
        taken = (dv * -tl.load(rows_at + vectors)[:, None]).to(CD)
        d_state = tl.dot(tl.trans(k), taken, d_state, input_precision=PRECISION)


@triton.jit
def _later_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    x_ptr,
    dv_ptr,
    states_ptr,
    rows_ptr,
    norms_ptr,
    starts_ptr,
    dq_ptr,
    dk_ptr,
    d_total_ptr,
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
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq and a part of dk of a chunk of a key head, with the later token of a pair as the row, and what the gradient
    of t owes to them; where pairs are ``APART``, what it owes to the state before the chunk.
    """
    pid = tl.program_id(0)
    chunk, batch, key_head = pid % chunks, pid // chunks // key_heads, pid // chunks % key_heads
    heads = key_heads * GROUP
    row, place = chunk * C, tl.arange(0, C)
    q_at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
    k_at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
    norms_at = norms_ptr + (batch * key_heads + key_head).to(tl.int64) * (chunks * C) + row + place
    q_norm = tl.load(norms_at)
    k_norm = tl.load(norms_at + tl.num_programs(0).to(tl.int64) * C)
    document = documents_of(starts_ptr, batch, starts_stride, row, S, C)
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    within = place[:, None] * (heads * V) + tl.arange(0, BLOCK_V)[None, :]
    state_at = tl.arange(0, K)[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
    dq, dk = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        lane = (batch * heads + head).to(tl.int64)
        do_at, _ = tile_rows(do_ptr, batch, head, row, do_stride_b, do_stride_s, do_stride_h, S, 0, BLOCK_V, C)
        token = ((batch.to(tl.int64) * S + row) * heads + head) * V
        x_at, dv_at = x_ptr + token + within, dv_ptr + token + within
        before = states_ptr + (lane * chunks + chunk) * (K * V) + state_at
        rows_at = rows_ptr + lane * (chunks * C) + row + place
        total, beta = tl.load(rows_at), tl.load(rows_at + 4 * vectors)
        pair = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf"))) * (beta * k_norm)[None, :]
        pairs, part = tl.zeros((C, C), tl.float32), tl.zeros((C, K), tl.float32)
        for first in range(0, V, BLOCK_V):
            do = tl.load(do_at + first, mask=there, other=0.0).to(CD)
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            state = tl.load(before + first).to(CD)
            part = tl.dot(do, tl.trans(state), part, input_precision=PRECISION)
            pairs = tl.dot(do, tl.trans(x), pairs, input_precision=PRECISION)
        part *= tl.load(rows_at + 3 * vectors)[:, None]
        if APART:
            d_total = tl.sum(tl.load(q_at, mask=there, other=0.0).to(CD).to(tl.float32) * part, 1)
        # Volatile: else k and q would be held in float32 registers from one head to the next.
        k = tl.load(k_at, mask=there, other=0.0, volatile=True).to(CD)
        part = tl.dot((pairs * pair * q_norm[:, None]).to(CD), k, part, input_precision=PRECISION)
        dq += part
        if not APART:
            q = tl.load(q_at, mask=there, other=0.0, volatile=True).to(CD)
            d_total = tl.sum(q.to(tl.float32) * part, 1)
        pairs, part = tl.zeros((C, C), tl.float32), tl.zeros((C, K), tl.float32)
        for first in range(0, V, BLOCK_V):
            dv = tl.load(dv_at + first, mask=there, other=0.0).to(CD)
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            state = tl.load(before + first).to(CD)
            part = tl.dot(dv, tl.trans(state), part, input_precision=PRECISION)
            pairs = tl.dot(dv, tl.trans(x), pairs, input_precision=PRECISION)
        part *= -tl.load(rows_at + vectors)[:, None]
        pairs = tl.where(place[:, None] > place[None, :], pairs * pair * -k_norm[:, None], 0.0)
        k = tl.load(k_at, mask=there, other=0.0, volatile=True).to(CD)
        if APART:
            d_total += tl.sum(k.to(tl.float32) * part, 1)
        part = tl.dot(pairs.to(CD), k, part, input_precision=PRECISION)
        dk += part
        if not APART:
            d_total += tl.sum(k.to(tl.float32) * part, 1)
        tl.store(d_total_ptr + lane * (chunks * C) + row + place, d_total)
    if NORMALIZE:
        wide = tl.load(q_at, mask=there, other=0.0).to(CD).to(tl.float32)
        dq -= wide * (q_norm * q_norm / (scale * scale) * tl.sum(wide * dq, 1))[:, None]
    at, there = tile_rows(dq_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=there)
    at, there = tile_rows(dk_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    tl.store(at, dk, mask=there)


@triton.jit
def _earlier_kernel(
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
    d_total_ptr,
    part_ptr,
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
    NORMALIZE: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk, dg and d_beta of a chunk of a key head, with the earlier token of a pair as the row. Where pairs are
    ``APART``, their part of dg is there already.
    """
    pid = tl.program_id(0)
    chunk, batch, key_head = pid % chunks, pid // chunks // key_heads, pid // chunks % key_heads
    heads = key_heads * GROUP
    row, place = chunk * C, tl.arange(0, C)
    q_at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
    k_at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
    norms_at = norms_ptr + (batch * key_heads + key_head).to(tl.int64) * (chunks * C) + row + place
    q_norm = tl.load(norms_at)
    k_norm = tl.load(norms_at + tl.num_programs(0).to(tl.int64) * C)
    document = documents_of(starts_ptr, batch, starts_stride, row, S, C)
    same = document[:, None] == document[None, :]
    after_row = same & (place[:, None] <= place[None, :])
    within = place[:, None] * (heads * V) + tl.arange(0, BLOCK_V)[None, :]
    state_at = tl.arange(0, K)[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
    k = tl.load(k_at, mask=there, other=0.0).to(CD)
    part_at, _ = tile_rows(part_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    dk = tl.load(part_at, mask=there, other=0.0)
    for member in range(GROUP):
        head = key_head * GROUP + member
        lane = (batch * heads + head).to(tl.int64)
        rows_at = rows_ptr + lane * (chunks * C) + row + place
        total, beta = tl.load(rows_at), tl.load(rows_at + 4 * vectors)
        do_at, _ = tile_rows(do_ptr, batch, head, row, do_stride_b, do_stride_s, do_stride_h, S, 0, BLOCK_V, C)
        token = ((batch.to(tl.int64) * S + row) * heads + head) * V
        x_at, dv_at = x_ptr + token + within, dv_ptr + token + within
        square = (lane * chunks + chunk) * (K * V)
        before, after = states_ptr + square + state_at, d_states_ptr + square + state_at

        # Through the state that the chunk leaves.
        column, kept = tl.zeros((C, K), tl.float32), tl.zeros((K,), tl.float32)
        for first in range(0, V, BLOCK_V):
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            d_state = tl.load(after + first).to(CD)
            column = tl.dot(x, tl.trans(d_state), column, input_precision=PRECISION)
            kept += tl.sum(tl.load(before + first).to(tl.float32) * d_state.to(tl.float32), 1)
        column *= tl.load(rows_at + 2 * vectors)[:, None]
        left = tl.sum(k.to(tl.float32) * column, 1)
        end = tl.sum(left, 0)
        passed = tl.sum(kept, 0) * tl.load(decay_ptr + lane * chunks + chunk)
        end += passed

        # Through later outputs, and what the inverse gives later tokens.
        by_query, by_key = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        d_beta = tl.zeros((C,), tl.float32)
        for first in range(0, V, BLOCK_V):
            do = tl.load(do_at + first, mask=there, other=0.0).to(CD)
            x = tl.load(x_at + first, mask=there, other=0.0).to(CD)
            dv = tl.load(dv_at + first, mask=there, other=0.0).to(CD)
            by_query = tl.dot(x, tl.trans(do), by_query, input_precision=PRECISION)
            by_key = tl.dot(x, tl.trans(dv), by_key, input_precision=PRECISION)
            d_beta += tl.sum(dv.to(tl.float32) * x.to(tl.float32), 1)
        pair = tl.exp(tl.where(after_row, total[None, :] - total[:, None], float("-inf"))) * (beta * k_norm)[:, None]
        by_query *= pair * q_norm[None, :]
        by_key = tl.where(place[:, None] < place[None, :], -by_key * pair * k_norm[None, :], 0.0)
        q = tl.load(q_at, mask=there, other=0.0).to(CD)
        column = tl.dot(by_query.to(CD), q, column, input_precision=PRECISION)
        column = tl.dot(by_key.to(CD), k, column, input_precision=PRECISION)
        dk += column
        d_total = tl.load(d_total_ptr + lane * (chunks * C) + row + place)
        if not APART:
            d_total -= tl.sum(k.to(tl.float32) * column, 1)
            d_total += tl.where(place == C - 1, end, 0.0)
        line = (batch.to(tl.int64) * S + row + place) * heads + head
        if APART:
            dg = tl.load(dg_ptr + line, mask=row + place < S, other=0.0) + passed
            crossed = tl.where(place[:, None] <= place[None, :], d_total[None, :], left[None, :])
            dg += tl.sum(tl.where(same, crossed, 0.0), 1)
        else:
            dg = tl.sum(tl.where(after_row, d_total[None, :], 0.0), 1)
        tl.store(dg_ptr + line, dg, mask=row + place < S)
        tl.store(d_beta_ptr + line, d_beta / beta, mask=row + place < S)
    if NORMALIZE:
        wide = k.to(tl.float32)
        dk -= wide * (k_norm * k_norm * tl.sum(wide * dk, 1))[:, None]
    at, there = tile_rows(dk_ptr, batch, key_head, row, S * key_heads * K, key_heads * K, K, S, 0, K, C)
    tl.store(at, dk.to(dk_ptr.dtype.element_ty), mask=there)


@triton.jit
def _pairs_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    x_ptr,
    dv_ptr,
    rows_ptr,
    norms_ptr,
    starts_ptr,
    dg_ptr,
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
    heads,
    chunks,
    vectors,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For each token of a chunk of a value head, the sum of dP P + dG G over pairs whose later token is it or comes
    after it, and whose earlier token comes before it.
    """
    line, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head = line // heads, line % heads
    key_head = head // GROUP
    row, place, lane = chunk * C, tl.arange(0, C), line.to(tl.int64)
    by_output, by_value = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, V, BLOCK_V):
        at, there = tile_rows(do_ptr, batch, head, row, do_stride_b, do_stride_s, do_stride_h, S, first, BLOCK_V, C)
        do = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(x_ptr, batch, head, row, S * heads * V, heads * V, V, S, first, BLOCK_V, C)
        x = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(dv_ptr, batch, head, row, S * heads * V, heads * V, V, S, first, BLOCK_V, C)
        dv = tl.load(at, mask=there, other=0.0).to(CD)
        by_output = tl.dot(do, tl.trans(x), by_output, input_precision=PRECISION)
        by_value = tl.dot(dv, tl.trans(x), by_value, input_precision=PRECISION)
    of_query, of_key = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, K, BLOCK_K):
        at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, first, BLOCK_K, C)
        q = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, first, BLOCK_K, C)
        k = tl.load(at, mask=there, other=0.0).to(CD)
        of_query = tl.dot(q, tl.trans(k), of_query, input_precision=PRECISION)
        of_key = tl.dot(k, tl.trans(k), of_key, input_precision=PRECISION)
    norms_at = norms_ptr + (batch * (heads // GROUP) + key_head).to(tl.int64) * (chunks * C) + row + place
    q_norm, k_norm = tl.load(norms_at), tl.load(norms_at + vectors // GROUP)
    rows_at = rows_ptr + lane * (chunks * C) + row + place
    total, beta = tl.load(rows_at), tl.load(rows_at + 4 * vectors)
    document, later = documents_of(starts_ptr, batch, starts_stride, row, S, C), place[:, None] > place[None, :]
    apart = tl.where(later & (document[:, None] == document[None, :]), total[:, None] - total[None, :], float("-inf"))
    owed = by_output * of_query * q_norm[:, None] - by_value * of_key * k_norm[:, None]
    owed *= tl.exp(apart) * (beta * k_norm)[None, :]
    owed = tl.dot(tl.where(later, 0.0, 1.0), owed, input_precision=PRECISION)
    at = (batch.to(tl.int64) * S + row + place) * heads + head
    tl.store(dg_ptr + at, tl.sum(tl.where(later, owed, 0.0), 1), mask=row + place < S)


class ScannedBack(NamedTuple):
    """dv (B, S, Hv, V) and the gradients of the states after each chunk (B, Hv, N, K, V), in the operands' dtype."""

    dv: Tensor
    d_states: Tensor


def scan_back(inputs: DeltaInputs, chunks: Chunks, do: Tensor, tiles: DeltaTiles) -> ScannedBack:
    """Walks back over the chunks."""
    batch, length, _, width = inputs.q.shape
    heads, values, device = inputs.v.shape[2], inputs.v.shape[3], inputs.q.device
    stored, tile = store_dtype(inputs.v.dtype), tiles.back
    made = ScannedBack(
        torch.empty((batch, length, heads, values), dtype=stored, device=device),
        torch.empty((batch, heads, inputs.chunks, width, values), dtype=stored, device=device),
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
            made.dv,
            made.d_states,
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


class Gradients(NamedTuple):
    """dq, dk (B, S, Hk, K) in the operands' dtype, dg and d_beta (B, S, Hv) float32."""

    dq: Tensor
    dk: Tensor
    dg: Tensor
    d_beta: Tensor


def gradients(
    inputs: DeltaInputs, chunks: Chunks, kept: Kept, do: Tensor, back: ScannedBack, tiles: DeltaTiles
) -> Gradients:
    """The gradients of q, k, g and beta."""
    batch, length, key_heads, width = inputs.q.shape
    heads, values, device = inputs.v.shape[2], inputs.v.shape[3], inputs.q.device
    stored, float32 = store_dtype(inputs.q.dtype), torch.float32
    made = Gradients(
        torch.empty((batch, length, key_heads, width), dtype=stored, device=device),
        torch.empty((batch, length, key_heads, width), dtype=stored, device=device),
        torch.empty((batch, length, heads), dtype=float32, device=device),
        torch.empty((batch, length, heads), dtype=float32, device=device),
    )
    part = torch.empty((batch, length, key_heads, width), dtype=float32, device=device)
    d_total = torch.empty((batch * heads, inputs.chunks * CHUNK), dtype=float32, device=device)
    apart = inputs.q.dtype == float32
    strides = (
        *(stride for tensor in (inputs.q, inputs.k, do) for stride in tensor.stride()[:3]),
        starts_stride(inputs),
        length,
    )
    parts = inputs.chunks, batch * heads * inputs.chunks * CHUNK
    sizes = *strides, key_heads, *parts
    common = {
        "GROUP": inputs.group,
        "K": width,
        "V": values,
        "C": CHUNK,
        "CD": triton_store_dtype(inputs.q.dtype),
        "PRECISION": precision_of(inputs.q.dtype),
    }
    constants = {**common, "NORMALIZE": inputs.normalize, "APART": apart}
    grid = (batch * key_heads * inputs.chunks,)
    with on_device_of(do):
        if apart:
            _pairs_kernel[(batch * heads * inputs.chunks,)](
                inputs.q,
                inputs.k,
                do,
                kept.x,
                back.dv,
                chunks.rows,
                chunks.norms,
                inputs.starts,
                made.dg,
                *strides,
                heads,
                *parts,
                BLOCK_K=min(width, tiles.earlier.values),
                BLOCK_V=tiles.earlier.values,
                num_warps=tiles.earlier.warps,
                **common,
            )
        _later_kernel[grid](
            inputs.q,
            inputs.k,
            do,
            kept.x,
            back.dv,
            kept.states,
            chunks.rows,
            chunks.norms,
            inputs.starts,
            made.dq,
            part,
            d_total,
            *sizes,
            inputs.scale,
            BLOCK_V=tiles.later.values,
            num_warps=tiles.later.warps,
            num_stages=tiles.later.stages,
            **constants,
        )
        _earlier_kernel[grid](
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
            d_total,
            part,
            made.dk,
            made.dg,
            made.d_beta,
            *sizes,
            BLOCK_V=tiles.earlier.values,
            num_warps=tiles.earlier.warps,
            num_stages=tiles.earlier.stages,
            **constants,
        )
    return made
