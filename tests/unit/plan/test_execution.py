"""What `ftcli check` says would run is what the selection functions choose, for every GPU that it knows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftkernels.device import fuses_products
from ftkernels.fp8 import fp8_on_tensor_cores
from ftkernels.fp8_trial import why_no_rows
from ftkernels.limits import Gpu

from ftcli.cli.commands.check import check_text
from ftcli.config.load import LoadedRecipe
from ftcli.config.model import LoraConfig
from ftcli.errors import FtcliError
from ftcli.facts.device import GPUS, DeviceFacts, named_device
from ftcli.facts.model import read_facts
from ftcli.model.lora import apply_lora
from ftcli.model.patch import patch
from ftcli.pipeline.checking import CheckResult
from ftcli.plain import plain
from ftcli.plan.attention import AttentionCall, choose_attention
from ftcli.plan.execution import ExecutionPart, execution_parts
from ftcli.plan.precision import DtypePlan
from ftcli.plan.run import RunPlan
from ftcli.preflight.stages import preflight
from tests.estimates import plan_of
from tests.small_models import build

LLAMA = "model: {name_or_path: meta-llama/Llama-3.1-8B, dtype: %s}\nlora: {r: %d}\ndata: {max_seq_len: 4096}\n"
GEMMA = "model: {name_or_path: google/gemma-2-9b, dtype: %s}\nlora: {r: %d}\ndata: {max_seq_len: 8192}\n"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _gpu(device: DeviceFacts) -> Gpu:
    return Gpu(device.capability, device.shared_memory_bytes or 0)


def rows_for(loaded: LoadedRecipe, device: DeviceFacts) -> dict[str, ExecutionPart]:
    recipe = loaded.recipe
    facts = read_facts(recipe.model, offline=True, origins=loaded.origins)
    plan = plan_of(recipe, facts, device)
    return {row.part: row for row in execution_parts(recipe, facts, plan.dtypes, device, plan.execution)}


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_is_what_the_model_would_choose(load: Any, gpu: str, dtype: str) -> None:
    device = named_device(gpu)
    llama = rows_for(load(LLAMA % (dtype, 16)), device)
    chosen = choose_attention(device.gpu, AttentionCall(dtype, 128))
    assert llama["attention"].runs == chosen.backend
    gemma = rows_for(load(GEMMA % (dtype, 16)), device)
    for part, windowed in (("attention, window 4096", True), ("attention, global", False)):
        chosen = choose_attention(device.gpu, AttentionCall(dtype, 256, softcap=50.0, windowed=windowed))
        assert gemma[part].runs == chosen.backend


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_products_run_where_the_weights_would_take_them(
    load: Any, monkeypatch: pytest.MonkeyPatch, gpu: str, dtype: str
) -> None:
    device = named_device(gpu)
    operand: Any = SimpleNamespace(shape=(32, 32), device=gpu, stride=lambda _: 32)
    monkeypatch.setattr("ftkernels.fp8.gpu_of", lambda _: _gpu(device))
    monkeypatch.setattr("ftkernels.fp8.why_no_rows_here", why_no_rows)
    part = "products of the frozen weights"
    rows = rows_for(load(LLAMA % (dtype, 16), "quantization.method=fp8", "model.kernels=reference"), device)
    assert (rows[part].runs == "fp8") == fp8_on_tensor_cores(operand, operand, DTYPES[dtype])
    assert part not in rows_for(load(LLAMA % (dtype, 16)), device)


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_low_rank_products_ride_in_kernels_where_these_would_take_them(
    load: Any, monkeypatch: pytest.MonkeyPatch, gpu: str, dtype: str
) -> None:
    device = named_device(gpu)
    monkeypatch.setattr("ftkernels.device.gpu_of", lambda _: _gpu(device))
    rides = fuses_products(torch.device("cuda"), DTYPES[dtype])
    assert (rows_for(load(LLAMA % (dtype, 16)), device)["LoRA products"].runs == "triton") == rides


def test_a_t4_falls_back_where_triton_has_no_tensor_cores(load: Any) -> None:
    rows = rows_for(load(GEMMA % ("float32", 16)), named_device("t4"))
    assert {part: row.runs for part, row in rows.items()} == {
        "norms, rotary embedding, gated unit": "triton",
        "LoRA products": "torch",
        "attention, window 4096": "eager",
        "attention, global": "eager",
        "head and loss": "triton",
        "batches": "padded",
    }
    assert "7.5" in rows["attention, global"].reason


def test_large_ranks_take_products_of_their_own(load: Any) -> None:
    rows = rows_for(load(LLAMA % ("bfloat16", 128)), named_device("h100"))
    assert rows["LoRA products"].runs == "torch"
    assert "128" in rows["LoRA products"].reason


@pytest.mark.parametrize(
    ("override", "device", "word"),
    [
        ("model.kernels=off", "h100", "model.kernels: off"),
        ("model.kernels=auto", "cpu", "not a CUDA GPU"),
        ("lora.use_dora=true", "h100", "DoRA"),
    ],
)
def test_layers_left_as_they_were_say_why(load: Any, override: str, device: str, word: str) -> None:
    rows = rows_for(load(LLAMA % ("float32", 16), override), named_device(device))
    assert rows["layers"].runs == "transformers"
    assert word in rows["layers"].reason


@pytest.mark.parametrize(
    ("dtype", "settings", "said"),
    [
        ("bfloat16", (), "their gradients are float32, of copies in bfloat16 that each step makes"),
        ("float32", (), "their gradients are float32"),
        ("bfloat16", ("train.pure_bf16=true",), "their gradients are bfloat16"),
        (
            "bfloat16",
            ("train.bf16_gradients=true",),
            "their gradients are bfloat16, of copies in bfloat16 that each step makes",
        ),
    ],
)
def test_full_fine_tuning_is_on_the_kernels(load: Any, dtype: str, settings: tuple[str, ...], said: str) -> None:
    rows = rows_for(load(LLAMA % (dtype, 16), "lora=null", *settings), named_device("h100"))
    assert rows["norms, rotary embedding, gated unit"].runs == "triton"
    assert rows["products of the weights"] == ExecutionPart("products of the weights", "torch", said)
    assert "LoRA products" not in rows


@pytest.mark.parametrize("gpu", ["t4", "a100-80gb", "h100"])
def test_packed_documents_go_where_masked_calls_go(load: Any, gpu: str) -> None:
    device = named_device(gpu)
    row = rows_for(load(LLAMA % ("bfloat16", 16), "data.packing=true"), device)["attention"]
    chosen = choose_attention(device.gpu, AttentionCall("bfloat16", 128, mask="intervals"))
    assert row.runs == chosen.backend
    if gpu == "h100":
        assert row.runs == "triton"
        assert "packed" in row.reason


def test_layers_of_transformers_have_attention_named_too(load: Any) -> None:
    rows = rows_for(load(GEMMA % ("float32", 16)), named_device("cpu"))
    assert rows["attention"].runs == "eager"
    assert rows_for(load(LLAMA % ("float32", 16)), named_device("cpu"))["attention"].runs == "sdpa"


def test_reference_means_plain_torch(load: Any) -> None:
    rows = rows_for(load(LLAMA % ("float32", 16), "model.kernels=reference"), named_device("cpu"))
    assert rows["LoRA products"].runs == "torch"
    assert rows["head and loss"].runs == "torch"


def test_check_as_a_t4_shows_the_fallback(load: Any) -> None:
    """In the command's text and in its JSON: attention of Gemma-2 is plain torch there, elementwise kernels are on."""
    loaded = load(
        "model: {name_or_path: google/gemma-2-2b, dtype: float32}\nlora: {r: 8}\n"
        "data: {train: ['bundled:sample-chat'], max_seq_len: 512}\ntrain: {per_device_train_batch_size: 1}\n"
    )
    report = preflight(loaded, command="check", device=named_device("t4"), offline=True)
    table = {row["part"]: row["runs"] for row in plain(report)["kernel_table"]}
    assert table["attention"] == "eager"
    assert table["norms, rotary embedding, gated unit"] == "triton"
    shown = check_text(CheckResult(report, None))
    assert "kernels" in shown
    assert "on capability 7.5 Triton makes no tensor-core code" in shown


@pytest.mark.parametrize(
    ("model_type", "lora", "reason"),
    [
        ("llama", {}, None),
        ("llama", {"use_dora": True}, "DoRA"),
        ("llama", {"modules_to_save": ["down_proj"]}, "lora.modules_to_save"),
        ("llama", {"modules_to_save": ["lm_head", "norm"]}, None),
        ("qwen3_next", {}, "qwen3_next"),
        ("gpt_oss", {}, None),
        ("phi3", {}, None),
    ],
)
def test_layers_are_on_the_kernels_where_a_model_is_put_on_them(
    load: Any, folder: Any, model_type: str, lora: dict[str, Any], reason: str | None
) -> None:
    base = build(model_type)
    path = folder("model", base.config.to_dict())
    model, _ = apply_lora(base, LoraConfig(r=4, **lora), DtypePlan("float32", *["float32"] * 2, False, ""), seed=0)
    done = patch(model, "reference").table
    fused = [entry for entry in done if entry.kernel == "fused layer"]
    section = {"r": 4, **{name: list(v) if isinstance(v, list) else v for name, v in lora.items()}}
    text = f"model: {{name_or_path: {path}, tokenizer: bytes, kernels: reference}}\nlora: {section}\n"
    loaded = load(text.replace("'", "").replace("True", "true"))
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    execution = plan_of(loaded.recipe, facts, "cpu").execution
    assert execution.on_kernels == bool(fused) == (reason is None)
    if reason is not None:
        assert reason in execution.layers.reason
        assert any(reason in entry.reason for entry in done if not entry.on)


@pytest.mark.parametrize(
    ("setting", "device", "said"),
    [
        ("lora.r=16", "h100", None),
        ("lora.r=16", "cpu", "the kernels need a CUDA GPU"),
        ("lora.use_dora=true", "h100", "DoRA"),
        ("lora.modules_to_save=[down_proj]", "h100", "lora.modules_to_save"),
        ("lora.modules_to_save=[lm_head]", "h100", None),
    ],
)
def test_kernels_that_are_insisted_on_are_refused_before_anything_is_loaded(
    load: Any, setting: str, device: str, said: str | None
) -> None:
    """It was said once the model was loaded (FT705), which takes minutes."""
    text = (LLAMA % ("bfloat16", 8)).replace("data: {", "data: {train: ['bundled:sample-chat'], ")
    loaded = load(text, setting, "model.kernels=triton")
    check = partial(preflight, loaded, command="check", device=named_device(device), offline=True)
    if said is None:
        assert check().plan.execution.layers.code == "fused"
        return
    with pytest.raises(FtcliError) as refused:
        check()
    (finding,) = [each for each in refused.value.findings if each.code == "FT503"]
    assert finding.severity == "error"
    assert said in finding.message


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_dropout_of_attention_is_known_to_what_chooses(load: Any, folder: Any, model_type: str) -> None:
    """Training drops probabilities, which our attention kernel cannot. Rows were planned as joined for it, and their
    mask over all pairs of tokens was not counted.
    """
    device = named_device("h100")
    found: dict[float, tuple[RunPlan, dict[str, ExecutionPart]]] = {}
    for dropout in (0.0, 0.1):
        config = {**build(model_type).config.to_dict(), "attention_dropout": dropout, "head_dim": 16}
        path = folder(f"dropping-{dropout}", config)
        loaded = load(f"model: {{name_or_path: {path}, tokenizer: bytes}}\nlora: {{}}\ndata: {{max_seq_len: 256}}\n")
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        plan = plan_of(loaded.recipe, facts, device)
        parts = execution_parts(loaded.recipe, facts, plan.dtypes, device, plan.execution)
        found[dropout] = plan, {row.part: row for row in parts}
    softcap = found[0.1][0].facts.attn_logit_softcapping or 0.0
    call = AttentionCall("bfloat16", 16, softcap, mask="intervals", dropout=True)
    plan, rows = found[0.1]
    assert plan.execution.masked == choose_attention(device.gpu, call).backend != "triton"
    assert plan.execution.dense == choose_attention(device.gpu, replace(call, mask="plain")).backend
    assert not any(row.runs == "triton" for part, row in rows.items() if part.startswith("attention"))
    assert (plan.execution.batches.layout, rows["batches"].runs) == ("padded", "padded")
    assert found[0.0][0].execution.batches.layout == "unpadded"
    assert plan_of(plan.recipe, plan.facts, device, "eval").execution.masked == "triton"  # nothing is dropped there
