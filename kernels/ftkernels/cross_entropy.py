"""Cross-entropy of rows of logits, the gradient written over them. Formulas: ``ftkernels.linear_cross_entropy``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, accumulate_dtype, on_device_of, store_dtype, triton_dtype
from ftkernels.primitives import LOG2_E


@dataclass(frozen=True, slots=True)
class LossOptions:
    """softcap (0: none), factor on the logits before the cap, label smoothing in [0, 1]."""

    softcap: float = 0.0
    logit_scale: float = 1.0
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLosses:
    """losses (C,) float32 or float64; correct (C,) 0 or 1; d_logits (C, V) in the logits' dtype, or None."""

    losses: Tensor
    correct: Tensor
    d_logits: Tensor | None


def cross_entropy_rows_reference(
    logits: Tensor, labels: Tensor, options: LossOptions, *, want_grad: bool, row_scale: Tensor | None = None
) -> RowLosses:
    """Loss, arg-max hit and gradient of each row, in plain torch; the arithmetic is float32 (float64 for float64
    logits).

    Shapes: logits (C, V), which is not written; labels (C,), all inside [0, V); row_scale (C,), a factor on each row's
    gradient.
    """
    vocabulary = logits.shape[1]
    u = logits.to(accumulate_dtype(logits.dtype)) * options.logit_scale
    t = torch.tanh(u / options.softcap) if options.softcap else None
    z = u if t is None else options.softcap * t
    lse = torch.logsumexp(z, dim=1)
    column = labels[:, None].long()
    true_z = z.gather(1, column).squeeze(1)
    smooth = options.label_smoothing
    losses = lse - (1.0 - smooth) * true_z
    if smooth:
        losses = losses - smooth * z.mean(1)
    correct = (u.argmax(1) == labels).to(torch.int32)
    if not want_grad:
        return RowLosses(losses, correct, None)
    grad = torch.exp(z - lse[:, None])
    if smooth:
        grad -= smooth / vocabulary
    # The label's own entry is formed in float32: p - 1 taken after rounding p to bfloat16 would often be 0.
    grad.scatter_add_(1, column, torch.full_like(column, smooth - 1.0, dtype=grad.dtype))
    if t is not None:
        grad *= 1.0 - t * t
    grad *= options.logit_scale
    if row_scale is not None:
        grad *= row_scale[:, None].to(grad.dtype)
    return RowLosses(losses, correct, grad.to(logits.dtype))


@triton.jit
def falling(u, cap):
    """r = 1 / (1 + exp(2u / cap)), so that cap * tanh(u / cap) = cap - 2 cap r and 1 - tanh^2 = 4 r (1 - r).

    One exponential and one division, no branch on the sign. The exponent is bounded where r is 1e-35 already: without
    that, the other form, (e - 1) / (e + 1), is inf / inf (vLLM 56578). The error of cap - 2 cap r is some units in the
    last place of cap, for small u too; the cross-entropy adds such values and needs no relative accuracy of each.
    """
    x = u * (2.0 * LOG2_E / cap)
    return 1.0 / (1.0 + tl.exp2(tl.where(x > 115.0, 115.0, x)))  # no tl.minimum: on a GPU it would make 115 of NaN


@triton.jit
def _logits(at, inside, scale, MASKED: tl.constexpr, SCALED: tl.constexpr, POLICY: tl.constexpr, ACC: tl.constexpr):
    """Logits before the cap, where ``MASKED`` 0 outside."""
    u = tl.load(at, mask=inside if MASKED else None, other=0.0 if MASKED else None, eviction_policy=POLICY).to(ACC)
    return u * scale if SCALED else u


@triton.jit
def _scan_block(
    base, start, totals, true_u, label, scale, cap, V, MASKED: tl.constexpr, SCALED: tl.constexpr,
    HAS_CAP: tl.constexpr, CAP_BOUNDS: tl.constexpr, HAS_SMOOTHING: tl.constexpr, ACC: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """``totals`` with the block of LANES * EACH columns from ``start`` on. All of them are by lane, which is EACH
    columns in a row and in one thread: what waits for other threads is left for the end of the row.
    """
    largest, sums, z_sums, beaten = totals
    lanes = start + tl.arange(0, LANES) * EACH
    columns = lanes[:, None] + tl.arange(0, EACH)[None, :]
    inside = columns < V
    u = _logits(base + columns, inside, scale, MASKED, SCALED, "evict_last", ACC)
    top = tl.max(tl.where(inside, u, float("-inf")) if MASKED else u, axis=1)
    # The first of equal logits is the arg max, as in torch. The label's own lane is looked at when the row is done.
    ahead = (top > true_u) | ((top == true_u) & (lanes + EACH <= label))
    beaten = tl.maximum(beaten, ahead.to(tl.int32))
    z = cap - 2.0 * cap * falling(u, cap) if HAS_CAP else u
    # Lanes past V are masked after the cap: before it, -inf would come out as -cap and count.
    if HAS_SMOOTHING:
        # Masked in whole blocks too: Triton 3.6 moves an unmasked sum of what is loaded behind the loop, and stops at
        # an assertion where both branches of a condition read it.
        z_sums += tl.sum(tl.where(inside, z, 0.0), axis=1)
    if MASKED:
        z = tl.where(inside, z, float("-inf"))
    if CAP_BOUNDS:  # every z is in [-cap, cap]: no maximum to find
        sums += tl.sum(tl.exp2((z - cap) * LOG2_E), axis=1)
    else:
        before = largest
        largest = tl.maximum(largest, cap - 2.0 * cap * falling(top, cap) if HAS_CAP else top)
        sums *= tl.exp2((before - largest) * LOG2_E)
        sums += tl.sum(tl.exp2(z * LOG2_E - (largest * LOG2_E)[:, None]), axis=1)
    return largest, sums, z_sums, beaten


@triton.jit
def _scan_row(
    base, label, true_u, scale, cap, V, SCALED: tl.constexpr, HAS_CAP: tl.constexpr, CAP_BOUNDS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ACC: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """(lse, z_total, beaten) of a row: an online log-sum-exp over V by lanes, the sum of its z where it is needed, and
    whether another logit is ahead of the label's.
    """
    zeros = tl.full((LANES,), 0.0, ACC)
    # Below every logit, and finite: a lane that sees none has exp(0) times its sum, which is 0, and no NaN.
    totals = (zeros - 1e30, zeros, zeros, tl.full((LANES,), 0, tl.int32))
    whole = V // (LANES * EACH) * (LANES * EACH)
    for start in range(0, whole, LANES * EACH):
        totals = _scan_block(
            base, start, totals, true_u, label, scale, cap, V,
            False, SCALED, HAS_CAP, CAP_BOUNDS, HAS_SMOOTHING, ACC, LANES, EACH,
        )  # fmt: skip
    if whole < V:
        totals = _scan_block(
            base, whole, totals, true_u, label, scale, cap, V,
            True, SCALED, HAS_CAP, CAP_BOUNDS, HAS_SMOOTHING, ACC, LANES, EACH,
        )  # fmt: skip
    largest, sums, z_sums, beaten = totals
    near = label // EACH * EACH + tl.arange(0, EACH)
    earlier = near < label
    u = _logits(base + near, earlier, scale, True, SCALED, "", ACC)
    beaten_near = tl.max((earlier & (u >= true_u)).to(tl.int32), axis=0)
    top = cap if CAP_BOUNDS else tl.max(largest, axis=0)
    lse = top + tl.log(tl.sum(sums if CAP_BOUNDS else sums * tl.exp2((largest - top) * LOG2_E), axis=0))
    return lse, tl.sum(z_sums, axis=0), tl.maximum(tl.max(beaten, axis=0), beaten_near)


@triton.jit
def _write_block(
    base, start, label, lse, factor, scale, cap, smooth, V, MASKED: tl.constexpr, SCALED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits of a block of columns times ``factor``, over its logits."""
    columns = start + tl.arange(0, BLOCK)
    inside = columns < V
    u = _logits(base + columns, inside, scale, MASKED, SCALED, "evict_first", ACC)
    if HAS_CAP:
        r = falling(u, cap)
        # The difference first: a rounded lse * LOG2_E would scale the whole row.
        grad = tl.exp2((cap - lse - 2.0 * cap * r) * LOG2_E)
    else:
        grad = tl.exp2((u - lse) * LOG2_E)
    if HAS_SMOOTHING:
        grad -= smooth / V
    if (label >= start) & (label < start + BLOCK):
        grad = tl.where(columns == label, grad - (1.0 - smooth), grad)
    if HAS_CAP:
        grad *= 4.0 * r * (1.0 - r)  # 1 - tanh^2
    tl.store(base + columns, (grad * factor).to(base.dtype.element_ty), mask=inside if MASKED else None)


@triton.jit
def _write_gradient(
    base, label, lse, factor, scale, cap, smooth, V, SCALED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits of a row times ``factor``, over its logits: from its end on, which was read last and may be cached."""
    blocks = V // BLOCK
    if blocks * BLOCK < V:
        _write_block(
            base, blocks * BLOCK, label, lse, factor, scale, cap, smooth, V,
            True, SCALED, HAS_CAP, HAS_SMOOTHING, ACC, BLOCK,
        )  # fmt: skip
    for block in range(blocks):
        _write_block(
            base, (blocks - 1 - block) * BLOCK, label, lse, factor, scale, cap, smooth, V,
            False, SCALED, HAS_CAP, HAS_SMOOTHING, ACC, BLOCK,
        )  # fmt: skip


@triton.jit
def _rows_kernel(
    logits_ptr,
    row_stride,
    labels_ptr,
    losses_ptr,
    correct_ptr,
    row_scale_ptr,
    V,
    softcap,
    logit_scale,
    smoothing,
    SCALED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CAP_BOUNDS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program a row: an online log-sum-exp over V, then dlogits over the logits."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    cap = tl.cast(softcap, ACC)
    scale = tl.cast(logit_scale, ACC)
    smooth = tl.cast(smoothing, ACC)
    true_u = tl.load(base + label).to(ACC)
    if SCALED:
        true_u *= scale
    lse, z_total, beaten = _scan_row(
        base, label, true_u, scale, cap, V, SCALED, HAS_CAP, CAP_BOUNDS, HAS_SMOOTHING, ACC, LANES, EACH
    )
    true_z = true_u
    if HAS_CAP:
        true_z = cap - 2.0 * cap * falling(true_u, cap)
    loss = lse - (1.0 - smooth) * true_z
    if HAS_SMOOTHING:
        loss -= smooth * z_total / V
    tl.store(losses_ptr + row, loss)
    tl.store(correct_ptr + row, 1 - beaten)
    if WANT_GRAD:
        factor = scale
        if HAS_ROW_SCALE:
            factor = scale * tl.load(row_scale_ptr + row).to(ACC)
        _write_gradient(
            base, label, lse, factor, scale, cap, smooth, V, SCALED, HAS_CAP, HAS_SMOOTHING, ACC, LANES * EACH
        )


# Columns of a lane: what a thread reads at once.
_EACH = 8
# By whether the cap bounds the logits: measured by `python kernels/bench/tune.py --only cross_entropy` with the
# vocabularies of Qwen, Llama-3, Gemma-2 and Gemma-3 on one H200 (torch 2.11, Triton 3.6, 2026-11-24).
_UNBOUNDED, _BOUNDED = Tile(1, 16384, 32), Tile(1, 4096, 16)
# With a cap up to this, exp(z - cap) of the smallest z is far from where float32 ends, and the sum needs no maximum.
_LARGEST_BOUNDING_CAP = 40.0


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    *,
    want_grad: bool,
    row_scale: Tensor | None = None,
    tile: Tile | None = None,
) -> RowLosses:
    """``cross_entropy_rows_reference`` in one Triton launch. With ``want_grad``, ``logits`` is overwritten by its
    gradient.

    Shapes: logits (C, V) with unit stride along V, labels (C,) all inside [0, V) (not checked: an index outside reads
        out of bounds).

    Raises:
        ValueError: the logits' last stride is not 1.
    """
    count, vocabulary = logits.shape
    if logits.stride(1) != 1 and vocabulary > 1:
        raise ValueError(f"logits need unit stride along the vocabulary, got strides {logits.stride()}")
    acc = accumulate_dtype(logits.dtype)
    buffer = logits.to(store_dtype(logits.dtype))  # itself, except in the interpreter
    losses = torch.empty(count, dtype=acc, device=logits.device)
    correct = torch.empty(count, dtype=torch.int32, device=logits.device)
    if count:
        bounded = 0.0 < options.softcap <= _LARGEST_BOUNDING_CAP
        tile = tile or (_BOUNDED if bounded else _UNBOUNDED)
        block = min(triton.next_power_of_2(vocabulary), tile.columns)
        with on_device_of(logits):
            _rows_kernel[(count,)](
                buffer,
                buffer.stride(0),
                labels.contiguous(),
                losses,
                correct,
                losses if row_scale is None else row_scale.contiguous(),
                vocabulary,
                options.softcap,
                options.logit_scale,
                options.label_smoothing,
                SCALED=options.logit_scale != 1.0,
                HAS_CAP=options.softcap != 0.0,
                CAP_BOUNDS=bounded,
                HAS_SMOOTHING=options.label_smoothing != 0.0,
                HAS_ROW_SCALE=row_scale is not None,
                WANT_GRAD=want_grad,
                ACC=triton_dtype(logits.dtype),
                LANES=max(1, block // _EACH),
                EACH=min(block, _EACH),
                num_warps=max(4, min(tile.warps, block // 128)),
            )
    return RowLosses(losses, correct, buffer.to(logits.dtype) if want_grad else None)
