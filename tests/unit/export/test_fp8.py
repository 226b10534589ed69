"""fp8 in the layout of compressed-tensors: that library is the oracle, through transformers, in another process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ftcli.errors import ExitCode, FtcliError
from ftcli.export import compressed
from ftcli.export import verify as verification
from ftcli.export.floats import LARGEST, scale_of, to_float8
from tests.small_models import build
from tests.tiers import in_turn
from tests.unit.export.conftest import Trained, edit_json
from tests.unit.export.gguf_runs import adapt
from tests.unit.export.test_export import VARIANTS, code, export, failure

pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


@pytest.mark.parametrize(("family", "variant"), in_turn(["gemma2", "llama"], ["head trained whole", "rslora", "plain"]))
def test_a_merged_model_is_rounded_to_eight_bits(trained: Callable[..., Trained], family: str, variant: str) -> None:
    made = trained(family, "bfloat16", **VARIANTS[variant])
    safetensors, eight = export(made, "safetensors", "fp8")
    plain, found = (load_file(result.path / "model.safetensors") for result in (safetensors, eight))
    linears = [name for name in plain if name.endswith("proj.weight")]
    assert len(linears) == 14
    assert set(found) == {*plain, *(f"{name}_scale" for name in linears)}
    for name, tensor in found.items():
        if name in plain and name not in linears:
            assert torch.equal(tensor, plain[name])
    for name in linears:
        scale = found[f"{name}_scale"]
        assert found[name].dtype == torch.float8_e4m3fn
        assert torch.equal(scale.to(torch.bfloat16).float(), scale)
        error = (found[name].float() * scale - plain[name].float()).norm() / plain[name].float().norm()
        assert 0.01 < error < 0.04
    told = safetensors.verification.facts
    assert told["relative_error"] < 1e-5 < told["rounding"], (
        "held to base and adapter rounded alike: see test_logits.py"
    )
    facts = eight.verification.facts
    assert 0.005 < facts["relative_error"] < 0.3
    assert facts["rounded"] == 14
    assert "compressed_tensors" in facts["reloaded_by"]
    said = json.loads((eight.path / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["lm_head"]


def test_a_full_fine_tune_is_rounded(tuned: Trained) -> None:
    (result,) = export(tuned, "fp8")
    assert result.verification.facts["relative_error"] < 0.12


@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2_vl"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Biases stay as they are, joined layers are layers, and what sees images is not touched."""
    made = adapt(tmp_path, build(family))
    (result,) = export(made, "fp8")
    found = load_file(result.path / "model.safetensors")
    rounded = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(rounded) == {"mistral": 14, "phi3": 8, "qwen2_vl": 14}[family]
    assert not [name for name in rounded if "visual" in name or "bias" in name]


def test_the_numbers_are_those_of_compressed_tensors() -> None:
    """The library's own rounding of the same weight with the same scale."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as theirs

    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    weight[5, 7] = 1e4
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scale = scale_of(weight)
    wanted = theirs(weight, scale, torch.zeros_like(scale), args, dtype=torch.float8_e4m3fn)
    assert torch.equal(to_float8(weight, scale).float(), wanted.float())
    assert bool((weight.abs().amax(1, keepdim=True) <= scale * LARGEST).all())
    assert scale[3] == 1.0


def change(folder: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = make(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of q and k as llama.cpp wants them."""
    return tensor.view(4, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape).contiguous()


WEIGHT = "model.layers.1.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped scale": (lambda f: change(f, f"{WEIGHT}_scale", lambda t: -t), "not a positive number"),
    "another scale": (lambda f: change(f, f"{WEIGHT}_scale", lambda t: t * 1.5), "wastes the type's range"),
    "a swapped permutation": (lambda f: change(f, WEIGHT, swap_halves), "differs by up to"),
    "a missing tensor": (lambda f: drop(f, WEIGHT), "is missing"),
    "a missing scale": (lambda f: drop(f, f"{WEIGHT}_scale"), "is missing"),
    "a touched norm": (lambda f: change(f, "model.norm.weight", lambda t: t + 0.5), "model.norm.weight differs"),
    "a truncated file": (cut, "cannot be read"),
    "no template": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template differs"),
    "no stop token": (lambda f: edit_json(f / "generation_config.json", eos_token_id=1), "stop token"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_caught_and_removed(
    damage: str, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, said = DAMAGE[damage]
    made, declare = trained("llama"), compressed._declare

    def damaged(path: Path, *said: Any) -> None:
        declare(path, *said)
        spoil(path.parent)

    monkeypatch.setattr(compressed, "_declare", damaged)
    error = failure(made, "fp8")
    assert code(error) == "FT741"
    assert error.exit_code is ExitCode.BUG
    assert said in " ".join(finding.message for finding in error.findings)
    assert not (made.run.export_dir / "fp8").exists()


def test_weights_that_are_not_said_to_be_rounded_are_caught(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "_declare", lambda *_: None)
    assert code(failure(trained("llama"), "fp8")) == "FT741"


def test_experts_are_refused(tmp_path: Path) -> None:
    made = adapt(tmp_path, build("qwen3_moe"), target_modules=["q_proj"])
    with pytest.raises(FtcliError, match="is a stack of experts") as caught:
        export(made, "fp8")
    assert {finding.code for finding in caught.value.findings} == {"FT740"}


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_what_memory_does_not_hold_is_read_layer_by_layer(
    family: str, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits as transformers' own loading gives, which decompresses the whole."""
    made = trained(family, "bfloat16")
    (whole,) = export(made, "fp8")
    monkeypatch.setattr(verification, "fits", lambda _: False)
    (streamed,) = export(made, "fp8", force=True)
    found, wanted = streamed.verification.facts, whole.verification.facts
    assert (found["loaded"], wanted["loaded"]) == ("layer by layer, for lack of memory", "whole")
    assert found["greedy_tokens"] == "2 of 2"
    assert found["relative_error"] == pytest.approx(wanted["relative_error"], rel=0.2)


def test_names_that_files_have_otherwise_are_read_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "fits", lambda _: False)
    (result,) = export(adapt(tmp_path, build("gemma3")), "fp8")
    assert result.verification.facts["loaded"] == "layer by layer, for lack of memory"
    assert result.verification.facts["greedy_tokens"] == "2 of 2"


def test_a_wrong_scale_is_caught_layer_by_layer(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the comparison of weights would let pass: only the numbers that come back tell."""
    monkeypatch.setattr(verification, "fits", lambda _: False)
    monkeypatch.setattr(compressed, "_compare_weights", lambda *_: [])
    made, declare = trained("llama"), compressed._declare

    def damaged(path: Path, *said: Any) -> None:
        declare(path, *said)
        for layer in (0, 1):
            change(path.parent, f"model.layers.{layer}.mlp.down_proj.weight_scale", lambda scale: -scale)

    monkeypatch.setattr(compressed, "_declare", damaged)
    assert "logits differ" in " ".join(finding.message for finding in failure(made, "fp8").findings)


def test_without_the_library_it_is_said_so(trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda _: None)
    made = trained("llama")
    assert code(failure(made, "fp8")) == "FT758"
    (result,) = export(made, "fp8", verify=False)
    with safe_open(result.path / "model.safetensors", framework="pt") as file:
        assert file.get_tensor(WEIGHT).dtype == torch.float8_e4m3fn
