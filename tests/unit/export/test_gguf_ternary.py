"""Ternary weights in GGUF: the values that training rounds to, to the last sign, in types made for them and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.ternary import ternarise
from safetensors.torch import load_file

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.export import verify as verification
from ftcli.export.gguf import file as gguf_file
from ftcli.export.writing import export_run
from ftcli.gguf import ReadFile, from_file
from ftcli.model.bitnet import BitLinear, TernaryLinear
from ftcli.model.load_quantized import ModelStorage, load_quantized
from ftcli.model.pretrained import read_config
from ftcli.tables.gguf import architecture_of
from tests.small_models import build
from tests.unit.export.conftest import Heard, Trained, noted, tokenizer, write_run
from tests.unit.export.gguf_runs import adapt, changed, export

pytest.importorskip("gguf")

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def rounded_run(folder: Path, family: str, **values: Any) -> Trained:
    """A full fine-tune whose masters are rounded in every product."""
    model = changed(family, **WIDE, **values)
    model.config.quantization_config = {**ONLINE, "modules_to_not_convert": ["lm_head"]}
    run = write_run(folder / "run", folder / "base", quantization={"method": "bitnet"})
    for place in (folder / "base", run.model_dir):
        model.save_pretrained(place)
        tokenizer().save_pretrained(place)
    return noted(Trained(folder / "base", run))


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_ternary_files_hold_the_values_that_training_rounds_to(family: str, tmp_path: Path) -> None:
    made, heard = rounded_run(tmp_path, family, tie_word_embeddings=family == "bitnet"), Heard()
    result = export(made, "tq2_0", "tq1_0", heard=heard)
    masters = load_file(made.run.model_dir / "model.safetensors")
    architecture = architecture_of(family, "relu2" if family == "bitnet" else "silu")
    assert architecture is not None
    for kind in ("TQ2_0", "TQ1_0"):
        file = ReadFile(result.path / f"run-{kind}.gguf")
        for stored, name in (("attn_k", "self_attn.k_proj"), ("ffn_down", "mlp.down_proj")):
            wanted = ternarise(masters[f"model.layers.0.{name}.weight"])
            found = from_file(
                f"blk.0.{stored}.weight", file.read(f"blk.0.{stored}.weight"), {"attn_k": 2}, architecture
            )
            assert file.type_name(f"blk.0.{stored}.weight") == kind
            assert torch.equal(found.sign().to(torch.int8), wanted.data)
            assert float((found.abs().max() / wanted.scale - 1).abs()) < 2.0**-11
        assert file.type_name("token_embd.weight") == "F16"
        assert ("blk.0.ffn_sub_norm.weight" in file.names) == (family == "bitnet")
    facts = result.verification.facts
    assert facts["tq2_0_relative_error"] < 2e-3
    assert facts["tq2_0_greedy_tokens"] == "6 of 6"
    assert 1e-4 < facts["activations_rounding"] < gguf_file.ACTIVATIONS
    assert [f.code for f in heard.findings] == (["FT757"] if family == "bitnet" else [])
    assert file.values["general.architecture"] == ("bitnet-b1.58" if family == "bitnet" else "llama")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_other_types_hold_them_too(kind: str, tmp_path: Path) -> None:
    """The products of value and scale: of 8 bits, each block's largest is the scale, so nothing is lost but its end."""
    facts = export(rounded_run(tmp_path, "llama"), kind).verification.facts
    assert facts[f"{kind}_relative_error"] < (1e-6 if kind == "f32" else 0.02)


def test_masters_that_are_not_rounded_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written and what it is compared with agree, and are not what was trained."""
    made = rounded_run(tmp_path, "llama")
    kept = gguf_file.ternarise
    monkeypatch.setattr(gguf_file, "ternarise", lambda weight: kept(weight.abs()))
    with pytest.raises(FtcliError, match="ternary weights' logits differ") as caught:
        export(made, "tq2_0")
    assert {finding.code for finding in caught.value.findings} == {"FT741"}


def test_a_flipped_sign_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    made = rounded_run(tmp_path, "llama")
    kept = gguf.quants.quantize

    def flipped(data: Any, kind: Any) -> Any:
        packed = kept(data, kind)
        if kind.name == "TQ2_0":
            packed[0, 3] ^= 2  # 0, 1, 2 stand for -1, 0, 1
        return packed

    monkeypatch.setattr(gguf.quants, "quantize", flipped)
    with pytest.raises(FtcliError, match="has signs other than those trained"):
        export(made, "tq2_0")


def test_ternary_types_are_for_ternary_weights(tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="ternary types are for ternary weights") as caught:
        export(adapt(tmp_path, build("llama")), "tq1_0")
    assert {finding.code for finding in caught.value.findings} == {"FT756"}


def folder_of(made: Trained, result: Any, kind: str, folder: Path, said: dict[str, Any] | None = None) -> Path:
    """One of an export's files beside the model's config.json, which says ``said`` of how it is quantized."""
    folder.mkdir()
    (folder / "m.gguf").write_bytes((result.path / f"run-{kind.upper()}.gguf").read_bytes())
    values = json.loads((made.run.model_dir / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values if said is None else {**values, "quantization_config": said}))
    return folder


def loaded(folder: Path, *, trained: bool) -> Any:
    holding = ModelStorage(QuantizationConfig(method="bitnet"), torch.float32, torch.device("cpu"), trained=trained)
    config = read_config(str(folder), revision=None, offline=True)
    return load_quantized(str(folder), config, holding, "sdpa", revision=None, offline=True)


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_a_file_is_trained_on_from_the_very_values_that_it_holds(family: str, tmp_path: Path) -> None:
    """GGUF has no masters. Rounding -s, 0 and s by their mean would shrink them."""
    made = rounded_run(tmp_path, family, tie_word_embeddings=family == "bitnet")
    result = export(made, "tq2_0", "tq1_0", "q8_0")
    masters = load_file(made.run.model_dir / "model.safetensors")
    for kind, said in (("tq2_0", None), ("tq1_0", ONLINE), ("q8_0", {**ONLINE, "quantization_mode": "offline"})):
        folder = folder_of(made, result, kind, tmp_path / kind, said)
        for trained in (True, False):
            model = loaded(folder, trained=trained)
            layers = [module for module in model.modules() if isinstance(module, BitLinear | TernaryLinear)]
            assert len(layers) == 7
            for layer in layers:
                wanted = ternarise(masters[f"{layer.layer_name}.weight"])
                found = layer.ternary if isinstance(layer, BitLinear) else layer.frozen_weight()
                assert torch.equal(found.data, wanted.data)
                assert float((found.scale / wanted.scale - 1).abs()) < 2.0**-10  # float16
            if kind != "q8_0":  # whose embedding is of 8 bits
                got = model.get_input_embeddings().weight
                assert torch.allclose(got, masters["model.embed_tokens.weight"], rtol=2.0**-10, atol=1e-6)


def test_transformers_reads_the_same_model_of_a_llama_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = rounded_run(tmp_path, "llama", tie_word_embeddings=False)
    result = export(made, "tq2_0")
    plain = AutoModelForCausalLM.from_pretrained(result.path, gguf_file="run-TQ2_0.gguf", dtype=torch.float32)
    model = loaded(folder_of(made, result, "tq2_0", tmp_path / "file"), trained=True)
    for name, module in model.named_modules():
        if isinstance(module, BitLinear):
            assert torch.equal(module.ternary.dequantize(torch.float32), plain.get_submodule(name).weight)


def test_files_of_other_weights_and_models_are_refused(tmp_path: Path) -> None:
    made = rounded_run(tmp_path, "llama", tie_word_embeddings=False)
    result = export(made, "tq2_0", "q4_0")
    with pytest.raises(FtcliError, match=r"more values than -a, 0 and a"):
        loaded(folder_of(made, result, "q4_0", tmp_path / "blocks"), trained=True)
    folder = folder_of(made, result, "tq2_0", tmp_path / "other")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "qwen2"}))
    with pytest.raises(FtcliError, match="of the architecture llama"):
        loaded(folder, trained=True)
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 2}))
    with pytest.raises(FtcliError, match="not stored"):
        loaded(folder, trained=True)
    (folder / "config.json").write_text(json.dumps(values))
    whole = (folder / "m.gguf").read_bytes()
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    assert whole[at] == 35  # TQ2_0; 36 is bitnet.cpp's I2_S
    (folder / "m.gguf").write_bytes(whole[:at] + bytes([36]) + whole[at + 1 :])
    with pytest.raises(FtcliError, match="I2_S"):
        loaded(folder, trained=True)
    for damaged in (whole[: len(whole) // 2], b"GGUF" + bytes(40), whole[:200], b""):
        (folder / "m.gguf").write_bytes(damaged)
        with pytest.raises(FtcliError, match="FT323"):
            loaded(folder, trained=True)


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_packed_weights_are_read_layer_by_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rounded_run(tmp_path, family, tie_word_embeddings=family == "bitnet")
    (whole,) = export_run(made.run, ["bitnet"], reporter=Heard(), offline=True)
    assert (whole.path / "model.safetensors").is_file()
    monkeypatch.setattr(verification, "fits", lambda _: False)
    (streamed,) = export_run(made.run, ["bitnet"], reporter=Heard(), offline=True, force=True)
    assert streamed.verification.facts["relative_error"] == pytest.approx(
        whole.verification.facts["relative_error"], abs=1e-3
    )
