"""Compile every kernel for a named GPU on a machine without one: registers, spills, shared memory, tensor-core use.

    python tests/ops/compile_offline.py --capability 90 --ranks 16 64

Nothing is run. It finds kernels that a GPU's compiler refuses or that spill, which the interpreter cannot see.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from ftkernels import (
    attention_kernels,
    bitlinear,
    causal_conv,
    cross_entropy,
    decode_attention,
    delta_gates,
    delta_rule_backward,
    delta_rule_forward,
    delta_step,
    fp8,
    gemm,
    glu,
    grouped,
    int8_product,
    latent_decode,
    latent_heads,
    nf4,
    output_gate,
    primitives,
    qkv_norm_rope,
    qkv_parts,
    rms_norm,
    rope,
    sampling,
    ternary,
    thin_products,
)
from ftkernels.attention_config import AttentionSettings, choose_tiles
from ftkernels.attention_mask import AttentionMask
from ftkernels.attention_stored import stored_backward
from ftkernels.limits import LARGEST_HEAD_SIZE, Gpu


class _NoGpu(DriverBase):
    """Says which GPU to compile for, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:  # type: ignore[override]
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing is timed here")


HIDDEN, INNER, VOCABULARY = 4096, 14336, 128256
#: Rows that one program holds, that take several blocks, and that are read twice.
WIDTHS = (("narrow", HIDDEN, 32768), ("wide", 2 * INNER, 32768), ("twice", 2 * INNER, 8192))
#: Bytes of shared memory that one program can have, by capability (CUDA programming guide, technical specifications).
SHARED_MEMORY = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


Launches = Iterator[tuple[str, Callable[[], object]]]


class Maker:
    """Empty tensors on the CPU: nothing runs, so nothing is read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, *shape: int, of: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=of or self.dtype)


def attention_cases(new: Maker, capability: int) -> Launches:
    """Launches of attention at the widest head, of Gemma-4's layers without a window; as :func:`cases`."""
    if capability < 80:
        return
    gpu, size = Gpu((capability // 10, capability % 10), SHARED_MEMORY[capability]), LARGEST_HEAD_SIZE
    tiles, settings = choose_tiles(gpu, new.dtype, size), AttentionSettings(1.0, 0.0, size, 4, new.dtype)
    q, k = new(1, 512, 8, size).transpose(1, 2), new(1, 512, 2, size).transpose(1, 2)
    lse, ranges = new(1, 8, 512, of=torch.float32), AttentionMask.causal_mask(None).ranges(512, 512, q.device)
    saved = q, k, k, q, lse
    yield "attention forward", partial(attention_kernels.attention_forward, q, k, k, ranges, settings, tiles.forward)
    if tiles.stored is not None:
        yield "attention stored", partial(stored_backward, saved, q, ranges, settings, tiles.stored)
        several = replace(tiles.stored, workspace=1)
        yield "attention stored in chunks", partial(stored_backward, saved, q, ranges, settings, several)
    backward = attention_kernels.query_backward
    yield "attention dq", partial(backward, saved, q, ranges, settings, tiles.d_query)
    keys = partial(attention_kernels.key_backward, saved, q, lse, ranges, settings)
    yield "attention dk", partial(keys, tiles.d_key, want_dk=True, want_dv=False)
    yield "attention dv", partial(keys, tiles.d_value, want_dk=False, want_dv=True)


def generation_cases(new: Maker, capability: int) -> Launches:
    """Launches of generation; as :func:`cases`."""
    if capability >= 80:
        for name, q_heads, k_heads, size, cap, sinks in (
            ("", 32, 8, 128, 0.0, None),
            (", widest heads", 8, 2, 512, 0.0, None),
            (", wide heads, capped", 16, 8, 256, 50.0, None),
            (", sinks", 64, 8, 64, 0.0, new(64)),
        ):
            pages = decode_attention.Pages(new(9, k_heads, 64, size), new(9, k_heads, 64, size))
            rows = new(8, q_heads, size), new(8, k_heads, size), new(8, k_heads, size), pages
            places = torch.zeros((8, 64), dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
            yield f"decode attention{name}", partial(decode_attention._launch, *rows, *places, 1.0, cap, 0, sinks, None)
            if sinks is None:
                lines = decode_attention.SharedPages(torch.zeros((8, 8), dtype=torch.int32), places[1])
                shared = partial(decode_attention._launch, *rows, *places, 1.0, cap, 0, sinks, lines)
                yield f"decode attention, shared pages{name}", shared
        for heads in (16, 20):
            rows = new(8, heads, 576), new(8, 576), new(9, 64, 576)
            places = torch.zeros((8, 64), dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
            yield f"decode latents, {heads} heads", partial(latent_decode._launch, *rows, *places, 512, 1.0)
    for name, uniform in (("greedy", None), ("sampled", new(8, of=torch.float32))):
        yield f"choose token, {name}", partial(sampling.choose_triton, new(8, VOCABULARY), 1.0, uniform)


def bitnet_cases(new: Maker, capability: int) -> Launches:
    """Launches of BitNet's linear layers; as :func:`cases`. Rows of two tokens and of many take different tiles."""
    for name, width, widest in WIDTHS:
        rows = new(512, width)
        yield f"rows to int8, {name}", partial(bitlinear.quantize_int8_triton, rows, widest=widest)
    weight = new(HIDDEN, of=torch.float32)
    yield "norm to int8", partial(bitlinear.norm_quantize_triton, new(512, HIDDEN), weight, 1e-5)
    if capability < 80:
        return
    values, scale = torch.zeros((INNER, HIDDEN), dtype=torch.int8), torch.ones(())
    yield "masters to int8", partial(ternary.ternarise_triton, new(INNER, HIDDEN, of=torch.float32))
    yield "int8 dequantized", partial(ternary.dequantize_int8_triton, values, scale, new.dtype)
    tiles = {"fewest": int8_product.FEWEST, "few": int8_product.FEW, "many": int8_product.MANY}
    if capability == 90:
        tiles["described"] = int8_product.MANY_DESCRIBED
    q, step = torch.zeros((512, HIDDEN), dtype=torch.int8), torch.ones(512)
    for name, tile in tiles.items():
        for end, bias in (("", None), (", bias", new(INNER, of=torch.float32))):
            operands = (q, step, values, scale, bias, new.dtype)
            yield f"int8 product, {name}{end}", partial(int8_product.int8_product, *operands, tile=tile)


def rotary_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of the rotation behind a QKV projection; as :func:`cases`."""
    shared, rows = SHARED_MEMORY[capability], 256
    for name, q_heads, k_heads, size in (
        ("", 32, 8, 128),
        (", heads of 192", 16, 8, 192),
        (", wide heads", 16, 8, 256),
    ):
        angles, width = new(1, rows, size), (q_heads + 2 * k_heads) * size
        rotary, b = qkv_parts.Rotary(angles, angles, q_heads, k_heads, size), new(width, rank)
        ahead = partial(qkv_norm_rope.qkv_rope_forward, new(rows, width))
        yield f"qkv rope forward{name}", partial(ahead, new(rows, 3 * rank), b, rotary)
        keys = new(1, k_heads, rows, size)
        tile = qkv_norm_rope.rope_backward_tile(shared, size, rank)
        grads = (new(1, q_heads, rows, size), keys, keys)
        back = partial(qkv_norm_rope.qkv_rope_backward, *grads, b, dtype=new.dtype, tile=tile)
        yield f"qkv rope backward{name}", partial(back, rotary=rotary)
        if not name:
            one = replace(rotary, joined=True)
            yield "qkv rope forward, joined", partial(ahead, new(rows, rank), b, one)
            yield "qkv rope backward, joined", partial(back, rotary=one)
    rows = 512
    for name, q_heads, k_heads, size in (("", 32, 8, 128), (", wide heads", 8, 4, 256)):
        angles, weight, width = new(1, rows, size), new(size, of=torch.float32), (q_heads + 2 * k_heads) * size
        rotary = qkv_parts.Rotary(angles, angles, q_heads, k_heads, size)
        norms, y = qkv_parts.HeadNorms(weight, weight, 1e-6, "llama"), new(rows, width)
        grads = (new(1, q_heads, rows, size), new(1, k_heads, rows, size), new(1, k_heads, rows, size))
        for lora in (False, True) if capability >= 80 else (False,):
            xa, low = (new(rows, 3 * rank), new(width, rank)) if lora else (None, None)
            tile = qkv_norm_rope.backward_tile(shared, size, rank if lora else 0)
            end = f"{', lora' if lora else ''}{name}"
            ahead, back = qkv_norm_rope.qkv_norm_rope_forward, qkv_norm_rope.qkv_norm_rope_backward
            yield f"qkv norm rope forward{end}", partial(ahead, y, xa, low, rotary, norms)
            operands = (grads, y, low, rotary, norms, new.dtype)
            yield f"qkv norm rope backward{end}", partial(back, *operands, want_dw=low is None, tile=tile)
            if lora and not name:
                one = replace(rotary, joined=True)
                yield "qkv norm rope forward, joined", partial(ahead, y, new(rows, rank), low, one, norms)
                operands = (grads, y, low, one, norms, new.dtype)
                yield "qkv norm rope backward, joined", partial(back, *operands, want_dw=False, tile=tile)


def option_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of the same epilogues under the options of single families; as :func:`cases`."""
    rows, shared = 512, SHARED_MEMORY[capability]
    for name, q_heads, k_heads, size, rotated, pairs, span, after in (
        ("pairs", 32, 8, 128, 128, True, None, False),
        ("pairs, part", 32, 2, 128, 64, True, None, False),
        ("part", 24, 8, 128, 96, False, None, False),
        ("part, odd", 32, 32, 80, 20, False, None, False),
        ("norm, width", 32, 32, 128, 128, False, "width", False),
        ("norm, width, trained", 32, 32, 128, 128, False, "width", False),
        ("norm, still", 40, 8, 128, 0, False, "head", False),
        ("norm, after", 32, 8, 128, 128, False, "head", True),
        ("norm, part, wide heads", 16, 4, 256, 64, False, "head", False),
    ):
        angles, width = new(1, rows, rotated) if rotated else None, (q_heads + 2 * k_heads) * size
        rotary = qkv_parts.Rotary(angles, angles, q_heads, k_heads, size, pairs)
        lora = capability >= 80 and "trained" not in name
        xa, b = (new(rows, 3 * rank), new(width, rank)) if lora else (None, None)
        grads = (new(1, q_heads, rows, size), new(1, k_heads, rows, size), new(1, k_heads, rows, size))
        ahead: Callable[[], object]
        back: Callable[[], object]
        if span is None:
            tile = qkv_norm_rope.rope_backward_tile(shared, size, rank)
            ahead = partial(qkv_norm_rope.qkv_rope_forward, new(rows, width), xa, b, rotary)
            back = partial(qkv_norm_rope.qkv_rope_backward, *grads, b, rotary, new.dtype, tile=tile)
        else:
            wide = span == "width"
            weights = (new(n * size if wide else size) for n in (q_heads, k_heads))
            norms = qkv_parts.HeadNorms(*weights, 1e-6, "plain", span, after)
            tile = qkv_norm_rope.backward_tile(shared, size, rank if lora else 0, width=wide)
            ahead = partial(qkv_norm_rope.qkv_norm_rope_forward, new(rows, width), xa, b, rotary, norms)
            operands = (grads, new(rows, width), b, rotary, norms, new.dtype)
            back = partial(qkv_norm_rope.qkv_norm_rope_backward, *operands, want_dw=not lora, tile=tile)
        yield f"qkv options forward: {name}", ahead
        yield f"qkv options backward: {name}", back


def thin_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of the adapters' gradients: of a group of three and of one projection; as :func:`cases`."""
    if capability < 80 or new.dtype == torch.float32:
        return
    rows, width = 512, 6144
    for name, outs in (("", (4096, 1024, 1024)), (", one", (width,))):
        thin = new(rows, len(outs) * rank)
        if thin.shape[1] > thin_products.MOST_COLUMNS:
            continue
        tile = thin_products.thin_tile(SHARED_MEMORY[capability], len(outs) * rank, new.dtype.itemsize)
        of_b = thin_products.OfB(new(rows, width), thin, outs)
        of_a = thin_products.OfA(new(rows, HIDDEN), thin, 2.0, new(HIDDEN), "llama")
        yield f"thin products{name}", partial(thin_products.thin_products, of_b, of_a, rank, tile=tile)


def glu_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of the gated unit; as :func:`cases`. Without products inside it below 8.0, where they are not used."""
    rows = 256
    gate, up = new(rows, 2 * INNER).chunk(2, 1)
    dh = new(rows, INNER)
    low = glu.GluLowRank(new(rows, 2 * rank), new(2 * INNER, rank), new(rank, INNER))
    for act in ("silu", "gelu_tanh"):
        yield f"glu forward {act}", partial(glu.glu_forward, gate, up, act)
        yield f"glu backward {act}", partial(glu.glu_backward, dh, gate, up, act, want_h=True)
        if capability < 80:
            continue
        ahead, back = (
            glu.lora_tile(name, SHARED_MEMORY[capability], rank, rank, new.dtype.itemsize)
            for name in ("glu_forward_lora", "glu_backward_lora")
        )
        joined = glu.GluLowRank(new(rows, rank), low.b, low.a_down)
        for name, given in (("lora", low), ("joined", joined))[: 2 if act == "silu" else 1]:
            yield f"glu forward {act}, {name}", partial(glu.glu_forward, gate, up, act, given, tile=ahead)
            more = {"lowrank": given, "dya": new(rows, rank), "want_h": True, "tile": back}
            yield f"glu backward {act}, {name}", partial(glu.glu_backward, dh, gate, up, act, **more)


def gate_cases(new: Maker) -> Launches:
    """Launches of attention's output gate, with the heads of Qwen3.5-9B and of gpt-oss; as :func:`cases`."""
    for name, heads, size in (("", 16, 256), (", small heads", 64, 64)):
        x, both = new(1, 256, heads, size), new(1, 256, heads, 2 * size)
        for end, gate in ((name, both[..., size:]), (f"{name}, a head", both[..., 0])):
            out = new(1, 256, heads, size)
            yield f"output gate forward{end}", partial(output_gate._launch, x, gate, x, out, out, backward=False)
            yield f"output gate backward{end}", partial(output_gate._launch, x, gate, x, out, out, backward=True)


def latent_cases(new: Maker) -> Launches:
    """Launches of latent attention's heads, GLM-4.7-Flash's and DeepSeek-V3's; as :func:`cases`."""
    for name, sizes, pairs in (
        ("", latent_heads.LatentSizes(20, 192, 64, 256), True),
        (", narrow values", latent_heads.LatentSizes(16, 128, 64, 128), False),
    ):
        heads, plain, rotated, value = sizes
        joined, angles = new(1, 256, 768 + rotated), [new(1, 256, rotated)] * 2
        given = new(1, 256, heads * sizes.head), new(1, 256, heads * (plain + value)), joined[..., 768:]
        ahead = partial(latent_heads._launch_forward, *given, *angles, sizes, pairs=pairs)
        yield f"latent heads forward{name}", ahead
        grads = [new(1, 256, heads, sizes.head).transpose(1, 2)] * 3
        back = partial(latent_heads._launch_backward, tuple(grads), *angles, sizes, new.dtype, pairs=pairs)
        yield f"latent heads backward{name}", back


def delta_cases(new: Maker, capability: int) -> Launches:
    """Launches of gated delta nets with Qwen3.5-9B's heads; as :func:`cases`."""
    wide, tokens = partial(new, of=torch.float32), 256
    x, weight, starts = new(1, tokens, 8192), new(8192, 4), torch.zeros((1, tokens), dtype=torch.int32)
    z, norm, heads, gates = new(1, tokens, 32, 128), new(128), new(1, tokens, 32), delta_gates.Gates
    float_heads = gates(wide(1, tokens, 32), wide(1, tokens, 32))
    yield "causal conv forward", partial(causal_conv.forward, x, weight, None, starts)
    yield "causal conv backward", partial(causal_conv.backward, x, weight, None, starts, x, want_dw=True)
    yield (
        "delta gates forward",
        partial(delta_gates.launch_gates, (heads, heads, wide(32), wide(32)), float_heads, None),
    )
    ends = (heads, heads, wide(32), wide(32)), float_heads, gates(heads, heads)
    yield "delta gates backward", partial(delta_gates.launch_gates, *ends)
    yield "gated norm forward", partial(delta_gates.launch_norm, z, z, None, norm, 1e-6, z, z, want_dw=False)
    yield "gated norm backward", partial(delta_gates.launch_norm, z, z, z, norm, 1e-6, z, z, want_dw=True)
    slots, row = torch.zeros(8, dtype=torch.int32), new(8, 32, 128)
    conv = (new(8, 8192), weight, None, wide(9, 8192, 3), slots)
    yield "delta step, convolution", partial(delta_step.conv_triton, *conv)
    step = (row[:, :16], row[:, 16:], row, wide(8, 32), wide(8, 32), wide(9, 32, 128, 128), slots)
    yield "delta step", partial(delta_step.delta_triton, *step, True, 1.0)
    if capability < 80:
        return
    q, k, v = new(1, tokens, 64, 128).split([16, 16, 32], 2)
    for name, document in (("", None), (", documents", starts)):
        inputs = delta_rule_forward.DeltaInputs(q, k, v, float_heads.g, heads, document, 1.0, True)
        tiles = delta_rule_forward.delta_tiles(128, new.dtype)
        yield f"delta rule chunks{name}", partial(delta_rule_forward.prepare, inputs, tiles)
        squares, rows = new(1, 32, 4, 64, 64), (wide(5, 32, 256), wide(2, 16, 256), wide(32, 4))
        chunks = delta_rule_forward.Chunks(squares, squares, *rows)
        states = new(1, 32, 4, 128, 128)
        if not name:
            ahead = partial(delta_rule_forward.scan, inputs, chunks, tiles=tiles)
            yield "delta rule scan", partial(ahead, keep=False)
            asked = delta_rule_forward.Ends(*(torch.zeros(size, dtype=torch.int32) for size in (3, 3, 5)))
            yield "delta rule scan, ends", partial(ahead, keep=False, ends=asked)
            yield "delta rule scan, kept", partial(ahead, keep=True)
            yield "delta rule scan back", partial(delta_rule_backward.scan_back, inputs, chunks, v, tiles)
        kept, scanned = delta_rule_backward.Kept(v, states), delta_rule_backward.ScannedBack(v, states)
        operands = (inputs, chunks, kept, v, scanned, tiles)
        yield f"delta rule gradients{name}", partial(delta_rule_backward.gradients, *operands)


def expert_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of experts with Qwen3-30B-A3B's sizes, by rows of a tile; as :func:`cases`."""
    if capability < 80 or new.dtype == torch.float32:
        return
    experts, hidden, width, pairs = 128, 2048, 768, 256
    edges, index = torch.zeros(experts + 1, dtype=torch.int32), torch.zeros(pairs, dtype=torch.int32)
    place, shared = torch.zeros((pairs // 8, 8), dtype=torch.int32), SHARED_MEMORY[capability]
    x, h, both, first = (
        new(pairs // 8, hidden),
        new(pairs, width),
        new(pairs, 2 * width),
        new(experts, 2 * width, hidden),
    )
    thin, weights = new(pairs, rank), new(pairs // 8, 8)
    for rows in (128, 64, 16):
        tiles = torch.zeros((pairs // rows + experts, 2), dtype=torch.int32)
        groups = grouped.Groups(edges, index, index, place, tiles, rows, shared)
        low = grouped.Low(thin, new(experts, rank, 2 * width))
        yield f"experts' unit, {rows}", partial(grouped.grouped_unit, x, first, groups, "silu", low=low)
        low = grouped.Low(thin, new(experts, rank, hidden))
        given = (h, new(experts, hidden, width), groups)
        yield f"experts' product, {rows}", partial(grouped.grouped_product, *given, low=low)
        given = (both, first, groups)
        yield f"experts' product back, {rows}", partial(grouped.grouped_product, *given, transposed=True, low=low)
        yield f"experts' thin, {rows}", partial(grouped.grouped_thin, x, low.wide, groups, rows=index)
        if rows == 128:
            yield "experts' outer", partial(grouped.grouped_outer, thin, x, groups, rows=index)
            for dtype in (torch.float32, new.dtype):
                weight = partial(grouped.grouped_weight, both, x, groups, right_rows=index, dtype=dtype)
                yield f"experts' weight, {dtype}", weight
            back = partial(grouped.unit_backward, h, both, weights, groups, "silu", want_h=True)
            yield "experts' unit back", back
            yield "experts' sum", partial(grouped.gathered_sum, new(pairs, hidden), groups, weights=weights)
            yield "experts' tiles", partial(grouped._tiles, edges, experts, pairs, rows)


def interleaved_expert_cases(new: Maker, rank: int, capability: int) -> Launches:
    """Launches of experts with gpt-oss-20b's sizes and form, by rows of a tile; as :func:`cases`."""
    if capability < 80 or new.dtype == torch.float32:
        return
    experts, hidden, pairs = 32, 2880, 256
    edges, index = torch.zeros(experts + 1, dtype=torch.int32), torch.zeros(pairs, dtype=torch.int32)
    place, shared = torch.zeros((pairs // 4, 4), dtype=torch.int32), SHARED_MEMORY[capability]
    x, h, both = new(pairs // 4, hidden), new(pairs, hidden), new(pairs, 2 * hidden)
    first, second = new(experts, hidden, 2 * hidden).transpose(1, 2), new(experts, hidden, hidden).transpose(1, 2)
    thin, weights = new(pairs, rank), new(pairs // 4, 4)
    for rows in (128, 64, 16):
        tiles = torch.zeros((pairs // rows + experts, 2), dtype=torch.int32)
        groups = grouped.Groups(edges, index, index, place, tiles, rows, shared)
        low, bias = grouped.Low(thin, new(experts, rank, 2 * hidden)), new(experts, 2 * hidden)
        unit = partial(grouped.grouped_unit, x, first, groups, "clamped", interleaved=True)
        yield f"experts' interleaved unit, {rows}", partial(unit, low=low, bias=bias)
        low, bias = grouped.Low(thin, new(experts, rank, hidden)), new(experts, hidden)
        down = partial(grouped.grouped_product, h, second, groups, low=low, bias=bias)
        yield f"experts' transposed product, {rows}", down
        up = partial(grouped.grouped_product, both, first, groups, transposed=True, low=low)
        yield f"experts' transposed product back, {rows}", up
    back = partial(grouped.unit_backward, h, both, weights, groups, "clamped", interleaved=True, want_h=True)
    yield "experts' interleaved unit back", back


def norm_cases(new: Maker) -> Launches:
    """Launches of norms and of rows in fp8; as :func:`cases`."""
    x, w, rstd = new(256, HIDDEN), new(HIDDEN), new(256, of=torch.float32)
    for form in ("llama", "gemma"):
        yield f"norm forward {form}", partial(rms_norm.norm_forward, x, w, 1e-5, form)
        yield f"norm backward {form}", partial(rms_norm.norm_backward, x, x, w, rstd, form, d_sum=x)
    ahead = partial(rms_norm.norm_forward, x, w, 1e-5, "llama")
    yield "norm forward, residual", partial(ahead, residual=x, where="before")
    yield "norm backward, dw", partial(rms_norm.norm_backward, x, x, w, rstd, "llama", want_dw=True)
    for name, width, widest in WIDTHS:
        yield f"quantize rows {name}", partial(fp8.quantize_fp8_triton, new(256, width), widest=widest)
    packed = new(256, HIDDEN, of=fp8.E4M3), rstd, new.dtype
    yield "dequantize rows", partial(fp8.dequantize_fp8_triton, *packed)
    yield "norm forward, quantized", partial(ahead, quantized=(new(256, HIDDEN, of=fp8.E4M3), rstd))
    yield "norm over heads", partial(rms_norm.norm_forward, new(1, 256, 32, 128), new(128), 1e-5, "llama")


def cases(rank: int, dtype: torch.dtype, capability: int) -> Launches:
    """(name, launch) of every kernel at the shapes of Llama-3.1-8B, and with Gemma-2's heads; few rows, since nothing
    runs.
    """
    new, rows, labels = Maker(dtype), 256, torch.zeros(4, dtype=torch.int64)
    options = cross_entropy.LossOptions
    for name, opts in (("plain", options()), ("softcap", options(30.0)), ("smooth", options(0.0, 1.0, 0.1))):
        chunk = (new(4, VOCABULARY), labels, opts)
        yield f"cross_entropy {name}", partial(cross_entropy.cross_entropy_rows, *chunk, want_grad=True)
    yield from norm_cases(new)
    q, k, cos = new(1, 32, rows, 128), new(1, 8, rows, 128), new(1, rows, 128)
    yield "rope", partial(rope._launch, q, k, cos, cos, transposed=False)
    yield from glu_cases(new, rank, capability)
    yield from gate_cases(new)
    yield from latent_cases(new)
    yield from delta_cases(new, capability)
    sums = (new(rows, HIDDEN), new(rows, rank), new(HIDDEN, rank), new(rows, HIDDEN))
    yield "lowrank add", partial(gemm.lowrank_add, *sums, triton_kernel=True)
    partial_sums = new(4, rows, 3 * rank, of=torch.float32)
    yield "row sums", partial(primitives.row_sums, partial_sums, partial_sums[0, :, 0], dtype, triton_kernel=True)
    yield "column sums", partial(primitives.column_sums, new(528, HIDDEN, of=torch.float32))
    yield from thin_cases(new, rank, capability)
    yield from expert_cases(new, rank, capability)
    yield from interleaved_expert_cases(new, rank, capability)
    yield from rotary_cases(new, rank, capability)
    yield from option_cases(new, rank, capability)
    yield from attention_cases(new, capability)
    yield from generation_cases(new, capability)
    yield from bitnet_cases(new, capability)
    weight = nf4.quantize_nf4(torch.ones(64, HIDDEN), double_quant=True)
    n = weight.nested
    assert n is not None
    nested = (n.absmax, n.table, n.offset, n.block_size)
    for name, absmax, scales in (("nested", weight.absmax, nested), ("plain", nf4.block_scales(weight), None)):
        operands = (weight.data, absmax, weight.table, scales, new(64, HIDDEN), weight.block_size)
        yield f"nf4 {name}", partial(nf4.dequantize_nf4_triton, *operands)


def compile_instead_of_launch(record: list[Any], reports: Path) -> Callable[..., Any]:
    """A ``JITFunction.run`` that compiles and keeps what came out, and what ptxas said of it in a file by its hash."""
    run = JITFunction.run

    def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        report = reports / f"{kernel.hash}.ptxas"
        if not report.exists():  # else it was compiled before, and nothing was said
            astray = unwritten(disassembled(kernel.asm["cubin"])) if "wgmma" in kernel.asm["ptx"] else []
            report.write_text(said.getvalue() + "".join(f"{_ASTRAY}{line}\n" for line in astray))
        record.append(kernel)
        return kernel

    return compiled


def disassembled(cubin: bytes) -> str:
    """A kernel's instructions, by the disassembler that Triton brings along."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten(sass: str) -> list[str]:
    """Additions that read the stack pointer as a number, or, before the first branch, what nothing has written.

    In some kernels ptxas 12.8 forgets what descriptors of shared memory are computed from: wgmma then reads anywhere,
    an illegal memory access at best. 12.9 does not. The delta rule's gradients with keys of 16 in float32 are such
    kernels, and with keys of 32 are not.
    """
    found: list[str] = []
    written, straight = {255}, True
    for line in sass.splitlines():
        text = re.sub(r"^@!?U?P\w+ ", "", line.partition("*/")[2].partition(";")[0].strip())
        operation, _, operands = text.partition(" ")
        target, _, sources = operands.partition(",")
        read = {int(number) for number in re.findall(r"\bR(\d+)\b", sources)}
        straight = straight and operation != "BRA"
        adds = operation.startswith(("IADD3", "VIADD")) and target != "R1"
        if adds and (1 in read or (straight and read - written)):
            found.append(text)
        if straight and (number := re.match(r"R(\d+)", target)):
            width = max((size for name, size in _WIDE.items() if name in operation), default=1)
            written.update(range(int(number[1]), int(number[1]) + width))
    return found


def resources(report: str) -> dict[str, int]:
    """Registers a thread, bytes of stack and of spills, from what ptxas reports; -1 for what is not in it."""
    found = {name: re.search(pattern, report) for name, pattern in _PATTERNS.items()}
    return {name: int(match.group(1)) if match else -1 for name, match in found.items()}


#: Registers that an operation writes, by a part of its name; of others, one.
_WIDE = {".64": 2, ".WIDE": 2, "CS2R": 2, ".128": 4, ".M88.4": 4, "HGMMA": 128}
_ASTRAY = "reads what nothing has written: "
_PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack",
    "spilled": r"(\d+) bytes spill stores",
}


def main() -> None:
    """Print one line a kernel; exit status 1 when one does not compile, needs more shared memory than there is, or
    reads what ptxas has left unwritten.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=list(SHARED_MEMORY))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="kernels whose names begin so; else all")
    parser.add_argument("--cache", type=Path, help="keeps what is compiled in this folder, by what it is made of")
    options = parser.parse_args()
    driver.set_active(_NoGpu(options.capability))
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.disable_line_info = True  # changes no figure and takes a tenth of the time
    record: list[Any] = []
    failed = 0
    own = tempfile.TemporaryDirectory()
    cache = options.cache or Path(own.name)  # not Triton's own, where nobody has kept what ptxas said
    cache.mkdir(parents=True, exist_ok=True)
    triton.knobs.cache.dir = str(cache)
    original = JITFunction.run
    JITFunction.run = compile_instead_of_launch(record, cache)  # type: ignore[method-assign]
    try:
        for rank in options.ranks:
            found = list(cases(rank, getattr(torch, options.dtype), options.capability))
            if unknown := [text for text in options.only if not any(name.startswith(text) for name, _ in found)]:
                parser.error(f"no such kernels: {unknown}")
            for name, launch in found:
                if options.only and not name.startswith(tuple(options.only)):
                    continue
                if "quantize" in name and options.capability < 89:
                    continue  # below 8.9 there is no e4m3
                record.clear()
                try:
                    launch()
                except (triton.CompilationError, RuntimeError) as error:
                    failed += 1
                    print(f"{name:32s} rank {rank:3d}  FAILED: {str(error).strip().splitlines()[-1]}")
                    continue
                for kernel in record:
                    ptx = kernel.asm["ptx"]
                    report = (cache / f"{kernel.hash}.ptxas").read_text()
                    used = resources(report)
                    dots = len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx))
                    figures = "  ".join(f"{key} {value}" for key, value in used.items())
                    shared = kernel.metadata.shared
                    warps = kernel.metadata.num_warps
                    too_much = shared > SHARED_MEMORY[options.capability]
                    failed += too_much
                    more = f"  FAILED: more than {SHARED_MEMORY[options.capability]}" if too_much else ""
                    if _ASTRAY in report:
                        failed += 1
                        more += f"  FAILED: {_ASTRAY}{report.partition(_ASTRAY)[2].splitlines()[0]}"
                    print(f"{name:32s} rank {rank:3d}  {figures}  shared {shared}  warps {warps}  mma {dots}{more}")
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        own.cleanup()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
