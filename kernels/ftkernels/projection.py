"""Linear layers as data, checked: frozen ones with LoRA adapters, or trained ones; and their weights, joined where they
share an input.

The adapters of a whole model are packed at once, in a few launches (``AdapterPacks``). The layout, and the bits, are
those of ``ftkernels.lowrank_plan``: rows of ``a`` are ``scaling * A``, multiplied in the adapter's own dtype and
rounded once; ``b`` holds the B above each other; what a smaller rank leaves is 0.

Trained weights are cast to the products' dtype once after each change (``WeightCopies``). Those of a group lie one
behind the other, so that its product is one (``projection.joined``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from ftkernels.gemm import compute_dtype
from ftkernels.limits import NormForm, packed_rank
from ftkernels.rms_norm import rms_norm_reference
from ftkernels.side_stream import DeferredStream


class FrozenWeight(Protocol):
    """A quantized weight: its logical shape (O, I), and itself in a floating dtype on demand."""

    @property
    def shape(self) -> torch.Size: ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The (O, I) matrix in ``dtype``."""
        ...


class FillingWeight(FrozenWeight, Protocol):
    """A quantized weight that writes itself into memory given to it, so that a group can share one buffer."""

    def dequantize_into(self, out: Tensor) -> None:
        """The (O, I) matrix into ``out``, contiguous, in ``out``'s dtype."""
        ...


class MultiplyingWeight(FrozenWeight, Protocol):
    """A quantized weight that is multiplied as it is stored (fp8)."""

    def product(self, x: Tensor) -> Tensor:
        """``x @ W.T``: (M, I) -> (M, O), in x's dtype."""
        ...

    def product_back(self, dy: Tensor) -> Tensor:
        """``dy @ W``: (M, O) -> (M, I), in dy's dtype."""
        ...


# Asked for every product of every layer, so by one attribute: isinstance of a protocol takes 15 microseconds.


def fills(weight: Tensor | FrozenWeight) -> TypeGuard[FillingWeight]:
    """True when this is a ``FillingWeight``."""
    return hasattr(weight, "dequantize_into")


def multiplies(weight: Tensor | FrozenWeight) -> TypeGuard[MultiplyingWeight]:
    """True when this is a ``MultiplyingWeight``."""
    return hasattr(weight, "product_back")


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that autograd keeps the gradient of ``weight`` in: its own, unless a leaf says otherwise."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed adapters of a group (``ftkernels.lowrank_plan``): a (P * K, I), b (sum O, K). Both None when no
    projection has an adapter.
    """

    a: Tensor | None
    b: Tensor | None


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer: frozen, with or without a LoRA adapter; or trained, without.

    Attributes:
        weight: (O, I), floating, or a ``FrozenWeight``. It gets a gradient where it requires one.
        bias: (O,), or None. So does this.
        a, b: the adapter, (R, I) and (O, R); both or neither.
        scaling: alpha / r, or alpha / sqrt(r) for rsLoRA.
        dropout: probability that an element of the adapter's input is dropped; 0 when not training.
        packed: the adapters of the group that this layer is in, packed already (``ftkernels.projection``): every
            layer of the group has the same. None packs them in each call.
        deferred: where the gradients of adapters may be made, of the group that this layer is in.
        copy: (O, I), a trained weight in the dtype of the products, cast already (``ftkernels.projection``). None
            casts it in each call.
    """

    weight: Tensor | FrozenWeight
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0
    packed: Packed | None = None
    copy: Tensor | None = None
    deferred: DeferredStream | None = None

    def operand(self, dtype: torch.dtype) -> Tensor | FrozenWeight:
        """The operand of products in ``dtype``: the copy if it has that dtype, else the weight."""
        return self.weight if self.copy is None or self.copy.dtype != dtype else self.copy

    @property
    def out_features(self) -> int:
        """O."""
        return int(self.weight.shape[0])

    @property
    def rank(self) -> int:
        """R, 0 without an adapter."""
        return 0 if self.a is None else int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight (I,) or None, eps, and its form (see ``ftkernels.rms_norm``)."""

    weight: Tensor | None
    eps: float
    form: NormForm = "llama"


def check_projection(projection: Projection, in_features: int, name: str) -> None:
    """Refuse a projection that does not fit, before any product is taken.

    Raises:
        ValueError: naming the projection and the mismatch: packed integers, shapes, dropout, or an adapter on a weight
            that is trained itself.
    """
    p = projection
    shape = tuple(p.weight.shape)
    if isinstance(p.weight, Tensor) and not p.weight.is_floating_point():
        raise ValueError(
            f"{name}: a {p.weight.dtype} tensor of shape {shape} is not a weight for {in_features} features; pass "
            "the quantized weight object instead"
        )
    if len(shape) != 2 or shape[1] != in_features:
        raise ValueError(f"{name}: weight {shape} does not take {in_features} features")
    if p.bias is not None and p.bias.shape != shape[:1]:
        raise ValueError(f"{name}: bias must have shape {shape[:1]}, got {tuple(p.bias.shape)}")
    if p.a is not None and any(t is not None for t in weight_tensors([p])):
        raise ValueError(f"{name}: an adapter needs a frozen base weight")
    if (p.a is None) != (p.b is None):
        raise ValueError(f"{name}: an adapter needs both A and B")
    if p.a is not None and p.b is not None:
        a, b = tuple(p.a.shape), tuple(p.b.shape)
        if len(a) != 2 or a[1] != in_features or b != (shape[0], a[0]):
            raise ValueError(f"{name}: A {a} and B {b} do not fit a weight of {shape}")
    if not 0.0 <= p.dropout < 1.0:
        raise ValueError(f"{name}: dropout must be in [0, 1), got {p.dropout}")


def weight_tensors(projections: Sequence[Projection]) -> list[Tensor | None]:
    """[weight, bias] of every projection in turn, None for what is frozen: inputs of an autograd Function."""
    found = [t if isinstance(t, Tensor) else None for p in projections for t in (p.weight, p.bias)]
    return [t if t is not None and t.requires_grad else None for t in found]


def project_reference(x: Tensor, projection: Projection) -> Tensor:
    """The layer in plain torch, differentiable: x (..., I) -> (..., O), every product in x's dtype."""
    p, dtype = projection, x.dtype
    y = F.linear(x, dense(p.weight, dtype), None if p.bias is None else p.bias.to(dtype))
    if p.a is None or p.b is None:
        return y
    dropped = F.dropout(x, p.dropout) if p.dropout else x
    return y + F.linear(F.linear(dropped, p.a.to(dtype)), p.b.to(dtype)) * p.scaling


def norm_reference(z: Tensor, norm: Norm | None, *projections: Projection) -> Tensor:
    """The projections' input: norm(z) or z, in the dtype of their products."""
    weights = [p.weight if isinstance(p.weight, Tensor) else None for p in projections]
    dtype = compute_dtype(z.device.type, z, *weights)
    x = z if norm is None else rms_norm_reference(z, norm.weight, norm.eps, form=norm.form)
    return x.to(dtype)


def dense(weight: Tensor | FrozenWeight, dtype: torch.dtype) -> Tensor:
    """The weight as a floating matrix in ``dtype``."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def joined(weights: Sequence[Tensor | FrozenWeight], dtype: torch.dtype) -> Tensor | None:
    """The weights as one (sum O, I) view when they lie one behind the other in one storage, in ``dtype``; else None."""
    first = weights[0]
    if not isinstance(first, Tensor) or first.dtype != dtype:
        return None
    storage, expected, rows = first.untyped_storage().data_ptr(), first.storage_offset(), 0
    for weight in weights:
        if not isinstance(weight, Tensor) or weight.dtype != dtype or not weight.is_contiguous():
            return None
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != expected:
            return None
        expected += weight.numel()
        rows += weight.shape[0]
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def joint_matrix(weights: Sequence[Tensor | FrozenWeight], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The weights as one (sum O, I) matrix where that costs no copy: a view of neighbours (``joined``), or quantized
    weights written one behind the other into a new buffer. Else None.
    """
    filling = [weight for weight in weights if fills(weight)]
    if len(filling) < len(weights):
        return joined(weights, dtype)
    rows = [int(weight.shape[0]) for weight in filling]
    joint = torch.empty((sum(rows), int(filling[0].shape[1])), dtype=dtype, device=device)
    for weight, part in zip(filling, joint.split(rows), strict=True):
        weight.dequantize_into(part)
    return joint


def join_weights(parameters: Sequence[Tensor]) -> Tensor:
    """Move weights that share their input into one buffer, each becoming a view of it; values, names and shapes stay.

    Afterwards the group's base GEMM is one product. Returns the buffer, (sum O, I).

    Raises:
        ValueError: weights of different input features, dtype or device.
    """
    first = parameters[0]
    for p in parameters:
        if p.dim() != 2 or p.shape[1] != first.shape[1] or p.dtype != first.dtype or p.device != first.device:
            raise ValueError("only matrices of one dtype, device and number of input features can be joined")
    buffer = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, buffer.split([p.shape[0] for p in parameters]), strict=True):
        p.data = part
    return buffer


class AdapterPacks:
    """One ``Packed`` for each group, in memory that stays where it is. They hold nothing before ``refresh``.

    Args:
        groups: the projections of each group; those without an adapter take up zeros.
        dtype: of the groups' products.

    ``packs[i]`` belongs to ``groups[i]``; None where no projection of the group has an adapter.
    """

    def __init__(self, groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> None:
        self.packs: list[Packed | None] = []
        self._a: list[tuple[Tensor, Tensor, float]] = []  # from, to, scaling
        self._b: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            self.packs.append(self._add(group, dtype))

    def _add(self, group: Sequence[Projection], dtype: torch.dtype) -> Packed | None:
        device = next((p.a.device for p in group if p.a is not None), None)
        if device is None:
            return None
        rank = packed_rank(max(p.rank for p in group))
        a = torch.zeros((len(group) * rank, int(group[0].weight.shape[1])), dtype=dtype, device=device)
        b = torch.zeros((sum(p.out_features for p in group), rank), dtype=dtype, device=device)
        row = 0
        for index, p in enumerate(group):
            if p.a is not None and p.b is not None:
                start = index * rank
                self._a.append((p.a.detach(), a[start : start + p.rank], p.scaling))
                self._b.append((p.b.detach(), b[row : row + p.out_features, : p.rank]))
            row += p.out_features
        return Packed(a, b)

    def refresh(self) -> None:
        """Copies the adapters as they are now into the packs."""
        if not self._a:
            return
        scaled = torch._foreach_mul([source for source, _, _ in self._a], [scaling for _, _, scaling in self._a])
        torch._foreach_copy_([target for _, target, _ in self._a], list(scaled))
        torch._foreach_copy_([target for _, target in self._b], [source for source, _ in self._b])


class WeightCopies:
    """A copy of every trained weight of another dtype than its group's products, in memory that stays where it is.

    Args:
        groups: the projections of each group.
        dtype: of the groups' products.

    ``copies[i]`` belongs to ``groups[i]``: one (O, I) for each projection; none where the group needs no copies. They
    hold nothing before ``refresh``. ``pairs`` are all weights that have one, with it.
    """

    def __init__(self, groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> None:
        self.copies: list[tuple[Tensor, ...]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._fresh, self._dtype = False, dtype
        for group in groups:
            self.copies.append(self._of_group([t for t in weight_tensors(group)[::2] if t is not None], len(group)))

    def _of_group(self, weights: list[Tensor], count: int) -> tuple[Tensor, ...]:
        if len(weights) < count or all(weight.dtype == self._dtype for weight in weights):
            return ()
        first, rows = weights[0], [int(weight.shape[0]) for weight in weights]
        parts = torch.empty((sum(rows), int(first.shape[1])), dtype=self._dtype, device=first.device).split(rows)
        self.pairs += zip(weights, parts, strict=True)
        return parts

    def add(self, weight: Tensor) -> Tensor | None:
        """A copy of one more trained weight, of any shape; None where it has the products' dtype."""
        if weight.dtype == self._dtype:
            return None
        copy = torch.empty_like(weight, dtype=self._dtype, requires_grad=False)
        self.pairs.append((weight, copy))
        return copy

    def outdate(self) -> None:
        """The weights have changed and the copies have not: the next ``refresh`` copies them."""
        self._fresh = False

    def refresh(self) -> None:
        """Copies the weights as they are now, where they have changed since the last time."""
        if self.pairs and not self._fresh:
            torch._foreach_copy_([copy for _, copy in self.pairs], [weight.detach() for weight, _ in self.pairs])
        self._fresh = True
