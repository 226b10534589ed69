"""Forward of the gated delta rule: what chunks need of themselves, in parallel, and the scan over chunks.

Legend: B batch, S tokens, Hk key heads, Hv value heads, K and V head sizes, C tokens of a chunk, N chunks. The formulas
and their names are in ``ftkernels.delta_rule``.

The first kernel has a program for a chunk of a value head, which inverts I + G. The second owns a slice of the values
of one value head and walks over the chunks, its state in registers. In backward it runs again, keeps the states and the
x, and leaves the outputs out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import interpreting, on_device_of, store_dtype, triton_store_dtype

#: Tokens of a chunk.
CHUNK = 64
#: What is added to the sum of squares under the root of the norms.
NORM_EPS = 1e-6
#: A smaller log decay is taken as this one: exp(-40) of a state is far below its rounding, and sums of larger numbers
#: would round away the decays of the tokens after them.
_LEAST_LOG_DECAY = tl.constexpr(-40.0)
#: A smaller beta is taken as this one, since its gradient is x . dv / beta.
_LEAST_BETA = tl.constexpr(1e-20)


@dataclass(frozen=True, slots=True)
class DeltaTile:
    """Values that a program takes at once, its warps, and the stages of its loop's software pipeline."""

    values: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class DeltaTiles:
    """A tile for each kernel; that of the chunks' inverses has only warps."""

    chunks: DeltaTile
    scan: DeltaTile
    kept: DeltaTile
    back: DeltaTile
    later: DeltaTile
    earlier: DeltaTile


def delta_tiles(values: int, dtype: torch.dtype) -> DeltaTiles:
    """The tiles for heads of so many values. Chosen for what they spill, compiled for an H200, and not yet timed. They
    need at most 137 KiB of shared memory on Hopper, where products read it, and 73 elsewhere; 160 and 96 in float32.
    """
    if interpreting() or dtype == torch.float32:
        one = DeltaTile(values, 4) if interpreting() else DeltaTile(min(values, 32), 8)
        return DeltaTiles(chunks=one, scan=one, kept=one, back=one, later=one, earlier=one)
    # Of 64 values, since each slice reads the chunk's q, k, inverse and scores again. Smaller slices by 4 warps would
    # fill the GPU with one row, but as Triton 3.6 compiles them they read beyond their shared memory on Hopper.
    most, last = DeltaTile(min(values, 64), 8, 2), DeltaTile(min(values, 64), 8)
    return DeltaTiles(chunks=DeltaTile(values, 4), scan=most, kept=most, back=most, later=most, earlier=last)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The operands of one call, each with its last dimension contiguous.

    q, k (B, S, Hk, K) and v (B, S, Hv, V) of one dtype, log decays g and beta (B, S, Hv) of any strides, starts None or
    (B or 1, S) int32, contiguous.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    starts: Tensor | None
    scale: float
    normalize: bool

    @property
    def chunks(self) -> int:
        """N."""
        return -(-int(self.q.shape[1]) // CHUNK)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return int(self.v.shape[2] // self.q.shape[2])


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the first kernel makes: inverse and scores (B, Hv, N, C, C) in the operands' dtype; the rest float32.

    rows (5, B * Hv, N * C): the cumulated log decay, a, c, e and beta. norms (2, B * Hk, N * C): what q and k are
    multiplied by. decay (B * Hv, N): what a chunk multiplies its state by.
    """

    inverse: Tensor
    scores: Tensor
    rows: Tensor
    norms: Tensor
    decay: Tensor


@triton.jit
def tile_rows(ptr, batch, head, row, stride_b, stride_s, stride_h, S, first, COLUMNS: tl.constexpr, C: tl.constexpr):
    """(pointers, mask) of C tokens from ``row`` of one head, columns from ``first``."""
    # One wide number a program, and narrow ones an element: registers are what these kernels are short of.
    base = (
        ptr + batch.to(tl.int64) * stride_b + tl.cast(row, tl.int64) * stride_s + head.to(tl.int64) * stride_h + first
    )
    at = base + (tl.arange(0, C)[:, None] * stride_s + tl.arange(0, COLUMNS)[None, :])
    return at, (row + tl.arange(0, C) < S)[:, None]


@triton.jit
def documents_of(starts_ptr, batch, starts_stride, row, S, C: tl.constexpr):
    """The first token of each token's document, of C tokens from ``row``; those past the end are of the last one's."""
    document = tl.zeros((C,), tl.int32)
    if starts_ptr is not None:
        tokens = tl.minimum(row + tl.arange(0, C), S - 1)
        document = tl.load(starts_ptr + batch.to(tl.int64) * starts_stride + tokens)
    return document


@triton.jit
def _inverse(A, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + A)^-1 for A strictly lower triangular (C, C), by blocks of 1, 2, 4 ...

    A block of twice the size has the inverses T of its halves on its diagonal and -T A T below.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), A, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = (i // 2 ** (level + 1) == j // 2 ** (level + 1)) & (i // 2**level > j // 2**level)
        half = tl.dot(T, tl.where(below, A, 0.0), input_precision=PRECISION)
        T -= tl.dot(half, T, input_precision=PRECISION)
    return T


@triton.jit
def _prepare_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    starts_ptr,
    inverse_ptr,
    scores_ptr,
    rows_ptr,
    norms_ptr,
    decay_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    g_stride_b,
    g_stride_s,
    g_stride_h,
    b_stride_b,
    b_stride_s,
    b_stride_h,
    starts_stride,
    S,
    heads,
    chunks,
    vectors,
    scale,
    eps,
    NORMALIZE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    line, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head = line // heads, line % heads
    key_head = head // GROUP
    row, place, lane = chunk * C, tl.arange(0, C), line.to(tl.int64)
    at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
    k = tl.load(at, mask=there, other=0.0).to(CD)
    at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
    q = tl.load(at, mask=there, other=0.0).to(CD)
    q_norm, k_norm = tl.zeros((C,), tl.float32) + scale, tl.full((C,), 1.0, tl.float32)
    if NORMALIZE:
        wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
        q_norm = q_norm / tl.sqrt(tl.sum(wide_q * wide_q, 1) + eps)
        k_norm = k_norm / tl.sqrt(tl.sum(wide_k * wide_k, 1) + eps)
    if head % GROUP == 0:
        norms_at = norms_ptr + (batch * (heads // GROUP) + key_head).to(tl.int64) * (chunks * C) + row + place
        tl.store(norms_at, q_norm)
        tl.store(norms_at + vectors // GROUP, k_norm)
    token, inside = (row + place).to(tl.int64), row + place < S
    at = g_ptr + batch.to(tl.int64) * g_stride_b + token * g_stride_s + head * g_stride_h
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = beta_ptr + batch.to(tl.int64) * b_stride_b + token * b_stride_s + head * b_stride_h
    beta = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(tl.abs(beta) < _LEAST_BETA, _LEAST_BETA, beta)
    document = documents_of(starts_ptr, batch, starts_stride, row, S, C)
    last = tl.max(document, 0)  # documents stand in order
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    total = tl.sum(tl.where(seen, tl.maximum(g, _LEAST_LOG_DECAY)[None, :], 0.0), 1)
    pair = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf"))) * (beta * k_norm)[None, :]
    square, within = (lane * chunks + chunk) * (C * C), place[:, None] * C + place[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pair * q_norm[:, None]
    tl.store(scores_ptr + square + within, scores.to(scores_ptr.dtype.element_ty))
    gram = tl.dot(k, tl.trans(k), input_precision=PRECISION) * pair * k_norm[:, None]
    T = _inverse(tl.where(place[:, None] > place[None, :], gram, 0.0), INVERSE_PRECISION, C, LEVELS)
    tl.store(inverse_ptr + square + within, T.to(inverse_ptr.dtype.element_ty))
    end = tl.sum(tl.where(place == C - 1, total, 0.0), 0)
    first_part = tl.where((document < row) | (document == 0), tl.exp(total), 0.0)
    last_part = tl.exp(tl.where(document == last, end - total, float("-inf")))
    rows_at = rows_ptr + lane * (chunks * C) + row + place
    tl.store(rows_at, total)
    tl.store(rows_at + vectors, first_part * k_norm)
    tl.store(rows_at + 2 * vectors, last_part * k_norm * beta)
    tl.store(rows_at + 3 * vectors, first_part * q_norm)
    tl.store(rows_at + 4 * vectors, beta)
    kept = tl.where((last < row) | (last == 0), tl.exp(end), 0.0)
    tl.store(decay_ptr + lane * chunks + chunk, kept)


@triton.jit
def _scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    scores_ptr,
    rows_ptr,
    decay_ptr,
    out_ptr,
    x_ptr,
    states_ptr,
    ends_before_ptr,
    ends_state_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    S,
    heads,
    chunks,
    vectors,
    KEEP: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    line, first_value = tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V) * BLOCK_V
    batch, head = line // heads, line % heads
    key_head = head // GROUP
    place, lane = tl.arange(0, C), line.to(tl.int64)
    square = place[:, None] * C + place[None, :]
    state_at = tl.arange(0, K)[:, None] * V + first_value + tl.arange(0, BLOCK_V)[None, :]
    state = tl.zeros((K, BLOCK_V), tl.float32)
    for chunk in range(chunks):
        row, kept = chunk * C, tl.load(decay_ptr + lane * chunks + chunk)
        at, there = tile_rows(k_ptr, batch, key_head, row, k_stride_b, k_stride_s, k_stride_h, S, 0, K, C)
        k = tl.load(at, mask=there, other=0.0).to(CD)
        at, there = tile_rows(v_ptr, batch, head, row, v_stride_b, v_stride_s, v_stride_h, S, first_value, BLOCK_V, C)
        v = tl.load(at, mask=there, other=0.0).to(tl.float32)
        square_at = (lane * chunks + chunk) * (C * C) + square
        rows_at = rows_ptr + lane * (chunks * C) + row + place
        before = state.to(CD)
        if ends_before_ptr is not None:
            for end in range(tl.load(ends_before_ptr + chunk), tl.load(ends_before_ptr + chunk + 1)):
                tl.store(ends_state_ptr + (end * heads + head).to(tl.int64) * (K * V) + state_at, state)
        if KEEP:
            states_at = states_ptr + (lane * chunks + chunk) * (K * V) + state_at
            tl.store(states_at, state.to(states_ptr.dtype.element_ty))
        x = v - tl.dot(k, before, input_precision=PRECISION) * tl.load(rows_at + vectors)[:, None]
        x = tl.dot(tl.load(inverse_ptr + square_at).to(CD), x.to(CD), input_precision=PRECISION)
        if x_ptr is not None:
            at, there = tile_rows(x_ptr, batch, head, row, S * heads * V, heads * V, V, S, first_value, BLOCK_V, C)
            tl.store(at, x.to(x_ptr.dtype.element_ty), mask=there)
        if not KEEP:
            at, there = tile_rows(q_ptr, batch, key_head, row, q_stride_b, q_stride_s, q_stride_h, S, 0, K, C)
            q = tl.load(at, mask=there, other=0.0).to(CD)
            out = tl.dot(q, before, input_precision=PRECISION) * tl.load(rows_at + 3 * vectors)[:, None]
            out = tl.dot(tl.load(scores_ptr + square_at).to(CD), x.to(CD), out, input_precision=PRECISION)
            at, there = tile_rows(out_ptr, batch, head, row, S * heads * V, heads * V, V, S, first_value, BLOCK_V, C)
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=there)
        state *= kept
        added = (x * tl.load(rows_at + 2 * vectors)[:, None]).to(CD)
        state = tl.dot(tl.trans(k), added, state, input_precision=PRECISION)


@triton.jit
def _ends_kernel(
    k_ptr,
    x_ptr,
    rows_ptr,
    k_norms_ptr,
    ends_ptr,
    begins_ptr,
    ends_state_ptr,
    k_stride_s,
    k_stride_h,
    heads,
    chunks,
    vectors,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after a token, from that before its chunk, which stands in its place, and the chunk's x up to it.

    A kernel of its own, so that the scan has no product in a loop over the ends of a chunk.
    """
    pid = tl.program_id(0)
    first_value, line = pid % (V // BLOCK_V) * BLOCK_V, pid // (V // BLOCK_V)
    end, head = line // heads, line % heads
    key_head, lane, place = head // GROUP, head.to(tl.int64), tl.arange(0, C)
    token, begin = tl.load(ends_ptr + end), tl.load(begins_ptr + end)
    row = token // C * C
    own = (row + place >= begin) & (row + place <= token)
    rows_at = rows_ptr + lane * (chunks * C) + row + place
    total, beta = tl.load(rows_at), tl.load(rows_at + 4 * vectors)
    until = tl.sum(tl.where(row + place == token, total, 0.0), 0)
    part = tl.exp(tl.where(own, until - total, float("-inf"))) * beta
    part *= tl.load(k_norms_ptr + key_head.to(tl.int64) * (chunks * C) + row + place)
    keys = (row + place).to(tl.int64)[None, :] * k_stride_s + key_head.to(tl.int64) * k_stride_h
    k = tl.load(k_ptr + keys + tl.arange(0, K)[:, None], mask=own[None, :], other=0.0).to(CD)
    values = ((row + place).to(tl.int64)[:, None] * heads + head) * V + first_value + tl.arange(0, BLOCK_V)[None, :]
    x = tl.load(x_ptr + values, mask=own[:, None], other=0.0).to(tl.float32) * part[:, None]
    state_at = tl.arange(0, K)[:, None] * V + first_value + tl.arange(0, BLOCK_V)[None, :]
    state_at = ends_state_ptr + line.to(tl.int64) * (K * V) + state_at
    state = tl.load(state_at) * tl.where(begin < row, tl.exp(until), 0.0)
    tl.store(state_at, tl.dot(k, x.to(CD), state, input_precision=PRECISION))


def precision_of(dtype: torch.dtype) -> str:
    """How products of operands of ``dtype`` are taken; "tf32x3" is float32 to a few roundings, on tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def prepare(inputs: DeltaInputs, tiles: DeltaTiles) -> Chunks:
    """Inverses, scores and factors of all chunks."""
    batch, length, key_heads, width = inputs.q.shape
    heads, chunks, device = inputs.v.shape[2], inputs.chunks, inputs.q.device
    stored, lines = store_dtype(inputs.q.dtype), batch * heads
    made = Chunks(
        torch.empty((batch, heads, chunks, CHUNK, CHUNK), dtype=stored, device=device),
        torch.empty((batch, heads, chunks, CHUNK, CHUNK), dtype=stored, device=device),
        torch.empty((5, lines, chunks * CHUNK), dtype=torch.float32, device=device),
        torch.empty((2, batch * key_heads, chunks * CHUNK), dtype=torch.float32, device=device),
        torch.empty((lines, chunks), dtype=torch.float32, device=device),
    )
    with on_device_of(inputs.q):
        _prepare_kernel[(lines * chunks,)](
            inputs.q,
            inputs.k,
            inputs.g,
            inputs.beta,
            inputs.starts,
            made.inverse,
            made.scores,
            made.rows,
            made.norms,
            made.decay,
            *inputs.q.stride()[:3],
            *inputs.k.stride()[:3],
            *inputs.g.stride(),
            *inputs.beta.stride(),
            starts_stride(inputs),
            length,
            heads,
            chunks,
            lines * chunks * CHUNK,
            inputs.scale,
            NORM_EPS,
            NORMALIZE=inputs.normalize,
            GROUP=inputs.group,
            K=width,
            C=CHUNK,
            LEVELS=CHUNK.bit_length() - 1,
            CD=triton_store_dtype(inputs.q.dtype),
            PRECISION=precision_of(inputs.q.dtype),
            INVERSE_PRECISION=precision_of(inputs.q.dtype),
            num_warps=tiles.chunks.warps,
            num_stages=tiles.chunks.stages,
        )
    return made


def starts_stride(inputs: DeltaInputs) -> int:
    """Elements from one row's starts to the next one's."""
    return 0 if inputs.starts is None or inputs.starts.shape[0] == 1 else int(inputs.starts.shape[1])


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens of a single row, in order, after which the state is wanted, each with the first token of its document,
    (E,) int32; and for each chunk how many lie before it, (N + 1,) int32.
    """

    tokens: Tensor
    begins: Tensor
    before: Tensor


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan leaves: the output (B, S, Hv, V) and the states at ends (E, Hv, K, V), float32; or, kept for
    backward, the x (B, S, Hv, V) and the states before each chunk (B, Hv, N, K, V), both in the operands' dtype.
    """

    out: Tensor | None = None
    x: Tensor | None = None
    states: Tensor | None = None
    at_ends: Tensor | None = None


def scan(inputs: DeltaInputs, chunks: Chunks, *, keep: bool, tiles: DeltaTiles, ends: Ends | None = None) -> Scanned:
    """Walks over the chunks; with ``ends`` over one row."""
    batch, length, _, width = inputs.q.shape
    heads, values, device = inputs.v.shape[2], inputs.v.shape[3], inputs.q.device
    stored = store_dtype(inputs.v.dtype)
    tile = tiles.kept if keep else tiles.scan
    by_token = torch.empty((batch, length, heads, values), dtype=stored, device=device)
    states = at_ends = None
    x = by_token if keep else None if ends is None else torch.empty_like(by_token)
    if ends is not None:
        at_ends = torch.empty((ends.tokens.shape[0], heads, width, values), dtype=torch.float32, device=device)
    if keep:
        states = torch.empty((batch, heads, inputs.chunks, width, values), dtype=stored, device=device)
    with on_device_of(inputs.q):
        _scan_kernel[(batch * heads * (values // tile.values),)](
            inputs.q,
            inputs.k,
            inputs.v,
            chunks.inverse,
            chunks.scores,
            chunks.rows,
            chunks.decay,
            by_token,
            x,
            states,
            None if ends is None else ends.before,
            at_ends,
            *inputs.q.stride()[:3],
            *inputs.k.stride()[:3],
            *inputs.v.stride()[:3],
            length,
            heads,
            inputs.chunks,
            batch * heads * inputs.chunks * CHUNK,
            KEEP=keep,
            GROUP=inputs.group,
            K=width,
            V=values,
            BLOCK_V=tile.values,
            C=CHUNK,
            CD=triton_store_dtype(inputs.q.dtype),
            PRECISION=precision_of(inputs.q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if ends is not None and ends.tokens.shape[0]:
            _ends_kernel[(ends.tokens.shape[0] * heads * (values // tile.values),)](
                inputs.k,
                x,
                chunks.rows,
                chunks.norms[1],
                ends.tokens,
                ends.begins,
                at_ends,
                *inputs.k.stride()[1:3],
                heads,
                inputs.chunks,
                heads * inputs.chunks * CHUNK,
                GROUP=inputs.group,
                K=width,
                V=values,
                BLOCK_V=tile.values,
                C=CHUNK,
                CD=triton_store_dtype(inputs.q.dtype),
                PRECISION=precision_of(inputs.q.dtype),
                num_warps=tile.warps,
            )
    return Scanned(x=by_token, states=states) if keep else Scanned(by_token, at_ends=at_ends)
