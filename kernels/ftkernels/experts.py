"""Mixtures of experts, with LoRA adapters on every expert or trained themselves: a gated unit of two linear layers for
each token's experts.

Legend: T tokens, H hidden size, E experts, P of them a token, M = T * P pairs, F width of an expert, R rank. For a
token t, its expert e and the router's weight w of it:

    [g | u] = x_t @ W1_e.T + s1 * (x_t @ A1_e.T) @ B1_e.T + b1_e        W1 (E, 2F, H), b1 (E, 2F) where given
    h       = act(g) * u, or another gated unit
    y       = h @ W2_e.T + s2 * (h @ A2_e.T) @ B2_e.T + b2_e            W2 (E, H, F), b2 (E, H) where given
    out_t   = sum over the token's experts of w * y

Backward never needs y: the gradient of w is <dout_t, y> = <dh, h> + <dout_t, b2_e> with dh = W2_e.T dout_t (and the
adapter's share), so that the outputs of experts are not kept (the unweighted dh is formed first, then multiplied by w).
Adapters are in PEFT's layout of stacked parameters: A (E * R, in), expert by expert; B (out, R * E), whose column
r * E + e is expert e's. Nothing is formed of a delta's size. Of stacks that are trained:

    dW1_e = sum over its tokens of w * d[g | u].T x_t       dW2_e = sum of w * dout_t.T h       db likewise

Where gate and up are interleaved (gpt-oss), even rows of W1, b1 and B1 are the gate's, odd ones the up's, and so are
the columns of what is kept.

Saved: x, [g | u] (M, 2F), both products with A (M, R), and the sorted routing; with ``save="input"`` x and the routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, accumulate_dtype, choose_backend, without_autocast
from ftkernels.early import EarlySave
from ftkernels.gemm import compute_dtype
from ftkernels.grouped import (
    Groups,
    Low,
    UnitGrads,
    gathered_sum,
    group_rows,
    grouped_outer,
    grouped_product,
    grouped_sums,
    grouped_thin,
    grouped_unit,
    grouped_weight,
    turned,
    unit_backward,
    unit_reference,
)
from ftkernels.limits import Unit, packed_rank
from ftkernels.projection import FrozenWeight, gradient_dtype

Save = Literal["gate_up", "input"]


class ExpertPacks(NamedTuple):
    """The adapters of a stack by expert, in the products' dtype, R padded with zeros: a (E, R, I), and b (E, R, O)
    times the scaling.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One linear layer of every expert: frozen, with or without adapters; or trained, without.

    Attributes:
        weight: (E, O, I), floating, of any strides, which gets a gradient where it requires one; or a ``FrozenWeight``
            of (E * O, I). With ``transposed`` (E, I, O), or (E * I, O).
        experts: E.
        a, b: the adapters, (E * R, I) and (O, R * E); both or neither.
        scaling: of the adapters.
        packed: the adapters, packed already (``pack_experts``). None packs them in each call, and again in backward.
            Not looked at without a and b: those that are switched off.
        bias: (E, O). It gets a gradient where it requires one.
        transposed: the weight's layout.
        copy: a trained weight in the dtype of the products, cast already (``ftkernels.projection``). None casts it
            in each call, and again in backward.
    """

    weight: Tensor | FrozenWeight
    experts: int
    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    packed: ExpertPacks | None = None
    bias: Tensor | None = None
    transposed: bool = False
    copy: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, O, I)."""
        *rows, columns = self.weight.shape
        first = int(rows[-1] if len(rows) == 2 else rows[0] // self.experts)
        return (self.experts, int(columns), first) if self.transposed else (self.experts, first, int(columns))

    @property
    def rank(self) -> int:
        """R, 0 without adapters."""
        return 0 if self.a is None else int(self.a.shape[0]) // self.experts

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias, None for what is frozen."""
        weight = self.weight if isinstance(self.weight, Tensor) and self.weight.requires_grad else None
        return weight, self.bias if self.bias is not None and self.bias.requires_grad else None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(E, O, I) in ``dtype``; of transposed weights a view."""
        if self.copy is not None and self.copy.dtype == dtype:
            weight = self.copy
        else:
            weight = self.weight.to(dtype) if isinstance(self.weight, Tensor) else self.weight.dequantize(dtype)
        weight = weight.view(self.experts, -1, weight.shape[-1])
        return weight.transpose(1, 2) if self.transposed else weight

    def dense_bias(self, dtype: torch.dtype) -> Tensor | None:
        """(E, O) in ``dtype``, contiguous."""
        return None if self.bias is None else self.bias.to(dtype).contiguous()


def lora_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    *,
    unit: Unit = "silu",
    interleaved: bool = False,
    added: Tensor | None = None,
    save: Save = "gate_up",
    backend: BackendName = "auto",
) -> Tensor:
    """The weighted sum of the experts of each token, (..., H), in the products' dtype.

    Args:
        x: (..., H).
        index: (..., P), integers below E: the experts of each token.
        weights: (..., P): what their outputs are multiplied by. It gets a gradient.
        gate_up, down: (E, 2F, H), gate above up unless ``interleaved``; (E, H', F).
        unit: an activation, see ``ftkernels.glu``; or ``clamped``, see ``ftkernels.primitives.gated_unit``.
        interleaved: gate and up take turns.
        added: (..., H'), added to the sum, such as the residual stream.
        save: what is saved for backward. Both give the same bits. "gate_up": the outputs of the first layer. "input":
            x alone, before anything is computed; backward computes the first layer again.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    _check(x, index, weights, gate_up, down)
    if save not in get_args(Save):
        raise ValueError(f"unknown save mode {save!r}")
    dtype = compute_dtype(x.device.type, x, gate_up.weight if isinstance(gate_up.weight, Tensor) else None)
    kernels = choose_backend(x.device, backend).is_triton and dtype != torch.float64
    groups = group_rows(index.detach().reshape(-1, index.shape[-1]), gate_up.experts, kernels=kernels)
    early = EarlySave() if save == "input" else None
    if early is not None:
        x = early.save(x)
    experts = None if down.bias is None else index.detach().reshape(-1, index.shape[-1])
    spec = _Spec(gate_up, down, groups, experts, unit, interleaved, dtype, early)
    trained = (gate_up.a, gate_up.b, down.a, down.b, *gate_up.trained, *down.trained)
    out: Tensor = _Experts.apply(spec, x, weights, added, *trained)  # type: ignore[no-untyped-call]
    return out


def lora_experts_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack, *,
    unit: Unit = "silu", interleaved: bool = False, added: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain torch with torch's own autograd: each expert in turn."""
    dtype = compute_dtype(x.device.type, x, gate_up.weight if isinstance(gate_up.weight, Tensor) else None)
    flat, tokens = x.reshape(-1, x.shape[-1]).to(dtype), index.reshape(-1, index.shape[-1])
    out = torch.zeros((flat.shape[0], down.shape[1]), dtype=dtype, device=x.device)
    first, second = gate_up.dense(dtype), down.dense(dtype)
    for expert in range(gate_up.experts):
        token, slot = torch.where(tokens == expert)
        both = _reference_linear(flat[token], first, gate_up, expert)
        h = unit_reference(both, unit, interleaved=interleaved)
        y = _reference_linear(h, second, down, expert)
        out = out.index_add(0, token, y * weights.reshape(tokens.shape)[token, slot, None].to(dtype))
    out = out.view(*x.shape[:-1], -1)
    return out if added is None else added + out


def _reference_linear(x: Tensor, weight: Tensor, stack: ExpertStack, expert: int) -> Tensor:
    y = F.linear(x, weight[expert], None if stack.bias is None else stack.bias[expert].to(x.dtype))
    if stack.a is None or stack.b is None:
        return y
    a = stack.a.view(stack.experts, stack.rank, -1)[expert].to(x.dtype)
    b = stack.b.view(-1, stack.rank, stack.experts)[..., expert].to(x.dtype)
    return y + F.linear(F.linear(x, a), b) * stack.scaling


def _check(x: Tensor, index: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack) -> None:
    if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1] or index.is_floating_point():
        said = f"{tuple(index.shape)} {index.dtype} and {tuple(weights.shape)}"
        raise ValueError(f"x {tuple(x.shape)} needs index and weights (..., P), integers and numbers, got {said}")
    for name, stack, features in (("gate_up", gate_up, x.shape[-1]), ("down", down, gate_up.shape[1] // 2)):
        shape = tuple(stack.weight.shape)
        if isinstance(stack.weight, Tensor) and not stack.weight.is_floating_point():
            raise ValueError(f"{name}: a {stack.weight.dtype} tensor of shape {shape} is no weight")
        if isinstance(stack.weight, Tensor) and len(shape) != 3:
            raise ValueError(f"{name}: the weight must be (E, O, I), got {shape}")
        if stack.a is not None and any(t is not None for t in stack.trained):
            raise ValueError(f"{name}: adapters need a frozen base weight")
        if shape[0] % stack.experts or stack.shape[2] != features or stack.experts != gate_up.experts:
            raise ValueError(f"{name}: weight {shape} of {stack.experts} experts does not take {features} features")
        if stack.bias is not None and tuple(stack.bias.shape) != stack.shape[:2]:
            raise ValueError(f"{name}: the bias must be {stack.shape[:2]}, got {tuple(stack.bias.shape)}")
        if (stack.a is None) != (stack.b is None):
            raise ValueError(f"{name}: adapters need both A and B")
        if stack.a is not None and stack.b is not None:
            a, b, rows = tuple(stack.a.shape), tuple(stack.b.shape), stack.rank * stack.experts
            if a != (rows, features) or b != (stack.shape[1], rows):
                raise ValueError(f"{name}: A {a} and B {b} do not fit {stack.experts} experts of {stack.shape[1:]}")
    if gate_up.shape[1] % 2:
        raise ValueError(f"{gate_up.shape[1]} output features are not those of a gate and an up")


def empty_packs(stack: ExpertStack, dtype: torch.dtype) -> ExpertPacks | None:
    """Memory for the packs of a stack, in which what a smaller rank leaves is 0; None without adapters."""
    if stack.a is None:
        return None
    (experts, out, inner), padded = stack.shape, packed_rank(stack.rank)
    make = torch.empty if padded == stack.rank else torch.zeros
    a = make((experts, padded, inner), dtype=dtype, device=stack.a.device)
    return ExpertPacks(a, make((experts, padded, out), dtype=dtype, device=stack.a.device))


def pack_experts(stack: ExpertStack, packs: ExpertPacks) -> None:
    """Copies the adapters as they are now into ``packs``: rounded once."""
    if stack.a is None or stack.b is None:
        return
    (experts, out, inner), rank = stack.shape, stack.rank
    packs.a[:, :rank].copy_(stack.a.detach().view(experts, rank, inner))
    kernels = choose_backend(stack.b.device).is_triton and stack.b.dtype != torch.float64
    turned(stack.b.detach().view(out, rank, experts), packs.b[:, :rank], stack.scaling, kernels=kernels)


def _packs(stack: ExpertStack, dtype: torch.dtype) -> ExpertPacks | None:
    if stack.packed is not None and stack.a is not None and stack.packed.a.dtype == dtype:
        return stack.packed
    packs = empty_packs(stack, dtype)
    if packs is not None:
        pack_experts(stack, packs)
    return packs


@dataclass(frozen=True, slots=True)
class _Spec:
    gate_up: ExpertStack
    down: ExpertStack
    groups: Groups
    experts: Tensor | None  # (T, P), where the gradient of the router's weights needs them
    unit: Unit
    interleaved: bool
    dtype: torch.dtype
    early: EarlySave | None


class _Formed(NamedTuple):
    """The first layer: [g | u] (M, 2F), None where it is not kept, h (M, F), and x @ A1.T (M, R) or None."""

    both: Tensor | None
    h: Tensor
    xa: Tensor | None


def _first(spec: _Spec, x: Tensor, packs: ExpertPacks | None, *, keep: bool) -> _Formed:
    xa = None if packs is None else grouped_thin(x, packs.a, spec.groups, rows=spec.groups.token)
    low = None if packs is None or xa is None else Low(xa, packs.b)
    weight, bias = spec.gate_up.dense(spec.dtype), spec.gate_up.dense_bias(spec.dtype)
    both, h = grouped_unit(
        x, weight, spec.groups, spec.unit, low=low, bias=bias, interleaved=spec.interleaved, keep=keep
    )
    return _Formed(both, h, xa)


def _of_bias(spec: _Spec, dy: Tensor) -> Tensor | float:
    """The share of down's bias in the gradient of the router's weights: <dy_t, b2_e>, (T, P)."""
    bias = spec.down.dense_bias(spec.dtype)
    if bias is None or spec.experts is None:
        return 0.0
    return (dy @ bias.T).gather(1, spec.experts.long()).to(accumulate_dtype(spec.dtype))


def _rows(x: Tensor) -> Tensor:
    """(T, N), whose last dimension is contiguous, as the kernels read it; the gradient of ``sum()`` is one number."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: _Spec, x: Tensor, weights: Tensor, added: Tensor | None, *_: Tensor | None) -> Tensor:
        with without_autocast(x):
            groups, flat = spec.groups, _rows(x).to(spec.dtype)
            given = weights.detach().reshape(groups.place.shape).contiguous()
            keep = spec.early is None and any(ctx.needs_input_grad)
            formed = _first(spec, flat, _packs(spec.gate_up, spec.dtype), keep=keep)
            second = _packs(spec.down, spec.dtype)
            ha = None if second is None else grouped_thin(formed.h, second.a, groups)
            low = None if second is None or ha is None else Low(ha, second.b)
            bias = spec.down.dense_bias(spec.dtype)
            y = grouped_product(formed.h, spec.down.dense(spec.dtype), groups, low=low, bias=bias)
            rest = None if added is None else _rows(added).contiguous()
            out = gathered_sum(y, groups, weights=given, added=rest)
        ctx.spec, ctx.x_dtype, ctx.weights_dtype, ctx.shape = spec, x.dtype, weights.dtype, x.shape
        ctx.given = given
        ctx.added_dtype = None if added is None else added.dtype
        if spec.early is None:
            ctx.save_for_backward(flat, formed.both, formed.xa, ha)
        else:
            # Not through save_for_backward: a checkpoint that runs the layer again may then stop before the experts.
            ctx.ha = ha
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        spec: _Spec = ctx.spec
        groups = spec.groups
        _, wants_x, wants_weights, wants_added, *wants = ctx.needs_input_grad
        with without_autocast(dout):
            first = _packs(spec.gate_up, spec.dtype)
            if spec.early is None:
                flat, both, xa, ha = ctx.saved_tensors
            else:
                flat = _rows(spec.early.tensor()).to(spec.dtype)
                formed = _first(spec, flat, first, keep=True)
                both, xa, ha = formed.both, formed.xa, ctx.ha
            dy = _rows(dout).to(spec.dtype)
            second = _packs(spec.down, spec.dtype)
            q = None if second is None else grouped_thin(dy, second.b, groups, rows=groups.token)
            low = None if second is None or q is None else Low(q, second.a)
            weight = spec.down.dense(spec.dtype)
            dh = grouped_product(dy, weight, groups, rows=groups.token, transposed=True, low=low)
            del weight
            adapts_down = second is not None and any(wants[2:4])
            grads = unit_backward(
                dh, both, ctx.given, groups, spec.unit, interleaved=spec.interleaved, want_h=adapts_down or wants[6],
                overwrite=spec.early is not None,
            )  # fmt: skip
            whole = _whole_grads(spec, wants[4:], flat, dy, grads, ctx.given)
            d_a1 = d_b1 = d_a2 = d_b2 = None
            if adapts_down and grads.weighted_h is not None and q is not None:
                d_a2 = _of_a(grouped_outer(q, grads.weighted_h, groups), spec.down)
                scale = ctx.given.reshape(-1)[groups.pair.long(), None].to(spec.dtype)
                d_b2 = _of_b(grouped_outer(ha * scale, dy, groups, rows=groups.token), spec.down)
            del dh
            q = None if first is None else grouped_thin(grads.both, first.b, groups)
            if first is not None and q is not None and any(wants[:2]):
                d_a1 = _of_a(grouped_outer(q, flat, groups, rows=groups.token), spec.gate_up)
                d_b1 = _of_b(grouped_outer(xa, grads.both, groups), spec.gate_up)
            dx = None
            if wants_x:
                low = None if first is None or q is None else Low(q, first.a)
                rows = grouped_product(grads.both, spec.gate_up.dense(spec.dtype), groups, transposed=True, low=low)
                dx = gathered_sum(rows, groups).view(ctx.shape).to(ctx.x_dtype)
            d_weights = None
            if wants_weights:
                d_weights = (grads.weights + _of_bias(spec, dy)).view(*ctx.shape[:-1], -1).to(ctx.weights_dtype)
        d_added = dout.to(ctx.added_dtype) if wants_added else None
        return None, dx, d_weights, d_added, d_a1, d_b1, d_a2, d_b2, *whole


def _whole_grads(
    spec: _Spec, wants: list[bool], x: Tensor, dy: Tensor, grads: UnitGrads, given: Tensor
) -> list[Tensor | None]:
    """[dW1, db1, dW2, db2] of stacks that are trained, of those that are wanted: x (T, H), dy (T, H'), given (T, P)."""
    out: list[Tensor | None] = [None] * 4
    token, groups = spec.groups.token, spec.groups
    if wants[0]:
        out[0] = _of_weight(spec.gate_up, (grads.both, None), (x, token), groups)
    if wants[1]:
        out[1] = _of_trained(spec.gate_up.bias, grouped_sums(grads.both, groups))
    if wants[2]:
        assert grads.weighted_h is not None
        out[2] = _of_weight(spec.down, (dy, token), (grads.weighted_h, None), groups)
    if wants[3]:
        weights = given.reshape(-1)[groups.pair.long()]
        out[3] = _of_trained(spec.down.bias, grouped_sums(dy, groups, rows=token, weights=weights))
    return out


#: Rows of an operand (M or T, N) and which of them are read, None for all.
_Rows = tuple[Tensor, Tensor | None]


def _of_weight(stack: ExpertStack, of_out: _Rows, of_in: _Rows, groups: Groups) -> Tensor:
    """dW in the weight's layout, and in the dtype that its gradient is kept in."""
    assert isinstance(stack.weight, Tensor)
    (left, left_rows), (right, right_rows) = (of_in, of_out) if stack.transposed else (of_out, of_in)
    dtype = gradient_dtype(stack.weight)
    return grouped_weight(left, right, groups, left_rows=left_rows, right_rows=right_rows, dtype=dtype)


def _of_trained(bias: Tensor | None, grad: Tensor) -> Tensor:
    assert bias is not None
    return grad.to(gradient_dtype(bias))


def _of_a(grad: Tensor, stack: ExpertStack) -> Tensor | None:
    """dA (E * R, I) in A's dtype from (E, R, I)."""
    assert stack.a is not None
    return grad[:, : stack.rank].reshape(stack.a.shape).to(stack.a.dtype)


def _of_b(grad: Tensor, stack: ExpertStack) -> Tensor | None:
    """dB (O, R * E) in B's dtype from (E, R, O), which lacks the scaling."""
    assert stack.b is not None
    experts, out, _ = stack.shape
    found = torch.empty((out, stack.rank, experts), dtype=grad.dtype, device=grad.device)
    kernels = choose_backend(grad.device).is_triton and grad.dtype != torch.float64
    turned(grad[:, : stack.rank], found, stack.scaling, kernels=kernels)
    return found.view(stack.b.shape).to(stack.b.dtype)
