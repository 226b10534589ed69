"""Loss, perplexity and token accuracy on held-out data: streamed, weighted by token, independent of batching."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ftcli.data.collate import PaddingCollator, packed_batch, unpadded_batch
from ftcli.data.order import best_fit
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.evaluate.batching import Sums, in_batches, summed_in_step, summed_over_ranks
from ftcli.evaluate.margins import Margins
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import compute_context, root_of
from ftcli.model.loss import loss_of
from ftcli.model.shards import reshard_model, try_forward
from ftcli.plain import FLATTENED, plain_fields
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup

#: How rows share a batch: padded on either side; several in one row of it, or all in a single row, with no attention
#: across.
BatchLayout = Literal["right", "left", "packed", "unpadded"]

#: exp of more than this overflows a double.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class LossResult:
    """``loss`` in nats per supervised token; ``perplexity`` exp(loss); ``token_accuracy`` top-1, in [0, 1].

    A method with a loss of its own has no perplexity and token accuracy; ``more`` holds what it measures by name, and
    ``margins`` the rows one by one.
    """

    loss: float
    perplexity: float | None
    token_accuracy: float | None
    tokens: int
    rows: int
    more: Mapping[str, float] | None = field(default=None, metadata=FLATTENED)
    margins: Margins | None = field(default=None, metadata=FLATTENED)

    @property
    def numbers(self) -> dict[str, float]:
        """All that is one number, by name."""
        found = plain_fields(replace(self, margins=None))
        return {name: value for name, value in found.items() if value is not None}


def combine(parts: Iterable[LossResult]) -> LossResult | None:
    """The result over several files from the results of each, weighted by tokens; None for no tokens."""
    found = [part for part in parts if part.tokens]
    tokens = sum(part.tokens for part in found)
    if not tokens:
        return None
    loss = sum(part.loss * part.tokens for part in found) / tokens
    accuracy = sum((part.token_accuracy or 0.0) * part.tokens for part in found) / tokens
    rows = sum(part.rows for part in found)
    return LossResult(loss, math.exp(min(loss, _LARGEST_EXPONENT)), accuracy, tokens, rows)


@torch.no_grad()
def evaluate_loss(
    model: PreTrainedModel | PeftModel,
    sequences: Sequence[TokenizedRow],
    *,
    pad_token_id: int,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    layout: BatchLayout = "right",
    pack_length: int | None = None,
    group: RankGroup | None = None,
) -> LossResult:
    """Evaluates ``sequences`` in batches of like length. No logits are kept, sums are double precision, and the result
    is the same to rounding whatever ``batch_size``, ``layout`` and the order of ``sequences``.

    Args:
        layout: "unpadded" where attention skips other documents; else "right" is the fastest where rows are of like
            length, "packed" where they are not.
        pack_length: Tokens that share a place in a batch. None: with "packed" those of the longest sequence, with
            "unpadded" each sequence has a place.
        group: Ranks that share the sequences, and all get the same result.

    Raises:
        FtcliError: FT761 (exit 5) when one row alone does not fit, FT762 (exit 6) when the loss is not finite. A batch
            that does not fit is halved, with the warning FT764, on all ranks where each has a part of the weights.
    """
    lengths = [len(tokens.input_ids) for tokens in sequences]
    groups = _groups(lengths, layout, pack_length)

    def step(chosen: Sequence[list[int]]) -> tuple[float, int, int]:
        batch = _batch([[sequences[i] for i in group] for group in chosen], layout, pad_token_id)
        with compute_context(device, plan.compute, plan.autocast):
            return _sums(model, {name: value.to(device) for name, value in batch.items()})

    def where(group: list[int]) -> Origin:
        return max((sequences[i] for i in group), key=lambda tokens: len(tokens.input_ids)).row.origin

    def run(mine: Sequence[list[int]]) -> Iterator[tuple[Sequence[list[int]], Sums]]:
        with reporter.progress(sum(len(places) for places in mine), "evaluating") as progress:
            for chosen, sums in in_batches(mine, batch_size, step, where=where, reporter=reporter, what="evaluation"):
                yield chosen, sums
                progress.advance(sum(len(places) for places in chosen))

    sums: Sums = (0.0, 0, 0)
    was_training = model.training
    model.eval()
    try:
        if group is not None and root_of(model) is not None:
            sums = summed_in_step(
                group,
                groups,
                batch_size,
                lambda chosen: try_forward(model, lambda: step(chosen)),
                where=where,
                reporter=reporter,
            )
        elif group is not None:
            sums = summed_over_ranks(group, groups, batch_size, run)
        else:
            for _, found in run(groups):
                sums = tuple(a + b for a, b in zip(sums, found, strict=True))
    finally:
        if was_training:
            model.train()
    reshard_model(model)
    return _result(sums[0], int(sums[1]), int(sums[2]), len(lengths))


def _groups(lengths: Sequence[int], layout: BatchLayout, pack_length: int | None) -> list[list[int]]:
    """Sequences that share a place in a batch, the longest rows first: memory runs out at once or not at all."""
    if layout != "packed" and (layout != "unpadded" or pack_length is None):
        return [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])]
    longest = max(lengths, default=1)
    packs = best_fit(lengths, max(pack_length or longest, longest))
    members = [packs.members(i) for i in range(len(packs))]
    return sorted(members, key=lambda group: -sum(lengths[i] for i in group))


def _batch(rows: Sequence[Sequence[TokenizedRow]], layout: BatchLayout, pad_token_id: int) -> dict[str, Tensor]:
    """The model's arguments, and ``labels``.

    Padding on the right needs no mask: under causal attention it changes nothing that is supervised, and attention
    stays dense, its fastest form.
    """
    if layout in ("packed", "unpadded"):
        documents = [tokens for row in rows for tokens in row]
        packed = layout == "packed"
        batch = packed_batch(rows, pad_token_id) if packed else unpadded_batch(documents, pad_token_id)
        return {name: value for name, value in batch.items() if name != "lengths"}
    padded = PaddingCollator(pad_token_id)([{"input_ids": r.input_ids, "labels": r.labels} for (r,) in rows])
    if layout == "right":
        return {name: padded[name] for name in ("input_ids", "labels")}
    return _to_the_left(padded)


def _to_the_left(padded: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each row turned so that its padding comes first. Nothing predicts a row's first token, which follows padding."""
    mask = padded["attention_mask"]
    lengths = mask.sum(1, keepdim=True)
    at = (torch.arange(mask.shape[1])[None] + lengths) % mask.shape[1]
    turned = {name: value.gather(1, at) for name, value in padded.items()}
    first = turned["attention_mask"].cumsum(1) <= 1
    return {**turned, "labels": turned["labels"].masked_fill(first, IGNORE_INDEX)}


def _sums(model: PreTrainedModel | PeftModel, batch: dict[str, Tensor]) -> tuple[float, int, int]:
    """Summed loss, right tokens and tokens of one batch."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found = loss_of(model, inputs, batch["labels"])
    correct = 0 if found.correct is None else int(found.correct)
    return float(found.loss), correct, int(found.count)


def require_finite(loss: float) -> float:
    """``loss``, which is a number. Raises FtcliError FT762 (exit 6) for what is none."""
    if not math.isfinite(loss):
        raise FtcliError.single(
            "FT762",
            f"the evaluation loss is {loss}",
            exit_code=ExitCode.DIVERGED,
            help="evaluate an earlier checkpoint (--checkpoint STEP), or train with a lower train.learning_rate",
        )
    return loss


def _result(total: float, correct: int, count: int, rows: int) -> LossResult:
    loss = require_finite(total / max(count, 1))
    return LossResult(
        loss=loss,
        perplexity=math.exp(min(loss, _LARGEST_EXPONENT)),
        token_accuracy=correct / max(count, 1),
        tokens=count,
        rows=rows,
    )
