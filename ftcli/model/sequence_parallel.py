"""Sequence parallelism: each of several ranks computes a part of every row, and attention sees the whole.

Everything but attention treats tokens one by one, so a rank needs no more than its own. Around attention the ranks
exchange tokens for heads (Ulysses, arXiv:2309.14509): each sends every other one that one's share of its heads, gets
all tokens of its own share, computes attention as it would alone, and sends the answers back. So masks, windows and
caps are those of whole rows, and every backend of attention serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftcli.plan.execution import exchanged_key_heads

#: (N, ...) -> (N, ...): sends slice n to part n, and returns what each part has sent, in their order.
Exchange = Callable[[Tensor], Tensor]


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all; its backward is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange(sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange(gradients[0].contiguous()), None


class _SumOfParts(torch.autograd.Function):
    """The sum of what all parts have; backward hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, exchange: Exchange, parts: int) -> Tensor:
        return exchange(mine.expand(parts, *mine.shape).contiguous()).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


@dataclass(frozen=True, eq=False)
class SequencePart:
    """This rank's part of every row: number ``part`` of ``parts``, all of the same length, in order.

    ``exchange`` is called by all parts of a row alike, forward and backward.
    """

    part: int
    parts: int
    exchange: Exchange

    def heads_of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, Hq, S, D) and key, value (B, Hkv, S, D) of this part's tokens -> (B, Hq / N, N S, D) and
        (B, H / N, N S, D) of all tokens, N parts and H the key heads, each repeated where N does not divide them.

        Raises:
            ValueError: N does not divide the query heads.
        """
        heads = exchanged_key_heads(query.shape[1], key.shape[1], self.parts)
        if heads is None:
            raise ValueError(f"{query.shape[1]} query heads cannot be shared by {self.parts} parts of a row")
        if heads != key.shape[1]:
            key, value = (each.repeat_interleave(heads // key.shape[1], dim=1) for each in (key, value))
        # (N, B, S, heads of one part, D), by token: what kernels read best once the parts are side by side
        sent = torch.cat([self._by_part(each) for each in (query, key, value)], dim=3)
        came: Tensor = _AllToAll.apply(sent, self.exchange)  # type: ignore[no-untyped-call]
        whole = came.transpose(0, 1).flatten(1, 2)
        sizes = [each.shape[1] // self.parts for each in (query, key, value)]
        queries, keys, values = torch.split(whole, sizes, dim=2)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def sinks_of(self, sinks: Tensor) -> Tensor:
        """(Hq,) of all query heads -> (Hq / N,) of those that this part attends with; a view."""
        return sinks.view(self.parts, -1)[self.part]

    def tokens_of(self, attended: Tensor) -> Tensor:
        """Attention's output (B, N S, Hq / N, D) for this part's heads -> (B, S, Hq, D) for its tokens."""
        rows, tokens, heads, size = attended.shape
        sent = attended.view(rows, self.parts, tokens // self.parts, heads, size).transpose(0, 1).contiguous()
        came: Tensor = _AllToAll.apply(sent, self.exchange)  # type: ignore[no-untyped-call]
        return came.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def summed(self, mine: Tensor) -> Tensor:
        """The sum over all parts of a row, the same to the last bit on each.

        Every part computes the same loss of it, so that each has the gradient of its own summand without a second
        exchange. Of that loss only one part may tell the value.
        """
        found: Tensor = _SumOfParts.apply(mine, self.exchange, self.parts)  # type: ignore[no-untyped-call]
        return found

    def _by_part(self, heads: Tensor) -> Tensor:
        """(B, H, S, D) -> (N, B, S, H / N, D), a view."""
        rows, count, tokens, size = heads.shape
        return heads.reshape(rows, self.parts, count // self.parts, tokens, size).permute(1, 0, 3, 2, 4)
