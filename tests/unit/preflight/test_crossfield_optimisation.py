"""Schedules and optimizers that a recipe cannot use are refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ftcli.config.training import TrainConfig
from ftcli.errors import FtcliError
from ftcli.methods.grpo import checks as grpo
from ftcli.preflight.checks import crossfield
from ftcli.preflight.checks.context import Context
from ftcli.train.optimizer import schedule_arguments


def found(context: Context, *missing: str) -> list[tuple[str, str]]:
    findings: Iterable[Any] = crossfield.check_optimisation(context, lambda package: package not in missing)
    return [(finding.code, finding.message) for finding in findings]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            "lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr: 1e-5}",
            "the schedule cosine has no argument min_lr",
        ),
        ("lr_scheduler_type: cosine_with_min_lr", "needs exactly one of min_lr and min_lr_rate"),
        ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-5, min_lr_rate: 0.1}", "exactly one"),
        ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0}", "min_lr 1.0 cannot be used"),
        ("lr_scheduler_type: warmup_stable_decay", "needs num_decay_steps"),
        ("lr_scheduler_type: greedy", "needs min_lr and max_lr"),
        ("lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 1.5}", "num_cycles 1.5 cannot"),
        ("lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 3, decay_type: exp}", "exp"),
        ("lr_scheduler_type: polynomial, learning_rate: 1e-8", "is not above lr_end, which is 1e-07"),
        (
            "lr_scheduler_type: warmup_stable_decay, warmup_steps: 5, max_steps: 10, "
            "lr_scheduler_kwargs: {num_decay_steps: 6}",
            "are longer than training: warmup_steps 5, num_decay_steps 6, of 10 steps",
        ),
    ],
)
def test_arguments_are_refused_before_anything_is_built(
    settings: str, said: str, context: Callable[..., Context]
) -> None:
    text = f"data: {{train: [a.jsonl], eval: [b.jsonl]}}\neval: {{every_steps: 2}}\ntrain: {{{settings}}}\n"
    codes = [(code, message) for code, message in found(context(text)) if code != "FT259"]
    assert [code for code, _ in codes] == ["FT272"]
    assert said in codes[0][1]


def test_stages_that_turn_out_longer_than_an_epoch_are_refused() -> None:
    kwargs = {"num_decay_steps": 60}
    settings = TrainConfig(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs, warmup_steps=0.5)
    with pytest.raises(FtcliError) as error:
        schedule_arguments(settings, 100)
    assert [finding.code for finding in error.value.findings] == ["FT272"]
    assert schedule_arguments(settings, 200) == {"num_decay_steps": 60}


def test_a_schedule_by_evaluations_needs_them(context: Callable[..., Context]) -> None:
    text = "data: {train: [a.jsonl]}\ntrain: {lr_scheduler_type: reduce_lr_on_plateau}\n"
    assert [code for code, _ in found(context(text))] == ["FT255"]
    assert found(context(text + "eval: {every_steps: 2}\n")) == []


SCHEDULE_FREE = "data: {train: [a.jsonl]}\ntrain: {optim: schedule_free_adamw, lr_scheduler_type: constant}\n"


def test_schedule_free_optimizers_take_no_schedule(context: Callable[..., Context]) -> None:
    assert found(context(SCHEDULE_FREE, "train.warmup_steps=0.1")) == []
    with_schedule = found(context(SCHEDULE_FREE, "train.lr_scheduler_type=cosine"))
    assert [code for code, _ in with_schedule] == ["FT273"]
    assert "replaces the learning-rate schedule, and lr_scheduler_type is cosine" in with_schedule[0][1]
    assert [code for code, _ in found(context(SCHEDULE_FREE, "train.adam_beta1=0.0"))] == ["FT273"]


def test_only_schedule_free_optimizers_that_warm_up_read_the_warm_up(context: Callable[..., Context]) -> None:
    radam = found(context(SCHEDULE_FREE, "train.optim=schedule_free_radam", "train.warmup_steps=5"))
    assert radam == [("FT259", "train.warmup_steps has no effect with lr_scheduler_type: constant")]


@pytest.mark.parametrize(("optim", "package"), [("adamw_8bit", "bitsandbytes"), ("schedule_free_sgd", "schedulefree")])
def test_an_optimizer_of_a_package_that_is_not_there_is_refused(
    optim: str, package: str, context: Callable[..., Context]
) -> None:
    text = f"data: {{train: [a.jsonl]}}\ntrain: {{optim: {optim}, lr_scheduler_type: constant}}\n"
    said = f"train.optim: {optim} needs the package {package}, which is not installed"
    assert found(context(text), package) == [("FT253", said)]
    assert found(context(text)) == []


def adapter_findings(context: Context) -> list[tuple[str, str]]:
    section = context.recipe.grpo
    ours = () if section is None else grpo.reference_findings(context, section)
    return [(finding.code, finding.message) for finding in (*crossfield.check_adapters(context), *ours)]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("lora: {use_dora: true}\nquantization: {method: nf4}\n", "FT274", "DoRA needs the norm"),
        (
            "lora: {init_lora_weights: pissa}\nquantization: {method: nf4}\n",
            "FT274",
            "changes the base weights, which quantization.method: nf4 freezes",
        ),
        ("lora: {init_lora_weights: olora, use_dora: true}\n", "FT274", "cannot be saved as a plain adapter"),
        ("lora: {init_lora_weights: pissa_niter_4}\ngrpo: {beta: 0.1}\n", "FT274", "without adapters"),
        ("lora: {layers_pattern: [layers]}\n", "FT274", "no effect without lora.layers_to_transform"),
        ("train: {loraplus_lr_ratio: 8.0}\n", "FT274", "there is no `lora` section"),
        ("lora: {exclude_modules: '('}\n", "FT264", "not a regular expression"),
        ("lora: {alpha_pattern: {'(?i)q_proj': 3.0}}\n", "FT264", "not a regular expression"),
        ("lora: {rank_pattern: {'q[': 3}}\n", "FT264", "not a regular expression"),
        ("lora: {layers_to_transform: [1], layers_pattern: ['(']}\n", "FT264", "not a regular expression"),
    ],
)
def test_adapter_settings_that_exclude_each_other(
    text: str, code: str, said: str, context: Callable[..., Context]
) -> None:
    found = adapter_findings(context(text))
    assert [one for one, _ in found] == [code]
    assert said in found[0][1]


@pytest.mark.parametrize(
    "text",
    [
        "lora: {use_dora: true}\n",
        "lora: {init_lora_weights: pissa}\ngrpo: {beta: 0.0}\n",
        "lora: {init_lora_weights: gaussian}\nquantization: {method: nf4}\n",
        "lora: {layers_to_transform: [0], layers_pattern: [layers]}\ntrain: {loraplus_lr_ratio: 8.0}\n",
    ],
)
def test_adapter_settings_that_go_together(text: str, context: Callable[..., Context]) -> None:
    assert adapter_findings(context(text)) == []


@pytest.mark.parametrize("word", ["pisa", "pissa_niter_0", "eva", "false", "loftq"])
def test_beginnings_that_are_not_offered(word: str, load: Callable[..., Any]) -> None:
    with pytest.raises(FtcliError):
        load(f"lora: {{init_lora_weights: {word}}}\n")


def test_experts_are_meant_where_a_list_names_them(context: Callable[..., Context]) -> None:
    listed = context("lora: {experts: false, target_modules: [q_proj]}\n")
    assert [code for code, said in adapter_findings(listed) if "lora.experts has no effect" in said] == ["FT259"]
    for text in ("lora: {experts: false}\n", "lora: {target_modules: [q_proj]}\n", "lora: {experts: true}\n"):
        assert not [said for _, said in adapter_findings(context(text)) if "experts" in said]
