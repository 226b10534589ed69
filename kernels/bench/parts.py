"""Alternatives for parts of a step that are neither layers nor attention: the head with its loss in chunks of several
sizes, the norm of all gradients, the embedding's gradient, optimizers of adapters.

    python kernels/bench/parts.py
    python kernels/bench/parts.py --tiny        # on any machine: whether it runs

Shapes are those of Qwen3-4B trained whole at 2 x 4096 tokens, and of Llama-3.1-8B with adapters at 1 x 2048.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from ftkernels.adamw import AdamWSettings, adamw_step
from ftkernels.linear_cross_entropy import linear_cross_entropy
from timing import Clock
from torch import Tensor

#: Out and in of a layer's linears.
_QWEN3_4B = ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728))
_LLAMA_8B = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))

Group = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """How large it all is."""

    device: torch.device
    tiny: bool

    def of(self, number: int) -> int:
        """``number``, or little."""
        return max(number // 64, 1) if self.tiny else number


def head(sizes: Sizes, tokens: int, hidden: int, vocabulary: int, chunks: tuple[int, ...], *, trained: bool) -> Group:
    """Forward and backward of head and loss, a chunk of logits of so many rows at a time."""
    tokens, hidden, vocabulary = sizes.of(tokens), sizes.of(hidden), sizes.of(vocabulary)
    dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
    x = torch.randn(tokens, hidden, device=sizes.device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=sizes.device) * 0.02).to(dtype).requires_grad_(trained)
    labels = torch.randint(vocabulary, (tokens,), device=sizes.device)
    rows = torch.arange(tokens, device=sizes.device)

    def step(chunk: int) -> None:
        x.grad = weight.grad = None
        loss = linear_cross_entropy(x, weight, labels, num_items=tokens, chunk_rows=sizes.of(chunk), rows=rows)
        assert isinstance(loss, Tensor)
        loss.backward()

    return {f"{chunk} rows": partial(step, chunk) for chunk in chunks}


def _gradients(sizes: Sizes, layers: int) -> list[Tensor]:
    shapes = [(sizes.of(out), sizes.of(inner)) for out, inner in _QWEN3_4B] * layers
    return [torch.randn(shape, device=sizes.device) for shape in shapes]


def norm(sizes: Sizes) -> Group:
    """The norm of 3.6 billion numbers in float32, and what AdamW does with them."""
    layers = 2 if sizes.tiny else 36
    grads = _gradients(sizes, layers)
    first = grads[2]
    p, m, v = (torch.zeros_like(first) for _ in range(3))
    copy = torch.empty_like(first, dtype=torch.bfloat16)
    settings = AdamWSettings(1e-5, 0.9, 0.999, 1e-8, 0.0, 1)
    clip = torch.ones((), device=sizes.device)
    return {
        "torch, all": lambda: torch.nn.utils.get_total_norm(grads),
        "torch, gate and up alone": lambda: torch.nn.utils.get_total_norm([first]),
        "sum of squares of gate and up": lambda: torch.linalg.vecdot(first.view(-1), first.view(-1)),
        "AdamW, gate and up alone": lambda: adamw_step(p, first, m, v, settings, clip=clip, copy=copy),
    }


def embedding(sizes: Sizes) -> Group:
    """The embedding's gradient added to the head's: as autograd does, and row by row."""
    tokens, vocabulary, hidden = sizes.of(8192), sizes.of(151_936), sizes.of(2560)
    ids = torch.randint(vocabulary, (tokens,), device=sizes.device)
    given = torch.randn(tokens, hidden, device=sizes.device)
    total = torch.zeros(vocabulary, hidden, device=sizes.device)

    def dense() -> None:
        total.add_(torch.ops.aten.embedding_dense_backward(given, ids, vocabulary, -1, False))

    def added() -> None:
        torch.ops.aten.index_put_(total, [ids], given, accumulate=True)

    def scaled() -> None:
        total.mul_(1.0)

    return {"dense, then added": dense, "added by row": added, "a pass over it": scaled}


def adapters(sizes: Sizes) -> Group:
    """A step for 448 matrices of adapters of rank 16: clipping and AdamW by torch, in lists and in one kernel."""
    layers, rank = (2, 2) if sizes.tiny else (32, 16)
    shapes = [s for out, inner in _LLAMA_8B for s in ((rank, sizes.of(inner)), (sizes.of(out), rank))] * layers

    def made(**kwargs: bool) -> Callable[[], object]:
        weights = [torch.nn.Parameter(torch.randn(shape, device=sizes.device)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-5, **kwargs)
        return optimizer.step

    weights = [torch.nn.Parameter(torch.randn(shape, device=sizes.device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return {
        "AdamW in lists": made(foreach=True),
        "AdamW fused": made(fused=True),
        "clipping": lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0),
        "norm alone": lambda: torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None]),
    }


def groups(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Group]]]:
    """Every group by its name, made when its turn comes."""
    chunks = (1024, 1792, 2048, 4096, 8192)
    yield "head trained, Qwen3-4B", partial(head, sizes, 8192, 2560, 151_936, chunks, trained=True)
    yield "head frozen, Llama-3.1-8B", partial(head, sizes, 2048, 4096, 128_256, (512, 1024, 2048), trained=False)
    yield "norm of gradients", partial(norm, sizes)
    yield "gradient of a tied embedding", partial(embedding, sizes)
    yield "optimizer of adapters", partial(adapters, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, given.rounds)
    for name, make in groups(Sizes(device, given.tiny)):
        for what, ms in clock.medians(make()).items():
            print(f"{ms:9.3f} ms  {name}: {what}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
