"""The measurement of `kernels/bench/memory.py` without a GPU: which cases, when they start, and the table."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.load import load_recipe
from ftcli.facts.device import named_device

BENCH = Path(__file__).resolve().parents[3] / "kernels" / "bench"
GIB = 2**30


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("memory_schedule")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("memory_cases")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("memory")


@pytest.mark.parametrize(
    ("pending", "running", "expected"),
    [
        ([(50, 0), (10, 0)], [], 0),
        ([(50, 0), (10, 0)], [(60, 0)], 1),  # a smaller one goes first
        ([(50, 0), (45, 0)], [(60, 0)], None),
        ([(40, 0)], [(60, 0)], 0),  # exactly as much as there is
        ([(10, 20), (10, 5)], [(10, 75)], 1),  # pinned memory is bounded by itself
        ([(500, 0)], [], 0),  # larger than everything: it is tried alone
        ([(500, 0)], [(1, 0)], None),
        ([], [], None),
    ],
)
def test_a_case_starts_when_its_prediction_fits_beside_the_others(
    pending: list[tuple[int, int]], running: list[tuple[int, int]], expected: int | None, schedule: Any
) -> None:
    need = schedule.Need
    found = schedule.next_to_start([need(*p) for p in pending], [need(*r) for r in running], need(100, 90))
    assert found == expected


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [(1.0, 1.0, True), (1.09, 1.0, True), (1.11, 1.0, False), (0.89, 1.0, False), (0.2, 0.15, True), (0.3, 0.2, False)],
)
def test_ten_percent_or_two_workspaces(predicted: float, measured: float, good: bool, schedule: Any) -> None:
    row = schedule.Row("x", predicted_bytes=int(predicted * GIB), measured_bytes=int(measured * GIB))
    assert row.good is good


def test_a_case_that_failed_or_never_ran_is_not_good(schedule: Any) -> None:
    assert not schedule.Row("x", predicted_bytes=GIB).good
    assert not schedule.Row("x", predicted_bytes=GIB, measured_bytes=GIB, error="out of memory").good


def test_the_table_has_a_row_for_every_case(schedule: Any) -> None:
    fine = schedule.Row("a", "backward", 10 * GIB, 11 * GIB, 10 * GIB, 10 * GIB, {"steps": 10 * GIB}, 3.0)
    off = schedule.Row("b", "forward", 12 * GIB, 13 * GIB, 10 * GIB, 11 * GIB, {"steps": 10 * GIB}, 3.0)
    failed = schedule.Row("c", "forward", GIB, 2 * GIB, error="CUDA out of memory |\n more")
    lines = schedule.markdown([fine, off, failed]).splitlines()
    assert lines[2] == "| a | 10.00 | 10.00 | 1.000 | 11.00 | 10.00 | 1.100 | backward |"
    assert "**1.200**" in lines[3]
    assert lines[4].startswith("| c | 1.00 | CUDA out of memory / more |")
    assert lines[-1] == "1 of 3 within 10%."
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_every_shipped_recipe_is_measured_by_its_own_command(cases: Any) -> None:
    found = {case.name: case for case in cases.recipe_cases()}
    shipped = {path.stem for path in cases.RECIPES.glob("*.yaml")}
    assert set(found) == shipped
    for name, case in found.items():
        recipe = load_recipe(cases.RECIPES / f"{name}.yaml").recipe
        run = case.loaded().recipe
        assert case.kind == ("grpo" if recipe.grpo is not None else "train")
        assert run.model.init == "random"
        assert run.train.per_device_train_batch_size == recipe.train.per_device_train_batch_size
        # What is left out must not be what memory depends on: one micro-batch holds no gradients of another.
        assert (run.train.gradient_accumulation_steps > 1) == (recipe.train.gradient_accumulation_steps > 1)
        for part in ("lora", "quantization", "grpo"):
            assert getattr(run, part) == getattr(recipe, part)
        assert run.train.gradient_checkpointing == recipe.train.gradient_checkpointing
        assert run.data.max_seq_len == recipe.data.max_seq_len


def test_the_policy_depends_on_the_device_and_not_on_what_runs_beside(cases: Any) -> None:
    (case,) = [case for case in cases.recipe_cases() if case.name == "llama3.1-8b"]
    assert case.loaded().recipe.train.gradient_checkpointing == "auto"
    gpu = named_device("h200")
    for free in (gpu.memory_bytes, 20 * GIB):
        crowded = replace(gpu, free_bytes=free, host_free_bytes=GIB)
        assert case.loaded(device=crowded).recipe.train.gradient_checkpointing is False
    assert case.loaded(device=named_device("a100-40gb")).recipe.train.gradient_checkpointing == "selective"


def test_the_grid_covers_what_the_estimate_depends_on_and_can_be_predicted(cases: Any) -> None:
    grid, gpu = cases.grid_cases(), named_device("h200")
    assert len({case.name for case in grid}) == len(grid)
    text = " ".join(case.name for case in grid)
    for value in ("1 x", "2 x", "4 x", "1024", "2048", "4096", "16384", "lora.r=8", "lora.r=64", "false", "true"):
        assert value in text
    for value in ("selective", "offload", "nf4", "fp8", "kernels=off", "lora=null", "evaluation", "grpo"):
        assert value in text
    for case in [*cases.recipe_cases(), *grid]:
        estimate = case.estimate(gpu)
        assert 0 < estimate.allocated_bytes < estimate.total_bytes < 130 * GIB
        assert estimate.pinned_host_bytes < 90 * GIB


def test_a_case_without_time_or_result_is_a_row_with_the_reason(memory: Any, cases: Any, tmp_path: Path) -> None:
    (case,) = [case for case in cases.recipe_cases() if case.name == "smoke"]
    measurement = memory.Measurement([case], 1, memory.Need(GIB), 1.0, tmp_path)
    assert measurement._row(case).error == "not started: no time left"
    measurement.pending = [case]
    measurement._predict(named_device("h200"))
    assert measurement.needs["smoke"].device_bytes == measurement.rows["smoke"].predicted_total_bytes
    measurement.results["smoke"] = {"allocated": {"steps": 5, "loading": 7}, "reserved": {"steps": 9}, "seconds": 2.0}
    measurement.context = 100
    row = measurement._row(case)
    assert (row.measured_bytes, row.measured_total_bytes) == (7, 109)


class Ended:
    """A process that is over."""

    exitcode = 1

    def join(self, seconds: float) -> None:
        """It has ended."""


class Closed:
    """The other end is gone."""

    def recv(self) -> None:
        """Nothing comes any more."""
        raise EOFError


def test_a_process_that_dies_costs_its_case_alone(
    memory: Any, cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cases.recipe_cases()[:2]
    measurement = memory.Measurement([first, second], 1, memory.Need(130 * GIB), 100.0, tmp_path)
    measurement.began = memory.time.monotonic()
    measurement.pending = [first, second]
    measurement._predict(named_device("h200"))
    measurement.pending = [second]
    log = tmp_path / "worker-0.log"
    log.write_text("Traceback\ntorch.OutOfMemoryError: CUDA out of memory\n\n", encoding="utf-8")
    worker = memory.Worker(Ended(), Closed(), log, case=first, ready=True)
    measurement.crew = [worker]
    hired: list[str] = []
    monkeypatch.setattr(memory.Measurement, "_hire", lambda self: hired.append("another"))
    measurement._hear(worker)
    row = measurement._row(first)
    assert row.error == "torch.OutOfMemoryError: CUDA out of memory"
    assert row.predicted_bytes > 0
    assert measurement.crew == []
    assert measurement.pending == [second]
    assert hired == ["another"]
