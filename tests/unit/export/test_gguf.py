"""GGUF: what the gguf library reads of a file is what was trained, and a file that is not is never left behind."""

from __future__ import annotations

import dataclasses
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from ftcli.config import ExportConfig
from ftcli.errors import FtcliError
from ftcli.export.clean.process import CleanProcess
from ftcli.export.gguf import adapter as adapter_file
from ftcli.export.gguf import experts as experts_format
from ftcli.export.gguf import write as gguf_format
from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.write import Prepared, prepare, write_type
from ftcli.export.resolve import resolve_source
from ftcli.export.writing import ExportResult, export_run
from ftcli.gguf.file import ReadFile
from ftcli.gguf.names import to_file
from ftcli.run.atomic import write_json
from ftcli.tables.gguf import ARCHITECTURES, TYPES
from tests.small_models import build
from tests.unit.export.conftest import Heard, Trained, tokenizer, write_run

gguf = pytest.importorskip("gguf")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # PEFT's own patterns, of stacks of experts
]

#: Checkpoints whose language model stands in the table, by their own ``model_type``.
MULTIMODAL = {"qwen2_vl_text": "qwen2_vl", "qwen2_5_vl_text": "qwen2_5_vl", "qwen3_vl_text": "qwen3_vl"}
#: What llama.cpp builds of a family, where small models are otherwise.
AS_BUILT: dict[str, dict[str, Any]] = {"bitnet": {"tie_word_embeddings": True}, "qwen3_moe": {"norm_topk_prob": True}}
LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def adapt(folder: Path, model: Any, **options: Any) -> Trained:
    """A run with an adapter on ``model`` that changes its answers."""
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    targets = LANGUAGE if hasattr(model.model, "language_model") else "all-linear"
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += torch.randn(parameter.shape) * 0.3 / parameter.shape[-1] ** 0.5
    run = write_run(folder / "run", folder / "base", lora={"r": 4})
    adapted.save_pretrained(run.adapter_dir, save_embedding_layers=False)
    tokenizer().save_pretrained(run.adapter_dir)
    return Trained(folder / "base", run)


def export(
    made: Trained, *types: str, heard: Heard | None = None, lora: bool = False, force: bool = False
) -> ExportResult:
    settings = ExportConfig.model_validate({"gguf": {"types": types, "lora_adapter": lora}})
    (result,) = export_run(made.run, ["gguf"], reporter=heard or Heard(), offline=True, settings=settings, force=force)
    return result


def prepared_of(made: Trained, clean: CleanProcess) -> Prepared:
    source = dataclasses.replace(resolve_source(made.run), reload=clean.ask)
    return prepare(source, offline=True, say=lambda _: None)


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "gemma3", "mistral3"])
def test_every_family_is_written_and_read_back(model_type: str, tmp_path: Path) -> None:
    shape = AS_BUILT.get(model_type)
    built = changed(model_type, **shape) if shape else build(MULTIMODAL.get(model_type, model_type))
    made, heard = adapt(tmp_path, built), Heard()
    result = export(made, "f32", "q8_0", heard=heard)
    facts = result.verification.facts
    assert facts["f32_relative_error"] < 1e-5
    assert facts["f32_top1_agreement"] == 1.0
    assert 1e-4 < facts["q8_0_relative_error"] < 0.1
    assert {path.name for path in result.path.iterdir()} >= {"run-F32.gguf", "run-Q8_0.gguf"}
    windows = [finding for finding in heard.findings if "window" in finding.message]
    assert bool(windows) == (model_type in ("mistral", "phi3"))


@pytest.mark.parametrize("kind", [kind for kind, row in TYPES.items() if row.quantized_by is None and not row.ternary])
def test_every_type_keeps_within_its_bound(shared: Prepared, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_type(shared, path, kind)
    report = verify_file(path, kind, shared.wanted)
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


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "embeddings trained whole": {"modules_to_save": ["embed_tokens"]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
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
}


def changed(family: str, **values: Any) -> Any:
    """A small model whose config says something else."""
    from transformers import AutoModelForCausalLM

    from tests.small_models import config_of

    config = config_of(family)
    for key, value in values.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_what_configs_say_is_in_the_file(shape: str, tmp_path: Path) -> None:
    family, values = SHAPES[shape]
    assert export(adapt(tmp_path, changed(family, **values)), "f32").verification.facts["f32_relative_error"] < 1e-5


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ftcli does not know how llama.cpp builds granite": ("granite", {}),
    "scores are divided by the root of 32": ("gemma2", {"query_pre_attn_scalar": 32}),
    "rope scaling is dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "its activation is gelu": ("llama", {"hidden_act": "gelu"}),
    "no place for lm_head": ("gemma", {"tie_word_embeddings": False}),
    "norm_topk_prob is False": ("qwen3_moe", {}),
    "norm_topk_prob is True": ("qwen2_moe", {"norm_topk_prob": True}),
    "not every layer has experts": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "its head is its embedding": ("qwen2_moe", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(reason: str, tmp_path: Path) -> None:
    family, values = REFUSED[reason]
    made = adapt(tmp_path, changed(family, **values))
    with pytest.raises(FtcliError, match=reason) as caught:
        export(made, "f32")
    assert {finding.code for finding in caught.value.findings} == {"FT756"}
    assert not (made.run.export_dir / "gguf").exists()


@pytest.mark.parametrize(
    ("family", "variant"), [("llama", {}), ("gemma2", {}), ("qwen2_vl", {}), ("llama", VARIANTS["rank pattern"])]
)
def test_an_adapter_is_written_alone(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    made = adapt(tmp_path, build(family), use_rslora=bool(variant), **variant)
    result = export(made, "f32", lora=True)
    assert result.verification.facts["adapter_relative_error"] < 1e-5
    file = ReadFile(result.path / "run-LoRA-F32.gguf")
    assert file.values["general.type"] == "adapter"
    if not variant and family == "gemma2":
        stored = load_file(made.run.adapter_dir / "adapter_model.safetensors")
        b = stored["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        assert torch.equal(file.read("blk.0.attn_q.weight.lora_b"), b)


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


def test_swapped_halves_of_experts_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up have one shape: only the numbers tell them apart."""
    made = adapt(tmp_path, build("mixtral"))
    monkeypatch.setattr(experts_format.SplitExperts, "read", lambda self, name: swapped(self, name))
    with pytest.raises(FtcliError, match="logits differ"):
        export(made, "f32")


def swapped(weights: Any, name: str) -> torch.Tensor:
    plain, _, half = name.partition(":")
    tensor: torch.Tensor = weights.whole.read(plain)
    return tensor.chunk(2, dim=1)[half == "gate"].contiguous() if half else tensor


@pytest.mark.parametrize("variant", ["dora", "head trained whole"])
def test_an_adapter_that_is_more_than_two_matrices_is_refused(variant: str, tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="two matrices alone"):
        export(adapt(tmp_path, build("llama"), **VARIANTS[variant]), "f32", lora=True)


@pytest.mark.parametrize("fault", ["alpha", "permutation", "cut"])
def test_a_wrong_adapter_is_caught(
    fault: str, shared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapter.gguf"
    if fault == "permutation":
        monkeypatch.setattr(adapter_file, "to_file", not_permuted)
    adapter_file.write_adapter(shared.wanted, path, "run", 8.0)
    if fault == "alpha":
        other_number("adapter.lora.alpha", 9.0)(path)
    if fault == "cut":
        cut_the_file(path)
    problems, _ = adapter_file.verify_adapter(shared.wanted, path)
    assert ("cannot be read" if fault == "cut" else "logits differ") in problems[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, clean_process: CleanProcess) -> Prepared:
    """One llama, prepared once."""
    return prepared_of(adapt(tmp_path_factory.mktemp("shared"), build("llama")), clean_process)


@pytest.fixture(scope="module")
def file(shared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    write_type(shared, path, "q8_0")
    assert not verify_file(path, "q8_0", shared.wanted).problems
    return path


def data_at(path: Path, tensor: str) -> int:
    reader = gguf.GGUFReader(path)
    return int(next(each.data_offset for each in reader.tensors if each.name == tensor))


def flip_a_scale(path: Path) -> None:
    place, data = data_at(path, "blk.1.ffn_up.weight"), bytearray(path.read_bytes())
    (scale,) = struct.unpack_from("<e", data, place)
    struct.pack_into("<e", data, place, -scale)
    path.write_bytes(bytes(data))


def cut_the_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def empty_the_file(path: Path) -> None:
    path.write_bytes(b"")


def other_template(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"<start_of_turn>model\\n", b"<start_of_turn>Model\\n"))


def other_number(key: str, number: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        place = data.index(key.encode()) + len(key) + 4
        struct.pack_into("<f" if isinstance(number, float) else "<I", data, place, number)
        path.write_bytes(bytes(data))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped scale": (flip_a_scale, "blk.1.ffn_up.weight differs"),
    "a truncated file": (cut_the_file, "cannot be read"),
    "a truncated header": (cut_the_header, "cannot be read"),
    "an empty file": (empty_the_file, "cannot be read"),
    "another template": (other_template, "chat_template is another"),
    "another rotation": (other_number("llama.rope.freq_base", 9000.0), "llama.rope.freq_base is another"),
    "another epsilon": (other_number("llama.attention.layer_norm_rms_epsilon", 0.5), "rms_epsilon is another"),
    "another eos": (other_number("tokenizer.ggml.eos_token_id", 7), "eos_token_id is another"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_caught(damage: str, shared: Prepared, file: Path, tmp_path: Path) -> None:
    path = tmp_path / file.name
    shutil.copyfile(file, path)
    spoil, said = DAMAGE[damage]
    spoil(path)
    problems = verify_file(path, "q8_0", shared.wanted).problems
    assert problems
    assert said in problems[0]


def test_what_the_metadata_means_is_computed(shared: Prepared, tmp_path: Path) -> None:
    """Values that were meant as they are, and are wrong: the model that the file describes answers otherwise."""
    said = {**shared.description.values, "rope.freq_base": 9000.0}
    wrong = dataclasses.replace(
        shared,
        description=dataclasses.replace(shared.description, values=said),
        wanted=dataclasses.replace(shared.wanted, said=said),
    )
    path = tmp_path / "model.gguf"
    write_type(wrong, path, "f32")
    (problem, *_) = verify_file(path, "f32", wrong.wanted).problems
    assert "logits differ" in problem


def not_permuted(stored: str, tensor: torch.Tensor, heads: Any, architecture: Any) -> torch.Tensor:
    return to_file(stored, tensor, {} if "attn_k" in stored else heads, architecture)


def permuted_by_the_other_heads(stored: str, tensor: torch.Tensor, heads: Any, architecture: Any) -> torch.Tensor:
    swapped = {"attn_q": heads["attn_k"], "attn_k": heads["attn_q"]} if heads else {}
    return to_file(stored, tensor, swapped, architecture)


@pytest.mark.parametrize("fault", [not_permuted, permuted_by_the_other_heads])
def test_a_wrong_permutation_is_caught_and_removed(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapt(tmp_path, build("llama"))
    monkeypatch.setattr(gguf_format, "to_file", fault)
    with pytest.raises(FtcliError, match="attn_k") as caught:
        export(made, "f32")
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not list(made.run.export_dir.iterdir())


def test_a_missing_tensor_is_caught(shared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file = gguf_format.write_file

    def without_one(path: Path, name: str, values: Any, tensors: Any) -> None:
        write_file(path, name, values, {k: v for k, v in tensors.items() if k != "blk.0.attn_v.weight"})

    monkeypatch.setattr(gguf_format, "write_file", without_one)
    path = tmp_path / "model.gguf"
    write_type(shared, path, "f32")
    assert verify_file(path, "f32", shared.wanted).problems == ("blk.0.attn_v.weight is missing",)


def test_llama_quantize_is_found_by_name(shared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FtcliError, match="not on the PATH") as caught:
        write_type(shared, tmp_path / "model.gguf", "q4_k_m")
    assert caught.value.findings[0].code == "FT758"
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\n/bin/cp $1 $2\n")
    program.chmod(0o755)
    write_type(shared, tmp_path / "model.gguf", "q4_k_m")
    assert ReadFile(tmp_path / "model.gguf").type_name("blk.0.ffn_up.weight") == "BF16"
    assert not list(tmp_path.glob(".*"))
    program.write_text("#!/bin/sh\necho no such type >&2\nexit 3\n")
    with pytest.raises(FtcliError, match=r"failed \(exit 3\): no such type"):
        write_type(shared, tmp_path / "other.gguf", "q4_k_m")


def test_a_full_fine_tune_is_written(tuned: Trained) -> None:
    facts = export(tuned, "f32").verification.facts
    assert facts["f32_relative_error"] < 1e-5


def test_too_full_a_disk_is_said_before_writing(
    shared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
