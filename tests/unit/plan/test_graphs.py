"""When layers run as CUDA graphs, what that needs, and which policy `auto` takes then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.facts.device import named_device
from ftcli.plan.checkpointing import choose_checkpointing, with_graphs_that_fit
from ftcli.plan.execution import most_graph_tokens
from ftcli.plan.memory.candidates import policies_by_speed
from ftcli.plan.run import RunPlan
from tests.estimates import Case, estimate_of, plan_of

LORA = "lora: {r: 16}\n"
NAME = "meta-llama/Llama-3.1-8B"
WITHOUT = {"train.cuda_graphs": False}
SHORT = ("data.max_seq_len=1024", "train.per_device_train_batch_size=1")


@pytest.fixture
def plan(load: Callable[..., Any]) -> Callable[..., RunPlan]:
    def _plan(*settings: str, device: str = "h100", work: str = "train") -> RunPlan:
        made = Case(load(f"model: {{name_or_path: {NAME}}}\n{LORA}", *SHORT, *settings))
        return plan_of(made.recipe, made.facts, device, work)

    return _plan


def test_small_micro_batches_run_as_graphs(plan: Callable[..., RunPlan]) -> None:
    assert plan().why_no_graphs is None
    assert plan("quantization.method=nf4").why_no_graphs is None
    assert plan("train.gradient_checkpointing=true").why_no_graphs is None


@pytest.mark.parametrize(
    ("settings", "device", "work", "reason"),
    [
        (("train.cuda_graphs=false",), "h100", "train", "train.cuda_graphs: false"),
        (("data.max_seq_len=8192", "data.packing=true"), "h100", "train", "8,192 tokens keeps the GPU busy"),
        (("data.max_seq_len=8192", "data.padding_free=false"), "h100", "train", "8,192 tokens keeps the GPU busy"),
        (("lora.dropout=0.1",), "h100", "train", "dropout draws different numbers in each step"),
        (("train.gradient_checkpointing=offload",), "h100", "train", "waits for copies to the host"),
        (("model.kernels=off",), "h100", "train", "the layers are not on Triton kernels"),
        (("lora=null",), "h100", "train", "the gradients of all weights would be held three times"),
        ((), "cpu", "train", "the layers are not on Triton kernels"),
        ((), "h100", "eval", "nothing is trained"),
    ],
)
def test_what_runs_without_graphs_says_why(
    settings: tuple[str, ...], device: str, work: str, reason: str, plan: Callable[..., RunPlan]
) -> None:
    assert reason in (plan(*settings, device=device, work=work).why_no_graphs or "")


def test_what_graphs_keep_to_themselves_is_there_in_every_phase(plan: Callable[..., RunPlan]) -> None:
    graphs, without = plan(), plan("train.cuda_graphs=false")
    found, plain = (estimate_of(s.recipe, s.facts, "h100") for s in (graphs, without))
    for phase in found.phases:
        assert {"activations", "backward workspace", "gradients", "graph buffers"} <= set(found.phases[phase])
    assert found.parts["graph buffers"] == 3 * 1024 * 4096 * 2 + 4 * graphs.trained.elements
    assert "graph buffers" not in plain.parts
    assert found.total_bytes > plain.total_bytes
    # An accumulated step holds what earlier micro-batches gave besides what the next one writes.
    again = plan("train.gradient_accumulation_steps=2")
    accumulated = estimate_of(again.recipe, again.facts, "h100")
    assert accumulated.parts["gradients"] == 2 * found.parts["gradients"]


#: Peaks in GiB with graphs: `docs/performance.md`, on an H200, and the last one on an H100.
MEASURED = [
    ("meta-llama/Llama-3.1-8B", 1, 512, "none", "false", 17.95),
    ("meta-llama/Llama-3.1-8B", 1, 1024, "none", "false", 19.67),
    ("meta-llama/Llama-3.1-8B", 1, 2048, "none", "false", 22.39),
    ("google/gemma-2-9b", 1, 1024, "none", "false", 23.63),
    ("meta-llama/Llama-3.1-8B", 1, 2048, "nf4", "lean", 6.97),
    ("google/gemma-2-9b", 2, 2048, "nf4", "false", 27.57),
]


@pytest.mark.parametrize(("name", "rows", "length", "stored", "policy", "measured"), MEASURED)
def test_the_estimate_is_what_was_measured_with_graphs(
    name: str, rows: int, length: int, stored: str, policy: str, measured: float, plan: Callable[..., RunPlan]
) -> None:
    """At most 3% low and 10% high; quantized weights leave gaps in the pool."""
    device = "h100" if rows == 2 else "h200"
    found = plan(
        f"model.name_or_path={name}", f"train.per_device_train_batch_size={rows}", f"data.max_seq_len={length}",
        f"quantization.method={stored}", f"train.gradient_checkpointing={policy}", device=device,
    )  # fmt: skip
    assert found.wholly_graphed
    predicted = estimate_of(found.recipe, found.facts, device).allocated_bytes / 2**30
    assert 0.97 <= predicted / measured <= 1.10


def test_offload_comes_last_where_the_others_run_as_graphs(plan: Callable[..., RunPlan]) -> None:
    assert policies_by_speed(plan()) == (False, "selective", True, "lean", "offload")
    assert policies_by_speed(plan("train.cuda_graphs=false")) == (False, "selective", "offload", True)
    lean = plan("train.gradient_checkpointing=auto")
    needed = estimate_of(plan("train.gradient_checkpointing=true").recipe, lean.facts, "h100").total_bytes
    device = replace(named_device("h100"), memory_bytes=int(needed / 0.9) + 2**20)
    choice = choose_checkpointing(lean.on(device).changed({"train.gradient_checkpointing": "auto"}))
    assert choice.policy is True


def test_lean_has_a_frozen_embedding_on_the_host(plan: Callable[..., RunPlan]) -> None:
    """It takes the place of `true` where that does not fit, while layers run as graphs."""
    table = 128_256 * 4096 * 2
    whole, lean = (plan(f"train.gradient_checkpointing={policy}") for policy in ("true", "lean"))
    assert lean.why_no_graphs is None
    assert (whole.host_table_bytes, lean.host_table_bytes) == (0, table)
    needed, less = (estimate_of(s.recipe, s.facts, "h100") for s in (whole, lean))
    assert needed.parts["weights"] - less.parts["weights"] == table
    assert needed.total_bytes - less.total_bytes >= table
    assert (needed.pinned_host_bytes, less.pinned_host_bytes, less.offloaded) == (0, 2**30, None)

    asked = plan().changed({"train.gradient_checkpointing": "auto"})
    device = replace(named_device("h100"), memory_bytes=int(less.total_bytes / 0.9) + 2**20)
    assert choose_checkpointing(asked.on(device)).policy == "lean"
    # Not where the host lacks the room for the table.
    poor = replace(device, host_free_bytes=2**30)
    assert choose_checkpointing(asked.on(poor)).policy != "lean"
    assert "lean" not in policies_by_speed(plan("train.cuda_graphs=false"))


@pytest.mark.parametrize(
    "settings",
    [
        ("lora.modules_to_save=[embed_tokens]",),
        ("lora.modules_to_save=[lm_head, embed_tokens]",),
        ("lora=null",),
        ("model.kernels=off",),
        ("model.name_or_path=google/gemma-2-2b",),  # the head has the same weight
        ("train.gradient_checkpointing=true",),
    ],
)
def test_an_embedding_that_has_to_stay_stays(settings: tuple[str, ...], plan: Callable[..., RunPlan]) -> None:
    made = plan("train.gradient_checkpointing=lean", *settings)
    assert made.host_table_bytes == 0
    assert "lean" not in policies_by_speed(made) or "gradient_checkpointing=true" in settings[0]


def test_adapters_are_stepped_in_one_kernel_on_a_gpu(plan: Callable[..., RunPlan]) -> None:
    assert plan().optim == "adamw_torch_fused"
    assert plan("train.optim=adamw_8bit").optim == "adamw_8bit"
    assert plan(device="cpu").optim == plan("model.kernels=off").optim == "adamw_torch"
    assert estimate_of(plan().recipe, plan().facts, "h100").parts["optimizer workspace"] == 0


def test_a_run_that_only_lacks_the_memory_of_graphs_runs_without(plan: Callable[..., RunPlan]) -> None:
    found = plan()
    needed = estimate_of(found.recipe, found.facts, "h100").total_bytes
    enough = replace(named_device("h100"), memory_bytes=int(needed / 0.9) + 2**20)
    assert with_graphs_that_fit(found.on(enough)).why_no_graphs is None
    short = found.on(replace(enough, memory_bytes=int(needed / 0.9) - 2**20))
    settled: Any = with_graphs_that_fit(short)
    assert settled.why_no_graphs == "there is no room for their memory"
    assert settled.recipe.train.cuda_graphs  # as the recipe says
    # Where it does not fit either way, nothing is changed.
    assert with_graphs_that_fit(found.on(replace(enough, memory_bytes=needed // 2))).graphs_fit


def test_rows_of_all_lengths_run_as_graphs_where_they_are_few_tokens(plan: Callable[..., RunPlan]) -> None:
    mixed = plan("data.max_seq_len=2048", "train.per_device_train_batch_size=8")
    assert mixed.tokens == 16384
    assert mixed.graphed
    assert not mixed.wholly_graphed
    assert 4096 < mixed.graph_tokens < 8192
    graphs, without = (estimate_of(s.recipe, s.facts, "h100") for s in (mixed, mixed.changed(WITHOUT)))
    pool, share = graphs.parts["graph pool"], mixed.graph_tokens / mixed.tokens
    assert pool == pytest.approx(share * (without.parts["activations"] + without.parts["backward workspace"]), rel=1e-3)
    assert all("graph pool" in phase for phase in graphs.phases.values())
    # They get what is left, and change neither the policy nor what fits.
    lean = mixed.changed({"train.gradient_checkpointing": "auto"})
    assert choose_checkpointing(lean) == choose_checkpointing(lean.changed(WITHOUT))
    roomy = replace(named_device("h100"), memory_bytes=int(graphs.total_bytes / 0.9) + 2**20)
    assert with_graphs_that_fit(mixed.on(roomy)).graphed
    tight = replace(roomy, memory_bytes=int(graphs.total_bytes / 0.9) - 2**20)
    assert not with_graphs_that_fit(mixed.on(tight)).graphed


def test_a_vocabulary_that_outweighs_the_layers_does_not_divide_by_nothing(load: Callable[..., Any]) -> None:
    """Operations are sums of floats: a head of 2**80 columns less itself leaves nothing of the layers."""
    case = Case(load(f"model: {{name_or_path: {NAME}}}\n{LORA}", *SHORT))
    assert case.facts.shape is not None
    vast = replace(case.facts, shape=replace(case.facts.shape, vocab_size=2**80))
    few, many = most_graph_tokens(case.recipe, case.facts), most_graph_tokens(case.recipe, vast)
    assert few == many
