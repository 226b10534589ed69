"""Times the attention kernels one by one at the shapes of Gemma-2-9B and Llama-3.1-8B, beside torch's attention.

    python kernels/bench/attention.py [--models gemma2-9b llama3.1-8b] [--flex] [--seq 4096]
    TRITON_INTERPRET=1 python kernels/bench/attention.py --device cpu          # does it run at all

A row a kernel: median milliseconds, TFLOP/s over the visible pairs (query, key), and the tile. torch's are SDPA with
its cuDNN and flash backends, forward and backward, and with --flex FlexAttention (compiles for a minute).
Tiles are swept by `tune.py --only attention`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from common import Table, parser
from ftkernels.attention_config import AttentionSettings, AttentionTile, AttentionTiles, choose_tiles, padded_size
from ftkernels.attention_kernels import attention_backward, attention_forward, key_backward, query_backward
from ftkernels.attention_mask import AttentionMask, TokenRanges
from ftkernels.device import gpu_of
from timing import SHAPES, SMALL_SHAPES, Shape, require_interpreter, shape_of, start
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

KERNELS = ("fwd", "dq", "dk", "dv", "dkv")
#: Products a kernel makes: the scores, dP, and one an output.
PRODUCTS = {"fwd": 2, "dq": 3, "dk": 3, "dv": 2, "dkv": 4}
#: Caps of the scores inside attention.
SOFTCAPS = {"gemma2-9b": 50.0}
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Launch = Callable[[AttentionTile], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Attention:
    """Tensors of one model's attention as projections leave them: (B, S, H, D) seen as (B, H, S, D)."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    settings: AttentionSettings

    @classmethod
    def random(cls, shape: Shape, device: torch.device) -> Attention:
        """bfloat16 tensors of the shape."""
        heads = (shape.q_heads, shape.k_heads, shape.k_heads, shape.q_heads)
        q, k, v, d_out = (
            torch.randn((shape.batch, shape.seq_len, h, shape.head_dim), device=device, dtype=torch.bfloat16)
            .transpose(1, 2) for h in heads
        )  # fmt: skip
        cap, group = SOFTCAPS.get(shape.name, 0.0), shape.q_heads // shape.k_heads
        settings = AttentionSettings(shape.head_dim**-0.5, cap, shape.head_dim, group, torch.bfloat16)
        return cls(shape, q, k, v, d_out, settings)

    @property
    def tiles(self) -> AttentionTiles:
        """The table's tiles for this device and head size."""
        return choose_tiles(gpu_of(self.q.device), self.q.dtype, padded_size(self.shape.head_dim))

    def ranges(self, window: int | None) -> TokenRanges:
        """Causal, with a window where one is given."""
        length = self.shape.seq_len
        return AttentionMask.causal_mask(window).ranges(length, length, self.q.device)

    def kernels(self, ranges: TokenRanges) -> dict[str, Launch]:
        """Kernel name -> function of a tile that launches it and returns what it computes."""
        out, lse = attention_forward(self.q, self.k, self.v, ranges, self.settings, self.tiles.forward)
        saved = (self.q, self.k, self.v, out, lse)
        _, delta = query_backward(saved, self.d_out, ranges, self.settings, self.tiles.d_query)

        def keys(*, dk: bool, dv: bool) -> Launch:
            return lambda t: key_backward(saved, self.d_out, delta, ranges, self.settings, t, want_dk=dk, want_dv=dv)

        return {
            "fwd": lambda t: attention_forward(self.q, self.k, self.v, ranges, self.settings, t)[:1],
            "dq": lambda t: query_backward(saved, self.d_out, ranges, self.settings, t)[:1],
            "dk": keys(dk=True, dv=False),
            "dv": keys(dk=False, dv=True),
            "dkv": keys(dk=True, dv=True),
        }

    def stored(self, ranges: TokenRanges) -> Callable[[], Any]:
        """The whole backward as the table's tiles make it."""
        out, lse = attention_forward(self.q, self.k, self.v, ranges, self.settings, self.tiles.forward)
        saved = (self.q, self.k, self.v, out, lse)
        return lambda: attention_backward(saved, self.d_out, ranges, self.settings, self.tiles, (True, True, True))

    def flops(self, kernel: str, ranges: TokenRanges) -> float:
        """Operations of the visible pairs only."""
        pairs = float((ranges.key_hi - ranges.key_lo).clamp(min=0).sum()) * self.shape.batch / ranges.batch
        return 2.0 * PRODUCTS[kernel] * pairs * self.shape.q_heads * self.shape.head_dim


def tile_of(tiles: AttentionTiles, kernel: str) -> AttentionTile | None:
    """The table's tile of a kernel."""
    named = {"fwd": tiles.forward, "dq": tiles.d_query, "dk": tiles.d_key, "dv": tiles.d_value}
    return named.get(kernel, tiles.d_key_value)


def show(tile: AttentionTile) -> str:
    """A tile in one word."""
    return f"{tile.queries}x{tile.keys},{tile.warps},{tile.stages}{',tma' if tile.tma else ''}"


def median_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Median over many launches between CUDA events, with a cold L2; one run by the clock without a GPU."""
    if device.type == "cuda":
        return float(do_bench(function, warmup=10, rep=60, return_mode="median"))
    begun = time.perf_counter()
    function()
    return (time.perf_counter() - begun) * 1e3


def measure(attention: Attention, windows: list[int | None], table: Table) -> None:
    """A row for every kernel and window with the table's tile."""
    for window in windows:
        ranges = attention.ranges(window)
        launch = attention.kernels(ranges)
        for kernel in KERNELS:
            tile = tile_of(attention.tiles, kernel)
            if tile is None:
                continue
            ms = median_ms(lambda run=launch[kernel], tile=tile: run(tile), attention.q.device)
            table.add(
                model=attention.shape.name, mask="causal" if window is None else f"window {window}",
                kernel=kernel, ms=ms, tile=show(tile), **{"TFLOP/s": attention.flops(kernel, ranges) / ms / 1e9},
            )  # fmt: skip
        stored = attention.tiles.stored
        if stored is not None:
            ms = median_ms(attention.stored(ranges), attention.q.device)
            rate = 2.5 * attention.flops("dv", ranges) / ms / 1e9  # five products, not two
            table.add(
                model=attention.shape.name, mask="causal" if window is None else f"window {window}",
                kernel="dq, dk, dv, stored", ms=ms, tile=show(stored.weights), **{"TFLOP/s": rate},
            )  # fmt: skip


def measure_torch(attention: Attention, table: Table, *, flex: bool) -> None:
    """torch's own attention under a causal mask: SDPA without softcap, FlexAttention with it."""
    ranges, scale = attention.ranges(None), attention.settings.scale
    both = sum(attention.flops(kernel, ranges) for kernel in ("fwd", "dq", "dkv"))
    functions: dict[str, Callable[..., Tensor]] = {}
    for name, backend in SDPA.items():

        def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            if backend == SDPBackend.EFFICIENT_ATTENTION:  # which takes no heads that share keys
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            with sdpa_kernel([backend]):
                same = q.shape[1] == k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=not same)

        functions[f"sdpa {name}, no softcap"] = sdpa
    if flex:
        functions["flex"] = flex_function(attention)
    for name, function in functions.items():
        leaves = [x.detach().requires_grad_() for x in (attention.q, attention.k, attention.v)]
        row = {"model": attention.shape.name, "mask": "causal"}
        try:
            out = function(*leaves)
            ahead = median_ms(lambda f=function, x=leaves: f(*x), out.device)
            back = median_ms(
                lambda out=out, x=leaves: torch.autograd.grad(out, x, attention.d_out, retain_graph=True), out.device
            )
        except RuntimeError as error:  # a backend that does not take this shape or GPU
            table.add(**row, kernel=name, tile=str(error).splitlines()[0][:60])
            continue
        table.add(**row, kernel=f"{name}, forward", ms=ahead)
        table.add(**row, kernel=f"{name}, backward", ms=back, **{"TFLOP/s": both / (ahead + back) / 1e9})


def flex_function(attention: Attention) -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled, with the softcap as a score function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cap, length = attention.settings.softcap, attention.shape.seq_len

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=attention.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"block_mask": blocks, "enable_gqa": True, "score_mod": capped if cap else None}
    return lambda q, k, v: compiled(q, k, v, scale=attention.settings.scale, **options)


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(SHAPES | SMALL_SHAPES), default=list(SHAPES))
    arguments.add_argument("--seq", type=int, default=4096)
    arguments.add_argument("--flex", action="store_true", help="FlexAttention too")
    options = arguments.parse_args()
    device = start(options)
    require_interpreter(device)
    on_gpu = device.type == "cuda"
    table = Table({"model": "", "mask": "", "kernel": "", "ms": ".3f", "TFLOP/s": ".0f", "tile": ""})
    for name in options.models:
        shape = shape_of(options, name)
        shape = replace(shape, seq_len=options.seq if on_gpu else 48)
        attention = Attention.random(shape, device)
        measure(attention, [None, 512, 4096] if on_gpu else [None, 16], table)
        if on_gpu:
            measure_torch(attention, table, flex=options.flex)
    table.save(options.json)


if __name__ == "__main__":
    main()
