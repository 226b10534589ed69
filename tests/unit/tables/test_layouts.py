"""A layout is a row and a function: rows of a made-up one are found, checked, trained and answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.rows.layouts.messages import conversation
from ftcli.rows.row import Example, Misfit, Row
from ftcli.tables import code_of, layouts
from tests.e2e.conftest import User


def understand(row: Row) -> Example:
    """The made-up layout: a transcript, whose lines are the user's and the assistant's in turn."""
    lines = str(row.fields["transcript"]).splitlines()
    if len(lines) % 2:
        raise Misfit("the transcript ends with a question")
    roles = ("user", "assistant")
    return conversation(row, [{"role": roles[n % 2], "content": line} for n, line in enumerate(lines)])


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    row = layouts.RowLayout(
        ("transcript",), f"{__name__}:understand", loss_on=("completion", "all"), conversation=("transcript",)
    )
    monkeypatch.setattr(layouts, "TABLE", {**layouts.TABLE, "transcript": row})
    return User(tmp_path, capsys)


def rows(user: User, *transcripts: str) -> str:
    path = user.folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"transcript": text, "level": 1}) + "\n" for text in transcripts))
    return str(path)


def test_rows_of_a_made_up_layout_are_trained_and_answered(user: User) -> None:
    file = rows(user, "q\na\nq2\nanswer", "mirror: ab\nabba")
    (user.folder / "judge.py").write_text(
        "def seen(completions, prompts, **columns):\n"
        "    assert columns == {'answer': ['answer', 'abba'], 'completion_reasoning': [None] * 2, 'level': [1, 1]}\n"
        "    return [1.0, 0.0]\n"
    )
    recipe = user.recipe(
        data={"train": [file], "eval": [file]},
        train={"max_steps": 1},
        eval={"tasks": [{"file": f"{user.folder}/judge.py:seen"}]},
    )
    user.done("train", recipe)
    account, _ = json.loads((user.folder / "r" / "tokens.json").read_text())["datasets"]
    assert account["layout"] == "transcript"
    assert account["tokens_trained"] == len("answer") + 1 + len("abba") + 1  # the last answer, and its end of turn
    assert user.done("eval", recipe)["base"]["tasks"]["seen"]["score"] == 0.5


def test_its_row_says_what_its_rows_can_be_used_for(user: User) -> None:
    file = rows(user, "q\na", "q\na\nq")
    status, document = user.run("check", user.recipe(data={"train": [file], "loss_on": "assistant"}))
    found = {(finding["code"], finding["message"]) for finding in document["findings"]}
    assert status == 4
    assert ("FT412", "the transcript ends with a question (format transcript)") in found
    assert ("FT434", "loss_on: assistant does not apply to these rows of format transcript") in found
    stated = {"train": [file], "format": "transcript", "loss_on": "assistant"}
    status, document = user.run("check", user.recipe(data=stated))
    assert "use one of auto, completion, all" in {finding["help"] for finding in document["findings"]}


def test_every_code_reference_resolves() -> None:
    for row in layouts.TABLE.values():
        assert callable(code_of(row.code))
