"""Formats of a few bits in the layout of compressed-tensors: that library is the oracle, through transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.export import compressed, integers
from ftcli.export import verify as verification
from ftcli.export.floats import fp8, mxfp4, nvfp4
from ftcli.export.integers import W8A8, awq, decoded, encoded, gptq, w4a16
from ftcli.export.scheme import Given, Parts, Scheme
from ftcli.tables import exports
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import Trained, with_rows
from tests.unit.export.gguf_runs import adapt
from tests.unit.export.test_export import code, export, failure

pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
WIDTHS = frozenset({64, 128})
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "w4a16": lambda: w4a16(WIDTHS),
    "gptq": lambda: gptq(WIDTHS),
    "awq": lambda: awq(WIDTHS),
    "w8a8": lambda: W8A8,
    "fp8": lambda: fp8(static=False),
    "fp8_static": lambda: fp8(static=True),
    "nvfp4": lambda: nvfp4(WIDTHS),
    "mxfp4": lambda: mxfp4(WIDTHS),
}
CALIBRATED = ("gptq", "awq", "w8a8", "fp8_static", "nvfp4")


def made_of(folder: Path, family: str = "llama") -> Trained:
    """A run with an adapter on a model whose rows are of 64 numbers."""
    return with_rows(adapt(folder, build(family, hidden_size=64, intermediate_size=64)))


def odd_weight() -> Tensor:
    """Ordinary rows, a row of zeros, one with an outlier, one that is nearly nothing, one without negative numbers."""
    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(1))
    weight[2] = 0.0
    weight[3, 40] = 1e3
    weight[4, :32] = 1e-30
    weight[5] = weight[5].abs() + 1
    return weight


def given(scheme: Scheme, weight: Tensor) -> Given | None:
    if scheme.calibration is None:
        return None
    x = torch.randn((256, weight.shape[1]), generator=torch.Generator().manual_seed(2))
    x = x + 2 * x[:, :1]  # features that go together, as they do in models
    products = x.T @ x / len(x) if scheme.calibration.products else None
    return Given(float(x.abs().max()), float(weight.abs().max()), products)


def test_each_format_has_a_scheme_here() -> None:
    rounded = {name for name, row in exports.TABLE.items() if row.linear_only}
    assert set(SCHEMES) == rounded
    assert {name for name, scheme in SCHEMES.items() if scheme().calibration is not None} == set(CALIBRATED)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_numbers_are_those_of_compressed_tensors(name: str) -> None:
    """The library unpacks the parts into the weight that we say they are; shapes and dtypes are as they are told."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme, weight = SCHEMES[name](), odd_weight()
    parts = scheme.encode(weight, given(scheme, weight))
    assert {leaf: (tuple(t.shape), t.dtype) for leaf, t in parts.items()} == dict(scheme.parts(tuple(weight.shape)))
    kind: Any = BaseCompressor.get_value_from_registry(scheme.layout)
    told = QuantizationScheme(targets=["Linear"], **scheme.numbers)
    assert set(kind.compression_param_names(told)) == {leaf for leaf in parts if leaf.startswith("weight")}
    wide = {leaf: t.float() if t.dtype == torch.bfloat16 else t for leaf, t in parts.items()}
    theirs, ours = kind.decompress(wide, told)["weight"].float(), scheme.decode(parts)
    # Four-bit floats are unpacked in bfloat16.
    assert torch.allclose(theirs, ours, rtol=2.0**-7 if "fp4" in name else 1e-6, atol=0)
    ordinary = weight[6:]
    assert (ours[6:] - ordinary).norm() / ordinary.norm() < {4: 0.15, 8: 0.04}[scheme.bits]
    assert scheme.unlike(parts, weight, given(scheme, weight)) is None


def test_integers_are_packed_as_the_library_packs_them() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    weight = odd_weight()
    for symmetric in (True, False):
        parts = encoded(weight, group=32, symmetric=symmetric)
        args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=symmetric)
        zero = torch.zeros_like(parts["weight_scale"]).to(torch.int8)
        if not symmetric:
            zero = integers._unpacked(parts["weight_zero_point"].T, 16).T.to(torch.int8)
            assert torch.equal(pack_to_int32(zero, 4, packed_dim=0), parts["weight_zero_point"])
        theirs = quantize(weight, parts["weight_scale"].float(), zero, args, dtype=torch.int8)
        assert torch.equal(pack_to_int32(theirs, 4), parts["weight_packed"])


def test_four_bit_floats_are_the_library_s_nearest() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    from ftcli.export.floats import _nibbles, _numbers_of

    values = torch.tensor([[0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.0, 9.0, -0.3, -5.0, -7.0, -1.75]])
    wanted = torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0, -0.5, -4.0, -6.0, -2.0]])
    assert torch.equal(_numbers_of(_nibbles(values)), wanted)
    assert torch.equal(_nibbles(wanted), pack_fp4_to_uint8(wanted))


def swapped(tensor: Tensor) -> Tensor:
    """The first two columns in each other's place."""
    return torch.cat((tensor[:, 1:2], tensor[:, :1], tensor[:, 2:]), dim=1)


def mirrored(tensor: Tensor) -> Tensor:
    """The columns in the opposite order."""
    return tensor[:, torch.arange(tensor.shape[1] - 1, -1, -1)]


def transposed(tensor: Tensor) -> Tensor:
    """The bits of the transposed codes, in the shape that is expected."""
    codes = torch.stack([(tensor.long() >> shift) & 15 for shift in range(0, 8 * tensor.element_size(), 4)], -1)
    codes = codes.flatten(1).T.contiguous().view(tensor.shape[0], tensor.shape[1], -1)
    packed = sum(codes[..., at] << (4 * at) for at in range(codes.shape[-1]))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(tensor.dtype)


def other_halves(tensor: Tensor) -> Tensor:
    """The first of two numbers in the upper half of a byte."""
    return ((tensor & 0x0F) << 4) | (tensor >> 4)


FAULTS: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    f"{name}, {fault}": (name, part, make, said)
    for fault, names, part, make, said in (
        ("scales of two groups swapped", ("w4a16", "awq"), "weight_scale", swapped, "lies farther"),
        ("scales of two groups swapped", ("gptq",), "weight_scale", swapped, "not those of its groups"),
        ("scales of two groups swapped", ("nvfp4", "mxfp4"), "weight_scale", swapped, "lies farther"),
        ("groups in the wrong order", ("gptq",), "weight_scale", lambda t: t.flip(1), "not those of its groups"),
        ("groups in the wrong order", ("awq", "nvfp4"), "weight_scale", mirrored, "lies farther"),
        ("scales of other rows", ("w8a8",), "weight_scale", lambda t: t.flip(0), "lies farther"),
        ("packed along the other side", ("gptq", "awq", "nvfp4", "mxfp4"), "weight_packed", transposed, "lies farther"),
        ("rows in another order", ("gptq", "nvfp4"), "weight_packed", lambda t: t.flip(0), "lies farther"),
        ("rows in another order", ("w8a8",), "weight", lambda t: t.flip(0), "lies farther"),
        ("halves of bytes swapped", ("nvfp4", "mxfp4"), "weight_packed", other_halves, "lies farther"),
        ("zero points of another weight", ("awq",), "weight_zero_point", lambda t: t.flip(1), "lies farther"),
        ("no zero points", ("awq",), "weight_zero_point", torch.zeros_like, "lies farther"),
        ("a flipped scale", ("w4a16", "gptq", "awq", "w8a8"), "weight_scale", lambda t: -t, "not a positive number"),
        ("another shape", ("gptq", "awq"), "weight_shape", lambda t: t.flip(0), "says that its shape is"),
        ("inputs' scale of another layer", ("fp8_static",), "input_scale", lambda t: t * 1.1, "scale of its inputs"),
        ("inputs' scale of another layer", ("nvfp4",), "input_global_scale", lambda t: t * 2, "scale of its inputs"),
        ("its own global scale", ("nvfp4",), "weight_global_scale", lambda t: t * 1.3, "lies farther"),
    )
    for name in names
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_weight_are_caught(fault: str) -> None:
    name, part, make, said = FAULTS[fault]
    scheme = SCHEMES[name]()
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(1))
    weight = weight * torch.linspace(0.5, 2.0, 128) + (torch.linspace(0.0, 1.0, 128) if name == "awq" else 0.0)
    sound = scheme.encode(weight, given(scheme, weight))
    assert scheme.unlike(sound, weight, given(scheme, weight)) is None
    damaged: Parts = {**sound, part: make(sound[part]).contiguous()}
    assert said in (scheme.unlike(damaged, weight, given(scheme, weight)) or "")


def test_a_scale_that_cuts_the_largest_number_is_taken_where_that_is_nearer() -> None:
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(2))
    error = (decoded(encoded(weight, group=128)) - weight).norm()
    scale = (weight.abs().amax(1, keepdim=True) / 7).to(torch.bfloat16).float()
    plain = ((weight / scale).round().clamp(-8, 7) * scale - weight).norm()
    assert error < 0.95 * plain
    assert (decoded(encoded(weight + 1, group=128, symmetric=False)) - weight - 1).norm() < plain


@pytest.mark.parametrize(("widths", "group"), [({256, 128}, 128), ({128, 192}, 64), ({128, 96}, 32)])
def test_the_largest_group_that_divides_all_rows(widths: set[int], group: int) -> None:
    assert w4a16(frozenset(widths)).numbers["weights"]["group_size"] == group


def test_rows_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    error = failure(adapt(tmp_path, build("llama")), "w4a16")
    assert code(error) == "FT740"
    assert "rows of 48 numbers" in error.findings[0].message


def test_a_merged_model_is_rounded_to_four_bits(tmp_path: Path) -> None:
    made = made_of(tmp_path)
    safetensors, four = export(made, "safetensors", "w4a16")
    plain, found = (load_file(result.path / "model.safetensors") for result in (safetensors, four))
    rounded = [name for name in plain if f"{name}_packed" in found]
    assert len(rounded) == 14
    assert set(found) == {*plain, *(f"{name}{part}" for name in rounded for part in PARTS)} - {*rounded}
    for name in rounded:
        again = decoded({f"weight{part}": found[f"{name}{part}"] for part in PARTS})
        assert 0.05 < (again - plain[name].float()).norm() / plain[name].float().norm() < 0.12
    facts = four.verification.facts
    assert 0.05 < facts["relative_error"] < 0.4
    assert facts["loss_unrounded"] < facts["loss"] < facts["loss_unrounded"] + 0.05
    assert "compressed_tensors" in facts["reloaded_by"]
    assert not (four.path / "calibrated").exists()
    said = json.loads((four.path / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] in (32, 64)
    assert f"| loss unrounded | {facts['loss_unrounded']:.6g} |" in (four.path / "README.md").read_text()


PARTS = ("_packed", "_scale", "_shape")
#: Relative error of the logits of the small models below, at most.
ERRORS = {"gptq": 0.35, "awq": 0.35, "w8a8": 0.06, "fp8_static": 0.25, "nvfp4": 0.48, "mxfp4": 0.48}


@pytest.mark.parametrize("family", ["llama", *further("gemma2", "phi3", "qwen3", "stablelm")])
@pytest.mark.parametrize("name", ["awq", *further("gptq", "w8a8", "fp8_static", "nvfp4", "mxfp4")])
def test_each_is_loaded_again(name: str, family: str, tmp_path: Path) -> None:
    (result,) = export(made_of(tmp_path, family), name)
    facts, text = result.verification.facts, (result.path / "README.md").read_text()
    assert facts["relative_error"] < ERRORS[name]
    assert f"| relative error | {facts['relative_error']:.6g} |" in text
    assert f"| loss | {facts['loss']:.6g} |" in text
    assert f"| greedy tokens | {facts['greedy_tokens']} |" in text
    if name in CALIBRATED:
        assert f"| calibration rows | {facts['calibration_rows']} |" in text
    if name == "gptq":
        assert facts["output_error"] < 0.8 * facts["output_error_uncalibrated"]
    elif name in ("awq", "w8a8"):
        assert facts["output_error"] < facts["output_error_uncalibrated"]


Damage = Callable[[Path], None]


def change(name: str, make: Callable[[Tensor], Tensor] | None) -> Damage:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        if make is None:
            del tensors[name]
        else:
            tensors[name] = make(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def round_head(folder: Path) -> None:
    """The head in four bits, as a writer would that takes it for one of the linear layers."""
    tensors = load_file(folder / "model.safetensors")
    made = encoded(tensors.pop("lm_head.weight").float(), group=64)
    tensors |= {f"lm_head.{leaf}": tensor for leaf, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WEIGHT = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "a rounded head": (round_head, "lm_head.weight is missing"),
    "a head rounded in place": (
        change("lm_head.weight", lambda t: decoded(encoded(t.float(), group=64)).to(t.dtype)), "lm_head.weight differs",
    ),
    "swapped rows": (change(f"{WEIGHT}_packed", lambda t: t.flip(0)), "lies farther"),
    "another dtype": (change(f"{WEIGHT}_packed", lambda t: t.to(torch.int64)), "is torch.int64"),
    "a missing zero point": (change(f"{WEIGHT}_zero_point", None), "is missing"),
    "a norm without the factors": (change(NORM, torch.ones_like), "input_layernorm.weight differs"),
}  # fmt: skip


def test_faults_of_the_files_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one model, one at a time; that what is found ends the export is seen in test_fp8.py."""
    compare, said = compressed._compare_weights, {}

    def compared(folder: Path, *rest: Any) -> list[str]:
        sound = (folder / "model.safetensors").read_bytes()
        for name, (spoil, _) in DAMAGE.items():
            spoil(folder)
            said[name] = compare(folder, *rest)
            (folder / "model.safetensors").write_bytes(sound)
        return compare(folder, *rest)

    monkeypatch.setattr(compressed, "_compare_weights", compared)
    export(made_of(tmp_path), "awq")
    for name, (_, wanted) in DAMAGE.items():
        assert wanted in " ".join(said[name]), name


def test_a_model_that_rounding_changes_too_far_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "_MULTIPLES", (0.1,))
    error = failure(made_of(tmp_path), "w4a16")
    assert code(error) == "FT741"
    assert "logits differ by" in " ".join(finding.message for finding in error.findings)


@pytest.mark.parametrize("name", ["nvfp4", *further("w4a16", "awq", "gptq", "w8a8", "fp8_static", "mxfp4")])
def test_what_memory_does_not_hold_is_read_layer_by_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_of(tmp_path)
    (whole,) = export(made, name)
    monkeypatch.setattr(verification, "fits", lambda _: False)
    (streamed,) = export(made, name, force=True)
    found, wanted = streamed.verification.facts, whole.verification.facts
    assert (found["loaded"], wanted["loaded"]) == ("layer by layer, for lack of memory", "whole")
    assert found["relative_error"] == pytest.approx(wanted["relative_error"], rel=0.2)
