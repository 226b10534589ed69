"""The products that every fused LoRA operation shares, forward and backward.

Legend: M rows, I input features, O output features of one projection, P projections that read the same input, K their
padded rank. ``ftkernels.lowrank_plan`` packs their adapters into a (P * K, I) and b (sum O_p, K). Forward:

    xa  (M, P * K)       x @ a.T

so one skinny GEMM serves all P. Backward, with dxa_p = dy_p @ B_p:

    dx  = dxa @ a + dy @ W           delta first, then the base GEMM accumulates onto it
    dA_p = s_p * dxa_p.T @ x
    dB_p = dy_p.T @ xa_p             xa carries s_p already

and where the projections themselves are trained:

    dW_p = dy_p.T @ x,   db_p = sum over rows of dy_p

With a norm in front, x = norm(z) = rstd * z * w, and x is neither saved nor formed again:

    dA_p = s_p * ((dxa_p * rstd).T @ z) * w

but for dW, which reads all of x: that is formed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ftkernels.device import accumulate_dtype
from ftkernels.fp8 import E4M3, Fp8Rows, e4m3_store
from ftkernels.gemm import add_mm_, mm_accurate
from ftkernels.limits import WIDEST_ROW
from ftkernels.lowrank_plan import GroupPlan, Packed, pack_adapters
from ftkernels.primitives import RowSums, row_sums
from ftkernels.projection import dense, gradient_dtype, joint_matrix, multiplies, weight_tensors
from ftkernels.rms_norm import norm_backward, norm_backward_torch, norm_forward, norm_forward_torch
from ftkernels.side_stream import SideStream
from ftkernels.thin_products import OfA, OfB, ThinGrads, takes, thin_products


def enter(plan: GroupPlan, x: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The projections' input (M, I) in ``plan.dtype``, and the norm's rstd (M,) or None. ``x`` is (M, I)."""
    if plan.norm_form is None:
        return x.to(plan.dtype), None
    if plan.triton and x.shape[1] <= WIDEST_ROW:
        y, _, rstd = norm_forward(x, norm_weight, plan.eps, plan.norm_form, out_dtype=plan.dtype)
        return y, rstd
    return norm_forward_torch(x, norm_weight, plan.eps, plan.norm_form, plan.dtype)


def enter_base(plan: GroupPlan, x: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor | None, Fp8Rows | None]:
    """``enter``, and the input quantized by rows for an fp8 product, or None.

    The norm's kernel holds each row anyway, so quantizing it there is free. Elsewhere the product quantizes its input.
    """
    on_kernel = plan.triton and x.shape[1] <= WIDEST_ROW
    if plan.fp8 is None or plan.norm_form is None or not on_kernel:
        return *enter(plan, x, norm_weight), None
    q = torch.empty(x.shape, dtype=e4m3_store(), device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    y, _, rstd = norm_forward(x, norm_weight, plan.eps, plan.norm_form, out_dtype=plan.dtype, quantized=(q, scale))
    return y, rstd, Fp8Rows(q.to(E4M3), scale)


def project(plan: GroupPlan, packed: Packed, x: Tensor) -> Tensor | None:
    """xa (M, P * K), or None without adapters; dropout is applied to each adapter's own copy of ``x``."""
    if packed.a is None:
        return None
    if not plan.drops:
        return torch.mm(x, packed.a.t())
    xa = x.new_empty((x.shape[0], packed.a.shape[0]))
    for index in range(len(plan.projections)):
        ranks = plan.ranks(index)
        xa[:, ranks] = torch.mm(_dropped(plan, index, x), packed.a[ranks].t())
    return xa


def _dropped(plan: GroupPlan, index: int, x: Tensor) -> Tensor:
    """``x`` through the dropout of projection ``index``: the same mask every time it is asked for."""
    seed = plan.seeds[index]
    if seed is None:
        return x
    keep = 1.0 - plan.projections[index].dropout
    generator = torch.Generator(device=x.device).manual_seed(seed)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(keep, generator=generator)
    return mask.mul_(x).div_(keep)


def base_forward(plan: GroupPlan, x: Tensor, rows: Fp8Rows | None = None) -> Tensor:
    """The projections side by side, without their adapters, (M, sum O).

    One GEMM where the weights are neighbours in memory or are dequantized into neighbours for this call. Weights with
    a product of their own (``MultiplyingWeight``) take that; ``rows`` is x, quantized for it already.
    """
    projections = plan.projections
    weights = [p.operand(plan.dtype) for p in projections]
    if plan.fp8 is not None:
        y = plan.fp8.product(x) if rows is None else plan.fp8.product_of_rows(rows, plan.dtype)
        return _add_biases(plan, y)
    if len(projections) == 1 and not multiplies(weights[0]):
        bias = projections[0].bias
        return F.linear(x, dense(weights[0], plan.dtype), None if bias is None else bias.to(plan.dtype))
    joint = joint_matrix(weights, plan.dtype, x.device)
    if joint is not None and all(p.bias is not None for p in projections):
        bias = torch.cat([p.bias for p in projections if p.bias is not None]).to(plan.dtype)
        return torch.addmm(bias, x, joint.t())
    if joint is not None:
        return _add_biases(plan, torch.mm(x, joint.t()))
    y = x.new_empty((x.shape[0], plan.out_features))
    for weight, columns in zip(weights, plan.columns(), strict=True):
        if multiplies(weight):
            y[:, columns] = weight.product(x)
        else:
            torch.mm(x, dense(weight, plan.dtype).t(), out=y[:, columns])
    return _add_biases(plan, y)


def _add_biases(plan: GroupPlan, y: Tensor) -> Tensor:
    """Each projection's bias onto its columns of ``y``, in place."""
    for p, columns in zip(plan.projections, plan.columns(), strict=True):
        if p.bias is not None:
            y[:, columns] += p.bias.to(plan.dtype)
    return y


def base_backward(plan: GroupPlan, dy: Tensor, dx: Tensor | None) -> Tensor:
    """``dx + dy @ W`` over all projections, in place on ``dx`` where one is given. dy: (M, sum O)."""
    weights = [p.operand(plan.dtype) for p in plan.projections]
    if plan.fp8 is not None:
        product = plan.fp8.product_back(dy)
        return product if dx is None else product.add_(dx)
    joint = joint_matrix(weights, plan.dtype, dy.device)
    if joint is not None:
        return torch.mm(dy, joint) if dx is None else add_mm_(dx, dy, joint)
    for weight, columns in zip(weights, plan.columns(), strict=True):
        part = dy[:, columns]
        if multiplies(weight):
            product = weight.product_back(part)
            dx = product if dx is None else dx.add_(product)
        else:
            matrix = dense(weight, plan.dtype)
            dx = torch.mm(part, matrix) if dx is None else add_mm_(dx, part, matrix)
    assert dx is not None
    return dx


def products(plan: GroupPlan, x: Tensor, rows: Fp8Rows | None = None) -> tuple[Tensor, Packed, Tensor | None]:
    """(base output (M, sum O), packed adapters, xa (M, P * K) or None): the adapters' side beside the base GEMM."""
    side = SideStream(x.device)
    y = base_forward(plan, x, rows)
    with side.work():
        packed = pack_adapters(plan, x.device)
        xa = project(plan, packed, x)
    side.join(packed.a, packed.b, xa)
    return y, packed, xa


@dataclass(frozen=True, slots=True)
class GroupGrads:
    """dx (M, I) or None, the norm weight's gradient or None, [dA, dB] of every projection in turn, and [dW, db]."""

    dx: Tensor | None
    d_norm_weight: Tensor | None
    adapters: list[Tensor | None]
    weights: list[Tensor | None]

    @property
    def both(self) -> list[Tensor | None]:
        """The gradients of the adapters, then of the weights."""
        return [*self.adapters, *self.weights]

    def of_inputs(
        self, dtype: torch.dtype, shape: torch.Size, norm_weight: Tensor | None, *, wants_z: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(gradient of the group's input in its own dtype and shape, the norm weight's in its own dtype) or None."""
        d_z = self.dx.to(dtype).view(shape) if wants_z and self.dx is not None else None
        d_norm = self.d_norm_weight
        return d_z, None if d_norm is None or norm_weight is None else d_norm.to(norm_weight.dtype)


def group_backward(
    plan: GroupPlan,
    packed: Packed,
    *,
    x: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor | None,
    xa: Tensor | None,
    dy: Tensor,
    dxa: Tensor | None,
    d_pass: Tensor | None,
    wants: Sequence[bool],
    entered: Tensor | None = None,
) -> GroupGrads:
    """Everything behind dy (M, sum O) in ``plan.dtype``, which is not written.

    x: (M, I) as saved: before the norm when there is one. dxa: its partial sums for ``ftkernels.primitives``, or None:
    computed here.
    d_pass: (M, I) gradient of the residual that left beside the group, added to dx. ``wants``: for x, the norm weight,
    a and b of every projection, then weight and bias of every projection. entered: what the projections read, where
    the caller has just formed it again.
    """
    dx = d_norm_weight = sums = None
    wants, wants_weights = wants[: 2 + 2 * len(plan.projections)], wants[2 + 2 * len(plan.projections) :]
    # An fp8 product cannot accumulate onto the adapters' share, so their thin GEMM does onto it.
    comes_second = plan.fp8 is not None and not plan.drops
    adapters: list[Tensor | None] = [None] * (2 * len(plan.projections))
    if packed.a is not None and packed.b is not None:
        dxa = adapter_input_grad(plan, packed.b, dy)[None] if dxa is None else dxa
        sums = row_sums(dxa, None if plan.drops else rstd, plan.dtype, triton_kernel=plan.triton)
        if (wants[0] or wants[1]) and not comes_second:
            dx = adapter_dx(plan, packed.a, sums.low)
    side = SideStream(dy.device, plan.deferred)
    if wants[0] or wants[1]:
        dx = base_backward(plan, dy, dx)
        if comes_second and sums is not None and packed.a is not None:
            add_mm_(dx, sums.low, packed.a)
    weights: list[Tensor | None] = [None] * len(wants_weights)
    if any(wants_weights):
        entered = enter(plan, x, norm_weight)[0] if entered is None else entered
        weights = weight_grads(plan, dy, entered, wants_weights)
    if sums is not None:
        with side.work():
            adapter_grads(plan, AdapterInputs(dy, xa, sums, x, norm_weight), adapters, wants[2:])
    if wants[0] or wants[1]:
        assert dx is not None
        if rstd is not None and plan.norm_form is not None:
            backward = norm_backward if plan.triton and x.shape[1] <= WIDEST_ROW else norm_backward_torch
            dx, d_norm_weight = backward(dx, x, norm_weight, rstd, plan.norm_form, d_sum=d_pass, want_dw=wants[1])
        elif d_pass is not None:
            dx = dx + d_pass
    reads = () if sums is None else (dy, xa, x, norm_weight, sums.low, sums.scaled)
    side.join(*adapters, reads=reads)
    return GroupGrads(dx, d_norm_weight, adapters, weights)


def weight_grads(plan: GroupPlan, dy: Tensor, x: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
    """[dW, db] of every projection, in the dtypes that their gradients are kept in.

    dy: (M, sum O); x: (M, I), what they read. One product where all weights are wanted, whose rows are theirs. A
    gradient in float32 is the product as it was accumulated, not rounded to half precision on the way.
    """
    out: list[Tensor | None] = [None] * (2 * len(plan.projections))
    trained, columns = weight_tensors(plan.projections), plan.columns()
    if all(wants[::2]):
        for index, part in enumerate(_weight_grad(dy, x, trained[0]).split([p.out_features for p in plan.projections])):
            out[2 * index] = part.to(_dtype(trained[2 * index]))
    else:
        for index, c in enumerate(columns):
            if wants[2 * index]:
                out[2 * index] = _weight_grad(dy[:, c], x, trained[2 * index]).to(_dtype(trained[2 * index]))
    for index, c in enumerate(columns):
        if wants[2 * index + 1]:
            summed = dy[:, c].sum(0, dtype=accumulate_dtype(plan.dtype))
            out[2 * index + 1] = summed.to(_dtype(trained[2 * index + 1]))
    return out


def _weight_grad(dy: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """(O, I): in the products' dtype where the gradient is kept in that, else as accumulated."""
    return torch.mm(dy.t(), x) if _dtype(weight) == dy.dtype else mm_accurate(dy.t(), x)


def _dtype(trained: Tensor | None) -> torch.dtype:
    assert trained is not None  # its gradient is wanted
    return gradient_dtype(trained)


def adapter_input_grad(plan: GroupPlan, b: Tensor, dy: Tensor) -> Tensor:
    """dxa (M, P * K) float32: ``dy_p @ B_p`` for every projection."""
    parts = [mm_accurate(dy[:, c], b[c]) for c in plan.columns()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def adapter_dx(plan: GroupPlan, a: Tensor, dxa: Tensor) -> Tensor:
    """The adapters' share of dx, through their dropout."""
    if not plan.drops:
        return torch.mm(dxa, a)
    total = None
    for index in range(len(plan.projections)):
        ranks = plan.ranks(index)
        part = _dropped(plan, index, torch.mm(dxa[:, ranks], a[ranks]))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """The operands of the gradients of a group's adapters: dy (M, sum O) and xa for dB; dxa, x (M, I) and the weight of
    the norm behind x for dA. None of what is not there.
    """

    dy: Tensor | None = None
    xa: Tensor | None = None
    dxa: RowSums | None = None
    x: Tensor | None = None
    norm_weight: Tensor | None = None


def adapter_grads(plan: GroupPlan, of: AdapterInputs, out: list[Tensor | None], wants: Sequence[bool]) -> None:
    """[dA, dB] of every projection into ``out``, of those that ``wants`` names in the same order.

    Both in one kernel where that reads faster than GEMMs do. With dropout dA takes GEMMs, which read other inputs.
    """
    of_b = of_a = None
    if of.dy is not None and of.xa is not None and any(wants[1::2]):
        of_b = OfB(of.dy, of.xa, [p.out_features for p in plan.projections])
    if of.x is not None and of.dxa is not None and any(wants[::2]) and not plan.drops:
        of_a = _of_a(plan, of.dxa, of.x, of.norm_weight)
    found = thin_products(of_b, of_a, plan.rank) if plan.fused and takes(of_b, of_a) else ThinGrads(None, None)
    if of_b is not None:
        b = _b_grads(plan, of_b) if found.b is None else [found.b[c] for c in plan.columns()]
        for index, p in enumerate(plan.projections):
            if p.b is not None and wants[2 * index + 1]:
                # Its own rows: whoever keeps a view with gaps would copy it then, where something waits for it.
                out[2 * index + 1] = b[index][:, : p.rank].to(p.b.dtype).contiguous()
    if of.x is not None and of.dxa is not None and any(wants[::2]):
        a = _a_grads(plan, of.dxa, of.x, of_a, of.norm_weight) if found.a is None else found.a
        for index, p in enumerate(plan.projections):
            if p.a is not None and wants[2 * index]:
                part = a[index * plan.rank : index * plan.rank + p.rank]
                out[2 * index] = (part if _scaling(plan) is not None else part * p.scaling).to(p.a.dtype)


def _scaling(plan: GroupPlan) -> float | None:
    """The scaling that all adapters of the group have; None where they differ."""
    scalings = {p.scaling for p in plan.projections if p.a is not None}
    return scalings.pop() if len(scalings) == 1 else None


def _of_a(plan: GroupPlan, dxa: RowSums, x: Tensor, norm_weight: Tensor | None) -> OfA:
    """dA's operands and factors: behind a norm the norm's own input."""
    scaling, x = _scaling(plan), x.to(plan.dtype)
    scaling = 1.0 if scaling is None else scaling
    if dxa.scaled is not None:
        return OfA(x, dxa.scaled, scaling, norm_weight, plan.norm_form)
    return OfA(x, dxa.low, scaling)


def _b_grads(plan: GroupPlan, of: OfB) -> list[Tensor]:
    """dB (O, K) of every projection from one product over all of them; the off-diagonal blocks are thrown away."""
    product = mm_accurate(of.dy.t(), of.xa)
    return [product[columns, plan.ranks(index)] for index, columns in enumerate(plan.columns())]


def _a_grads(plan: GroupPlan, dxa: RowSums, x: Tensor, of: OfA | None, norm_weight: Tensor | None) -> Tensor:
    """dA (P * K, I) by GEMMs, times the scaling where that is one; with dropout (no ``of``) from the norm's output."""
    if of is None:
        inputs, scaling = enter(plan, x, norm_weight)[0], _scaling(plan)
        parts = [
            mm_accurate(dxa.low[:, plan.ranks(i)].t(), _dropped(plan, i, inputs)) for i in range(len(plan.projections))
        ]
        product, scaling = torch.cat(parts), 1.0 if scaling is None else scaling
    else:
        product, scaling = mm_accurate(of.dxa.t(), of.x), of.scaling
        if of.norm_weight is not None:
            weight = of.norm_weight.to(product.dtype)
            product *= weight + 1.0 if of.norm_form == "gemma" else weight
    return product if scaling == 1.0 else product.mul_(scaling)
