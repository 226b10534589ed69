"""Conversations of very many turns: the rows that a look at each turn in full gives, in less time."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from ftcli.data import chats
from ftcli.data.encode import TokenizedRows
from ftcli.data.template import Renderer
from tests.unit.data.official import NAMES, Official
from tests.unit.data.test_official_templates import CALL, RESULT, TOOLS, assistant, user

#: Every turn with the same words, so that only its place tells one from another.
ALIKE = [m for _ in range(16) for m in (user("and then"), assistant("as before"))]
CHATS: dict[str, list[dict[str, Any]]] = {
    "alike": ALIKE,
    "system": [{"role": "system", "content": "Be brief, sir."}, *ALIKE, user("unanswered")],
    "agent": [
        user("Go."),
        *[m for _ in range(12) for m in (assistant("", tool_calls=[CALL]), {**RESULT, "content": "{}"})],
        assistant("Done."),
    ],
    "reasoning": [
        m for n in range(14) for m in (user(f"q{n}"), assistant(f"a{n}", reasoning_content=f"I think {n % 3}"))
    ],
    "breaks": [m for n in range(14) for m in (user(f"{n}\n"), assistant(f"\n\n{n} {'y' * n}\n"))],
    "sparse": [{**m, "weight": int(n % 9 == 3)} if n % 2 else m for n, m in enumerate(ALIKE)],
}
NEVER = 10**9


@pytest.fixture(scope="module")
def official() -> Any:
    made: dict[str, Official] = {}
    return lambda name: made.setdefault(name, Official(name)) if name not in made else made[name]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_MESSAGES", 8)
    monkeypatch.setattr(chats, "_BEFORE", 4)
    monkeypatch.setattr(chats, "_LOOKED_AT", 3)


def seen(read: TokenizedRows) -> Any:
    """All of it, but which of several turns with the same fault is named."""
    tokens = [(one.input_ids, one.labels) for one in read.tokens]
    return (
        tokens,
        [finding.code for finding in read.findings],
        {name: count for name, count in read.counts.items() if count},
    )


#: Every template with one kind, and some that keep the history with all.
CASES = list(zip(NAMES, cycle(CHATS), strict=False)) + [
    (name, kind) for name in ("qwen2_5", "llama3_1") for kind in CHATS
]


@pytest.mark.parametrize(("name", "kind"), dict.fromkeys(CASES))
def test_pieces_give_the_rows_that_the_whole_gives(
    official: Any, name: str, kind: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"messages": CHATS[kind], **({"tools": TOOLS} if kind == "agent" else {})}
    monkeypatch.setattr(chats, "_MANY", NEVER)
    whole = seen(official(name).read(row))
    monkeypatch.setattr(chats, "_MANY", 0)
    assert seen(official(name).read(row)) == whole


def rendered(monkeypatch: pytest.MonkeyPatch, official: Official, turns: int) -> int:
    """Messages that the template writes for a conversation of so many turns, in all."""
    count = 0
    apply = Renderer.apply

    def counting(self: Renderer, messages: Any, *more: Any) -> str:
        nonlocal count
        count += len(messages)
        return apply(self, messages, *more)

    chat = [m for n in range(turns // 2) for m in (user(f"question {n}"), assistant(f"answer {n}"))]
    with monkeypatch.context() as patched:
        patched.setattr(Renderer, "apply", counting)
        read = official.read({"messages": chat})
    assert not read.findings
    assert len(official.trained(read)[0]) == turns // 2
    return count


def test_the_work_grows_with_the_turns(official: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_MANY", 0)
    some, twice = (rendered(monkeypatch, official("llama3_1"), turns) for turns in (100, 200))
    assert twice < 2.1 * some
    monkeypatch.setattr(chats, "_MANY", NEVER)
    assert rendered(monkeypatch, official("llama3_1"), 100) > 3 * some


#: Each writes short conversations as if it kept the history, and long ones otherwise.
DECEIVING = {
    "the last ten": "{% for m in messages[-10:] %}",
    "numbers": "{% for m in messages %}{{ loop.index if loop.index > 30 }}",
    "length": "{{ messages | length // 32 }}{% for m in messages %}",
    "an early turn": "{% for m in messages %}{{ 'x' if loop.index == 3 and messages | length > 35 }}",
    "from the end": "{% for m in messages %}{{ 'x' if loop.revindex == 25 }}",
}


@pytest.mark.parametrize("kind", DECEIVING)
def test_a_template_that_writes_long_conversations_otherwise_is_looked_at_in_full(
    official: Any, kind: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = Official("qwen2_5")
    template.tokenizer.chat_template = (
        DECEIVING[kind]
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"messages": [m for n in range(24) for m in (user(f"q{n}"), assistant(f"a{n}"))]}
    monkeypatch.setattr(chats, "_MANY", NEVER)
    whole = seen(template.read(row))
    monkeypatch.setattr(chats, "_MANY", 0)
    assert seen(template.read(row)) == whole
    monkeypatch.setattr(chats, "_TOO_MANY", 100)
    (finding,) = template.read(row).findings or [None]
    if whole[1]:
        assert finding is not None
        assert [finding.code] == whole[1]
    elif len(whole[0]) > 1:
        assert finding is not None
        assert finding.code == "FT422"
        assert "24 answers would be rendered with all that precedes it" in finding.message


def test_a_turn_that_is_wrong_is_named_by_its_place_in_the_conversation(
    official: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "_MANY", 0)
    chat = [*ALIKE[:26], user("q"), assistant("a", reasoning_content="lost"), *ALIKE[:6]]
    (finding,) = official("llama3_1").read({"messages": chat}).findings
    assert finding.code == "FT426"
    assert "turn 28" in finding.message
