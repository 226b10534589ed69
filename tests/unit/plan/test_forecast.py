"""`ftcli check --price`: held to the figures of docs/performance.md that were measured on an H100 and an H200."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftcli.cli import options
from ftcli.config.load import load_recipe
from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.plan.forecast import TokenCounts, forecast, speed_of, why_unknown
from ftcli.plan.run import RunPlan
from ftcli.tables import methods, speeds

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Measured:
    """A row of the page: recipe and settings, rows and tokens of a micro-batch, and tokens/s as the page has them."""

    recipe: str
    sets: tuple[str, ...]
    rows: int
    tokens: int
    figure: str
    gpu: str = "h200"
    policy: str = "false"


_NONE, _NF4, _FP8 = "quantization.method=none", "quantization.method=nf4", "quantization.method=fp8"
MEASURED = [
    Measured("llama3.1-8b", (), 2, 4096, "16,556"),
    Measured("llama3.1-8b", (), 2, 4096, "13,899", policy="selective"),
    Measured("llama3.1-8b", (), 2, 4096, "12,665", policy="true"),
    Measured("llama3.1-8b", (), 2, 4096, "12,990", policy="offload"),
    Measured("gemma2-9b", (), 2, 4096, "12,169"),
    Measured("gemma2-9b", (), 2, 4096, "10,434", policy="selective"),
    Measured("gemma2-9b", (), 2, 4096, "8,796", policy="true"),
    Measured("qwen3-8b", (), 2, 4096, "15,810"),
    Measured("llama3.1-8b-qlora", (), 2, 4096, "16,208"),
    Measured("gemma2-9b-qlora", (), 2, 4096, "11,880"),
    Measured("llama3.1-8b", (_FP8,), 2, 4096, "22,952"),
    Measured("gemma2-9b", (_FP8,), 2, 4096, "15,938"),
    Measured("llama3.1-8b", (), 1, 512, "15,121", gpu="h100"),
    Measured("llama3.1-8b", (), 1, 512, "15,156"),
    Measured("llama3.1-8b", (), 1, 1024, "16,450"),
    Measured("llama3.1-8b", (), 1, 2048, "17,600"),
    Measured("gemma2-9b", (), 1, 1024, "12,595"),
    Measured("llama3.1-8b-qlora", (), 1, 2048, "12,315", policy="lean"),
    Measured("qwen3.5-9b", (), 2, 4096, "15,532"),
    Measured("qwen3.5-9b", (), 1, 1024, "14,572"),
    Measured("qwen3.5-9b", ("model.name_or_path=Qwen/Qwen3.5-4B",), 2, 4096, "24,265"),
    Measured("qwen3-30b-a3b", (), 2, 4096, "21,631"),
    Measured("qwen3-30b-a3b", (_NF4,), 2, 4096, "15,059", policy="true"),
    Measured("qwen3.5-35b-a3b-qlora", (_NONE,), 2, 4096, "20,924"),
    Measured("qwen3.5-35b-a3b-qlora", (_NONE,), 2, 4096, "14,415", policy="true"),
    Measured("gpt-oss-20b", (), 2, 4096, "24,012"),
    Measured("gpt-oss-20b", (_NF4,), 2, 4096, "17,333", policy="true"),
    Measured("glm-4.7-flash", (), 2, 4096, "16,688"),
    Measured("glm-4.7-flash", (), 2, 4096, "12,586", policy="true"),
    Measured("gemma4-e4b", (), 2, 4096, "21,798"),
    Measured("gemma4-26b-a4b-qlora", (_NONE,), 2, 4096, "17,170"),
    Measured("gemma4-31b-qlora", (), 2, 4096, "3,595"),
]


ONE = ("train.gradient_accumulation_steps=1", "train.num_train_epochs=1")


def plan_of(recipe: str, gpu: str, *sets: str) -> RunPlan:
    loaded = load_recipe(ROOT / "recipes" / f"{recipe}.yaml", options.overrides(list(sets)))
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    return RunPlan(loaded.recipe, facts, named_device(gpu), "train", methods.method_of(loaded.recipe, "train"))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.recipe}-{row.figure}")
def test_a_forecast_is_within_15_percent_of_what_was_measured(row: Measured) -> None:
    assert row.figure in PAGE, "the figure is the page's"
    plan = plan_of(
        row.recipe,
        row.gpu,
        *row.sets,
        f"data.max_seq_len={row.tokens}",
        f"train.per_device_train_batch_size={row.rows}",
        f"train.gradient_checkpointing={row.policy}",
    )
    assert why_unknown(plan) is None
    found = speed_of(plan, row.rows * row.tokens)
    assert found.within == speeds.WITHIN == 0.15
    assert found.tokens_per_second == pytest.approx(float(row.figure.replace(",", "")), rel=found.within)


def test_steps_and_cost_are_those_of_the_rows() -> None:
    short = ("data.max_seq_len=1024", "train.per_device_train_batch_size=2", "train.gradient_checkpointing=false")
    plan = plan_of("llama3.1-8b", "h100", *short, "train.gradient_accumulation_steps=4", "train.num_train_epochs=2")
    found = forecast(plan, TokenCounts(tokens=1_000_000, rows=1000), price=2.5)
    assert found.steps == 2 * 125
    assert found.tokens == 2_000_000
    assert found.seconds == pytest.approx(found.tokens / found.tokens_per_second)
    assert found.cost == pytest.approx(2.5 * found.seconds / 3600)
    one = (*short, "train.gradient_accumulation_steps=1", "train.max_steps=10")
    capped = forecast(plan_of("llama3.1-8b", "h100", *one), TokenCounts(1e6, 1000), 2.5)
    assert (capped.steps, capped.tokens) == (10, 10 * 2 * 1000)
    packed = forecast(
        plan_of("llama3.1-8b", "h100", *short, *ONE, "data.packing=true"),
        TokenCounts(tokens=1_000_000, rows=1000),
        2.5,
    )
    assert packed.steps == pytest.approx(1_000_000 / 0.98 / 1024 / 2, abs=1)
    assert packed.tokens == pytest.approx(1_000_000, rel=0.01)
    two = forecast(
        plan_of("llama3.1-8b", "h100", *short, "launch.num_processes=2", "launch.engine=ddp"),
        TokenCounts(tokens=1_000_000, rows=1000),
        2.5,
    )
    assert two.cost / two.seconds == pytest.approx(2 * 2.5 / 3600)


def test_held_out_rows_take_time() -> None:
    sets = (
        "data.eval=[bundled:smoke-eval]",
        "eval.every_steps=5",
        "train.max_steps=10",
        "train.gradient_checkpointing=false",
    )
    plan = plan_of("llama3.1-8b", "h200", *sets)
    alone = forecast(plan, TokenCounts(1e6, 1000), 1.0)
    more = forecast(plan, TokenCounts(1e6, 1000, held_out=1e5), 1.0)
    assert more.seconds - alone.seconds == pytest.approx(3 * 1e5 / speeds.EVALUATION / alone.tokens_per_second)


@pytest.mark.parametrize(("recipe", "gpu", "why"), [
    ("llama3.1-8b-dpo", "h100", "DPO"), ("smoke", "h100", "float32"), ("bitnet-2b", "h100", "BitNet"),
    ("llama3.1-8b", "cpu", "cpu"),
])  # fmt: skip
def test_what_was_not_measured_is_not_foretold(recipe: str, gpu: str, why: str) -> None:
    assert why in str(why_unknown(plan_of(recipe, gpu)))


def test_other_gpus_and_full_fine_tuning_are_told_more_widely() -> None:
    known = "train.gradient_checkpointing=false"
    assert speed_of(plan_of("llama3.1-8b", "a100-80gb", known), 8192).within == speeds.ELSEWHERE
    assert speed_of(plan_of("llama3.1-8b", "h100", known, "lora=null"), 8192).within == speeds.ELSEWHERE
    fast, slow = (speed_of(plan_of("llama3.1-8b", gpu, known), 8192) for gpu in ("h200", "l4"))
    assert fast.tokens_per_second / slow.tokens_per_second == pytest.approx(989 / 121)


def test_every_family_with_a_share_of_its_own_is_one() -> None:
    from ftcli.tables import families

    known = set(families.TABLE)
    assert {name.removesuffix("_text") for name in speeds.FAMILIES} <= {re.sub("_text$", "", name) for name in known}
