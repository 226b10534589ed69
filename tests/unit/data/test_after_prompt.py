"""Where an answer begins in a text whose history a template has rewritten."""

from __future__ import annotations

import random

import pytest

from ftcli.data.answers import after_prompt


def looked_at_everywhere(prompt: str, text: str, last_turn: int) -> str | None:
    """What follows the only place that agrees longest with the end of the prompt, found place by place."""
    if text.startswith(prompt):
        return text[len(prompt) :]

    def agreed(end: int) -> int:
        return next(
            (n for n in range(min(len(prompt), end)) if prompt[-1 - n] != text[end - 1 - n]), min(len(prompt), end)
        )

    lengths = [agreed(end) for end in range(len(text) + 1)]
    best = max(lengths)
    if lengths.count(best) != 1 or not best or best < max(min(12, len(prompt)), last_turn):
        return None
    return text[lengths.index(best) :]


def test_it_is_the_place_that_agrees_longest() -> None:
    chance, answered = random.Random(5), 0
    for _ in range(3000):
        letters = chance.choice(["a", "ab", "abc"])
        prompt = "".join(chance.choices(letters, k=chance.randint(0, 30)))
        before = "".join(chance.choices(letters, k=chance.randint(0, 6)))
        text = before + prompt[chance.randint(0, 8) :] + "".join(chance.choices(letters, k=chance.randint(0, 9)))
        last_turn = chance.randint(0, 20)
        found = after_prompt(prompt, text, last_turn)
        assert found == looked_at_everywhere(prompt, text, last_turn), (prompt, text, last_turn)
        answered += found is not None and not text.startswith(prompt)
    assert answered > 300


@pytest.mark.parametrize("more", ["", "yes"])
def test_a_text_that_repeats_itself_comes_to_an_end(more: str) -> None:
    """Looked at place by place, these two million characters would take hours."""
    prompt = "user" + "<bos>" * 400_000
    text = "rewritten" + "<bos>" * 400_000 + more
    assert after_prompt(prompt, text, 5) == more
    assert after_prompt(prompt, f"{text}<bos>" * 2, 5) is None
