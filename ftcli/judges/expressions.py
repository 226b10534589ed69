"""Compares expressions with math_verify, in a process of its own that loads this file (:mod:`ftcli.judges.worker`)."""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

#: The answer of a completion is at its end.
_MOST_CHARS = 20_000
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns of each parse without its own time limit


def equal(completion: str, answer: str) -> list[float | None]:
    """One number: 1.0 where the expressions are equal, else 0.0. None where the answer has no expression."""
    gold = parse(answer if _MARKED.search(answer) else f"${answer}$", parsing_timeout=None)
    if not gold:
        return [None]
    found = parse(completion[-_MOST_CHARS:], parsing_timeout=None)
    return [float(verify(gold, found, timeout_seconds=None))]
