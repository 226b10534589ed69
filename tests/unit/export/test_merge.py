"""Merging tensor by tensor: what PEFT makes of the same, in every dtype, and untrained bytes that are left alone."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ftcli.config.evaluation import ExportConfig
from ftcli.config.model import LoraConfig, QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.export import safetensors as merged_format
from ftcli.export import verify as verification
from ftcli.export.tensorfile import TensorFile, computed, copied, write_shards
from ftcli.export.writing import ExportResult, export_run
from ftcli.facts.device import cpu_device
from ftcli.model.lora import apply_lora
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear
from ftcli.plan.precision import DtypePlan
from ftcli.run.directory import RunDirectory
from ftcli.run.signals import StopRequested, stoppable
from ftcli.tables import families
from tests.quantized import load, packed_state
from tests.small_models import MULTIMODAL, TEXT, build
from tests.tiers import further
from tests.unit.export.conftest import Heard, Trained, tokenizer, write_run

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' remarks on some families

IDS = torch.tensor([[2, 100, 101, 102, 50, 60, 70, 4], [2, 3, 30, 31, 32, 33, 34, 35]])
#: Families with something of their own: stacks of experts in parts and whole, fused projections, transposed weights,
#: a head under another name, learnt positions, mixers that read the weights of their layers, towers.
FAMILIES = ("mixtral", "phi3", "gpt2", "jamba", "gemma3")
MORE = ("gpt_oss", "gpt_neox", "deepseek_v3", "qwen3_next")
#: Those whose experts are on the kernels.
SPARSE = tuple(name for name, row in families.TABLE.items() if row.experts is not None and name in TEXT)
#: Where not all linear layers are adapted: a mixer reads some of its weights past the adapter; a tower stays frozen.
TARGETS = {"jamba": ["q_proj", "v_proj", "in_proj", "out_proj"], "gemma3": r".*language_model.*_proj"}


def adapter_of(model: Any, folder: Path, **options: Any) -> None:
    """An adapter on all linear layers, experts among them, that changes something."""
    experts = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name and name.endswith("_proj")
    ]
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "target_parameters": experts or None}
    # As the patterns are stored: transposed weights need their own flag.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(**{**settings, "fan_in_fan_out": transposed, "task_type": "CAUSAL_LM", **options})
    )
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += 0.3 * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
    adapted.save_pretrained(folder, save_embedding_layers=False)
    tokenizer().save_pretrained(folder)


def run_of(model_type: str, path: Path, **options: Any) -> Trained:
    base = path / "base"
    model = build(model_type)
    model.save_pretrained(base, max_shard_size="40KB")
    tokenizer().save_pretrained(base)
    run = write_run(path / "run", base, lora={"r": 4})
    adapter_of(model, run.adapter_dir, **{"target_modules": TARGETS.get(model_type, "all-linear"), **options})
    return Trained(base, run)


def loaded(folder: Path, model_type: str = "llama") -> Any:
    kind = AutoModelForImageTextToText if model_type in MULTIMODAL else AutoModelForCausalLM
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def answers(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def exported(run: RunDirectory, **settings: Any) -> ExportResult:
    asked = ExportConfig.model_validate(settings)
    (result,) = export_run(run, ["safetensors"], reporter=Heard(), offline=True, settings=asked)
    return result


def on_nf4(made: Trained, name: str) -> ExportResult:
    """Of a run of QLoRA that is like ``made``, in another folder."""
    run = trained_again(made, name)
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    if made.run.manifest_path.exists():
        (run.path / made.run.manifest_path.name).symlink_to(made.run.manifest_path)
    run.recipe_path.unlink()
    run.recipe_path.write_text(yaml.safe_dump({**raw, "quantization": {"method": "nf4"}}))
    return exported(run)


def code(caught: pytest.ExceptionInfo[FtcliError]) -> str:
    return caught.value.findings[0].code


def long(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) for name in names if name not in FAMILIES]


@pytest.mark.parametrize("model_type", [*FAMILIES, *long(dict.fromkeys((*MORE, *SPARSE)))])
def test_a_merged_model_is_what_peft_merges(model_type: str, tmp_path: Path) -> None:
    made = run_of(model_type, tmp_path)
    result = exported(made.run)
    adapted = peft.PeftModel.from_pretrained(loaded(made.base, model_type), made.run.adapter_dir)
    wanted, without = answers(adapted.merge_and_unload()), answers(loaded(made.base, model_type))
    assert distance(answers(loaded(result.path, model_type)), wanted) < 1e-5
    assert distance(without, wanted) > 0.01, "the adapter does nothing: this test proves nothing"
    before, after = stored(made.base), stored(result.path)
    assert set(after) == set(before), "what serves the base serves this"
    trained = {key.split(".lora_")[0] for key in load_file(made.run.adapter_dir / "adapter_model.safetensors")}
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert trained
    assert not [name for name in changed if "norm" in name or "vision" in name or "visual" in name or "embed" in name]


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "head and norm trained whole": {"modules_to_save": ["lm_head", "norm"]},
    "tied head adapted": {"target_modules": ["q_proj", "lm_head"]},
    "tied embedding trained whole": {"modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize(
    ("variant", "streamed"), [*((name, False) for name in VARIANTS), ("dora", True), ("tied head adapted", True)]
)
def test_every_kind_of_adapter_whole_or_layer_by_layer(
    variant: str, streamed: bool, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained("gemma2", **VARIANTS[variant])
    if streamed:
        monkeypatch.setattr(verification, "cpu_device", lambda: dataclasses.replace(cpu_device(), free_bytes=1))
    result = exported(made.run)
    asked = "layer by layer, for lack of memory" if streamed else "whole"
    assert result.verification.facts["loaded"] == asked
    adapted = peft.PeftModel.from_pretrained(loaded(made.base), made.run.adapter_dir)
    found, apart = answers(loaded(result.path)), answers(adapted)
    assert distance(found, apart) < 1e-5
    if variant != "tied head adapted":  # PEFT adds that to the embeddings as well, which is another model
        assert distance(found, answers(adapted.merge_and_unload())) < 1e-5
    assert distance(answers(loaded(made.base)), apart) > 0.02, "the adapter does nothing: this test proves nothing"
    assert result.verification.facts["relative_error"] < 1e-5
    assert result.verification.facts["top1_agreement"] == 1.0


def test_a_dtype_that_is_asked_for_is_one_rounding_away(trained: Callable[..., Trained]) -> None:
    made = trained("llama")
    full = stored(exported(made.run, dtype="float32").path)
    for dtype in ("bfloat16", "float16"):
        result = exported(trained_again(made, dtype), dtype=dtype)
        wanted = getattr(torch, dtype)
        after = stored(result.path)
        assert {tensor.dtype for tensor in after.values()} == {wanted}
        assert all(torch.equal(after[name], full[name].to(wanted)) for name in full)
        config = json.loads((result.path / "config.json").read_text())
        assert config["dtype"] == dtype
        plain: Any = AutoModelForCausalLM.from_pretrained(result.path, dtype="auto")
        assert plain.dtype == wanted


def trained_again(made: Trained, name: str) -> RunDirectory:
    """The same run in another folder, which has no exports yet."""
    run = RunDirectory(made.run.path.with_name(name))
    run.path.mkdir()
    for path in (made.run.recipe_path, made.run.adapter_dir):
        (run.path / path.name).symlink_to(path)
    return run


def test_a_full_fine_tune_is_rounded_when_asked(tuned: Trained) -> None:
    result = exported(tuned.run, dtype="bfloat16")
    before, after = stored(tuned.run.model_dir), stored(result.path)
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in before)
    assert 1e-4 < float(result.verification.facts["rounding"]) < 0.05


def test_a_number_too_large_for_float16_is_ft769_and_leaves_nothing(trained: Callable[..., Trained]) -> None:
    made = trained("llama", modules_to_save=["norm"])
    path = made.run.adapter_dir / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.model.norm.weight"][3] = 70000.0
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(FtcliError) as caught:
        exported(made.run, dtype="float16")
    assert code(caught) == "FT769"
    assert "model.norm.weight holds 70000" in caught.value.findings[0].message
    assert not list(made.run.export_dir.iterdir())


def test_what_was_not_trained_is_the_same_bytes_whatever_its_dtype(trained: Callable[..., Trained]) -> None:
    """A base that stores some weights in float32 and others in bfloat16 keeps both, and NaN stays the same NaN."""
    made = trained("llama", "bfloat16", target_modules=["q_proj"])
    path = made.base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})
    result = exported(made.run)
    after, files = stored(result.path), TensorFile(result.path / "model.safetensors")
    source = TensorFile(path)
    for name in tensors:
        same = b"".join(files.pieces(name)) == b"".join(source.pieces(name))
        assert same != name.endswith("q_proj.weight"), name
    assert after["model.norm.weight"].dtype == torch.float32


def test_a_base_whose_experts_have_the_names_of_old_keeps_them(tmp_path: Path) -> None:
    made = run_of("mixtral", tmp_path)
    names = set(stored(made.base))
    assert any("block_sparse_moe.experts.0.w1" in name for name in names)
    assert set(stored(exported(made.run).path)) == names


@pytest.mark.parametrize("model_type", ["mixtral", *long(SPARSE)])
def test_experts_in_nf4_are_merged_as_they_were_trained_and_written_one_by_one(model_type: str, tmp_path: Path) -> None:
    """They were merged with the weights before quantization."""
    made = run_of(model_type, tmp_path)
    made.run.manifest_path.write_text(json.dumps({"dtype_plan": {"compute": "float32"}}))
    result = on_nf4(made, "packed")
    quantized = load(made.base, QuantizationConfig(method="nf4"), kept=9)
    wanted = answers(peft.PeftModel.from_pretrained(quantized, made.run.adapter_dir))
    assert distance(answers(loaded(result.path)), wanted) < 1e-5
    before = stored(made.base)
    assert set(stored(result.path)) == set(before)
    unquantized = answers(peft.PeftModel.from_pretrained(loaded(made.base), made.run.adapter_dir))
    assert distance(unquantized, wanted) > 1e-3
    for name, tensor in stored(exported(trained_again(made, "plain")).path).items():
        packed = ".experts." in name and not name.endswith("_bias")
        assert not packed or not torch.equal(tensor, stored(result.path)[name]), name


@pytest.mark.parametrize("model_type", ["qwen3_next"])
def test_experts_that_nf4_leaves_alone_are_merged_as_they_are(model_type: str, tmp_path: Path) -> None:
    """Those of families whose experts are not on the kernels."""
    made = run_of(model_type, tmp_path)
    made.run.manifest_path.write_text(json.dumps({"dtype_plan": {"compute": "float32"}}))
    plain, packed = stored(exported(trained_again(made, "plain")).path), stored(on_nf4(made, "packed").path)
    experts = [name for name in plain if re.search(r"\.experts\..*_proj(\.weight)?$", name)]
    assert experts
    assert all(torch.equal(plain[name], packed[name]) for name in experts)
    assert any(not torch.equal(plain[name], packed[name]) for name in plain)


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_quantized_base_is_merged_as_it_was_trained_or_as_it_was(
    method: str, trained: Callable[..., Trained]
) -> None:
    made = trained("llama", "bfloat16", target_modules=["q_proj", "up_proj"])
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    raw["quantization"] = {"method": method}
    made.run.recipe_path.write_text(yaml.safe_dump(raw))
    made.run.manifest_path.write_text(json.dumps({"dtype_plan": {"compute": "float32"}}))
    # As training loads it: quantized layer by layer while it is read. Its products are taken of the numbers that the
    # weights stand for: fp8's own would round activations as well, which no merged weight does.
    quantized = load(made.base, QuantizationConfig(method=method))
    products = answers(peft.PeftModel.from_pretrained(quantized, made.run.adapter_dir))
    quantized = load(made.base, QuantizationConfig(method=method))
    for name, layer in [(n, m) for n, m in quantized.named_modules() if isinstance(m, QuantizedLinear)]:
        quantized.set_submodule(name, DequantizedLinear(layer, torch.float32))
    wanted = {
        "trained": answers(peft.PeftModel.from_pretrained(quantized, made.run.adapter_dir)),
        "original": answers(peft.PeftModel.from_pretrained(loaded(made.base), made.run.adapter_dir)),
    }
    for base, other in (("trained", "original"), ("original", "trained")):
        run = trained_again(made, base)
        (run.path / made.run.manifest_path.name).symlink_to(made.run.manifest_path)
        result = exported(run, base=base, dtype="float32")
        found = answers(loaded(result.path))
        assert distance(found, wanted[base]) < 1e-5
        assert distance(found, wanted[other]) > 1e-3
        assert base == "original" or distance(found, products) < (0.05 if method == "fp8" else 1e-5)
        said = result.verification.merged_with
        assert (method in said) is (base == "trained")
        assert said in (result.path / "README.md").read_text()


def test_a_base_of_bitsandbytes_files_is_merged_without_bitsandbytes(trained: Callable[..., Trained]) -> None:
    made = trained("llama", "bfloat16", target_modules=["q_proj", "up_proj"])
    whole = stored(on_nf4(made, "whole").path)
    path = made.base / "model.safetensors"
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        layer = name.removesuffix(".weight")
        is_packed = layer.endswith("_proj")
        packed |= (
            {layer + key: part for key, part in packed_state(tensor, True).items()} if is_packed else {name: tensor}
        )
    save_file(packed, path, metadata={"format": "pt"})
    config = json.loads((made.base / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    (made.base / "config.json").write_text(json.dumps(config))
    result = on_nf4(made, "packed")
    after = stored(result.path)
    assert "quantization_config" not in json.loads((result.path / "config.json").read_text())
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in whole.items()}
    assert all(torch.equal(after[name], whole[name]) for name in whole)
    with pytest.raises(FtcliError) as caught:
        exported(made.run, base="original")
    assert code(caught) == "FT740"


def test_the_disk_is_asked_before_anything_is_written(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    made, usage = trained(), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(place)._replace(free=50_000))
    with pytest.raises(FtcliError) as caught:
        export_run(made.run, ["adapter", "safetensors"], reporter=Heard(), offline=True)
    assert code(caught) == "FT724"
    assert not made.run.export_dir.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_writing_leaves_nothing(
    number: int, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = trained(), []

    def interrupted(folder: Path, planned: Any, size: int) -> None:
        seen.append(folder)
        write_shards(folder, planned[:3], size)
        os.kill(os.getpid(), number)
        time.sleep(600)

    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(merged_format, "write_shards", interrupted)
        with pytest.raises(StopRequested) as caught, stoppable("exporting"):
            exported(made.run)
    assert time.monotonic() - begin < 500
    assert int(caught.value.exit_code) == (75 if number == signal.SIGTERM else 130)
    assert seen[0].parent == made.run.export_dir
    assert not list(made.run.export_dir.iterdir())
    assert exported(made.run).path.is_dir()


def test_what_a_killed_export_has_written_half_is_replaced(trained: Callable[..., Trained]) -> None:
    made = trained()
    half = made.run.export_dir / ".tmp-safetensors"
    half.mkdir(parents=True)
    (half / "model-00001-of-00009.safetensors").write_bytes(b"half")
    exported(made.run)
    assert [path.name for path in made.run.export_dir.iterdir()] == ["safetensors"]


def test_shards_are_read_by_the_library_and_copied_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "wide": torch.randn(5, 3), "half": torch.randn(7).half()}
    tensors["none"] = torch.empty(0, 4)
    tensors["one"] = torch.tensor(2.5, dtype=torch.bfloat16)
    planned = [computed(key, tensor.shape, tensor.dtype, lambda t=tensor: t) for key, tensor in tensors.items()]
    write_shards(tmp_path / "a", planned, 64)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) == 2
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / "a" / name, framework="pt") as file:
            assert torch.equal(file.get_tensor(key), tensors[key])
    again = [copied(key, file) for file in map(TensorFile, files) for key in file.entries]
    (tmp_path / "b").mkdir()
    write_shards(tmp_path / "b", again, 1 << 20)
    assert {k: v.tolist() for k, v in load_file(tmp_path / "b" / "model.safetensors").items()} == {
        k: v.tolist() for k, v in tensors.items()
    }


@pytest.mark.parametrize("model_type", ["gemma3", *further("gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")])
def test_adapters_of_tower_and_projector_are_merged_under_the_names_of_their_files(
    tmp_path: Path, model_type: str
) -> None:
    """Gemma-3's projector is a matrix of no linear layer. The result is PEFT's, from the files it loads itself."""
    base = tmp_path / "base"
    model = build(model_type)
    model.save_pretrained(base, max_shard_size="40KB")
    tokenizer().save_pretrained(base)
    run = write_run(tmp_path / "run", base, lora={"r": 4})
    plan = DtypePlan("float32", "float32", "float32", False, "")
    adapted, targets = apply_lora(model, LoraConfig(r=4), plan, seed=0, parts=("language", "projector", "vision"))
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(run.adapter_dir, save_embedding_layers=False)
    tokenizer().save_pretrained(run.adapter_dir)
    exported(run)
    found = loaded(run.path / "export" / "safetensors", model_type).state_dict()
    before = loaded(base, model_type)
    changed = {name for name, tensor in before.state_dict().items() if not torch.equal(tensor, found[name])}
    seeing = {name for name in targets.adapted if "language_model" not in name}
    assert seeing
    assert seeing <= {name.removesuffix(".weight") for name in changed}
    wanted = peft.PeftModel.from_pretrained(before, str(run.adapter_dir)).merge_and_unload().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
