"""Rows of pairs: every form that a pair may have, what is scored of each, and every refusal by file and row."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.data_utils import extract_prompt

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.data.prepare import PreparedData, prepare
from ftcli.errors import Finding, FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.pairs import pair_epochs, pair_findings

Row = dict[str, Any]
Prepare = Callable[..., PreparedData]
END = "<end_of_turn>"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
#: Shows what Gemma's own does not: system and tool turns, and tools.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}:{{ m.content | trim }}<end_of_turn>{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant:{% endif %}"
)


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def says(text: str) -> Row:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Row:
    return {"role": "tool", "content": text}


#: A pair as messages.
PAIR: Row = {"prompt": [user("q")], "chosen": [says("good")], "rejected": [says("bad")]}


def stops_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids([str(tokenizer.eos_token), END]))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    return found


@pytest.fixture(scope="module")
def showing(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """With the template that shows every turn and tools."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Prepare:
    """``prepared(rows, source options, data options)``."""

    def _prepared(
        rows: list[Row], name: str = "d.jsonl", source: Row | None = None, by: Any = None, **options: Any
    ) -> PreparedData:
        path = tmp_path / name
        if path.suffix == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        given = {
            "format": "preference",
            "max_seq_len": 300,
            "train": [{"path": str(path), **(source or {})}],
            **options,
        }
        data = DataConfig.model_validate(given)
        return prepare(data.train, data, by or tokenizer, stops_of(tokenizer))

    return _prepared


def texts(found: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Whole rows, and what is scored of each."""
    return [
        (
            str(tokenizer.decode(row.input_ids)),
            str(tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX])),
        )
        for row in found.sequences
    ]


def scored(found: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [answer for _, answer in texts(found, tokenizer)]


def refusal(prepared: Prepare, rows: list[Row], **options: Any) -> list[tuple[str, str]]:
    """Where and why each row is refused."""
    with pytest.raises(FtcliError) as caught:
        prepared(rows, **options)
    assert caught.value.exit_code == 4
    return [
        (str(finding.origin).rpartition("/")[2], f"{finding.code} {finding.message}")
        for finding in caught.value.findings
    ]


FORMS: dict[str, Row] = {
    "prompt and messages": PAIR,
    "prompt within both answers": {
        "prompt": [user("q")], "chosen": [user("q"), says("good")], "rejected": [user("q"), says("bad")],
    },
    "prompt that both answers begin with": {"chosen": [user("q"), says("good")], "rejected": [user("q"), says("bad")]},
    "prompt as its own text": {
        "prompt": "q", "chosen": [user("q"), says("good")], "rejected": [user("q"), says("bad")],
    },
    "asked in messages, answered in strings": {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
    "answers that are one message": {"prompt": [user("q")], "chosen": says("good"), "rejected": says("bad")},
    "a prompt that is one message": {"prompt": user("q"), "chosen": [says("good")], "rejected": [says("bad")]},
    "all of them one message": {"prompt": user("q"), "chosen": says("good"), "rejected": says("bad")},
    "a prompt that is one message, and strings": {"prompt": user("q"), "chosen": "good", "rejected": "bad"},
    "JSON text": {name: json.dumps(value) for name, value in PAIR.items()},
    "LLaMA-Factory's conversations": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"},
    },
    "LLaMA-Factory's conversations, answered in strings": {
        "conversations": [{"from": "human", "value": "q"}], "chosen": "good", "rejected": "bad",
    },
    "whole conversations beside an instruction": {
        "instruction": "answer:", "chosen": [user("q"), says("good")], "rejected": [user("q"), says("bad")],
    },
    "LLaMA-Factory's instructions": {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    "axolotl's questions": {"system": "", "question": "q", "chosen": "good", "rejected": "bad"},
    "axolotl's responses": {"instruction": "q", "chosen_response": "good", "rejected_response": "bad"},
    "ms-swift's other response": {"messages": [user("q"), says("good")], "rejected_response": "bad"},
    "ms-swift's other message": {"messages": [user("q"), says("good")], "rejected_response": says("bad")},
    "ms-swift's other messages": {
        "messages": [user("q"), says("good")], "rejected_messages": [user("q"), says("bad")],
    },
}  # fmt: skip


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_pair(row: Row, prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    wanted = texts(prepared([PAIR]), tokenizer)
    assert [answer for _, answer in wanted] == ["good" + END, "bad" + END]
    assert texts(prepared([row]), tokenizer) == wanted


def test_a_prompt_of_messages_as_json_text_is_no_plain_text(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    """As a table holds it beside answers in strings; the model would be shown JSON."""
    found = prepared([{"prompt": json.dumps([user("q")]), "chosen": "good", "rejected": "bad"}], "d.csv")
    assert texts(found, tokenizer) == texts(prepared([PAIR]), tokenizer)


def test_tables_hold_messages_as_json_text(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {name: json.dumps(value) for name, value in PAIR.items()}
    found = prepared([row, {**row, "rejected": json.dumps([says("worse")])}], "d.csv")
    assert scored(found, tokenizer) == ["good" + END, "bad" + END, "good" + END, "worse" + END]
    assert found.sequences[0].row.number == 2  # the line of the file


def test_strings_have_no_template_and_end_with_the_end_of_sequence(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = texts(prepared([{"prompt": "Two and two is", "chosen": " four", "rejected": " five"}]), tokenizer)
    eos, bos = tokenizer.eos_token, tokenizer.bos_token
    assert found == [
        (f"{bos}Two and two is four{eos}", f" four{eos}"),
        (f"{bos}Two and two is five{eos}", f" five{eos}"),
    ]


#: Two strings without a prompt: what both begin with, up to a whole word, and whether TRL ends the prompt there.
IMPLICIT: dict[str, tuple[str, str, str, bool]] = {
    "words": ("The sky is", " blue.", " grey.", True),
    "a line of its own": ("Human: 2?\n\nAssistant:\n", "four", "nine", True),
    "two spaces": ("one  two ", " red", " blue", True),
    "after a mark": ("<|assistant|>", "Yes", "No", True),
    "Chinese": ("\u7b54\u6848\u662f", "\u56db\u3002", "\u4e94\u3002", True),
    "parts of words": ("It is", " forty", " four", False),  # TRL: "It is fo"
    "numbers": ("It is", " 3.14", " 3.15!", False),
    "a word that goes on": ("I", " don't", " don", False),
    "an accent": ("the", " cafe\u0301 is", " cafe is", False),
}


@pytest.mark.parametrize(("prompt", "chosen", "rejected", "as_in_trl"), IMPLICIT.values(), ids=IMPLICIT)
def test_strings_without_a_prompt_have_the_words_that_both_begin_with(
    prompt: str, chosen: str, rejected: str, as_in_trl: bool, prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    found, stated = prepared([row]), prepared([{"prompt": prompt, "chosen": chosen, "rejected": rejected}], "s.jsonl")
    assert texts(found, tokenizer) == texts(stated, tokenizer)
    (told,) = found.findings
    assert (told.code, told.severity) == ("FT460", "note")
    assert f"d.jsonl:1: {prompt[-24:]!r}, before {chosen!r} and {rejected!r}" in told.message
    assert not stated.findings
    assert (extract_prompt(row)["prompt"] == prompt) is as_in_trl


def test_a_prompt_that_nobody_wrote_is_told_once(prepared: Prepare) -> None:
    rows = [{"chosen": f"{n} is one", "rejected": f"{n} is two"} for n in range(3)]
    (told,) = [finding for finding in prepared([PAIR, *rows]).findings if finding.code == "FT460"]
    assert "3 rows have no `prompt`" in told.message
    assert "d.jsonl:2: '0 is', before ' one' and ' two'" in told.message


def with_tokens(tokenizer: PreTrainedTokenizerBase, *words: str) -> PreTrainedTokenizerBase:
    """The byte tokenizer with a token for each of these words."""
    own = copy.deepcopy(tokenizer)
    document = json.loads(own.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for word in words:
        merged, *others = own.tokenize(word)
        for piece in others:
            document["model"]["merges"].append([merged, piece])
            merged += piece
            vocabulary.setdefault(merged, len(vocabulary))
    own._tokenizer = Tokenizer.from_str(json.dumps(document))
    return own


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("we say it is so.", "we say it is not", "we say it"),  # " is so" is one token
        ("we say it is so.", "we say it is soon", "we say it"),
    ],
)
def test_no_token_reaches_from_an_implicit_prompt_into_an_answer(
    chosen: str, rejected: str, prompt: str, prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prompt and answer have the tokens of the whole text, and the prompt the same ones in both."""
    joined = with_tokens(tokenizer, " is so")
    rows = prepared([{"chosen": chosen, "rejected": rejected}], by=joined).sequences
    for row, text in zip(rows, (chosen, rejected), strict=True):
        assert (
            row.input_ids == joined(f"{joined.bos_token}{text}{joined.eos_token}", add_special_tokens=False).input_ids
        )
        first = next(n for n, label in enumerate(row.labels) if label != IGNORE_INDEX)
        assert row.input_ids[:first] == joined(f"{joined.bos_token}{prompt}", add_special_tokens=False).input_ids
        assert row.labels[first:] == row.input_ids[first:]


def test_strings_whose_first_words_are_within_a_token_have_no_prompt(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    ((where, said),) = refusal(
        prepared, [{"chosen": "it is so", "rejected": "it is not"}], by=with_tokens(tokenizer, "it is so")
    )
    assert where == "d.jsonl:1"
    assert said.startswith("FT412 chosen and rejected have no tokens in common")


def test_only_what_the_assistant_says_after_the_prompt_is_scored(
    prepared: Prepare, showing: PreTrainedTokenizerBase
) -> None:
    """User and tool turns within an answer are not scored; turns of the prompt are not, whoever's they are."""
    row = {
        "prompt": [user("a"), says("earlier"), user("b")],
        "chosen": [says("one"), tool("result"), says("two"), user("more?"), says("three")],
        "rejected": [says("none"), user("why?"), says("because")],
    }
    (whole, chosen), (_, rejected) = texts(prepared([row], by=showing), showing)
    assert "earlier" in whole
    assert "result" in whole
    assert chosen == f"one{END}two{END}three{END}"
    assert rejected == f"none{END}because{END}"


def test_all_assistant_turns_are_scored_where_that_is_asked_for(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {**PAIR, "prompt": [user("a"), says("earlier"), user("b")]}
    assert scored(prepared([row], loss_on="assistant"), tokenizer) == [
        f"earlier{END}good{END}",
        f"earlier{END}bad{END}",
    ]


#: Shows reasoning of the turns after the last question alone, as Qwen 3's does.
FORGETFUL = (
    "{{ bos_token }}{% set asked = messages | map(attribute='role') | list %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}:"
    "{% if m.reasoning_content and 'user' not in asked[loop.index0:] %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant:{% endif %}"
)


def test_reasoning_is_scored_where_generation_shows_it(prepared: Prepare, showing: PreTrainedTokenizerBase) -> None:
    """An answer of several turns whose first one is rendered otherwise than it was generated is two rows: refused."""
    forgetful = copy.deepcopy(showing)
    forgetful.chat_template = FORGETFUL
    thought = {**says("one"), "reasoning_content": "first"}, {**says("two"), "reasoning_content": "second"}
    row = {"prompt": [user("a"), thought[0], user("b")], "chosen": [thought[1]], "rejected": [says("bad")]}
    (whole, chosen), _ = texts(prepared([row], by=forgetful), forgetful)
    assert chosen == f"<think>second</think>two{END}"
    assert "first" not in whole
    turns = {**PAIR, "chosen": [thought[0], user("b"), thought[1]]}
    ((where, said),) = refusal(prepared, [turns], by=forgetful)
    assert where == "d.jsonl:1"
    assert "use `data.history: last`" in said
    found = scored(prepared([turns], by=forgetful, history="last"), forgetful)
    assert found == [f"<think>second</think>two{END}", f"bad{END}"]


def test_tools_are_shown_in_both_rows(prepared: Prepare, showing: PreTrainedTokenizerBase) -> None:
    found = texts(prepared([{**PAIR, "tools": TOOLS}], by=showing), showing)
    assert all('"look"' in whole for whole, _ in found)
    assert [answer for _, answer in found] == ["good" + END, "bad" + END]


def test_columns_are_mapped_and_removed(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase, showing: PreTrainedTokenizerBase
) -> None:
    renamed = {"question": PAIR["prompt"], "chosen_response": PAIR["chosen"], "other": PAIR["rejected"]}
    mapping = {"prompt": "question", "chosen": "chosen_response", "rejected": "other"}
    assert scored(prepared([renamed], source={"columns": mapping}), tokenizer) == ["good" + END, "bad" + END]
    wrong = {**FORMS["prompt that both answers begin with"], "prompt": [user("something else")]}
    kept = prepared([wrong], "with.jsonl", by=showing)
    left = prepared([wrong], "without.jsonl", {"remove_columns": ["prompt"]}, showing)
    assert ["something else" in texts(found, showing)[0][0] for found in (kept, left)] == [True, False]


@pytest.mark.parametrize("scores", [{"score_chosen": 8.5, "score_rejected": 3.0}, {"score": 1, "label": False}])
def test_columns_that_rate_the_answers_of_a_pair_are_only_named(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase, scores: Row
) -> None:
    """As in UltraFeedback: a pair says itself which of its answers is bad."""
    rows = [
        {**PAIR, **scores},
        {**PAIR, **{name: 7 if value is not False else value for name, value in scores.items()}},
    ]
    assert len(scored(prepared(rows), tokenizer)) == 4


BROKEN: dict[str, tuple[Row, str]] = {
    "equal messages": ({**PAIR, "rejected": PAIR["chosen"]}, "chosen and rejected are the same"),
    "equal strings": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    "empty string": ({"prompt": "q", "chosen": "a", "rejected": ""}, "'rejected' must be a string that is not empty"),
    "empty answer": ({**PAIR, "chosen": [says("")]}, "chosen has no answer after the prompt"),
    "no answer": ({**PAIR, "rejected": [user("q2")]}, "rejected has no answer after the prompt"),
    "empty list": ({**PAIR, "rejected": []}, "a list with at least one message"),
    "null": ({**PAIR, "rejected": None}, "a list with at least one message"),
    "different prompts": (
        {"chosen": [user("q"), says("a")], "rejected": [user("p"), says("b")]},
        "they answer different prompts",
    ),
    "a prompt that is not theirs": (
        {"prompt": "other", "chosen": [user("q"), says("a")], "rejected": [user("q"), says("b")]},
        "`prompt` is not among the messages",
    ),
    "strings that begin with different words": (
        {"chosen": "it is", "rejected": "its"},
        "begin with no word in common that could be their prompt",
    ),
    "strings that begin with a line break alone": ({"chosen": "\na", "rejected": "\nb"}, "no word in common"),
    "equal strings without a prompt": ({"chosen": "q a", "rejected": "q a"}, "chosen and rejected are the same"),
    "a string that begins with the other": (
        {"chosen": "q: a", "rejected": "q: a, b"},
        "rejected begins with all of chosen, which leaves chosen no answer",
    ),
    "a string within which the other ends": (
        {"chosen": "q: a, b", "rejected": "q: a"},
        "chosen begins with all of rejected, which leaves rejected no",
    ),
    "a string and messages": ({**PAIR, "chosen": "good"}, "must both be strings, or both lists of messages"),
    "no rejected answer": ({"prompt": "q", "chosen": "a"}, "column 'rejected' is missing"),
    "broken JSON": ({**PAIR, "chosen": '[{"role": ', "rejected": '[{"role": '}, "text that is not JSON"),
}


@pytest.mark.parametrize(("row", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_pair_is_refused_by_file_and_row(row: Row, reason: str, prepared: Prepare) -> None:
    ((where, said),) = refusal(prepared, [PAIR, row])
    assert where == "d.jsonl:2"
    assert said.startswith("FT412 ")
    assert reason in said


def test_answers_that_are_equal_once_the_template_has_trimmed_them_are_refused(
    prepared: Prepare, showing: PreTrainedTokenizerBase
) -> None:
    """They were dropped without a word, as those are that a cut makes equal."""
    ((where, said),) = refusal(prepared, [PAIR, {**PAIR, "rejected": [says(" good\n")]}], by=showing)
    assert where == "d.jsonl:2"
    assert said.startswith("FT412 its answers are the same once they are rendered")


def test_a_broken_pair_may_be_skipped(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    found = prepared([PAIR, {**PAIR, "rejected": PAIR["chosen"]}, PAIR], max_bad_rows=1)
    assert scored(found, tokenizer) == 2 * ["good" + END, "bad" + END]
    assert found.ledgers[0].bad_rows == 1


def test_rows_for_another_method_say_which(prepared: Prepare) -> None:
    (_, said), *_ = refusal(prepared, [{"messages": [user("q"), says("a")]}])
    assert "column 'chosen' is missing" in said
    assert "`train.method: sft`" in said


LONG: Row = {**PAIR, "rejected": [says("bad " * 30)]}


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_of_which_one_answer_is_too_long_goes_as_one(
    side: str, prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    long = LONG if side == "rejected" else {**PAIR, "chosen": LONG["rejected"]}
    rows = [PAIR, long, PAIR]
    ((where, said),) = refusal(prepared, rows, max_seq_len=80)
    assert where == "d.jsonl:2"
    assert said.startswith("FT431")
    dropped = prepared(rows, "a.jsonl", max_seq_len=80, overlong="drop")
    assert scored(dropped, tokenizer) == 2 * ["good" + END, "bad" + END]
    assert (dropped.ledgers[0].dropped_rows, dropped.ledgers[0].kept_rows) == (2, 4)
    cut = prepared(rows, "b.jsonl", max_seq_len=80, overlong="truncate")
    assert len(cut.sequences) == 6
    assert max(len(row.input_ids) for row in cut.sequences) == 80
    assert scored(cut, tokenizer)[:2] == scored(cut, tokenizer)[4:] == ["good" + END, "bad" + END]


def test_pairs_that_truncation_makes_equal_or_leaves_without_an_answer_go(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    same = "the same words for a while, and then "
    alike = {**PAIR, "chosen": [says(same + "good")], "rejected": [says(same + "bad")]}
    asked = {**PAIR, "prompt": [user("q" * 100)]}
    found = prepared([alike, PAIR, asked], max_seq_len=50, overlong="truncate")
    assert scored(found, tokenizer) == ["good" + END, "bad" + END]
    assert found.ledgers[0].dropped_rows == 4


def findings_of(found: PreparedData) -> list[Finding]:
    return list(pair_findings(found.sequences))


def test_a_pair_that_is_there_the_other_way_round_too_is_told(prepared: Prepare) -> None:
    turned = {**PAIR, "chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
    other = {**turned, "prompt": [user("another question")]}
    assert findings_of(prepared([PAIR, PAIR, other])) == []
    (finding,) = findings_of(prepared([PAIR, other, turned], "b.jsonl"))
    assert (finding.code, finding.severity) == ("FT458", "warning")
    assert str(finding.origin).endswith("b.jsonl:3")
    assert "b.jsonl:1 rejects" in finding.message


def test_many_pairs_that_are_there_both_ways_are_counted(prepared: Prepare) -> None:
    asked = [{**PAIR, "prompt": [user(f"{n}")]} for n in range(9)]
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in asked]
    found = findings_of(prepared(asked + turned))
    assert [finding.code for finding in found] == ["FT458"] * 6
    assert [str(finding.origin).rpartition(":")[2] for finding in found[:5]] == ["10", "11", "12", "13", "14"]
    assert found[5].message == "and 4 more pairs like these"


def test_answers_that_give_themselves_away_by_length_are_told(prepared: Prepare) -> None:
    def pairs(longer: int, shorter: int, alike: int = 0) -> list[Row]:
        made = [{**PAIR, "prompt": [user(f"{n}")]} for n in range(longer)]
        made += [{**PAIR, "prompt": [user(f"{n}")], "chosen": [says("ok")]} for n in range(longer, longer + shorter)]
        return made + [{**PAIR, "prompt": [user(f"{n}")], "chosen": [says("yes")]} for n in range(100, 100 + alike)]

    (finding,) = findings_of(prepared(pairs(21, 9, alike=40)))
    assert (finding.code, finding.severity) == ("FT459", "warning")
    assert "70% of the pairs" in finding.message
    assert findings_of(prepared(pairs(19, 11), "b.jsonl")) == []  # 63%
    assert findings_of(prepared(pairs(28, 0, alike=40), "c.jsonl")) == []  # too few to say


def test_an_epoch_holds_pairs_and_weights_are_shares_of_them(prepared: Prepare, tmp_path: Path) -> None:
    rows = [{**PAIR, "prompt": [user(f"{n}")]} for n in range(12)]
    table = prepared(rows).sequences
    epochs = pair_epochs(table, None, seed=3)
    assert (epochs.units, len(epochs)) == (12, 12)
    order = epochs.order(0)
    assert sorted(order) == list(range(12))
    assert order != epochs.order(1)
    for unit in order:
        members = epochs.members(unit)
        assert [row.row.number for row in members] == [unit + 1, unit + 1]
        assert members[0].input_ids != members[1].input_ids


def test_weights_of_files_are_shares_of_pairs(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for name, count in (("a", 4), ("b", 8)):
        rows = [{**PAIR, "prompt": [user(f"{name}{n}")]} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"format": "preference", "max_seq_len": 300, "train": [str(tmp_path / f"{name}.jsonl") for name in "ab"]}
    data = DataConfig.model_validate(given)
    table = prepare(data.train, data, tokenizer, stops_of(tokenizer)).sequences
    epochs = pair_epochs(table, [3.0, 1.0], seed=0)
    order = epochs.order(0)
    assert len(order) == 32  # 8 of the second file are a quarter
    assert sum(unit < 4 for unit in order) == 24
    assert all(order.count(unit) == 1 for unit in range(4, 12))


def test_prompts_of_other_tools_are_whole(prepared: Prepare, showing: PreTrainedTokenizerBase) -> None:
    """System, earlier turns, an instruction's input, and calls in turns of `from` and `value`."""
    wanted = [{"role": "system", "content": "s"}, user("a"), says("b"), user("q\n\nx")]
    answers: Row = {"chosen": "good", "rejected": "bad"}
    instructed: Row = {"instruction": "q", "input": "x", "system": "s", "history": [["a", "b"]], **answers}
    turns = [("human", "a"), ("gpt", "b"), ("human", "q\n\nx")]
    told: Row = {"conversations": [{"from": who, "value": said} for who, said in turns], "system": "s", **answers}
    plain = texts(prepared([{"prompt": wanted, **answers}], by=showing), showing)
    assert texts(prepared([instructed], by=showing), showing) == plain
    assert texts(prepared([told], by=showing), showing) == plain


def test_a_conversation_that_ends_without_an_answer_has_no_other_one(prepared: Prepare) -> None:
    ((_, said),) = refusal(prepared, [{"messages": [user("q")], "rejected_response": "bad"}])
    assert "ends without an answer" in said
