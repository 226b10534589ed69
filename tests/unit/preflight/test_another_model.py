"""Another model that is asked before training: what `ftcli check` says of it without loading anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.device import GPUS
from ftcli.plain import plain
from ftcli.preflight.checks.another_model import memory_findings
from ftcli.preflight.checks.context import Context
from tests.unit.preflight.test_stages import check

PAIRS = """
model: {name_or_path: bundled:tiny-gemma2}
lora: {r: 8}
data: {train: [bundled:smoke-dpo-train], eval: [bundled:smoke-dpo-eval], max_seq_len: 64}
train: {method: dpo}
"""
LARGE = PAIRS.replace("bundled:tiny-gemma2", "meta-llama/Llama-3.1-8B-Instruct, dtype: bfloat16")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    folder = tmp_path / "other"
    shutil.copytree(asset("models", "tiny-gemma2"), folder)
    return folder


def with_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(loaded: Any, device: str = "h100", command: str = "check") -> Any:
    with pytest.raises(FtcliError) as caught:
        check(loaded, device, command)
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    (finding,) = (one for one in caught.value.findings if one.severity == "error")
    assert finding.origin is not None
    return finding


def refused_all(loaded: Any) -> str:
    """What would help, of all errors."""
    with pytest.raises(FtcliError) as caught:
        check(loaded, "h100", "check")
    return "; ".join(finding.help or "" for finding in caught.value.findings if finding.severity == "error")


def test_its_facts_and_its_memory_are_in_the_report(load: Callable[..., Any], other: Path) -> None:
    report = check(load(PAIRS, f"preference.reference={other}"))
    asked = report.asked
    assert asked is not None
    assert asked.facts.name == str(other)
    assert asked.needed_bytes is not None
    assert plain(report)["asked"] == {
        "key": "preference.reference", "name": str(other), "source": "local folder", "model_type": "gemma2",
        "parameters": report.facts.parameters, "needed_bytes": asked.needed_bytes,
    }  # fmt: skip
    assert report.memory is not None
    assert asked.needed_bytes < report.memory.total_bytes
    judged = "eval={tasks: [{use: exact_match}], generate: {max_new_tokens: 4}}"
    for command in ("bench", "chat", "sample", "export"):
        assert check(load(PAIRS, judged, f"preference.reference={other}"), command=command).asked is None
    assert check(load(PAIRS)).asked is None
    assert check(load(PAIRS, f"preference.reference={other}"), command="eval").asked is not None


def test_a_model_that_is_not_there(load: Callable[..., Any], tmp_path: Path) -> None:
    finding = refused(load(PAIRS, f"preference.reference={tmp_path}/none"))
    assert (finding.code, finding.origin.source) == ("FT303", f"--set preference.reference={tmp_path}/none")


def test_an_adapter_is_refused_with_what_to_do(load: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    finding = refused(load(PAIRS, f"preference.reference={tmp_path}"))
    assert finding.code == "FT304"
    assert "merge it first" in finding.help


def test_rows_longer_than_it_can_attend_to(load: Callable[..., Any], other: Path) -> None:
    with_json(other / "config.json", max_position_embeddings=32)
    finding = refused(load(PAIRS, f"preference.reference={other}"))
    assert finding.code == "FT301"
    assert str(other) in finding.message


def test_a_folder_without_weights(load: Callable[..., Any], other: Path) -> None:
    (other / "model.safetensors").unlink()
    assert refused(load(PAIRS, f"preference.reference={other}")).code == "FT317"


def test_tokens_that_are_others(load: Callable[..., Any], other: Path) -> None:
    """Two tokens have changed places; one of them is in no row, which the run would see."""
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert (vocab["a"], vocab["b"]) != (vocab["b"], vocab["a"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    finding = refused(load(PAIRS, f"preference.reference={other}"))
    assert finding.code == "FT326"
    assert "2 of its tokens are others" in finding.message
    del vocab["a"], vocab["b"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check(load(PAIRS, f"preference.reference={other}")).asked is not None, "the run sees whether rows have it"


def test_what_was_not_checked_is_told(load: Callable[..., Any]) -> None:
    report = check(load(LARGE, "preference.reference=meta-llama/Llama-3.1-8B"))
    assert "tokens of meta-llama/Llama-3.1-8B" in [item.check for item in report.not_made]


def test_one_that_does_not_fit_beside_nothing_is_refused(load: Callable[..., Any]) -> None:
    """Shards of it do, and so does it in NF4, as the trained model is then."""
    reference = "preference.reference=meta-llama/Llama-3.1-70B"
    finding = refused(load(LARGE, reference))
    assert finding.code == "FT601"
    assert "asking meta-llama/Llama-3.1-70B takes about" in finding.message
    assert "quantization.method (for both)" in finding.help
    taught = LARGE.replace("method: dpo", "method: distill").replace("bundled:smoke-dpo", "bundled:smoke-grpo")
    sizes = "distill={max_prompt_length: 30, max_completion_length: 30, teacher: meta-llama/Llama-3.1-70B}"
    assert "distill.teacher_quantization: nf4" in refused_all(load(taught, sizes))
    quantized = check(load(LARGE, reference, "quantization.method=nf4")).asked
    shards = check(load(LARGE, reference, "launch={engine: fsdp, num_processes: 4}")).asked
    assert quantized is not None
    assert shards is not None
    assert quantized.needed_bytes is not None
    assert shards.needed_bytes is not None
    gib = 2**30
    assert 35 * gib < quantized.needed_bytes < 60 * gib  # 70.6 billion parameters in half a byte each, and tables
    assert 33 * gib < shards.needed_bytes < 60 * gib  # a quarter of them in two bytes, and layers that are gathered
    loaded = load(LARGE, reference)
    context = Context(loaded.recipe, loaded.origins, "check")
    (tight,) = memory_findings(context, shards, replace(GPUS["h100"], memory_bytes=int(shards.needed_bytes / 0.95)))
    assert (tight.code, tight.severity) == ("FT602", "warning")
    assert list(memory_findings(context, shards, GPUS["h100"])) == []
