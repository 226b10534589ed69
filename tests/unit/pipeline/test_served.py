"""How served answers compare with the trained model's, and what is made of them: by answers written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.data.reasoning import ReasoningMarks
from ftcli.evaluate.generate import GreedyAnswer
from ftcli.pipeline.served import Comparer, Diagnosis, Evidence
from ftcli.pipeline.server import ServedAnswer

TOKENIZER: Any = AutoTokenizer.from_pretrained(asset("models", "tiny-gemma2"))
BOS, STOP = 2, 4
THINKING = "{% if '</think>' in content %}{% endif %}<think>"


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def own(
    text: str, *, stopped: bool = True, prompt: Sequence[int] = (BOS, 9), other: dict[str, float] | None = None
) -> GreedyAnswer:
    """An answer whose tokens are nearly certain; ``other`` has log-probabilities of second choices, by text."""
    tokens = [*ids(text), *([STOP] if stopped else [])]
    seconds = {ids(piece)[0] if piece else STOP: value for piece, value in (other or {}).items()}
    places = [{token: -0.01, **{i: v for i, v in seconds.items() if i != token}, 200: -9.0} for token in tokens]
    return GreedyAnswer(tuple(prompt), tuple(tokens), stopped, tuple(places))


def served(
    text: str,
    finish: str = "stop",
    *,
    prompt: int | None = 2,
    tokens: int | None = None,
    told: Sequence[float] = (),
    reasoning: str | None = None,
) -> ServedAnswer:
    return ServedAnswer(text, reasoning, finish, prompt, tokens, tuple(told))


def comparer(template: str | None = None) -> Comparer:
    return Comparer(TOKENIZER, [STOP, 1], ReasoningMarks(TOKENIZER, template), 0.25)


#: The limit came between the two bytes of a character.
HALF = GreedyAnswer((BOS, 9), tuple(ids("aé")[:2]), False, tuple({token: -0.01, 200: -9.0} for token in ids("aé")[:2]))

CASES: dict[str, tuple[GreedyAnswer, ServedAnswer, str, int]] = {
    "the same": (own("abc"), served("abc"), "same", 3),
    "white space around": (own(" abc"), served("abc\n"), "same", 4),
    "cut in a character": (HALF, served("a\ufffd", "length", tokens=2), "same", 2),
    "the server's limit is lower": (own("abcdef"), served("abc", "length", tokens=3), "same", 3),
    "the server's limit is higher": (own("abc", stopped=False), served("abcdef", "length"), "same", 3),
    "another token": (own("abc"), served("axc"), "other", 1),
    "a near tie": (own("abc", other={"x": -0.2}), served("axc"), "tie", 1),
    "a near tie after a blank": (own("a b", other={"c": -0.2}), served("ac"), "tie", 1),
    "a blank in place of a token": (own("abc", other={" ": -0.2}), served("a bc"), "tie", 1),
    "no near tie": (own("abc", other={"x": -0.4}), served("axc"), "other", 1),
    "it goes on": (own("abc"), served("abcdef"), "went_on", 3),
    "it goes on by a near tie": (own("abc", other={"d": -0.2}), served("abcdef"), "tie", 3),
    "it goes on without text": (own("abc"), served("abc", "length"), "went_on", 3),
    "it ends early": (own("abc"), served("a"), "ended_early", 1),
    "it ends early by a near tie": (own("abc", other={"": -0.2}), served("a"), "tie", 1),
    "tokens without text": (own("abc"), served("a", "length", tokens=12), "other", 1),
    "nothing": (own("abc"), served(""), "ended_early", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_answers(case: str) -> None:
    mine, theirs, kind, alike = CASES[case]
    found = comparer().compare(mine, theirs, 12)
    assert (found.kind, found.alike) == (kind, alike)


def test_log_probabilities_of_the_tokens_that_are_alike() -> None:
    found = comparer().compare(own("abc"), served("axc", told=(-0.11, -5.0, -0.01)), 12)
    assert found.moved == pytest.approx((0.1,))


def test_reasoning_that_the_server_has_taken_out() -> None:
    mine = own("<think>hm</think>so", prompt=ids("<bos>q"))
    parsed = served("so", reasoning="hm")
    assert comparer(THINKING).compare(mine, parsed, 40).kind == "same"
    assert comparer(THINKING).compare(mine, served("no", reasoning="hm"), 40).kind == "other"


PROMPTS: dict[str, tuple[Sequence[int], int, list[str]]] = {
    "as trained": ((BOS, 9), 0, []),
    "one more": ((BOS, 9), 1, ["doubled_bos"]),
    "one less": ((BOS, 9), -1, ["missing_bos"]),
    "one that training did not have": ((8, 9), 1, ["added_bos"]),
    "one less of a prompt without it": ((8, 9), -1, ["template"]),
    "five more": ((BOS, 9), 5, ["template"]),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_by_their_number_of_tokens_and_by_the_tokens(kind: str, exact: bool) -> None:
    prompt, more, faults = PROMPTS[kind]
    mine = own("abc", prompt=prompt)
    theirs = [BOS, *prompt] if more == 1 else prompt[1:] if more < 0 else [*[7] * more, *prompt]
    evidence = Evidence(
        own=[mine],
        chat=[served("abc", prompt=None if exact else len(prompt) + more)],
        given=[],
        prompts=[theirs] if exact else [],
        bos=BOS,
        answers=lambda prompts: [own("abc", prompt=one) for one in prompts],
        base=None,
        limit=12,
    )
    found = Diagnosis(evidence, comparer())
    assert [each.name for each in found.faults()] == faults
    assert found.prompt_tokens == ([] if exact else [more])


@pytest.mark.parametrize(("counted", "fault"), [(2, "chat"), (None, "template")])
def test_other_answers_to_conversations_of_the_same_weights(counted: int | None, fault: str) -> None:
    chat = [served("xyz", prompt=counted)]
    evidence = Evidence([own("abc")], chat, [served("abc")], [], BOS, lambda _: [], None, 12)
    assert [each.name for each in Diagnosis(evidence, comparer()).faults()] == [fault]


def test_ends_that_differ_in_chats_alone() -> None:
    evidence = Evidence([own("abc")], [served("abcde")], [served("abc")], [], BOS, lambda _: [], None, 12)
    assert [each.name for each in Diagnosis(evidence, comparer()).faults()] == ["stop"]


def test_a_server_that_miscounts_given_tokens_is_not_believed() -> None:
    evidence = Evidence(
        [own("abc")], [served("abc", prompt=1)], [served("abc", prompt=1)], [], BOS, lambda _: [], None, 12
    )
    found = Diagnosis(evidence, comparer())
    assert (found.faults(), found.prompt_tokens) == ([], [])
