"""Products of a model's linear layers in bfloat16, fp8, NF4 and BitNet's int8, and what quantizing costs.

    python kernels/bench/products.py --model llama3.1-8b
    python kernels/bench/products.py --only bf16 --seconds 3
    TRITON_INTERPRET=1 python kernels/bench/products.py --device cpu          # does it run at all

``bf16``: TFLOP/s of the first five products after a second of rest, and after ``--seconds`` of nothing else, when the
power limit has lowered the clock; with the clock and the power that nvidia-smi reads meanwhile. ``fp8``: TFLOP/s with
row scales beside bfloat16, fast and exact sums, relative errors, and quantizing the operand that is no weight.
``nf4``: dequantizing alone, and between products as in a training step; by bitsandbytes too where it is installed.
``int8``: BitNet's product with its scales, quantizing the activations alone and behind a norm, and forward and backward
with float32 masters, beside ``F.linear`` and eager fake quantization. Times are milliseconds, bandwidth is over the
bytes that have to move.
"""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import Table, parser
from ftkernels.bitlinear import (
    bit_linear,
    bit_linear_reference,
    integer_product,
    norm_quantize_triton,
    quantize_int8,
    quantize_int8_triton,
)
from ftkernels.fp8 import multiply_rows, quantize_fp8
from ftkernels.int8_product import int8_product
from ftkernels.nf4 import quantize_nf4
from ftkernels.rms_norm import rms_norm
from ftkernels.ternary import ternarise
from timing import SHAPES, Clock, Shape, require_interpreter, shape_of, start
from torch import Tensor

_WARM_UP, _TIMED = 40, 80


def reading() -> str:
    """Clock and power, as nvidia-smi prints them; empty where there is no such command."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def rate(product: Callable[[], Tensor], flops: float, repeats: int, device: torch.device) -> float:
    """TFLOP/s of ``repeats`` products in a row."""
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        product()
    wait(device)
    return repeats * flops / (time.perf_counter() - began) / 1e12


def bf16(clock: Clock, shape: Shape, seconds: float) -> Table:
    """A row for 8192 cubed, then one for each linear of the model and direction."""
    edge = 8192 if clock.device.type == "cuda" else 64
    sizes = {"square": (edge, edge, edge)}
    for name, (out, inner) in shape.linears.items():
        sizes[f"{name}, forward"] = (shape.tokens, inner, out)
        sizes[f"{name}, backward"] = (shape.tokens, out, inner)
    table = Table({"bf16 product": "", "TFLOP/s at first": ".1f", "under load": ".1f", "clock, power": ""})
    for name, (rows, inner, out) in sizes.items():
        x = torch.randn((rows, inner), device=clock.device, dtype=torch.bfloat16)
        w = torch.randn((out, inner), device=clock.device, dtype=torch.bfloat16) * 0.02

        def product(x: Tensor = x, w: Tensor = w) -> Tensor:
            return x @ w.t()

        flops = 2.0 * rows * inner * out
        product()
        time.sleep(min(1.0, seconds))
        burst = rate(product, flops, 5, clock.device)
        rates, state, began = [], "", time.monotonic()
        while time.monotonic() - began < seconds or not rates:
            rates.append(rate(product, flops, 20, clock.device))
            if not state and time.monotonic() - began > 0.7 * seconds:
                state = reading()
        late = sorted(rates[len(rates) // 2 :])[len(rates) // 4]
        table.add(**{"bf16 product": name, "TFLOP/s at first": burst, "under load": late, "clock, power": state})
    return table


def relative(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    return float((value.float() - exact.float()).norm() / exact.float().norm())


def fp8(clock: Clock, shape: Shape) -> Table:
    """A row for each linear of the model and direction: (rows, inner) @ (inner, out)."""
    rates = {"bf16 TFLOP/s": ".0f", "fp8": ".0f", "exact sums": ".0f"}
    errors = {"error": ".1e", "of exact sums": ".1e", "with quantizing": ".1e"}
    table = Table({"fp8 product": "", **rates, **errors, "quantize ms": ".3f", "TB/s": ".2f"})
    directions = [(f"{n}, {d}", *(s if d == "forward" else s[::-1])) for n, s in shape.linears.items()
                  for d in ("forward", "backward")]  # fmt: skip
    rows = shape.tokens
    for name, out, inner in directions:
        x = torch.randn((rows, inner), device=clock.device, dtype=torch.bfloat16)
        w = torch.randn((out, inner), device=clock.device, dtype=torch.bfloat16) / inner**0.5
        qx, qw = quantize_fp8(x), quantize_fp8(w)
        scales = {"scale_a": qx.scale[:, None], "scale_b": qw.scale[None]}
        calls: dict[str, Callable[[], Tensor]] = {
            "bf16 TFLOP/s": lambda x=x, w=w: x @ w.t(),
            "fp8": lambda qx=qx, qw=qw: multiply_rows(qx, qw, torch.bfloat16),
            "exact sums": lambda qx=qx, qw=qw, s=scales: torch._scaled_mm(
                qx.data, qw.data.t(), out_dtype=torch.bfloat16, **s
            ),
        }  # fmt: skip
        ms = clock.medians({**calls, "quantize": lambda x=x: quantize_fp8(x)})
        reference = qx.dequantize(torch.bfloat16) @ qw.dequantize(torch.bfloat16).t()
        off = (relative(calls["fp8"](), reference), relative(calls["exact sums"](), reference),
               relative(calls["fp8"](), calls["bf16 TFLOP/s"]()))  # fmt: skip
        tera = {key: 2.0 * rows * inner * out / ms[key] / 1e9 for key in calls}
        moved = {"quantize ms": ms["quantize"], "TB/s": 3 * rows * inner / ms["quantize"] / 1e9}
        table.add(**{"fp8 product": name, **tera, **dict(zip(errors, off, strict=True)), **moved})
    return table


def between_products(call: Callable[[], object], product: Callable[[], object]) -> float:
    """Median milliseconds of ``call`` when each follows a ``product``."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_WARM_UP + _TIMED)
    ]
    for begin, end in events:
        product()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events[_WARM_UP:])
    return times[len(times) // 2]


def nf4(clock: Clock, shape: Shape) -> Table:
    """A row for each matrix and library."""
    columns = {"alone ms": ".4f", "TB/s": ".2f", "between products ms": ".4f", "TB/s there": ".2f"}
    table = Table({"nf4 matrix": "", "by": "", **columns})
    heads = {"q": shape.linears["o"][::-1], "k, v": (shape.k_heads * shape.head_dim, shape.hidden)}
    for name, size in {**heads, "gate, up": (shape.inner, shape.hidden), "down": shape.linears["down"]}.items():
        dense = torch.randn(size, device=clock.device, dtype=torch.bfloat16) * 0.02
        x = torch.randn((shape.tokens, size[1]), device=clock.device, dtype=torch.bfloat16)
        weight, out = quantize_nf4(dense), torch.empty_like(dense)
        calls: dict[str, Callable[[], object]] = {"ours": lambda w=weight, out=out: w.dequantize_into(out)}
        if importlib.util.find_spec("bitsandbytes") is not None:
            from bitsandbytes import functional

            data, state = functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
            calls["bitsandbytes"] = lambda d=data, s=state: functional.dequantize_4bit(d, s)
        moved = weight.stored_bytes + 2 * dense.numel()
        for kind, alone in clock.medians(calls).items():
            row = {"nf4 matrix": name, "by": kind, "alone ms": alone, "TB/s": moved / alone / 1e9}
            if clock.device.type == "cuda":
                loaded = between_products(calls[kind], lambda x=x, w=dense: x @ w.t())
                row |= {"between products ms": loaded, "TB/s there": moved / loaded / 1e9}
            table.add(**row)
    return table


def _trained(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, masters: Tensor, dy: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = layer(x, masters)
        return torch.autograd.grad(y, (x, masters), dy)

    return run


def int8(clock: Clock, shape: Shape) -> Table:
    """Rows for the layers of the 2B-4T model and of three more: each way's microseconds, forward over bfloat16."""
    tiny = clock.device.type == "cpu"
    sizes = ((64, 128),) if tiny else ((2560, 6912), (4096, 4096), (4096, 14336), (14336, 4096))
    require_interpreter(clock.device)
    rows, table = 32 if tiny else shape.tokens, None
    for inner, outer in sizes:
        x = torch.randn((rows, inner), device=clock.device, dtype=torch.bfloat16)
        masters = torch.randn((outer, inner), device=clock.device) / inner**0.5
        weight, norm = masters.to(torch.bfloat16), torch.ones(inner, device=clock.device, dtype=torch.bfloat16)
        ternary, (q, step) = ternarise(masters), quantize_int8_triton(x)
        dy = torch.randn((rows, outer), device=clock.device, dtype=torch.bfloat16)
        leaf, trainable = x.clone().requires_grad_(), masters.clone().requires_grad_()

        def product(q: Tensor = q, step: Tensor = step, t: object = ternary) -> Tensor:
            return int8_product(q, step, t.data, t.scale, None, torch.bfloat16)  # type: ignore[attr-defined]

        def ours(x: Tensor, masters: Tensor, t: object = ternary) -> Tensor:
            return bit_linear(quantize_int8(x), masters, t)  # type: ignore[arg-type]

        def fake(x: Tensor, masters: Tensor, t: object = ternary) -> Tensor:
            return bit_linear_reference(x, masters, None, t)  # type: ignore[arg-type]

        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x, w=weight: F.linear(x, w),
            "_int_mm": lambda q=q, t=ternary: torch._int_mm(q, t.data.t()),
            "int8": product,
            "quantize": lambda x=x: quantize_int8_triton(x),
            "norm": lambda x=x, n=norm: rms_norm(x, n, 1e-5),
            "norm and quantize": lambda x=x, n=norm: norm_quantize_triton(x, n, 1e-5),
            "forward": lambda x=x, p=product: p(*quantize_int8_triton(x)),
            "bf16, both": _trained(F.linear, leaf, trainable, dy),
            "int8, both": _trained(ours, leaf, trainable, dy),
            "eager fake, both": _trained(fake, leaf, trainable, dy),
        }
        us = {name: 1e3 * ms for name, ms in clock.medians(calls).items()}
        exact = integer_product(q[:256], ternary.data) * step[:256, None] * ternary.scale
        if not torch.equal(product()[:256], exact.to(torch.bfloat16)):
            raise SystemExit(f"the int8 product of {inner} -> {outer} is not that of plain torch")
        table = table or Table({"int8 layer, us": "", **dict.fromkeys(us, ".0f"), "forward x bf16": ".2f"})
        table.add(**{"int8 layer, us": f"{inner} -> {outer}", **us, "forward x bf16": us["bf16"] / us["forward"]})
    assert table is not None
    return table


def main() -> None:
    """A table for each kind of product; the JSON has the rows of all."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    arguments.add_argument("--only", nargs="+", default=["bf16", "fp8", "nf4", "int8"], metavar="KIND")
    arguments.add_argument("--seconds", type=float, default=1.5, help="of load for each product of bf16")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    clock, shape = Clock(start(options), options.rounds), shape_of(options)
    kinds: dict[str, Callable[[], Table]] = {
        "bf16": lambda: bf16(clock, shape, options.seconds if options.device == "cuda" else 0.0),
        "fp8": lambda: fp8(clock, shape),
        "nf4": lambda: nf4(clock, shape),
        "int8": lambda: int8(clock, shape),
    }
    if unknown := set(options.only) - set(kinds):
        arguments.error(f"no such kinds: {sorted(unknown)}")
    rows = [row for kind in options.only for row in kinds[kind]().rows]
    Table({}, rows).save(options.json)


if __name__ == "__main__":
    main()
