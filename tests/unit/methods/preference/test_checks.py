"""Rules of the section `preference`, each with a recipe that breaks it and one that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftcli.methods.preference.checks import caches, check, needs_second_model, other_model
from ftcli.preflight.checks import support
from ftcli.preflight.checks.context import Context

Make = Callable[..., Context]
MODEL = "model: {name_or_path: google/gemma-2-2b}\nlora: {r: 8}\ndata: {max_seq_len: 64}\n"


@pytest.fixture
def context(load: Callable[..., object]) -> Make:
    """``context(setting, ...)`` of a recipe for pairs."""

    def _context(*settings: str, method: str = "dpo") -> Context:
        loaded = load(MODEL, f"train.method={method}", *settings)
        return Context(loaded.recipe, loaded.origins, "train")  # type: ignore[attr-defined]

    return _context


REFUSED = [
    ("preference.loss=[]", "preference.loss is empty"),
    ("preference.loss=ipo", "preference.loss ipo compares nats a token"),
    ("preference.loss=sigmoid_norm", "preference.loss sigmoid_norm compares nats a token"),
    ("preference={loss: ipo, beta: 0.5, label_smoothing: 0.1}", "preference.label_smoothing has no meaning for ipo"),
    ("preference={loss: apo_zero, label_smoothing: 0.1}", "preference.label_smoothing has no meaning for apo_zero"),
    ("preference.gamma=1", "preference.gamma is read by simpo only"),
    ("preference.reference=none", "compares with a reference, and preference.reference is none"),
    ("preference={loss: simpo, reference: start}", "compares with nothing, and preference.reference is start"),
    ("preference={loss: simpo, reference: org/other}", "compares with nothing, and preference.reference is org/other"),
    ("preference.reference=base", "preference.reference base is no known word"),
    ("preference.reference_revision=v2", "preference.reference names none"),
    ("preference={reference: start, reference_revision: v2}", "preference.reference names none"),
    ("preference={reference: org/other, reference_cache: off}", "would have org/other in memory beside the model"),
    ("preference.reference_cache=atuo", "preference.reference_cache atuo is no known word"),
    ("preference={loss: simpo, reference_cache: ./cache}", "there is no reference to keep"),
]


@pytest.mark.parametrize(("setting", "said"), REFUSED)
def test_what_contradicts_a_loss_is_refused(setting: str, said: str, context: Make) -> None:
    (finding,) = check(context(setting))
    assert (finding.code, finding.severity) == ("FT282", "error")
    assert said in finding.message
    assert finding.help


WARNED = [
    ("train.learning_rate=2e-4", "dpo", "a learning rate of 0.0002 is high for DPO"),
    ("preference={loss: sigmoid_norm, beta: 0.1}", "dpo", "preference.beta 0.1 with sigmoid_norm"),
    ("preference={loss: ipo, beta: 0.1}", "dpo", "asks for a margin of 5 nats a token"),
    ("preference.beta=0.1", "simpo", "preference.beta 0.1 with simpo"),
    ("preference.reference_cache=./cache", "dpo", "in one epoch each pair is seen once"),
    ("preference={loss: [{name: sigmoid}, {name: bco_pair}], label_smoothing: 0.2}", "dpo", "no meaning for bco_pair"),
]


@pytest.mark.parametrize(("setting", "method", "said"), WARNED)
def test_values_that_are_known_not_to_work_are_told(setting: str, method: str, said: str, context: Make) -> None:
    (finding,) = check(context(setting, method=method))
    assert (finding.code, finding.severity) == ("FT283", "warning")
    assert said in finding.message


FINE = [
    ("train.max_steps=3", "dpo"),
    ("train.max_steps=3", "orpo"),
    ("train.max_steps=3", "simpo"),
    ("preference={loss: ipo, beta: 0.5}", "dpo"),
    ("preference={loss: sigmoid_norm, beta: 5}", "dpo"),
    ("preference={label_smoothing: 0.1, sft_weight: 1, ld_alpha: 0.5, reference: start}", "dpo"),
    ("preference={loss: [{name: sigmoid, weight: 0.8}, {name: bco_pair, weight: 0.2}]}", "dpo"),
    ("preference={loss: cpo, sft_weight: 1, reference: none}", "dpo"),
    ("preference={gamma: 1, beta: 2.5}", "simpo"),
    ("preference.reference_cache=off", "dpo"),
]


def test_a_cache_pays_where_pairs_are_seen_again(context: Make) -> None:
    assert list(check(context("preference.reference_cache=./cache", "train.num_train_epochs=2"))) == []
    assert list(check(context("preference.reference_cache=./cache", "lora=null"))) == []
    assert list(check(context("preference={reference: org/other, reference_cache: ./cache}"))) == []


@pytest.mark.parametrize("name", ["org/other", "./other", "/models/other", "bundled:tiny-gemma2"])
def test_a_reference_may_be_another_model_which_is_always_asked_ahead(name: str, context: Make) -> None:
    found = context(f"preference.reference={name}")
    assert list(check(found)) == []
    assert caches(found.recipe, "surely")
    assert not needs_second_model(context(f"preference.reference={name}", "lora=null").recipe)
    other = other_model(found.recipe)
    assert other is not None
    assert (other.key, other.model.name_or_path, other.model.init) == ("preference.reference", name, "pretrained")
    for without in ("start", "none"):
        assert other_model(context(f"preference.reference={without}").recipe) is None
    assert other_model(context("preference={loss: simpo, reference: org/other}").recipe) is None


def test_its_revision_is_its_own(context: Make) -> None:
    settings = ("model.revision=v1", "preference={reference: org/other, reference_revision: v2}")
    other = other_model(context(*settings).recipe)
    assert other is not None
    assert other.model.revision == "v2"
    other = other_model(context("model.revision=v1", "preference.reference=org/other").recipe)
    assert other is not None
    assert other.model.revision is None


@pytest.mark.parametrize("launch", ["{engine: fsdp, num_processes: 2}", "{context_parallel_size: 2, num_processes: 2}"])
def test_a_cache_is_for_every_engine(launch: str, context: Make) -> None:
    settings = (f"launch={launch}", "preference.reference_cache=./cache")
    assert list(check(context(*settings, "train.num_train_epochs=2"))) == []


@pytest.mark.parametrize(("setting", "method"), FINE)
def test_what_recipes_say_is_let_pass(setting: str, method: str, context: Make) -> None:
    assert list(check(context(setting, method=method))) == []
    assert list(support.check(context(setting, method=method), lambda package: True)) == []


def test_defaults_are_those_of_the_method(context: Make, load: Callable[..., object]) -> None:
    recipes = {method: context(method=method).recipe for method in ("dpo", "orpo", "simpo")}
    assert {name: recipe.train.learning_rate for name, recipe in recipes.items()} == {
        "dpo": 1e-5,
        "orpo": 5e-6,
        "simpo": 5e-6,
    }
    assert {recipe.data.format for recipe in recipes.values()} == {"preference"}
    full = load(MODEL.replace("lora: {r: 8}\n", ""), "train.method=dpo").recipe  # type: ignore[attr-defined]
    assert full.train.learning_rate == 5e-7


def test_the_section_under_another_method_is_refused(context: Make) -> None:
    """It would be read past: the run would be supervised fine-tuning on whatever its rows are."""
    found = [f for f in support.check(context("preference.beta=0.2", method="sft")) if f.code == "FT250"]
    assert [finding.message for finding in found] == ["the section preference is not read under train.method: sft"]
    assert "train.method: dpo | orpo | simpo" in str(found[0].help)
