"""Gated linear units: ``h = act(gate) * up`` for silu (SwiGLU), gelu_tanh and gelu (GEGLU), and relu2.

Legend: M rows, F intermediate size, K padded LoRA rank.

    h  = act(g) * u
    dg = dh * u * act'(g)
    du = dh * act(g)

All in float32 with one rounding when stored. Backward reads g, u and dh, and rebuilds h, which is therefore not saved.

The same kernels carry the low-rank terms of a LoRA MLP, so that no term costs a pass over an (M, F) tensor of its own:

    forward     g = g0 + xa_g @ B_g.T       u = u0 + xa_u @ B_u.T       ha = h @ A_d.T
    backward    dh = dh0 + dya @ A_d        dxa_g = dg @ B_g            dxa_u = du @ B_u

g0 and u0 are the base projections; they are what is saved, and g and u are formed again in backward. Column sums (ha,
dxa) are float32 partial sums a program, added in a fixed order afterwards: nothing is atomic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendName,
    Tile,
    accumulate_dtype,
    choose_backend,
    gpu_of,
    on_device_of,
    rounded,
    store_dtype,
    tile_for,
    triton_dtype,
    triton_store_dtype,
)
from ftkernels.limits import Activation
from ftkernels.primitives import activate, row_sums

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def glu(gate: Tensor, up: Tensor, activation: Activation, *, backend: BackendName = "auto") -> Tensor:
    """``act(gate) * up``, contiguous, in the dtype the two promote to.

    Args:
        gate: (..., F); the last dimension contiguous and the rest one stride (a slice of a fused projection) is not
            copied.
        up: of ``gate``'s shape.
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (relu squared).

    Raises:
        ValueError: shapes that differ, or an unknown activation.
    """
    _check(gate, up, activation)
    if not choose_backend(gate.device, backend).is_triton:
        return glu_reference(gate, up, activation)
    return _Glu.apply(gate, up, activation)


def glu_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same in plain torch, differentiable; float32 inside (float64 for float64), one rounding."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    acc = accumulate_dtype(dtype)
    return (activation_reference(gate.to(acc), activation) * up.to(acc)).to(dtype)


def activation_reference(x: Tensor, activation: Activation) -> Tensor:
    """act(x) in plain torch."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def glu_backward_torch(dh: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """(dgate beside dup (M, 2 * F), h (M, F)) in dh's dtype, in plain torch without autograd. All inputs (M, F)."""
    acc = accumulate_dtype(dh.dtype)
    g, u, d = gate.to(acc), up.to(acc), dh.to(acc)
    value = activation_reference(g, activation)
    if activation == "silu":
        dg = torch.ops.aten.silu_backward(d * u, g)
    elif activation == "relu2":
        dg = d * u * 2.0 * F.relu(g)
    else:
        dg = torch.ops.aten.gelu_backward(d * u, g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.cat((dg, d * value), dim=1).to(dh.dtype), (value * u).to(dh.dtype)


class _Glu(torch.autograd.Function):
    """Saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        dtype = torch.promote_types(gate.dtype, up.dtype)
        h, _ = glu_forward(_matrix(gate, dtype), _matrix(up, dtype), activation)
        return h.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dtype = dh.dtype
        gate_2d, up_2d = _matrix(gate, dtype), _matrix(up, dtype)
        d_both, _, _ = glu_backward(_matrix(dh, dtype).contiguous(), gate_2d, up_2d, ctx.activation)
        width = gate.shape[-1]
        return d_both[:, :width].view(gate.shape).to(gate.dtype), d_both[:, width:].view(up.shape).to(up.dtype), None


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, F) with a contiguous last dimension; a copy only where the strides need one."""
    x = x.to(dtype).reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]), dtype=dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if gate.shape != up.shape or gate.dim() < 1:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


@dataclass(frozen=True, slots=True)
class GluLowRank:
    """The low-rank terms of a LoRA MLP, packed and padded to ranks K and KD (multiples of 16), all in one dtype.

    xa: (M, 2 * K) the gate's and the up's ``s * x @ A.T``, or (M, K) where both are one projection with one adapter;
    b: (2 * F, K) the gate's B above the up's;
    a_down: (KD, F), already times the down adapter's scaling, or None when down has no adapter.
    """

    xa: Tensor
    b: Tensor
    a_down: Tensor | None

    @property
    def joined(self) -> bool:
        """True when gate and up read the same xa."""
        return self.xa.shape[1] == self.b.shape[1]


@triton.jit
def _own_rows(M, BM: tl.constexpr):
    """(first row (64 bits), offsets from it (BM, 1), which of them are there (BM, 1)) of this program's rows."""
    first = tl.program_id(0) * BM
    row_ok = (first + tl.arange(0, BM) < M)[:, None]
    # Rows past the end read the last one and are never stored: every address that is formed lies inside its tensor.
    rows = tl.minimum(tl.arange(0, BM), M - 1 - first)[:, None]
    return first.to(tl.int64), rows, row_ok


@triton.jit
def _load_xa(xa_ptr, row0, rows, k, JOINED: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr):
    """The gate's and the up's products with A, (BM, K) each; with JOINED the same."""
    if JOINED:
        xa = tl.load(xa_ptr + row0 * K + (rows * K + k[None, :])).to(DOT)
        return xa, xa
    xa_at = xa_ptr + row0 * (2 * K) + (rows * (2 * K) + k[None, :])
    return tl.load(xa_at).to(DOT), tl.load(xa_at + K).to(DOT)


@triton.jit
def _add_low_rank(g, u, xa_g, xa_u, b_ptr, up_b, col0, n, k, col_ok, K: tl.constexpr, DOT: tl.constexpr):
    """``g + xa_g @ B_g.T`` and ``u + xa_u @ B_u.T`` of one column tile; B_u lies ``up_b`` elements behind B_g."""
    b_at = b_ptr + tl.cast(col0, tl.int64) * K + (n[None, :] * K + k[:, None])
    b_g = tl.load(b_at, mask=col_ok[None, :], other=0.0).to(DOT)
    b_u = tl.load(b_at + up_b, mask=col_ok[None, :], other=0.0).to(DOT)
    g += tl.dot(xa_g, b_g, input_precision="ieee")
    u += tl.dot(xa_u, b_u, input_precision="ieee")
    return g, u


@triton.jit
def _forward_kernel(
    gate_ptr,
    gate_stride,
    up_ptr,
    up_stride,
    h_ptr,
    xa_ptr,
    b_ptr,
    a_ptr,
    ha_ptr,
    M,
    F,
    tiles,
    ACT: tl.constexpr,
    DELTA: tl.constexpr,
    JOINED: tl.constexpr,
    DOWN: tl.constexpr,
    K: tl.constexpr,
    KD: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of a block times ``tiles`` column tiles; ha_ptr is (splits, M, KD)."""
    row0, rows, row_ok = _own_rows(M, BM)
    split = tl.program_id(1)
    n = tl.arange(0, BN)
    k = tl.arange(0, K)
    kd = tl.arange(0, KD)
    if DELTA:
        xa_g, xa_u = _load_xa(xa_ptr, row0, rows, k, JOINED, K, DOT)
    # A tile's addresses are a 64-bit scalar and 32-bit offsets that do not change from tile to tile: fewer registers.
    gate_row, gate_off = gate_ptr + row0 * gate_stride, rows * gate_stride + n[None, :]
    up_row, up_off = up_ptr + row0 * up_stride, rows * up_stride + n[None, :]
    h_row, h_off = h_ptr + row0 * F, rows * F + n[None, :]
    up_b = tl.cast(F, tl.int64) * K
    ha = tl.full((BM, KD), 0.0, ACC)
    for tile in tl.range(0, tl.minimum(tiles, tl.cdiv(F, BN) - split * tiles), num_stages=STAGES):
        col0 = (split * tiles + tile) * BN
        col_ok = (col0 + n < F) | EVEN  # a constant where the tiles fit: no masks are computed then
        mask = row_ok & col_ok[None, :]
        g = tl.load(gate_row + col0 + gate_off, mask=col_ok[None, :], other=0.0).to(ACC)
        u = tl.load(up_row + col0 + up_off, mask=col_ok[None, :], other=0.0).to(ACC)
        if DELTA:
            g, u = _add_low_rank(g, u, xa_g, xa_u, b_ptr, up_b, col0, n, k, col_ok, K, DOT)
        value, _ = activate(g, ACT)
        h = value * u
        tl.store(h_row + col0 + h_off, h.to(h_ptr.dtype.element_ty), mask=mask)
        if DOWN:
            a_at = a_ptr + col0 + (kd[None, :] * F + n[:, None])
            a = tl.load(a_at, mask=col_ok[:, None], other=0.0).to(DOT)
            ha += tl.dot(h.to(DOT), a, input_precision="ieee")
    if DOWN:
        ha_at = ha_ptr + (split.to(tl.int64) * M + row0) * KD + (rows * KD + kd[None, :])
        tl.store(ha_at, ha, mask=row_ok)


@triton.jit
def _backward_kernel(
    gate_ptr,
    gate_stride,
    up_ptr,
    up_stride,
    dh_ptr,
    dg_ptr,
    du_ptr,
    d_stride,
    h_ptr,
    xa_ptr,
    b_ptr,
    dya_ptr,
    a_ptr,
    dxa_ptr,
    M,
    F,
    tiles,
    ACT: tl.constexpr,
    DELTA: tl.constexpr,
    JOINED: tl.constexpr,
    DOWN: tl.constexpr,
    WANT_H: tl.constexpr,
    K: tl.constexpr,
    KD: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes the forward's arguments and dxa_ptr (splits, M, 2 * K), with JOINED (splits, M, K). h may be dh, and dg and
    du may be gate and up: each element is read before it is written.
    """
    row0, rows, row_ok = _own_rows(M, BM)
    split = tl.program_id(1)
    n = tl.arange(0, BN)
    k = tl.arange(0, K)
    kd = tl.arange(0, KD)
    if DELTA:
        xa_g, xa_u = _load_xa(xa_ptr, row0, rows, k, JOINED, K, DOT)
    if DOWN:
        dya = tl.load(dya_ptr + row0 * KD + (rows * KD + kd[None, :])).to(DOT)
    gate_row, gate_off = gate_ptr + row0 * gate_stride, rows * gate_stride + n[None, :]
    up_row, up_off = up_ptr + row0 * up_stride, rows * up_stride + n[None, :]
    dh_row, dh_off = dh_ptr + row0 * F, rows * F + n[None, :]
    h_row = h_ptr + row0 * F
    dg_row, du_row, d_off = dg_ptr + row0 * d_stride, du_ptr + row0 * d_stride, rows * d_stride + n[None, :]
    up_b = tl.cast(F, tl.int64) * K
    dxa_g = tl.full((BM, K), 0.0, ACC)
    dxa_u = tl.full((BM, K), 0.0, ACC)
    for tile in tl.range(0, tl.minimum(tiles, tl.cdiv(F, BN) - split * tiles), num_stages=STAGES):
        col0 = (split * tiles + tile) * BN
        col_ok = (col0 + n < F) | EVEN  # a constant where the tiles fit: no masks are computed then
        mask = row_ok & col_ok[None, :]
        g = tl.load(gate_row + col0 + gate_off, mask=col_ok[None, :], other=0.0).to(ACC)
        u = tl.load(up_row + col0 + up_off, mask=col_ok[None, :], other=0.0).to(ACC)
        dh = tl.load(dh_row + col0 + dh_off, mask=col_ok[None, :], other=0.0).to(ACC)
        if DELTA:
            g, u = _add_low_rank(g, u, xa_g, xa_u, b_ptr, up_b, col0, n, k, col_ok, K, DOT)
        if DOWN:
            a_at = a_ptr + col0 + (kd[:, None] * F + n[None, :])
            a = tl.load(a_at, mask=col_ok[None, :], other=0.0).to(DOT)
            dh += tl.dot(dya, a, input_precision="ieee")
        value, slope = activate(g, ACT)
        dg = dh * u * slope
        du = dh * value
        tl.store(dg_row + col0 + d_off, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        tl.store(du_row + col0 + d_off, du.to(du_ptr.dtype.element_ty), mask=mask)
        if WANT_H:
            tl.store(h_row + col0 + dh_off, (value * u).to(h_ptr.dtype.element_ty), mask=mask)
        if DELTA:
            bt_at = b_ptr + tl.cast(col0, tl.int64) * K + (n[:, None] * K + k[None, :])
            bt_g = tl.load(bt_at, mask=col_ok[:, None], other=0.0).to(DOT)
            bt_u = tl.load(bt_at + up_b, mask=col_ok[:, None], other=0.0).to(DOT)
            dxa_g += tl.dot(dg.to(DOT), bt_g, input_precision="ieee")
            if JOINED:  # one accumulator: registers
                dxa_g += tl.dot(du.to(DOT), bt_u, input_precision="ieee")
            else:
                dxa_u += tl.dot(du.to(DOT), bt_u, input_precision="ieee")
    if DELTA and JOINED:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row0) * K + (rows * K + k[None, :])
        tl.store(dxa_at, dxa_g, mask=row_ok)
    elif DELTA:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row0) * (2 * K) + (rows * (2 * K) + k[None, :])
        tl.store(dxa_at, dxa_g, mask=row_ok)
        tl.store(dxa_at + K, dxa_u, mask=row_ok)


def _splits(rows: int, columns: int, tile: Tile, *, summing: bool) -> tuple[int, int]:
    """(column tiles a program, programs along the columns): one tile each unless columns are summed inside a
    program.
    """
    tiles = triton.cdiv(columns, tile.columns)
    if not summing:
        return 1, tiles
    splits = min(tiles, max(1, tile.programs // max(1, triton.cdiv(rows, tile.rows))))
    each = triton.cdiv(tiles, splits)
    return each, triton.cdiv(tiles, each)


def lora_tile(operation: str, shared_memory: int, rank: int, down_rank: int, element_bytes: int) -> Tile:
    """The tile of ``glu_forward_lora`` or ``glu_backward_lora`` for adapters of padded ranks ``rank`` (gate, up) and
    ``down_rank``, where a program can have ``shared_memory`` bytes.
    """
    loads, ranks = (3, 4 * rank + down_rank) if operation == "glu_backward_lora" else (2, 2 * rank + down_rank)

    def fits(tile: Tile) -> bool:
        # At most: every tile that the column loop loads, once a stage, and the operands that stay. Compilers need 0.6
        # to 0.9 of it; `tests/ops/compile_offline.py` holds every GPU's compilation against what that GPU has.
        staged = tile.stages * tile.columns * (loads * tile.rows + ranks)
        return element_bytes * (staged + tile.rows * (2 * rank + down_rank)) <= shared_memory

    return tile_for(operation, fits)


def _tile(operation: str, gate: Tensor, lowrank: GluLowRank | None) -> Tile:
    if lowrank is None:
        return tile_for(operation)
    down_rank = 16 if lowrank.a_down is None else lowrank.a_down.shape[0]
    limit = gpu_of(gate.device).shared_memory_bytes
    return lora_tile(f"{operation}_lora", limit, lowrank.b.shape[1], down_rank, gate.element_size())


def _constants(
    gate: Tensor, activation: Activation, lowrank: GluLowRank | None, down: Tensor | None, tile: Tile
) -> dict[str, Any]:
    """The constexpr arguments and the launch options that both kernels take. Ranks that are not there count as 16."""
    return {
        "ACT": activation,
        "DELTA": lowrank is not None,
        "JOINED": lowrank is not None and lowrank.joined,
        "DOWN": down is not None,
        "K": 16 if lowrank is None else lowrank.b.shape[1],
        "KD": 16 if down is None else down.shape[0],
        "EVEN": gate.shape[1] % tile.columns == 0,
        "ACC": triton_dtype(gate.dtype),
        "DOT": triton_store_dtype(gate.dtype),
        "BM": tile.rows,
        "BN": tile.columns,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def glu_forward(
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    lowrank: GluLowRank | None = None,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One launch, no autograd: (h (M, F), ha (M, KD) or None).

    gate, up: (M, F), last stride 1, of one dtype.
    """
    count, width = gate.shape
    down = None if lowrank is None else lowrank.a_down
    tile = tile or _tile("glu_forward", gate, lowrank)
    each, splits = _splits(count, width, tile, summing=down is not None)
    h = torch.empty((count, width), dtype=store_dtype(gate.dtype), device=gate.device)
    sums = (1,) if down is None else (splits, count, down.shape[0])
    ha = torch.empty(sums, dtype=accumulate_dtype(gate.dtype), device=gate.device)
    if count and width:
        with on_device_of(gate):
            _forward_kernel[(triton.cdiv(count, tile.rows), splits)](
                gate,
                gate.stride(0),
                up,
                up.stride(0),
                h,
                h if lowrank is None else lowrank.xa,
                h if lowrank is None else lowrank.b,
                h if down is None else down,
                ha,
                count,
                width,
                each,
                **_constants(gate, activation, lowrank, down, tile),
            )
    elif down is not None:
        ha.zero_()
    return rounded(h, gate.dtype), None if down is None else row_sums(ha, None, gate.dtype, triton_kernel=True).low


def glu_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    *,
    lowrank: GluLowRank | None = None,
    dya: Tensor | None = None,
    want_h: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One launch, no autograd: (dgate beside dup (M, 2 * F), h or None, dxa or None: its partial sums (P, M, 2 * K),
    or (P, M, K) where gate and up are joined, in the accumulation dtype, for ``ftkernels.primitives``).

    gate, up: (M, F), last stride 1; dh: (M, F) contiguous and the caller's own, since **h is written over it**;
    dya: (M, KD) ``dy @ B_down``, with ``lowrank.a_down``. ``out``: (M, 2 * F) contiguous memory for the first result;
    its halves may be gate and up themselves, since every element is read before it is written.
    """
    count, width = gate.shape
    tile = tile or _tile("glu_backward", gate, lowrank)
    each, splits = _splits(count, width, tile, summing=lowrank is not None)
    stored = store_dtype(gate.dtype)
    if out is None or out.dtype != stored:  # the dtypes differ in the interpreter only
        out = torch.empty((count, 2 * width), dtype=stored, device=gate.device)
    down = None if lowrank is None or dya is None else lowrank.a_down
    sums = (1,) if lowrank is None else (splits, count, lowrank.xa.shape[1])
    dxa = torch.empty(sums, dtype=accumulate_dtype(gate.dtype), device=gate.device)
    h = dh.to(store_dtype(dh.dtype))  # dh itself, except in the interpreter
    if count and width:
        with on_device_of(gate):
            _backward_kernel[(triton.cdiv(count, tile.rows), splits)](
                gate,
                gate.stride(0),
                up,
                up.stride(0),
                dh,
                out,
                out[:, width:],
                2 * width,
                h,
                dh if lowrank is None else lowrank.xa,
                dh if lowrank is None else lowrank.b,
                dh if dya is None else dya,
                dh if down is None else down,
                dxa,
                count,
                width,
                each,
                WANT_H=want_h,
                **_constants(gate, activation, lowrank, down, tile),
            )
    elif lowrank is not None:
        dxa.zero_()
    return (
        rounded(out, gate.dtype),
        rounded(h, dh.dtype) if want_h else None,
        None if lowrank is None else dxa,
    )
