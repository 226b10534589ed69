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

Of a teacher of which the k likeliest entries T of each row are known (:class:`TopLogProbs`), all others are one class,
the tail: the sums run over k + 1 classes, c(v) the class of v. With u_c = log sum_{v in c} exp z_v, a = log softmax(u):

    b_tail = log(1 - sum_{v in T} q_v)                   dD/dz_v = dD/du_c(v) exp(z_v - u_c(v))

Nothing is renormalized, and with k = V it is the divergence above. Of coarser classes no divergence is larger.

Source: Agarwal et al. 2023, arXiv:2306.13649, equation 1; ``beta`` is that of TRL's DistillationTrainer and GKDTrainer.

The weights of the rows are known beforehand, so what backward brings is one factor for all of them: forward takes the
gradients along, three products of a head's size where the student's head is frozen and four where it is trained, and
keeps (N, H). Of C rows all logits exist, in float32, twice: a gigabyte for a vocabulary of 128,256.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
class TopLogProbs:
    """A teacher's k likeliest entries of each row, the likeliest first: ``ids`` (N, k) int64, ``log_probs`` (N, k), and
    ``rest`` (N,), the logarithm of what all others of the first ``vocabulary`` entries have; in nats.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    vocabulary: int

    def of(self, where: slice) -> TopLogProbs:
        """Of some rows."""
        return TopLogProbs(self.ids[where], self.log_probs[where], self.rest[where], self.vocabulary)


@dataclass(frozen=True, slots=True)
class Divergence:
    """``loss``: scalar. (N,) each, without gradients: ``rows`` and the student's ``entropies`` in nats, and whether its
    likeliest entry is the teacher's.
    """

    loss: Tensor
    rows: Tensor
    entropies: Tensor
    agreed: Tensor


def linear_divergence(
    student: LinearHead,
    teacher: LinearHead | TopLogProbs,
    weights: Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    backend: BackendName = "auto",
) -> Divergence:
    """The weighted sum of divergences; formulas above. Gradients go to the student's tensors alone. Log-probabilities
    of a teacher are those at ``temperature``.

    Args:
        weights: (N,), the weight of each row in the sum.
        beta: 0 for the forward KL divergence, 1 for the reverse one, between them the generalized Jensen-Shannon one.

    Raises:
        ValueError: shapes that do not fit, or an option outside its range.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ValueError(f"beta lies in [0, 1] and temperature is positive, got {beta}, {temperature}")
    mine, theirs = _fitting(student, teacher, weights)
    plan = _Plan(
        _options(mine, temperature),
        temperature,
        float(beta),
        theirs,
        choose_backend(mine.hidden.device, backend).is_triton,
    )
    return Divergence(*_LinearDivergence.apply(mine.hidden, mine.weight, mine.bias, weights, plan))


def _fitting(
    student: LinearHead, teacher: LinearHead | TopLogProbs, weights: Tensor
) -> tuple[LinearHead, LinearHead | TopLogProbs]:
    """Both over the entries that both have. Raises ValueError for shapes that do not fit."""
    fits = student.hidden.shape[1] == student.weight.shape[1]
    if isinstance(teacher, TopLogProbs):
        given, vocabulary = [teacher.ids, teacher.log_probs, teacher.rest], teacher.vocabulary
        fits &= teacher.ids.shape == teacher.log_probs.shape and vocabulary <= student.weight.shape[0]
    else:
        given, vocabulary = [teacher.hidden], min(student.weight.shape[0], teacher.weight.shape[0])
        fits &= teacher.hidden.shape[1] == teacher.weight.shape[1]
        teacher = teacher.within(vocabulary)
    if not fits or len({one.shape[0] for one in (student.hidden, *given, weights)}) != 1:
        shapes = [tuple(one.shape) for one in (student.hidden, student.weight, *given, weights)]
        raise ValueError(f"student, teacher and weights do not fit each other: {shapes}")
    return student.within(vocabulary), teacher


def _options(head: LinearHead, temperature: float) -> LogitOptions:
    return LogitOptions(head.softcap, head.logit_scale, temperature)


@torch.no_grad()
def top_log_probs(head: LinearHead, count: int, *, temperature: float = 1.0) -> TopLogProbs:
    """The ``count`` likeliest entries of each row, and what is left for all others."""
    rows, vocabulary = head.hidden.shape[0], head.weight.shape[0]
    count, options = min(count, vocabulary), _options(head, temperature)
    with without_autocast(head.hidden):
        acc = accumulate_dtype(compute_dtype(head.hidden.device.type, head.hidden, head.weight))
        size = min(divergence_rows_at_once(head.hidden.device.type, vocabulary, acc.itemsize), max(rows, 1))
        logits, found = _Logits(head, size), []
        for start in range(0, rows, size):
            where = slice(start, min(start + size, rows))
            z = _cap_(logits.of(where), options)
            top, ids = z.topk(count, sorted=True)
            rest = torch.logsumexp(z.scatter_(1, ids, -torch.inf), 1)
            whole = torch.logaddexp(torch.logsumexp(top, 1), rest)
            found.append((ids, top - whole[:, None], rest - whole))
    if not found:
        empty = head.hidden.new_empty((0, count), dtype=acc)
        found.append((empty.long(), empty, empty.new_empty(0)))
    ids, log_probs, rest = (torch.cat(part) for part in zip(*found, strict=True))
    return TopLogProbs(ids, log_probs, rest, vocabulary)


def linear_divergence_reference(
    student: LinearHead,
    teacher: LinearHead | TopLogProbs,
    weights: Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> Divergence:
    """The same function with all logits at once and torch's own autograd."""
    student, teacher = _fitting(student, teacher, weights)
    of_all = a = _log_probs(student, temperature)
    if isinstance(teacher, TopLogProbs):
        b, best = teacher.log_probs.to(a.dtype), teacher.ids[:, 0]
        a = of_all.gather(1, teacher.ids)
        if teacher.ids.shape[1] < teacher.vocabulary:
            a = torch.cat([a, of_all.scatter(1, teacher.ids, -torch.inf).logsumexp(1, keepdim=True)], 1)
            b = torch.cat([b, teacher.rest.to(a.dtype)[:, None]], 1)
    else:
        b = _log_probs(teacher, temperature).detach()
        best = b.argmax(-1)
    if beta == 0:
        rows = (b.exp() * (b - a)).sum(-1)
    elif beta == 1:
        rows = (a.exp() * (a - b)).sum(-1)
    else:
        share = torch.tensor(beta, dtype=a.dtype, device=a.device)
        m = torch.logaddexp(a + torch.log1p(-share), b + torch.log(share))
        rows = (share * b.exp() * (b - m) + (1 - share) * a.exp() * (a - m)).sum(-1)
    entropies = -(of_all.exp() * of_all).sum(-1)
    return Divergence((weights * rows).sum(), rows.detach(), entropies.detach(), of_all.argmax(-1) == best)


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
    temperature: float
    beta: float
    teacher: LinearHead | TopLogProbs
    triton: bool


class _LinearDivergence(torch.autograd.Function):
    """(loss, rows, entropies, agreed). Keeps the gradients, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with without_autocast(hidden):
            found, gradients = _computed(hidden, weight, bias, weights, plan, ctx.needs_input_grad[:3])
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        loss = (found.divergence * weights.to(found.divergence.dtype)).sum()
        ctx.mark_non_differentiable(found.divergence, found.entropy, found.agreed)
        return loss, found.divergence, found.entropy, found.agreed

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
    """What is known of all rows, and the gradients of the weighted sum that are wanted."""
    mine = LinearHead(hidden, weight, bias)
    dtype = compute_dtype(hidden.device.type, hidden, weight)
    acc = accumulate_dtype(dtype)
    count, vocabulary = hidden.shape[0], weight.shape[0]
    found = RowResult(*hidden.new_zeros((2, count), dtype=acc), hidden.new_zeros(count, dtype=torch.bool))
    d_hidden = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, dtype)) if wants[0] else None
    d_weight = hidden.new_zeros(weight.shape, dtype=acc) if wants[1] else None
    d_bias = hidden.new_zeros(vocabulary, dtype=acc) if bias is not None and wants[2] else None
    size = min(divergence_rows_at_once(hidden.device.type, vocabulary, acc.itemsize), max(count, 1))
    students, against = _Logits(mine, size), _against(plan, size)
    stored = store_dtype(dtype) if plan.triton else dtype
    gradient = logits_buffer(size, vocabulary, hidden.new_empty(0, dtype=stored)) if any(wants) else None
    for start in range(0, count, size):
        where = slice(start, min(start + size, count))
        dz = None if gradient is None else gradient[: where.stop - start]
        one = against(students.of(where), where, weights[where], dz)
        found.divergence[where], found.entropy[where], found.agreed[where] = one.divergence, one.entropy, one.agreed
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


def _against(plan: _Plan, size: int) -> Callable[[Tensor, slice, Tensor, Tensor | None], RowResult]:
    """What compares the student's products, some rows at a time, with the teacher: it gets these, which rows they are,
    their weights, and a place for the gradient.
    """
    teacher = plan.teacher
    if isinstance(teacher, TopLogProbs):
        return lambda products, where, weights, dz: top_divergence_rows(
            products, teacher.of(where), weights, plan.student, plan.beta, dz
        )
    logits, options = _Logits(teacher, size), _options(teacher, plan.temperature)
    step = divergence_rows if plan.triton else divergence_rows_reference
    return lambda products, where, weights, dz: step(
        products, logits.of(where), weights, plan.student, options, plan.beta, dz
    )


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
    """(C,) each: in nats, and whether the likeliest entry is the teacher's."""

    divergence: Tensor
    entropy: Tensor
    agreed: Tensor


def divergence_rows_reference(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    of_student: LogitOptions,
    of_teacher: LogitOptions,
    beta: float,
    gradient: Tensor | None,
) -> RowResult:
    """What is known of each row.

    Args:
        student, teacher: (C, V) products of the heads, float32 or float64.
        weights: (C,), factors of the gradients.
        gradient: (C, V), is given that of the student's products; None: nobody wants it.
    """
    z, slope = _capped(student, of_student)
    a, b = torch.log_softmax(z, -1), torch.log_softmax(_capped(teacher, of_teacher)[0], -1)
    divergence, dz = _of_classes(a, b, beta)
    if gradient is not None:
        factor = weights.to(a.dtype)[:, None] * (of_student.logit_scale / of_student.temperature)
        gradient.copy_(dz * slope * factor)
    return RowResult(divergence, -(a.exp() * a).sum(-1), a.argmax(-1) == b.argmax(-1))


def _of_classes(a: Tensor, b: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(C,) divergence of log-probabilities (C, classes), and its gradient with respect to the logits of ``a``."""
    p = a.exp()
    if beta == 0:
        q = b.exp()
        return (q * (b - a)).sum(-1), p - q
    share = torch.tensor(beta, dtype=a.dtype, device=a.device)
    m = b if beta == 1 else torch.logaddexp(a + torch.log1p(-share), b + torch.log(share))
    g = p * (a - m) * (1 if beta == 1 else 1 - share)
    mine = g.sum(-1)
    divergence = mine if beta == 1 else mine + share * (b.exp() * (b - m)).sum(-1)
    return divergence, g - p * mine[:, None]


def top_divergence_rows(
    student: Tensor,
    teacher: TopLogProbs,
    weights: Tensor,
    of_student: LogitOptions,
    beta: float,
    gradient: Tensor | None,
) -> RowResult:
    """As :func:`divergence_rows_reference`, of a teacher's likeliest entries. ``student`` is written over."""
    ids, acc = teacher.ids, student.dtype
    has_tail = ids.shape[1] < teacher.vocabulary
    z = _cap_(student, of_student)
    agreed = z.argmax(-1) == ids[:, 0]
    u, b = z.gather(1, ids), teacher.log_probs.to(acc)
    slope = _slope(u, of_student)
    if has_tail:
        tail = torch.logsumexp(z.scatter_(1, ids, -torch.inf), 1, keepdim=True)
        u, b = torch.cat([u, tail], 1), torch.cat([b, teacher.rest.to(acc)[:, None]], 1)
    a, whole = torch.log_softmax(u, -1), torch.logsumexp(u, 1)
    divergence, du = _of_classes(a, b, beta)
    mean = (a.exp() * u)[:, : ids.shape[1]].sum(-1)  # of z, under the student
    within = torch.zeros_like(z)  # exp(z - u) in the tail
    if has_tail:
        torch.sub(z, tail, out=within).exp_()
        z.scatter_(1, ids, 0.0)
        of_tail = within * z if of_student.softcap else z.mul_(within)  # a cap's derivative needs z once more
        mean = mean + a[:, -1].exp() * of_tail.sum(-1)
    if gradient is not None:
        du = du * weights.to(acc)[:, None] * (of_student.logit_scale / of_student.temperature)
        if has_tail:
            within.mul_(du[:, -1:])
            if of_student.softcap:
                within.mul_(z.mul_(of_student.temperature / of_student.softcap).square_().neg_().add_(1))
        gradient.copy_(within)
        gradient.scatter_(1, ids, (du[:, : ids.shape[1]] * slope).to(gradient.dtype))
    return RowResult(divergence, whole - mean, agreed)


def _cap_(products: Tensor, options: LogitOptions) -> Tensor:
    """z, in the place of the products."""
    if not options.softcap:
        return products.mul_(options.logit_scale / options.temperature)
    return products.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap / options.temperature)


def _slope(z: Tensor, options: LogitOptions) -> Tensor | float:
    """The cap's derivative where it has given z."""
    return 1 - (z * options.temperature / options.softcap) ** 2 if options.softcap else 1.0


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
    found = RowResult(*student.new_empty(2, rows), student.new_empty(rows, dtype=torch.bool))
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
            found.agreed,
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
    agreed_ptr,
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
    s_best = tl.full((), 0, tl.int32)
    t_best = tl.full((), 0, tl.int32)
    for at in range(0, V, BLOCK):
        _, s, _ = _load_z(student_ptr, row, student_stride, at, V, s_cap, s_factor, s_over, STUDENT_CAP, ACC, BLOCK)
        _, t, _ = _load_z(teacher_ptr, row, teacher_stride, at, V, t_cap, t_factor, t_over, TEACHER_CAP, ACC, BLOCK)
        s_most, s_lane = tl.max(s, 0, return_indices=True)
        t_most, t_lane = tl.max(t, 0, return_indices=True)
        s_best, t_best = tl.where(s_most > s_top, at + s_lane, s_best), tl.where(t_most > t_top, at + t_lane, t_best)
        s_new, t_new = tl.maximum(s_top, s_most), tl.maximum(t_top, t_most)
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
    tl.store(agreed_ptr + row, s_best == t_best)
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
