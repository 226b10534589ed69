"""What `ftcli bench` makes of a recipe, and which prediction stands beside what it measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ftcli.config.load import LoadedRecipe, load_recipe
from ftcli.facts.device import named_device
from ftcli.pipeline import benchmark
from ftcli.pipeline.bench_result import BenchOptions, PredictedMemory, predicted_memory
from ftcli.pipeline.benchmark import bench_recipe
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session

TEXT = """
version: 1
model: {name_or_path: meta-llama/Llama-3.1-8B, init: random, tokenizer: bytes}
lora: {r: 16}
data: {train: ["bundled:sample-chat"], eval: ["bundled:sample-chat-eval"], max_seq_len: 1024}
train: {gradient_accumulation_steps: 8, gradient_checkpointing: true}
eval: {per_device_eval_batch_size: 64, every_steps: 5}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return load_recipe(path)


def report_of(loaded: LoadedRecipe, options: BenchOptions, device: str) -> PreflightReport:
    recipe = bench_recipe(loaded.recipe, options)
    roomy = replace(named_device(device), memory_bytes=None, free_bytes=None)
    return preflight(replace(loaded, recipe=recipe), command="bench", device=roomy, offline=True)


def test_a_training_benchmark_predicts_no_evaluation(loaded: LoadedRecipe) -> None:
    options = BenchOptions(batch=2)
    memory = report_of(loaded, options, "h200").memory
    assert memory is not None
    assert "evaluation" not in memory.phases
    assert memory.parts["gradients"] == memory.parts["adapters"]  # one micro-batch a step
    found = predicted_memory(report_of(loaded, options, "h200"), options)
    assert found == PredictedMemory(memory.total_bytes, memory.allocated_bytes)


def test_only_like_is_compared_with_like(loaded: LoadedRecipe) -> None:
    options = BenchOptions(batch=1)
    on_cpu = predicted_memory(report_of(loaded, options, "cpu"), options)
    assert on_cpu.predicted_peak_bytes is not None
    assert on_cpu.predicted_allocated_bytes is None  # the peak is the whole process' there
    fewer = replace(options, layers=4)
    report = report_of(loaded, options, "h200")
    assert predicted_memory(report, fewer) == PredictedMemory()
    # Graphs took what all layers need: 20 GiB too many of 8 layers of Qwen3-30B-A3B.
    of_fewer = benchmark._of_first_layers(report, fewer, 0).memory
    assert report.memory is not None
    assert of_fewer is not None
    assert report.facts.shape is not None
    assert report.memory.graph_pool_bytes > 0
    assert of_fewer.graph_pool_bytes == report.memory.graph_pool_bytes * 4 // report.facts.shape.num_layers


def test_a_benchmark_of_a_recipe_of_pairs_plans_the_pairs_that_it_times(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(TEXT.replace("train: {", "preference: {beta: 0.2}\ntrain: {method: dpo, "), encoding="utf-8")
    made, options = load_recipe(path), BenchOptions(batch=2)
    plan = report_of(made, options, "h200").plan
    assert (made.recipe.train.method, plan.method.name, plan.rows) == ("dpo", "dpo", 4)


@pytest.mark.parametrize(("prompt", "shared"), [(None, 341), (512, 512), (5000, 1023)])
def test_what_the_pairs_have_in_common_is_planned(tmp_path: Path, prompt: int | None, shared: int) -> None:
    """Two rows of 1,024 tokens were counted for each pair, whatever --prompt said: 45.3 GiB where 39.3 were needed."""
    path = tmp_path / "pairs.yaml"
    smaller = TEXT.replace("meta-llama/Llama-3.1-8B", "bundled:tiny-gemma2").replace(
        "train: {", "train: {method: dpo, "
    )
    path.write_text(smaller, encoding="utf-8")
    report = benchmark._checked(load_recipe(path), Session(offline=True), BenchOptions(batch=1, prompt=prompt))
    assert report.plan.prompt_tokens == shared


def test_graphs_that_bench_leaves_out_are_not_called_the_recipes_choice(loaded: LoadedRecipe) -> None:
    """Steps of one size that no graph takes: nobody set train.cuda_graphs."""
    timed = loaded.recipe.changed({"train.cuda_graphs": False, "train.per_device_train_batch_size": 8})
    assert benchmark.without_graphs(loaded.recipe, timed) == "a micro-batch of 8,192 tokens keeps the GPU busy"
    assert benchmark.without_graphs(loaded.recipe, loaded.recipe) is None
    assert benchmark.without_graphs(timed, timed) is None  # the recipe's own reason
