"""Regular expressions on completions, the same for rewards and tasks: Python's ``re``, ``search``, DOTALL, and bounds.

A completion is untrusted text, on which an expression may take for ever.
"""

from __future__ import annotations

import re

from ftcli.patience import limited_time

#: An expression sees only this much of a completion, so that a slow one cannot hold up training.
MAX_MATCHED_CHARS = 20_000
#: And is given up after so long.
SECONDS = 1.0


class Pattern:
    """A regular expression that a reward or a task names. Raises re.error where it is none."""

    def __init__(self, expression: str) -> None:
        self._compiled = re.compile(expression, re.DOTALL)

    def search(self, text: str) -> re.Match[str] | None:
        """The first match anywhere in the first 20,000 characters; ``.`` matches line breaks too.

        Raises TookTooLong after a second, where this is the main thread: only there a signal can end a search.
        """
        with limited_time(SECONDS):
            return self._compiled.search(text[:MAX_MATCHED_CHARS])
