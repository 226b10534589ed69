"""From character spans to labels: which tokens are trained, checked token by token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

#: The label of a position without loss, as in torch and transformers.
IGNORE_INDEX = -100


def labels_of(
    input_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
) -> list[int]:
    """Labels of the same length: the id inside a span, IGNORE_INDEX elsewhere.

    A token belongs to a span when it starts in it; tokens of no characters (BOS added by the tokenizer) never do.
    Position 0 has no predecessor to predict it from and is never supervised.
    """
    labels = [IGNORE_INDEX] * len(input_ids)
    for span in spans:
        # A pair is larger than its own beginning, so these are the first tokens at the span's two ends or after them.
        first, last = max(1, bisect_left(offsets, span[:1])), bisect_left(offsets, span[1:])
        labels[first:last] = input_ids[first:last]
        for index in [n for n, (start, end) in enumerate(offsets[first:last], first) if start == end]:
            labels[index] = IGNORE_INDEX
    return labels


def end_at_stop(labels: list[int], stops: Collection[int]) -> bool:
    """Masks what a template adds after a turn's last stop token, in place, and says whether every run has one.

    Templates end a turn with a stop token and often a line break; after the stop token nothing is ever sampled, so
    training on the line break would teach nothing but a habit that serving never sees.
    """
    complete = True
    trained = bytes([label != IGNORE_INDEX for label in labels])
    end = len(labels)
    while (end := trained.rfind(1, 0, end) + 1) > 0:
        start = trained.rfind(0, 0, end) + 1
        last = next((i for i in range(end - 1, start - 1, -1) if labels[i] in stops), None)
        if last is None:
            complete = False
        else:
            labels[last + 1 : end] = [IGNORE_INDEX] * (end - last - 1)
        end = start
    return complete


def without_loss(labels: list[int], offsets: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]) -> None:
    """Masks the tokens that touch one of the half-open character ranges ``holes``, in place."""
    if not holes:
        return
    firsts = sorted(first for first, last in holes if first <= last)
    lasts = sorted(last for first, last in holes if first <= last)
    for index, (start, end) in enumerate(offsets):
        # More holes begin before the token's end than end before it begins.
        if start < end and bisect_left(firsts, end) > bisect_right(lasts, start):
            labels[index] = IGNORE_INDEX
