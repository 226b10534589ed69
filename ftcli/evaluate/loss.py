"""Loss, perplexity and token accuracy on held-out data: streamed, weighted by token, independent of batching."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftcli.data.collate import PaddingCollator
from ftcli.data.tokens import Tokens
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import compute_context, forward_loss
from ftcli.preflight.precision import DtypePlan
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LossResult:
    """``loss`` in nats per supervised token; ``perplexity`` exp(loss); ``token_accuracy`` top-1, in [0, 1]."""

    loss: float
    perplexity: float
    token_accuracy: float
    tokens: int
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """For eval.json."""
        return {name: getattr(self, name) for name in self.__slots__}


def combine(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The result over several files from the results of each, weighted by tokens; empty for no files."""
    found = [part for part in parts if part["tokens"]]
    tokens = sum(int(part["tokens"]) for part in found)
    if not tokens:
        return {}
    loss = sum(part["loss"] * part["tokens"] for part in found) / tokens
    accuracy = sum(part["token_accuracy"] * part["tokens"] for part in found) / tokens
    rows = sum(int(part["rows"]) for part in found)
    return LossResult(loss, math.exp(min(loss, 700.0)), accuracy, tokens, rows).as_dict()


@torch.no_grad()
def evaluate_loss(
    model: PreTrainedModel | PeftModel,
    sequences: Sequence[Tokens],
    *,
    pad_token_id: int,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
) -> LossResult:
    """Evaluates ``sequences`` in batches of like length; sums are kept in double precision.

    Out of memory halves the batch and goes on, and says so. Raises FtcliError FT761 (exit 5) when one row alone
    does not fit, FT762 (exit 6) when the loss is not finite.
    """
    order = sorted(sequences, key=lambda s: len(s.input_ids), reverse=True)
    collate = PaddingCollator(pad_token_id)
    total, correct, count, start = 0.0, 0, 0, 0
    was_training = model.training
    model.eval()
    with reporter.progress(len(order), "evaluating") as progress:
        while start < len(order):
            rows = order[start : start + batch_size]
            try:
                sums = _batch_sums(model, collate, rows, plan, device)
            except torch.OutOfMemoryError as error:
                batch_size = _halved(batch_size, rows, error, reporter)
                continue
            total += sums[0]
            correct += sums[1]
            count += sums[2]
            start += len(rows)
            progress.advance(len(rows))
    model.train(was_training)
    return _result(total, correct, count, len(order))


def _batch_sums(
    model: PreTrainedModel | PeftModel,
    collate: PaddingCollator,
    rows: Sequence[Tokens],
    plan: DtypePlan,
    device: torch.device,
) -> tuple[float, int, int]:
    batch = collate([{"input_ids": s.input_ids, "labels": s.labels} for s in rows])
    with compute_context(device, plan.compute, plan.autocast):
        result = forward_loss(model, {name: value.to(device) for name, value in batch.items()})
    correct = 0 if result.correct is None else int(result.correct)
    return float(result.loss), correct, int(result.count)


def _halved(batch_size: int, rows: Sequence[Tokens], error: torch.OutOfMemoryError, reporter: Reporter) -> int:
    torch.cuda.empty_cache()
    if len(rows) == 1:
        raise FtcliError.single(
            "FT761",
            f"one row of {len(rows[0].input_ids)} tokens does not fit into memory in evaluation",
            exit_code=ExitCode.OUT_OF_MEMORY,
            origin=rows[0].row.origin,
            help="lower data.max_seq_len",
        ) from error
    smaller = max(1, min(batch_size, len(rows)) // 2)
    reporter.warn(f"out of memory in evaluation at batch {len(rows)}: going on with {smaller}")
    return smaller


def _result(total: float, correct: int, count: int, rows: int) -> LossResult:
    loss = total / max(count, 1)
    if not math.isfinite(loss):
        raise FtcliError.single("FT762", f"the evaluation loss is {loss}", exit_code=ExitCode.DIVERGED)
    return LossResult(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        token_accuracy=correct / max(count, 1),
        tokens=count,
        rows=rows,
    )
