"""A small Qwen3.5, whose layers carry a state, answers on the engine: in GRPO, tasks, samples, chat and `sample`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.generation.fallback import TransformersGenerator
from tests.e2e.conftest import User
from tests.e2e.test_grpo_settings import DATA, EVAL, GRPO
from tests.small_models import config_of


@pytest.fixture
def qwen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_clean: None, monkeypatch: pytest.MonkeyPatch
) -> User:
    """A user whose recipes have it, with random weights, on the kernels' torch form; transformers generates nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(TransformersGenerator, "run", refuse)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "qwen"
    config_of("qwen3_5_text", initializer_range=0.2).save_pretrained(base)
    model = {
        "name_or_path": str(base),
        "init": "random",
        "tokenizer": "bytes",
        "dtype": "float32",
        "kernels": "reference",
    }
    return User(tmp_path, capsys, model)


@pytest.mark.long
def test_grpo_trains_it_on_what_the_engine_sampled_and_goes_on_alike(qwen: User) -> None:
    """Log-probabilities are the sampler's before the first step; adapters on all that enters and leaves delta nets."""
    grpo: dict[str, Any] = {**GRPO, "num_iterations": 2}
    change = {"train": {"max_steps": 5, "gradient_accumulation_steps": 1}, "eval": EVAL, "data": DATA}
    recipe = qwen.recipe("r", grpo=grpo, checkpoint={"every_steps": 3}, **change)
    qwen.done("grpo", recipe)
    manifest = json.loads((qwen.folder / "r" / "manifest.json").read_text())
    agreed = manifest["log_probs"]
    assert 0 < agreed["plain_mean"] <= 1e-5 < agreed["allowed_mean"]
    assert 0 < agreed["sampler_mean"] <= 1e-5
    assert 0 < agreed["rounding_mean"] <= 1e-4
    assert agreed["allowed_mean"] == 1e-3
    qwen.goes_on_alike("r", recipe, "grpo")


def test_it_answers_in_a_run_behind_it_and_without_one(qwen: User) -> None:
    """Samples beside the run, tasks of base and run, chat with both, and drawn answers that become rows."""
    tasks = {**EVAL, "generate": {"max_new_tokens": 6}}
    recipe = qwen.recipe("r", eval=tasks, train={"max_steps": 4, "learning_rate": 5e-2})
    qwen.done("train", recipe)
    samples = json.loads((qwen.folder / "r" / "eval.json").read_text())["samples"]
    assert samples
    assert any(row["before"] != row["after"] for row in samples)
    found = qwen.done("eval", recipe, "--run", str(qwen.folder / "r"))
    for side in ("base", "run"):
        assert found[side]["tasks"]["exact_match"]["rows"] == 6
    answers = [
        qwen.done("chat", str(qwen.folder / "r"), "--prompt", "mirror: kano", *more) for more in ((), ("--base",))
    ]
    assert answers[0]["completion"] != answers[1]["completion"]
    drawn = qwen.done("sample", recipe, "--truncated", "keep", "--max-prompts", "4")
    assert drawn["prompts"] == 4
