"""What people see while a run goes on and after: the report, samples, completions, and the card of the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import ftcli
from ftcli.cli.reporters import CollectingReporter
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.suite import Evaluator
from ftcli.run.completions import Completions
from tests.e2e.conftest import RECIPE, User

REFRESH = 'http-equiv="refresh"'
GRPO: dict[str, Any] = {
    "data": {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 8}],
             "eval": [{"path": "bundled:smoke-grpo-eval", "max_rows": 6}]},
    "train": {"max_steps": 4, "per_device_train_batch_size": 4},
    "grpo": {"num_generations": 2, "max_prompt_length": 40, "max_completion_length": 3,
             "rewards": [{"use": "exact_match", "answer": "answer"}, {"use": "contains", "answer": "answer"}]},
    "eval": {"tasks": [{"use": "exact_match"}], "every_steps": 2},
}  # fmt: skip


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def test_the_report_and_samples_are_there_while_a_run_goes_on(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    results: list[dict[str, Any]] = []
    measure = Evaluator.samples

    def looked_at(self: Evaluator, model: Any, count: int) -> Any:
        for name, found in (("report.html", pages), ("eval.json", results)):
            path = user.folder / "r" / name
            if path.exists():
                text = path.read_text()
                found.append(text if name == "report.html" else json.loads(text))  # type: ignore[arg-type]
        return measure(self, model, count)

    monkeypatch.setattr(Evaluator, "samples", looked_at)
    user.done("train", user.recipe("r", eval={"every_steps": 2, "samples": 3}))
    # Before training there is no page yet; then after steps 2 and 4, and at the end.
    assert len(pages) == 3
    assert all(REFRESH in page and "running" in page for page in pages)
    assert "of 6" in pages[0]
    assert [result.get("step") for result in results] == [None, 2, 4]
    assert "Base model" in pages[0]

    final = json.loads((user.folder / "r" / "eval.json").read_text())
    assert "step" not in final
    assert final["base"]["loss"] > final["run"]["loss"] > 0
    assert len(final["samples"]) == 3
    assert all(row["before"] is not None and row["after"] is not None for row in final["samples"])
    page = (user.folder / "r" / "report.html").read_text()
    assert REFRESH not in page
    assert "completed" in page
    assert not [line for line in user.metrics("r") if line["step"] == 0]


def test_answers_that_cannot_be_made_end_no_run_and_are_told(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def short(*_: Any) -> Any:
        raise FtcliError.single("FT761", "one row is too much", exit_code=ExitCode.OUT_OF_MEMORY)

    monkeypatch.setattr(Evaluator, "samples", short)
    monkeypatch.setattr(CollectingReporter, "warn", lambda _, text: said.append(text))
    user.done("train", user.recipe("r", eval={"every_steps": 3, "samples": 2}, train={"max_steps": 3}))
    assert {line for line in said if "eval.samples" in line} == {
        "eval.samples: no answers are shown this time: one row is too much"
    }
    assert json.loads((user.folder / "r" / "eval.json").read_text())["samples"] == []


def test_no_samples_are_made_where_none_are_asked_for(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Evaluator, "samples")
    user.done("train", user.recipe("r", eval={"every_steps": 3, "samples": 0}, train={"max_steps": 3}))
    assert json.loads((user.folder / "r" / "eval.json").read_text())["samples"] == []


def test_full_fine_tuning_knows_what_the_base_answered(user: User) -> None:
    user.done("train", user.recipe("r", lora=None, train={"max_steps": 2}, eval={"every_steps": 1, "samples": 2}))
    rows = json.loads((user.folder / "r" / "eval.json").read_text())["samples"]
    assert [row["before"] is not None for row in rows] == [True, True]


def test_adapter_and_exports_have_cards_without_paths(user: User) -> None:
    user = replace(user, model=RECIPE["model"])  # one that has a name
    recipe = user.recipe("r", eval={"tasks": [{"use": "exact_match"}]}, train={"max_steps": 2})
    user.done("train", recipe)
    adapter = user.folder / "r" / "adapter" / "README.md"
    before = adapter.read_text()
    assert "Token accuracy" in before
    user.done("eval", recipe, "--run", str(user.folder / "r"))
    user.done("export", str(user.folder / "r"))
    cards = [adapter, *(user.folder / "r" / "export").glob("*/README.md")]
    assert len(cards) == 3
    for path in cards:
        text = path.read_text()
        assert "exact_match, 6 rows" in text
        assert "bundled:smoke-train" in text
        for private in (str(user.folder), str(Path(ftcli.__file__).parent), "/tmp", str(Path.home())):
            assert private not in text
        card = ModelCard(text)
        assert card.data.library_name == ("peft" if "adapter" in str(path.parent.name) else "transformers")
        assert card.data.pipeline_tag == "text-generation"


def test_cards_of_checkpoints_of_peft_are_not_kept(user: User) -> None:
    user.done("train", user.recipe("r", checkpoint={"every_steps": 1}, train={"max_steps": 2}))
    assert list((user.folder / "r" / "checkpoints").glob("*/adapter_config.json"))
    assert not list((user.folder / "r" / "checkpoints").glob("*/README.md"))


def test_completions_of_grpo_are_kept_and_shown(user: User) -> None:
    recipe = user.recipe("r", **GRPO)
    user.done("grpo", recipe)
    kept = Completions(user.folder / "r" / "completions")
    assert kept.steps() == [1, 2, 3, 4]
    said = kept.read(4)
    assert len(said) == 4
    assert set(said[0].rewards) == {"exact_match", "contains"}
    line = next(line for line in user.metrics("r") if line["step"] == 4)
    mean = sum(one.rewards["exact_match"] or 0 for one in said) / 4
    assert mean == pytest.approx(line["rewards/exact_match/mean"])
    seen = {
        "reward", "reward_std", "rewards/exact_match/std", "rewards/contains/mean", "entropy", "clip_ratio/region_mean",
        "completions/mean_length", "completions/clipped_ratio", "groups_without_spread", "frac_reward_zero_std",
    }  # fmt: skip
    assert seen <= set(line)
    assert line["frac_reward_zero_std"] == line["groups_without_spread"] / 2
    assert 0 < line["seconds/rollout"] < 60
    assert line["throughput/rollout"] * line["seconds/rollout"] == pytest.approx(line["processed_tokens/rollout"])
    assert line["processed_tokens/rollout"] == 4 * line["completions/mean_length"]
    page = (user.folder / "r" / "report.html").read_text()
    for expected in ("Early: step 1", "Late: step 4", "Reward of exact_match", "Reward of contains", "base model",
                     "Seconds of a step", "Clipped ratios"):  # fmt: skip
        assert expected in page, expected
    assert "<b>Loss</b>" not in page


def test_completions_after_a_checkpoint_are_made_again(user: User) -> None:
    recipe = user.recipe("r", **GRPO, checkpoint={"every_steps": 2, "keep_last": 5})
    user.done("grpo", recipe)
    run = user.cut_off("r")
    kept = Completions(run / "completions")
    first = kept.path(4).read_bytes()
    kept.path(9).write_bytes(b"of a later step")
    user.done("grpo", recipe)
    assert kept.steps() == [1, 2, 3, 4]
    assert kept.path(4).read_bytes() == first
