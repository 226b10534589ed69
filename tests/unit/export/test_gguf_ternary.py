"""Ternary weights in GGUF: the values that training rounds to, to the last sign, in types made for them and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.ternary import ternarise
from safetensors.torch import load_file

from ftcli.errors import FtcliError
from ftcli.export.gguf import ternary
from ftcli.export.gguf.file import ReadFile
from ftcli.export.gguf.names import from_file
from ftcli.tables.gguf import architecture_of
from tests.small_models import build
from tests.unit.export.conftest import Heard, Trained, tokenizer, write_run
from tests.unit.export.test_gguf import adapt, changed, export

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
    return Trained(folder / "base", run)


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
    assert 1e-4 < facts["activations_rounding"] < ternary.ACTIVATIONS
    assert [f.code for f in heard.findings] == (["FT757"] if family == "bitnet" else [])
    assert file.values["general.architecture"] == ("bitnet-b1.58" if family == "bitnet" else "llama")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_other_types_hold_them_too(kind: str, tmp_path: Path) -> None:
    """The products of value and scale: of 8 bits, each block's largest is the scale, so nothing is lost but its end."""
    facts = export(rounded_run(tmp_path, "llama"), kind).verification.facts
    assert facts[f"{kind}_relative_error"] < (1e-6 if kind == "f32" else 0.02)


def test_masters_that_are_not_rounded_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written and what it is held against agree, and are not what was trained."""
    made = rounded_run(tmp_path, "llama")
    kept = ternary.ternarise
    monkeypatch.setattr(ternary, "ternarise", lambda weight: kept(weight.abs()))
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
    with pytest.raises(FtcliError, match="has other signs than were trained"):
        export(made, "tq2_0")


def test_ternary_types_are_for_ternary_weights(tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="ternary types are for ternary weights") as caught:
        export(adapt(tmp_path, build("llama")), "tq1_0")
    assert {finding.code for finding in caught.value.findings} == {"FT756"}
