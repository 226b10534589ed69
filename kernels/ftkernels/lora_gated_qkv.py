"""The q, k and v projections of an attention layer whose q projection gives the gate of attention's output as well.

Legend: B batch, S sequence, I input features, Hq and Hk heads, D head size. As ``ftkernels.lora_qkv``, but that the
rows of W_q are, head by head, those of the query and then those of its gate, D each (Qwen3-Next, Qwen3.5). The gate is
used behind attention, ``ftkernels.output_gate``; it is neither normalised nor rotated.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ftkernels.device import BackendName
from ftkernels.limits import RopeLayout
from ftkernels.lora_group import lora_group, lora_group_reference
from ftkernels.lora_qkv import QKV, Epilogue, apply_apart, check_epilogue
from ftkernels.projection import Norm, Projection


class GatedQKV(NamedTuple):
    """q (B, Hq, S, D), k and v (B, Hk, S, D), the gate (B, S, Hq, D), and z again for the residual connection."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    residual: Tensor


def lora_gated_qkv(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
    backend: BackendName = "auto",
) -> GatedQKV:
    """Queries, keys, values and gates. ``q`` is a (2 * Hq * D, I) layer; the other arguments are of ``lora_qkv``.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    heads = _heads(q, k, v, head_dim)
    epilogue = Epilogue(head_norms, "head", norm_after_rope=False, rope=rope, rope_layout=rope_layout)
    check_epilogue(epilogue, head_dim, heads[0] * head_dim, heads[1] * head_dim)
    y, residual = lora_group(z, (q, k, v), norm=norm, backend=backend)
    query, gate, key, value = _parts(y, heads, head_dim)
    bare = QKV(*(x.transpose(1, 2) for x in (query, key, value)), residual)
    made = apply_apart(bare, y.dtype, epilogue, backend)
    return GatedQKV(made.q, made.k, made.v, gate, made.residual)


def lora_gated_qkv_reference(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
) -> GatedQKV:
    """The same in plain torch with torch's own autograd."""
    y, residual = lora_group_reference(z, (q, k, v), norm=norm)
    query, gate, key, value = _parts(y, _heads(q, k, v, head_dim), head_dim)
    bare = QKV(*(x.transpose(1, 2) for x in (query, key, value)), residual)
    epilogue = Epilogue(head_norms, "head", norm_after_rope=False, rope=rope, rope_layout=rope_layout)
    made = apply_apart(bare, y.dtype, epilogue, "torch")
    return GatedQKV(made.q, made.k, made.v, gate, made.residual)


def _heads(q: Projection, k: Projection, v: Projection, head_dim: int) -> tuple[int, int]:
    """Query heads and key heads."""
    rows = q.out_features, k.out_features, v.out_features
    if rows[0] % (2 * head_dim) or rows[1] % head_dim or rows[1] != rows[2]:
        raise ValueError(f"{rows} features do not make heads of {head_dim}, of queries with their gates")
    return rows[0] // (2 * head_dim), rows[1] // head_dim


def _parts(y: Tensor, heads: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, gates, keys and values by head, (B, S, heads, D): views. torch joins their gradients at once."""
    both, key, value = y.split([2 * heads[0] * head_dim, *[heads[1] * head_dim] * 2], dim=-1)
    query, gate = both.unflatten(-1, (heads[0], 2 * head_dim)).split(head_dim, dim=-1)
    return query, gate, key.unflatten(-1, (heads[1], head_dim)), value.unflatten(-1, (heads[1], head_dim))
