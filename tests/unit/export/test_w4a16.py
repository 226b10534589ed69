"""Four bits in the layout of compressed-tensors: that library is the oracle, through transformers elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.export import compressed, w4a16
from ftcli.export import verify as verification
from ftcli.export.w4a16 import decoded, encoded, scheme_of
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import Trained
from tests.unit.export.gguf_runs import adapt
from tests.unit.export.test_export import code, export, failure

pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def made_of(folder: Path, family: str = "llama") -> Trained:
    """A run with an adapter on a model whose rows are of 64 numbers."""
    return adapt(folder, build(family, hidden_size=64, intermediate_size=64))


@pytest.mark.parametrize("family", ["llama", *further("gemma2", "phi3", "qwen3")])
def test_a_merged_model_is_rounded_to_four_bits(family: str, tmp_path: Path) -> None:
    made = made_of(tmp_path, family)
    safetensors, four = export(made, "safetensors", "w4a16")
    plain, found = (load_file(result.path / "model.safetensors") for result in (safetensors, four))
    rounded = [name for name in plain if f"{name}_packed" in found]
    assert len(rounded) == {"phi3": 8}.get(family, 14)
    assert set(found) == {*plain, *(f"{name}{part}" for name in rounded for part in PARTS)} - {*rounded}
    for name in rounded:
        again = decoded({part: found[f"{name}{part}"] for part in PARTS})
        assert 0.05 < (again - plain[name].float()).norm() / plain[name].float().norm() < 0.12
    facts = four.verification.facts
    assert 0.05 < facts["relative_error"] < 0.4
    assert facts["loss_unrounded"] < facts["loss"] < facts["loss_unrounded"] + 0.05
    assert "compressed_tensors" in facts["reloaded_by"]
    said = json.loads((four.path / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] in (32, 64)
    card = (four.path / "README.md").read_text()
    assert f"loss {facts['loss']:.4g} ({facts['loss_unrounded']:.4g} before rounding)" in card


PARTS = ("_packed", "_scale", "_shape")


def test_the_numbers_are_those_of_compressed_tensors() -> None:
    """The library's own packing and numbers, of odd values too."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    weight = torch.randn((6, 96), generator=torch.Generator().manual_seed(1))
    weight[2] = 0.0
    weight[3, 40] = 1e4
    weight[4, :32] = 1e-30
    parts = encoded(weight, 32)
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    scale = parts["_scale"].float()
    theirs = quantize(weight, scale, torch.zeros_like(scale), args, dtype=torch.int8)
    assert torch.equal(pack_to_int32(theirs, 4), parts["_packed"])
    whole = unpack_from_int32(parts["_packed"], 4, torch.Size(parts["_shape"].tolist()))
    assert torch.equal(dequantize(whole, scale, args=args, dtype=torch.float32), decoded(parts))


def test_a_scale_that_cuts_the_largest_number_is_taken_where_that_is_nearer() -> None:
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(2))
    error = (decoded(encoded(weight, 128)) - weight).norm()
    scale = (weight.abs().amax(1, keepdim=True) / 7).to(torch.bfloat16).float()
    plain = ((weight / scale).round().clamp(-8, 7) * scale - weight).norm()
    assert error < 0.95 * plain


@pytest.mark.parametrize(("widths", "group"), [({256, 128}, 128), ({128, 192}, 64), ({128, 96}, 32)])
def test_the_largest_group_that_divides_all_rows(widths: set[int], group: int) -> None:
    assert scheme_of(frozenset(widths)).numbers["weights"]["group_size"] == group


def test_rows_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    error = failure(adapt(tmp_path, build("llama")), "w4a16")
    assert code(error) == "FT740"
    assert "rows of 48 numbers" in error.findings[0].message


def change(folder: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if make is None:
        del tensors[name]
    else:
        tensors[name] = make(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "a flipped scale": ("_scale", lambda t: -t, "not a positive number"),
    "another scale": ("_scale", lambda t: t * 1.1, "lies farther"),
    "swapped rows": ("_packed", lambda t: t.flip(0), "lies farther"),
    "swapped halves of bytes": ("_packed", lambda t: ((t & 0x0F0F0F0F) << 4) | ((t >> 4) & 0x0F0F0F0F), "lies farther"),
    "another shape": ("_shape", lambda t: t.flip(0) + 1, "says that its shape is"),
    "another dtype": ("_packed", lambda t: t.to(torch.int64), "is torch.int64"),
    "a missing scale": ("_scale", None, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_caught_and_removed(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, make, said = DAMAGE[damage]
    made, declare = made_of(tmp_path), compressed._declare

    def damaged(path: Path, *settings: Any) -> None:
        declare(path, *settings)
        change(path.parent, f"{WEIGHT}{part}", make)

    monkeypatch.setattr(compressed, "_declare", damaged)
    error = failure(made, "w4a16")
    assert code(error) == "FT741"
    assert said in " ".join(finding.message for finding in error.findings)
    assert not (made.run.export_dir / "w4a16").exists()


def test_a_model_that_rounding_changes_too_far_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16, "_MULTIPLES", (0.1,))
    error = failure(made_of(tmp_path), "w4a16")
    assert code(error) == "FT741"
    assert "logits differ by" in " ".join(finding.message for finding in error.findings)


def test_what_memory_does_not_hold_is_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(tmp_path)
    (whole,) = export(made, "w4a16")
    monkeypatch.setattr(verification, "fits", lambda _: False)
    (streamed,) = export(made, "w4a16", force=True)
    found, wanted = streamed.verification.facts, whole.verification.facts
    assert (found["loaded"], wanted["loaded"]) == ("layer by layer, for lack of memory", "whole")
    assert found["relative_error"] == pytest.approx(wanted["relative_error"], rel=0.2)
