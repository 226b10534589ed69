"""Masks token by token, lengths by policy, and an account that adds up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.data.collate import padded_batch
from ftcli.data.ledger import quantiles
from ftcli.data.prepare import PreparedData, prepare
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX, end_at_stop, labels_of
from ftcli.rows.row import Row


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))


def stop_of(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.convert_tokens_to_ids("<end_of_turn>"))


def run(tokenizer: PreTrainedTokenizerBase, folder: Path, rows: list[dict[str, Any]], **data: Any) -> PreparedData:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = DataConfig.model_validate({"train": [str(path)], "max_seq_len": 200, **data})
    return prepare(config.train, config, tokenizer, (int(tokenizer.eos_token_id), stop_of(tokenizer)))


def turns(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def trained(tokenizer: PreTrainedTokenizerBase, prepared: PreparedData) -> str:
    sequence = prepared.sequences[0]
    return "".join(
        tokenizer.decode([i]) if label != IGNORE_INDEX else "·"
        for i, label in zip(sequence.input_ids, sequence.labels, strict=True)
    )


def test_every_assistant_turn_is_trained_with_its_stop_token(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prepared = run(tokenizer, tmp_path, [turns("hi", "yes", "and", "no")])
    assert trained(tokenizer, prepared).replace("·", "") == "yes<end_of_turn>no<end_of_turn>"
    for index, label in enumerate(prepared.sequences[0].labels):
        assert label in (IGNORE_INDEX, prepared.sequences[0].input_ids[index])


def test_completion_trains_the_last_turn_only(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    prepared = run(tokenizer, tmp_path, [turns("hi", "yes", "and", "no")], loss_on="completion")
    assert trained(tokenizer, prepared).replace("·", "") == "no<end_of_turn>"


def test_all_trains_everything_after_the_first_token_up_to_the_stop(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    sequence = run(tokenizer, tmp_path, [turns("hi", "yes")], loss_on="all").sequences[0]
    end = len(sequence.input_ids) - sequence.input_ids[::-1].index(stop_of(tokenizer))
    assert sequence.labels == [IGNORE_INDEX, *sequence.input_ids[1:end], *[IGNORE_INDEX] * (len(sequence.labels) - end)]
    assert tokenizer.decode(sequence.input_ids[end:]) == "\n"


def test_prompt_completion_and_text_end_with_eos(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pair = run(tokenizer, tmp_path, [{"prompt": "1+1=", "completion": "2"}])
    assert trained(tokenizer, pair).replace("·", "") == f"2{tokenizer.eos_token}"
    text = run(tokenizer, tmp_path, [{"text": "abc"}])
    assert trained(tokenizer, text).replace("·", "") == f"abc{tokenizer.eos_token}"


def test_multibyte_text_is_masked_at_character_borders(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    prepared = run(tokenizer, tmp_path, [turns("größe 漢字?", "naïve 漢")])
    ids = [i for i, label in zip(*_columns(prepared), strict=True) if label != IGNORE_INDEX]
    assert tokenizer.decode(ids) == "naïve 漢<end_of_turn>"


def _columns(prepared: PreparedData) -> tuple[list[int], list[int]]:
    return prepared.sequences[0].input_ids, prepared.sequences[0].labels


def test_rendering_is_the_templates_own(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    row = turns("hi", "yes", "and", "no")
    ids = run(tokenizer, tmp_path, [row]).sequences[0].input_ids
    assert ids == tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]


def test_overlong_rows_are_an_error_by_default_all_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [turns("hi", "x" * n) for n in (5, 300, 5, 400)]
    with pytest.raises(FtcliError, match="FT431") as caught:
        run(tokenizer, tmp_path, rows)
    assert [f.origin.line for f in caught.value.findings if f.origin] == [2, 4]


def test_drop_and_truncate_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [turns("hi", "x" * n) for n in (5, 300)]
    dropped = run(tokenizer, tmp_path, rows, overlong="drop").ledgers[0]
    assert (dropped.rows, dropped.kept_rows, dropped.dropped_rows, dropped.cut_tokens) == (2, 1, 1, 0)
    assert dropped.dropped_tokens > 300
    cut = run(tokenizer, tmp_path, rows, overlong="truncate")
    ledger = cut.ledgers[0]
    assert (ledger.kept_rows, ledger.truncated_rows, ledger.dropped_tokens) == (2, 1, 0)
    assert max(len(s.input_ids) for s in cut.sequences) == 200
    assert ledger.tokens + ledger.cut_tokens == dropped.tokens + dropped.dropped_tokens
    assert ledger.supervised_tokens + ledger.masked_tokens == ledger.tokens


def test_a_row_cut_before_its_answer_is_dropped(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    ledger = run(tokenizer, tmp_path, [turns("hi", "yes"), turns("x" * 300, "no")], overlong="truncate").ledgers[0]
    assert (ledger.kept_rows, ledger.dropped_rows, ledger.truncated_rows) == (1, 1, 0)


def test_template_refusal_names_row_and_remedy(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "s"}, *turns("a", "b")["messages"]]}
    with pytest.raises(FtcliError, match="FT425") as caught:
        run(tokenizer, tmp_path, [turns("a", "b"), row])
    assert caught.value.findings[0].origin is not None
    assert caught.value.findings[0].origin.line == 2
    assert "first user message" in (caught.value.findings[0].help or "")
    ids = run(tokenizer, tmp_path, [row], chat_template="gemma-system").sequences[0].input_ids
    assert "<start_of_turn>user\ns\n\na<end_of_turn>" in tokenizer.decode(ids)


def test_template_without_stop_token_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", encoding="utf-8")
    with pytest.raises(FtcliError, match="FT433"):
        run(tokenizer, tmp_path, [turns("a", "b")], chat_template=str(template))


def test_template_that_rewrites_history_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    with pytest.raises(FtcliError, match="FT423"):
        run(tokenizer, tmp_path, [turns("a", "b")], chat_template=str(template))


def test_missing_template_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="FT424"):
        run(tokenizer, tmp_path, [turns("a", "b")], chat_template="no-such-template")


def test_loss_on_that_cannot_apply(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="FT434"):
        run(tokenizer, tmp_path, [{"text": "abc"}], loss_on="assistant")


def test_labels_of_tokens_that_straddle_spans() -> None:
    offsets = [(0, 0), (0, 2), (2, 5), (5, 7), (7, 9)]
    assert labels_of([1, 2, 3, 4, 5], offsets, [(2, 6), (7, 8)]) == [-100, -100, 3, 4, 5]
    assert labels_of([1, 2], [(0, 1), (1, 2)], [(0, 2)]) == [-100, 2]


def test_end_at_stop_masks_what_follows_and_reports_absence() -> None:
    labels = [-100, 5, 9, 7, -100, 6, 9]
    assert end_at_stop(labels, {9})
    assert labels == [-100, 5, 9, -100, -100, 6, 9]
    assert not end_at_stop([-100, 5, 6], {9})


def test_collator_pads_right_and_masks_padding() -> None:
    row = Row("d", 1, {})
    batch = padded_batch([TokenizedRow(row, [5, 6, 7], [-100, 6, 7]), TokenizedRow(row, [8], [-100])], 0)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]


def test_quantiles_are_nearest_rank() -> None:
    assert quantiles(Counter(range(1, 101))) == {"min": 1, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert quantiles(Counter([7])) == {"min": 7, "p50": 7, "p90": 7, "p99": 7, "max": 7}
