"""Answers are told from their reasoning by the marks of the chat template, whatever family it is of."""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.labels import IGNORE_INDEX
from tests.unit.data.official import NAMES, Official

ASKED = [{"role": "user", "content": "What is 6 x 7?"}]


def said(name: str, reasoning: str | None, answer: str = "It is 42.") -> tuple[Official, list[int], str]:
    """A template, an answer's tokens as they are trained under it, and the prompt before them."""
    official = Official(name)
    turn = {"role": "assistant", "content": answer}
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    (row,) = official.read({"messages": [*ASKED, turn]}).tokens
    begins = next(at for at, label in enumerate(row.labels) if label != IGNORE_INDEX)
    answer_ids = [label for label in row.labels if label != IGNORE_INDEX]
    return official, answer_ids, official.tokenizer.decode(row.input_ids[:begins])


@pytest.mark.parametrize("name", [
    "qwen3", "qwen3_6", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "lfm2_2_5", "nemotron_3_nano",
    "muse_glimmer",
])  # fmt: skip
def test_reasoning_is_no_part_of_the_answer(name: str) -> None:
    official, tokens, prompt = said(name, "Six sevens.\nThat is 42.")
    marks = ReasoningMarks(official.tokenizer, official.tokenizer.chat_template)
    assert marks.split(tokens, prompt) == Answer("It is 42.", "Six sevens.\nThat is 42.")
    whole = official.tokenizer.decode(tokens, skip_special_tokens=True)
    assert marks.split(tokens, "What is 6 x 7?", templated=False) == Answer(whole), "plain text is left alone"


@pytest.mark.parametrize("name", NAMES)
def test_no_template_s_answers_hold_its_own_marks(name: str) -> None:
    official, tokens, prompt = said(name, None)
    marks = ReasoningMarks(official.tokenizer, official.tokenizer.chat_template)
    found = marks.split(tokens, prompt)
    assert (found.text.strip(), found.reasoning or "") == ("It is 42.", "")


QWEN = "{{ messages[0].content.split('</think>')[-1] }}<think>"


def split(
    template: str | None, text: str, prompt: str = "<|im_start|>assistant\n", special: tuple[str, ...] = ()
) -> Answer:
    """An answer of a model whose tokenizer knows only ``special`` as special tokens."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ReasoningMarks(tokenizer, template).split([*tokens, tokenizer.eos_token_id], prompt)


@pytest.mark.parametrize(
    ("text", "prompt", "wanted"),
    [
        ("<think>\n\n</think>\n\n42", "", Answer("42", "")),
        ("\n <think>a</think> 42 </think> b", "", Answer("42 </think> b", "a")),
        ("<think>\na <think> b", "", Answer("", "a <think> b")),  # cut while it reasoned
        ("<think>", "", Answer("", "")),
        ("", "", Answer("")),
        ("The tag <think> and </think>.", "", Answer("The tag <think> and </think>.")),
        ("a\n</think>\n\n42", "q<think>\n", Answer("42", "a")),  # the prompt has opened it
        ("<think>a</think>42", "q<think>\n", Answer("42", "a")),
        ("a, and more", "q<think>\n", Answer("", "a, and more")),
        ("</think>\n\n42", "q", Answer("42", "")),
        ("42", "q<think>\n\n</think>\n\n", Answer("42")),
        ("42, é</think>", "What is <think> here?\n", Answer("42, é</think>")),
        ("<think>Ünïcödé 🙂</think>🙂 42", "", Answer("🙂 42", "Ünïcödé 🙂")),
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
def test_where_reasoning_ends(text: str, prompt: str, wanted: Answer, special: tuple[str, ...]) -> None:
    found = split(QWEN, text, prompt, special)
    if special and "think>" in f"{wanted.text}{wanted.reasoning}":  # such a token is not part of any text
        assert (found.reasoning is None) == (wanted.reasoning is None)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("...[/THINK]", "[THINK]Six sevens.[/THINK]42"),
        ("</thought>", "<thought>\nSix sevens.\n</thought>\n42"),
        ("</seed:think>", "<seed:think>Six sevens.</seed:think>42"),
        ("◁/think▷", "◁think▷Six sevens.◁/think▷42"),
        ("</Thinking>", "<Thinking>Six sevens.</Thinking>42"),
        ("<|END_THINKING|>", "<|START_THINKING|>Six sevens.<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>"),
        ("<|inner_suffix|>", "<|inner_prefix|>Six sevens.<|inner_suffix|>42"),
        ("<channel|>", "<|channel>thought\nSix sevens.\n<channel|>42"),
    ],
)
def test_other_marks(template: str, text: str) -> None:
    special = ("[THINK]", "[/THINK]", *re.findall(r"<\|[A-Z_a-z]+\|>", text), "<|channel>", "<channel|>")
    assert split(template, text, special=special) == Answer("42", "Six sevens.")


def test_a_template_without_marks_makes_them_words() -> None:
    text = "<think>Six sevens.</think>42"
    assert split("{{ messages[0].content }} I think </a>", text) == split(None, text) == Answer(text)


def test_a_tokenizer_may_say_how_its_answers_are_read() -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    tokenizer.response_template = {"fields": {"thinking": {"open": "<<", "close": ">>\n"}, "content": {}}}
    tokens = tokenizer("<<so>> 42", add_special_tokens=False)["input_ids"]
    assert ReasoningMarks(tokenizer, "any").split(tokens, "q") == Answer("42", "so")
    for broken in (
        "",
        {},
        {"fields": 3},
        {"fields": {"thinking": []}},
        {"fields": {"thinking": {"open": "", "close": 3}}},
    ):
        tokenizer.response_template = broken
        assert ReasoningMarks(tokenizer, "any").split(tokens, "q") == Answer("<<so>> 42")
