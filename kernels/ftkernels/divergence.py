"""Divergences of rows of logits and their gradients, both rows of logits whole: formulas in ``linear_divergence``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.cross_entropy import falling
from ftkernels.device import on_device_of, triton_dtype
from ftkernels.log_prob import LogitOptions


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
