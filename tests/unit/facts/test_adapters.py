"""Which layers have adapters, of which rank and scale: as PEFT decides it, in what is built and in what is counted."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
from peft.tuners.lora import LoraLayer

from ftcli.config.model import LoraConfig
from ftcli.errors import FtcliError
from ftcli.facts.adapters import AdapterChoice, adapters, problems, targets_of
from ftcli.facts.shape import shape_of
from ftcli.model.lora import apply_lora
from ftcli.model.lora_targets import planned_adapters
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import trained_parameters
from tests.small_models import build, config_of
from tests.unit.conftest import Load

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHOICES: list[dict[str, Any]] = [
    {"layers_to_transform": [1]},
    {"layers_to_transform": [0], "layers_pattern": ["layers"]},
    {"exclude_modules": ["q_proj", "mlp.up_proj"]},
    {"exclude_modules": r".*\.(k|v)_proj|model\.layers\.0\..*"},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"rank_pattern": {"q_proj": 7, "down_proj": 2}},
    {"rank_pattern": {r"layers\.1\..*": 6, "q_proj": 7}},
    {"rank_pattern": {r"model.layers.0.self_attn.q_proj": 5}, "alpha_pattern": {"o_proj": 3.0, r".*\.0\..*": 9.0}},
    {"alpha_pattern": {"gate_proj": 1.5}, "use_rslora": True, "rank_pattern": {"gate_proj": 9}},
    {"use_dora": True, "layers_to_transform": [0], "rank_pattern": {"v_proj": 3}},
]


def both(model_type: str, values: dict[str, Any]) -> tuple[Any, Any]:
    """The model that we adapt, and the one that PEFT does from the same settings."""
    lora = LoraConfig.model_validate({"r": 4, "alpha": 6, **values})
    ours, _ = apply_lora(build(model_type), lora, PLAN, seed=0)
    settings = dict(values)
    targets = settings.pop(
        "target_modules", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **settings)
    return ours, peft.get_peft_model(build(model_type), config)


def described(model: Any) -> dict[str, Any]:
    """Shapes of what is trained, and each adapter's scale."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    scales = {
        name: m.scaling["default"] for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)
    }
    return {**shapes, **scales}


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("values", CHOICES)
def test_the_choice_is_pefts(model_type: str, values: dict[str, Any], load: Load) -> None:
    ours, theirs = both(model_type, values)
    assert described(ours) == described(theirs)
    assert any(p.requires_grad for p in ours.parameters())
    lora = LoraConfig.model_validate({"r": 4, **values})
    shape = shape_of(config_of(model_type).to_dict())
    assert shape is not None
    recipe = load().recipe.model_copy(update={"lora": lora})
    count = sum(p.numel() for p in ours.parameters() if p.requires_grad)
    assert trained_parameters(recipe, shape).elements == count
    assert planned_adapters(build(model_type), lora).parameters == count


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layers_to_transform": [1, 99]}, "lora.layers_to_transform: no layer with adapters has the number 99"),
    ({"layers_to_transform": [0], "layers_pattern": ["blocks"]}, "lora.layers_to_transform: no layer with adapters"),
    ({"exclude_modules": ["qproj"]}, "lora.exclude_modules: no module that would have an adapter is excluded by qproj"),
    ({"exclude_modules": ".*"}, "lora.exclude_modules: every module is excluded"),
    ({"rank_pattern": {"q_prj": 3}}, "lora.rank_pattern: no module with an adapter matches q_prj"),
    ({"alpha_pattern": {"layers.7.q_proj": 3.0}}, "lora.alpha_pattern: no module with an adapter matches"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_what_chooses_nothing_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    lora = LoraConfig.model_validate({"r": 4, **values})
    with pytest.raises(FtcliError) as error:
        apply_lora(build("llama"), lora, PLAN, seed=0)
    assert [finding.code for finding in error.value.findings] == ["FT338"]
    assert said in error.value.findings[0].message
    shape = shape_of(config_of("llama").to_dict())
    assert shape is not None
    assert [said in f"lora.{each.key}: {each.message}" for each in problems(targets_of(shape, lora), lora)] == [True]


ENDLESS = "(([a-z_.0-9]+)+)+!"


@pytest.mark.parametrize(
    "values",
    [
        {"exclude_modules": ENDLESS},
        {"layers_to_transform": [0], "layers_pattern": [ENDLESS]},
        {"rank_pattern": {"q_proj": 3, ENDLESS: 3}},
        {"alpha_pattern": {ENDLESS: 3.0}},
    ],
    ids=lambda values: list(values)[-1],
)
def test_an_expression_that_never_ends_is_refused_by_name(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcli.facts.adapters.SECONDS", 0.05)
    lora = LoraConfig.model_validate({"r": 4, **values})
    shape = shape_of(config_of("llama").to_dict())
    assert shape is not None
    (problem,) = problems(targets_of(shape, lora), lora)
    assert (problem.code, problem.key) == ("FT264", list(values)[-1])
    assert ENDLESS in problem.message
    with pytest.raises(FtcliError) as error:
        apply_lora(build("llama"), lora, PLAN, seed=0)
    assert [finding.code for finding in error.value.findings] == ["FT264"]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_where_nothing_is_chosen_no_module_is_asked(targets: Any) -> None:
    """The estimate takes a shorter way then, to the same adapters."""
    shape = shape_of({**config_of("gemma2").to_dict(), "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    assert shape is not None
    plain = LoraConfig(r=4, target_modules=targets)
    asked = plain.model_copy(update={"rank_pattern": {"nothing": 9}})
    assert AdapterChoice(plain).is_uniform
    assert not AdapterChoice(asked).is_uniform
    assert adapters(shape, plain) == adapters(shape, asked)


def test_ranks_of_every_module_of_a_large_model_cost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More expressions than Python's ``re`` remembers: each is made a few times, and not for each module again."""
    shape = shape_of({**config_of("llama").to_dict(), "num_hidden_layers": 80})
    assert shape is not None
    names = targets_of(shape, LoraConfig())
    assert len(names) == 560
    lora = LoraConfig(rank_pattern={name.removeprefix("model."): 1 + index for index, name in enumerate(names)})
    make, made = re._compiler.compile, []  # type: ignore[attr-defined]

    def counted(pattern: Any, *rest: Any) -> re.Pattern[Any]:
        made.append(pattern)
        compiled: re.Pattern[Any] = make(pattern, *rest)
        return compiled

    monkeypatch.setattr(re._compiler, "compile", counted)  # type: ignore[attr-defined]
    assert list(problems(names, lora)) == []
    assert sum(each.rank * each.layers for each in adapters(shape, lora)) == sum(range(1, 561))
    assert 560 <= len(made) < 5 * 560


def test_patterns_reach_experts_and_layers_that_peft_takes_for_them() -> None:
    for model_type, pattern in (("mixtral", "gate_up_proj"), ("glm4_moe", "shared_experts.gate_proj")):
        lora = LoraConfig.model_validate({"r": 4, "rank_pattern": {pattern: 3}, "alpha_pattern": {pattern: 7.0}})
        model, targets = apply_lora(build(model_type), lora, PLAN, seed=0)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert planned_adapters(build(model_type), lora).parameters == count
        assert bool(targets.weights) == (model_type == "glm4_moe")
        scales = {m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)}
        assert scales == {32.0 / 4, 7.0 / 3}


def test_experts_are_chosen_by_layer_and_take_no_dora() -> None:
    lora = LoraConfig.model_validate({"r": 4, "layers_to_transform": [1]})
    model, targets = apply_lora(build("mixtral"), lora, PLAN, seed=0)
    assert targets.experts
    assert all(".layers.1." in name for name in (*targets.experts, *targets.modules))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all(".layers.1." in name for name in names)
    for values in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(FtcliError) as error:
            apply_lora(build("mixtral"), LoraConfig.model_validate({"r": 4, **values}), PLAN, seed=0)
        assert error.value.findings[0].code == "FT333"
