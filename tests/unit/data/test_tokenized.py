"""Rows that are tokenized already are trained as they are; what does not add up is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.data.prepare import PreparedData
from ftcli.errors import FtcliError

Prepare = Callable[..., PreparedData]
IDS, LABELS = [2, 70, 71, 72, 4], [-100, -100, 71, 72, 4]


def test_tokens_and_labels_are_taken_as_they_are(prepared: Prepare) -> None:
    found = prepared([{"input_ids": IDS, "labels": LABELS, "note": "x"}])
    (tokens,) = found.sequences
    assert (tokens.input_ids, tokens.labels) == (IDS, LABELS)
    assert (found.ledgers[0].layout, found.ledgers[0].supervised_tokens) == ("tokenized", 3)


def test_padding_is_taken_away_on_either_side(prepared: Prepare) -> None:
    for ids, labels, mask in (
        ([*IDS, 0, 0], [*LABELS, -100, -100], [1] * 5 + [0, 0]),
        ([0, *IDS], [-100, *LABELS], [0] + [1] * 5),
    ):
        row = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        (tokens,) = prepared([row]).sequences
        assert (tokens.input_ids, tokens.labels) == (IDS, LABELS)


def test_the_first_token_has_nothing_that_predicts_it(prepared: Prepare) -> None:
    (tokens,) = prepared([{"input_ids": IDS, "labels": IDS}]).sequences
    assert tokens.labels == [-100, *IDS[1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": LABELS[:-1]}, "has 5 values and 'labels' 4"),
        ({"labels": [*IDS[1:], -100]}, "shifted by one"),
        ({"labels": [-100, -100, 99, 72, 4]}, "neither -100 nor the id 71"),
        ({"labels": "no"}, "not JSON"),
        ({"input_ids": [2, 70.0, 71, 72, 4]}, "list of whole numbers"),
        ({"attention_mask": [1, 0, 1, 1, 1]}, "hides tokens between"),
        ({"attention_mask": [1, 1, 1, 1, 0]}, "train a token that 'attention_mask' hides"),
        ({"position_ids": [0, 1, 0, 1, 2]}, "begin anew"),
        ({"input_ids": [2, 70, 71, 72, 999999], "labels": [-100] * 4 + [999999]}, "tokenized by another one"),
        ({"labels": [-100] * 5}, "FT432"),
    ],
)
def test_what_does_not_add_up_is_refused(prepared: Prepare, change: dict[str, Any], words: str) -> None:
    with pytest.raises(FtcliError, match=words):
        prepared([{"input_ids": IDS, "labels": LABELS, **change}])


def test_csv_holds_them_as_json(prepared: Prepare, tmp_path: Any) -> None:
    (tmp_path / "t.csv").write_text(f'input_ids,labels\n"{IDS}","{LABELS}"\n')
    found = prepared([], sources=[{"path": str(tmp_path / "t.csv")}])
    assert found.sequences[0].labels == LABELS


def test_length_packing_and_loss_on_hold_for_them(prepared: Prepare) -> None:
    long = {"input_ids": [2] + [70] * 300, "labels": [-100] + [70] * 300}
    assert prepared([long], overlong="truncate").ledgers[0].cut_tokens == 101
    with pytest.raises(FtcliError, match="FT431"):
        prepared([long])
