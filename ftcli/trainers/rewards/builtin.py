"""Rewards that need no code of the user's. Completions are untrusted text: they are compared, never run."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_MATCHED_CHARS = 20_000


def exact_match(completions: Sequence[str], answers: Sequence[str], extract: re.Pattern[str] | None) -> list[float]:
    """1.0 where the completion, or the first group of ``extract`` in it, equals the answer but for outer space."""
    scores = []
    for completion, answer in zip(completions, answers, strict=True):
        text = completion
        if extract is not None:
            found = extract.search(completion[:MAX_MATCHED_CHARS])
            text = "" if found is None else found.group(1) if found.groups() else found.group(0)
            if text is None:  # the group took no part in the match
                text = ""
        scores.append(float(text.strip() == answer.strip()))
    return scores


def regex_match(completions: Sequence[str], pattern: re.Pattern[str]) -> list[float]:
    """1.0 where ``pattern`` is found in the completion (its first 20,000 characters)."""
    return [float(pattern.search(completion[:MAX_MATCHED_CHARS]) is not None) for completion in completions]
