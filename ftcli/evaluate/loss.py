"""Loss, perplexity and token accuracy on held-out data: streamed, weighted by token, independent of batching.

Each rank takes whole batches, and sums are all-gathered and added in one order. A batch that does not fit into memory
is halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ftcli.data.collate import packed_batch, padded_batch, unpadded_batch, with_images
from ftcli.data.order import best_fit
from ftcli.data.pixels import PixelReader
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.evaluate.margins import Margins
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import compute_context, root_of
from ftcli.model.loss import loss_of
from ftcli.model.shards import reshard_model, try_forward
from ftcli.plain import FLATTENED, plain_fields
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Reporter
from ftcli.run.process_group import RankGroup

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup


T = TypeVar("T")
R = TypeVar("R")


def in_batches(
    items: Sequence[T],
    batch_size: int,
    step: Callable[[Sequence[T]], R],
    *,
    where: Callable[[T], Origin | None],
    reporter: Reporter,
    what: str,
) -> Iterator[tuple[Sequence[T], R]]:
    """Runs ``step`` on ``batch_size`` items at a time, in order, and yields the items beside their result.

    Out of memory halves the batch for what is left, and says so (FT764, a warning). ``step`` must leave nothing behind
    when it fails: it is called again with the first half of its items.

    Args:
        where: The origin of one item, for the message when it alone does not fit.
        what: What is being done, for messages: "evaluation", "generation".

    Raises:
        FtcliError: FT761 (exit 5) when one item alone does not fit.
    """
    start = 0
    while start < len(items):
        chosen = items[start : start + batch_size]
        try:
            result = step(chosen)
        except torch.OutOfMemoryError as error:
            if len(chosen) == 1:
                raise row_too_large(what, where(chosen[0])) from error
            failed = True
        else:
            failed = False
        # Outside the except block: the exception holds the frames of the step, and with them its tensors.
        if failed:
            batch_size = len(chosen) // 2
            reporter.finding(halved(what, len(chosen), batch_size))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        start += len(chosen)
        yield chosen, result


def halved(what: str, before: int, after: int) -> Finding:
    """The warning that a batch was too large."""
    message = f"out of memory in {what} with {before} rows at a time: going on with {after}"
    help = f"eval.per_device_eval_batch_size: {after} avoids the attempt"
    return Finding("FT764", message, help=help, severity="warning")


def row_too_large(what: str, origin: Origin | None) -> FtcliError:
    """The error that even one row is too large."""
    message = f"one row alone does not fit into memory in {what}"
    help = "lower data.max_seq_len"
    return FtcliError.single("FT761", message, exit_code=ExitCode.OUT_OF_MEMORY, origin=origin, help=help)


#: Of a batch: numbers that are added up, such as summed loss, right tokens, tokens.
Sums = tuple[float, ...]


def summed(
    group: RankGroup | None,
    items: Sequence[T],
    batch_size: int,
    attempt: Callable[[Sequence[T]], Sums | None],
    *,
    sharded: bool,
    where: Callable[[T], Origin | None],
    reporter: Reporter,
    width: int = 3,
    rows_of: Callable[[T], int] = lambda item: 1,
) -> Sums:
    """The ``width`` sums over ``items``, of which each rank runs every ``group.size``-th batch.

    They are added in the order of the batches, as one process would, so that every bit is the same. A rank that is
    asked to stop leaves its batches; then no rank has a result.

    Args:
        attempt: The sums of a few items; None where memory ran out, which only ``sharded`` weights may give
            (:func:`in_step`).
        rows_of: Rows of an item, for the progress.

    Raises:
        StopRequested: On all ranks, when one of them was asked to stop.
    """
    batches, ranks = _batches(items, batch_size), 1 if group is None else group.size
    sums = torch.zeros(max(-(-len(batches) // ranks), 1), width, dtype=torch.float64)  # of this rank's batches
    if group is not None and sharded:
        turns = in_step(group, items, batch_size, attempt, where=where, reporter=reporter)
        with reporter.progress(len(items), "evaluating") as progress:
            for turn in turns:
                if turn.found is not None:
                    sums[turn.number // ranks] += torch.tensor(turn.found, dtype=torch.float64)
                progress.advance(turn.of_all)
        return _added_up(group, sums, len(batches))

    def step(chosen: Sequence[T]) -> Sums:
        found = attempt(chosen)
        assert found is not None
        return found

    mine = [item for batch in batches[0 if group is None else group.rank :: ranks] for item in batch]
    done = 0
    runs = in_batches(mine, batch_size, step, where=where, reporter=reporter, what="evaluation")
    with (
        nullcontext() if group is None else group.exchanging(),
        reporter.progress(sum(map(rows_of, mine)), "evaluating") as progress,
    ):
        for chosen, found in runs:
            sums[done // batch_size] += torch.tensor(found, dtype=torch.float64)
            done += len(chosen)
            progress.advance(sum(map(rows_of, chosen)))
            if group is not None and group.signalled:
                break
    if group is not None:
        group.agree("evaluated")
        group.stop_if_asked("evaluating")
    return _added_up(group, sums, len(batches))


@dataclass(frozen=True, slots=True)
class Turn(Generic[T, R]):
    """A rank's batch of one turn, in which each of the others has one, too.

    Attributes:
        number: Of its batch among all.
        items, found: A part of the batch, and its result; None for a rank that had none left.
        of_all: Items of all ranks.
    """

    number: int
    items: Sequence[T]
    found: R | None
    of_all: int


def in_step(
    group: RankGroup,
    items: Sequence[T],
    batch_size: int,
    attempt: Callable[[Sequence[T]], R | None],
    *,
    where: Callable[[T], Origin | None],
    reporter: Reporter,
    what: str = "evaluation",
    doing: str = "evaluating",
    shares: int = 1,
) -> Iterator[Turn[T, R]]:
    """Runs batches on ranks that need each other in each pass, because they hold shards of the weights or share rows:
    all run as many batches, of as many items at most. A rank that has none left runs the last item, for nothing.

    Where memory runs out on one rank, all of them run the batch again by halves, and what is left, too (FT764, a
    warning).

    Args:
        attempt: The result of a few items; None where they do not fit into memory.
        where: The origin of one item, for the message when it alone does not fit.
        what, doing: What is being done, for messages.
        shares: Consecutive ranks that run the same batches.

    Raises:
        FtcliError: FT761 (exit 5) when one item alone does not fit on this rank.
        StopRequested: On all ranks, when one of them was asked to stop.
        PeerFailed, RankLost: When a rank is gone that is needed.
    """
    batches, rows = _batches(items, batch_size), batch_size
    mine, ranks = group.rank // shares, group.size // shares
    with group.exchanging():
        for first in range(0, len(batches), ranks):
            of_all = [*batches[first : first + ranks], *([] for _ in range(ranks))]
            start = 0
            while start < len(of_all[0]):  # no batch is larger than the first one
                count = min(rows, len(of_all[0]) - start)
                chosen = of_all[mine][start : start + count]
                found = attempt(chosen or items[-1:])
                fits = all(told[0] for told in group.agree(doing, [found is not None]))
                group.stop_if_asked(doing)
                if fits and found is not None:
                    of_turn = sum(len(batch[start : start + count]) for batch in of_all)
                    yield Turn(first + mine, chosen, found if chosen else None, of_turn)
                    start += count
                    continue
                if found is None and count == 1:
                    raise row_too_large(what, where((chosen or items[-1:])[0]))
                if count == 1:
                    group.agree(doing)  # raises what the other rank has to say
                rows = count // 2
                reporter.finding(halved(what, count, rows))


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _added_up(group: RankGroup | None, sums: Tensor, batches: int) -> Sums:
    of_all = [sums] if group is None else group.all_gather(sums)
    total = [0.0] * sums.shape[1]
    for index in range(batches):
        found = of_all[index % len(of_all)][index // len(of_all)].tolist()
        total = [a + b for a, b in zip(total, found, strict=True)]
    return tuple(total)


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
    pixels: PixelReader | None = None,
) -> LossResult:
    """Evaluates ``sequences`` in batches of like length. No logits are kept, sums are double precision, and the result
    is the same to rounding whatever ``batch_size``, ``layout`` and the order of ``sequences``.

    Args:
        layout: "unpadded" where attention skips other documents; else "right" is the fastest where rows are of like
            length, "packed" where they are not.
        pack_length: Tokens that share a place in a batch. None: with "packed" those of the longest sequence, with
            "unpadded" each sequence has a place.
        group: Ranks that share the sequences, and all get the same result.
        pixels: What reads the images of rows that have some.

    Raises:
        FtcliError: FT761 (exit 5) when one row alone does not fit, FT762 (exit 6) when the loss is not finite. A batch
            that does not fit is halved, with the warning FT764, on all ranks where each has a part of the weights.
    """
    lengths = [len(tokens.input_ids) for tokens in sequences]
    groups = _groups(lengths, layout, pack_length)

    def step(chosen: Sequence[list[int]]) -> tuple[float, int, int]:
        batch = _batch([[sequences[i] for i in group] for group in chosen], layout, pad_token_id, pixels)
        with compute_context(device, plan.compute, plan.autocast):
            return _sums(model, {name: value.to(device) for name, value in batch.items()})

    def where(group: list[int]) -> Origin:
        return max((sequences[i] for i in group), key=lambda tokens: len(tokens.input_ids)).row.origin

    sharded, was_training = group is not None and root_of(model) is not None, model.training
    model.eval()
    try:
        sums = summed(
            group,
            groups,
            batch_size,
            (lambda chosen: try_forward(model, lambda: step(chosen))) if sharded else step,
            sharded=sharded,
            where=where,
            reporter=reporter,
            rows_of=len,
        )
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


def _batch(
    rows: Sequence[Sequence[TokenizedRow]], layout: BatchLayout, pad_token_id: int, pixels: PixelReader | None
) -> dict[str, Tensor]:
    """The model's arguments, and ``labels``.

    Padding on the right needs no mask: under causal attention it changes nothing that is supervised, and attention
    stays dense, its fastest form.
    """
    if layout in ("packed", "unpadded"):
        documents = [tokens for row in rows for tokens in row]
        packed = layout == "packed"
        batch = packed_batch(rows, pad_token_id) if packed else unpadded_batch(documents, pad_token_id)
        batch = with_images(batch, rows if packed else [documents], pixels)
        return {name: value for name, value in batch.items() if name != "lengths"}
    padded = padded_batch([row for (row,) in rows], pad_token_id)
    if layout == "right":
        return with_images({name: padded[name] for name in ("input_ids", "labels")}, rows, pixels)
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
        help = "evaluate an earlier checkpoint (--checkpoint STEP), or train with a lower train.learning_rate"
        raise FtcliError.single("FT762", f"the evaluation loss is {loss}", exit_code=ExitCode.DIVERGED, help=help)
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
