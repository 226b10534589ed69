"""The layout of a micro-batch's rows for the model, and how many tokens are computed for them.

``padded``: a row each, filled up to the longest. ``unpadded``: all rows one after the other in a single row, with
positions that begin anew and no attention across; the filler that rounds it up is one more document, which bears no
loss.

Preflight asks before anything is built, and the job asks again once there is a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "unpadded"]

#: The recipe's ``data.padding_free``.
PaddingFree = bool | Literal["auto"]

#: Numbers of tokens that are computed are multiples of this: the tiles of products and of attention.
_MULTIPLE = 64
#: The multiple that rows of their own are rounded up to where many tokens are computed: 16 bytes of half precision.
_OF_ROWS = 8
#: What lies between one power of two and the next is divided into so many steps: at most 1/16 is added.
_STEPS = 16
#: No step is longer.
_LONGEST_STEP = 1024
#: Tokens up to which their numbers are few where no graph needs them to be: the host takes as long as the GPU.
FEW_UP_TO = 4096


def bucket(tokens: int, few_up_to: int = FEW_UP_TO) -> int:
    """The number of tokens that is computed for ``tokens``, a multiple of 64 that is no less.

    Up to ``few_up_to`` these are few, since graphs are captured for each: all multiples of 64 up to 1024; from there
    on, 16 between each power of two and the next; beyond 32,768 multiples of 1024. Never falls as ``tokens`` rises;
    what it gives stays as it is.
    """
    below = 1 << (tokens - 1).bit_length() >> 1 if tokens > 0 else 0  # the largest power of two that is less
    step = min(max(_MULTIPLE, below // _STEPS), _LONGEST_STEP)
    few = -(-tokens // step) * step
    return few if few <= few_up_to else -(-tokens // _MULTIPLE) * _MULTIPLE


def unpadded_shape(lengths: Sequence[int], few_up_to: int = FEW_UP_TO) -> tuple[int, int]:
    """Rows and tokens of a row that are computed for documents of ``lengths`` without padding.

    A single row; but documents of one length stay a row each where that computes no more tokens: attention is dense
    there, its fastest form. So does a document that is alone.
    """
    count, longest, flat = len(lengths), max(lengths), bucket(sum(lengths), few_up_to)
    width = bucket(longest, few_up_to) if flat <= few_up_to else -(-longest // _OF_ROWS) * _OF_ROWS
    if min(lengths) == longest and count * width <= flat:
        return count, width
    return 1, flat


@dataclass(frozen=True, slots=True)
class Batches:
    """The layout of micro-batches, and the reason as one clause. ``shares_prompts``: what both rows of a pair begin
    with is computed once: all pairs are documents of a single row. ``few_up_to``: as :func:`bucket`.
    """

    layout: Layout
    reason: str
    shares_prompts: bool = False
    few_up_to: int = FEW_UP_TO

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Rows and tokens of a row that are computed for documents of ``lengths``, which are not empty. Tokens that
        rows share are counted in one of them.
        """
        if self.shares_prompts:
            return 1, bucket(sum(lengths), self.few_up_to)
        if self.layout == "padded":
            return len(lengths), max(lengths)
        return unpadded_shape(lengths, self.few_up_to)

    def most_tokens(self, rows: int, longest: int, once: int = 0) -> int:
        """The most tokens that are computed for ``rows`` rows of up to ``longest`` tokens each, less ``once``."""
        tokens = rows * longest - once
        return bucket(tokens, self.few_up_to) if self.layout == "unpadded" else rows * longest


def choose_batches(
    wanted: PaddingFree, *, takes_rows: str | None, masked_densely: str | None, shares_prompts: bool = False
) -> Batches:
    """The layout of a run with ``data.padding_free: wanted``. ``takes_rows``: why the method's trainer takes nothing
    but padded rows; ``masked_densely``: why attention keeps documents apart by a mask over all pairs of tokens, or not
    at all; both None where that is not so. ``shares_prompts``: rows are pairs that may lie in one document.
    """
    if takes_rows is not None:
        return Batches("padded", takes_rows)
    if wanted is False:
        return Batches("padded", "data.padding_free: false")
    if masked_densely is None:
        return Batches("unpadded", "attention's kernels keep rows apart and skip what lies in others", shares_prompts)
    if wanted is True:
        return Batches("unpadded", f"data.padding_free: true, although {masked_densely}")
    return Batches("padded", masked_densely)
