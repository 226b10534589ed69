"""Held-out rows among the ranks of a run: each takes whole batches, and all have the same sums, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ftcli.run.group import Group

T = TypeVar("T")

#: Of a batch: summed loss, right tokens, tokens.
Sums = tuple[float, int, int]


def summed_over_ranks(
    group: Group,
    items: Sequence[T],
    batch_size: int,
    run: Callable[[Sequence[T]], Iterable[tuple[Sequence[T], Sums]]],
    *,
    in_step: bool = False,
) -> Sums:
    """The sums over ``items``, of which each rank has run every ``group.size``-th batch.

    They are added in the order of the batches, as one process would, so that every bit is the same. A rank that is
    asked to stop leaves its batches; then no rank has a result.

    Args:
        run: Goes over a rank's items in batches of ``batch_size``, or smaller ones where memory runs out.
        in_step: All ranks have to run as many batches, as where each holds a part of the weights: those that have none
            left run their first one again, which adds nothing, and nobody leaves its batches.

    Raises:
        StopRequested: On all ranks, when one of them was asked to stop.
        PeerFailed, RankLost: When a rank is gone whose weights are needed.
    """
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    turns = -(-len(batches) // group.size)
    own = batches[group.rank :: group.size]
    mine = [item for batch in own for item in batch]
    sums = torch.zeros(max(turns, 1), 3, dtype=torch.float64)
    done = 0
    with group.exchanging():
        for chosen, found in run(mine):
            sums[done // batch_size] += torch.tensor(found, dtype=torch.float64)
            done += len(chosen)
            if group.signalled and not in_step:
                break
        if in_step and len(own) < turns:
            for _ in run(batches[0]):
                pass
    group.agree("evaluated")
    group.stop_if_asked("evaluating")
    of_all = group.gather(sums)
    total, correct, count = 0.0, 0, 0
    for index in range(len(batches)):
        loss, right, tokens = of_all[index % group.size][index // group.size].tolist()
        total, correct, count = total + loss, correct + int(right), count + int(tokens)
    return total, correct, count
