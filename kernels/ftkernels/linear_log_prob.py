"""Log-probabilities and entropies of a linear head, for policy gradients, without ever holding its logits.

Legend: N rows (tokens), H hidden size, V vocabulary size, y a row's label, T temperature; C rows and S entries of the
vocabulary of one tile.

    x = hidden @ weight.T + bias                         (C, S), summed and kept in float32
    u = logit_scale * x
    z = cap(u) / T,  cap(u) = softcap * tanh(u / softcap) if softcap else u
    p_v = exp(z_v) / sum_w exp(z_w)
    log_prob = log p_y = z_y - log sum_v exp(z_v)
    entropy = - sum_v p_v log p_v
    dx_v = cap'(u_v) * logit_scale / T * (dlog_prob * ([v = y] - p_v) - dentropy * p_v * (log p_v + entropy))
    dhidden = dx @ weight,   dweight = dx.T @ hidden,   dbias = sum_rows dx

What backward brings for a row is two factors that nobody knows in forward: the loss forms ratios of these very numbers.
But of the head's input the gradient of log_prob is one vector a row, and backward only scales it:

    d log_prob / d hidden = logit_scale / T * (cap'(u_y) (1 - p_y) W_y - sum_{v != y} cap'(u_v) p_v W_v)

So where the head is frozen, forward gathers the sum over v beside the log-sum-exp, slab after slab of the vocabulary
under a running maximum, as attention does with its values. Two products in all, and (N, H) kept; the label's own weight
is taken out, since 1 - p_y would drown in the rounding of p_y. Where the head is trained, or entropy has a gradient,
one vector a row is not enough: backward goes over the tiles again with what it then knows. Three products, or four with
dweight.

A tile has at most 2048 rows and 16384 entries: the workspace depends neither on V nor on N. Labels equal to
``ignore_index`` cost nothing. Labels are not shifted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, accumulate_dtype, choose_backend, without_autocast
from ftkernels.gemm import compute_dtype, mm_accurate
from ftkernels.limits import LOG_PROB_COLUMNS, LOG_PROB_ROWS
from ftkernels.linear_cross_entropy import check_head_shapes, labelled_rows, vocabulary_parts
from ftkernels.log_prob import LogitOptions, RunningSums, Slab, Upstream, fold, fold_reference, grad, grad_reference


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy_gradient: bool = False,
    rows: Tensor | None = None,
    tile: tuple[int, int] = (LOG_PROB_ROWS, LOG_PROB_COLUMNS),
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of the distribution it is taken from; formulas above.

    Args:
        hidden: (N, H) hidden states, not logits. Any float dtype.
        weight: (V, H) head. The products are taken in autocast's dtype when autocast is on, else in the dtype that both
            promote to, and summed in float32; logits are never rounded to half precision.
        labels: (N,) integer, each in [0, V) or ``ignore_index``. Already shifted.
        bias: (V,) or None.
        softcap: 0 for none; Gemma-2 has 30.
        logit_scale: factor on the logits, before the cap.
        temperature: divides them after it.
        entropy_gradient: the loss uses the entropy. The gradient is right without it, too, for one product more.
        rows: (R,) int64, what ``labelled_rows`` gives for ``labels``, where the caller knows it: finding it out waits
            for the device.
        tile: rows and entries of the vocabulary whose logits exist at a time.

    Returns:
        Log-probabilities and entropies in nats, (N,) float32 (float64 for float64 inputs), 0 where ignored.

    Raises:
        ValueError: shapes that do not fit, a label outside the vocabulary, or an option outside its range.
    """
    check_head_shapes(hidden, weight, labels, bias)
    if softcap < 0 or temperature <= 0:
        raise ValueError(f"softcap must not be negative and temperature must be positive, got {softcap}, {temperature}")
    if min(tile) < 1:
        raise ValueError(f"a tile has at least one row and one entry, got {tile}")
    plan = _Plan(
        options=LogitOptions(float(softcap), float(logit_scale), float(temperature)),
        dtype=compute_dtype(hidden.device.type, hidden, weight),
        rows=labelled_rows(labels, ignore_index, weight.shape[0]) if rows is None else rows,
        tile=tile,
        triton=choose_backend(hidden.device, backend).is_triton,
        entropy_gradient=entropy_gradient,
        grad_enabled=torch.is_grad_enabled(),
    )
    found: tuple[Tensor, Tensor] = _LinearLogProb.apply(hidden, weight, bias, labels, plan)
    return found


def linear_log_prob_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The same function with all logits at once and torch's own autograd. Arguments as ``linear_log_prob``."""
    dtype = compute_dtype(hidden.device.type, hidden, weight)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    z = logits.to(accumulate_dtype(dtype)) * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    labelled = labels != ignore_index
    chosen = log_p.gather(1, labels.clamp(min=0)[:, None].long()).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen * labelled, entropy * labelled


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of one call: options, the products' dtype, indices of the labelled rows, the tile."""

    options: LogitOptions
    dtype: torch.dtype
    rows: Tensor
    tile: tuple[int, int]
    triton: bool
    entropy_gradient: bool
    grad_enabled: bool


class _Tiles:
    """The tiles of one pass: rows chunk by chunk, and for each the slabs of the head, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan) -> None:
        self.head = weight.to(plan.dtype)
        self.bias = bias
        self._hidden, self._labels, self._plan = hidden, labels, plan
        total, vocabulary = int(plan.rows.shape[0]), weight.shape[0]
        self._rows = min(plan.tile[0], max(total, 1))
        slabs = -(-vocabulary // min(plan.tile[1], vocabulary))
        width = -(-vocabulary // slabs)
        self._width = min(-(-width // 16) * 16, vocabulary)  # of equal slabs, a multiple of what products like
        acc = accumulate_dtype(plan.dtype)
        self._buffer = torch.empty(self._rows * self._width, dtype=acc, device=hidden.device)

    def chunks(self) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Yields the place of C rows, their hidden states (C, H) in the products' dtype, and their labels (C,)."""
        plan, total = self._plan, int(self._plan.rows.shape[0])
        for start in range(0, total, self._rows):
            stop = min(start + self._rows, total)
            every = total == self._hidden.shape[0]
            where = slice(start, stop) if every else plan.rows[start:stop]  # a slice copies nothing
            yield where, self._hidden[where].to(plan.dtype), self._labels[where].contiguous()

    def slabs(self, x: Tensor) -> Iterator[tuple[Slab, Tensor]]:
        """Each product of ``x`` with a slab of the head, contiguous, and the slab's rows of the head (S, H)."""
        starts = [at for part in vocabulary_parts(self.head) for at in range(part.start, part.stop, self._width)]
        for start, stop in pairwise([*starts, self.head.shape[0]]):
            head = self.head[start:stop]
            products = self._buffer[: x.shape[0] * head.shape[0]].view(x.shape[0], head.shape[0])
            mm_accurate(x, head.t(), out=products)
            bias = None if self.bias is None else self.bias[start:stop].contiguous()
            yield Slab(products, start, bias), head


@dataclass(slots=True)
class _Found:
    """Results of forward: (N,) each but ``d_hidden`` (N, H), of log_prob alone and without backward's factors."""

    log_probs: Tensor
    entropies: Tensor
    log_sum_exp: Tensor
    d_hidden: Tensor | None


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan, *, gather: bool
) -> _Found:
    tiles = _Tiles(hidden, weight, bias, labels, plan)
    zeros = torch.zeros((3, labels.shape[0]), dtype=accumulate_dtype(plan.dtype), device=hidden.device)
    found = _Found(*zeros, _gradient_like(hidden, plan) if gather else None)
    step = fold if plan.triton else fold_reference
    for where, x, chosen in tiles.chunks():
        running = RunningSums.before(x.shape[0], found.log_probs)
        gathered: Tensor | None = None
        for slab, head in tiles.slabs(x):
            weights, decay = step(slab, chosen, running, plan.options, weights=plan.dtype if gather else None)
            if weights is None:
                continue
            if gathered is None:
                gathered = mm_accurate(weights, head)
            else:
                _add_mm_accurate_(gathered.mul_(decay[:, None]), weights, head)
        log_prob, entropy, log_sum_exp, total = running.finish()
        found.log_probs[where], found.entropies[where], found.log_sum_exp[where] = log_prob, entropy, log_sum_exp
        if found.d_hidden is not None and gathered is not None:
            factor = plan.options.logit_scale / plan.options.temperature
            gathered.mul_((-factor / total)[:, None])
            mine = factor * running.slope * running.others / total  # 1 - p_y without a difference
            found.d_hidden[where] = gathered.addcmul_(mine[:, None], tiles.head[chosen].to(mine.dtype)).to(
                found.d_hidden.dtype
            )
    return found


def _gradient_like(hidden: Tensor, plan: _Plan) -> Tensor:
    """(N, H) for the gradient of ``hidden``, as wide as the products; zeros where rows are ignored."""
    make = torch.zeros if plan.rows.shape[0] < hidden.shape[0] else torch.empty
    return make(hidden.shape, dtype=torch.promote_types(hidden.dtype, plan.dtype), device=hidden.device)


@dataclass(slots=True)
class _Gradients:
    """Gradients of hidden, weight and bias; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    plan: _Plan,
    upstream: Upstream,
    wants: tuple[bool, bool, bool],
) -> _Gradients:
    """A second pass over the tiles; ``upstream`` has all N rows."""
    acc = accumulate_dtype(plan.dtype)
    tiles = _Tiles(hidden, weight, bias, labels, plan)
    out = _Gradients(
        _gradient_like(hidden, plan) if wants[0] else None,
        torch.zeros(weight.shape, dtype=acc, device=weight.device) if wants[1] else None,
        torch.zeros(weight.shape[0], dtype=acc, device=weight.device) if wants[2] else None,
    )
    step = grad if plan.triton else grad_reference
    for where, x, chosen in tiles.chunks():
        mine = Upstream(
            *(
                value[where].contiguous()
                for value in (upstream.log_sum_exp, upstream.entropy, upstream.d_log_prob, upstream.d_entropy)
            )
        )
        gathered: Tensor | None = None
        for slab, head in tiles.slabs(x):
            dx = step(slab, chosen, mine, plan.options, plan.dtype)
            here = slice(slab.start, slab.start + head.shape[0])
            if out.hidden is not None:
                gathered = mm_accurate(dx, head) if gathered is None else _add_mm_accurate_(gathered, dx, head)
            if out.weight is not None:
                _add_mm_accurate_(out.weight[here], dx.t(), x)
            if out.bias is not None:
                out.bias[here] += dx.sum(0, dtype=acc)
        if out.hidden is not None and gathered is not None:
            out.hidden[where] = gathered.to(out.hidden.dtype)
    return out


class _LinearLogProb(torch.autograd.Function):
    """(log-probabilities, entropies). Saves what backward scales, or what it goes over again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        wanted = [bool(n) and plan.grad_enabled for n in ctx.needs_input_grad]
        ctx.needs = (wanted[0], wanted[1], wanted[2])
        again = plan.entropy_gradient or ctx.needs[1] or ctx.needs[2]
        with without_autocast(hidden):
            found = _forward(hidden, weight, bias, labels, plan, gather=ctx.needs[0] and not again)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.d_hidden = plan, found.d_hidden
        ctx.save_for_backward(hidden, weight, bias, labels, found.log_sum_exp, found.entropies)
        return found.log_probs, found.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_prob: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum_exp, entropies = ctx.saved_tensors
        d_hidden, ctx.d_hidden = ctx.d_hidden, None  # scaled in place: a second backward goes over the tiles again
        if d_log_prob is None and d_entropy is None:
            return (None,) * 5
        if d_hidden is not None and d_log_prob is not None and d_entropy is None:
            # As a column the factor multiplies in float32; the product is rounded once.
            return (torch.mul(d_hidden, d_log_prob[:, None], out=d_hidden).to(hidden.dtype), None, None, None, None)
        del d_hidden
        nothing = torch.zeros_like(log_sum_exp)
        upstream = Upstream(
            log_sum_exp,
            entropies,
            nothing if d_log_prob is None else d_log_prob.to(nothing.dtype),
            nothing if d_entropy is None else d_entropy.to(nothing.dtype),
        )
        with without_autocast(hidden):
            out = _backward(hidden, weight, bias, labels, ctx.plan, upstream, ctx.needs)
        return (
            None if out.hidden is None else out.hidden.to(hidden.dtype),
            None if out.weight is None else out.weight.to(weight.dtype),
            None if out.bias is None or bias is None else out.bias.to(bias.dtype),
            None,
            None,
        )


def _add_mm_accurate_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``out += a @ b`` in place in ``out``'s dtype, which is float32 for half-precision operands: no sum is rounded to
    half on the way.
    """
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        return out
    return out.addmm_(a.to(out.dtype), b.to(out.dtype))
