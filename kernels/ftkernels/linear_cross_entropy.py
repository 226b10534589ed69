"""Cross-entropy of a linear head, without ever holding all the logits.

Legend: N rows (tokens), H hidden size, V vocabulary size, C rows of one chunk.

    x = hidden @ weight.T + bias                          (N, V), in the GEMM's dtype
    u = logit_scale * x
    z = softcap * tanh(u / softcap)  if softcap else  u   float32 from here on
    lse = log(sum_v exp(z_v))
    loss = lse - (1 - e) * z_label - (e / V) * sum_v z_v          e = label_smoothing
    dz_v = exp(z_v - lse) - (1 - e) * [v = label] - e / V
    dx_v = dz_v * (1 - tanh(u_v / softcap)^2) * logit_scale
    dhidden = dx @ weight,   dweight = dx.T @ hidden,   dbias = sum_rows dx
    dweight of a few rows r alone:   dx[:, r].T @ hidden

The logits exist for C rows at a time; dx overwrites them. Because the loss is a sum over rows, its gradient with
respect to the inputs is known in the forward up to the scalar that backward brings, so the forward computes it and
keeps (N, H) and no logits. With ``reduction="mean"`` that scalar is 1 as a rule, since dx is divided by the count as it
is formed: the head's gradient then needs no pass of its own (float16, whose range is short, is divided in backward).
With ``reduction="none"`` backward brings one factor a row: dhidden is row-wise and only
needs scaling, dweight is not, and is computed in backward from a second pass over the chunks.

Labels equal to ``ignore_index`` are dropped before the head's GEMM: prompt tokens cost nothing. Labels are not
shifted here.

A loss that is divided by its tokens in the forward pass has the gradient 1 in backward. Whether it is, only the device
knows, and the host must not wait for it: ``scale_`` reads and writes nothing then.

Of a weight that is the embedding's as well, the head's gradient (V, H) is dense and comes first in a backward pass; the
embedding's has a row for each token and comes last. Autograd would make the second one dense, zeros for the most part,
and add the two. Here the head hands its own over, and the embedding adds its rows to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.cross_entropy import LossOptions, cross_entropy_rows, cross_entropy_rows_reference
from ftkernels.device import BackendName, accumulate_dtype, choose_backend, on_device_of, triton_dtype, without_autocast
from ftkernels.gemm import add_mm_accurate_, compute_dtype, mm_accurate
from ftkernels.limits import LOSS_VOCABULARY_SLAB, loss_rows

_BLOCK = 8192


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask, other=0.0) * factor, mask=mask)


def scale_(x: Tensor, factor: Tensor, *, backend: BackendName = "auto") -> Tensor:
    """``x *= factor`` in place, without a pass over ``x`` where ``factor`` is one; autograd does not see it.

    Args:
        x: float32 or float64, contiguous.
        factor: a scalar on the device of ``x``.

    Raises:
        ValueError: another dtype, or memory with gaps.
    """
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous() or factor.numel() != 1:
        raise ValueError(f"cannot scale {x.dtype} of {tuple(x.shape)} by {tuple(factor.shape)} in place")
    with torch.no_grad():
        if not choose_backend(x.device, backend).is_triton:
            return x.mul_(factor)
        if x.numel():
            with on_device_of(x):
                grid = (triton.cdiv(x.numel(), _BLOCK),)
                _scale_kernel[grid](x, factor, x.numel(), ACC=triton_dtype(x.dtype), BLOCK=_BLOCK, num_warps=8)
    return x


class HeadGradient:
    """The head's gradient on its way to the embedding's backward pass."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Hands over the head's share, which is the taker's to write on.

        Raises RuntimeError when an earlier one was never taken: it would be missing from the weight's gradient.
        """
        if self._held is not None:
            self._held = None
            raise RuntimeError("a head's gradient was handed over, and its embedding had no backward pass")
        self._held = gradient

    def take(self) -> Tensor | None:
        """Returns the gradient that was handed over, once."""
        held, self._held = self._held, None
        return held


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, head: HeadGradient, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.head, ctx.shape, ctx.dtype, ctx.padding_idx = head, weight.shape, weight.dtype, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:  # whose row learns nothing here
            dy = dy.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
        total = ctx.head.take()
        if total is None:
            total = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device)
        # Sorted by id, and added in that order: the same bits in every run.
        total.index_put_((ids.reshape(-1),), dy.reshape(-1, dy.shape[-1]).to(total.dtype), accumulate=True)
        return total.to(ctx.dtype), None, None, None


def tied_embedding(ids: Tensor, weight: Tensor, head: HeadGradient, padding_idx: int | None = None) -> Tensor:
    """``weight[ids]``, (...) int64 -> (..., H), whose backward pass adds to what ``head`` was handed, if anything.

    ``padding_idx``: as in ``torch.nn.functional.embedding``.
    """
    found: Tensor = _Lookup.apply(weight, ids, head, padding_idx)
    return found


Reduction = Literal["sum", "mean", "none"]


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows of a frozen matrix (V, H) that are trained: ``values`` (R, H) and where they lie, ``ids`` (R,) int64."""

    values: Tensor
    ids: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | None = None,
    reduction: Reduction = "mean",
    chunk_rows: int | None = None,
    with_accuracy: bool = False,
    rows: Tensor | None = None,
    handed: HeadGradient | None = None,
    large_chunks: bool = True,
    head_rows: TrainedRows | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy between ``hidden @ weight.T + bias`` and ``labels``; the module docstring has the formula.

    Args:
        hidden: (N, H) hidden states, not logits. Any float dtype.
        weight: (V, H) head. Its dtype may differ from ``hidden``'s: the product is taken in autocast's dtype when
            autocast is on, else in the dtype they promote to.
        labels: (N,) integer, each in [0, V) or ``ignore_index``. Already shifted.
        bias: (V,) or None.
        softcap: 0 for none; Gemma-2 has 30.
        logit_scale: factor on the logits, before the cap.
        num_items: with "mean", what the sum is divided by (the labelled tokens of the whole optimizer step, under
            accumulation). None: the labelled rows of this call. With none labelled loss and gradients are 0.
        reduction: "mean", "sum", or "none" for a loss a row, 0 where ignored.
        chunk_rows: rows whose logits exist at a time. None picks them for a workspace of at most 512 MiB.
        with_accuracy: also return how many labelled rows have their label as arg max (the lowest index wins a tie),
            int64 scalar.
        rows: (R,) int64, what ``labelled_rows`` gives for ``labels``, on their device, where the caller knows it:
            finding it out waits for the device.
        handed: takes the weight's gradient in place of autograd; the embedding that has the same weight
            (``ftkernels.linear_cross_entropy``) adds to it.
        large_chunks: where the head is trained, chunks whose logits take as much memory as its gradient, over which
            there are fewer passes then.
        head_rows: rows of a frozen ``weight`` that are trained, which hold what the weight has there. They get their
            gradient in its place. Not with "none".

    Returns:
        The loss, float32 (float64 for float64 inputs): a scalar, or (N,) with "none". With ``with_accuracy`` a pair.

    Raises:
        ValueError: shapes that do not fit, a label outside the vocabulary, or an option outside its range.
    """
    check_head_shapes(hidden, weight, labels, bias)
    _check_options(softcap, label_smoothing, num_items, reduction, chunk_rows)
    if head_rows is not None and reduction == "none":
        raise ValueError("rows of the head have no gradient of a loss for each row")
    plan = _Plan(
        options=LossOptions(float(softcap), float(logit_scale), float(label_smoothing)),
        dtype=compute_dtype(hidden.device.type, hidden, weight),
        rows=labelled_rows(labels, ignore_index, weight.shape[0]) if rows is None else rows,
        chunk_rows=chunk_rows or 0,
        triton=choose_backend(hidden.device, backend).is_triton,
        per_row=reduction == "none",
        grad_enabled=torch.is_grad_enabled(),
        handed=handed,
        large_chunks=large_chunks,
        head_row_ids=None if head_rows is None else head_rows.ids,
    )
    divisor = None
    if reduction == "mean":
        count = max(plan.rows.shape[0], 1) if num_items is None else num_items
        acc = accumulate_dtype(plan.dtype)
        divisor = count.to(acc) if isinstance(count, Tensor) else torch.full((), count, dtype=acc, device=hidden.device)
    inside = divisor is not None and plan.dtype != torch.float16
    trained = None if head_rows is None else head_rows.values
    loss, correct = _LinearCrossEntropy.apply(hidden, weight, bias, labels, divisor if inside else None, plan, trained)
    if divisor is not None and not inside:
        loss = loss / divisor
    return (loss, correct) if with_accuracy else loss


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | None = None,
    reduction: Reduction = "mean",
    with_accuracy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same function with all logits at once and torch's own autograd. Arguments as ``linear_cross_entropy``."""
    dtype = compute_dtype(hidden.device.type, hidden, weight)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    capped = logits.to(accumulate_dtype(dtype)) * logit_scale
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    loss = F.cross_entropy(
        capped,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none" if reduction == "none" else "sum",
    )
    labelled = labels != ignore_index
    if reduction == "mean":
        loss = loss / (labelled.sum().clamp(min=1) if num_items is None else num_items)
    correct = ((logits.argmax(-1) == labels) & labelled).sum()
    return (loss, correct) if with_accuracy else loss


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of one call: options, the GEMM's dtype, indices of the labelled rows, and which gradients are wanted."""

    options: LossOptions
    dtype: torch.dtype
    rows: Tensor
    chunk_rows: int
    triton: bool
    per_row: bool
    grad_enabled: bool
    handed: HeadGradient | None = None
    large_chunks: bool = True
    head_row_ids: Tensor | None = None


@dataclass(slots=True)
class _Sums:
    """Sums of a pass over the chunks: per-row losses, the count of correct rows, and gradients (None: not wanted)."""

    losses: Tensor
    correct: Tensor
    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None
    d_rows: Tensor | None = None


def _run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    plan: _Plan,
    wants: tuple[bool, bool, bool, bool],
    row_scale: Tensor | None = None,
) -> _Sums:
    """One pass over the labelled rows. ``wants``: gradients of hidden, weight, bias and a few of the weight's rows;
    ``row_scale`` (N,) multiplies each row's.
    """
    acc = accumulate_dtype(plan.dtype)
    head = weight.to(plan.dtype)
    head_bias = None if bias is None else bias.to(plan.dtype)
    out = _Sums(hidden.new_zeros(labels.shape[0], dtype=acc), labels.new_zeros((), dtype=torch.int64))
    if wants[0]:
        make = torch.zeros if plan.rows.shape[0] < hidden.shape[0] else torch.empty
        # As wide as the products, so that it is rounded once, when backward scales it.
        wide = torch.promote_types(hidden.dtype, plan.dtype)
        out.d_hidden = make(hidden.shape, dtype=wide, device=hidden.device)
    written = wants[1] and weight.is_cuda and bool(plan.rows.shape[0])  # by the first chunk's product, not added to
    if wants[1]:
        make = torch.empty if written else torch.zeros
        out.d_weight = make(weight.shape, dtype=acc, device=weight.device)
    if wants[2]:
        out.d_bias = torch.zeros(weight.shape[0], dtype=acc, device=weight.device)
    if wants[3] and plan.head_row_ids is not None:
        out.d_rows = torch.zeros((len(plan.head_row_ids), weight.shape[1]), dtype=acc, device=weight.device)
    rows_fn = cross_entropy_rows if plan.triton else cross_entropy_rows_reference
    total = int(plan.rows.shape[0])
    hidden_size = weight.shape[1] if wants[1] and plan.large_chunks else 0
    size = plan.chunk_rows or loss_rows(
        total, weight.shape[0], plan.dtype.itemsize, on_gpu=plan.triton, trained_width=hidden_size
    )
    buffer = logits_buffer(min(size, total), weight.shape[0], head)  # the only logits there are, chunk after chunk
    for start in range(0, total, size):
        stop = min(start + size, total)
        where = slice(start, stop) if total == hidden.shape[0] else plan.rows[start:stop]  # a slice copies nothing
        x = hidden[where].to(plan.dtype)
        logits = buffer[: stop - start]
        for part in vocabulary_parts(head):
            if head_bias is None:
                torch.mm(x, head[part].t(), out=logits[:, part])
            else:
                torch.addmm(head_bias[part], x, head[part].t(), out=logits[:, part])
        scale = None if row_scale is None else row_scale[where]
        result = rows_fn(logits, labels[where], plan.options, want_grad=any(wants), row_scale=scale)
        out.losses[where] = result.losses
        out.correct += result.correct.sum()
        if result.d_logits is not None:
            _accumulate(out, where, x, head, result.d_logits, first=written and start == 0)
            if out.d_rows is not None and plan.head_row_ids is not None:
                some = result.d_logits.index_select(1, plan.head_row_ids).t()
                add_mm_accurate_(out.d_rows, some, x, rows=LOSS_VOCABULARY_SLAB)
    return out


def logits_buffer(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """(rows, V) of ``like``'s dtype, unwritten, whose rows begin at multiples of 16 bytes."""
    lanes = 16 // like.element_size()
    return like.new_empty((rows, -(-vocabulary // lanes) * lanes))[:, :vocabulary]


def vocabulary_parts(head: Tensor) -> list[slice]:
    """The rows of the head (V, H) that products are taken of at once: all; or, where V is no multiple of 16 bytes,
    those up to there and the few that are left.

    cuBLAS takes three times as long for such a V as a whole, however its rows lie: OLMo's is 100,278, and added tokens
    make any (H200, torch 2.11: 3.98 ms for 1,304 rows of 4,096, and 1.36 ms for V = 100,280).
    """
    vocabulary, lanes = head.shape[0], 16 // head.element_size()
    whole = vocabulary - vocabulary % lanes
    if whole in (0, vocabulary):
        return [slice(0, vocabulary)]
    return [slice(0, whole), slice(whole, vocabulary)]


def _accumulate(out: _Sums, where: slice | Tensor, x: Tensor, head: Tensor, d_logits: Tensor, *, first: bool) -> None:
    """Turn one chunk's dlogits (C, V) into its rows of dhidden and its share of dweight, which the ``first`` one
    writes, and dbias.
    """
    if out.d_hidden is not None:
        if out.d_hidden.dtype != head.dtype:
            out.d_hidden[where] = mm_accurate(d_logits, head).to(out.d_hidden.dtype)
        else:
            given = out.d_hidden[where] if isinstance(where, slice) else x.new_empty(x.shape)
            # The few columns that are left come first: their sum is rounded once more, and it is small.
            *more, last = reversed(vocabulary_parts(head))
            for part in more:
                torch.mm(d_logits[:, part], head[part], out=given)
            if more:
                given.addmm_(d_logits[:, last], head[last])
            else:
                torch.mm(d_logits[:, last], head[last], out=given)
            if not isinstance(where, slice):
                out.d_hidden[where] = given
    if out.d_weight is not None:
        for part in vocabulary_parts(head):
            if first:
                mm_accurate(d_logits[:, part].t(), x, out=out.d_weight[part])
            else:
                add_mm_accurate_(out.d_weight[part], d_logits[:, part].t(), x, rows=LOSS_VOCABULARY_SLAB)
    if out.d_bias is not None:
        out.d_bias += d_logits.sum(0, dtype=out.d_bias.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """(losses summed or per row, correct). Saves dhidden (and dweight, dbias) instead of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor | None,
        plan: _Plan,
        head_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wanted = [bool(n) and plan.grad_enabled for n in ctx.needs_input_grad]
        needs = (wanted[0], wanted[1], wanted[2], wanted[6])
        # With one factor a row, the head's gradient waits for backward; dhidden then comes from that same pass.
        later = plan.per_row and (needs[1] or needs[2])
        ctx.divisor = divisor
        with without_autocast(hidden):
            scale = _per_row(ctx, labels) if any(needs) else None
            sums = _run_chunks(hidden, weight, bias, labels, plan, (False,) * 4 if later else needs, scale)
        ctx.plan, ctx.needs, ctx.spent, ctx.hidden_dtype = plan, needs, later, hidden.dtype
        ctx.rows_dtype = None if head_rows is None else head_rows.dtype
        keep_inputs = any(needs[1:])
        ctx.save_for_backward(
            *((hidden, weight, bias, labels) if keep_inputs else (None, None, None, None)), sums.d_hidden
        )
        ctx.d_weight, ctx.d_bias, ctx.d_rows = sums.d_weight, sums.d_bias, sums.d_rows
        ctx.mark_non_differentiable(sums.correct)
        if plan.per_row:
            return sums.losses, sums.correct
        total = sums.losses.sum()
        return (total if divisor is None else total / divisor), sums.correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, d_hidden = ctx.saved_tensors
        if any(ctx.needs[1:]):
            if ctx.spent:  # one factor a row, or a second backward through a retained graph
                scale = _per_row(ctx, labels, d_loss)
                with without_autocast(hidden):
                    sums = _run_chunks(hidden, weight, bias, labels, ctx.plan, ctx.needs, scale)
                return (
                    None if sums.d_hidden is None else sums.d_hidden.to(hidden.dtype),
                    _given(ctx, sums.d_weight, weight),
                    None if sums.d_bias is None or bias is None else sums.d_bias.to(bias.dtype),
                    None,
                    None,
                    None,
                    None if sums.d_rows is None else sums.d_rows.to(ctx.rows_dtype),
                )
            ctx.spent = True
        d_weight, d_bias, d_rows = ctx.d_weight, ctx.d_bias, ctx.d_rows
        ctx.d_weight = ctx.d_bias = ctx.d_rows = None
        return (
            None if d_hidden is None else _scaled(d_hidden, d_loss, ctx.hidden_dtype),
            # In place: at V x H in float32 a second copy would be gigabytes. `spent` keeps a second backward from
            # reading it.
            _given(ctx, None if d_weight is None else scale_(d_weight, d_loss), weight),
            None if d_bias is None or bias is None else d_bias.mul_(d_loss).to(bias.dtype),
            None,
            None,
            None,
            None if d_rows is None else d_rows.mul_(d_loss).to(ctx.rows_dtype),
        )


def _given(ctx: Any, d_weight: Tensor | None, weight: Tensor | None) -> Tensor | None:
    """The weight's gradient in its dtype for autograd; None where another takes it as it was accumulated."""
    if d_weight is None or weight is None:
        return None
    if ctx.plan.handed is not None:
        ctx.plan.handed.put(d_weight)
        return None
    return d_weight.to(weight.dtype)


def _per_row(ctx: Any, labels: Tensor, d_loss: Tensor | None = None) -> Tensor | None:
    """(N,) what each row's gradient is multiplied by: the incoming gradient, over the count where that is inside."""
    if ctx.divisor is None:
        return None if d_loss is None else d_loss.expand(labels.shape[0])
    factor = ctx.divisor.reciprocal() if d_loss is None else d_loss / ctx.divisor
    return factor.expand(labels.shape[0]).contiguous()


def _scaled(d_hidden: Tensor, d_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """``d_hidden * d_loss`` in ``dtype``, multiplied in float32 and rounded once; ``d_loss`` is a scalar or (N,).

    As a 0-d tensor the factor would first be rounded to d_hidden's dtype on a GPU: in bfloat16 up to 0.4%, on every
    gradient alike.
    """
    out = torch.empty(d_hidden.shape, dtype=dtype, device=d_hidden.device)
    return torch.mul(d_hidden, d_loss.reshape(-1, 1), out=out)


def labelled_rows(labels: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Indices (int64) of the rows that carry a label; waits for the device where ``labels`` (N,) are on one.

    Raises:
        ValueError: a label is neither ``ignore_index`` nor inside the vocabulary. A kernel would read out of bounds.
    """
    labelled = labels != ignore_index
    outside = labelled & ((labels < 0) | (labels >= vocabulary))
    rows = labelled.nonzero().squeeze(1)
    if bool(outside.any()):
        bad = int(labels[outside][0])
        raise ValueError(
            f"label {bad} is outside the vocabulary of {vocabulary} and is not ignore_index ({ignore_index})"
        )
    return rows


def check_head_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError where hidden (N, H), weight (V, H), labels (N,) and bias (V,) do not fit each other."""
    shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
    dtypes = f"{hidden.dtype}, {weight.dtype}, {labels.dtype}"
    if hidden.dim() != 2 or weight.dim() != 2 or labels.dim() != 1:
        raise ValueError(f"expected hidden (N, H), weight (V, H), labels (N,); got {shapes}")
    if not (hidden.is_floating_point() and weight.is_floating_point()) or labels.is_floating_point():
        raise ValueError(f"expected floating hidden and weight, integer labels; got {dtypes}")
    if hidden.shape[1] != weight.shape[1]:
        hint = " (these look like logits, not hidden states)" if hidden.shape[1] == weight.shape[0] else ""
        raise ValueError(f"hidden has {hidden.shape[1]} features, the head takes {weight.shape[1]}{hint}")
    if labels.shape[0] != hidden.shape[0]:
        raise ValueError(f"{labels.shape[0]} labels for {hidden.shape[0]} rows")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")


def _check_options(
    softcap: float, label_smoothing: float, num_items: Tensor | int | None, reduction: str, chunk_rows: int | None
) -> None:
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction must be 'sum', 'mean' or 'none', got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides a mean; reduction is {reduction!r}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
