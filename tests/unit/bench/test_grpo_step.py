"""What `kernels/bench/grpo_step.py` measures is a run that preflight lets pass, with prompts as long as it says."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ftcli.facts.device import named_device
from ftcli.job import checked, open_job
from ftcli.reporting import Session

BENCH = Path(__file__).resolve().parents[3] / "kernels" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("grpo_step")


@pytest.mark.parametrize("name", ["bf16", "fp8", "nf4", "long"])
def test_a_case_fits_its_machine_and_its_prompts_their_length(name: str, bench: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    case = bench.CASES[name]
    options = Namespace(tiny=False, checkpointing="true" if name == "long" else "auto", budget=None)
    loaded = bench.recipe_of(case, 2, options, tmp_path)
    session = Session(offline=True)
    report = checked(loaded, session, "grpo", named_device("h200"))
    assert report.verdict is not None
    assert report.verdict.level == "fits"
    job = open_job(report, session)
    asked = bench.write_prompts(loaded, job, case, tmp_path / "prompts.jsonl")
    ids = job.tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
    assert [len(row) for row in ids] == [case.prompt] * case.prompts
    completions = report.recipe.train.per_device_train_batch_size * report.recipe.train.gradient_accumulation_steps
    assert completions == case.prompts * bench.GROUP
