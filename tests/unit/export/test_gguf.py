"""GGUF: what the gguf library reads of a file is what was trained, and a file that is not is never left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ftcli.errors import FtcliError
from ftcli.export.gguf.file import ExpectedFile
from ftcli.export.gguf.metadata import rotation_of
from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.write import write_type
from ftcli.export.writing import export_run
from ftcli.gguf import ReadFile, require_quantizer
from ftcli.run.atomic import write_json
from ftcli.tables.gguf import ARCHITECTURES, TYPES
from tests.small_models import STRUCTURES, build, by_kind
from tests.unit.export.conftest import Heard, Trained
from tests.unit.export.gguf_runs import AS_BUILT, MULTIMODAL, VARIANTS, adapt, changed, export

gguf = pytest.importorskip("gguf")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # PEFT's own patterns, of stacks of experts
]


WRAPPERS = ("gemma3", "mistral3", "qwen3_5", "gemma4", "gemma4_unified")


@pytest.mark.parametrize("model_type", by_kind([*ARCHITECTURES, *WRAPPERS], STRUCTURES))
def test_every_family_is_written_and_read_back(model_type: str, tmp_path: Path) -> None:
    shape = AS_BUILT.get(model_type)
    built = changed(model_type, **shape) if shape else build(MULTIMODAL.get(model_type, model_type))
    made, heard = adapt(tmp_path, built), Heard()
    result = export(made, "f32", "q8_0", heard=heard)
    facts = result.verification.facts
    assert facts["f32_relative_error"] < 1e-5
    assert facts["f32_top1_agreement"] == 1.0
    assert facts["q8_0_relative_error"] < 1e-5
    assert 1e-4 < facts["q8_0_rounding"] < 0.1
    assert {path.name for path in result.path.iterdir()} >= {"run-F32.gguf", "run-Q8_0.gguf"}
    windows = [finding for finding in heard.findings if "window" in finding.message]
    assert bool(windows) == (model_type in ("mistral", "phi3"))


@pytest.mark.parametrize("kind", [kind for kind, row in TYPES.items() if row.quantized_by is None and not row.ternary])
def test_every_type_keeps_within_its_bound(shared: ExpectedFile, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_type(shared, path, kind)
    report = verify_file(path, kind, shared)
    assert not report.problems
    file = ReadFile(path)
    assert file.type_name("blk.0.ffn_gate.weight") == TYPES[kind].ggml
    assert file.type_name("blk.0.attn_norm.weight") == "F32"


@pytest.mark.parametrize("kind", [kind for kind, row in TYPES.items() if row.error and row.ggml.startswith("Q")])
def test_the_bounds_of_types_are_no_larger_than_they_must_be(kind: str) -> None:
    row = TYPES[kind]
    values = torch.randn(4096, 32, generator=torch.Generator().manual_seed(3)).numpy()
    values[0] = np.linspace(-1, 1, 32)
    number = gguf.GGMLQuantizationType[row.ggml]
    error = np.abs(gguf.quants.dequantize(gguf.quants.quantize(values, number), number) - values)
    worst = (error.max(-1) / np.abs(values).max(-1)).max()
    assert 0.7 * row.error < worst <= row.error


@pytest.mark.parametrize(
    ("variant", "tied"),
    [*((name, True) for name in VARIANTS), *((name, False) for name in VARIANTS if "whole" in name)],
)
def test_adapters_of_every_kind(variant: str, tied: bool, tmp_path: Path) -> None:
    result = export(adapt(tmp_path, changed("llama", tie_word_embeddings=tied), **VARIANTS[variant]), "f32")
    assert result.verification.facts["f32_relative_error"] < 1e-5
    has_head = "output.weight" in ReadFile(result.path / "run-F32.gguf").names
    assert has_head == (not tied or "whole" in variant)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3's scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"rope_parameters": LONG, "sliding_window": None}),
    "yarn with a factor of its own": ("smollm3", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "yarn in layers that see everything": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    ),
    "hunyuan's alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    ),
    "partial rotation": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "global layers": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "more embeddings than tokens": ("gemma2", {"vocab_size": 300}),
    "no rotation where there is no window": ("exaone4", {"num_hidden_layers": 64, "layer_types": None}),
    "layers in another order": (
        "cohere2",
        {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True},
    ),
    "factors of the arithmetic": ("granite", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "halves at once": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "wider heads": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "value heads of a key head": (
        "qwen3_5_text",
        {"linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32},
    ),
    "as many keys as values": ("qwen3_5_text", {"linear_num_key_heads": 4}),
    "delta nets in another order": (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    "biases everywhere": ("jais2", {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_configs_say_is_in_the_file(shape: str, tmp_path: Path) -> None:
    family, values = SHAPES[shape]
    assert export(adapt(tmp_path, changed(family, **values)), "f32").verification.facts["f32_relative_error"] < 1e-5


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "query_pre_attn_scalar is 32": ("gemma2", {"query_pre_attn_scalar": 32}),
    "keys of 16 and values of 8; llama.cpp's qwen35 has both alike": ("qwen3_5_text", {"linear_key_head_dim": 16}),
    "rms_norm_eps is 1e-05": ("qwen3_5_text", {"rms_norm_eps": 1e-5}),
    "no place for model.layers.3.self_attn.k_proj.bias": ("qwen3_5_text", {"attention_bias": True}),
    "rope scaling is dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "its activation is gelu": ("llama", {"hidden_act": "gelu"}),
    "no place for lm_head": ("gemma", {"tie_word_embeddings": False}),
    "norm_topk_prob is False": ("qwen3_moe", {}),
    "norm_topk_prob is True": ("qwen2_moe", {"norm_topk_prob": True}),
    "not every layer has experts": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "it has tied embeddings": ("qwen2_moe", {"tie_word_embeddings": True}),
    "no_rope_layers is .1, 0.; llama.cpp's smollm3 rotates all but every 4th layer": (
        "smollm3",
        {"no_rope_layers": [1, 0]},
    ),
    "windows in models of 64 layers and in no others; this one of 2 has some": ("exaone4", {"layer_types": None}),
    "this one of 64 has none": ("exaone4", {"num_hidden_layers": 64, "layer_types": ["full_attention"] * 64}),
    "no place for lm_head.weight": ("cohere2", {}),
    "no place for model.layers.0.self_attn.o_proj.bias": ("hunyuan_v1_dense", {"attention_bias": True}),
    "its residual_multiplier is 0": ("granite", {"residual_multiplier": 0.0}),
    "needs the bias of model.layers.0.mlp.c_fc": ("starcoder2", {"use_bias": False}),
    "heads times head_dim must be hidden_size": ("glm", {"head_dim": 16}),
    "k_layernorm.norms.0.weight": ("stablelm", {"qk_layernorm": True}),
    "llama3, which llama.cpp does not read in qwen3": ("qwen3", {"rope_parameters": LLAMA3}),
    "a part of each head is rotated": ("llama", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "does not round the range": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "olmo2 knows one": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "layers with a window have a rope scaling, yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(reason: str, tmp_path: Path) -> None:
    family, values = REFUSED[reason]
    made = adapt(tmp_path, changed(family, **values))
    with pytest.raises(FtcliError, match=reason) as caught:
        export(made, "f32")
    assert {finding.code for finding in caught.value.findings} == {"FT756"}
    assert not (made.run.export_dir / "gguf").exists()


def test_what_an_activation_has_trained_is_in_the_metadata(tmp_path: Path) -> None:
    model = changed("apertus")
    trained = {name: value.clone() for name, value in model.state_dict().items() if ".act_fn." in name}
    values = ReadFile(export(adapt(tmp_path, model), "f32").path / "run-F32.gguf").values
    for leaf in ("alpha_p", "alpha_n", "beta", "eps"):
        wanted = [float(trained[f"model.layers.{layer}.mlp.act_fn.{leaf}"]) for layer in range(2)]
        assert values[f"xielu.{leaf}"] == pytest.approx(wanted, rel=1e-6)
    assert len(set(values["xielu.alpha_p"])) == 2


def test_delta_nets_are_as_llama_cpps_converter_has_them(tmp_path: Path) -> None:
    """Its ``conversion/qwen.py`` (0c1e570 of 2026) puts the same numbers into the same places, written out here."""
    model = changed("qwen3_5_text", linear_num_value_heads=6)
    made = adapt(tmp_path, model)
    file = ReadFile(export(made, "f32").path / "run-F32.gguf")
    (merged,) = export_run(made.run, ["safetensors"], reporter=Heard(), offline=True)
    net = "model.layers.1.linear_attn."
    plain = {key.removeprefix(net): t for key, t in load_file(merged.path / "model.safetensors").items() if net in key}
    # Two key heads with three value heads each, of eight features: 0 1 2 | 3 4 5.
    heads = [0, 3, 1, 4, 2, 5]
    features = [head * 8 + feature for head in heads for feature in range(8)]
    behind = [*range(32), *(32 + each for each in features)]
    wanted = {
        "attn_qkv.weight": plain["in_proj_qkv.weight"][behind],
        "attn_gate.weight": plain["in_proj_z.weight"][features],
        "ssm_alpha.weight": plain["in_proj_a.weight"][heads],
        "ssm_beta.weight": plain["in_proj_b.weight"][heads],
        "ssm_a": -plain["A_log"][heads].exp(),
        "ssm_dt.bias": plain["dt_bias"][heads],
        "ssm_conv1d.weight": plain["conv1d.weight"].squeeze()[behind],
        "ssm_norm.weight": plain["norm.weight"],
        "ssm_out.weight": plain["out_proj.weight"][:, features],
    }
    assert {name.removeprefix("blk.1.") for name in file.names if "blk.1." in name} >= set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(file.read(f"blk.1.{name}"), tensor), name
        assert file.type_name(f"blk.1.{name}") == "F32"
    said = {key.removeprefix("qwen35."): value for key, value in file.values.items() if key.startswith("qwen35.")}
    assert {key: said[key] for key in said if key.startswith("ssm.")} == {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 48,
    }
    assert said["full_attention_interval"] == 4
    assert said["attention.recurrent_layers"] == [True, True, True, False]


@pytest.mark.parametrize(
    ("stated", "turned", "said"),
    [
        ([11, 11, 10], 64, [11, 11, 10, 0]),  # Qwen3.5's own: as llama.cpp's converter
        (None, 64, [11, 11, 10, 0]),
        ([11, 11, 10], 128, [22, 22, 22, 0]),  # else llama.cpp would not turn pairs 32 to 63
        ([11, 11, 10], 16, [3, 3, 3, 0]),  # it aborts at more sections than features
    ],
)
def test_sections_leave_no_pair_unturned(stated: list[int] | None, turned: int, said: list[int]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {} if stated is None else {"mrope_section": stated}
    model = changed("qwen3_5_text", head_dim=4 * turned, rope_parameters=rope)
    values, _ = rotation_of(model.config, ARCHITECTURES["qwen3_5_text"])
    assert values["rope.dimension_count"] == turned
    assert values["rope.dimension_sections"] == said


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_adapted_experts_are_merged_into_three_stacks(family: str, tmp_path: Path) -> None:
    """Gate and up are one tensor in transformers, and two in the file."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    made = adapt(tmp_path, build(family), target_modules=["q_proj"], target_parameters=experts)
    result = export(made, "f32")
    assert result.verification.facts["f32_relative_error"] < 1e-5
    file, (merged,) = (
        ReadFile(result.path / "run-F32.gguf"),
        export_run(made.run, ["safetensors"], reporter=Heard(), offline=True),
    )
    plain = load_file(merged.path / "model.safetensors")
    (name,) = (n for n in plain if "layers.1." in n and n.endswith(("experts.2.up_proj.weight", "experts.2.w3.weight")))
    assert torch.equal(file.read("blk.1.ffn_up_exps.weight")[2], plain[name])
    with pytest.raises(FtcliError, match="no weight of its own for the adapter of"):
        export(made, "f32", lora=True, force=True)


@pytest.mark.parametrize("kind", [kind for kind, row in TYPES.items() if row.block == 32])
def test_blocks_of_small_numbers_are_no_failure(kind: str, tmp_path: Path) -> None:
    """Their scales are subnormal in float16, and so less exact than the type's error says."""
    model = build("llama")
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.dim() > 1):
            parameter.mul_(10.0 ** -(number % 6))
    assert export(adapt(tmp_path, model, target_modules=["q_proj"]), kind).verification.facts[f"{kind}_rounding"] < 1


def test_modules_trained_whole_may_be_stored_in_sixteen_bits(tmp_path: Path) -> None:
    made = adapt(tmp_path, build("llama").to(torch.bfloat16), modules_to_save=["lm_head"])
    stored = load_file(made.run.adapter_dir / "adapter_model.safetensors")
    assert stored["base_model.model.lm_head.weight"].dtype == torch.bfloat16
    assert export(made, "f32").verification.facts["f32_relative_error"] < 1e-5


def test_llama_quantize_is_found_by_name(shared: ExpectedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FtcliError, match="not on the PATH") as caught:
        write_type(shared, tmp_path / "model.gguf", "q4_k_m")
    assert caught.value.findings[0].code == "FT758"
    with pytest.raises(FtcliError, match="Q4_K_M is made by"):
        require_quantizer(["q8_0", "q4_k_m"])
    assert require_quantizer(["q8_0", "f16"]) == ""
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\n/bin/cp $1 $2\n")
    program.chmod(0o755)
    write_type(shared, tmp_path / "model.gguf", "q4_k_m")
    assert ReadFile(tmp_path / "model.gguf").type_name("blk.0.ffn_up.weight") == "BF16"
    assert not list(tmp_path.glob(".*"))
    program.write_text("#!/bin/sh\necho no such type >&2\nexit 3\n")
    with pytest.raises(FtcliError, match=r"failed \(exit 3\): no such type"):
        write_type(shared, tmp_path / "other.gguf", "q4_k_m")


def test_a_program_that_is_missing_is_said_before_anything_is_written(
    tuned: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    heard = Heard()
    with pytest.raises(FtcliError, match="Q4_K_M is made by"):
        export(tuned, "q8_0", "q4_k_m", heard=heard, force=True)
    assert not [line for line in heard.lines if "writing" in line]


def test_a_full_fine_tune_is_written(tuned: Trained) -> None:
    facts = export(tuned, "f32").verification.facts
    assert facts["f32_relative_error"] < 1e-5


def test_too_full_a_disk_is_said_before_writing(
    shared: ExpectedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(FtcliError) as caught:
        write_type(shared, tmp_path / "model.gguf", "f32")
    assert caught.value.findings[0].code == "FT724"
    assert not list(tmp_path.iterdir())


def test_base_and_licence_are_in_files_and_card(tmp_path: Path) -> None:
    made = adapt(tmp_path / "models--google--gemma-2-2b", build("gemma2"))
    licence = {"id": "gemma", "name": None, "link": "https://ai.google.dev/gemma/terms"}
    write_json(made.run.manifest_path, {"base": {"licence": licence}, "inputs": {"commit": "33c1"}})
    result = export(made, "f32", lora=True)
    for name in ("run-F32.gguf", "run-LoRA-F32.gguf"):
        values = ReadFile(result.path / name).values
        assert values["general.license"] == "gemma"
        assert values["general.license.link"] == licence["link"]
        assert values["general.base_model.count"] == 1
        assert values["general.base_model.0.name"] == "gemma-2-2b"
        assert values["general.base_model.0.organization"] == "google"
        assert values["general.base_model.0.version"] == "33c1"
        assert values["general.base_model.0.repo_url"] == "https://huggingface.co/google/gemma-2-2b"
    card = (result.path / "README.md").read_text(encoding="utf-8")
    assert "```console\nllama-server -m run-F32.gguf --jinja\n```" in card
    assert "| f32 greedy tokens | 6 of 6 |" in card
    assert str(tmp_path) not in card


def test_a_model_that_rounding_moves_far_is_written_and_said(tmp_path: Path) -> None:
    """Sharp attention: with q_norm and k_norm times 12, Q8_0 moves the logits by a third, and nothing is wrong."""
    model = changed("qwen3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(12)
    heard = Heard()
    facts = export(adapt(tmp_path, model), "q8_0", heard=heard).verification.facts
    assert facts["q8_0_rounding"] > TYPES["q8_0"].logits
    assert facts["q8_0_relative_error"] <= facts["q8_0_allowed"] < 0.02
    assert "FT772" in [finding.code for finding in heard.findings]


GEMMA4: dict[str, dict[str, Any]] = {
    "E4B: own inputs, shared keys, wider last MLPs": {},
    "31B: keys that are values, fewer global heads": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "26B-A4B: experts beside the MLP": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}


def drawn_apart(model: Any) -> Any:
    """Norms, scalars, sinks and scales that are all 1 or 0 in a new model, and would not show where they end."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() < 2 or name.endswith("_bias"):
                tensor.copy_(tensor + 0.2 * torch.randn(tensor.shape))
    return model


@pytest.mark.parametrize("size", GEMMA4)
def test_every_size_of_gemma4_is_written_and_read_back(size: str, tmp_path: Path) -> None:
    made = adapt(tmp_path, drawn_apart(changed("gemma4_text", **GEMMA4[size])), target_modules=["q_proj", "down_proj"])
    result = export(made, "f32", "q8_0")
    assert result.verification.facts["f32_relative_error"] < 1e-5
    assert result.verification.facts["q8_0_relative_error"] < 1e-5
    file = ReadFile(result.path / "run-F32.gguf")
    values = {key.removeprefix("gemma4."): value for key, value in file.values.items()}
    assert values["attention.sliding_window_pattern"] == [True, True, False] * 2
    assert (values["attention.key_length"], values["attention.key_length_swa"]) == (16, 8)
    assert (values["rope.dimension_count"], values["rope.dimension_count_swa"]) == (16, 8)
    assert file.read("rope_freqs.weight").tolist() == [1.0, 1.0] + [pytest.approx(1e30)] * 6
    assert ("blk.2.attn_v.weight" in file.names) == size.startswith("E4B")
    assert ("blk.5.attn_k.weight" in file.names) != size.startswith("E4B")
    assert values["attention.shared_kv_layers"] == 3 * size.startswith("E4B")
    assert ("per_layer_token_embd.weight" in file.names) == size.startswith("E4B")
    assert ("blk.0.ffn_gate_up_exps.weight" in file.names) == size.startswith("26B")
    assert values.get("expert_used_count") == (2 if size.startswith("26B") else None)


def test_shared_keys_that_llama_cpp_would_take_from_elsewhere_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    of_full = {at: {"head_dim": 16} for at in (0, 3, 5)}
    kinds[-1] = "full_attention"
    model = changed("gemma4_text", layer_types=kinds, num_kv_shared_layers=3, per_layer_config=of_full)
    with pytest.raises(FtcliError, match="shared keys of the last two layers before") as caught:
        export(adapt(tmp_path, model), "f32")
    assert caught.value.findings[0].code == "FT756"


def test_experts_of_gpt_oss_are_apart_and_turned(tmp_path: Path) -> None:
    heard = Heard()
    result = export(adapt(tmp_path, drawn_apart(build("gpt_oss"))), "f32", "q8_0", heard=heard)
    assert result.verification.facts["f32_relative_error"] < 1e-5
    base = load_file(next((tmp_path / "base").glob("*.safetensors")))
    file, layer = ReadFile(result.path / "run-F32.gguf"), "model.layers.1.mlp.experts"
    for stored, bias in (("ffn_gate_exps", base[f"{layer}.gate_up_proj_bias"][:, ::2]), ("ffn_down_exps", None)):
        wanted = base[f"{layer}.down_proj_bias"] if bias is None else bias
        assert torch.equal(file.read(f"blk.1.{stored}.bias"), wanted)
    assert file.shape("blk.1.ffn_up_exps.weight") == (4, 48, 32)
    assert torch.equal(file.read("blk.0.attn_sinks.weight"), base["model.layers.0.self_attn.sinks"])
    assert ReadFile(result.path / "run-Q8_0.gguf").type_name("blk.1.ffn_up_exps.bias") == "F32"
    (told,) = [finding for finding in heard.findings if "YaRN" in finding.message]
    assert (told.code, told.severity) == ("FT757", "warning")
