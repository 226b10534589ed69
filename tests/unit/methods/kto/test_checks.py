"""Rules of the section `preference` under KTO, each with a recipe that breaks it and one that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftcli.methods.kto.checks import check
from ftcli.methods.preference.checks import check as check_pairs
from ftcli.preflight.checks import support
from ftcli.preflight.checks.context import Context

Make = Callable[..., Context]
MODEL = "model: {name_or_path: google/gemma-2-2b}\nlora: {r: 8}\ndata: {max_seq_len: 64}\n"
BATCH = "train.per_device_train_batch_size=8"


@pytest.fixture
def context(load: Callable[..., object]) -> Make:
    """``context(setting, ...)`` of a recipe for labelled answers."""

    def _context(*settings: str, method: str = "kto") -> Context:
        loaded = load(MODEL, f"train.method={method}", BATCH, *settings)
        return Context(loaded.recipe, loaded.origins, "train")  # type: ignore[attr-defined]

    return _context


ONE = ("train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=1")
REFUSED = [
    (["preference.loss=sigmoid"], "preference.loss sigmoid is not one loss of labelled answers"),
    (["preference.loss=[]"], "preference.loss without a name is not one loss"),
    (["preference.loss=[{name: kto}, {name: apo_zero_unpaired}]"], "kto + apo_zero_unpaired is not one loss"),
    (["preference.loss=[{name: kto, weight: 2}]"], "preference.loss kto is not one loss"),
    (["preference.label_smoothing=0.1"], "preference.label_smoothing is about pairs of answers"),
    (["preference.gamma=1"], "preference.gamma is about pairs of answers"),
    (["preference.ld_alpha=0.5"], "preference.ld_alpha is about pairs of answers"),
    (["preference.reference_cache=atuo"], "preference.reference_cache atuo is no known word"),
    (["preference.reference=base"], "preference.reference base is no known word"),
    (["preference={reference: org/other, reference_cache: off}"], "would have org/other in memory beside the model"),
    (["preference.reference=none"], "compares with a reference, and preference.reference is none"),
    (["preference={loss: apo_zero_unpaired, kl_rows: 4}"], "preference.kl_rows has no meaning for apo_zero_unpaired"),
    (ONE, "a step of one row: its KL is estimated from the answers to other prompts"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_contradicts_the_loss_is_refused(settings: list[str], said: str, context: Make) -> None:
    (finding,) = check(context(*settings))
    assert (finding.code, finding.severity) == ("FT282", "error")
    assert said in finding.message
    assert finding.help


WARNED = [
    ("train.learning_rate=2e-4", "a learning rate of 0.0002 is high for KTO"),
    ("train.per_device_train_batch_size=4", "a step of 4 rows: its KL"),
    ("preference.reference_cache=./cache", "in one epoch each row is seen once"),
]


@pytest.mark.parametrize(("setting", "said"), WARNED)
def test_values_that_are_known_not_to_work_are_told(setting: str, said: str, context: Make) -> None:
    (finding,) = check(context("train.gradient_accumulation_steps=1", setting))
    assert (finding.code, finding.severity) == ("FT283", "warning")
    assert said in finding.message


FINE = [
    "preference.beta=0.3",
    "preference={loss: kto, desirable_weight: 1.2, undesirable_weight: 0.5, kl_rows: 4, sft_weight: 0.1}",
    "preference={loss: apo_zero_unpaired, reference: start}",
    "preference.loss=[{name: kto}]",
]


@pytest.mark.parametrize("setting", FINE)
def test_what_recipes_say_is_let_pass(setting: str, context: Make) -> None:
    assert list(check(context(setting))) == []
    assert list(support.check(context(setting), lambda package: True)) == []


def test_unpaired_apo_takes_a_step_of_one_row(context: Make) -> None:
    assert list(check(context(*ONE, "preference.loss=apo_zero_unpaired"))) == []


@pytest.mark.parametrize("setting", ["loss=kto", "loss=apo_zero_unpaired", "desirable_weight=2", "kl_rows=3"])
def test_pairs_do_not_take_what_is_kto_s(setting: str, context: Make) -> None:
    (finding,) = check_pairs(context(f"preference.{setting}", method="dpo"))
    assert finding.code == "FT282"
    assert "train.method: kto" in f"{finding.message}{finding.help}"


def test_defaults_are_those_of_the_method(load: Callable[..., object]) -> None:
    adapters, full = (
        load(text, "train.method=kto").recipe  # type: ignore[attr-defined]
        for text in (MODEL, MODEL.replace("lora: {r: 8}\n", ""))
    )
    assert (adapters.train.learning_rate, full.train.learning_rate) == (1e-5, 5e-7)
    assert (adapters.data.format, adapters.train.warmup_steps) == ("labelled", 0.1)


@pytest.mark.parametrize("setting", ["data.format=messages", "data.packing=true"])
def test_what_it_does_not_offer_is_refused(setting: str, context: Make) -> None:
    assert "FT250" in [finding.code for finding in support.check(context(setting))]
