"""Batches for evaluation: what happens when one does not fit into memory, and how ranks share them.

Each rank takes whole batches, and all add up sums in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.model.shards import lead_forwards
from ftcli.reporting import Reporter
from ftcli.run.process_group import RankGroup

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


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
    return Finding(
        "FT764",
        f"out of memory in {what} with {before} rows at a time: going on with {after}",
        help=f"eval.per_device_eval_batch_size: {after} avoids the attempt",
        severity="warning",
    )


def row_too_large(what: str, origin: Origin | None) -> FtcliError:
    """The error that even one row is too large."""
    return FtcliError.single(
        "FT761",
        f"one row alone does not fit into memory in {what}",
        exit_code=ExitCode.OUT_OF_MEMORY,
        origin=origin,
        help="lower data.max_seq_len",
    )


#: Of a batch: numbers that are added up, such as summed loss, right tokens, tokens.
Sums = tuple[float, ...]


def summed_over_ranks(
    group: RankGroup,
    items: Sequence[T],
    batch_size: int,
    run: Callable[[Sequence[T]], Iterable[tuple[Sequence[T], Sums]]],
    width: int = 3,
) -> Sums:
    """The ``width`` sums over ``items``, of which each rank has run every ``group.size``-th batch.

    They are added in the order of the batches, as one process would, so that every bit is the same. A rank that is
    asked to stop leaves its batches; then no rank has a result.

    Args:
        run: Goes over a rank's items in batches of ``batch_size``, or smaller ones where memory runs out.

    Raises:
        StopRequested: On all ranks, when one of them was asked to stop.
    """
    batches = _batches(items, batch_size)
    sums = _no_sums(len(batches), group, width)
    done = 0
    with group.exchanging():
        for chosen, found in run([item for batch in batches[group.rank :: group.size] for item in batch]):
            sums[done // batch_size] += torch.tensor(found, dtype=torch.float64)
            done += len(chosen)
            if group.signalled:
                break
    group.agree("evaluated")
    group.stop_if_asked("evaluating")
    return _added_up(group, sums, len(batches))


def summed_in_step(
    group: RankGroup,
    items: Sequence[T],
    batch_size: int,
    attempt: Callable[[Sequence[T]], Sums | None],
    *,
    where: Callable[[T], Origin | None],
    reporter: Reporter,
    width: int = 3,
) -> Sums:
    """:func:`summed_over_ranks` where each rank holds a part of the weights, as :func:`in_step` has it."""
    batches = _batches(items, batch_size)
    sums = _no_sums(len(batches), group, width)
    turns = in_step(group, items, batch_size, attempt, where=where, reporter=reporter)
    with reporter.progress(len(items), "evaluating") as progress:
        for turn in turns:
            if turn.found is not None:
                sums[turn.number // group.size] += torch.tensor(turn.found, dtype=torch.float64)
            progress.advance(turn.of_all)
    return _added_up(group, sums, len(batches))


@dataclass(frozen=True, slots=True)
class Turn(Generic[T, R]):
    """What a rank has run while the others ran as much.

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


def _no_sums(batches: int, group: RankGroup, width: int) -> Tensor:
    """Zeros of shape (this rank's batches, width)."""
    return torch.zeros(max(-(-batches // group.size), 1), width, dtype=torch.float64)


def _added_up(group: RankGroup, sums: Tensor, batches: int) -> Sums:
    of_all = group.all_gather(sums)
    total = [0.0] * sums.shape[1]
    for index in range(batches):
        found = of_all[index % group.size][index // group.size].tolist()
        total = [a + b for a, b in zip(total, found, strict=True)]
    return tuple(total)


def led_by_first(group: RankGroup, model: PreTrainedModel | PeftModel, compute: Callable[[], R]) -> R | None:
    """Runs ``compute`` on rank 0 of a model whose weights are sharded; the other ranks take part in its passes and get
    None. All ranks call this.

    Raises PeerFailed or RankLost when a rank is gone whose weights are needed.
    """

    def announce(another: bool) -> bool:
        return bool(group.agree("generating", [another])[0][0])

    with group.exchanging():
        return lead_forwards(model, compute if group.leads else None, announce)
