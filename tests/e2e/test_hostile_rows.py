"""GRPO on rows that no dataset of one type could hold: rewards get what the file has, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.conftest import RECIPE, User, merged

REWARD = """
import json
def score(completions, prompts, value, **columns):
    with open({path!r}, "a") as file:
        file.write(json.dumps([value[0], sorted(columns)]) + "\\n")
    return [float(i) for i, _ in enumerate(completions)]
"""
GRPO = {
    "run": {"output_dir": "out"},
    "train": {"max_steps": 2, "per_device_train_batch_size": 4},
    "grpo": {"num_generations": 4, "max_prompt_length": 40, "max_completion_length": 2},
}


def recipe(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (folder / "mine.py").write_text(REWARD.format(path=str(folder / "seen")), encoding="utf-8")
    own: dict[str, Any] = {
        "run": {"output_dir": str(folder / "out")},
        "data": {"train": [{"path": str(folder / "rows.jsonl")}], "eval": []},
        "grpo": {"rewards": [{"file": f"{folder}/mine.py:score"}]},
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(merged(merged(RECIPE, GRPO), own)), encoding="utf-8")
    return str(path)


def test_rewards_get_the_values_of_rows_as_the_file_has_them(user: User) -> None:
    values: list[Any] = [10**30, {"a": [1, "x"], "b": None}]
    rows = [{"prompt": f"pick: {n}", "value": value} for n, value in enumerate(values)]
    user.done("grpo", recipe(user.folder, rows))
    seen = [json.loads(line) for line in (user.folder / "seen").read_text().splitlines()]
    assert sorted(str(value) for value, _ in seen) == sorted(map(str, values))
    assert all(columns == ["completion_reasoning"] for _, columns in seen)


def test_prompts_with_broken_characters_are_refused_all_at_once(user: User) -> None:
    rows = [{"prompt": text, "value": 1} for text in ("fine", "half \ud800", "\udfff")]
    status, document = user.run("grpo", recipe(user.folder, rows))
    errors = [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert status == 4
    assert [(finding["code"], finding["line"]) for finding in errors] == [("FT412", 2), ("FT412", 3)]


def test_fewer_prompts_than_are_completed_at_a_time_are_refused(user: User) -> None:
    """No step could be made of them: training would end at once, with nothing learnt."""
    path = recipe(user.folder, [{"prompt": "pick: 1", "value": 1}])
    for command in ("check", "grpo"):
        status, document = user.run(command, path, "--set", "train.per_device_train_batch_size=8")
        (error,) = [finding for finding in document["findings"] if finding["severity"] == "error"]
        assert (status, error["code"]) == (4, "FT261")
        assert "data.train has 1 prompt, and 2 are completed at a time (8 completions, 4 of each" in error["message"]
    assert user.run("grpo", path)[0] == 0
