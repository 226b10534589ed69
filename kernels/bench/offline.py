"""Compile every kernel for a named GPU on a machine without one: registers, spills, shared memory, tensor-core use.

    python kernels/bench/offline.py --capability 90 --ranks 16 64

Nothing is run. It finds kernels that a GPU's compiler refuses or that spill, which the interpreter cannot see.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels import (
    bitlinear_kernels,
    cross_entropy,
    decode_attention,
    fp8_kernels,
    glu_kernels,
    int8_product,
    lowrank_add,
    nf4,
    nf4_kernels,
    norm_parts,
    qkv_norm_rope,
    qkv_parts,
    qkv_rope,
    rope,
    row_sums,
    sampling_kernels,
    ternary_kernels,
)


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


#: Bytes of shared memory that one program can have, by capability (CUDA programming guide, technical specifications).
SHARED_MEMORY = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def generation_cases(dtype: torch.dtype, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """As :func:`cases`, of what generation adds."""
    vocabulary, head = 128256, 128

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    if capability >= 80:
        for name, q_heads, k_heads, size, cap in (("", 32, 8, head, 0.0), (", wide heads, capped", 16, 8, 256, 50.0)):
            yield (
                f"decode attention{name}",
                lambda q_heads=q_heads, k_heads=k_heads, size=size, cap=cap: decode_attention._launch(
                    new(8, q_heads, size), new(8, k_heads, size), new(8, k_heads, size),
                    decode_attention.Pages(new(9, k_heads, 64, size), new(9, k_heads, 64, size)),
                    torch.zeros((8, 64), dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 1.0, cap, 0,
                ),
            )  # fmt: skip
    for name, uniform in (("greedy", None), ("sampled", new(8, of=torch.float32))):
        yield (
            f"choose token, {name}",
            lambda uniform=uniform: sampling_kernels.choose_triton(new(8, vocabulary), 1.0, uniform),
        )


def bitnet_cases(dtype: torch.dtype, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """As :func:`cases`, of BitNet's linear layers; rows of two tokens and of many take different tiles."""
    hidden, inner = 4096, 14336
    x, w = torch.empty((512, hidden), dtype=dtype), torch.empty(hidden, dtype=torch.float32)
    for name, width, widest in (("narrow", hidden, 32768), ("wide", 2 * inner, 32768), ("twice", 2 * inner, 8192)):
        yield (
            f"rows to int8, {name}",
            lambda width=width, widest=widest: bitlinear_kernels.quantize_int8_triton(
                torch.empty((512, width), dtype=dtype), widest=widest
            ),
        )
    yield "norm to int8", lambda: bitlinear_kernels.norm_quantize_triton(x, w, 1e-5)
    if capability < 80:
        return
    ternary, scale = torch.zeros((inner, hidden), dtype=torch.int8), torch.ones(())
    yield "masters to int8", lambda: ternary_kernels.ternarise_triton(torch.empty((inner, hidden)))
    yield "int8 dequantised", lambda: ternary_kernels.dequantize_int8_triton(ternary, scale, dtype)
    tiles = {"fewest": int8_product.FEWEST, "few": int8_product.FEW, "many": int8_product.MANY}
    if capability == 90:
        tiles["described"] = int8_product.MANY_DESCRIBED
    for name, tile in tiles.items():
        for bias in (None, torch.empty(inner)):
            q, step = torch.zeros((512, hidden), dtype=torch.int8), torch.ones(512)
            yield (
                f"int8 product, {name}{'' if bias is None else ', bias'}",
                lambda q=q, step=step, bias=bias, tile=tile: int8_product.int8_product(
                    q, step, ternary, scale, bias, dtype, tile=tile
                ),
            )


def head_norm_cases(rank: int, dtype: torch.dtype, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """As :func:`cases`, of heads that are normalised before they are rotated, with and without adapters."""
    rows = 512

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    for name, q_heads, k_heads, size in (("", 32, 8, 128), (", wide heads", 8, 4, 256)):
        angles, weight, width = new(1, rows, size), new(size, of=torch.float32), (q_heads + 2 * k_heads) * size
        rotary = qkv_parts.Rotary(angles, angles, q_heads, k_heads)
        norms = qkv_parts.HeadNorms(weight, weight, 1e-6, "llama")
        y, grads = new(rows, width), (new(1, q_heads, rows, size), *(new(1, k_heads, rows, size) for _ in range(2)))
        for lora in (False, True) if capability >= 80 else (False,):
            xa, b = (new(rows, 3 * rank), new(width, rank)) if lora else (None, None)
            tile = qkv_norm_rope.backward_tile(SHARED_MEMORY[capability], size, rank if lora else 0)
            suffix = f"{', lora' if lora else ''}{name}"
            yield (
                f"qkv norm rope forward{suffix}",
                lambda y=y, xa=xa, b=b, rotary=rotary, norms=norms: qkv_norm_rope.qkv_norm_rope_forward(
                    y, xa, b, rotary, norms
                ),
            )
            yield (
                f"qkv norm rope backward{suffix}",
                lambda grads=grads, y=y, b=b, rotary=rotary, norms=norms, tile=tile: (
                    qkv_norm_rope.qkv_norm_rope_backward(
                        grads, y, b, rotary, norms, dtype, want_dw=b is None, tile=tile
                    )
                ),
            )


def cases(rank: int, dtype: torch.dtype, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, launch) of every kernel at the shapes of Llama-3.1-8B, and with Gemma-2's heads; few rows, since nothing
    runs. Without products inside elementwise kernels below capability 8.0, where they are not used.
    """
    rows, hidden, inner, vocabulary, head = 256, 4096, 14336, 128256, 128

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of)

    x, w = new(rows, hidden), new(hidden)
    options = cross_entropy.LossOptions
    labels = torch.zeros(4, dtype=torch.int64)
    for name, opts in (("plain", options()), ("softcap", options(30.0)), ("smooth", options(0.0, 1.0, 0.1))):
        yield (
            f"cross_entropy {name}",
            lambda opts=opts: cross_entropy.cross_entropy_rows(new(4, vocabulary), labels, opts, want_grad=True),
        )
    for form in ("llama", "gemma"):
        yield f"norm forward {form}", lambda form=form: norm_parts.norm_forward(x, w, 1e-5, form)
        yield (
            f"norm backward {form}",
            lambda form=form: norm_parts.norm_backward(x, x, w, new(rows, of=torch.float32), form, d_sum=x),
        )
    yield "norm forward, residual", lambda: norm_parts.norm_forward(x, w, 1e-5, "llama", residual=x, where="before")
    yield (
        "norm backward, dw",
        lambda: norm_parts.norm_backward(x, x, w, new(rows, of=torch.float32), "llama", want_dw=True),
    )
    for name, width, widest in (("narrow", hidden, 32768), ("wide", 2 * inner, 32768), ("twice", 2 * inner, 8192)):
        yield (
            f"quantize rows {name}",
            lambda width=width, widest=widest: fp8_kernels.quantize_fp8_triton(new(rows, width), widest=widest),
        )
    values, scales = new(rows, hidden, of=fp8_kernels.E4M3), new(rows, of=torch.float32)
    yield "norm forward, quantized", lambda: norm_parts.norm_forward(x, w, 1e-5, "llama", quantized=(values, scales))
    heads = new(1, rows, 32, head)
    yield "norm over heads", lambda: norm_parts.norm_forward(heads, new(head), 1e-5, "llama")
    q, k, cos = new(1, 32, rows, head), new(1, 8, rows, head), new(1, rows, head)
    yield "rope", lambda: rope._launch(q, k, cos, cos, transposed=False)
    both = new(rows, 2 * inner)
    gate, up = both[:, :inner], both[:, inner:]
    for act in ("silu", "gelu_tanh"):
        yield f"glu forward {act}", lambda act=act: glu_kernels.glu_forward(gate, up, act)
        yield (
            f"glu backward {act}",
            lambda act=act: glu_kernels.glu_backward(new(rows, inner), gate, up, act, want_h=True),
        )
        if capability < 80:
            continue
        low = glu_kernels.GluLowRank(new(rows, 2 * rank), new(2 * inner, rank), new(rank, inner))
        ahead, back = (
            glu_kernels.lora_tile(name, SHARED_MEMORY[capability], rank, rank, dtype.itemsize)
            for name in ("glu_forward_lora", "glu_backward_lora")
        )
        yield (
            f"glu forward {act}, lora",
            lambda act=act, low=low, tile=ahead: glu_kernels.glu_forward(gate, up, act, low, tile=tile),
        )
        yield (
            f"glu backward {act}, lora",
            lambda act=act, low=low, tile=back: glu_kernels.glu_backward(
                new(rows, inner), gate, up, act, lowrank=low, dya=new(rows, rank), want_h=True, tile=tile
            ),
        )
    yield (
        "lowrank add",
        lambda: lowrank_add.lowrank_add(
            new(rows, hidden), new(rows, rank), new(hidden, rank), new(rows, hidden), triton_kernel=True
        ),
    )
    partial = new(4, rows, 3 * rank, of=torch.float32)
    yield "row sums", lambda: row_sums.row_sums(partial, partial[0, :, 0], dtype, triton_kernel=True)
    yield "column sums", lambda: row_sums.column_sums(new(528, hidden, of=torch.float32))
    for name, q_heads, k_heads, size in (
        ("", 32, 8, head),
        (", heads of 192", 16, 8, 192),
        (", wide heads", 16, 8, 256),
    ):
        angles = new(1, rows, size)
        rotary = qkv_parts.Rotary(angles, angles, q_heads, k_heads)
        width = (q_heads + 2 * k_heads) * size
        yield (
            f"qkv rope forward{name}",
            lambda rotary=rotary, width=width: qkv_rope.qkv_rope_forward(
                new(rows, width), new(rows, 3 * rank), new(width, rank), rotary
            ),
        )
        queries, keys = new(1, q_heads, rows, size), new(1, k_heads, rows, size)
        yield (
            f"qkv rope backward{name}",
            lambda rotary=rotary, width=width, queries=queries, keys=keys, size=size: qkv_rope.qkv_rope_backward(
                queries,
                keys,
                keys,
                new(width, rank),
                rotary,
                dtype,
                tile=qkv_rope.backward_tile(SHARED_MEMORY[capability], size, rank),
            ),
        )
    yield from head_norm_cases(rank, dtype, capability)
    yield from generation_cases(dtype, capability)
    yield from bitnet_cases(dtype, capability)
    weight = nf4.quantize_nf4(torch.ones(64, hidden), double_quant=True)
    n = weight.nested
    assert n is not None
    for name, absmax, nested in (
        ("nested", weight.absmax, (n.absmax, n.table, n.offset, n.block_size)),
        ("plain", nf4.block_scales(weight), None),
    ):
        yield (
            f"nf4 {name}",
            lambda absmax=absmax, nested=nested: nf4_kernels.dequantize_nf4_triton(
                weight.data, absmax, weight.table, nested, new(64, hidden), weight.block_size
            ),
        )


def compile_instead_of_launch(record: list[Any], reports: Path) -> Callable[..., Any]:
    """A ``JITFunction.run`` that compiles and keeps what came out, and what ptxas said of it in a file by its hash."""
    run = JITFunction.run

    def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        report = reports / f"{kernel.hash}.ptxas"
        if not report.exists():  # else it was compiled before, and nothing was said
            report.write_text(said.getvalue())
        record.append(kernel)
        return kernel

    return compiled


def resources(report: str) -> dict[str, int]:
    """Registers a thread, bytes of stack and of spills, from what ptxas reports; -1 for what is not in it."""
    found = {name: re.search(pattern, report) for name, pattern in _PATTERNS.items()}
    return {name: int(match.group(1)) if match else -1 for name, match in found.items()}


_PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack",
    "spilled": r"(\d+) bytes spill stores",
}


def main() -> None:
    """Print one line a kernel; exit status 1 when one does not compile or needs more shared memory than there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=list(SHARED_MEMORY))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="not these kernels, by their whole names")
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
            if unknown := set(options.skip) - {name for name, _ in found}:
                parser.error(f"no such kernels: {sorted(unknown)}")
            for name, launch in found:
                if name in options.skip or options.only not in name or ("quantize" in name and options.capability < 89):
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
                    used = resources((cache / f"{kernel.hash}.ptxas").read_text())
                    dots = len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx))
                    figures = "  ".join(f"{key} {value}" for key, value in used.items())
                    shared = kernel.metadata.shared
                    warps = kernel.metadata.num_warps
                    too_much = shared > SHARED_MEMORY[options.capability]
                    failed += too_much
                    more = f"  FAILED: more than {SHARED_MEMORY[options.capability]}" if too_much else ""
                    print(f"{name:32s} rank {rank:3d}  {figures}  shared {shared}  warps {warps}  mma {dots}{more}")
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        own.cleanup()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
