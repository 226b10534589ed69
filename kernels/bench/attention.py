"""Times the attention kernels one by one at the shapes of Gemma-2-9B and Llama-3.1-8B, beside torch's attention.

Prints a line a kernel: median milliseconds, TFLOP/s over the visible pairs (query, key) and the tile. With --tune it
sweeps tiles instead, checks each against the plain-torch reference, and prints the best of every kernel.

Usage: python kernels/bench/attention.py [--tune] [--cases gemma2 llama] [--kernels fwd dq dk dv dkv] [--flex]
                                         [--seq-len 4096] [--json FILE]
       TRITON_INTERPRET=1 python kernels/bench/attention.py --tiny [--tune]      (no GPU: does it run, not how fast)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ftkernels.attention import attention_reference
from ftkernels.attention_backward import key_backward, query_backward
from ftkernels.attention_config import AttentionTile, AttentionTiles, choose_tiles
from ftkernels.attention_forward import attention_forward
from ftkernels.attention_launch import AttentionSettings, padded_size
from ftkernels.attention_mask import AttentionMask, TokenRanges
from ftkernels.device import gpu_of
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench

KERNELS = ("fwd", "dq", "dk", "dv", "dkv")
# Products a kernel makes: the scores, dP, and one an output.
PRODUCTS = {"fwd": 2, "dq": 3, "dk": 3, "dv": 2, "dkv": 4}
# A tile that the compiler refuses, or that does not fit the GPU, is no candidate.
UNUSABLE = (OutOfResources, PTXASError, CompilationError, RuntimeError)


@dataclass(frozen=True)
class Case:
    """One model's attention: batch, tokens, heads, head size, softcap."""

    name: str
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    size: int
    softcap: float

    def settings(self, dtype: torch.dtype) -> AttentionSettings:
        """What the kernels compile in."""
        return AttentionSettings(self.size**-0.5, self.softcap, self.size, self.heads // self.kv_heads, dtype)


CASES = {
    "gemma2": Case("gemma2", 2, 4096, 16, 8, 256, 50.0),
    "llama": Case("llama", 2, 4096, 32, 8, 128, 0.0),
}

# queries, keys, warps, stages, TMA
CANDIDATES: dict[tuple[str, int], list[tuple[int, int, int, int, bool]]] = {
    ("fwd", 256): [
        (128, 64, 8, 2, True), (128, 64, 8, 2, False), (128, 32, 8, 3, True), (128, 32, 8, 4, True),
        (64, 64, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 8, 1, True),
    ],
    ("dq", 256): [
        (128, 32, 8, 3, False), (128, 32, 8, 3, True), (128, 32, 8, 2, True), (64, 64, 4, 2, True),
        (64, 64, 4, 2, False), (64, 64, 8, 2, True), (64, 32, 4, 3, True), (64, 32, 4, 4, True), (128, 64, 8, 1, True),
    ],
    ("dk", 256): [
        (64, 64, 4, 2, True), (64, 64, 4, 2, False), (32, 128, 8, 2, True), (32, 128, 8, 2, False),
        (64, 64, 8, 2, True), (64, 64, 8, 2, False), (32, 64, 4, 3, True), (32, 64, 4, 4, True), (32, 64, 4, 2, False),
        (64, 128, 8, 1, True),
    ],
    ("dv", 256): [
        (64, 128, 8, 2, True), (64, 128, 8, 2, False), (32, 128, 8, 3, True), (32, 128, 8, 4, True),
        (64, 64, 4, 2, True), (64, 64, 4, 3, True), (64, 128, 8, 1, True),
    ],
    ("dkv", 256): [(32, 64, 8, 2, True), (32, 64, 8, 3, True)],
    ("fwd", 128): [
        (128, 128, 8, 2, True), (128, 128, 8, 2, False), (128, 64, 8, 3, True), (128, 64, 8, 2, True),
        (128, 64, 4, 3, True), (64, 64, 4, 3, True), (64, 128, 4, 2, True), (128, 128, 8, 3, False),
    ],
    ("dq", 128): [
        (128, 64, 8, 2, True), (128, 64, 8, 3, True), (128, 64, 8, 2, False), (64, 64, 4, 3, True),
        (64, 64, 4, 2, True), (64, 128, 4, 2, True), (128, 128, 8, 1, True), (128, 32, 4, 3, True),
    ],
    ("dkv", 128): [
        (64, 128, 8, 2, True), (64, 128, 8, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 2, False),
        (32, 128, 8, 3, True), (64, 128, 8, 3, True), (32, 64, 4, 3, True), (32, 128, 4, 2, True),
    ],
    ("dk", 128): [(64, 128, 8, 2, True), (64, 128, 8, 3, True), (64, 64, 4, 2, True), (64, 64, 4, 3, True)],
    ("dv", 128): [(64, 128, 8, 2, True), (128, 128, 8, 2, True), (64, 64, 4, 3, True), (64, 128, 8, 3, True)],
}  # fmt: skip
TINY_CANDIDATES = [(16, 16, 4, 1, False), (32, 16, 4, 1, True)]


class Bench:
    """Tensors of one case, and its kernels as functions of a tile."""

    def __init__(self, case: Case, device: str) -> None:
        dtype = torch.bfloat16
        self.case, self.device, self.dtype = case, device, dtype
        torch.manual_seed(0)
        shapes = [(case.batch, case.seq_len, h, case.size) for h in (case.heads, case.kv_heads, case.kv_heads)]
        # As projections leave them: (B, S, H, D), seen as (B, H, S, D).
        self.q, self.k, self.v = (torch.randn(s, device=device, dtype=dtype).transpose(1, 2) for s in shapes)
        self.d_out = torch.randn(shapes[0], device=device, dtype=dtype).transpose(1, 2)
        self.settings = case.settings(dtype)
        self.tiles = choose_tiles(gpu_of(torch.device(device)), dtype, padded_size(case.size))

    def ranges(self, window: int | None) -> TokenRanges:
        """Causal, with a window where one is given."""
        return AttentionMask.causal_mask(window).ranges(self.case.seq_len, self.case.seq_len, self.device)

    def kernels(self, ranges: TokenRanges) -> dict[str, Callable[[AttentionTile], tuple[Tensor | None, ...]]]:
        """Kernel name -> function of a tile that launches it and returns what it computes."""
        out, lse = attention_forward(self.q, self.k, self.v, ranges, self.settings, self.tiles.forward)
        saved = (self.q, self.k, self.v, out, lse)
        _, delta = query_backward(saved, self.d_out, ranges, self.settings, self.tiles.d_query)

        def keys(*, dk: bool, dv: bool) -> Callable[[AttentionTile], tuple[Tensor | None, ...]]:
            return lambda t: key_backward(saved, self.d_out, delta, ranges, self.settings, t, want_dk=dk, want_dv=dv)

        return {
            "fwd": lambda t: attention_forward(self.q, self.k, self.v, ranges, self.settings, t)[:1],
            "dq": lambda t: query_backward(saved, self.d_out, ranges, self.settings, t)[:1],
            "dk": keys(dk=True, dv=False),
            "dv": keys(dk=False, dv=True),
            "dkv": keys(dk=True, dv=True),
        }

    def flops(self, kernel: str, ranges: TokenRanges) -> float:
        """Of the visible pairs only."""
        pairs = float((ranges.key_hi - ranges.key_lo).clamp(min=0).sum()) * self.case.batch / ranges.batch
        return 2.0 * PRODUCTS[kernel] * pairs * self.case.heads * self.case.size

    def exact(self, ranges: TokenRanges) -> dict[str, tuple[Tensor | None, ...]]:
        """Each kernel's results for the first key head of the first row, by the plain-torch reference in float32."""
        group = self.settings.group
        leaves = [x[:1, :h].detach().float().requires_grad_() for x, h in ((self.q, group), (self.k, 1), (self.v, 1))]
        out = attention_reference(*leaves, ranges, scale=self.settings.scale, softcap=self.settings.softcap)
        dq, dk, dv = torch.autograd.grad(out, leaves, self.d_out[:1, :group].float())
        return {"fwd": (out.detach(),), "dq": (dq,), "dk": (dk, None), "dv": (None, dv), "dkv": (dk, dv)}


def median_ms(function: Callable[[], Any], device: str) -> float:
    """Median over many launches between CUDA events, with a cold L2; one run by the clock without a GPU."""
    if device == "cuda":
        return float(do_bench(function, warmup=10, rep=60, return_mode="median"))
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def error(results: tuple[Tensor | None, ...], exact: tuple[Tensor | None, ...]) -> float:
    """Largest relative error over a kernel's results, for the heads that ``exact`` has."""
    worst = 0.0
    for value, truth in zip(results, exact, strict=True):
        if value is not None and truth is not None:
            part = value[: truth.shape[0], : truth.shape[1]].float()
            worst = max(worst, float((part - truth).norm() / truth.norm()))
    return worst


def tile_of(tiles: AttentionTiles, kernel: str) -> AttentionTile | None:
    """The table's tile of a kernel."""
    named = {"fwd": tiles.forward, "dq": tiles.d_query, "dk": tiles.d_key, "dv": tiles.d_value}
    return named.get(kernel, tiles.d_key_value)


def show(tile: AttentionTile) -> str:
    """A tile in one word."""
    return f"{tile.queries}x{tile.keys},{tile.warps},{tile.stages}{',tma' if tile.tma else ''}"


def measure(bench: Bench, kernels: list[str], windows: list[int | None]) -> dict[str, Any]:
    """Every kernel with the table's tile; prints and returns milliseconds and TFLOP/s."""
    found: dict[str, Any] = {}
    for window in windows:
        ranges = bench.ranges(window)
        launch = bench.kernels(ranges)
        label = "causal" if window is None else f"window {window}"
        for kernel in kernels:
            tile = tile_of(bench.tiles, kernel)
            if tile is None:
                continue
            ms = median_ms(lambda: launch[kernel](tile), bench.device)  # noqa: B023
            rate = bench.flops(kernel, ranges) / ms / 1e9
            found[f"{bench.case.name} {label} {kernel}"] = {"ms": ms, "tflops": rate, "tile": show(tile)}
            print(
                f"{bench.case.name:7} {label:12} {kernel:4} {ms:8.3f} ms {rate:6.0f} TFLOP/s  {show(tile)}", flush=True
            )
    return found


def tune(bench: Bench, kernels: list[str], *, tiny: bool) -> dict[str, Any]:
    """Every candidate tile under a causal mask, checked and timed; prints all, best first."""
    ranges = bench.ranges(None)
    launch, exact = bench.kernels(ranges), bench.exact(ranges)
    found: dict[str, Any] = {}
    for kernel in kernels:
        rows: list[tuple[float, AttentionTile, str]] = []
        for tile in candidates(kernel, bench.case.size, tiny=tiny):
            try:
                wrong = error(launch[kernel](tile), exact[kernel])
                ms = median_ms(lambda: launch[kernel](tile), bench.device)  # noqa: B023
            except UNUSABLE as reason:
                rows.append((float("inf"), tile, str(reason).splitlines()[0][:80]))
                continue
            # NaN compares false, so the test is for what is right.
            rows.append((ms, tile, f"error {wrong:.1e}") if wrong < 1e-2 else (float("inf"), tile, f"WRONG {wrong}"))
        rows.sort(key=lambda row: row[0])
        flops = bench.flops(kernel, ranges)
        for ms, tile, note in rows:
            print(
                f"{bench.case.name:7} {kernel:4} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s  {show(tile):18} {note}"
            )
        found[f"{bench.case.name} {kernel}"] = [{"ms": ms, "tile": show(tile), "note": note} for ms, tile, note in rows]
        print(f"{bench.case.name:7} {kernel:4} best {show(rows[0][1])}", flush=True)
    return found


def candidates(kernel: str, size: int, *, tiny: bool) -> list[AttentionTile]:
    """The tiles to try."""
    return [AttentionTile(*values) for values in (TINY_CANDIDATES if tiny else CANDIDATES[kernel, size])]


def compile_one(work: tuple[Case, str, AttentionTile]) -> None:
    """Compiles one kernel in a process of its own, on few tokens; the disk cache then serves the timing process."""
    case, kernel, tile = work
    bench = Bench(replace(case, seq_len=256), "cuda")
    try:
        bench.kernels(bench.ranges(None))[kernel](tile)
        torch.cuda.synchronize()
    except UNUSABLE as reason:
        print(f"{case.name} {kernel} {show(tile)}: {str(reason).splitlines()[0][:80]}", flush=True)


def compile_all(cases: list[Case], kernels: list[str], workers: int) -> None:
    """Compiling one after the other would take longer than measuring."""
    work = [(case, kernel, tile) for case in cases for kernel in kernels
            for tile in candidates(kernel, case.size, tiny=False)]  # fmt: skip
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, work))
    print(f"compiled {len(work)} candidates in {time.perf_counter() - start:.0f} s", flush=True)


def measure_torch(bench: Bench, *, flex: bool) -> dict[str, Any]:
    """torch's own attention under a causal mask, forward and backward: SDPA without softcap, FlexAttention with it."""
    case, functions = bench.case, {}
    functions["sdpa (no softcap)"] = lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=bench.settings.scale, enable_gqa=True
    )
    if flex:
        functions["flex"] = flex_function(case, bench.device)
    found: dict[str, Any] = {}
    for name, function in functions.items():
        leaves = [x.detach().requires_grad_() for x in (bench.q, bench.k, bench.v)]
        out = function(*leaves)
        times = {
            "forward_ms": median_ms(lambda: function(*leaves), bench.device),  # noqa: B023
            "backward_ms": median_ms(
                lambda: torch.autograd.grad(out, leaves, bench.d_out, retain_graph=True),  # noqa: B023
                bench.device,
            ),
        }
        found[f"{case.name} {name}"] = times
        print(f"{case.name:7} {name:18} forward {times['forward_ms']:.3f} ms, backward {times['backward_ms']:.3f} ms")
    return found


def flex_function(case: Case, device: str) -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled, with the softcap as a score function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return case.softcap * torch.tanh(score / case.softcap)

    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, case.seq_len, case.seq_len, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"block_mask": blocks, "enable_gqa": True, "score_mod": cap if case.softcap else None}
    return lambda q, k, v: compiled(q, k, v, scale=case.size**-0.5, **options)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--tune", action="store_true", help="sweep tiles")
    parser.add_argument("--flex", action="store_true", help="measure FlexAttention too (compiles for a minute)")
    parser.add_argument("--tiny", action="store_true", help="few tokens, on the CPU in Triton's interpreter")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile for --tune")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measures or tunes, and prints."""
    options = arguments()
    device = "cpu" if options.tiny else "cuda"
    cases = [replace(CASES[name], seq_len=options.seq_len) for name in options.cases]
    if options.tiny:
        cases = [replace(c, batch=1, seq_len=48, heads=2, kv_heads=1, size=16) for c in cases]
    elif options.tune:
        compile_all(cases, options.kernels, options.workers)
    results: dict[str, Any] = {}
    for case in cases:
        bench = Bench(case, device)
        if options.tune:
            results |= tune(bench, options.kernels, tiny=options.tiny)
            continue
        results |= measure(bench, options.kernels, [None, 16] if options.tiny else [None, 512, 4096])
        if not options.tiny:
            results |= measure_torch(bench, flex=options.flex)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
