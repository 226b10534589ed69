"""What people see of a run before its first step, and while it goes on."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.cli.reporters import CollectingReporter, Style
from ftcli.config.recipe import Recipe
from ftcli.methods.grpo.train import Grpo
from ftcli.methods.sft.train import Supervised
from ftcli.run.directory import RunDirectory
from ftcli.run.report import LiveReport
from ftcli.train import assembly, progress
from ftcli.train.progress import StepProgress, effective_batch, fields, held_out, trained_share

GRPO = {"grpo": {"num_generations": 8, "rewards": [{"use": "json_valid"}]}}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"version": 1, "model": {"name_or_path": "a/b"}, **sections})


@pytest.mark.parametrize(("method", "sections", "text"), [
    ("sft", {"train": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}},
     "32 rows a step (4 at a time x 8 accumulated)"),
    ("sft", {"data": {"packing": True}}, "1 packed rows a step (1 at a time x 1 accumulated)"),
    ("grpo", {"train": {"per_device_train_batch_size": 64}, **GRPO},
     "64 completions a step (64 at a time x 1 accumulated), 8 of each prompt"),
    # `ftcli train` of a recipe that has the section all the same.
    ("sft", {"train": {"per_device_train_batch_size": 64}, **GRPO}, "64 rows a step (64 at a time x 1 accumulated)"),
])  # fmt: skip
def test_the_effective_batch(method: str, sections: dict[str, Any], text: str) -> None:
    made = recipe(**sections)
    rows = Grpo(made.grpo).training_rows(made, 100) if method == "grpo" else Supervised().training_rows(made, 100, 1000)
    assert effective_batch(made, rows) == text


def test_trained_parameters_and_their_share() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 90, bias=False))
    model[1].requires_grad_(False)
    job: Any = SimpleNamespace(recipe=recipe(lora={"r": 4}), facts=SimpleNamespace(parameters=5_000))
    assert trained_share(job, model) == "100 of 1,000 (10.00%) are trained"
    stored_in_four_bits: Any = SimpleNamespace(
        recipe=recipe(lora={"r": 4}, quantization={"method": "nf4"}), facts=SimpleNamespace(parameters=4_900)
    )
    assert trained_share(stored_in_four_bits, model) == "100 of 5,000 (2.00%) are trained"
    stored_in_four_bits.facts = SimpleNamespace(parameters=None)
    assert trained_share(stored_in_four_bits, model) == "100 are trained"


@pytest.mark.parametrize(
    ("local", "init", "offline", "missing", "said"),
    [
        (False, "pretrained", False, 3 * 2**30, ["download: 3.0 GiB of weights from google/gemma-2-2b"]),
        (False, "pretrained", False, 0, []),
        (False, "pretrained", True, 3 * 2**30, []),
        (False, "random", False, 3 * 2**30, []),
        (True, "pretrained", False, 3 * 2**30, []),
    ],
)
def test_a_download_is_announced_with_its_size(
    monkeypatch: pytest.MonkeyPatch, local: bool, init: str, offline: bool, missing: int, said: list[str]
) -> None:
    told: list[str] = []
    asked: list[tuple[str, str | None]] = []

    def missing_bytes(name: str, revision: str | None) -> int:
        asked.append((name, revision))
        return missing

    monkeypatch.setattr(assembly, "missing_bytes", missing_bytes)
    job: Any = SimpleNamespace(
        facts=SimpleNamespace(is_local=local, name="google/gemma-2-2b"),
        recipe=recipe(model={"name_or_path": "google/gemma-2-2b", "init": init, "revision": "main"}),
        session=SimpleNamespace(offline=offline),
        reporter=SimpleNamespace(info=told.append),
    )
    assembly.tell_download(job)
    assert told == said
    assert asked == ([("google/gemma-2-2b", "main")] if not local and init == "pretrained" and not offline else [])


LINE = {
    "step": 2, "loss": 1.5, "learning_rate": 1e-4, "tokens_per_second": 2959.4, "peak_memory_bytes": 3 * 2**30,
    "epoch": 0.25, "grad_norm": 1.0,
}  # fmt: skip


def test_a_line_of_metrics_for_people() -> None:
    shown = {"loss": 1.5, "held-out": "0.5", "lr": 1e-4, "tok/s": 2959, "memory": "3.0 GiB", "epoch": "0.25"}
    assert fields(LINE, {"held-out": "0.5"}) == shown
    assert list(fields(LINE, {"held-out": "0.5"})) == list(shown)


def test_rewards_take_the_place_of_the_loss() -> None:
    assert list(fields({**LINE, "loss": 1e-9, "reward": 0.5, "kl": 0.1}, {}))[:3] == ["reward", "kl", "lr"]


def test_what_a_run_with_rewards_shows() -> None:
    line = {
        **LINE, "reward": 0.5, "reward_std": 0.25, "rewards/exact/mean": 0.4, "rewards/exact/std": 0.1,
        "rewards/short/mean": 0.2, "entropy": 1.25, "clip_ratio/region_mean": 0.015, "completions/mean_length": 88.5,
        "completions/clipped_ratio": 0.25, "frac_reward_zero_std": 0.5, "seconds/rollout": 3.4567,
        "throughput/rollout": 9214.4,
        "seconds/training": 12.0,
    }  # fmt: skip
    shown = fields(line, {"held-out exact": "50.0%"})
    assert shown == {
        "reward": 0.5, "exact": 0.4, "short": 0.2, "spread": 0.25, "entropy": 1.25, "clipped": "1.5%", "length": 88.5,
        "cut off": "25.0%", "groups alike": "50.0%", "held-out exact": "50.0%", "lr": 1e-4, "tok/s": 2959,
        "rollout": "3.46 s (9,214 tok/s)", "training": "12 s", "memory": "3.0 GiB", "epoch": "0.25",
    }  # fmt: skip
    assert list(shown)[-6:] == ["lr", "tok/s", "rollout", "training", "memory", "epoch"]
    del line["rewards/short/mean"]
    assert "exact" not in fields(line, {})  # the reward is its own


def test_held_out_results_for_people() -> None:
    found = held_out({"eval_loss": 0.45613, "eval_perplexity": 1.5, "eval_token_accuracy": 0.801, "eval_tokens": 50})
    assert found == {"loss": "0.4561", "token accuracy": "80.1%"}
    assert held_out({"eval_exact_match": 0.5, "loss": 1.0}) == {"exact_match": "50.0%"}


def test_held_out_results_and_the_time_that_is_left_are_told(tmp_path: Path) -> None:
    stream, now = io.StringIO(), [0.0]
    reporter = CollectingReporter(stream, Style(color=False), quiet=False)
    directory = RunDirectory(tmp_path)
    with StepProgress(reporter, "train", LiveReport(directory, lambda: now[0]), lambda: now[0]) as shown:
        shown.begin(0, 100)
        for step in range(1, 8):
            now[0] += 2.0
            shown.show(step, LINE)
            if step == 2:
                shown.evaluated(2, {"eval_loss": 0.45613, "eval_token_accuracy": 0.801})
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["steps", "100"]
    assert "held-out after step 2: loss 0.4561, token accuracy 80.1%" in lines
    assert lines.count("time: about 3m12s for the 96 steps that are left (2 s each, measured over 3)") == 1
    page = directory.report_path.read_text()
    assert "step 6 of 100, about 3m08s left" in page  # the next one is due in two seconds
    assert progress.held_out_line({"eval_loss": 1.0}) == "loss 1.0000"
