"""Generated answers become rows that training reads as what was generated, under every official template."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.config.data import DataConfig
from ftcli.data.asked import RenderedPrompt
from ftcli.data.encode import Encoder
from ftcli.data.generated import GeneratedRows, WrittenAnswer
from ftcli.data.reasoning import ReasoningMarks
from ftcli.data.template import renderer_of
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.layouts import layout_of
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row
from tests.unit.data.official import NAMES, Official

ASKED: dict[str, Any] = {"role": "user", "content": "What is 6 x 7?"}
THINKING = ("qwen3", "qwen3_6", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "lfm2_2_5", "nemotron_3_nano")


class Model:
    """Writes what it is told to under an official template."""

    def __init__(self, name: str, **data: Any) -> None:
        self.official = Official(name)
        self.data = DataConfig.model_validate({"train": ["x"], "max_seq_len": 10**6, **data})
        tokenizer = self.official.tokenizer
        self.marks = ReasoningMarks(tokenizer, renderer_of(tokenizer, self.data).source)
        self.rows = GeneratedRows(tokenizer, self.official.stops, self.data)

    def asked(self, *messages: dict[str, Any], **more: Any) -> RenderedPrompt:
        """The prompt as the model sees it."""
        prompt = Prompt(Row("f", 1, {}), messages, None, None, **more)
        return RenderedPrompt(prompt, renderer_of(self.official.tokenizer, self.data).prompt(prompt))

    def drawn(self, asked: RenderedPrompt, text: str) -> WrittenAnswer:
        """``text``, generated, as a row holds it."""
        ids = self.official.tokenizer(text, add_special_tokens=False)["input_ids"]
        said = self.marks.split([*ids, self.official.stops[0]], asked.text, templated=asked.templated)
        found = self.rows.answer(asked, said, text)
        assert found is not None
        return found

    def learnt(self, asked: RenderedPrompt, written: WrittenAnswer) -> tuple[str, str]:
        """What training reads of it: what comes before the tokens that bear loss, and these."""
        fields = self.rows.completion(asked, written.content)
        encoder = Encoder(
            self.official.tokenizer, self.official.stops, self.data, layout_of(Row("f", 1, fields), "auto")
        )
        (row,) = encoder.rows([Row("f", 1, fields)]).tokens
        begins = next(at for at, label in enumerate(row.labels) if label != IGNORE_INDEX)
        learnt = [label for label in row.labels if label != IGNORE_INDEX]
        decode = self.official.tokenizer.decode
        return decode(row.input_ids[:begins]), decode(learnt)


def generated(model: Model, turn: dict[str, Any]) -> str:
    """What a model that was trained on ``turn`` writes, without the token that ends it."""
    (row,) = model.official.read({"messages": [ASKED, {"role": "assistant", **turn}]}).tokens
    ids = [label for label in row.labels if label != IGNORE_INDEX]
    return str(model.official.tokenizer.decode(ids[:-1]))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_learnt_as_it_was_generated(name: str) -> None:
    model = Model(name)
    asked, text = model.asked(ASKED), generated(model, {"content": "It is 42."})
    written = model.drawn(asked, text)
    assert written.alike
    prompt, learnt = model.learnt(asked, written)
    assert prompt == asked.text
    assert learnt.startswith(text)
    assert "It is 42." in str(written.content)


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_learnt_as_it_was_generated(name: str) -> None:
    model = Model(name)
    text = generated(model, {"content": "It is 42.", "reasoning_content": "Six sevens.\nThat is 42."})
    asked = model.asked(ASKED)
    written = model.drawn(asked, text)
    assert written.alike
    assert model.learnt(asked, written)[1].startswith(text)
    assert written.content == {
        "role": "assistant", "content": "It is 42.", "reasoning_content": "Six sevens.\nThat is 42.",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "alike"), [("a  b", True), ("  a b", False), ("a\n", False)])
def test_white_space_that_a_template_trims_is_told(text: str, alike: bool) -> None:
    model = Model("gemma")
    assert model.drawn(model.asked(ASKED), text).alike is alike


def test_an_answer_to_plain_text_stays_plain_text() -> None:
    model = Model("gemma")
    prompt = Prompt(Row("f", 1, {}), None, "2 + 2 =", None)
    asked = RenderedPrompt(prompt, renderer_of(model.official.tokenizer, model.data).prompt(prompt))
    written = model.drawn(asked, " 4")
    assert written == WrittenAnswer(" 4", alike=True)
    assert model.rows.completion(asked, written.content) == {"prompt": "2 + 2 =", "completion": " 4"}
    assert model.rows.pair(asked, " 4", " 5") == {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


def test_a_pair_keeps_tools_and_switches() -> None:
    model = Model("qwen3")
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    asked = model.asked(ASKED, tools=(tool,), switches={"enable_thinking": False})
    chosen, rejected = ({"role": "assistant", "content": text} for text in ("42", "41"))
    row = model.rows.pair(asked, chosen, rejected)
    assert row == {
        "prompt": [ASKED], "chosen": [chosen], "rejected": [rejected],
        "tools": [tool], "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def test_what_training_would_refuse_is_no_row() -> None:
    model = Model("gemma")
    asked = model.asked(ASKED)
    alike = model.rows.pair(asked, {"role": "assistant", "content": "42"}, {"role": "assistant", "content": "42 "})
    assert alike is None, "the template trims what told them apart"
    thoughtful = Model("qwen3", reasoning="refuse")
    asked, text = thoughtful.asked(ASKED), "<think>\nSix sevens.\n</think>\n\nIt is 42."
    said = thoughtful.marks.split(
        thoughtful.official.tokenizer(text, add_special_tokens=False)["input_ids"], asked.text
    )
    assert (said.text, said.reasoning) == ("It is 42.", "Six sevens.")
    assert thoughtful.rows.answer(asked, said, text) is None
