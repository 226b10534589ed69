"""Kernels of products whose rows belong to groups, each with a matrix of its own. Formulas: ``ftkernels.grouped``.

Rows lie sorted by group. A tile's rows are those of one group: ``tiles`` (count, 2) names for each tile its group, or
-1 where there is none, and its first row. All sizes are known before; only the groups' edges are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.primitives import gated_unit


@triton.jit
def tiles_kernel(edges_ptr, tiles_ptr, G, count, BM: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr):
    """tiles (count, 2) int32 from edges (G + 1,): tiles of BM rows, none of which holds rows of two groups."""
    g = tl.arange(0, BG)
    first = tl.load(edges_ptr + g, mask=g < G, other=0).to(tl.int32)
    last = tl.load(edges_ptr + g + 1, mask=g < G, other=0).to(tl.int32)
    has = tl.where(g < G, (last - first + BM - 1) // BM, 0)
    ends = tl.cumsum(has, 0)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    group = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    own = g[None, :] == group[:, None]
    begin = tl.sum(tl.where(own, (ends - has)[None, :], 0), 1)
    row = tl.sum(tl.where(own, first[None, :], 0), 1) + (t - begin) * BM
    group = tl.where(group < G, group, -1)
    tl.store(tiles_ptr + t * 2, group, mask=t < count)
    tl.store(tiles_ptr + t * 2 + 1, row, mask=t < count)


@triton.jit
def _rows_of(tiles_ptr, edges_ptr, index_ptr, tile, group, GATHER: tl.constexpr, BM: tl.constexpr):
    """(rows (BM,), which of them there are, and the rows of the operand that they read) of a tile."""
    row0 = tl.load(tiles_ptr + tile * 2 + 1)
    end = tl.load(edges_ptr + group + 1).to(tl.int32)
    rows = row0 + tl.arange(0, BM)
    ok = rows < end
    rows = tl.where(ok, rows, row0)  # every address that is formed is one of a row that there is
    source = tl.load(index_ptr + rows) if GATHER else rows
    return rows, ok, source


@triton.jit
def _product(
    x_ptr, x_stride, source, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, group, rows, n, n_ok,
    N, K,
    LOW: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr,
    DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile (BM, BN) of x @ W_g + thin @ wide_g + bias_g: columns ``n`` (BN,), of which there are ``n_ok``."""
    k = tl.arange(0, BK)
    acc = tl.full((BM, BN), 0.0, ACC)
    x = x_ptr + source.to(tl.int64)[:, None] * x_stride + k[None, :]
    w = w_ptr + group.to(tl.int64) * w_group
    within = k[:, None] * w_k + n[None, :] * w_n  # below 2**31: of one matrix
    for block in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        k_ok = (block * BK + k < K) | EVEN_K
        a = tl.load(x, mask=k_ok[None, :], other=0.0)
        b = tl.load(w + within, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
        acc = tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")
        x += BK
        w += BK * w_k
    if LOW:
        r = tl.arange(0, R)
        a = tl.load(thin_ptr + rows.to(tl.int64)[:, None] * R + r[None, :])
        b_at = wide_ptr + (group.to(tl.int64) * R + r[:, None]) * wide_stride + n[None, :]
        b = tl.load(b_at, mask=n_ok[None, :], other=0.0)
        acc = tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + group.to(tl.int64) * N + n, mask=n_ok, other=0.0).to(ACC)[None, :]
    return acc


@triton.jit
def product_kernel(
    x_ptr, x_stride, index_ptr, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, y_ptr, tiles_ptr,
    edges_ptr, N, K, n_tiles,
    GATHER: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y[i] = x[i] @ W_g, W_g (K, N) by its strides, plus thin[i] (R,) @ wide_g (R, N), plus bias_g (N,)."""
    tile, part = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    group = tl.load(tiles_ptr + tile * 2)
    if group >= 0:
        rows, ok, source = _rows_of(tiles_ptr, edges_ptr, index_ptr, tile, group, GATHER, BM)
        n = part * BN + tl.arange(0, BN)
        n_ok = (n < N) | EVEN_N
        acc = _product(
            x_ptr, x_stride, source, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, group, rows,
            n, n_ok, N, K, LOW, R, BIAS, EVEN_K, ACC, DOT, BM, BN, BK, STAGES,
        )  # fmt: skip
        y = y_ptr + rows.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=ok[:, None] & n_ok[None, :])


@triton.jit
def interleaved_unit_kernel(
    x_ptr, x_stride, index_ptr, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, both_ptr, h_ptr,
    tiles_ptr, edges_ptr, F, K, n_tiles,
    UNIT: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`unit_kernel` where even columns of W_g (2F, K), wide_g and ``both`` are the gate's, odd ones the up's.

    A tile of the product has BN columns of both together.
    """
    tile, part = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    group = tl.load(tiles_ptr + tile * 2)
    if group >= 0:
        rows, ok, source = _rows_of(tiles_ptr, edges_ptr, index_ptr, tile, group, True, BM)
        n = part * BN + tl.arange(0, BN)
        n_ok = (n < 2 * F) | EVEN_N
        acc = _product(
            x_ptr, x_stride, source, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, group, rows,
            n, n_ok, 2 * F, K, LOW, R, BIAS, EVEN_K, ACC, DOT, BM, BN, BK, STAGES,
        ).to(DOT)  # fmt: skip
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        value, _, _ = gated_unit(gate.to(ACC), up.to(ACC), UNIT)
        # Addresses are a 64-bit scalar and 32-bit offsets: fewer registers.
        row0, m = tl.load(tiles_ptr + tile * 2 + 1).to(tl.int64), tl.arange(0, BM)[:, None]
        f = part * (BN // 2) + tl.arange(0, BN // 2)
        h = h_ptr + row0 * F + (m * F + f[None, :])
        tl.store(h, value.to(h_ptr.dtype.element_ty), mask=ok[:, None] & ((f < F) | EVEN_N)[None, :])
        if KEEP:
            both = both_ptr + row0 * (2 * F) + (m * (2 * F) + n[None, :])
            tl.store(both, acc.to(both_ptr.dtype.element_ty), mask=ok[:, None] & n_ok[None, :])


@triton.jit
def unit_kernel(
    x_ptr, x_stride, index_ptr, w_ptr, w_group, w_n, w_k, thin_ptr, wide_ptr, wide_stride, bias_ptr, both_ptr, h_ptr,
    tiles_ptr, edges_ptr, F, K, n_tiles,
    UNIT: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """both[i] = [g | u] = x[index[i]] @ W_g.T + thin[i] @ wide_g + bias_g, W_g (2F, K) by its strides, wide (G, R, 2F);
    h[i] is the unit of both. With KEEP ``both`` (rows, 2F) is written.
    """
    tile, part = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    group = tl.load(tiles_ptr + tile * 2)
    if group >= 0:
        rows, ok, source = _rows_of(tiles_ptr, edges_ptr, index_ptr, tile, group, True, BM)
        n = part * BN + tl.arange(0, BN)
        n_ok = (n < F) | EVEN_N
        k = tl.arange(0, BK)
        gate = tl.full((BM, BN), 0.0, ACC)
        up = tl.full((BM, BN), 0.0, ACC)
        x = x_ptr + source.to(tl.int64)[:, None] * x_stride + k[None, :]
        w = w_ptr + group.to(tl.int64) * w_group + k[:, None] * w_k + n[None, :] * w_n
        behind = tl.cast(F, tl.int64) * w_n
        for block in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
            k_ok = (block * BK + k < K) | EVEN_K
            a = tl.load(x, mask=k_ok[None, :], other=0.0).to(DOT)
            b = tl.load(w, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
            c = tl.load(w + behind, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
            gate = tl.dot(a, b.to(DOT), gate, input_precision="ieee")
            up = tl.dot(a, c.to(DOT), up, input_precision="ieee")
            x += BK
            w += BK * w_k
        if LOW:
            r = tl.arange(0, R)
            a = tl.load(thin_ptr + rows.to(tl.int64)[:, None] * R + r[None, :]).to(DOT)
            b_at = wide_ptr + (group.to(tl.int64) * R + r[:, None]) * wide_stride + n[None, :]
            b = tl.load(b_at, mask=n_ok[None, :], other=0.0)
            c = tl.load(b_at + F, mask=n_ok[None, :], other=0.0)
            gate = tl.dot(a, b.to(DOT), gate, input_precision="ieee")
            up = tl.dot(a, c.to(DOT), up, input_precision="ieee")
        if BIAS:
            bias = bias_ptr + group.to(tl.int64) * (2 * F) + n
            gate += tl.load(bias, mask=n_ok, other=0.0).to(ACC)[None, :]
            up += tl.load(bias + F, mask=n_ok, other=0.0).to(ACC)[None, :]
        mask = ok[:, None] & n_ok[None, :]
        # The unit is that of the rounded outputs, as backward reads them.
        gate, up = gate.to(DOT), up.to(DOT)
        if KEEP:
            both = both_ptr + rows.to(tl.int64)[:, None] * (2 * F) + n[None, :]
            tl.store(both, gate.to(both_ptr.dtype.element_ty), mask=mask)
            tl.store(both + F, up.to(both_ptr.dtype.element_ty), mask=mask)
        value, _, _ = gated_unit(gate.to(ACC), up.to(ACC), UNIT)
        h = h_ptr + rows.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(h, value.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def thin_kernel(
    x_ptr, x_stride, index_ptr, f_ptr, y_ptr, tiles_ptr, edges_ptr, K,
    GATHER: tl.constexpr, R: tl.constexpr, EVEN_K: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[i] (R,) = x[i] @ F_g.T, F (G, R, K)."""
    tile = tl.program_id(0)
    group = tl.load(tiles_ptr + tile * 2)
    if group >= 0:
        rows, ok, source = _rows_of(tiles_ptr, edges_ptr, index_ptr, tile, group, GATHER, BM)
        r = tl.arange(0, R)
        k = tl.arange(0, BK)
        acc = tl.full((BM, R), 0.0, ACC)
        x = x_ptr + source.to(tl.int64)[:, None] * x_stride + k[None, :]
        f = f_ptr + (group.to(tl.int64) * R + r[None, :]) * K + k[:, None]
        for block in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
            k_ok = (block * BK + k < K) | EVEN_K
            a = tl.load(x, mask=k_ok[None, :], other=0.0)
            b = tl.load(f, mask=k_ok[:, None], other=0.0)
            acc = tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")
            x += BK
            f += BK
        y = y_ptr + rows.to(tl.int64)[:, None] * R + r[None, :]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def outer_kernel(
    thin_ptr, wide_ptr, wide_stride, index_ptr, edges_ptr, out_ptr, N,
    GATHER: tl.constexpr, R: tl.constexpr, EVEN_N: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out_g (R, N) = sum over the group's rows of thin[i] (R,) times wide[i] (N,). A program has a group's columns."""
    group = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = (n < N) | EVEN_N
    first = tl.load(edges_ptr + group).to(tl.int32)
    end = tl.load(edges_ptr + group + 1).to(tl.int32)
    r = tl.arange(0, R)
    m = tl.arange(0, BM)
    acc = tl.full((BN, R), 0.0, ACC)
    for block in tl.range(0, tl.cdiv(end - first, BM), num_stages=STAGES):
        rows = first + block * BM + m
        ok = rows < end
        rows = tl.where(ok, rows, first)
        source = tl.load(index_ptr + rows) if GATHER else rows
        a = tl.load(thin_ptr + rows.to(tl.int64)[:, None] * R + r[None, :], mask=ok[:, None], other=0.0)
        b_at = wide_ptr + source.to(tl.int64)[:, None] * wide_stride + n[None, :]
        b = tl.load(b_at, mask=ok[:, None] & n_ok[None, :], other=0.0)
        acc = tl.dot(tl.trans(b.to(DOT)), a.to(DOT), acc, input_precision="ieee")
    out = out_ptr + (group.to(tl.int64) * R + r[None, :]) * N + n[:, None]
    tl.store(out, acc, mask=n_ok[:, None])


@triton.jit
def weight_kernel(
    left_ptr, left_stride, left_index_ptr, right_ptr, right_stride, right_index_ptr, edges_ptr, out_ptr, A, B, parts_a,
    parts_b,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, EVEN_A: tl.constexpr, EVEN_B: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out_g (A, B) = sum over the group's rows of left[i] (A,) times right[i] (B,). A program has a group's tile."""
    program = tl.program_id(0)
    group, tile = program // (parts_a * parts_b), program % (parts_a * parts_b)
    a = (tile // parts_b) * BA + tl.arange(0, BA)
    b = (tile % parts_b) * BB + tl.arange(0, BB)
    a_ok, b_ok = (a < A) | EVEN_A, (b < B) | EVEN_B
    first = tl.load(edges_ptr + group).to(tl.int32)
    end = tl.load(edges_ptr + group + 1).to(tl.int32)
    m = tl.arange(0, BM)
    acc = tl.full((BA, BB), 0.0, ACC)
    for block in tl.range(0, tl.cdiv(end - first, BM), num_stages=STAGES):
        rows = first + block * BM + m
        ok = rows < end
        rows = tl.where(ok, rows, first)
        at_left = tl.load(left_index_ptr + rows) if GATHER_LEFT else rows
        at_right = tl.load(right_index_ptr + rows) if GATHER_RIGHT else rows
        left_at = left_ptr + at_left.to(tl.int64)[:, None] * left_stride + a[None, :]
        right_at = right_ptr + at_right.to(tl.int64)[:, None] * right_stride + b[None, :]
        left = tl.load(left_at, mask=ok[:, None] & a_ok[None, :], other=0.0)
        right = tl.load(right_at, mask=ok[:, None] & b_ok[None, :], other=0.0)
        acc = tl.dot(tl.trans(left.to(DOT)), right.to(DOT), acc, input_precision="ieee")
    out = out_ptr + (group.to(tl.int64) * A + a[:, None]) * B + b[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=a_ok[:, None] & b_ok[None, :])


@triton.jit
def unit_backward_kernel(
    dh_ptr, both_ptr, index_ptr, weight_ptr, d_both_ptr, wh_ptr, dw_ptr, F,
    UNIT: tl.constexpr, INTERLEAVED: tl.constexpr, WANT_H: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A row: dh is of the unweighted output. d_both = weight * d[g | u]; wh = weight * h; dw = <dh, h>.

    d_both may be both, and wh may be dh: a row is read before it is written.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + tl.load(index_ptr + row)).to(ACC)
    n = tl.arange(0, BN)
    ok = n < F
    both = tl.arange(0, 2 * BN)  # of a row in which gate and up take turns
    if INTERLEAVED:
        pair = tl.load(both_ptr + row * (2 * F) + both, mask=both < 2 * F, other=0.0).to(ACC)
        g, u = tl.split(tl.reshape(pair, (BN, 2)))
    else:
        g = tl.load(both_ptr + row * (2 * F) + n, mask=ok, other=0.0).to(ACC)
        u = tl.load(both_ptr + row * (2 * F) + F + n, mask=ok, other=0.0).to(ACC)
    dh = tl.load(dh_ptr + row * F + n, mask=ok, other=0.0).to(ACC)
    h, by_gate, by_up = gated_unit(g, u, UNIT)
    tl.store(dw_ptr + tl.load(index_ptr + row), tl.sum(dh * h, 0))
    d_gate, d_up = weight * dh * by_gate, weight * dh * by_up
    if INTERLEAVED:
        pair = tl.reshape(tl.join(d_gate, d_up), (2 * BN,))
        tl.store(d_both_ptr + row * (2 * F) + both, pair.to(d_both_ptr.dtype.element_ty), mask=both < 2 * F)
    else:
        d_at = d_both_ptr + row * (2 * F) + n
        tl.store(d_at, d_gate.to(d_both_ptr.dtype.element_ty), mask=ok)
        tl.store(d_at + F, d_up.to(d_both_ptr.dtype.element_ty), mask=ok)
    if WANT_H:
        tl.store(wh_ptr + row * F + n, (weight * h).to(wh_ptr.dtype.element_ty), mask=ok)


@triton.jit
def sum_kernel(
    y_ptr, place_ptr, weight_ptr, added_ptr, out_ptr, N,
    TOP: tl.constexpr, WEIGHTED: tl.constexpr, ADDS: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over its TOP places of weight * y[place], in their order, and added[t]."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = n < N
    acc = tl.full((BN,), 0.0, ACC)
    for top in tl.static_range(TOP):
        place = tl.load(place_ptr + token * TOP + top).to(tl.int64)
        y = tl.load(y_ptr + place * N + n, mask=ok, other=0.0).to(ACC)
        if WEIGHTED:
            y *= tl.load(weight_ptr + token * TOP + top).to(ACC)
        acc += y
    if ADDS:
        acc += tl.load(added_ptr + token * N + n, mask=ok, other=0.0).to(ACC)
    tl.store(out_ptr + token * N + n, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def turn_kernel(
    from_ptr, from_0, from_1, to_ptr, to_0, to_1, A, C, scale, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """to[c, r, a] = scale * from[a, r, c] for from (A, R, C): last dimensions contiguous, others by their strides."""
    r = tl.program_id(2).to(tl.int64)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = (a[:, None] < A) & (c[None, :] < C)
    x = tl.load(from_ptr + a.to(tl.int64)[:, None] * from_0 + r * from_1 + c[None, :], mask=ok, other=0.0).to(ACC)
    y = tl.trans(x * scale).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + c.to(tl.int64)[:, None] * to_0 + r * to_1 + a[None, :], y, mask=tl.trans(ok))
