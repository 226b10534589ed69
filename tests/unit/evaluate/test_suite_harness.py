"""The adapter to lm-evaluation-harness: against the real package where it is installed, else against its interface."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.assets import asset
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.evaluate.suite import run_harness
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
INSTALLED = importlib.util.find_spec("lm_eval") is not None

#: What of lm_eval 0.4.13 the adapter uses, as small as it can be. A task "oom" does not fit with more than 2 rows.
STAND_IN = """
import torch


def simple_evaluate(model, tasks, limit, log_samples, bootstrap_iters):
    if "unknown" in tasks:
        raise KeyError("unknown")
    if "oom" in tasks and model.batch_size > 2 or "never" in tasks:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    found = {
        name: {"alias": name, "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1, "sample_len": 3}
        for name in tasks
    }
    seen = {"alias": "g", "acc,none": model.batch_size * 1.0, "limit,none": limit, "length,none": model.max_length}
    return {"results": found, "groups": {"group": seen}}
"""
ADAPTER = """
class HFLM:
    def __init__(self, pretrained, tokenizer, backend, batch_size, max_length):
        assert backend == "causal" and not pretrained.training
        self.batch_size, self.max_length = batch_size, max_length
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    source = str(asset("models", "tiny-gemma2"))
    return AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package lm_eval with the interface of the real one."""
    folder = tmp_path / "lm_eval"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text(STAND_IN)
    (folder / "models" / "__init__.py").write_text("")
    (folder / "models" / "huggingface.py").write_text(ADAPTER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


def run(loaded: tuple[Any, Any], *tasks: str, batch_size: int = 8, reporter: Any = None) -> dict[str, dict[str, float]]:
    model, tokenizer = loaded
    model.train()
    try:
        return run_harness(
            model, tokenizer, tasks, batch_size=batch_size, limit=5, max_length=64, plan=PLAN,
            device=torch.device("cpu"), reporter=reporter or SilentReporter(),
        )  # fmt: skip
    finally:
        assert model.training


@pytest.mark.usefixtures("stand_in")
def test_metrics_come_back_as_numbers(loaded: tuple[Any, Any]) -> None:
    assert run(loaded, "one", "two") == {
        "one": {"acc": 0.5, "em,strict": 1.0},
        "two": {"acc": 0.5, "em,strict": 1.0},
        "group": {"acc": 8.0, "limit": 5.0, "length": 64.0},
    }


@pytest.mark.usefixtures("stand_in")
def test_out_of_memory_halves_the_batch(loaded: tuple[Any, Any]) -> None:
    findings: list[Finding] = []

    class Heard(SilentReporter):
        def finding(self, finding: Finding) -> None:
            findings.append(finding)

    assert run(loaded, "oom", reporter=Heard())["group"]["acc"] == 2.0
    assert [finding.code for finding in findings] == ["FT764", "FT764"]
    assert "lm-evaluation-harness with 8 rows at a time: going on with 4" in findings[0].message
    with pytest.raises(FtcliError, match="FT761"):
        run(loaded, "never")


@pytest.mark.usefixtures("stand_in")
def test_an_unknown_task_is_named(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(FtcliError, match=r"FT766.*unknown") as raised:
        run(loaded, "unknown")
    assert raised.value.exit_code == ExitCode.RECIPE


@pytest.mark.skipif(not INSTALLED, reason="needs lm-evaluation-harness (pip install 'ftcli[eval]')")
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_ones_own_through_the_real_harness(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"q": "the first letter is", "label": 0}, {"q": "the second is", "label": 1}]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    task = tmp_path / "letters.yaml"
    task.write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: [a, b]\ndoc_to_target: '{{label}}'\n"
        "metric_list: [{metric: acc}]\n"
    )
    metrics = run(loaded, str(task), batch_size=2)
    assert metrics["letters"]["acc"] in (0.0, 0.5, 1.0), metrics
    with pytest.raises(FtcliError, match="FT766"):
        run(loaded, "no_such_task_anywhere")
