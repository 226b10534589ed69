"""What `kernels/bench/grpo_step.py` measures is a run that preflight lets pass, of as many completions as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.facts.device import named_device
from ftcli.preflight.stages import checked
from ftcli.reporting import Session


@pytest.mark.parametrize(("name", "gpus"), [("bf16", 1), ("fp8", 1), ("nf4", 2), ("long", 1)])
def test_a_case_fits_its_machine(name: str, gpus: int, script: Callable[[str], Any], tmp_path: Path) -> None:
    bench = script("grpo_step")
    case, prompts = bench.CASES[name], tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    policy = "train.gradient_checkpointing=" + ("true" if name == "long" else "auto")
    loaded = bench.loaded(case.recipe, *case.settings(prompts, 2, gpus), policy)
    report = checked(loaded, Session(offline=True), "grpo", named_device("h200"))
    assert report.verdict is not None
    assert report.verdict.level == "fits"
    train = report.recipe.train
    completions = train.per_device_train_batch_size * train.gradient_accumulation_steps * gpus
    assert completions == case.prompts * bench.GROUP
    assert report.recipe.data.max_seq_len == case.prompt + case.completion
