"""Times the gradient of a stack of experts, by tiles, beside torch's own grouped product.

    python kernels/bench/experts.py                     # Qwen3-30B-A3B's and OLMoE's stacks, 2 x 4096 tokens
    python kernels/bench/experts.py --skew              # half of all tokens to four experts
    TRITON_INTERPRET=1 python kernels/bench/experts.py --device cpu  # does it run at all

Rates are of the products that have to be computed. torch's contender gets its input gathered, and rounds its result to
bfloat16; ours reads the tokens where they are, and the float32 row writes twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import Table, parser
from ftkernels.grouped import Groups, WeightTile, group_rows, grouped_weight
from timing import Clock, Maker, require_interpreter, start
from torch import Tensor

#: Experts, used, hidden size, width.
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "olmoe": (64, 8, 2048, 1024)}
TILES = [
    WeightTile(128, 256, 64, 8, 3), WeightTile(128, 256, 64, 8, 4), WeightTile(128, 128, 64, 8, 4),
    WeightTile(128, 128, 64, 4, 3), WeightTile(256, 128, 64, 8, 3), WeightTile(128, 128, 128, 8, 2),
    WeightTile(128, 256, 32, 8, 4), WeightTile(64, 256, 64, 4, 3),
]  # fmt: skip


def routing(tokens: int, experts: int, used: int, device: torch.device, *, skew: bool) -> Tensor:
    """(tokens, used): even, or half of all to the first four experts."""
    scores = torch.rand(tokens, experts, device=device)
    if skew:
        scores[: tokens // 2, :4] += 1.0
    return scores.topk(used, dim=-1).indices


def torch_grouped(left: Tensor, right: Tensor, edges: Tensor) -> Any:
    """The gradient in bfloat16 by torch."""
    return torch._grouped_mm(left.t(), right, offs=edges)


def contenders(left: Tensor, x: Tensor, groups: Groups) -> dict[str, Callable[[], object]]:
    """Each tile with a result in either dtype, and torch."""
    found: dict[str, Callable[[], object]] = {}
    ours = partial(grouped_weight, left, x, groups, right_rows=groups.token)
    if left.device.type == "cpu":
        return {"the interpreter's tile": ours}
    for tile in TILES:
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{tuple(tile)} {dtype}"] = partial(ours, dtype=dtype, tile=tile)
    gathered, token, ends = x[groups.token.long()], groups.token.long(), groups.edges[1:]
    found["torch"] = lambda: torch_grouped(left, gathered, ends)
    found["torch and gathering"] = lambda: torch_grouped(left, x[token], ends)
    return found


def main() -> None:
    """Prints a row for each stack and contender."""
    made = parser(__doc__)
    made.add_argument("--skew", action="store_true", help="half of all tokens go to four experts")
    options = made.parse_args()
    device = start(options)
    require_interpreter(device)
    cpu, clock = device.type == "cpu", Clock(device, 20)
    make = Maker(device, torch.float32 if cpu else torch.bfloat16)
    table = Table({"stack": "", "contender": "", "ms": ".3f", "TFLOP/s": ".0f"})
    for name, shape in SHAPES.items():
        experts, used, hidden, width = (8, 2, 64, 32) if cpu else shape
        tokens = 40 if cpu else 8192
        groups = group_rows(routing(tokens, experts, used, device, skew=options.skew), experts, kernels=True)
        left, x = make.new(tokens * used, 2 * width), make.new(tokens, hidden)
        for label, ms in clock.medians(contenders(left, x, groups)).items():
            rate = 2e-9 * left.numel() * hidden / ms
            table.add(**{"stack": name, "contender": label, "ms": ms, "TFLOP/s": rate})
    table.save(options.json)


if __name__ == "__main__":
    main()
