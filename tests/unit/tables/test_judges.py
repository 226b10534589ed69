"""A judge is a row and a function: a made-up one scores rewards and tasks, and its options are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftcli.judges.verdicts import Scorer, Verdict
from ftcli.methods.grpo import checks as grpo
from ftcli.preflight.checks import crossfield
from ftcli.preflight.checks.context import Context
from ftcli.tables import code_of, judges
from tests.e2e.conftest import User

GRPO = """
data: {train: [bundled:smoke-grpo-train], max_seq_len: 128}
train: {per_device_train_batch_size: 4}
grpo: {num_generations: 4, max_prompt_length: 48, max_completion_length: 4}
"""


def longer(pattern: str) -> Scorer:
    """The made-up judge: the longer the completion, next to the answer, the better; ``pattern`` is what it pays."""

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        pairs = zip(completions, answers, strict=True)
        return [len(text) / max(len(answer), 1) * float(pattern) for text, answer in pairs]

    return score


@pytest.fixture(autouse=True)
def _longer(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judges.BuiltinJudge(f"{__name__}:longer", compares=True, options=("pattern",), needs=("pattern",))
    monkeypatch.setattr(judges, "TABLE", {**judges.TABLE, "longer": row})


def test_a_made_up_judge_scores_rewards_and_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = User(tmp_path, capsys)
    recipe = user.recipe(
        data={"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 4}], "eval": ["bundled:smoke-grpo-eval"]},
        train={"max_steps": 1},
        grpo={
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 4,
            "rewards": [{"use": "longer", "pattern": "1"}],
        },
        eval={"tasks": [{"use": "longer", "pattern": "0", "max_rows": 3}]},
    )
    result = user.done("grpo", recipe)
    assert result["after"] == {"longer": 0.0}
    assert any(line.get("rewards/longer/mean", 0) > 0 for line in user.metrics("r"))


def test_its_options_are_checked_by_its_row(context: Callable[..., Context]) -> None:
    def found(setting: str, check: Any = grpo.check) -> list[tuple[str, str]]:
        return [(f.code, f.message) for f in check(context(GRPO, setting))]

    assert found("grpo.rewards=[{use: longer, answer: gold, pattern: '2'}]") == []
    assert found("grpo.rewards=[{use: longer}]") == [("FT264", "`use: longer` needs a pattern")]
    assert found("grpo.rewards=[{use: longer, pattern: '2', extract: '(a)'}]") == [
        ("FT265", "`extract` is not read by a reward with `use: longer`")
    ]
    assert found("grpo.rewards=[{use: contains, pattern: x}]") == [
        ("FT264", "a pattern is only read by `use: regex` and `use: longer`")
    ]
    tasks = "eval.tasks=[{use: longer, data: [bundled:smoke-grpo-eval]}]"
    assert found(tasks, crossfield.check) == [("FT264", "`use: longer` needs a pattern")]


def test_every_code_reference_resolves() -> None:
    for row in judges.TABLE.values():
        assert callable(code_of(row.code))
