"""GRPO's loss from hidden states to their gradient: time, memory beyond hidden states and head, and accuracy.

    python kernels/bench/log_probs.py                              # Llama-3.1-8B's head, 8 x 20,000 tokens, bfloat16
    python kernels/bench/log_probs.py --tiles 1024x16384 2048x8192 # other tiles of ours besides
    python kernels/bench/log_probs.py --device cpu --tiny          # does it run at all

The head is frozen, as under adapters. Contenders are timed one after the other, medians of a few rounds. Memory is
torch's peak of allocated bytes in one call beyond what was there before, the gradient of the hidden states included.
Accuracy is that of log-probabilities against float64, over rows that lie far apart. TRL and Liger are timed where they
are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.limits import LOG_PROB_COLUMNS, LOG_PROB_ROWS
from ftkernels.linear_log_prob import linear_log_prob, linear_log_prob_reference
from shapes import SHAPES
from timing import Clock

#: Rows that are compared with float64.
_COMPARED = 256


@dataclass(frozen=True)
class Batch:
    """Hidden states (B, T, H) with gradient, a frozen head (V, H), and what GRPO's loss needs besides."""

    hidden: torch.Tensor
    head: torch.Tensor
    tokens: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def random(cls, rows: int, length: int, hidden: int, vocabulary: int, device: torch.device) -> Batch:
        """Logits have the spread of a trained model's, about 3 nats."""
        torch.manual_seed(0)
        states = torch.randn(rows, length, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
        head = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) * (3.0 / hidden**0.5)
        tokens = torch.randint(0, vocabulary, (rows, length), device=device)
        with torch.no_grad():
            now, _ = linear_log_prob(states.view(-1, hidden), head, tokens.view(-1))
        old = now.view(rows, length) + 0.1 * torch.randn(rows, length, device=device)
        return cls(states, head, tokens, old, torch.randn(rows, device=device))

    def loss(self, log_probs: torch.Tensor) -> torch.Tensor:
        """GRPO's clipped loss, a mean over all tokens."""
        ratio = torch.exp(log_probs.view(self.old.shape) - self.old)
        gain = self.advantages[:, None]
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def ours(batch: Batch, tile: tuple[int, int]) -> torch.Tensor:
    """(B * T,) log-probabilities."""
    hidden = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    tokens = batch.tokens.reshape(-1)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return linear_log_prob(hidden, batch.head, tokens, rows=rows, tile=tile)[0]


def trls(batch: Batch) -> torch.Tensor:
    """(B * T,) log-probabilities by TRL's chunked head, with the entropy that its trainer asks for."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    hidden = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    tokens, width = batch.tokens.reshape(-1), min(_CHUNKED_LOGPROB_CHUNK_SIZE, batch.head.shape[0])
    found = _ChunkedLogProbFunction.apply(hidden, batch.head, None, tokens, 1.0, width, None, 1.0, ("entropy",))
    return found[0]


def contenders(batch: Batch, tiles: list[tuple[int, int]]) -> dict[str, Callable[[], torch.Tensor]]:
    """The loss of each, whose backward is still to come."""
    named: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: batch.loss(ours(batch, (LOG_PROB_ROWS, LOG_PROB_COLUMNS)))
    }
    for tile in tiles:
        named[f"ours, tile {tile[0]}x{tile[1]}"] = lambda tile=tile: batch.loss(ours(batch, tile))
    if importlib.util.find_spec("trl") is not None:
        named["TRL"] = lambda: batch.loss(trls(batch))
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        for compiled in (True, False):
            made = LigerFusedLinearGRPOLoss(
                beta=0.0, compiled=compiled, use_ref_model=False, loss_type="grpo", max_completion_length=None
            )
            mask = torch.ones_like(batch.tokens)
            named[f"Liger{', compiled' if compiled else ''}"] = lambda made=made, mask=mask: made(
                batch.hidden, batch.head, batch.tokens, mask, batch.advantages, old_per_token_logps=batch.old
            )[0]
    return named


def step(batch: Batch, loss: Callable[[], torch.Tensor]) -> None:
    """Loss and gradient."""
    batch.hidden.grad = None
    loss().backward()


def peak(batch: Batch, loss: Callable[[], torch.Tensor]) -> int:
    """Bytes beyond what is there between calls."""
    if batch.hidden.device.type != "cuda":
        return 0
    batch.hidden.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def accuracy(batch: Batch) -> dict[str, dict[str, float]]:
    """Mean and largest absolute error of log-probabilities, in nats."""
    hidden = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    tokens = batch.tokens.reshape(-1)
    rows = torch.linspace(0, tokens.shape[0] - 1, min(_COMPARED, tokens.shape[0]), device=tokens.device).long()
    exact, _ = linear_log_prob_reference(hidden[rows].double(), batch.head.double(), tokens[rows])
    small = Batch(hidden[rows][None], batch.head, tokens[rows][None], batch.old[:1], batch.advantages[:1])
    found = {"ours": ours(small, (LOG_PROB_ROWS, LOG_PROB_COLUMNS))}
    if importlib.util.find_spec("trl") is not None:
        found["TRL"] = trls(small)
    errors = {name: (value.double() - exact).abs() for name, value in found.items()}
    return {name: {"mean": float(e.mean()), "max": float(e.max())} for name, e in errors.items()}


def gradient(batch: Batch) -> torch.Tensor:
    """Some rows of the gradient that the last step left, (rows, H) float32."""
    assert batch.hidden.grad is not None
    return batch.hidden.grad.reshape(-1, batch.hidden.shape[-1])[::64].float().clone()


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=20_000)
    parser.add_argument("--tiles", nargs="*", default=[], metavar="ROWSxCOLUMNS")
    parser.add_argument("--against", nargs="*", default=["TRL", "Liger"], help="beginnings of contenders' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that everything runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, shape = torch.device(arguments.device), SHAPES[arguments.model]
    sizes = (3, 40, 64, 1000) if arguments.tiny else (arguments.rows, arguments.length, shape.hidden, shape.vocabulary)
    batch = Batch.random(*sizes, device)
    tiles = [tuple(int(part) for part in text.split("x")) for text in arguments.tiles]
    made = contenders(batch, tiles)  # type: ignore[arg-type]
    named = {name: loss for name, loss in made.items() if name.startswith(("ours", *arguments.against))}
    result: dict[str, Any] = {"accuracy": accuracy(batch), "gradient": {}, "peak_gib": {}, "ms": {}}
    print("log-probabilities against float64:", json.dumps(result["accuracy"]), flush=True)
    clock, reference = Clock(device, arguments.rounds), None
    for name, loss in named.items():
        if not _runs(batch, name, loss):
            continue
        sample = gradient(batch)
        reference = sample if reference is None else reference
        off = float((sample - reference).norm() / reference.norm())
        memory = peak(batch, loss) / 2**30
        ms = clock.medians({name: lambda loss=loss: step(batch, loss)})[name]
        result["gradient"][name], result["peak_gib"][name], result["ms"][name] = off, memory, ms
        print(f"{name:28s} {ms:9.1f} ms   {memory:6.2f} GiB   gradient {off:.1e} from ours", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _runs(batch: Batch, name: str, loss: Callable[[], torch.Tensor]) -> bool:
    """Whether a contender runs here at all; why not is printed."""
    try:
        step(batch, loss)
    except Exception as error:  # noqa: BLE001 - whatever another library raises, the others are measured
        print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        return False
    return True


if __name__ == "__main__":
    main()
