"""What is planned for mixtures of experts: parameters, weights in NF4, generation, and what `check` says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftcli.plan.execution import execution_parts
from ftcli.plan.trained import trained_parameters
from tests.estimates import GRPO, Case, plan_of

QWEN = "Qwen/Qwen3-30B-A3B"
LORA = "lora: {r: 16}\n"
ROWS = LORA + "data: {train: [bundled:sample-chat], max_seq_len: 4096}\n"


def test_active_parameters_are_those_of_the_experts_of_a_token(case: Callable[..., Case]) -> None:
    facts = case(QWEN, ROWS).facts
    assert facts.parameters is not None
    assert facts.active_parameters is not None
    assert facts.parameters - facts.active_parameters == 48 * 120 * 3 * 2048 * 768
    assert case("Qwen/Qwen3-8B", ROWS).facts.active_parameters is None


def test_nf4_packs_experts_and_fp8_halves_them(case: Callable[..., Case]) -> None:
    methods = ("none", "nf4", "fp8")
    plain, nf4, fp8 = (case(QWEN, ROWS, f"quantization.method={x}").estimate("h200").parts["weights"] for x in methods)
    assert 15.5 * 2**30 < nf4 < 15.6 * 2**30
    experts = 48 * 128 * 3 * 2048 * 768
    assert plain - fp8 == pytest.approx(experts, rel=0.01)  # a byte each in place of two; all else as before
    dense = [case(QWEN, ROWS, f"quantization.method={x}").estimate("h200") for x in ("nf4", "fp8")]
    assert [each.parts["dequantized weights"] for each in dense] == [2 * 128 * 2 * 768 * 2048] * 2


def test_adapters_of_attention_alone_are_a_small_part(case: Callable[..., Case]) -> None:
    found = [case(QWEN, ROWS, f"lora.experts={on}") for on in ("true", "false")]
    every, few = (trained_parameters(each.recipe, each.facts.shape).elements for each in found if each.facts.shape)
    assert every == 642_514_944
    assert every - few == 48 * 128 * 16 * ((2048 + 2 * 768) + (768 + 2048))


def test_a_micro_batch_that_reading_experts_bounds_is_told(case: Callable[..., Case]) -> None:
    def said(*changes: str) -> str:
        found = case(QWEN, ROWS, *changes)
        plan = plan_of(found.recipe, found.facts, "h200", "train")
        rows = execution_parts(plan.recipe, plan.facts, plan.dtypes, plan.device, plan.execution)
        return next(row.reason for row in rows if row.part == "experts")

    full, short = said("train.per_device_train_batch_size=2"), said("data.max_seq_len=2048")
    assert "8 of them a token" in full
    assert "all experts are read" not in full
    assert "2,048 tokens takes as long as one of about 2,800" in short


def test_generation_copies_dense_layers_and_holds_adapters_of_experts_beside_them(case: Callable[..., Case]) -> None:
    every, few = (
        case(QWEN, LORA + GRPO, f"lora.experts={on}").estimate("h200", work="grpo") for on in ("true", "false")
    )
    dense = 48 * 2048 * (4096 + 512 + 512 + 4096)
    assert every.parts["merged weights"] == few.parts["merged weights"] == 2 * dense
    packed = 2 * 48 * 128 * 16 * ((2048 + 2 * 768) + (768 + 2048))
    held = [each.parts["generation"] for each in (every, few)]
    assert held[0] - held[1] == packed
