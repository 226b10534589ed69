"""Where a prompt ends and an answer begins, in tokens; and what is said of rows that are rendered otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ftcli.assets import asset
from ftcli.data.answers import BoundaryTokenizer, Rendered
from ftcli.data.prepare import PreparedData
from ftcli.labels import IGNORE_INDEX

Prepare = Callable[..., PreparedData]
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture
def joining() -> Any:
    """The byte tokenizer with a token for " blue", which begins in a prompt that ends with a space."""
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    space = next(token for token, i in vocabulary.items() if i == 8 + ord(" "))
    merged = space
    for letter in "blue":
        document["model"]["merges"].append([merged, letter])
        merged += letter
        vocabulary[merged] = len(vocabulary)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(document))
    return tokenizer


def trained(tokenizer: PreTrainedTokenizerBase, found: PreparedData) -> list[str]:
    tokens = found.sequences[0]
    pairs = zip(tokens.input_ids, tokens.labels, strict=True)
    return [tokenizer.decode([i]) for i, label in pairs if label != IGNORE_INDEX]


def test_a_completion_that_begins_in_the_prompts_last_token_is_trained_whole(prepared: Prepare, joining: Any) -> None:
    assert len(joining(" blue", add_special_tokens=False)["input_ids"]) == 1
    found = prepared([{"prompt": "The sky is ", "completion": "blue"}], tokenizer=joining)
    assert "".join(trained(joining, found)) == "blue<end_of_turn>"
    start = found.sequences[0].labels.index(found.sequences[0].input_ids[-5])
    assert found.sequences[0].input_ids[:start] == joining("The sky is ")["input_ids"]
    assert "answers_joined" not in found.ledgers[0].counts
    kept = prepared([{"prompt": "The sky is", "completion": " blue"}], tokenizer=joining)
    assert trained(joining, kept) == [" blue", "<end_of_turn>"]


def test_an_earlier_answer_whose_tokens_differ_in_history_has_a_row_of_its_own(prepared: Prepare, joining: Any) -> None:
    joining.chat_template = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<end_of_turn>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("q", "blue", "r", "red"))
    ]
    found = prepared([{"messages": turns}], tokenizer=joining)
    assert found.ledgers[0].counts["turns_split"] == 1
    texts = [
        "".join(joining.decode([i]) for i, b in zip(t.input_ids, t.labels, strict=True) if b >= 0)
        for t in found.sequences
    ]
    assert sorted(texts) == ["blue<end_of_turn>", "red<end_of_turn>"]
    last = prepared([{"messages": turns}], tokenizer=joining, history="last")
    assert (len(last.sequences), last.ledgers[0].counts["turns_untrained"]) == (1, 1)


def test_a_tokenizer_that_writes_a_space_before_a_text_keeps_the_text(joining: Any) -> None:
    """As SentencePiece does: "blue" alone is "▁blue", which would put a second space before it."""
    pieces = ["<unk>", "</s>", "<0x0A>", *"▁theskyiblur", "▁blue", "blue", "▁sky"]
    model = models.BPE(
        {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}, [], byte_fallback=True, unk_token="<unk>"
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    text = "the sky is blue</s>"
    ((one,),) = BoundaryTokenizer(tokenizer).tokenized([Rendered(text, ((11, len(text)),), answers=True)])
    assert one.apart
    assert tokenizer.decode(one.ids) == text
    start = next(n for n, (a, _) in enumerate(one.offsets) if a >= 11)
    assert one.ids[:start] == tokenizer("the sky is ", add_special_tokens=False)["input_ids"]


def test_a_token_that_cannot_be_taken_apart_is_told() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "skyblue": 2, "sky": 3, "the": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    text = "the skyblue</s>"
    ((one,),) = BoundaryTokenizer(tokenizer).tokenized([Rendered(text, ((7, len(text)),), answers=True)])
    assert not one.apart


def test_text_that_ends_in_eos_gets_no_second_one(prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase) -> None:
    for fields in ({"text": "abc"}, {"prompt": "ab", "completion": "c"}):
        once = prepared([fields]).sequences[0]
        written = {**fields, list(fields)[-1]: f"{list(fields.values())[-1]}{bytes_tokenizer.eos_token}"}
        again = prepared([written]).sequences[0]
        assert (once.input_ids, once.labels) == (again.input_ids, again.labels)
        assert once.input_ids.count(int(bytes_tokenizer.eos_token_id)) == 1


def test_an_opening_answer_is_named(prepared: Prepare, tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end_of_turn>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = [{"role": "assistant", "content": "Hello!"}, *CHAT["messages"]]
    found = prepared([{"messages": chat}], chat_template=str(path))
    assert found.ledgers[0].counts["turns_opening"] == 1
    (note,) = [finding for finding in found.findings if finding.code == "FT445"]
    assert "1 answers that open a conversation bear no loss" in note.message


def test_chats_and_plain_prompts_in_one_mixture_are_said_to_differ(prepared: Prepare) -> None:
    plain = {"prompt": "1+1=", "completion": "2"}
    (warning,) = prepared([CHAT], [plain]).findings
    assert (warning.code, warning.severity) == ("FT446", "warning")
    lists = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
    assert prepared([CHAT], [lists]).findings == ()
    assert prepared([CHAT], [{"text": "abc"}]).findings == ()


def test_what_became_of_earlier_answers_is_said_and_counted(prepared: Prepare, tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ '(thinks)' if m.role == 'assistant' and loop.last }}{{ m.content }}"
        "<end_of_turn>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("q", "a", "r", "b"))]
    split = prepared([{"messages": turns}], chat_template=str(path))
    ledger = split.ledgers[0]
    assert (ledger.rows, ledger.made_rows, ledger.kept_rows, ledger.counts["turns_split"]) == (1, 2, 2, 1)
    assert [(f.code, f.severity) for f in split.findings] == [("FT444", "note")]
    last = prepared([{"messages": turns}], chat_template=str(path), history="last")
    assert (last.ledgers[0].kept_rows, last.ledgers[0].counts["turns_untrained"]) == (1, 1)
    assert "bear no loss" in last.findings[0].message


def test_history_and_reasoning_are_part_of_the_cache_key(prepared: Prepare, tmp_path: Any) -> None:
    prepared([CHAT], cache_dir=tmp_path / "cache")
    assert prepared([CHAT], cache_dir=tmp_path / "cache").from_cache == (True,)
    for change in ({"history": "last"}, {"reasoning": "drop"}, {"chat_template_kwargs": {"x": 1}}):
        assert prepared([CHAT], cache_dir=tmp_path / "cache", **change).from_cache == (False,)


def test_reasoning_that_is_dropped_is_counted_and_said(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [CHAT["messages"][0], {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    found = prepared([{"messages": turns}], reasoning="drop")
    assert found.ledgers[0].counts["reasoning_dropped"] == 1
    assert "1 answers are trained without their reasoning" in found.findings[0].message
    assert found.sequences[0].input_ids == prepared([CHAT]).sequences[0].input_ids


def test_what_is_done_to_a_row_that_is_refused_is_not_counted(prepared: Prepare, tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if m.content == 'endless' else '<end_of_turn>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    opening = [{"role": "assistant", "content": "Hello!"}, CHAT["messages"][0]]
    rows = [{"messages": [*opening, {"role": "assistant", "content": text}]} for text in ("endless", "fine")]
    ledger = prepared(rows, chat_template=str(path), max_bad_rows=1).ledgers[0]
    assert (ledger.bad_rows, ledger.counts["turns_opening"], ledger.counts["chats"]) == (1, 1, 1)
