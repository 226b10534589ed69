"""The gated delta rule of Qwen3.5, Qwen3-Next and others: linear attention whose state forgets and is corrected.

Legend: B batch, S tokens, Hk key heads, Hv value heads, K and V head sizes, C = 64 tokens of a chunk. Value head h
reads key head h // (Hv / Hk). For each value head, token by token, with a state M (K, V) in float32:

    q~ = scale * q / sqrt(sum q^2 + 1e-6)        k~ = k / sqrt(sum k^2 + 1e-6)       without ``normalize``: scale * q, k
    M <- exp(g) M                                forget
    M <- M + beta k~ (v - M^T k~)^T              correct what the state predicts of v
    o = M^T q~

At the first token of a document M is zero.

Chunks (Yang et al., 2024, arXiv 2412.06464, in a form of our own). Within a chunk let t_i be the sum of g of the
document's tokens up to i, D_ij = exp(t_i - t_j) for j <= i of one document, else 0, and M the state before the chunk. A
token's x is what it adds to the state but for beta: x_i = v_i - (the state that it meets)^T k~_i. So with

    G_ij = k~_i . k~_j D_ij beta_j  (j < i)          P_ij = q~_i . k~_j D_ij beta_j  (j <= i)
    a_i = exp(t_i) |k|^-1    e_i = exp(t_i) scale |q|^-1    c_i = exp(t_end - t_i) |k|^-1 beta_i    d = exp(t_end)

where a and e are 0 for documents that begin in the chunk, c for those that end in it, and d where one begins:

    x = (I + G)^-1 (v - a o (k M))       o = e o (q M) + P x       M' = d M + k^T (c o x)

The inverse and P are made of all chunks in parallel; the scan over chunks has three products in a row. Backward, with
R = (I + G)^-1 and dM' the gradient of the state after the chunk, runs the same products the other way:

    dx = P^T do + c o (k dM')      dv = R^T dx      dM = d dM' + q^T (e o do) - k^T (a o dv)
    dG = -dv x^T      dP = do x^T      d beta_j = x_j . dv_j / beta_j

and the gradients of q, k and t are those of P, G, a, c, e and d. That of t_i is q_i . dq_i + k_i . (dk_i through a and
the rows of G) - k_i . (dk_i through the rest), plus, at the end, that of d and c; that of g_i is the sum of those of t
after it in its document. In it pairs of tokens on one side of i cancel, and leave their rounding: of float32 more than
what is owed to a token that forgets most. So in float32 pairs are summed apart, those that i lies between alone:

    dg_m = sum over j < m <= i of (dP_ij P_ij + dG_ij G_ij) + over i >= m of what a_i and e_i, over j < m of what c_j,
           and for all m what d owes to its exponent

In 16 bits operands are rounded alike in both sums, which cancel as far as the rest is right.

Backward keeps only the inputs, which are views of the convolution's output: no byte a token. It makes the inverses, x
and states again; while it runs, they, dM' and a part of dk take 4 C + 4 K V / C + 2 V + 4 K Hk / Hv + 32 bytes a token
and value head in bfloat16: 1,824 for heads of 128, two to a key head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.delta_rule_backward import Kept, gradients, scan_back
from ftkernels.delta_rule_forward import CHUNK, NORM_EPS, DeltaInputs, Ends, delta_tiles, prepare, scan
from ftkernels.device import BackendChoice, BackendName, accumulate_dtype, choose_backend, gpu_of, rounded
from ftkernels.limits import why_no_delta_rule


class DeltaOutput(NamedTuple):
    """The output (B, S, Hv, V) in v's dtype, and states (B or E, Hv, K, V) after tokens."""

    out: Tensor
    last: Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    starts: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """The gated delta rule, (B, S, Hv, V) in v's dtype; the module docstring has the formulas.

    Args:
        q, k: (B, S, Hk, K), any strides; copied only where the features of a head lie apart.
        v: (B, S, Hv, V), of one dtype with q and k; Hv is a multiple of Hk.
        g: (B, S, Hv), the decay's logarithm, at most 0 and taken as -40 below that; any strides.
        beta: (B, S, Hv), not below 0.
        starts: (B or 1, S) int32: for each token the index of its document's first token. None: one document a row.
        normalize: whether q and k are divided by their norms.
        scale: of q; None is K^-0.5.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, k, v, g, beta, starts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not delta_rule_backend(q, v, backend).is_triton:
        return delta_rule_chunked(q, k, v, g, beta, starts=starts, normalize=normalize, scale=scale)
    out: Tensor = _DeltaRule.apply(q, k, v, g, beta, (starts, scale, normalize))  # type: ignore[no-untyped-call]
    return out


@torch.no_grad()
def delta_rule_ends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ends: Tensor,
    *,
    starts: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
    backend: BackendName = "auto",
) -> DeltaOutput:
    """One row of documents without gradients; ``last`` are the states (E, Hv, K, V) after some of its tokens.

    Args:
        ends: (E,) int32, these tokens, in order. The other arguments are of :func:`delta_rule`.

    Raises:
        ValueError: more than one row, or shapes or dtypes that do not fit.
    """
    _check(q, k, v, g, beta, starts)
    if v.shape[0] != 1 or not v.shape[1] or ends.dim() != 1 or ends.dtype != torch.int32:
        raise ValueError(f"ends {tuple(ends.shape)} in {ends.dtype} are not int32 (E,) of one row, {tuple(v.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not delta_rule_backend(q, v, backend).is_triton:
        return _chunked(q, k, v, g, beta, starts, ends, normalize, scale)
    inputs, tiles = _inputs(q, k, v, g, beta, starts, scale, normalize), delta_tiles(v.shape[-1], v.dtype)
    begins = torch.zeros_like(ends) if starts is None else starts[0, ends]
    chunks = torch.arange(inputs.chunks + 1, dtype=torch.int32, device=ends.device)
    asked = Ends(ends.contiguous(), begins, torch.searchsorted(ends, chunks * CHUNK, out_int32=True))
    made = scan(inputs, prepare(inputs, tiles), keep=False, tiles=tiles, ends=asked)
    assert made.out is not None
    assert made.at_ends is not None
    return DeltaOutput(rounded(made.out, v.dtype), made.at_ends)


def delta_rule_backend(q: Tensor, v: Tensor, backend: BackendName = "auto") -> BackendChoice:
    """Chooses the implementation for q and v, and says why."""
    chosen = choose_backend(q.device, backend)
    if not chosen.is_triton:
        return chosen
    if q.dtype == torch.float64:
        return BackendChoice("torch", "the kernels multiply no float64")
    refusal = why_no_delta_rule(gpu_of(q.device), q.shape[-1], v.shape[-1])
    return chosen if refusal is None else BackendChoice("torch", refusal)


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    starts: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
) -> DeltaOutput:
    """The same token by token in plain torch, differentiable, with the state after the last one; float64 in float64."""
    q, k, v, g, beta = _prepared(q, k, v, g, beta, normalize, scale)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for token in range(q.shape[1]):
        if starts is not None and token:
            inside = (starts[:, token] != token).to(q.dtype)
            state = state * inside[:, None, None, None]
        state = state * torch.exp(g[:, token])[..., None, None]
        missing = v[:, token] - torch.einsum("bhkv,bhk->bhv", state, k[:, token])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token] * beta[:, token, :, None], missing)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]))
    out = torch.stack(outs, 1) if outs else v
    return DeltaOutput(out, state)


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    starts: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The same chunk by chunk in plain torch, differentiable: what runs where the kernels do not."""
    return _chunked(q, k, v, g, beta, starts, None, normalize, scale).out


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    normalize: bool,
    scale: float | None,
) -> DeltaOutput:
    """Chunks in plain torch, with the states after the tokens ``ends``, or after the last one of each row."""
    dtype, length = v.dtype, v.shape[1]
    q, k, v, g, beta = (t.transpose(1, 2) for t in _prepared(q, k, v, g, beta, normalize, scale))
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    document = torch.zeros((1, length), dtype=torch.int32, device=q.device) if starts is None else starts
    outs, wanted, at_ends = [], [length - 1] if ends is None else ends.tolist(), [state] if not length else []
    for row in range(0, length, CHUNK):
        own = slice(row, min(row + CHUNK, length))
        qs, ks, vs, gs, betas = (t[:, :, own] for t in (q, k, v, g, beta))
        where = document[:, None, own]
        seen = (where[..., :, None] == where[..., None, :]).tril()
        total = (seen * gs[..., None, :]).sum(-1)
        apart = total[..., :, None] - total[..., None, :]
        pair = torch.where(seen, apart, -torch.inf).exp() * betas[..., None, :]
        carried = (where < row) | (where == 0)
        met = torch.where(carried, total, -torch.inf).exp()[..., None]
        gram = (ks @ ks.transpose(-1, -2) * pair).tril(-1)
        x = torch.linalg.solve_triangular(gram, vs - met * (ks @ state), upper=False, unitriangular=True)
        outs.append(met * (qs @ state) + (qs @ ks.transpose(-1, -2) * pair) @ x)
        within = state, met, total, where, betas, ks, x
        at_ends += [_after(token - row, *within) for token in wanted if own.start <= token < own.stop]
        state = _after(own.stop - row - 1, *within)
    out = torch.cat(outs, 2).transpose(1, 2) if outs else v.transpose(1, 2)
    return DeltaOutput(out.to(dtype), torch.cat(at_ends) if at_ends else state[:0])


def _after(
    at: int, state: Tensor, met: Tensor, total: Tensor, where: Tensor, betas: Tensor, k: Tensor, x: Tensor
) -> Tensor:
    """The state after a chunk's token ``at``, from that before the chunk."""
    until = slice(at + 1)
    same = where[..., until] == where[..., at : at + 1]
    left = torch.where(same, total[..., at : at + 1] - total[..., until], -torch.inf).exp() * betas[..., until]
    return met[..., at : at + 1, :] * state + k[..., until, :].transpose(-1, -2) @ (left[..., None] * x[..., until, :])


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalize: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """All five in float32 (float64), q and k normalized and repeated for each value head."""
    acc = accumulate_dtype(v.dtype)
    q, k, v, g, beta = (t.to(acc) for t in (q, k, v, g, beta))
    if normalize:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, g, beta


class _DeltaRule(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, settings: Any) -> Tensor:
        starts, scale, normalize = settings
        ctx.save_for_backward(q, k, v, g, beta, starts)
        ctx.scale, ctx.normalize = scale, normalize
        if not v.numel():
            return torch.empty_like(v)
        inputs = _inputs(q, k, v, g, beta, starts, scale, normalize)
        tiles = delta_tiles(v.shape[-1], v.dtype)
        made = scan(inputs, prepare(inputs, tiles), keep=False, tiles=tiles)
        assert made.out is not None
        return rounded(made.out, v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, starts = ctx.saved_tensors
        if not v.numel():
            return *(torch.zeros_like(t) for t in (q, k, v, g, beta)), None
        inputs = _inputs(q, k, v, g, beta, starts, ctx.scale, ctx.normalize)
        tiles = delta_tiles(v.shape[-1], v.dtype)
        chunks = prepare(inputs, tiles)
        again = scan(inputs, chunks, keep=True, tiles=tiles)
        assert again.x is not None
        assert again.states is not None
        do = _readable(do)
        back = scan_back(inputs, chunks, do, tiles)
        made = gradients(inputs, chunks, Kept(again.x, again.states), do, back, tiles)
        return (
            rounded(made.dq, q.dtype),
            rounded(made.dk, k.dtype),
            rounded(back.dv, v.dtype),
            made.dg.to(g.dtype),
            made.d_beta.to(beta.dtype),
            None,
        )


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, scale: float, normalize: bool
) -> DeltaInputs:
    starts = None if starts is None else starts.contiguous()
    return DeltaInputs(_readable(q), _readable(k), _readable(v), g, beta, starts, scale, normalize)


def _readable(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy where the features of a head lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None) -> None:
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"expected (B, S, heads, size), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} value heads are no multiple of {q.shape[2]} key heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v need one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(f"g {tuple(g.shape)} or beta {tuple(beta.shape)} is not a number a value head of v")
    if starts is not None and (starts.shape not in ((1, q.shape[1]), q.shape[:2]) or starts.dtype != torch.int32):
        raise ValueError(f"starts {tuple(starts.shape)} in {starts.dtype} are not int32 (B or 1, S)")
