"""Times the divergence of two heads against the log-probability head: forward and backward, and the peak of memory.

    python kernels/bench/divergence.py
    python kernels/bench/divergence.py --device cpu                 # does it run at all

Hidden states and heads are random, of Llama-3.1-8B's shape in bfloat16, the student's head frozen: what distillation
with adapters does. ``ratio`` is the time over that of ``linear_log_prob`` on the same rows; ``GiB`` is memory beyond
hidden states and heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common import GIB, Table, parser, require_device


def main() -> None:
    """Measures both, and prints a table."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=8 * 4096)
    made.add_argument("--shape", type=int, nargs=2, default=(4096, 128256), help="hidden size, vocabulary")
    options = made.parse_args()
    require_device(options.device)
    import torch
    from ftkernels.linear_divergence import LinearHead, linear_divergence
    from ftkernels.linear_log_prob import linear_log_prob

    on_gpu = options.device == "cuda"
    rows, (size, vocabulary) = (options.rows, options.shape) if on_gpu else (64, (64, 1000))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    x, y = (torch.randn(rows, size, device=options.device, dtype=dtype) for _ in range(2))
    w, v = (torch.randn(vocabulary, size, device=options.device, dtype=dtype) / size**0.5 for _ in range(2))
    labels = torch.randint(0, vocabulary, (rows,), device=options.device)
    every = torch.arange(rows, device=options.device)
    weights = torch.full((rows,), 1.0 / rows, device=options.device)
    x.requires_grad_()

    def log_prob() -> None:
        linear_log_prob(x, w, labels, rows=every)[0].sum().backward()

    def divergence(beta: float) -> Callable[[], None]:
        def run() -> None:
            linear_divergence(LinearHead(x, w), LinearHead(y, v), weights, beta=beta).loss.backward()

        return run

    def measured(call: Callable[[], None]) -> tuple[float, float]:
        times = []
        for _ in range(4 if on_gpu else 1):
            x.grad = None
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if on_gpu else 0
            began = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
        return min(times[1:] or times), peak / GIB

    table = Table({"what": "", "ms": ".1f", "ratio": ".2f", "GiB": ".2f"})
    base, peak = measured(log_prob)
    table.add(what="log-probabilities", ms=base * 1e3, ratio=1.0, GiB=peak)
    for beta, name in ((1.0, "reverse KL"), (0.0, "forward KL"), (0.5, "Jensen-Shannon")):
        taken, peak = measured(divergence(beta))
        table.add(what=name, ms=taken * 1e3, ratio=taken / base, GiB=peak)


if __name__ == "__main__":
    main()
