"""Does it fit, and what is proposed where it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.facts.device import GPUS, named_device
from ftcli.plan.memory.advice import savings
from ftcli.plan.memory.candidates import TIGHT_SHARE, leaner_policies
from ftcli.plan.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.plan.memory.terms import BACKWARD, END, FORWARD, GENERATION, STEP
from ftcli.preflight.checks import memory_and_disk
from tests.estimates import Case, plan_of

LORA = "lora: {r: 16}\n"
ROWS = "data: {train: [a.jsonl], max_seq_len: 2048}\n"


def test_fits_tight_and_does_not_fit(case: Callable[..., Case]) -> None:
    made = case("google/gemma-2-2b", LORA + ROWS)
    needed = made.estimate("h100").total_bytes
    for share, level in ((0.5, "fits"), (0.95, "tight"), (1.05, "does not fit")):
        gpu = replace(GPUS["h100"], memory_bytes=int(needed / share))
        assert made.verdict(gpu).level == level
    assert made.verdict(replace(GPUS["h100"], memory_bytes=None)).level == "unknown"
    # What is free counts, not what there is.
    assert made.verdict(replace(GPUS["h100"], free_bytes=needed // 2)).level == "does not fit"


def changed(case: Case, change: Any, device: str) -> MemoryEstimate:
    """The estimate after the proposed settings, applied the way a user would: through --set."""
    from ftcli.config.load import Override, load_recipe

    assert change is not None
    sets = str(change).split("--set ")[1:]
    overrides = [Override(item.strip().replace("'", ""), "--set") for item in sets]
    return Case(load_recipe(case.loaded.path, overrides)).estimate(device)


def test_the_first_remedy_is_a_smaller_batch_with_more_accumulation(case: Callable[..., Case]) -> None:
    made = case("meta-llama/Llama-3.1-8B", LORA + ROWS, "train.per_device_train_batch_size=2", "data.max_seq_len=4096")
    verdict = made.verdict("a100-40gb")
    assert verdict.level == "does not fit"
    assert dict(verdict.change.settings) == {
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 2,
    }


def test_then_checkpointing_then_length(case: Callable[..., Case]) -> None:
    made = case("meta-llama/Llama-3.1-8B", LORA + ROWS)
    checkpointing = made.verdict("l4").change
    assert dict(checkpointing.settings) == {"train.gradient_checkpointing": "selective"}
    plain = case("meta-llama/Llama-3.1-8B", LORA + ROWS, "model.kernels=off").verdict("l4").change
    assert dict(plain.settings) == {"train.gradient_checkpointing": True}
    long = case("google/gemma-2-2b", LORA, "data.max_seq_len=8192", "train.gradient_checkpointing=offload")
    shorter = long.verdict("t4").change
    assert "data.max_seq_len" in dict(shorter.settings)


@pytest.mark.parametrize(
    ("now", "kernels", "device", "work", "leaner"),
    [
        ("false", "auto", "h100", "train", ("selective", "offload")),
        ("true", "auto", "h100", "train", ("offload",)),
        ("selective", "auto", "h100", "train", ("offload",)),
        ("offload", "auto", "h100", "train", ()),
        ("false", "off", "h100", "train", (True, "offload")),
        ("selective", "off", "h100", "train", ("offload",)),
        ("false", "auto", "h100", "grpo", ("selective", "offload")),
        ("false", "auto", "cpu", "train", (True,)),
        ("true", "auto", "cpu", "train", ()),
    ],
)
def test_policies_that_are_proposed(
    now: str, kernels: str, device: str, work: Any, leaner: tuple[Any, ...], case: Callable[..., Case]
) -> None:
    settings = (f"train.gradient_checkpointing={now}", f"model.kernels={kernels}", "train.cuda_graphs=false")
    made = case("google/gemma-2-9b", LORA, *settings)
    assert leaner_policies(plan_of(made.recipe, made.facts, device, work)) == leaner


@pytest.mark.parametrize(
    ("name", "text", "device"),
    [
        ("meta-llama/Llama-3.1-8B", LORA + ROWS, "l4"),
        ("google/gemma-2-2b", ROWS, "rtx4090"),
        ("google/gemma-2-9b", LORA + "data: {train: [a], eval: [b], max_seq_len: 8192}\n", "a100-40gb"),
        ("google/gemma-2-9b", ROWS, "h100"),
    ],
)
def test_the_proposed_settings_do_fit_when_they_are_used(
    name: str, text: str, device: str, case: Callable[..., Case]
) -> None:
    made = case(name, text)
    verdict = made.verdict(device)
    assert verdict.level == "does not fit"
    after = changed(made, verdict.change, device)
    assert after.total_bytes == verdict.change.total_bytes
    assert after.total_bytes <= TIGHT_SHARE * (named_device(device).memory_bytes or 0)


def test_adapters_are_proposed_where_nothing_else_makes_full_training_fit(case: Callable[..., Case]) -> None:
    assert "lora" in dict(case("google/gemma-2-9b", ROWS).verdict("h100").change.settings)


def test_half_as_large_gradients_are_proposed_before_shorter_rows_and_adapters(case: Callable[..., Case]) -> None:
    whole = "train.gradient_checkpointing=true", "train.per_device_train_batch_size=1", "data.max_seq_len=4096"
    llama = case("meta-llama/Llama-3.1-8B", ROWS, *whole)
    assert dict(llama.verdict("h200").change.settings) == {"train.bf16_gradients": True}
    again = case("meta-llama/Llama-3.1-8B", ROWS, *whole, "train.bf16_gradients=true")
    assert again.verdict("h200").level == "fits"
    other = case("meta-llama/Llama-3.1-8B", ROWS, *whole, "train.optim=adafactor").verdict("h200").change
    assert other is None or "train.bf16_gradients" not in dict(other.settings)


def test_where_nothing_helps_a_gpu_is_named(case: Callable[..., Case]) -> None:
    checkpointing = "train: {gradient_checkpointing: true}\n"
    verdict = case("mistralai/Mistral-Small-24B-Base-2501", LORA + ROWS + checkpointing).verdict("t4")
    assert verdict.change is None
    assert verdict.fitting_gpus[0] in ("a100-80gb", "h100")
    assert "t4" not in verdict.fitting_gpus


@pytest.mark.parametrize("share", [0.8, 0.97])
@pytest.mark.parametrize("work", ["train", "eval"])
def test_a_smaller_evaluation_batch_is_proposed_where_it_makes_the_run_fit(
    work: str, share: float, case: Callable[..., Case]
) -> None:
    """Also where it fits only just, and nothing does better."""
    text = LORA + "data: {train: [a], eval: [b], max_seq_len: 256}\neval: {tasks: [{use: exact_match}]}\n"
    many = case("google/gemma-2-2b", text, "eval.per_device_eval_batch_size=256")
    least = case("google/gemma-2-2b", text, "eval.per_device_eval_batch_size=1").estimate("h100", work).total_bytes
    verdict = many.verdict(replace(GPUS["h100"], memory_bytes=int(least / share)), work)
    assert verdict.level == "does not fit"
    assert "eval.per_device_eval_batch_size" in verdict.change.settings
    assert verdict.change.total_bytes <= least / share


def test_more_gpus_are_proposed_where_no_change_makes_one_enough(
    case: Callable[..., Case], context: Callable[..., Any]
) -> None:
    made = case(
        "meta-llama/Llama-3.1-70B", LORA + ROWS, "quantization.method=nf4", "train.gradient_checkpointing=offload"
    )
    verdict = made.verdict("rtx4090")
    assert (verdict.change, verdict.gpus) == (None, 4)
    (finding,) = memory_and_disk.memory_findings(
        context(""), made.estimate("rtx4090"), verdict, named_device("rtx4090")
    )
    assert "--gpus 4" in finding.help
    assert "nf4" not in finding.help
    whole = case("meta-llama/Llama-3.1-70B", ROWS, "train.gradient_checkpointing=offload", "lora=null")
    assert whole.verdict("l4").gpus is None  # eight of them are too small


def test_a_gpu_without_bfloat16_gets_proposals_it_can_run(case: Callable[..., Case]) -> None:
    verdict = case("google/gemma-2-2b", LORA + ROWS, "model.dtype=bfloat16").verdict("t4")
    if verdict.change is not None:
        assert dict(verdict.change.settings)["model.dtype"] == "auto"
    assert "t4" not in verdict.fitting_gpus


def test_memory_findings_name_phase_parts_and_remedy(case: Callable[..., Case], context: Callable[..., Any]) -> None:
    made = case("meta-llama/Llama-3.1-8B", LORA + ROWS)
    estimate, verdict = made.estimate("l4"), made.verdict("l4")
    (finding,) = memory_and_disk.memory_findings(context(""), estimate, verdict, named_device("l4"))
    assert finding.code == "FT601"
    assert "weights 15.0" in finding.message
    assert "l4 has 22.0 GiB" in finding.message
    assert "--set train.gradient_checkpointing=selective" in finding.help
    tight = replace(verdict, level="tight")
    (finding,) = memory_and_disk.memory_findings(context(""), estimate, tight, named_device("l4"))
    assert (finding.code, finding.severity) == ("FT602", "warning")


def test_host_memory_is_held_against_what_is_free(case: Callable[..., Case], context: Callable[..., Any]) -> None:
    estimate = case("meta-llama/Llama-3.1-8B", LORA + ROWS, "train.gradient_checkpointing=offload").estimate()
    recipe = context("train: {gradient_checkpointing: offload}\n")
    enough = int(estimate.pinned_host_bytes / 0.9) + 2
    (finding,) = memory_and_disk.host_findings(recipe, estimate, enough - 4)
    assert (finding.code, finding.severity) == ("FT603", "error")
    assert list(memory_and_disk.host_findings(recipe, estimate, enough)) == []
    assert list(memory_and_disk.host_findings(recipe, estimate, None)) == []


def test_where_only_a_quantized_base_fits_it_is_proposed(case: Callable[..., Case]) -> None:
    """It said that nothing fits an 8B model on a T4, where NF4 in float16 does."""
    verdict = case("meta-llama/Llama-3.1-8B", LORA + ROWS).verdict("t4")
    assert verdict.level == "does not fit"
    assert dict(verdict.change.settings).items() >= {"quantization.method": "nf4", "model.dtype": "float16"}.items()
    changed(case("meta-llama/Llama-3.1-8B", LORA + ROWS), verdict.change, "t4")


def test_what_a_change_saves_is_counted_in_the_phase_in_which_memory_ran_out(case: Callable[..., Case]) -> None:
    """The trainer's names were others than the estimate's, so that the peak was taken in silence."""
    text = "data: {train: [a.jsonl], max_seq_len: 1024}\ntrain: {optim: adamw_torch, gradient_checkpointing: true}\n"
    made = case("google/gemma-2-2b", text)
    plan = plan_of(made.recipe, made.facts, "h200")
    whole = estimate_memory(plan)
    assert whole is not None
    assert whole.peak not in (FORWARD, BACKWARD)
    for phases in ((FORWARD,), (BACKWARD, END), (STEP,)):
        assert whole.most_of(phases) == max(whole.phase_bytes(phase) for phase in phases)
        for settings, saved in savings(plan, phases):
            after = estimate_memory(plan.changed(settings))
            assert after is not None
            assert saved == whole.most_of(phases) - after.most_of(phases)
    assert savings(plan, (FORWARD,)) != savings(plan)
    assert savings(plan, (GENERATION,)) == savings(plan)  # it does not generate: the peak stands for it


def test_batches_to_try_are_found_at_once_and_are_few() -> None:
    from ftcli.plan.memory.candidates import _divisors_below

    assert _divisors_below(12) == [6, 4, 3, 2, 1]
    assert _divisors_below(1) == []
    began = time.process_time()
    for number in (10**9, 735_134_400, 999_999_937):  # the last but one has more divisors than any below it
        found = _divisors_below(number)
        assert len(found) <= 32
        assert found[-1] == 1
        assert all(number % each == 0 for each in found)
    assert time.process_time() - began < 30  # a billion divisions take minutes
