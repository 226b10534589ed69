"""The measurement of `kernels/bench/memory.py` without a GPU: which cases, what is judged, and the rows of the runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.config.load import load_recipe
from ftcli.data.template import Renderer
from ftcli.facts.device import named_device
from ftcli.model.tokenizer import load_tokenizer
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.rows.prompts import prompts_of
from tests.rows import read_rows

GIB = 2**30


@pytest.fixture
def memory(script: Callable[[str], Any]) -> Any:
    return script("memory")


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [(1.0, 1.0, True), (1.09, 1.0, True), (1.11, 1.0, False), (0.89, 1.0, False), (0.2, 0.15, True), (0.3, 0.2, False)],
)
def test_ten_percent_or_two_workspaces(predicted: float, measured: float, good: bool, memory: Any) -> None:
    row = {"predicted_bytes": int(predicted * GIB), "measured_bytes": int(measured * GIB)}
    assert memory.good(row) is good
    assert memory.good({**row, "judged": False})
    assert memory.shown(row)["ratio"] == pytest.approx(predicted / measured)
    assert bool(memory.shown(row)[""]) is not good


def test_a_case_that_failed_or_was_not_measured_is_not_good(memory: Any) -> None:
    assert not memory.good({"predicted_bytes": GIB})
    failed = {"predicted_bytes": GIB, "measured_bytes": GIB, "error": "exit 5: out of memory"}
    assert not memory.good(failed)
    assert memory.shown(failed)[""] == "exit 5: out of memory"


def test_every_shipped_recipe_is_measured_by_its_own_command(memory: Any) -> None:
    found = {case.name: case for case in memory.recipe_cases()}
    assert set(found) == {path.stem for path in memory.RECIPES.glob("*.yaml")}
    for name, case in found.items():
        recipe = load_recipe(memory.RECIPES / f"{name}.yaml").recipe
        run = memory.loaded(memory.RECIPES / f"{case.recipe}.yaml", *case.settings).recipe
        assert case.kind == ("grpo" if recipe.grpo is not None else "train")
        assert run.model.init == "random"
        assert run.train.per_device_train_batch_size == recipe.train.per_device_train_batch_size
        # What is left out must not be what memory depends on: one micro-batch holds no gradients of another.
        assert (run.train.gradient_accumulation_steps > 1) == (recipe.train.gradient_accumulation_steps > 1)
        for part in ("lora", "quantization", "grpo"):
            assert getattr(run, part) == getattr(recipe, part)
        assert run.train.gradient_checkpointing == recipe.train.gradient_checkpointing
        assert run.data.max_seq_len == recipe.data.max_seq_len


def test_the_grid_covers_what_the_estimate_depends_on(memory: Any) -> None:
    grid = [*memory.grid_cases(), *memory.sharded_cases()]
    assert len({case.name for case in grid}) == len(grid)
    text = " ".join(case.name for case in grid)
    for value in ("1 x", "2 x", "4 x", "1024", "2048", "4096", "16384", "lora.r=8", "lora.r=64", "false", "true"):
        assert value in text
    for value in ("selective", "offload", "nf4", "fp8", "kernels=off", "lora=null", "grpo", "fsdp"):
        assert value in text


def test_every_case_of_one_gpu_is_predicted_to_fit_an_h200(memory: Any) -> None:
    for case in [*memory.recipe_cases(), *memory.grid_cases()]:
        rows = (f"train.per_device_train_batch_size={case.batch}", f"data.max_seq_len={case.seq}")
        settings = (*case.settings, *(rows if case.seq else ()))
        if not memory.loaded(memory.RECIPES / f"{case.recipe}.yaml").recipe.data.eval:  # a measurement brings rows
            settings += ("eval.every_steps=null",)
        loaded = memory.loaded(memory.RECIPES / f"{case.recipe}.yaml", *settings)
        if loaded.recipe.launch.num_processes not in (None, "auto", 1):
            continue
        command = "grpo" if case.kind == "grpo" else "train"
        report = checked(loaded, Session(offline=True), command, named_device("h200"))
        assert report.memory is not None, case.name
        assert 0 < report.memory.allocated_bytes < report.memory.total_bytes < 130 * GIB, case.name


def test_what_was_measured_is_not_measured_again_and_what_failed_is(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "memory.json"
    done = {"case": "smoke", "seconds": 1.0, "predicted_bytes": GIB, "measured_bytes": GIB}
    out.write_text(json.dumps({"rows": [done, {"case": "smoke-grpo", "seconds": 1.0, "error": "exit 5"}]}))
    measured = []

    def measure(case: Any, device: str, gpus: int) -> dict[str, Any]:
        measured.append(case.name)
        return {"case": case.name, "seconds": 2.0, "error": "exit 1: again"}

    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr("sys.argv", ["memory", "--device", "cpu", "--only", "smoke", "--json", str(out)])
    assert memory.main() == 1
    smokes = {path.stem for path in memory.RECIPES.glob("smoke*.yaml")}
    assert "smoke-grpo" in smokes
    assert sorted(measured) == sorted(smokes - {"smoke"})
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == smokes
    assert rows["smoke"]["measured_bytes"] == GIB


def test_texts_fill_the_rows_and_batches(memory: Any, tmp_path: Path) -> None:
    given = memory.loaded(memory.RECIPES / "gemma2-2b.yaml")
    path = memory.write_texts(given, tmp_path / "rows.jsonl", 4)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(texts) == 4 * 4  # of the larger of both batches
    assert {len(text) for text in texts} == {2046}  # and a first and a last token
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["mistral-7b-grpo", "smoke-grpo"])
@pytest.mark.parametrize("equal", [False, True])
def test_prompts_reach_the_longest_length(name: str, equal: bool, memory: Any, tmp_path: Path) -> None:
    given = memory.loaded(memory.RECIPES / f"{name}.yaml")
    path = memory.write_prompts(given, tmp_path / "rows.jsonl", 8, equal=equal)
    tokenizer = load_tokenizer(given.recipe.model, offline=True)
    renderer = Renderer(tokenizer, given.recipe.data.chat_template)
    prompts = prompts_of(read_rows(DatasetConfig(path=str(path))), given.recipe.data.format)
    lengths = [len(tokenizer(renderer.prompt(p), add_special_tokens=False)["input_ids"]) for p in prompts]
    assert len(lengths) == 8
    assert max(lengths) == given.recipe.grpo.max_prompt_length
    assert (min(lengths) == max(lengths)) is equal
