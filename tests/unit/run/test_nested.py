"""JSON that is nested too deeply for Python is a damaged file like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import FtcliError
from ftcli.facts.weights import inspect_weights
from ftcli.rows.places import files_of
from ftcli.run.atomic import read_json_object
from ftcli.run.checkpoint import COMPLETE_NAME, damage
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import read_metrics
from ftcli.run.report.card import write_card
from ftcli.run.report.page import compare, render_report
from ftcli.run.status import read_status
from ftcli.run.summary import summarise

DEEP = "[" * 100_000


def test_deeply_nested_json_in_the_files_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(DEEP)
    assert read_json_object(path) == {}
    assert read_status(path) is None
    path.write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    found = read_metrics(path)
    assert ([line["step"] for line in found.lines], found.damage) == ([1, 2], "line 2 is not a metric")
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / COMPLETE_NAME).write_text(DEEP)
    assert damage(checkpoint, thorough=True) is not None
    (tmp_path / "model.safetensors.index.json").write_text(DEEP)
    assert inspect_weights(tmp_path).missing == ()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("recipe.yaml", f"version: 1\nrun: {DEEP}"),
        ("recipe.yaml", f"version: 1\nrun: {'- ' * 100_000}"),
        ("recipe.yaml", "[]"),
        ("metrics.jsonl", '{"step": 1e400, "loss": 1.0}\n'),
        ("metrics.jsonl", '{"step": 1, "loss": 1e400, "tokens": 1e400, "peak_memory_bytes": 1e400, "epoch": 1e400}\n'),
        ("metrics.jsonl", f'{{"step": 1, "loss": "x", "reward": [], "tokens": {10**400}, "eval_loss": {10**400}}}\n'),
        (
            "eval.json",
            '{"run": {"loss": 1e400, "tokens": 1e400, "tasks": [{"name": 1, "value": 1e400, "count": 1e400}]}}',
        ),
        ("status.json", '{"state": "completed", "seconds": 1e400, "started": 1e400}'),
        ("manifest.json", '{"device": 1e400, "dtype_plan": [], "inputs": 3, "kernels": {}, "environment": 1e400}'),
    ],
)
def test_a_run_with_a_damaged_file_is_listed_compared_and_reported(tmp_path: Path, file: str, content: str) -> None:
    """Nested too deeply, or with numbers that no integer is."""
    run = RunDirectory(tmp_path)
    run.adapter_dir.mkdir()
    run.recipe_path.write_text("version: 1\nmodel: {name_or_path: a}\nrun: {seed: 1}\n")
    run.status_path.write_text('{"state": "completed", "exit_code": 0}')
    run.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / file).write_text(content)
    assert summarise(tmp_path).path == tmp_path
    assert compare([tmp_path, tmp_path]).runs
    assert "<html" in render_report(run)
    write_card(run, run.adapter_dir)


@pytest.mark.parametrize("state", [DEEP, "{", "[]", '{"_data_files": [{}]}', '{"_data_files": 3}'])
def test_a_saved_data_set_with_a_broken_state(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(FtcliError, match="FT402"):
        files_of(DatasetConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    "train",
    [{"adam_beta1": 1.0}, {"adam_beta2": 1.0}, {"max_steps": 10**23}],  # schedules: FT272 of preflight
)
def test_settings_that_no_optimizer_takes_are_refused(train: dict[str, object]) -> None:
    model = {"name_or_path": "bundled:tiny-gemma2"}
    with pytest.raises(ValueError, match="train"):
        Recipe.model_validate({"version": 1, "model": model, "data": {"max_seq_len": 8}, "train": train})


@pytest.mark.parametrize("setting", [{"epsilon": 1e308}, {"epsilon_high": 1e308}, {"beta": 1e308}])
def test_settings_of_grpo_that_no_float32_holds_are_refused(setting: dict[str, object]) -> None:
    values = {"version": 1, "model": {"name_or_path": "bundled:tiny-gemma2"}, "data": {"max_seq_len": 8}}
    with pytest.raises(ValueError, match="less than or equal to 1000000"):
        Recipe.model_validate({**values, "grpo": {"rewards": [{"use": "json_valid"}], **setting}})
