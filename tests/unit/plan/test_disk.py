"""What a run writes, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.recipe import Recipe
from ftcli.facts.shape import ModelShape
from ftcli.plan.disk import DiskEstimate, estimate_disk, existing_ancestor, free_disk_bytes, why_not_writable
from ftcli.plan.trained import trained_parameters
from ftcli.preflight.checks import memory_and_disk
from tests.estimates import Case

GIB = 2**30
LORA = "lora: {r: 16}\n"


def estimated(recipe: Recipe, shape: ModelShape) -> DiskEstimate:
    return estimate_disk(recipe, trained_parameters(recipe, shape), shape.other_parameters, free_bytes=None)


def test_disk_holds_one_checkpoint_more_than_is_kept(case: Callable[..., Case]) -> None:
    made = case("google/gemma-2-2b", LORA, "checkpoint.every_steps=10", "checkpoint.keep_last=3")
    assert made.facts.shape is not None
    trained = trained_parameters(made.recipe, made.facts.shape).elements
    disk = estimated(made.recipe, made.facts.shape)
    assert disk.checkpoints == 4
    assert disk.checkpoint_bytes - 12 * trained == disk.result_bytes - 4 * trained
    assert disk.total_bytes == 4 * disk.checkpoint_bytes + disk.result_bytes
    assert estimated(case("google/gemma-2-2b", LORA).recipe, made.facts.shape).checkpoints == 3
    for setting in ("checkpoint.every_steps=null", "train.max_steps=20"):  # none, or none before the end
        on_signal = case("google/gemma-2-2b", LORA, setting)
        assert estimated(on_signal.recipe, made.facts.shape).checkpoints == 1


@pytest.mark.parametrize(("free", "code"), [(10 * GIB, None), (2 * GIB, "FT612"), (GIB, "FT611")])
def test_disk_findings(free: int, code: str | None, context: Callable[..., Any], tmp_path: Path) -> None:
    disk = DiskEstimate(checkpoint_bytes=GIB // 2, checkpoints=3, result_bytes=GIB * 4 // 10, free_bytes=free)
    found = [f.code for f in memory_and_disk.disk_findings(context(""), disk, tmp_path)]
    assert found == ([] if code is None else [code])


def test_output_directory(context: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert list(memory_and_disk.output_findings(context(""), tmp_path / "a" / "b")) == []
    assert list(tmp_path.glob("a*")) == []
    (through_file,) = memory_and_disk.output_findings(context(""), tmp_path / "file" / "run")
    assert through_file.code == "FT613"
    (nowhere,) = memory_and_disk.output_findings(context(""), Path("/proc/ftcli/run"))
    assert nowhere.code == "FT613"
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    for impossible in (
        Path("x" * 300),
        Path("x/" * 3000),
        tmp_path / "loop",
        tmp_path / "loop" / "a",
        tmp_path / "dangling",
        tmp_path / "/".join("a" * 1000),
    ):
        assert [f.code for f in memory_and_disk.output_findings(context(""), impossible)] == ["FT613"], impossible


def test_probing_a_folder_leaves_nothing(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert why_not_writable(Path("/proc")) is not None
    assert existing_ancestor(tmp_path / "x" / "y") == tmp_path
    assert (free_disk_bytes(tmp_path) or 0) > 0
