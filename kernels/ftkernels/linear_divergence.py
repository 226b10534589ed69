"""The divergence of a student's next-token distribution from a teacher's, out of the hidden states of both.

Legend: N rows (tokens), H and H' the hidden sizes of student and teacher, V vocabulary size, T temperature, w a row's
weight; C rows of which the logits exist at a time.

    z = cap(logit_scale * (hidden @ weight.T + bias)) / T,   cap(u) = softcap * tanh(u / softcap) if softcap else u
    a = log softmax(z) of the student, b the teacher's, p = exp(a), q = exp(b)
    beta = 0, forward KL:   D = sum_v q_v (b_v - a_v)                         dD/dz_v = p_v - q_v
    beta = 1, reverse KL:   D = sum_v p_v (a_v - b_v)                         dD/dz_v = p_v (a_v - b_v - D)
    else, generalized Jensen-Shannon:   m = log((1 - beta) p + beta q),   g_v = (1 - beta) p_v (a_v - m_v)
        D = beta sum_v q_v (b_v - m_v) + sum_v g_v                            dD/dz_v = g_v - p_v sum_w g_w
    loss = sum_i w_i D_i

Source: Agarwal et al. 2023, arXiv:2306.13649, equation 1; ``beta`` is that of TRL's DistillationTrainer and GKDTrainer.

The weights of the rows are known beforehand, so what backward brings is one factor for all of them: forward takes the
gradients along, three products of a head's size where the student's head is frozen and four where it is trained, and
keeps (N, H). Of C rows all logits exist, in float32, twice: a gigabyte for a vocabulary of 128,256.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.cross_entropy import falling
from ftkernels.device import (
    BackendName,
    accumulate_dtype,
    choose_backend,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
    without_autocast,
)
from ftkernels.gemm import add_mm_accurate_, compute_dtype, mm_accurate
from ftkernels.limits import divergence_rows_at_once
from ftkernels.linear_cross_entropy import logits_buffer, vocabulary_parts
from ftkernels.log_prob import LogitOptions

#: Rows of a temporary where half precision is added off the GPU.
_ADDED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class LinearHead:
    """Hidden states (N, H), a head (V, H), its bias (V,) or None, and what happens to its logits.

    A head may have more entries than the other one, which pads its vocabulary: those are left out.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    logit_scale: float = 1.0

    def within(self, vocabulary: int) -> LinearHead:
        """The same with the first entries of the vocabulary."""
        bias = None if self.bias is None else self.bias[:vocabulary]
        return LinearHead(self.hidden, self.weight[:vocabulary], bias, self.softcap, self.logit_scale)


@dataclass(frozen=True, slots=True)
class Divergence:
    """``loss``: scalar. ``rows`` and ``entropies``: (N,) in nats, of the student, without gradients."""

    loss: Tensor
    rows: Tensor
    entropies: Tensor


def linear_divergence(
    student: LinearHead,
    teacher: LinearHead,
    weights: Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    backend: BackendName = "auto",
) -> Divergence:
    """The weighted sum of divergences; formulas above. Gradients go to the student's tensors alone.

    Args:
        weights: (N,), the weight of each row in the sum.
        beta: 0 for the forward KL divergence, 1 for the reverse one, between them the generalized Jensen-Shannon one.

    Raises:
        ValueError: shapes that do not fit, or an option outside its range.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ValueError(f"beta lies in [0, 1] and temperature is positive, got {beta}, {temperature}")
    rows = {student.hidden.shape[0], teacher.hidden.shape[0], weights.shape[0]}
    if len(rows) != 1 or any(one.hidden.shape[1] != one.weight.shape[1] for one in (student, teacher)):
        shapes = [tuple(one.shape) for one in (student.hidden, student.weight, teacher.hidden, teacher.weight, weights)]
        raise ValueError(f"student, teacher and weights do not fit each other: {shapes}")
    vocabulary = min(student.weight.shape[0], teacher.weight.shape[0])
    mine, theirs = student.within(vocabulary), teacher.within(vocabulary)
    plan = _Plan(
        LogitOptions(mine.softcap, mine.logit_scale, temperature),
        LogitOptions(theirs.softcap, theirs.logit_scale, temperature),
        float(beta),
        theirs,
        choose_backend(mine.hidden.device, backend).is_triton,
    )
    return Divergence(*_LinearDivergence.apply(mine.hidden, mine.weight, mine.bias, weights, plan))


def linear_divergence_reference(
    student: LinearHead, teacher: LinearHead, weights: Tensor, *, beta: float = 1.0, temperature: float = 1.0
) -> Divergence:
    """The same function with all logits at once and torch's own autograd."""
    vocabulary = min(student.weight.shape[0], teacher.weight.shape[0])
    a, b = (_log_probs(one.within(vocabulary), temperature) for one in (student, teacher))
    b = b.detach()
    if beta == 0:
        rows = (b.exp() * (b - a)).sum(-1)
    elif beta == 1:
        rows = (a.exp() * (a - b)).sum(-1)
    else:
        share = torch.tensor(beta, dtype=a.dtype, device=a.device)
        m = torch.logaddexp(a + torch.log1p(-share), b + torch.log(share))
        rows = (share * b.exp() * (b - m) + (1 - share) * a.exp() * (a - m)).sum(-1)
    entropies = -(a.exp() * a).sum(-1)
    return Divergence((weights * rows).sum(), rows.detach(), entropies.detach())


def _log_probs(one: LinearHead, temperature: float) -> Tensor:
    dtype = compute_dtype(one.hidden.device.type, one.hidden, one.weight)
    logits = F.linear(one.hidden.to(dtype), one.weight.to(dtype), None if one.bias is None else one.bias.to(dtype))
    u = logits.to(accumulate_dtype(dtype)) * one.logit_scale
    if one.softcap:
        u = one.softcap * torch.tanh(u / one.softcap)
    return torch.log_softmax(u / temperature, -1)


@dataclass(frozen=True, slots=True)
class _Plan:
    student: LogitOptions
    teacher: LogitOptions
    beta: float
    head: LinearHead
    triton: bool


class _LinearDivergence(torch.autograd.Function):
    """(loss, rows, entropies). Keeps the gradients, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(hidden):
            found, gradients = _computed(hidden, weight, bias, weights, plan, ctx.needs_input_grad[:3])
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        loss = (found.divergence * weights.to(found.divergence.dtype)).sum()
        ctx.mark_non_differentiable(found.divergence, found.entropy)
        return loss, found.divergence, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a divergence can be asked for once")
        if d_loss is None:
            return (None,) * 5
        return (*(None if one is None else one.mul_(d_loss.to(one.dtype)) for one in gradients), None, None)


def _computed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor, plan: _Plan, wants: tuple[bool, ...]
) -> tuple[RowResult, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Divergence and entropy of all rows, and the gradients of the weighted sum that are wanted."""
    mine = LinearHead(hidden, weight, bias)
    dtype = compute_dtype(hidden.device.type, hidden, weight)
    acc = accumulate_dtype(dtype)
    count, vocabulary = hidden.shape[0], weight.shape[0]
    found = RowResult(*hidden.new_zeros((2, count), dtype=acc))
    d_hidden = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, dtype)) if wants[0] else None
    d_weight = hidden.new_zeros(weight.shape, dtype=acc) if wants[1] else None
    d_bias = hidden.new_zeros(vocabulary, dtype=acc) if bias is not None and wants[2] else None
    size = min(divergence_rows_at_once(hidden.device.type, vocabulary, acc.itemsize), max(count, 1))
    students, teachers = _Logits(mine, size), _Logits(plan.head, size)
    stored = store_dtype(dtype) if plan.triton else dtype
    gradient = logits_buffer(size, vocabulary, hidden.new_empty(0, dtype=stored)) if any(wants) else None
    step = divergence_rows if plan.triton else divergence_rows_reference
    for start in range(0, count, size):
        where = slice(start, min(start + size, count))
        dz = None if gradient is None else gradient[: where.stop - start]
        one = step(students.of(where), teachers.of(where), weights[where], plan.student, plan.teacher, plan.beta, dz)
        found.divergence[where], found.entropy[where] = one.divergence, one.entropy
        if dz is None:
            continue
        dz = rounded(dz, dtype)
        x, gathered = students.rows(where), None
        for part in vocabulary_parts(students.head):
            if d_weight is not None:
                add_mm_accurate_(d_weight[part], dz[:, part].t(), x, rows=_ADDED_ROWS)
            if d_hidden is not None and gathered is None:
                gathered = mm_accurate(dz[:, part], students.head[part])
            elif gathered is not None:
                add_mm_accurate_(gathered, dz[:, part], students.head[part], rows=_ADDED_ROWS)
        if d_hidden is not None and gathered is not None:
            d_hidden[where] = gathered.to(d_hidden.dtype)
        if d_bias is not None:
            d_bias += dz.sum(0, dtype=acc)
    gradients = (d_hidden, d_weight, d_bias)
    kept = [
        None if one is None else one.to(like.dtype) for one, like in zip(gradients, (hidden, weight, bias), strict=True)
    ]
    return found, (kept[0], kept[1], kept[2])


class _Logits:
    """Logits of a head, some rows at a time, in one buffer of the accumulating dtype."""

    def __init__(self, one: LinearHead, size: int) -> None:
        dtype = compute_dtype(one.hidden.device.type, one.hidden, one.weight)
        acc = accumulate_dtype(dtype)
        self.head, self._hidden, self._dtype = one.weight.to(dtype), one.hidden, dtype
        self._bias = one.bias
        self._buffer = logits_buffer(size, one.weight.shape[0], one.hidden.new_empty(0, dtype=acc))

    def rows(self, where: slice) -> Tensor:
        """(C, H) hidden states in the products' dtype."""
        return self._hidden[where].to(self._dtype)

    def of(self, where: slice) -> Tensor:
        """(C, V), overwritten by the next call."""
        x = self.rows(where)
        out = self._buffer[: x.shape[0]]
        for part in vocabulary_parts(self.head):
            mm_accurate(x, self.head[part].t(), out=out[:, part])
        return out if self._bias is None else out.add_(self._bias.to(out.dtype))


@dataclass(frozen=True, slots=True)
class RowResult:
    """(C,) each, in nats."""

    divergence: Tensor
    entropy: Tensor


def divergence_rows_reference(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    of_student: LogitOptions,
    of_teacher: LogitOptions,
    beta: float,
    gradient: Tensor | None,
) -> RowResult:
    """Divergence and entropy of each row.

    Args:
        student, teacher: (C, V) products of the heads, float32 or float64.
        weights: (C,), factors of the gradients.
        gradient: (C, V), is given that of the student's products; None: nobody wants it.
    """
    z, slope = _capped(student, of_student)
    a, b = torch.log_softmax(z, -1), torch.log_softmax(_capped(teacher, of_teacher)[0], -1)
    p = a.exp()
    if beta == 0:
        q = b.exp()
        divergence, dz = (q * (b - a)).sum(-1), p - q
    else:
        share = torch.tensor(beta, dtype=a.dtype, device=a.device)
        m = b if beta == 1 else torch.logaddexp(a + torch.log1p(-share), b + torch.log(share))
        g = p * (a - m) * (1 if beta == 1 else 1 - share)
        mine = g.sum(-1)
        divergence = mine if beta == 1 else mine + share * (b.exp() * (b - m)).sum(-1)
        dz = g - p * mine[:, None]
    if gradient is not None:
        factor = weights.to(a.dtype)[:, None] * (of_student.logit_scale / of_student.temperature)
        gradient.copy_(dz * slope * factor)
    return RowResult(divergence, -(p * a).sum(-1))


def _capped(products: Tensor, options: LogitOptions) -> tuple[Tensor, Tensor | float]:
    """z, and the cap's derivative."""
    u = products * options.logit_scale
    if not options.softcap:
        return u / options.temperature, 1.0
    bent = torch.tanh(u / options.softcap)
    return options.softcap * bent / options.temperature, 1 - bent * bent


#: Entries of a row that a program holds at a time.
_BLOCK = 4096


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    of_student: LogitOptions,
    of_teacher: LogitOptions,
    beta: float,
    gradient: Tensor | None,
) -> RowResult:
    """As :func:`divergence_rows_reference`, a program a row, which reads both three times."""
    rows, vocabulary = student.shape
    found = RowResult(student.new_empty(rows), student.new_empty(rows))
    if not rows:
        return found
    out = student if gradient is None else gradient
    with on_device_of(student):
        _divergence_kernel[(rows,)](
            student,
            student.stride(0),
            teacher,
            teacher.stride(0),
            weights.contiguous(),
            found.divergence,
            found.entropy,
            out,
            out.stride(0),
            vocabulary,
            of_student.softcap,
            of_student.logit_scale,
            1.0 / of_student.temperature,
            of_teacher.softcap,
            of_teacher.logit_scale,
            1.0 / of_teacher.temperature,
            beta,
            math.log1p(-beta) if beta < 1 else 0.0,
            math.log(beta) if beta > 0 else 0.0,
            STUDENT_CAP=of_student.softcap > 0,
            TEACHER_CAP=of_teacher.softcap > 0,
            KIND=0 if beta == 0 else 1 if beta == 1 else 2,
            WANT=gradient is not None,
            ACC=triton_dtype(student.dtype),
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=8,
        )
    return found


@triton.jit
def _load_z(ptr, row, stride, at, V, softcap, factor, over, CAP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Some entries of a row: (inside, z, the cap's derivative); z of those outside is -inf."""
    lanes = at + tl.arange(0, BLOCK)
    inside = lanes < V
    u = tl.load(ptr + row * stride + lanes, mask=inside, other=0.0).to(ACC) * tl.cast(factor, ACC)
    if CAP:
        cap = tl.cast(softcap, ACC)
        r = falling(u, cap)
        z = (cap - 2.0 * cap * r) * tl.cast(over, ACC)
        slope = 4.0 * r * (1.0 - r)
    else:
        z = u * tl.cast(over, ACC)
        slope = tl.full((BLOCK,), 1.0, ACC)
    return inside, tl.where(inside, z, -float("inf")), slope


@triton.jit
def _mixed(a, b, log_rest, log_share, KIND: tl.constexpr):
    """log m; b for the reverse KL divergence."""
    if KIND == 1:
        m = b
    else:
        left, right = a + log_rest, b + log_share
        above = tl.maximum(left, right)
        m = above + tl.log(tl.exp(left - above) + tl.exp(right - above))
    return m


@triton.jit
def _divergence_kernel(
    student_ptr,
    student_stride,
    teacher_ptr,
    teacher_stride,
    weights_ptr,
    divergence_ptr,
    entropy_ptr,
    out_ptr,
    out_stride,
    V,
    s_cap,
    s_factor,
    s_over,
    t_cap,
    t_factor,
    t_over,
    beta,
    log_rest,
    log_share,
    STUDENT_CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    KIND: tl.constexpr,
    WANT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    s_top = tl.full((), -float("inf"), ACC)
    t_top = tl.full((), -float("inf"), ACC)
    s_sum = tl.full((), 0.0, ACC)
    t_sum = tl.full((), 0.0, ACC)
    for at in range(0, V, BLOCK):
        _, s, _ = _load_z(student_ptr, row, student_stride, at, V, s_cap, s_factor, s_over, STUDENT_CAP, ACC, BLOCK)
        _, t, _ = _load_z(teacher_ptr, row, teacher_stride, at, V, t_cap, t_factor, t_over, TEACHER_CAP, ACC, BLOCK)
        s_new, t_new = tl.maximum(s_top, tl.max(s, 0)), tl.maximum(t_top, tl.max(t, 0))
        s_sum = s_sum * tl.exp(s_top - s_new) + tl.sum(tl.exp(s - s_new), 0)
        t_sum = t_sum * tl.exp(t_top - t_new) + tl.sum(tl.exp(t - t_new), 0)
        s_top, t_top = s_new, t_new
    s_all, t_all = s_top + tl.log(s_sum), t_top + tl.log(t_sum)
    share = tl.cast(beta, ACC)
    rest = tl.cast(1.0, ACC) if KIND == 1 else 1.0 - share
    mine = tl.full((), 0.0, ACC)
    others = tl.full((), 0.0, ACC)
    entropy = tl.full((), 0.0, ACC)
    for at in range(0, V, BLOCK):
        inside, s, _ = _load_z(
            student_ptr, row, student_stride, at, V, s_cap, s_factor, s_over, STUDENT_CAP, ACC, BLOCK
        )
        _, t, _ = _load_z(teacher_ptr, row, teacher_stride, at, V, t_cap, t_factor, t_over, TEACHER_CAP, ACC, BLOCK)
        a, b = tl.where(inside, s - s_all, 0.0), tl.where(inside, t - t_all, 0.0)
        p = tl.where(inside, tl.exp(a), 0.0)
        entropy -= tl.sum(p * a, 0)
        if KIND == 0:
            mine += tl.sum(tl.where(inside, tl.exp(b), 0.0) * (b - a), 0)
        else:
            m = _mixed(a, b, tl.cast(log_rest, ACC), tl.cast(log_share, ACC), KIND)
            mine += tl.sum(rest * p * (a - m), 0)
            if KIND == 2:
                others += tl.sum(share * tl.where(inside, tl.exp(b), 0.0) * (b - m), 0)
    tl.store(divergence_ptr + row, mine + others)
    tl.store(entropy_ptr + row, entropy)
    if WANT:
        factor = tl.load(weights_ptr + row).to(ACC) * tl.cast(s_factor, ACC) * tl.cast(s_over, ACC)
        for at in range(0, V, BLOCK):
            inside, s, slope = _load_z(
                student_ptr, row, student_stride, at, V, s_cap, s_factor, s_over, STUDENT_CAP, ACC, BLOCK
            )
            _, t, _ = _load_z(teacher_ptr, row, teacher_stride, at, V, t_cap, t_factor, t_over, TEACHER_CAP, ACC, BLOCK)
            a, b = tl.where(inside, s - s_all, 0.0), tl.where(inside, t - t_all, 0.0)
            p = tl.exp(a)
            if KIND == 0:
                dz = p - tl.exp(b)
            else:
                m = _mixed(a, b, tl.cast(log_rest, ACC), tl.cast(log_share, ACC), KIND)
                dz = p * (rest * (a - m) - mine)
            lanes = at + tl.arange(0, BLOCK)
            tl.store(out_ptr + row * out_stride + lanes, dz * slope * factor, mask=inside)
