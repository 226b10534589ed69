"""Time every operation forward and backward against plain torch, torch.compile and Liger where it is installed.

    python kernels/bench/ops.py                                    # both models, 2 x 4096 tokens
    python kernels/bench/ops.py --models llama3.1-8b --only lora --compile --json out.json
    python kernels/bench/ops.py --device cpu --tiny                # does it run at all

Medians of interleaved rounds by CUDA events. Percentages are of the copy bandwidth and matmul rate measured at the
start: the larger of (unavoidable bytes / copy rate) and (products / matmul rate), over the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Case, Maker, all_cases
from shapes import SHAPES
from timing import Clock, Roofline, measure_roofline


def time_case(case: Case, clock: Clock, roofline: Roofline, *, with_compile: bool) -> list[dict[str, Any]]:
    """One record for each contender and direction."""
    contenders = dict(case.contenders)
    if with_compile:
        contenders |= {f"{n}, compiled": torch.compile(contenders[n]) for n in case.compile_these}
    work = {
        "forward": (case.forward_bytes, case.forward_flops),
        "backward": (case.backward_bytes, case.backward_flops),
    }
    functions = {
        "forward": {name: _forward(f, case) for name, f in contenders.items()},
        "backward": {name: _backward(f, case) for name, f in contenders.items()},
    }
    records = []
    for direction, group in functions.items():
        moved, flops = work[direction]
        ideal = max(moved / roofline.copy_bytes, flops / roofline.matmul_flops) * 1e3
        for name, milliseconds in clock.medians(group).items():
            records.append(
                {
                    "op": case.name,
                    "direction": direction,
                    "contender": name,
                    "ms": milliseconds,
                    "percent_of_roofline": 100 * ideal / milliseconds,
                    "bytes": moved,
                    "flops": flops,
                }
            )
    return records


def _forward(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    return lambda: function(*case.leaves)


def _backward(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    out = function(*case.leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    incoming = [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, case.leaves, incoming, retain_graph=True)


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that everything runs")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the plain torch form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    clock = Clock(device, 2 if options.tiny else options.rounds)
    roofline = measure_roofline(clock, dtype, tiny=options.tiny)
    print(f"copy {roofline.copy_bytes / 1e12:.3f} TB/s, matmul {roofline.matmul_flops / 1e12:.1f} TFLOP/s")
    print(f"{'model':12s} {'op':22s} {'direction':9s} {'contender':20s} {'ms':>9s} {'% of roofline':>14s}")
    records = []
    for model in options.models:
        shape = SHAPES[model].tiny() if options.tiny else SHAPES[model]
        for case in all_cases(Maker(device, dtype), shape, options.rank):
            if options.only not in case.name:
                continue
            for record in time_case(case, clock, roofline, with_compile=options.compile):
                records.append({"model": model, **record})
                print(
                    f"{model:12s} {record['op']:22s} {record['direction']:9s} {record['contender']:20s} "
                    f"{record['ms']:9.3f} {record['percent_of_roofline']:14.1f}",
                    flush=True,
                )
    if options.json:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        document = {"machine": machine, "torch": torch.__version__, "roofline": roofline.__dict__, "records": records}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
