"""What training ternary weights keeps, and which GPUs it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftcli.config.model import QuantizationConfig
from ftcli.errors import Finding
from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.facts.shape import shape_of
from ftcli.model import bitnet
from ftcli.model.bitnet import BitLinear
from ftcli.model.quantized import layers_to_quantize
from ftcli.plan.memory.activations import plain_layers
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.precision import plan_dtypes
from ftcli.plan.quantization import ternary_bytes, weight_bytes
from ftcli.preflight.checks import machine
from tests.estimates import plan_of
from tests.unit.plan import test_activations as activations

SETTINGS = QuantizationConfig(method="bitnet")


@pytest.mark.parametrize(
    ("family", "own_norms"),
    [
        ("bitnet", True),
        ("llama", False),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("bitnet", False), ("llama", True))),
    ],
)
@pytest.mark.parametrize(
    ("rounds", "plan"), [("apart", "full-float32"), ("apart", "full-bfloat16"), ("in norms", "full-bfloat16")]
)
def test_one_more_layer_keeps_what_the_estimate_says(family: str, plan: str, own_norms: bool, rounds: Any) -> None:
    dtypes = activations.PLANS[plan]
    sizes = []
    for layers in activations.depths(family):
        model = activations.build(family, "sdpa", dtypes, layers)
        for name in layers_to_quantize(model):
            model.set_submodule(name, bitnet.bit_linear_of(model.get_submodule(name), SETTINGS, name))
        bitnet.round_in_norms(model, kernels=True, settings=SETTINGS.model_copy(update={"use_rms_norm": own_norms}))
        for layer in (module for module in model.modules() if isinstance(module, BitLinear)):
            layer.backend = "triton" if rounds == "in norms" else "torch"  # in the interpreter
            layer.ternary  # noqa: B018  # kept between steps, and counted with the weights
        sizes.append(activations.measured_bytes(model.train(), dtypes))
    shape = shape_of(activations.config_of(family, 1))
    assert shape is not None
    setting = replace(activations.setting_of(family, dtypes), rounds=rounds, own_norms=own_norms)
    predicted = activations.BATCH * setting.seq_len * plain_layers("sdpa").layer_bytes(shape, setting)
    assert predicted == pytest.approx(sizes[1] - sizes[0], rel=0.03)


def test_the_estimate_counts_masters_ternary_values_and_int8_inputs(load: Any) -> None:
    text = "model: {name_or_path: microsoft/bitnet-b1.58-2B-4T-bf16}\ndata: {train: [a.jsonl], max_seq_len: 2048}\n"
    found = {}
    for method in ("bitnet", "none"):
        loaded = load(text, f"quantization.method={method}", "train.gradient_checkpointing=false")
        facts, gpu = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins), named_device("h100")
        found[method] = estimate_memory(plan_of(loaded.recipe, facts, gpu)).parts
    linear = facts.shape.linear_parameters
    assert found["bitnet"]["weights"] - found["none"]["weights"] == linear + 4 * 7 * facts.shape.num_layers
    assert found["bitnet"]["activations"] < 0.75 * found["none"]["activations"]
    assert "autocast copies" not in found["bitnet"] or found["bitnet"]["autocast copies"] == 0


def test_norms_of_layers_are_trained_and_counted(load: Any, folder: Any) -> None:
    config = activations.config_of("llama", 2)
    path = folder("model", config)
    text = f"model: {{name_or_path: {path}, tokenizer: bytes}}\nquantization: {{method: bitnet, use_rms_norm: true}}\n"
    loaded = load(text)
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    model = activations.build("llama", "sdpa", activations.PLANS["full-float32"], 2)
    for name in layers_to_quantize(model):
        model.set_submodule(name, bitnet.bit_linear_of(model.get_submodule(name), SETTINGS, name))
    bitnet.round_in_norms(model, kernels=False, settings=loaded.recipe.quantization)
    plan = plan_of(loaded.recipe, facts, "cpu")
    assert plan.trained.elements == sum(p.numel() for p in model.parameters())
    beside = plan.trained.elements - facts.shape.parameters
    assert beside == sum(linear.in_features for linear in facts.shape.linears) * facts.shape.num_layers
    ternary = facts.shape.num_layers * sum(
        ternary_bytes(one, loaded.recipe.quantization) for one in facts.shape.linears
    )
    assert weight_bytes(loaded.recipe.quantization, facts.shape, 4, trained=True) == 4 * plan.trained.elements + ternary


def test_a_gpu_without_int8_products_is_refused(context: Any) -> None:
    made = context("data: {train: [a.jsonl]}\n", "quantization.method=bitnet")
    for name, codes in (("t4", ["FT508"]), ("h100", [])):
        gpu = named_device(name)
        found = machine.check(made, gpu, plan_dtypes(made.recipe, gpu))
        assert [each.code for each in found if isinstance(each, Finding)] == codes
