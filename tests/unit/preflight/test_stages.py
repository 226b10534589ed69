"""Preflight as a whole: stages in order, all findings of a stage, exit codes, and no torch where none is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.device import GPUS, named_device
from ftcli.plain import plain
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight

ROOT = Path(__file__).parents[3]
FINE = """
lora: {r: 8}
data: {train: [bundled:sample-chat], eval: [bundled:sample-chat-eval], max_seq_len: 1024}
"""


def check(loaded: Any, device: Any = "h100", command: Any = "check") -> PreflightReport:
    gpu = named_device(device) if isinstance(device, str) else device
    return preflight(loaded, command=command, device=gpu, offline=True)


def failure(loaded: Any, device: Any = "h100", command: Any = "check") -> tuple[ExitCode, list[str]]:
    with pytest.raises(FtcliError) as caught:
        check(loaded, device, command)
    return caught.value.exit_code, [f.code for f in caught.value.findings if f.severity == "error"]


def test_a_good_recipe_gets_a_full_report(load: Callable[..., Any]) -> None:
    report = check(load(FINE))
    assert report.facts.parameters == 2614341888
    assert report.dtypes.compute == "bfloat16"
    assert (report.plan.execution.layers.code, report.plan.execution.attention) == ("fused", "triton")
    assert report.verdict is not None
    assert report.verdict.level == "fits"
    assert report.memory is not None
    assert report.disk is not None
    assert report.findings == ()


def test_what_was_not_checked_is_in_the_report(load: Callable[..., Any]) -> None:
    unmade = {item.check for item in check(load(FINE)).not_made}
    assert "output directory and free disk" in unmade
    assert "chat template" in unmade
    assert all(item.reason for item in check(load(FINE)).not_made)


def test_the_report_is_plain_json(load: Callable[..., Any]) -> None:
    report = check(load(FINE))
    values = json.loads(json.dumps(plain(report)))
    assert values["device"]["name"] == "h100"
    assert values["memory"]["total_bytes"] == report.memory.total_bytes  # type: ignore[union-attr]
    assert values["verdict"]["level"] == "fits"


def test_stages_end_where_the_first_errors_are_and_tell_all_of_them(load: Callable[..., Any], tmp_path: Path) -> None:
    crossfield = "model.attention=triton", "model.trust_remote_code=true", "data.chat_template=nowhere.jinja"
    beyond = "data.max_seq_len=100000", "lora.target_modules=[nothing]"
    rows = f"data.train=[{tmp_path}/none.jsonl]", f"data.eval=[{tmp_path}/neither.jsonl]"
    assert failure(load(FINE, *crossfield, *beyond, *rows)) == (ExitCode.RECIPE, ["FT250", "FT252", "FT424"])
    assert failure(load(FINE, *beyond, *rows)) == (ExitCode.PREFLIGHT, ["FT301", "FT311"])
    assert failure(load(FINE, *rows)) == (ExitCode.DATA, ["FT401", "FT401"])
    small = replace(GPUS["t4"], memory_bytes=2**30)
    assert failure(load(FINE, "model.dtype=bfloat16"), small) == (ExitCode.PREFLIGHT, ["FT501", "FT601"])


def test_warnings_survive_and_come_with_later_errors(load: Callable[..., Any]) -> None:
    with_warning = FINE + "train: {lr_scheduler_type: constant, warmup_steps: 3}\n"
    assert [f.code for f in check(load(with_warning)).findings] == ["FT259"]
    with pytest.raises(FtcliError) as caught:
        check(load(with_warning, "data.max_seq_len=100000"))
    assert [f.code for f in caught.value.findings] == ["FT259", "FT301"]


def test_bench_reads_no_rows_and_writes_nothing(load: Callable[..., Any]) -> None:
    report = check(load("lora: {r: 8}\ndata: {max_seq_len: 1024}\n"), command="bench")
    assert report.disk is None
    assert failure(load("lora: {r: 8}\n"), command="train") == (ExitCode.RECIPE, ["FT254"])


def test_this_machines_disk_and_folder_are_checked_for_a_run_here(load: Callable[..., Any], tmp_path: Path) -> None:
    here = replace(named_device("cpu"), probed=True)
    tiny = "model: {name_or_path: 'bundled:tiny-gemma2'}\ndata: {train: [bundled:sample-chat], max_seq_len: 256}\n"
    report = check(load(tiny, f"run.output_dir={tmp_path}/runs/x"), here, "train")
    assert report.disk is not None
    assert report.disk.free_bytes
    assert "output directory and free disk" not in {item.check for item in report.not_made}
    (tmp_path / "file").write_text("")
    broken = load(tiny, f"run.output_dir={tmp_path}/file/x")
    assert failure(broken, here, "train") == (ExitCode.PREFLIGHT, ["FT613"])


def test_the_t4_is_told_why_and_what_to_do() -> None:
    from ftcli.config.load import load_recipe

    loaded = load_recipe(ROOT / "recipes" / "gemma2-9b.yaml")
    with pytest.raises(FtcliError) as caught:
        check(loaded, "t4")
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    dtype, memory = caught.value.findings
    assert (dtype.code, memory.code) == ("FT501", "FT601")
    assert "bfloat16" in dtype.message
    assert "float32" in str(dtype.help)
    assert "does not fit" in memory.message
    assert "smallest GPU that fits" in str(memory.help)
    assert check(loaded, "h100").verdict.level == "fits"  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["t4", "h100", "cpu"])
def test_a_named_device_needs_no_torch(device: str, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from ftcli.config.load import load_recipe
from ftcli.errors import FtcliError
from ftcli.facts.device import named_device
from ftcli.preflight.stages import preflight
try:
    recipe = load_recipe(Path("recipes/gemma2-2b.yaml"))
    preflight(recipe, command="check", device=named_device({device!r}), offline=True)
except FtcliError as error:
    assert error.exit_code == 3, error
heavy = sorted({{"torch", "transformers", "peft", "trl", "huggingface_hub", "numpy"}} & set(sys.modules))
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_every_code_of_preflight_is_in_the_catalogue_and_the_other_way_round() -> None:
    # cli/children.py counts the GPUs that a sweep may use, before any recipe of it is checked.
    folders = (ROOT / "ftcli" / name for name in ("facts", "plan", "preflight", "cli"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    # The rules of a method, and what `grpo --dry-rewards` finds before a weight is loaded.
    # So is a rollout server asked.
    names = ("checks", "train", "served")
    files += [path for name in names for path in (ROOT / "ftcli" / "methods").glob(f"*/{name}.py")]
    sources = "".join(path.read_text() for path in files)
    raised = set(re.findall(r'"(FT\d{3})"', sources))
    headings = set(re.findall(r"(?m)^## (FT\d{3}) \S", (ROOT / "docs" / "errors.md").read_text()))
    own = re.compile(r"FT(2[5-9]\d|30\d|31\d|324|325|5\d\d|6\d\d)")
    assert {c for c in raised if own.match(c)} == {c for c in headings if own.match(c)}


def test_a_gpu_that_is_not_used_is_told(load: Callable[..., Any]) -> None:
    device = replace(named_device("24GiB"), unused="an Apple GPU (Metal)")
    (note,) = [finding for finding in check(load(FINE), device).findings if finding.code == "FT519"]
    assert note.severity == "note"
    assert "an Apple GPU (Metal) is not used: the CPU computes, in plain torch" in note.message
