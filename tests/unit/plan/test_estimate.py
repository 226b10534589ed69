"""The memory estimate: its terms and its phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.facts.device import GPUS
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.trained import trained_parameters
from tests.estimates import GRPO, Case, plan_of

GIB = 2**30
LORA = "lora: {r: 16}\n"
ROWS = "data: {train: [a.jsonl], max_seq_len: 2048}\n"


def test_parts_of_a_lora_run_are_counted_from_the_model(case: Callable[..., Case]) -> None:
    made = case("meta-llama/Llama-3.1-8B", LORA + ROWS)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(made.facts.folder)
        lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = made.estimate().parts
    assert trained_parameters(made.recipe, made.facts.shape).elements == adapters  # type: ignore[arg-type]
    assert parts["weights"] == 2 * 8030261248
    assert parts["adapters"] == 4 * adapters
    assert parts["gradients"] == 4 * adapters
    assert parts["optimizer"] == 8 * adapters
    assert parts["autocast copies"] == 2 * adapters


def test_full_fine_tuning_holds_sixteen_bytes_a_parameter_and_cast_copies(case: Callable[..., Case]) -> None:
    made = case("google/gemma-2-2b", ROWS)
    parts, count = made.estimate().parts, 2614341888
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 16 * count
    assert "adapters" not in parts
    assert parts["autocast copies"] == 2 * (count - 256000 * 2304 - (26 * 4 + 1) * 2304)


def test_the_total_is_the_largest_phase_and_its_parts_add_up(case: Callable[..., Case]) -> None:
    for text in (LORA + ROWS, ROWS, LORA + ROWS + "train: {gradient_checkpointing: true}\n"):
        estimate = case("google/gemma-2-2b", text).estimate()
        assert estimate.total_bytes == max(estimate.phase_bytes(p) for p in estimate.phases)
        assert estimate.total_bytes == sum(estimate.parts[n] for n in estimate.phases[estimate.peak])
        assert set().union(*estimate.phases.values()) == set(estimate.parts)
        assert estimate.as_dict()["total_bytes"] == estimate.total_bytes


def test_only_capped_scores_without_a_kernel_grow_with_the_square_of_the_length(case: Callable[..., Case]) -> None:
    def growth(name: str, kernels: str) -> float:
        """Activations at 4096 tokens over those at 2048."""
        sizes = [
            case(name, LORA, f"data.max_seq_len={n}", f"model.kernels={kernels}").estimate().parts["activations"]
            for n in (2048, 4096)
        ]
        return sizes[1] / sizes[0]

    assert growth("google/gemma-2-9b", "off") > 3
    assert growth("google/gemma-2-9b", "auto") == pytest.approx(2, rel=0.01)
    assert growth("meta-llama/Llama-3.1-8B", "off") == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "text", "device", "work", "expected"),
    [
        ("google/gemma-2-9b", LORA, "h100", "train", ("fused", "triton")),
        ("google/gemma-2-9b", LORA, "t4", "train", ("fused", "eager")),
        ("google/gemma-2-9b", LORA, "cpu", "train", ("transformers", "eager")),
        ("google/gemma-2-9b", "", "h100", "train", ("fused", "triton")),
        ("google/gemma-2-9b", LORA, "h100", "eval", ("fused", "triton")),
        ("google/gemma-2-9b", "", "h100", "eval", ("fused", "triton")),
        ("google/gemma-2-9b", LORA + "#kernels: off", "h100", "train", ("transformers", "eager")),
        ("google/gemma-2-9b", LORA + "#kernels: reference", "cpu", "train", ("reference", "eager")),
        ("meta-llama/Llama-3.1-8B", LORA, "h100", "train", ("fused", "sdpa")),
        ("meta-llama/Llama-3.1-8B", LORA, "h100", "grpo", ("fused", "sdpa")),
        ("microsoft/bitnet-b1.58-2B-4T", LORA, "h100", "train", ("transformers", "sdpa")),
    ],
)
def test_what_runs_the_layers(
    name: str, text: str, device: str, work: Any, expected: tuple[str, str], case: Callable[..., Case]
) -> None:
    _, _, kernels = text.partition("#kernels: ")
    made = case(name, text, f"model.kernels={kernels or 'auto'}")
    found = plan_of(made.recipe, made.facts, device, work).execution
    assert (found.layers.code, found.attention) == expected


def test_checkpointing_trades_activations_for_one_layer_at_a_time(case: Callable[..., Case]) -> None:
    made = case("meta-llama/Llama-3.1-8B", LORA + ROWS).estimate()
    saving = case("meta-llama/Llama-3.1-8B", LORA + ROWS, "train.gradient_checkpointing=true").estimate()
    assert saving.parts["activations"] < made.parts["activations"] / 10
    assert saving.parts["backward workspace"] > made.parts["backward workspace"]
    assert saving.total_bytes < made.total_bytes


def test_each_policy_keeps_less_on_the_device_than_the_one_before(case: Callable[..., Case]) -> None:
    for kernels in ("auto", "off"):
        made = [
            case("google/gemma-2-9b", LORA + ROWS, f"model.kernels={kernels}", f"train.gradient_checkpointing={policy}")
            for policy in ("false", "selective", "true", "offload")
        ]
        sizes = [each.estimate().parts["activations"] for each in made]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == (4 if kernels == "auto" else 3)  # plain layers have no gate and up to leave out
        assert [each.estimate().pinned_host_bytes > 0 for each in made] == [False, False, False, True]


@pytest.mark.parametrize(
    ("kernels", "tensors"), [("auto", 4), ("off", 1)], ids=["halves and attention", "whole layers"]
)
def test_offload_pins_what_each_tensor_has(kernels: str, tensors: int, case: Callable[..., Case]) -> None:
    at = ("data.max_seq_len=4096", "train.per_device_train_batch_size=2", f"model.kernels={kernels}")
    made = case("google/gemma-2-9b", LORA, *at, "train.gradient_checkpointing=offload")
    assert made.estimate().pinned_host_bytes == 42 * tensors * 56 * 2**20
    assert made.estimate("cpu").pinned_host_bytes == 0
    assert made.estimate(work="eval").pinned_host_bytes == 0


def test_gradients_are_there_before_the_end_of_backward_only_under_accumulation(case: Callable[..., Case]) -> None:
    plain = ("meta-llama/Llama-3.1-8B", LORA + ROWS, "train.cuda_graphs=false")
    once = case(*plain).estimate()
    again = case(*plain, "train.gradient_accumulation_steps=2").estimate()
    for phase in ("forward", "backward"):
        assert again.phase_bytes(phase) - once.phase_bytes(phase) == once.parts["gradients"]
    for phase in ("end of backward", "optimizer step"):
        assert "gradients" in once.phases[phase]
        assert again.phase_bytes(phase) == once.phase_bytes(phase)


def test_cast_copies_are_gone_when_the_optimizer_steps(case: Callable[..., Case]) -> None:
    kept = case("google/gemma-2-2b", ROWS, "model.kernels=off").estimate()
    assert "autocast copies" in kept.phases["forward"]
    assert "autocast copies" in kept.phases["backward"]
    assert "autocast copies" not in kept.phases["optimizer step"]
    again = case("google/gemma-2-2b", ROWS, "model.kernels=off", "train.gradient_checkpointing=true").estimate()
    assert "autocast copies" in again.phases["forward"]  # autocast's own cache holds them until its context ends
    assert "autocast copies" not in again.phases["backward"]
    assert again.parts["copies run again"] == again.parts["autocast copies"] // 26


def test_on_the_kernels_one_copy_of_the_weights_stays_and_bfloat16_parameters_need_none(
    case: Callable[..., Case],
) -> None:
    made = case("google/gemma-2-2b", ROWS).estimate()
    assert all("autocast copies" in parts for parts in made.phases.values())
    parts, count = case("google/gemma-2-2b", ROWS, "train.pure_bf16=true").estimate().parts, 2614341888
    assert parts["autocast copies"] == 0
    assert parts["weights"] == parts["gradients"] == 2 * count
    assert parts["optimizer"] == 8 * count
    assert "optimizer workspace" not in parts


def test_gradients_in_bfloat16_take_half_and_their_parameters_stay(case: Callable[..., Case]) -> None:
    wide = case("google/gemma-2-2b", ROWS).estimate().parts
    narrow = case("google/gemma-2-2b", ROWS, "train.bf16_gradients=true").estimate().parts
    assert narrow["gradients"] == wide["gradients"] // 2
    unchanged = ("weights", "autocast copies", "optimizer", "head gradient", "last workspace")
    assert {name: narrow[name] for name in unchanged} == {name: wide[name] for name in unchanged}


def test_full_fine_tuning_ends_its_backward_with_the_embeddings(case: Callable[..., Case]) -> None:
    table = 4 * 256000 * 2304
    made = "train.gradient_checkpointing=true", "train.per_device_train_batch_size=1", "data.max_seq_len=64"
    once = case("google/gemma-2-2b", ROWS, *made).estimate()
    assert once.parts["last workspace"] == once.parts["head gradient"] == table
    tied = case("google/gemma-2-2b", ROWS, *made, "train.gradient_accumulation_steps=2").estimate()
    assert tied.parts["last workspace"] == 2 * table
    lora = case("google/gemma-2-2b", LORA + ROWS, *made).estimate()
    assert "head gradient" not in lora.parts
    assert lora.parts["last workspace"] < table / 100


@pytest.mark.parametrize(
    ("device", "kernels", "work", "workspaces", "mib"),
    [
        ("h200", "auto", "train", 4, 32),
        ("h200", "off", "train", 2, 32),
        ("h200", "auto", "eval", 2, 32),
        ("h200", "auto", "grpo", 4, 32),
        ("a100-80gb", "auto", "train", 4, 8.125),
        ("b200", "auto", "train", 4, 8.125),
        ("cpu", "auto", "train", 0, 0),
        ("h200", "auto", "export", 0, 0),
    ],
)
def test_cublas_has_a_workspace_for_each_thread_and_stream(
    device: str, kernels: str, work: Any, workspaces: int, mib: float, case: Callable[..., Case]
) -> None:
    settings = (f"model.kernels={kernels}", "train.cuda_graphs=false")
    made = case("meta-llama/Llama-3.1-8B", LORA + GRPO, *settings).estimate(device, work)
    assert made.parts.get("cuBLAS workspaces", 0) == workspaces * mib * 2**20


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_causal_rows_without_padding_need_no_mask_whatever_their_length(
    kernels: str, case: Callable[..., Case]
) -> None:
    sizes = [
        case("meta-llama/Llama-3.1-8B", LORA, f"data.max_seq_len={n}", f"model.kernels={kernels}").estimate()
        for n in (16384, 32768)
    ]
    assert sizes[1].parts["activations"] == 2 * sizes[0].parts["activations"]


def test_a_window_in_force_needs_a_mask_where_no_kernel_runs(case: Callable[..., Case]) -> None:
    def more(length: int, kernels: str) -> int:
        at = (f"data.max_seq_len={length}", f"model.kernels={kernels}", "train.gradient_checkpointing=true")
        with_window, without = (
            case(name, LORA, *at).estimate().parts["activations"]
            for name in ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3")
        )
        return with_window - without

    assert more(8192, "off") == 8192**2
    assert more(4096, "off") == 0
    assert more(8192, "auto") == 0


def test_the_allocators_peak_is_the_total_without_what_cuda_takes_itself(case: Callable[..., Case]) -> None:
    estimate = case("google/gemma-2-2b", LORA + ROWS).estimate()
    assert estimate.allocated_bytes == estimate.total_bytes - estimate.parts["runtime"]
    assert estimate.as_dict()["allocated_bytes"] == estimate.allocated_bytes


def test_logits_never_take_more_than_a_chunk(case: Callable[..., Case]) -> None:
    long = case("google/gemma-2-9b", LORA, "data.max_seq_len=8192", "train.per_device_train_batch_size=8").estimate()
    all_logits = 8192 * 8 * 256000 * 2
    assert all_logits > 30 * GIB
    assert long.parts["loss workspace"] <= GIB // 2


def test_evaluation_is_its_own_phase_and_only_where_there_is_something_to_evaluate(case: Callable[..., Case]) -> None:
    with_rows = "data: {train: [a.jsonl], eval: [b.jsonl], max_seq_len: 4096}\n"
    large = case("google/gemma-2-2b", LORA + with_rows, "eval.per_device_eval_batch_size=32").estimate()
    assert large.peak != "optimizer step"
    assert large.parts["evaluation"] > case("google/gemma-2-2b", LORA + with_rows).estimate().parts["evaluation"]
    assert "evaluation" not in case("google/gemma-2-2b", LORA + ROWS).estimate().phases
    only = case("google/gemma-2-2b", LORA + with_rows).estimate(work="eval")
    assert set(only.phases) == {"evaluation"}
    assert "optimizer" not in only.parts
    merging = case("google/gemma-2-2b", LORA + with_rows).estimate(work="export")
    assert set(merging.parts) == {"weights", "adapters", "runtime"}


def test_what_export_merges_is_there_weight_by_weight(case: Callable[..., Case]) -> None:
    large = case("meta-llama/Llama-3.1-8B", LORA + ROWS).estimate(work="export")
    table, layer = 128256 * 4096, 218_103_808
    assert large.parts["weights"] == max(6 * table, 14 * 14336 * 4096, 4 * layer)
    ternary = "quantization: {method: bitnet}\nexport: {formats: [bitnet]}\n"
    whole = case("google/gemma-2-2b", ternary + ROWS).estimate(work="export")
    assert whole.parts["weights"] > 4 * 2.5e9


def test_modules_saved_whole_are_trained_parameters(case: Callable[..., Case]) -> None:
    name = "meta-llama/Llama-3.1-8B"
    plain = case(name, LORA)
    with_head = case(name, "lora: {r: 16, modules_to_save: [lm_head]}\n")
    assert plain.facts.shape is not None
    more = trained_parameters(with_head.recipe, plain.facts.shape).elements
    assert more - trained_parameters(plain.recipe, plain.facts.shape).elements == 128256 * 4096
    assert with_head.estimate().parts["loss workspace"] > plain.estimate().parts["loss workspace"] + GIB


@pytest.mark.long
def test_a_family_without_a_description_is_measured(case: Callable[..., Case]) -> None:
    made = case("google/gemma-2-2b", LORA, "model.kernels=off")
    plan = plan_of(made.recipe, made.facts, GPUS["h100"])
    described = estimate_memory(plan)
    measured = estimate_memory(plan_of(made.recipe, replace(made.facts, shape=None), GPUS["h100"]))
    assert described is not None
    assert measured is not None
    for name in ("weights", "adapters", "optimizer"):
        assert measured.parts[name] == described.parts[name]
    assert measured.total_bytes == pytest.approx(described.total_bytes, rel=0.1)


FULL = "data: {train: [a.jsonl], eval: [b.jsonl], max_seq_len: 1024}\n"


def test_the_state_of_each_optimizer_is_in_the_estimate(case: Callable[..., Case]) -> None:
    made = {
        optim: case("google/gemma-2-2b", FULL, f"train.optim={optim}", "train.lr_scheduler_type=constant").estimate()
        for optim in (
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_8bit",
            "paged_adamw_8bit",
            "muon",
            "schedule_free_adamw",
        )
    }
    embedding, count = 256000 * 2304, 2614341888
    norms = (26 * 4 + 1) * 2304
    linears = count - embedding - norms
    assert made["adamw_torch"].parts["optimizer"] == made["adamw_torch_fused"].parts["optimizer"] == 8 * count
    assert "optimizer workspace" not in made["adamw_torch"].parts  # our own form of it
    plain = case("google/gemma-2-2b", FULL, "model.kernels=off").estimate()
    assert plain.parts["optimizer workspace"] == 4 * count
    eight = 8 * (embedding + norms) + 2 * linears + linears // 32
    assert made["adamw_8bit"].parts["optimizer"] == eight
    paged = made["paged_adamw_8bit"]
    assert (paged.parts["optimizer"], paged.paged_bytes) == (8 * norms, eight - 8 * norms)
    assert paged.total_bytes < made["adamw_8bit"].total_bytes
    assert made["muon"].parts["optimizer"] == 8 * (embedding + norms) + 4 * linears
    average = made["schedule_free_adamw"]
    assert average.parts["weights in training"] == 4 * count
    assert "weights in training" in average.phases["evaluation"]
    assert "weights in training" not in average.phases["backward"]


def test_dora_counts_what_it_trains_keeps_and_forms(case: Callable[..., Case]) -> None:
    name = "meta-llama/Llama-3.1-8B"
    plain, dora = case(name, LORA + ROWS, "model.kernels=off"), case(name, "lora: {r: 16, use_dora: true}\n" + ROWS)
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    less, more = plain.estimate().parts, dora.estimate().parts
    assert more["adapters"] - less["adapters"] == 4 * 32 * outputs
    assert more["activations"] > less["activations"]
    assert more["DoRA workspace"] == 4 * 14336**2 + 10 * 14336 * 4096
    assert "DoRA workspace" in dora.estimate().phases["forward"]


def test_a_choice_of_layers_counts_what_it_trains(case: Callable[..., Case]) -> None:
    name = "meta-llama/Llama-3.1-8B"
    some = "lora: {r: 16, layers_to_transform: [30, 31], rank_pattern: {q_proj: 64}}\n"
    whole, part = case(name, LORA + ROWS).estimate().parts, case(name, some + ROWS).estimate().parts
    extra = 4 * 2 * (64 - 16) * (4096 + 4096)
    assert part["adapters"] == whole["adapters"] * 2 // 32 + extra
