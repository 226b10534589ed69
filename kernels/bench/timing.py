"""Shapes that are timed, random tensors, timing by CUDA events, and the machine's own measured rates."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from common import require_device
from ftkernels.limits import Activation, NormForm
from torch import Tensor
from triton import knobs


@dataclass(frozen=True)
class Shape:
    """One decoder layer and its head, and how many tokens go through it."""

    name: str
    hidden: int
    inner: int
    q_heads: int
    k_heads: int
    head_dim: int
    vocabulary: int
    activation: Activation
    form: NormForm
    softcap: float
    layers: int
    batch: int = 2
    seq_len: int = 4096

    @property
    def tokens(self) -> int:
        """Rows of every matrix."""
        return self.batch * self.seq_len

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the layer's products as the kernels join them."""
        heads = (self.q_heads + 2 * self.k_heads) * self.head_dim
        return {
            "qkv": (heads, self.hidden),
            "o": (self.hidden, self.q_heads * self.head_dim),
            "gate and up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def tiny(self) -> Shape:
        """The same structure, small enough for a CPU."""
        small = {"hidden": 64, "inner": 96, "q_heads": 4, "k_heads": 2, "head_dim": 16, "vocabulary": 300}
        return replace(self, **small, layers=2, batch=1, seq_len=8)  # type: ignore[arg-type]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3.1-8b", 4096, 14336, 32, 8, 128, 128256, "silu", "llama", 0.0, 32),
        Shape("gemma2-9b", 3584, 14336, 16, 8, 256, 256000, "gelu_tanh", "gemma", 30.0, 42),
    )
}
#: Other models, whose kernels' tiles are timed too (``tune.py``).
SMALL_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 151936, "silu", "llama", 0.0, 24, 4, 2048),
        Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, "silu", "llama", 0.0, 28, 4, 2048),
        Shape("llama3.2-1b", 2048, 8192, 32, 8, 64, 128256, "silu", "llama", 0.0, 16, 4, 2048),
        Shape("gemma4-e4b", 2560, 10240, 8, 2, 512, 262144, "gelu_tanh", "plain", 30.0, 42),  # a layer without a window
        Shape("gemma4-31b", 5376, 21504, 32, 4, 512, 262144, "gelu_tanh", "plain", 30.0, 60),  # the same
        Shape("gemma3-4b", 2560, 10240, 8, 4, 256, 262208, "gelu_tanh", "gemma", 0.0, 34, 4, 2048),
    )
}


def shape_of(options: argparse.Namespace, name: str | None = None) -> Shape:
    """The shape of ``name`` (or --model), tiny on a CPU."""
    shape = (SHAPES | SMALL_SHAPES)[name or options.model]
    return shape.tiny() if options.device == "cpu" else shape


def start(options: argparse.Namespace) -> torch.device:
    """The device of --device, with torch's seed set; ends with a line where it is not there."""
    require_device(options.device)
    torch.manual_seed(0)
    return torch.device(options.device)


def require_interpreter(device: torch.device) -> None:
    """Ends with a line where a Triton kernel would have to run on a CPU without Triton's interpreter."""
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise SystemExit("Triton kernels run on a CPU in its interpreter alone: TRITON_INTERPRET=1 python ...")


class Maker:
    """Random tensors in the timed dtype on the timed device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def new(self, *shape: int, grad: bool = False, scale: float = 1.0) -> Tensor:
        """A normal tensor times ``scale``."""
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype).requires_grad_(grad)

    def adapter(self, out_features: int, in_features: int, rank: int) -> tuple[Tensor, Tensor]:
        """A and B in float32, as PEFT keeps them under autocast."""
        a = torch.randn(rank, in_features, device=self.device) / in_features**0.5
        b = torch.randn(out_features, rank, device=self.device) * 0.02
        return a.requires_grad_(), b.requires_grad_()


@dataclass(frozen=True)
class Roofline:
    """Measured rates of this machine: bytes a second of a large copy, operations a second of a large product."""

    copy_bytes: float
    matmul_flops: float


class Clock:
    """Median milliseconds of functions, timed in turn so that drift and clocks meet all of them alike."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds if device.type == "cuda" else 1
        self._flush = torch.empty(1 << 26, dtype=torch.int32, device=device) if device.type == "cuda" else None

    def medians(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median milliseconds of each function over the rounds; the first two calls of each are not counted."""
        for function in functions.values():
            function()
            function()
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.rounds):
            for name, function in functions.items():
                samples[name].append(self._once(function))
        return {name: statistics.median(values) for name, values in samples.items()}

    def _once(self, function: Callable[[], object]) -> float:
        if self._flush is None:
            begun = time.perf_counter()
            function()
            return (time.perf_counter() - begun) * 1e3
        self._flush.zero_()  # nothing is left in L2
        torch.cuda._sleep(4_000_000)  # the host gets ahead, so launches are not timed
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def roofline(self, dtype: torch.dtype) -> Roofline:
        """Copy bandwidth (read plus written bytes) and matmul rate, measured here and now."""
        elements, edge = (1 << 29, 8192) if self.device.type == "cuda" else (1 << 16, 64)
        source = torch.zeros(elements, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        a = torch.randn(edge, edge, device=self.device).to(dtype)
        out = torch.empty_like(a)
        times = self.medians({"copy": lambda: target.copy_(source), "mm": lambda: torch.mm(a, a, out=out)})
        return Roofline(2 * 2 * elements / (times["copy"] * 1e-3), 2 * edge**3 / (times["mm"] * 1e-3))


def peak_bytes(function: Callable[[], object]) -> int | None:
    """Bytes that torch's allocator held in a call beyond what it held before; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
