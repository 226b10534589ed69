"""Triton kernel of NF4's dequantization: one launch a weight, scales of scales included; see ``ftkernels.nf4``.

Each thread takes 4 bytes and writes the 8 values they stand for, 16 bytes in 16-bit formats: neighbouring threads read
and write neighbouring memory, and no value passes from one thread to another. Four such words a thread hide the latency
of loading scales. The kernel is bound by memory, and stays so at the clock that large products leave it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype

_WARPS = 4
#: Words of 4 bytes that a program takes at a time, one a thread.
_WORDS = 32 * _WARPS


@triton.jit
def _load_words(data, word, words, data_bytes, WHOLE: tl.constexpr):
    """Words of 8 indices; without WHOLE byte by byte, for memory that ends within a word or is not aligned to one."""
    if WHOLE:
        return tl.load(data.to(tl.pointer_type(tl.int32)) + word, mask=word < words, other=0)
    value = word * 0
    for j in tl.static_range(4):
        byte = tl.load(data + 4 * word + j, mask=4 * word + j < data_bytes, other=0)
        value |= byte.to(tl.int32) << (8 * j)
    return value


@triton.jit
def _scale(absmax, nested_absmax, nested_table, nested_offset, block, within, inside, NESTED: tl.constexpr):
    """Scale of each ``block``; ``within``: how far into a nested block the first one lies."""
    if NESTED > 0:
        scale = tl.load(nested_table + tl.load(absmax + block, mask=inside, other=0).to(tl.int32))
        scale = scale * tl.load(nested_absmax + (within + block) // NESTED, mask=inside, other=0.0)
        scale = scale + tl.load(nested_offset)
    else:
        scale = tl.load(absmax + block, mask=inside, other=0.0)
    return scale


@triton.jit
def _store(out, table, packed, scale, word, words, elements, WHOLE: tl.constexpr):
    nibble = tl.arange(0, 8)
    # Element 2j is the high half of byte j, and byte 0 the lowest of a word.
    index = (packed[:, None] >> ((nibble ^ 1) * 4)[None, :]) & 15
    values = tl.load(table + index) * scale[:, None]
    at = word[:, None] * 8 + nibble[None, :]
    mask = (word < words)[:, None] if WHOLE else at < elements  # a mask by words leaves the stores whole
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(
    data,
    absmax,
    table,
    nested_absmax,
    nested_table,
    nested_offset,
    out,
    words,
    data_bytes,
    elements,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # Where a program begins, in 64 bits: a matrix may have more than 2^31 elements. Within it 32 are enough.
    first = tl.program_id(0).to(tl.int64) * (4 * WORDS)
    words = tl.minimum(words - first, 4 * WORDS).to(tl.int32)
    data_bytes = tl.minimum(data_bytes - 4 * first, 16 * WORDS).to(tl.int32)
    elements = tl.minimum(elements - 8 * first, 32 * WORDS).to(tl.int32)
    WORDS_PER_BLOCK: tl.constexpr = BLOCK // 8
    first_block = first // WORDS_PER_BLOCK
    data += 4 * first
    out += 8 * first
    absmax += first_block
    # A program may begin inside a block that is larger than it.
    skipped = (first % WORDS_PER_BLOCK).to(tl.int32)
    within = 0
    if NESTED > 0:
        nested_absmax += first_block // NESTED
        within = (first_block % NESTED).to(tl.int32)

    w0 = tl.arange(0, WORDS)
    w1 = w0 + WORDS
    w2 = w1 + WORDS
    w3 = w2 + WORDS
    # All loads stand before all stores, which might write to what is loaded for all the compiler knows.
    p0 = _load_words(data, w0, words, data_bytes, WHOLE)
    p1 = _load_words(data, w1, words, data_bytes, WHOLE)
    p2 = _load_words(data, w2, words, data_bytes, WHOLE)
    p3 = _load_words(data, w3, words, data_bytes, WHOLE)
    b0 = (skipped + w0) // WORDS_PER_BLOCK
    b1 = (skipped + w1) // WORDS_PER_BLOCK
    b2 = (skipped + w2) // WORDS_PER_BLOCK
    b3 = (skipped + w3) // WORDS_PER_BLOCK
    s0 = _scale(absmax, nested_absmax, nested_table, nested_offset, b0, within, w0 < words, NESTED)
    s1 = _scale(absmax, nested_absmax, nested_table, nested_offset, b1, within, w1 < words, NESTED)
    s2 = _scale(absmax, nested_absmax, nested_table, nested_offset, b2, within, w2 < words, NESTED)
    s3 = _scale(absmax, nested_absmax, nested_table, nested_offset, b3, within, w3 < words, NESTED)
    _store(out, table, p0, s0, w0, words, elements, WHOLE)
    _store(out, table, p1, s1, w1, words, elements, WHOLE)
    _store(out, table, p2, s2, w2, words, elements, WHOLE)
    _store(out, table, p3, s3, w3, words, elements, WHOLE)


def dequantize_nf4_triton(
    data: Tensor,
    absmax: Tensor,
    table: Tensor,
    nested: tuple[Tensor, Tensor, Tensor, int] | None,
    out: Tensor,
    block_size: int,
) -> None:
    """Write the matrix into ``out``, contiguous; the other arguments are ``NF4Weight``'s fields, checked there.

    nested: (absmax, table, offset, block size) or None.
    """
    target = out
    if store_dtype(out.dtype) != out.dtype or out.dtype == torch.float64:
        target = torch.empty_like(out, dtype=torch.float32)
    nested_absmax, nested_table, nested_offset, nested_size = (
        nested if nested is not None else (absmax, table, table, 0)
    )
    elements = out.numel()
    words = triton.cdiv(elements, 8)
    with on_device_of(data):
        # Without fp_fusion: scale * absmax + offset is two roundings in bitsandbytes, and one as a fused operation.
        _dequantize_kernel[(triton.cdiv(words, 4 * _WORDS),)](
            data,
            absmax,
            table,
            nested_absmax,
            nested_table,
            nested_offset,
            target,
            words,
            data.numel(),
            elements,
            BLOCK=block_size,
            NESTED=nested_size,
            WORDS=_WORDS,
            WHOLE=elements % 8 == 0 and data.data_ptr() % 4 == 0,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    if target is not out:
        out.copy_(rounded(target, out.dtype))
