"""The memory estimate of GRPO: generation, its cache, the weights that it merges, and a reference model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ftcli.assets import asset
from ftcli.facts.device import GPUS
from ftcli.facts.generation import cache_bytes, cache_shape, choose_layout
from ftcli.facts.shape import shape_of
from ftcli.generation.cache import Cache
from ftcli.plan.memory.candidates import smaller_batches
from ftcli.plan.memory.estimate import MemoryEstimate
from tests.estimates import GRPO, Case, plan_of

LORA = "lora: {r: 16}\n"
#: Completions for two optimizer steps, each of which learns from a half.
TWO_OF_FOUR = ("train.gradient_accumulation_steps=2", "grpo.steps_per_generation=4")


def generation_bytes(estimate: MemoryEstimate) -> int:
    return estimate.parts["generation"] + estimate.parts["key-value cache"]


def test_grpo_counts_the_cache_of_a_generation_batch(case: Callable[..., Case]) -> None:
    estimate = case("mistralai/Mistral-7B-v0.3", LORA + GRPO).estimate(work="grpo")
    cache = 2 * 32 * 512 * 32 * 1024 * 2  # keys and values, rows, tokens, layers, width, bytes
    assert cache < estimate.parts["key-value cache"] < 1.3 * cache
    halved = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, "train.gradient_accumulation_steps=2")
    assert halved.estimate(work="grpo").parts["key-value cache"] < estimate.parts["key-value cache"]
    halved_by = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *TWO_OF_FOUR)
    assert halved_by.estimate(work="grpo").parts["key-value cache"] == estimate.parts["key-value cache"]


def test_as_many_rows_count_as_are_decoded_at_once(case: Callable[..., Case]) -> None:
    """GRPO decodes 128 together at most, whoever generates; evaluation as many as its batch has, which were 128 too."""
    of_grpo = [
        case("mistralai/Mistral-7B-v0.3", LORA + GRPO, f"train.gradient_accumulation_steps={steps}").estimate(
            work="grpo"
        )
        for steps in (16, 32)
    ]
    assert generation_bytes(of_grpo[0]) == generation_bytes(of_grpo[1])
    text = LORA + "data: {eval: ['bundled:sample-chat']}\neval: {tasks: [{use: exact_match}]}\n"
    answered = [
        case("mistralai/Mistral-7B-v0.3", text, f"eval.per_device_eval_batch_size={rows}").estimate(work="eval")
        for rows in (128, 512)
    ]
    assert answered[1].parts["evaluation"] > 3.5 * answered[0].parts["evaluation"]


def test_smaller_batches_make_as_many_completions(case: Callable[..., Case]) -> None:
    made = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *TWO_OF_FOUR)
    proposed = next(iter(smaller_batches(plan_of(made.recipe, made.facts, "h100", "grpo"))))
    assert proposed == {
        "train.per_device_train_batch_size": 4,
        "train.gradient_accumulation_steps": 4,
        "grpo.steps_per_generation": 8,
    }


def test_what_generates_is_kept_and_weights_are_merged_where_memory_has_room(case: Callable[..., Case]) -> None:
    made = case("mistralai/Mistral-7B-v0.3", LORA + GRPO)
    longer = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, "grpo.max_completion_length=2048")
    few = "train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=8"
    smaller = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *few)
    roomy, kept = made.estimate("h200", work="grpo"), smaller.estimate("rtx4090", work="grpo")
    tight = longer.estimate("rtx4090", work="grpo")
    assert (roomy.generator, kept.generator, tight.generator) == ("merged", "kept", "each step")
    linears = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert roomy.parts["merged weights"] == 2 * linears
    assert "merged weights" not in kept.parts
    for phase, names in roomy.phases.items():
        assert {"key-value cache", "merged weights"} <= {*names}, phase
    assert [phase for phase, names in tight.phases.items() if "key-value cache" in names] == ["generation"]
    on_cpu = made.estimate("cpu", work="grpo")
    assert on_cpu.generator == "kept"
    assert all("key-value cache" in names for names in on_cpu.phases.values())
    assert roomy.total_bytes <= 0.85 * int(GPUS["h200"].memory_bytes or 0)


def test_rollouts_that_wait_for_tools_keep_their_pages_where_memory_has_room(case: Callable[..., Case]) -> None:
    many = "grpo.steps_per_generation=64", "train.gradient_accumulation_steps=8", "train.per_device_train_batch_size=8"
    acting = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *many, "grpo.environment={file: 'desk.py:Desk'}")
    alone = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *many)
    found = [one.estimate(device, work="grpo") for one in (acting, alone) for device in ("h200", "h100", "rtx4090")]
    assert [one.waiting for one in found] == [384, 384, 0, 0, 0, 0]
    pages = [one.parts["key-value cache"] for one in found]
    assert pages[0] > pages[3]
    assert pages[2] == pages[5]


def test_generation_holds_pages_and_reads_a_few_prompts_at_once(case: Callable[..., Case]) -> None:
    def needed(prompt: int, completion: int) -> int:
        lengths = f"grpo.max_prompt_length={prompt}", f"grpo.max_completion_length={completion}"
        return generation_bytes(case("mistralai/Mistral-7B-v0.3", LORA + GRPO, *lengths).estimate(work="grpo"))

    page = 2 * 32 * 32 * 1024 * 2 * 64  # of every row
    assert needed(256, 1024) - needed(256, 512) == pytest.approx(512 / 64 * page / 0.9, abs=2)
    assert needed(256, 1024) - needed(256, 1023) == 0
    assert needed(512, 768) == needed(256, 1024)
    assert needed(16384, 1) > needed(8192, 8193) + 2**29  # a prompt is read in one pass, however long


def test_models_that_transformers_generates_with_hold_its_cache(case: Callable[..., Case]) -> None:
    """Its rows are padded, and each layer's keys and values are repeated for all heads."""

    def needed(completion: int) -> int:
        made = case("mistralai/Mistral-7B-v0.3", LORA + GRPO, f"grpo.max_completion_length={completion}")
        dynamic = {**made.facts.language, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        made.facts = replace(made.facts, language=dynamic)
        return generation_bytes(made.estimate(work="grpo"))

    cache = 2 * 32 * 32 * 1024 * 2  # of one token of every row
    repeated = 2 * 32 * 4096 * 2  # one layer's keys and values, for all its heads
    assert needed(1024) - needed(512) == 512 * (cache + repeated)


def test_a_reference_model_is_held_for_full_grpo_with_a_penalty_only(case: Callable[..., Case]) -> None:
    name = "mistralai/Mistral-7B-v0.3"
    assert "reference model" in case(name, GRPO, "grpo.beta=0.1").estimate(work="grpo").parts
    assert "reference model" not in case(name, GRPO).estimate(work="grpo").parts
    assert "reference model" not in case(name, LORA + GRPO, "grpo.beta=0.1").estimate(work="grpo").parts


def test_layers_with_a_state_have_no_pages_and_a_state_a_row(case: Callable[..., Case]) -> None:
    """Qwen3.5-9B: 8 layers of 32 attend. Rows of any length have a state of 50 MiB, and one more is a prompt's."""

    def needed(*overrides: str) -> int:
        found = case("Qwen/Qwen3.5-9B", LORA + GRPO, *overrides).estimate("h200", work="grpo")
        return found.parts["key-value cache"]

    page, state = 8 * 2 * 4 * 256 * 2 * 64, 24 * 4 * (3 * 8192 + 32 * 128 * 128)
    pages = 32 * (256 + 256) // 64 + 2
    assert needed() == pytest.approx((pages * page + 33 * state) / 0.9, abs=2)
    longer = needed("grpo.max_completion_length=512")
    assert longer - needed() == pytest.approx(32 * 4 * page / 0.9, abs=2)
    halved = needed("train.gradient_accumulation_steps=2")
    assert needed() - halved == pytest.approx(16 * (8 * page + state) / 0.9, abs=2)


def test_latent_attention_keeps_latents_alone(case: Callable[..., Case]) -> None:
    """GLM-4.7-Flash: 512 features and a rotated key of 64, of 47 layers."""
    found = case("zai-org/GLM-4.7-Flash", LORA + GRPO).estimate("h200", work="grpo")
    page, rows = 47 * 576 * 2 * 64, 32
    pages = rows * (256 + 256) // 64 + 2
    assert found.parts["key-value cache"] == pytest.approx(pages * page / 0.9, abs=2)
    assert found.generator == "merged"


def test_the_engine_allocates_what_is_counted() -> None:
    """On tensors without memory, of the shape that the estimate is made of."""
    config = json.loads((asset("configs", "Qwen--Qwen3.5-9B") / "config.json").read_text())
    described = shape_of(config)
    assert described is not None
    shape = cache_shape(described, 2)
    layout = choose_layout(shape, 64, 1000, room_bytes=None, copy_bytes=None)
    assert layout is not None
    cache = Cache(shape, layout, torch.bfloat16, torch.device("meta"))
    pools = [cache.keys, cache.values]
    for index, layer in enumerate(described.layers):
        if layer.delta_net is None:
            assert cache.layer(index).keys.shape == (layout.pages, 4, 64, 256)
        else:
            states = cache.states(index)
            assert states.inputs.shape == (65, 8192, 3)
            assert states.matrices.shape == (65, 32, 128, 128)
            pools += [states.inputs, states.matrices]
    held = sum(pool.numel() * pool.element_size() for pool in pools)
    assert cache_bytes(shape, 64, 1000) == int(held / 0.9)
