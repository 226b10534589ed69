"""NF4: weights in blocks of 4-bit indices into a table of 16 normal quantiles, in bitsandbytes' layout and values.

For a matrix of n = O * I elements in row-major order and blocks of ``block_size`` elements:

    data    (ceil(n / 2),) uint8: element 2j in the high half of byte j, element 2j + 1 in the low half
    absmax  (ceil(n / block_size),): largest magnitude of each block
    W_i   = table[index_i] * absmax[i // block_size]                       in float32, rounded once to the dtype

With double quantization absmax is itself 8-bit indices, in blocks of ``nested.block_size``:

    absmax_b = nested.table[index_b] * nested.absmax[b // nested.block_size] + nested.offset

each operation rounded to float32, the offset added last. Nothing here is cached, and there are no buffers that two
calls share: a weight is written into memory that its caller owns.

The kernel is one launch a weight, scales of scales included. Each thread takes 4 bytes and writes the 8 values they
stand for, 16 bytes in 16-bit formats: neighbouring threads read and write neighbouring memory, and no value passes from
one thread to another. Four such words a thread hide the latency of loading scales. The kernel is bound by memory, and
stays so at the clock that large products leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import choose_backend, on_device_of, rounded, store_dtype
from ftkernels.limits import NF4_BLOCK_SIZE, NF4_NESTED_BLOCK_SIZE

#: The table of QLoRA (Dettmers et al., 2023): quantiles of a normal distribution scaled to [-1, 1], zero among them.
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: Elements that are quantized or dequantized at a time in plain torch: bounds the float32 temporaries. Of whole blocks.
_CHUNK = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class NestedScales:
    """Scales that dequantize the 8-bit absmax, in float32.

    absmax: (ceil(blocks / block_size),); table: (256,); offset: ().
    """

    absmax: Tensor
    table: Tensor
    offset: Tensor
    block_size: int = NF4_NESTED_BLOCK_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class NF4Weight:
    """A frozen matrix in NF4; see the module docstring for ``data`` and ``absmax``.

    shape: (O, I). table: (16,) float32. absmax: float32, or uint8 together with ``nested``.

    Raises:
        ValueError: when made of parts that do not fit together, saying which.
    """

    data: Tensor
    absmax: Tensor
    table: Tensor
    shape: torch.Size
    block_size: int = NF4_BLOCK_SIZE
    nested: NestedScales | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise ValueError(f"an NF4 weight is a matrix, not of shape {tuple(self.shape)}")
        if self.block_size not in _BLOCK_SIZES:
            raise ValueError(f"block size {self.block_size} is none of {_BLOCK_SIZES}")
        elements = self.shape[0] * self.shape[1]
        blocks = -(-elements // self.block_size)
        _expect("data", self.data, torch.uint8, -(-elements // 2))
        _expect("absmax", self.absmax, torch.float32 if self.nested is None else torch.uint8, blocks)
        _expect("table", self.table, torch.float32, 16)
        parts = [self.data, self.absmax, self.table]
        if self.nested is not None:
            n = self.nested
            if n.block_size < 1:
                raise ValueError(f"nested block size {n.block_size} is not positive")
            _expect("nested absmax", n.absmax, torch.float32, -(-blocks // n.block_size))
            _expect("nested table", n.table, torch.float32, 256)
            _expect("nested offset", n.offset, torch.float32, 1)
            parts += [n.absmax, n.table, n.offset]
        devices = {part.device for part in parts}
        if len(devices) > 1 or "meta" in {device.type for device in devices}:
            raise ValueError(f"the parts of an NF4 weight lie on {', '.join(sorted(map(str, devices)))}")

    @property
    def device(self) -> torch.device:
        """The device of all parts."""
        return self.data.device

    @property
    def stored_bytes(self) -> int:
        """Bytes of data, scales and tables."""
        n = self.nested
        parts = [self.data, self.absmax, self.table, *((n.absmax, n.table, n.offset) if n is not None else ())]
        return sum(part.numel() * part.element_size() for part in parts)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The (O, I) matrix in ``dtype``, in new memory."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Tensor) -> None:
        """The matrix into ``out`` (O, I), contiguous, on the same device, in ``out``'s dtype: one kernel on a GPU.

        Raises:
            ValueError: ``out`` is of another shape, strided, not floating, or on another device.
        """
        if out.shape != self.shape or not out.is_contiguous() or out.device != self.device:
            raise ValueError(
                f"an NF4 weight {tuple(self.shape)} on {self.device} cannot be written into {tuple(out.shape)} with "
                f"strides {out.stride()} on {out.device}"
            )
        if not out.is_floating_point():
            raise ValueError(f"an NF4 weight cannot be written into {out.dtype}")
        if choose_backend(self.device).is_triton:
            nf4_into_triton(self, out)
        else:
            nf4_into_reference(self, out)


def _expect(name: str, part: Tensor, dtype: torch.dtype, elements: int) -> None:
    if part.dtype != dtype or part.numel() != elements or not part.is_contiguous():
        raise ValueError(
            f"NF4 {name} must be {elements} contiguous {str(dtype).removeprefix('torch.')}, "
            f"got {tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
        )


def nf4_into_triton(weight: NF4Weight, out: Tensor) -> None:
    """``weight`` into ``out`` by the kernel: see :meth:`NF4Weight.dequantize_into`. Also in Triton's interpreter."""
    n = weight.nested
    nested = None if n is None else (n.absmax, n.table, n.offset, n.block_size)
    dequantize_nf4_triton(weight.data, weight.absmax, weight.table, nested, out, weight.block_size)


def nf4_into_reference(weight: NF4Weight, out: Tensor) -> None:
    """``weight`` into ``out`` in plain torch, on any device: the same bits as the kernel's."""
    table = weight.table
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # both halves of each byte
    absmax, flat, size = block_scales(weight), out.view(-1), weight.block_size
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        byte = weight.data[start // 2 : (start + part.numel() + 1) // 2]
        values = torch.nn.functional.embedding(byte.int(), pairs).view(-1)[: part.numel()]
        scales = absmax[start // size : -(-(start + part.numel()) // size)]
        part.copy_(values.mul_(scales.repeat_interleave(size)[: part.numel()]))


def block_scales(weight: NF4Weight) -> Tensor:
    """absmax of every block in float32, (blocks,)."""
    n = weight.nested
    if n is None:
        return weight.absmax
    scales = n.absmax.repeat_interleave(n.block_size)[: weight.absmax.numel()]
    return n.table[weight.absmax.int()].mul_(scales).add_(n.offset)


def quantize_nf4(weight: Tensor, *, double_quant: bool = True, block_size: int = NF4_BLOCK_SIZE) -> NF4Weight:
    """``weight`` (O, I), floating, in NF4 on its own device, in plain torch.

    Each element takes the nearest table entry to ``w * (1 / absmax)``; an exact tie goes to the lower one. A block of
    zeros stays zeros.

    Raises:
        ValueError: ``weight`` is no floating matrix or holds NaN or infinity, or the block size is not one of NF4's.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"only a floating matrix can be quantized, not {tuple(weight.shape)} {weight.dtype}")
    if block_size not in _BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is none of {_BLOCK_SIZES}")
    flat = weight.detach().reshape(-1)
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=weight.device)
    data = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(-(-flat.numel() // block_size), dtype=torch.float32, device=weight.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].float()
        indices, scales = _nearest(part, table, block_size)
        absmax[start // block_size :][: scales.numel()] = scales
        if indices.numel() % 2:
            indices = torch.cat([indices, indices.new_full((1,), NF4_TABLE.index(0.0))])
        data[start // 2 :][: indices.numel() // 2] = (indices[::2] << 4) | indices[1::2]
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError("a weight with NaN or infinity cannot be quantized")
    if not double_quant:
        return NF4Weight(data, absmax, table, weight.shape, block_size)
    offset = absmax.mean(dtype=torch.float64).float()  # the same on every device, whatever the order of its sums
    nested_table = dynamic_table(weight.device)
    codes, nested_absmax = _nearest(absmax - offset, nested_table, NF4_NESTED_BLOCK_SIZE)
    nested = NestedScales(nested_absmax, nested_table, offset)
    return NF4Weight(data, codes, table, weight.shape, block_size, nested)


def _nearest(values: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Indices (n,) uint8 of the entries of the sorted ``table`` nearest to each value over its block's largest
    magnitude, and those magnitudes (ceil(n / block_size),). ``values``: (n,) float32, the last block may be short.
    """
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(dim=1)
    scaled = blocks * absmax.clamp(min=1e-38).reciprocal()[:, None]
    middles = (table[:-1] + table[1:]) / 2
    return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8).view(-1)[:count], absmax


def dynamic_table(device: torch.device) -> Tensor:
    """The 256 values of signed dynamic 8-bit numbers (Dettmers et al., 2022), sorted, float32.

    For each decade 10^-6 ... 10^0 there are 2^0 ... 2^6 values of either sign, the middles of equal parts of
    [0.1, 1]; zero and one complete them.
    """
    positive = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1, dtype=torch.float32)
        positive.append((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (exponent - 6))
    values = torch.cat(positive)
    table: Tensor = torch.cat([-values, values, torch.tensor([0.0, 1.0])]).sort().values
    return table.to(device)


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
