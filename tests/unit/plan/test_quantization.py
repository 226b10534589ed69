"""What quantized weights take, against tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.nf4 import quantize_nf4

from ftcli.config.model import QuantizationConfig
from ftcli.facts.device import named_device
from ftcli.facts.layers import Linear
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.plan.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.plan.quantization import nf4_bytes
from ftcli.preflight.checks import crossfield
from ftcli.preflight.checks.context import Context
from tests.estimates import plan_of

LORA = "lora: {r: 16}\ndata: {train: [a.jsonl], max_seq_len: 2048}\n"


@pytest.fixture
def estimate(load: Callable[..., Any]) -> Callable[..., tuple[MemoryEstimate, ModelFacts]]:
    def _estimate(*overrides: str, work: Any = "train") -> tuple[MemoryEstimate, ModelFacts]:
        kept = "train.gradient_checkpointing=false"
        loaded = load(f"model: {{name_or_path: meta-llama/Llama-3.1-8B}}\n{LORA}", kept, *overrides)
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        gpu = named_device("h200")
        found = estimate_memory(plan_of(loaded.recipe, facts, gpu, work))
        assert found is not None
        return found, facts

    return _estimate


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(256, 512), (33, 65)])
def test_a_layers_bytes_are_those_of_its_tensors(shape: tuple[int, int], double_quant: bool) -> None:
    stored = quantize_nf4(torch.randn(shape), double_quant=double_quant).stored_bytes
    settings = QuantizationConfig(method="nf4", double_quant=double_quant)
    assert nf4_bytes(Linear("x", shape[1], shape[0]), settings) == stored


def test_llama_in_nf4_takes_a_third_of_its_bfloat16_bytes(estimate: Callable[..., Any]) -> None:
    plain, facts = estimate()
    packed, _ = estimate("quantization.method=nf4")
    single, _ = estimate("quantization.method=nf4", "quantization.double_quant=false")
    linears = facts.shape.linear_parameters
    assert plain.parts["weights"] - packed.parts["weights"] == pytest.approx(
        linears * (2 - 0.5 - 1 / 64 - 4 / 64 / 256), rel=1e-3
    )
    assert single.parts["weights"] - packed.parts["weights"] == pytest.approx(
        linears * (3 / 64 - 4 / 64 / 256), rel=1e-2
    )
    assert packed.total_bytes < single.total_bytes < plain.total_bytes


def test_one_product_is_dequantized_at_a_time(estimate: Callable[..., Any]) -> None:
    fused, facts = estimate("quantization.method=nf4", "train.cuda_graphs=false")
    gate_and_up = 2 * facts.shape.intermediate_size * facts.shape.hidden_size * 2
    assert fused.parts["dequantized weights"] == gate_and_up
    assert "dequantized weights" in fused.phases["backward"]
    assert "dequantized weights" not in fused.phases["forward"]
    alone, _ = estimate("quantization.method=nf4", "model.kernels=off")
    assert alone.parts["dequantized weights"] == gate_and_up // 2
    assert "dequantized weights" not in estimate()[0].parts


@pytest.mark.parametrize(
    ("dtype", "device", "dense"),
    [("bfloat16", "h200", 0), ("float16", "h200", 2), ("float32", "h200", 4), ("bfloat16", "a100-80gb", 2)],
)
def test_fp8_is_dequantized_where_no_fp8_product_runs(
    dtype: str, device: str, dense: int, load: Callable[..., Any]
) -> None:
    text = f"model: {{name_or_path: meta-llama/Llama-3.1-8B}}\n{LORA}"
    loaded = load(text, "quantization.method=fp8", f"model.dtype={dtype}", "train.gradient_checkpointing=false")
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    gpu = named_device(device)
    found = estimate_memory(plan_of(loaded.recipe, facts, gpu))
    assert found is not None
    assert found.parts.get("dequantized weights", 0) == dense * 2 * 14336 * 4096


def test_export_counts_the_largest_table_as_stored_and_in_float32(estimate: Callable[..., Any]) -> None:
    packed, facts = estimate("quantization.method=nf4", work="export")
    assert packed.parts["weights"] == (2 + 4) * facts.shape.vocab_size * facts.shape.hidden_size


def test_kept_layers_cost_what_bfloat16_costs(estimate: Callable[..., Any]) -> None:
    kept, facts = estimate("quantization.method=nf4", "quantization.keep_dequantized=true")
    plain, _ = estimate()
    assert kept.dequantized_layers == facts.shape.num_layers
    assert kept.parts["weights"] == plain.parts["weights"]
    assert "dequantized weights" not in kept.parts
    assert kept.total_bytes == plain.total_bytes


def test_auto_keeps_as_many_layers_as_there_is_ample_room_for(load: Callable[..., Any]) -> None:
    found = {}
    for gpu in ("rtx4090", "a100-40gb", "h200"):
        loaded = load(
            f"model: {{name_or_path: meta-llama/Llama-3.1-8B}}\n{LORA}",
            "quantization.method=nf4",
            "quantization.keep_dequantized=auto",
            "train.gradient_checkpointing=true",
            "train.per_device_train_batch_size=4",
        )
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        device = named_device(gpu)
        kept = estimate_memory(plan_of(loaded.recipe, facts, device))
        assert kept is not None
        assert device.memory_bytes is not None
        found[gpu] = kept.dequantized_layers
        assert kept.total_bytes <= 0.8 * device.memory_bytes
        if 0 < kept.dequantized_layers < 32:
            layer = 2 * facts.shape.linear_parameters // 32
            assert kept.total_bytes + layer > 0.8 * device.memory_bytes
    assert 0 < found["rtx4090"] < 32
    assert found["a100-40gb"] == found["h200"] == 32


def test_kept_layers_need_nf4(load: Callable[..., Any]) -> None:
    loaded = load(LORA, "quantization.keep_dequantized=true")
    context = Context(loaded.recipe, loaded.origins, "check")
    assert [f.code for f in crossfield.check(context) if "keep_dequantized" in f.message] == ["FT259"]
