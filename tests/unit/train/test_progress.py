"""What people see of a run while it goes on."""

from __future__ import annotations

import io
from pathlib import Path

from ftcli.cli.render import Style
from ftcli.cli.reporters import CollectingReporter
from ftcli.run.directory import RunDirectory
from ftcli.run.report import LiveReport
from ftcli.train import progress
from ftcli.train.progress import StepProgress, fields, held_out

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
