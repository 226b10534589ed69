"""The part of a text that a model sees while it answers, and the room left for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The last tokens of a text, at most ``length`` of them.

    Attributes:
        max_new_tokens: Longest completion.
        length: Most tokens of prompt and completion; None for no limit.
        sliding: Completions go on where the window is full (``eval.generate.overflow``).
    """

    max_new_tokens: int
    length: int | None
    sliding: bool

    @property
    def slides(self) -> bool:
        """True if completions go on when the window is full."""
        return self.sliding and self.length is not None

    def next(self, ids: Sequence[int], made: int) -> tuple[tuple[int, ...], int]:
        """The part of ``ids``, the last ``made`` of them by the model, that it sees next, and how many tokens may
        follow.

        A window that is full drops its oldest quarter: the rest is read anew, from position 0.
        """
        limit = self.max_new_tokens - made
        if self.length is not None:
            if self.slides and len(ids) >= self.length:
                ids = ids[len(ids) - self.length + max(1, self.length // 4) :]
            limit = min(limit, self.length - len(ids))
        return tuple(ids), limit
