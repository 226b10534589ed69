"""`train.gradient_checkpointing: auto`: the fastest policy that fits, and everything after it sees that policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.config.training import TrainConfig
from ftcli.errors import FtcliError
from ftcli.facts.device import GPUS, DeviceFacts, named_device
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.plain import plain
from ftcli.plan.checkpointing import CheckpointingChoice, choose_checkpointing
from ftcli.plan.memory.advice import relative_time, verdict_on
from ftcli.plan.memory.candidates import candidate, leaner_policies
from ftcli.plan.memory.estimate import TIGHT_SHARE, MemoryEstimate, estimate_memory
from ftcli.plan.run import RunPlan
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from tests.estimates import plan_of

LLAMA = "model: {name_or_path: meta-llama/Llama-3.1-8B}\n"
LORA = "lora: {r: 16}\ndata: {train: [bundled:sample-chat], max_seq_len: 2048}\n"
GRPO = """
lora: {r: 16}
data: {train: [bundled:sample-math]}
train: {per_device_train_batch_size: 8}
grpo: {num_generations: 8, rewards: [{use: exact_match}]}
"""
H100 = GPUS["h100"]
#: Whatever the runtime and fragmentation round to: bytes on either side of a boundary.
STEP = 2**20


class Case:
    """A recipe, what its model is, and what it comes to on a device."""

    def __init__(self, loaded: Any) -> None:
        self.loaded, self.recipe = loaded, loaded.recipe
        self.facts: ModelFacts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)

    def estimate(self, policy: Any, device: DeviceFacts = H100, work: Any = "train") -> MemoryEstimate:
        found = estimate_memory(self.plan(device, work).under(policy))
        assert found is not None
        return found

    def plan(self, device: DeviceFacts, work: Any = "train", facts: ModelFacts | None = None) -> RunPlan:
        return plan_of(self.recipe, facts or self.facts, device, work)

    def choice(self, device: DeviceFacts, work: Any = "train", facts: ModelFacts | None = None) -> CheckpointingChoice:
        return choose_checkpointing(self.plan(device, work, facts))


@pytest.fixture
def case(load: Callable[..., Any]) -> Callable[..., Case]:
    def _case(text: str = LLAMA + LORA, *overrides: str) -> Case:
        # Small micro-batches run as graphs, and have an order of policies of their own: test_graphs.py.
        return Case(load(text, "train.cuda_graphs=false", *overrides))

    return _case


def with_room_for(needed: int, *, share: float = TIGHT_SHARE, **other: Any) -> DeviceFacts:
    """An H100 of which ``needed`` bytes are just below ``share``."""
    return replace(H100, memory_bytes=int(needed / share) + STEP, **other)


def just_short_of(needed: int, **other: Any) -> DeviceFacts:
    return replace(H100, memory_bytes=int(needed / TIGHT_SHARE) - STEP, **other)


def tried(choice: CheckpointingChoice) -> list[Any]:
    return [each.policy for each in choice.tried]


@pytest.mark.parametrize(
    ("kernels", "order"),
    [("auto", [False, "selective", "offload"]), ("off", [False, True, "offload"])],
    ids=["on the kernels", "off them"],
)
def test_each_policy_is_taken_as_soon_as_it_fits(kernels: str, order: list[Any], case: Callable[..., Case]) -> None:
    made = case(LLAMA + LORA, f"model.kernels={kernels}")
    for position, policy in enumerate(order):
        needed = made.estimate(policy).total_bytes
        fits, short = made.choice(with_room_for(needed)), made.choice(just_short_of(needed))
        assert (fits.policy, tried(fits)) == (policy, order[: position + 1])
        assert fits.tried[-1].needed_bytes == needed
        assert [each.level for each in fits.tried][-1] == "fits"
        assert len(short.tried) > position + 1 or position == len(order) - 1
        assert short.policy == order[min(position + 1, len(order) - 1)]
        assert fits.reason.startswith("the fastest that fits in 90% of ")
        assert f"{needed / 2**30:.1f}" in fits.reason
        assert "\n" not in fits.reason


def test_where_none_fits_the_leanest_is_taken_be_it_tight_or_too_large(case: Callable[..., Case]) -> None:
    made = case()
    needed = made.estimate("offload").total_bytes
    for share, level in ((0.95, "tight"), (1.5, "does not fit")):
        choice = made.choice(with_room_for(needed, share=share))
        assert (choice.policy, tried(choice)) == ("offload", [False, "selective", "offload", True])
        assert choice.tried[2].level == level
        assert choice.reason.startswith("the leanest; none fits in 90% of ")


def test_offload_is_for_a_host_that_has_room_for_it(case: Callable[..., Case]) -> None:
    made = case()
    halves, whole = made.estimate("offload"), made.estimate(True)
    assert halves.total_bytes < whole.total_bytes < made.estimate("selective").total_bytes
    enough = int(halves.pinned_host_bytes / TIGHT_SHARE)
    roomy = with_room_for(whole.total_bytes, host_free_bytes=enough + STEP)
    short = with_room_for(whole.total_bytes, host_free_bytes=enough - STEP)
    assert made.choice(roomy).policy == "offload"
    # With the layers' inputs alone on the host `offload` is the slower of the two, and the leaner still. But where the
    # host lacks the room for one layer, the device has it.
    found = made.choice(short)
    assert tried(found) == [False, "selective", True]
    assert found.policy == "offload"
    assert found.uncheckpointed_layers >= 1
    found = made.choice(with_room_for(whole.total_bytes, host_free_bytes=enough // 4))
    assert (found.policy, found.uncheckpointed_layers) == (True, 0)
    layers = made.estimate("offload", short)
    assert layers.total_bytes < whole.total_bytes
    assert made.choice(replace(short, memory_bytes=int(layers.total_bytes / TIGHT_SHARE) + STEP)).policy == "offload"
    assert leaner_policies(made.plan(roomy).under(False)) == ("selective", "offload")
    assert leaner_policies(made.plan(short).under(False)) == ("selective", True, "offload")


def test_offload_is_left_out_where_the_host_has_room_for_nothing(case: Callable[..., Case]) -> None:
    made = case()
    full = just_short_of(made.estimate(True).total_bytes, host_free_bytes=0)
    choice = made.choice(full)
    assert (choice.policy, tried(choice)) == (True, [False, "selective", True, "offload"])
    assert choice.tried[-1].host_has_room is False
    pinned = made.estimate("offload", full).pinned_host_bytes
    assert f"but {pinned / 2**30:.2f} on the host, which lacks it" in choice.reason
    assert leaner_policies(made.plan(full).under(False)) == ("selective", True)


def test_layers_that_there_is_room_for_keep_everything(case: Callable[..., Case]) -> None:
    """As many as fit, and not one more; memory and time lie between those of the two policies."""
    made = case()
    device = with_room_for((made.estimate("selective").total_bytes + made.estimate(False).total_bytes) // 2)
    choice = made.choice(device)
    layers = choice.uncheckpointed_layers
    assert choice.policy == "selective"
    assert 0 < layers < 32

    def needed(count: int) -> int:
        found = estimate_memory(made.plan(H100).under("selective", count))
        assert found is not None
        return found.total_bytes

    assert needed(layers) <= TIGHT_SHARE * int(device.memory_bytes or 0) < needed(layers + 1)
    sizes = [needed(count) for count in (0, 1, 16, 31, 32)]
    assert sizes == sorted(sizes)
    assert needed(32) == pytest.approx(made.estimate(False).total_bytes, rel=1e-3)
    assert str(choice).startswith(f"selective but in the last {layers} layers: the fastest that fits")


def test_offloading_some_layers_can_be_faster_than_running_all_a_little_again(case: Callable[..., Case]) -> None:
    made = case()
    small = with_room_for(made.estimate("offload").total_bytes * 11 // 10, host_free_bytes=2**40)
    choice = made.choice(small)
    assert (choice.policy, choice.uncheckpointed_layers > 0) == ("offload", True)
    pinned = (
        Case(replace(made.loaded, recipe=choice.applied_to(made.plan(H100)).recipe))
        .estimate("offload")
        .pinned_host_bytes
    )
    whole = made.estimate("offload").pinned_host_bytes
    assert pinned * 32 == whole * (32 - choice.uncheckpointed_layers)


def test_a_budget_is_planned_with_instead_of_the_device(case: Callable[..., Case]) -> None:
    needed = (case().estimate("selective").total_bytes + case().estimate(False).total_bytes) / 2 / 2**30
    budget = f"train.memory_budget_gib={needed / TIGHT_SHARE}"
    assert report_of(case().loaded, H100).checkpointing.policy is False
    report = report_of(case(LLAMA + LORA, budget).loaded, H100)
    assert report.checkpointing.policy == "selective"
    assert report.checkpointing.uncheckpointed_layers > 0
    with pytest.raises(FtcliError, match="FT601"):  # nothing fits it: said as of a device of that size
        report_of(case(LLAMA + LORA, "train.memory_budget_gib=10").loaded, H100)


def test_dequantized_copies_keep_to_the_budget(case: Callable[..., Case]) -> None:
    nf4 = "quantization: {method: nf4, keep_dequantized: auto}\n"
    free = report_of(case(LLAMA + LORA + nf4).loaded, H100).memory
    bound = report_of(case(LLAMA + LORA + nf4, "train.memory_budget_gib=20").loaded, H100).memory
    assert free is not None
    assert bound is not None
    assert free.dequantized_layers == 32
    assert bound.total_bytes <= 20 * 2**30


def test_layers_left_out_by_hand_do_not_weigh_on_auto(case: Callable[..., Case]) -> None:
    device = with_room_for(case().estimate("selective").total_bytes)
    plain = case().choice(device)
    assert case(LLAMA + LORA, "train.uncheckpointed_layers=20").choice(device) == plain


def test_a_cpu_runs_whole_layers_again_or_none_on_the_reference_too(case: Callable[..., Case]) -> None:
    made = case(LLAMA + LORA, "model.kernels=reference")
    whole = made.estimate(True, named_device("cpu"))
    tight = replace(named_device("cpu"), memory_bytes=int(whole.total_bytes / TIGHT_SHARE) + STEP, free_bytes=None)
    choice = made.choice(tight)
    assert (choice.policy, choice.uncheckpointed_layers) == (True, 0)
    assert made.estimate("offload", named_device("cpu")).parts["activations"] > 0.9 * whole.parts["activations"]


def test_leaving_out_fewer_layers_is_proposed(case: Callable[..., Case]) -> None:
    made = case(LLAMA + LORA, "train.gradient_checkpointing=offload", "train.uncheckpointed_layers=28")
    with pytest.raises(FtcliError) as caught:
        report_of(made.loaded, with_room_for(made.estimate("offload").total_bytes * 8 // 10))
    helps = [finding.help or "" for finding in caught.value.findings if finding.code == "FT601"]
    assert any("train.uncheckpointed_layers=0" in text and "max_seq_len" not in text for text in helps), helps


def test_a_cpu_recomputes_only_what_it_has_no_room_for(case: Callable[..., Case]) -> None:
    made = case("lora: {r: 4}\n" + "data: {train: [a], max_seq_len: 2048}\n")
    cpu = replace(named_device("cpu"), memory_bytes=2**37, free_bytes=2**37)
    assert made.choice(cpu).policy is False
    needed = made.estimate(False, cpu).total_bytes
    assert made.choice(replace(cpu, free_bytes=needed)).policy is True
    assert made.choice(replace(cpu, memory_bytes=None, free_bytes=None)).policy is False


def test_a_family_without_a_description_gets_what_fits_too(case: Callable[..., Case]) -> None:
    made = case(LLAMA + LORA, "train.per_device_train_batch_size=2", "data.max_seq_len=4096")
    facts = replace(made.facts, shape=None, text_type="newcomer")
    assert made.choice(replace(H100, memory_bytes=140 * 2**30), facts=facts).policy is False
    assert made.choice(replace(H100, memory_bytes=48 * 2**30), facts=facts).policy is True


def test_what_would_fit_is_not_known_for_a_silent_device(case: Callable[..., Case]) -> None:
    made = case()
    silent = made.choice(replace(H100, memory_bytes=None))
    assert (silent.policy, silent.tried) == (True, ())
    assert "does not say how much memory it has" in silent.reason


def test_what_the_recipe_says_is_not_weighed(case: Callable[..., Case]) -> None:
    for text, policy in (("false", False), ("selective", "selective"), ("offload", "offload"), ("true", True)):
        choice = case(LLAMA + LORA, f"train.gradient_checkpointing={text}").choice(replace(H100, memory_bytes=2**30))
        assert (choice.requested, choice.policy, choice.tried) == (policy, policy, ())


def test_nothing_is_weighed_where_nothing_is_trained(case: Callable[..., Case]) -> None:
    for work in ("eval", "export"):
        choice = case().choice(replace(H100, memory_bytes=2**30), work)
        assert (choice.policy, choice.tried) == (False, ())


def test_evaluation_that_is_too_large_slows_no_training_down(case: Callable[..., Case]) -> None:
    rows = "data: {train: [bundled:sample-chat], eval: [bundled:sample-chat-eval], max_seq_len: 2048}\n"
    made = case(LLAMA + "lora: {r: 16}\n" + rows, "eval.per_device_eval_batch_size=512")
    assert made.estimate(False).peak == "evaluation"
    assert made.choice(GPUS["a100-40gb"]).policy is False
    with pytest.raises(FtcliError) as caught:
        preflight(made.loaded, command="train", device=GPUS["a100-40gb"], offline=True)
    (finding,) = [each for each in caught.value.findings if each.code == "FT601"]
    assert finding.help is not None
    assert finding.help.startswith("--set eval.per_device_eval_batch_size=")


def test_dequantized_copies_take_what_the_policy_leaves(case: Callable[..., Case]) -> None:
    """They save less of a step than a policy costs, so they come second."""
    made = case(LLAMA + LORA, "quantization.method=nf4", "quantization.keep_dequantized=auto")
    lean = case(LLAMA + LORA, "quantization.method=nf4")
    kept = lean.estimate(False).total_bytes
    for device in (with_room_for(kept), GPUS["a100-40gb"], H100):
        assert made.choice(device).policy is False
        assert made.choice(device).tried == lean.choice(device).tried
    assert made.estimate(False, with_room_for(kept)).dequantized_layers == 0
    report = preflight(made.loaded, command="train", device=H100, offline=True)
    assert report.memory is not None
    assert (report.checkpointing.policy, report.memory.dequantized_layers) == (False, 32)
    assert made.choice(just_short_of(kept)).policy == "selective"
    # Copies that the recipe insists on are part of what has to fit.
    always = case(LLAMA + LORA, "quantization.method=nf4", "quantization.keep_dequantized=true")
    assert always.choice(with_room_for(kept)).policy != False  # noqa: E712


def report_of(loaded: Any, device: DeviceFacts) -> PreflightReport:
    return preflight(loaded, command="train", device=device, offline=True)


@pytest.mark.parametrize(
    ("device", "policy"), [("h100", False), ("a100-40gb", False), ("l4", "selective")], ids=["80", "40", "22"]
)
def test_the_report_has_the_recipe_as_it_runs(device: str, policy: Any, case: Callable[..., Case]) -> None:
    made = case()
    assert made.recipe.train.gradient_checkpointing == "auto"
    report = report_of(made.loaded, named_device(device))
    assert (report.checkpointing.requested, report.checkpointing.policy) == ("auto", policy)
    assert report.recipe.train.checkpointing == policy
    assert report.recipe == report.checkpointing.applied_to(made.plan(H100)).recipe
    assert report.memory == Case(replace(made.loaded, recipe=report.recipe)).estimate(policy, named_device(device))
    values = json.loads(json.dumps(plain(report)))["checkpointing"]
    assert (values["requested"], values["policy"]) == ("auto", policy)
    assert [each["policy"] for each in values["tried"]] == tried(report.checkpointing)
    assert str(report.checkpointing).startswith(str(policy).lower())
    assert ": the fastest that fits" in str(report.checkpointing)


def test_an_open_setting_never_passes_for_a_policy(case: Callable[..., Case]) -> None:
    with pytest.raises(ValueError, match="has not been resolved"):
        _ = TrainConfig(gradient_checkpointing="auto").checkpointing
    made = case()
    with pytest.raises(ValueError, match="has not been resolved"):
        estimate_memory(made.plan(H100))
    assert TrainConfig(gradient_checkpointing="offload").checkpointing == "offload"


def test_a_run_that_fits_nowhere_is_refused_as_before_with_what_helps(case: Callable[..., Case]) -> None:
    made = case(LLAMA + LORA, "train.per_device_train_batch_size=8", "data.max_seq_len=8192")
    gpu = GPUS["l4"]
    with pytest.raises(FtcliError) as caught:
        report_of(made.loaded, gpu)
    (finding,) = [each for each in caught.value.findings if each.code == "FT601"]
    assert finding.help is not None
    sets = [item.split(" (")[0].strip() for item in finding.help.split(";")[0].split("--set ")[1:]]
    assert any(item.startswith("train.per_device_train_batch_size=") for item in sets)
    # The policy is open still: applied, the change fits whatever `auto` makes of the room it leaves.
    helped = case(LLAMA + LORA, "train.per_device_train_batch_size=8", "data.max_seq_len=8192", *sets)
    found = report_of(helped.loaded, gpu)
    assert found.verdict is not None
    assert found.verdict.level == "fits"


@pytest.mark.parametrize(
    ("rows", "length", "policy", "on_kernels", "expected"),
    [
        (2, 4096, False, True, 1.03125),
        (1, 4096, False, True, 1.0625),
        (1, 512, False, True, 1.5),
        (2, 4096, "selective", True, 1.19 * 1.03125),
        (2, 4096, "offload", True, 1.31 * 1.03125),
        (2, 4096, True, True, 1.36 * 1.03125),
        (2, 4096, "selective", False, 1.42 * 1.03125),
    ],
)
def test_time_of_a_token(
    rows: int, length: int, policy: Any, on_kernels: bool, expected: float, case: Callable[..., Case]
) -> None:
    made = case(LLAMA + LORA, f"train.per_device_train_batch_size={rows}", f"data.max_seq_len={length}")
    plan = made.plan(H100).changed({"model.kernels": "auto" if on_kernels else "off"})
    assert relative_time(plan.under(policy)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (2, 4096, {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 2}),
        (4, 512, {"train.gradient_checkpointing": "selective"}),
    ],
    ids=["half of 8192 tokens costs 3%", "a quarter of 2048 tokens costs 33%"],
)
def test_the_change_that_costs_least_speed_is_proposed(
    rows: int, length: int, expected: dict[str, Any], case: Callable[..., Case]
) -> None:
    """On a device where either one row fits as it is, or all of them under `selective`, which costs 19%."""
    made = case(LLAMA + LORA, f"data.max_seq_len={length}", f"train.per_device_train_batch_size={rows}")
    single = ("train.per_device_train_batch_size=1", f"train.gradient_accumulation_steps={rows}")
    one = case(LLAMA + LORA, f"data.max_seq_len={length}", *single)
    gpu = with_room_for(max(one.estimate(False).total_bytes, made.estimate("selective").total_bytes))
    found = candidate(made.plan(gpu).under(False))
    assert found is not None
    change = verdict_on(found).change
    assert change is not None
    assert dict(change.settings) == expected
