"""Plans one call of a LoRA operation before it runs, and packs its adapters for the kernels.

Legend: I input features, O output features of one projection, P projections that read the same input, K their padded
rank (``limits.packed_rank``).

The adapters of a group are packed once a forward, in the dtype of the products:

    a   (P * K, I)       rows p*K .. p*K + r_p are  s_p * A_p, the rest 0
    b   (sum O_p, K)     the B_p above each other, columns past r_p 0

so kernels need no masks over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ftkernels.device import BackendName, choose_backend, fuses_products
from ftkernels.fp8 import Fp8Weight, joined_fp8
from ftkernels.gemm import compute_dtype
from ftkernels.limits import LARGEST_FUSED_RANK, NormForm, packed_rank
from ftkernels.projection import Norm, Packed, Projection
from ftkernels.side_stream import DeferredStream


def adapter_tensors(projections: Sequence[Projection]) -> list[Tensor | None]:
    """[a, b] of every projection in turn: the inputs of an autograd Function."""
    return [t for p in projections for t in (p.a, p.b)]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Constants of a group's forward and backward, without the tensors that autograd must see.

    ``fused``: the low-rank terms ride in the elementwise kernels; else they are GEMMs of their own. ``fp8``: the
    group's one weight when it is multiplied in fp8.
    """

    projections: tuple[Projection, ...]
    dtype: torch.dtype
    rank: int
    norm_form: NormForm | None
    eps: float
    triton: bool
    fused: bool
    seeds: tuple[int | None, ...]
    fp8: Fp8Weight | None

    @property
    def out_features(self) -> int:
        """The sum of the projections' output features."""
        return sum(p.out_features for p in self.projections)

    @property
    def deferred(self) -> DeferredStream | None:
        """The side stream for the gradients of the group's adapters; None: the current stream."""
        return self.projections[0].deferred

    @property
    def drops(self) -> bool:
        """True when some adapter has dropout."""
        return any(seed is not None for seed in self.seeds)

    def columns(self) -> list[slice]:
        """Each projection's columns of the joint output."""
        edges = [0]
        for p in self.projections:
            edges.append(edges[-1] + p.out_features)
        return [slice(lo, hi) for lo, hi in pairwise(edges)]

    def ranks(self, index: int) -> slice:
        """Projection ``index``'s columns of xa."""
        return slice(index * self.rank, (index + 1) * self.rank)


def make_plan(x: Tensor, projections: Sequence[Projection], norm: Norm | None, backend: BackendName) -> GroupPlan:
    """Decide dtype, implementation and dropout seeds of one call. Dropout draws from torch's CPU generator."""
    weights = [p.weight if isinstance(p.weight, Tensor) else None for p in projections]
    dtype = compute_dtype(x.device.type, x, *weights)
    triton = choose_backend(x.device, backend).is_triton
    rank = packed_rank(max(p.rank for p in projections))
    return GroupPlan(
        projections=tuple(projections),
        dtype=dtype,
        rank=rank,
        norm_form=None if norm is None else norm.form,
        eps=0.0 if norm is None else norm.eps,
        triton=triton,
        fused=triton and rank <= LARGEST_FUSED_RANK and fuses_products(x.device, dtype),
        seeds=tuple(
            int(torch.randint(2**62, ())) if p.dropout > 0.0 and p.a is not None else None for p in projections
        ),
        fp8=joined_fp8([p.weight for p in projections]),
    )


def pack_adapters(plan: GroupPlan, device: torch.device) -> Packed:
    """The adapters in the packed layout of the module docstring: as the caller has packed them, or copied into it."""
    return _given(plan) or Packed(pack_a(plan, device), pack_b(plan, device))


def _given(plan: GroupPlan) -> Packed | None:
    """The caller's packed adapters, if they are this group's, of its rank and in the dtype of its products."""
    packs = [p.packed for p in plan.projections if p.a is not None]
    given = packs[0] if packs else None
    if given is None or given.b is None:
        return None
    if any(packed is not given for packed in packs):
        raise ValueError("the projections of a group were given adapters that are packed for different groups")
    return given if given.b.dtype == plan.dtype and given.b.shape == (plan.out_features, plan.rank) else None


def pack_a(plan: GroupPlan, device: torch.device) -> Tensor | None:
    """Every A, times its scaling, (P * K, I): rounded once, one launch each."""
    if not plan.rank:
        return None
    if (given := _given(plan)) is not None:
        return given.a
    features = int(plan.projections[0].weight.shape[1])
    a = _packing(plan)((len(plan.projections) * plan.rank, features), dtype=plan.dtype, device=device)
    for index, p in enumerate(plan.projections):
        if p.a is not None:
            start = index * plan.rank
            torch.mul(p.a, p.scaling, out=a[start : start + p.rank])
    return a


def pack_b(plan: GroupPlan, device: torch.device) -> Tensor | None:
    """Every B above the next, (sum O, K)."""
    if not plan.rank:
        return None
    if (given := _given(plan)) is not None:
        return given.b
    b = _packing(plan)((plan.out_features, plan.rank), dtype=plan.dtype, device=device)
    for p, columns in zip(plan.projections, plan.columns(), strict=True):
        if p.b is not None:
            b[columns, : p.rank].copy_(p.b)
    return b


def _packing(plan: GroupPlan) -> Callable[..., Tensor]:
    """Zeros where ranks are padded, else memory that will be overwritten throughout."""
    return torch.empty if all(p.rank == plan.rank for p in plan.projections) else torch.zeros
