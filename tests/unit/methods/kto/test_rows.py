"""Rows of labelled answers: every form that one may have, what is scored of each, and every refusal by file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.config.evaluation import GenerateConfig
from ftcli.data.asked import asked_rows, room_of_task
from ftcli.data.prepare import PreparedData, prepare
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX

Row = dict[str, Any]
Prepare = Callable[..., PreparedData]
END = "<end_of_turn>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}:{{ m.content | trim }}<end_of_turn>{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant:{% endif %}"
)


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def says(text: str) -> Row:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The bytes tokenizer, with a template that shows every turn."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Prepare:
    """``prepared(rows, data options)``."""

    def _prepared(rows: list[Row], source: Row | None = None, **options: Any) -> PreparedData:
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        given = {"format": "labelled", "max_seq_len": 300, "train": [{"path": str(path), **(source or {})}], **options}
        data = DataConfig.model_validate(given)
        stops = tokenizer.convert_tokens_to_ids([str(tokenizer.eos_token), END])
        return prepare(data.train, data, tokenizer, tuple(stops))

    return _prepared


def read(found: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str, float]]:
    """Whole rows, what is scored of each, and its label."""
    return [
        (
            str(tokenizer.decode(row.input_ids)),
            str(tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX])),
            row.value,
        )
        for row in found.sequences
    ]


CHAT = [user("q"), says("a")]
FORMS: dict[str, Row] = {
    "TRL: messages": {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
    "TRL: JSON text": {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:]), "label": True},
    "asked in messages, answered in a string": {"prompt": CHAT[:1], "completion": "a", "label": True},
    "an answer that is one message": {"prompt": CHAT[:1], "completion": says("a"), "label": True},
    "a prompt within the completion": {"prompt": CHAT[:1], "completion": CHAT, "label": True},
    "a prompt as its own text": {"prompt": "q", "completion": CHAT, "label": True},
    "no prompt beside a conversation": {"completion": CHAT, "label": True},
    "ms-swift: a conversation": {"messages": CHAT, "label": True},
    "LLaMA-Factory: ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "kto_tag": True,
    },
    "LLaMA-Factory: instructions": {"instruction": "q", "input": "", "output": "a", "kto_tag": True},
}  # fmt: skip


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_answer(row: Row, prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    (found,) = read(prepared([row]), tokenizer)
    assert found == (f"<bos><start_of_turn>user:q{END}<start_of_turn>assistant:a{END}", f"a{END}", 1.0)


def test_strings_are_plain_text(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    (found,) = read(prepared([{"prompt": "2 + 2 =", "completion": " 5", "label": False}]), tokenizer)
    assert (found[0].removeprefix("<bos>").startswith("2 + 2 = 5"), found[2]) == (True, -1.0)
    assert found[1].startswith(" 5")


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", " 1 ", "good", "desirable", "chosen", "yes"])
def test_good_labels(label: Any, prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    assert read(prepared([{"messages": CHAT, "label": label}]), tokenizer)[0][2] == 1.0


@pytest.mark.parametrize("label", [False, 0, -1, 0.0, "false", "FALSE", "0", "-1", "bad", "undesirable", "rejected"])
def test_bad_labels(label: Any, prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    assert read(prepared([{"messages": CHAT, "label": label}]), tokenizer)[0][2] == -1.0


def test_a_column_of_another_name_is_mapped(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    found = prepared([{"messages": CHAT, "thumbs": "good"}], source={"columns": {"label": "thumbs"}})
    assert read(found, tokenizer)[0][2] == 1.0


def test_a_pair_is_one_answer_of_either_label(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    found = prepared([{"prompt": CHAT[:1], "chosen": [says("good")], "rejected": [says("bad")]}] * 2)
    assert [(answer, label) for _, answer, label in read(found, tokenizer)] == [
        (f"good{END}", 1.0),
        (f"bad{END}", -1.0),
    ] * 2
    (ledger,) = found.ledgers
    assert (ledger.rows, ledger.made_rows, ledger.kept_rows, ledger.counts["pairs_split"]) == (2, 4, 4, 2)


def test_a_pair_of_strings_without_a_prompt_is_one_answer_of_either_label(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = prepared([{"chosen": "It is four.", "rejected": "It is forty."}])
    assert [(answer.rpartition(".")[0], label) for _, answer, label in read(found, tokenizer)] == [
        (" four", 1.0),
        (" forty", -1.0),
    ]
    assert [finding.code for finding in found.findings] == ["FT460"]


def test_only_the_last_answer_is_scored_and_no_tool_s_turn_in_it(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = [
        user("q"), says("earlier"), user("and?"), says("I look"), {"role": "tool", "content": "seen"}, says("so"),
    ]  # fmt: skip
    (found,) = read(prepared([{"messages": chat, "label": False}]), tokenizer)
    assert found[1] == f"I look{END}so{END}"
    (whole,) = read(prepared([{"messages": chat, "label": False}], loss_on="assistant"), tokenizer)
    assert whole[1] == f"earlier{END}I look{END}so{END}"


REFUSED: dict[str, tuple[Row, str]] = {
    "no label": ({"prompt": "q", "completion": "a"}, "column 'label' is missing; rows with prompt and completion are"),
    "an empty label": ({"messages": CHAT, "label": None, "id": 1}, "'label' says nothing"),
    "a rating": ({"messages": CHAT, "label": 3}, "'label' is 3; write true for a wanted answer"),
    "two labels": ({"messages": CHAT, "label": True, "kto_tag": "false"}, "'label' and 'kto_tag' contradict"),
    "no answer": ({"label": True, "text": "a"}, "the row has a label and no answer"),
    "an empty answer": ({"prompt": "q", "completion": "", "label": True}, "'completion' must be a string"),
    "an empty turn": ({"messages": [user("q"), says("")], "label": True}, "there is no answer after the prompt"),
    "a question": ({"messages": [*CHAT, user("q")], "label": True}, "there is no answer after the prompt"),
    "no prompt": ({"completion": "a", "label": True}, "column 'prompt' is missing"),
    "a prompt without an answer": ({"prompt": CHAT[:1], "completion": CHAT[:1], "label": True}, "there is no answer"),
    "a prompt alone": ({"completion": CHAT[:1], "label": True}, "no assistant turn"),
    "no messages": ({"prompt": "q", "completion": 5, "label": True}, "must be a list"),
    "text and turns": ({"prompt": "q", "completion": [says("a")], "label": True}, "must both be strings"),
    "an equal pair": (
        {"prompt": CHAT[:1], "chosen": [says("a")], "rejected": [says("a")]},
        "chosen and rejected are the same",
    ),
}


@pytest.mark.parametrize(("row", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_labelled_is_refused_by_row(row: Row, said: str, prepared: Prepare) -> None:
    with pytest.raises(FtcliError) as caught:
        prepared([{"messages": CHAT, "label": 1}, row])
    (finding,) = caught.value.findings
    assert (finding.code, str(finding.origin).rpartition("/")[2], caught.value.exit_code) == ("FT412", "d.jsonl:2", 4)
    assert said in finding.message


#: Shows reasoning of the turns after the last question alone, as Qwen 3's does.
FORGETFUL = (
    "{{ bos_token }}{% set asked = messages | map(attribute='role') | list %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}:"
    "{% if m.reasoning_content and 'user' not in asked[loop.index0:] %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant:{% endif %}"
)


def test_an_answer_that_the_template_shows_in_two_forms_is_no_single_answer(prepared: Prepare, tmp_path: Path) -> None:
    """It would be two rows, each with the whole label."""
    file = tmp_path / "t.jinja"
    file.write_text(FORGETFUL, encoding="utf-8")
    one, two = ({**says(text), "reasoning_content": text.upper()} for text in ("one", "two"))
    row = {"prompt": [user("a")], "completion": [one, user("b"), two], "label": True}
    with pytest.raises(FtcliError, match="it would be several rows"):
        prepared([row], chat_template=str(file))
    assert len(prepared([row], chat_template=str(file), history="last").sequences) == 1


def test_bad_answers_are_none_to_compare_with(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """As tasks on held-out rows ask them."""
    path = tmp_path / "d.jsonl"
    given = [{"messages": [user(f"q{n}"), says(f"a{n}")], "label": n % 2} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    data = DataConfig.model_validate({"format": "labelled", "max_seq_len": 300, "train": [], "eval": [str(path)]})
    room = room_of_task(data, GenerateConfig(max_new_tokens=4))
    asked, _ = asked_rows(data.eval, data, tokenizer, room, offline=True)
    assert [one.prompt.reference for one in asked] == ["a1", "a3"]
