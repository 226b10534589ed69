"""Batches for evaluation, and what happens when one does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.reporting import Reporter

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
