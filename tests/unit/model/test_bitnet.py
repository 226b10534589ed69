"""BitNet models: when weights are ternarised, both ends of the warm-up, causality, the cache, packed files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.bitlinear import quantize_int8
from ftkernels.ternary import Ternary, pack_ternary, ternarise
from safetensors.torch import load_file, save_file

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.model import bitnet
from ftcli.model.bitnet import BitLinear, TernaryLinear, already_ternary, set_share
from ftcli.model.load_quantized import ModelStorage, load_quantized
from ftcli.model.pretrained import read_config
from ftcli.model.quantized import check_weights, quantized_layers
from tests import small_models

SETTINGS = QuantizationConfig(method="bitnet")
IDS = torch.randint(8, 250, (2, 24), generator=torch.Generator().manual_seed(0))


def built(folder: Path, *, trained: bool) -> Any:
    holding = ModelStorage(SETTINGS, torch.float32, torch.device("cpu"), trained=trained)
    config = read_config(str(folder), revision=None, offline=True)
    model = load_quantized(str(folder), config, holding, "sdpa", revision=None, offline=True)
    if trained:
        bitnet.round_in_norms(model, kernels=True)
    return model


@pytest.fixture(scope="module", params=["bitnet", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in full precision: of BitNet's own family, and one that would be converted."""
    folder = tmp_path_factory.mktemp(request.param)
    small_models.build(request.param).save_pretrained(folder)
    return folder


def bit_layers(model: Any) -> list[BitLinear]:
    return [module for module in model.modules() if isinstance(module, BitLinear)]


def test_every_linear_layer_but_the_head_is_trained_and_named(saved: Path) -> None:
    model = built(saved, trained=True)
    assert len(bit_layers(model)) == 2 * 7
    assert type(model.lm_head) is torch.nn.Linear
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert {layer.method for layer in quantized_layers(model)} == {"bitnet"}


def test_with_a_share_of_0_the_model_is_the_one_of_full_precision(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain, model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32), built(saved, trained=True)
    set_share(model, 0.0)
    assert torch.equal(model.train()(IDS).logits, plain.train()(IDS).logits)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert not torch.allclose(model.eval()(IDS).logits, plain.eval()(IDS).logits, atol=1e-2)  # evaluated quantized


def test_weights_are_ternarised_once_a_step(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = built(saved, trained=True).train(), []

    def counted(weight: torch.Tensor, **_: Any) -> Any:
        made.append(1)
        return ternarise(weight)

    monkeypatch.setattr(bitnet, "round_weight", counted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    bitnet.written(model)
    for step in range(1, 3):
        for _ in range(2):  # two micro-batches
            model(IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            model(IDS)
        assert len(made) == step * len(bit_layers(model))
        optimizer.step()
        bitnet.written(model)
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(bit_layers(model)[0].ternary.data, ternarise(bit_layers(model)[0].weight).data)


def test_weights_are_never_those_of_before_a_step_that_torch_does_not_count(saved: Path) -> None:
    """Torch's fused optimizers, and kernels of others, write to parameters without raising their count of writes."""
    model = built(saved, trained=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(IDS, labels=IDS).loss.backward()
    layer, counted = bit_layers(model)[0], bit_layers(model)[0].weight._version
    before = layer.ternary.data.clone()
    optimizer.step()
    assert layer.weight._version == counted  # else this test is not about anything
    assert not torch.equal(layer.ternary.data, before)
    assert torch.equal(layer.ternary.data, ternarise(layer.weight).data)
    bitnet.written(model)
    model(IDS)
    layer.weight.data.neg_()
    model.eval()  # as before an evaluation of other weights
    assert torch.equal(layer.ternary.data, ternarise(layer.weight).data)


def test_a_later_token_changes_no_earlier_logit_in_a_bit(saved: Path) -> None:
    model = built(saved, trained=True)
    with torch.no_grad():
        before = model(IDS).logits
        for at in (1, 11, 23):
            changed = IDS.clone()
            changed[:, at] += 1
            after = model(changed).logits
            assert torch.equal(after[:, :at], before[:, :at])
            assert not torch.equal(after[:, at:], before[:, at:])


class Rounding:
    """The rounding of layers' inputs: each call of a pass over whole rows is kept, and held against later passes.

    Sums over other shapes may differ in their last bits, and by them an activation between two integers is rounded
    down in one pass and up in the other: a tie. Nothing else may differ, and a later pass goes on with the first one's
    integer, so that what follows is held as closely again.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def exact(x: torch.Tensor) -> torch.Tensor:
        return x.double() * 127 / x.double().abs().amax(-1, keepdim=True)

    def first(self, x: torch.Tensor, **options: Any) -> Any:
        rows = quantize_int8(x, **options)
        self.calls.append((self.exact(x), rows.q.view(x.shape)))
        return rows

    def held(self, positions: slice) -> Callable[..., Any]:
        """The same for a pass over some ``positions``."""
        calls = iter(self.calls)

        def again(x: torch.Tensor, **options: Any) -> Any:
            rows, exact = quantize_int8(x, **options), self.exact(x)
            whole, wanted = (tensor[:, positions] for tensor in next(calls))
            assert float((exact - whole).abs().max()) < 1e-3
            is_tie = (exact - exact.floor() - 0.5).abs() < 1e-3
            assert torch.equal(rows.q.view(x.shape)[~is_tie], wanted[~is_tie])
            assert int((rows.q.view(x.shape).int() - wanted.int()).abs().max()) <= 1
            return replace(rows, q=wanted.reshape(rows.q.shape))

        return again


def test_decoding_with_a_cache_is_the_full_pass(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rounding = built(saved, trained=False), Rounding()
    with torch.no_grad():
        monkeypatch.setattr(bitnet, "quantize_int8", rounding.first)
        whole, cache, steps = model(IDS).logits, None, []
        assert len(rounding.calls) == 14
        for at in range(IDS.shape[1]):
            monkeypatch.setattr(bitnet, "quantize_int8", rounding.held(slice(at, at + 1)))
            out = model(IDS[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)


def packed_files(saved: Path, folder: Path, linear_class: str) -> Path:
    """The model as transformers' ``bitnet`` stores it, with scales in float32."""
    model = built(saved, trained=True)
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, module in model.named_modules():
        if isinstance(module, BitLinear):
            scale = module.ternary.scale.reshape(1)
            tensors[f"{name}.weight"] = pack_ternary(module.ternary.data)
            tensors[f"{name}.weight_scale"] = 1.0 / scale if linear_class == "bitlinear" else scale
    model.config.quantization_config = {
        **bitnet.declaration(model),
        "quantization_mode": "offline",
        "linear_class": linear_class,
    }
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_packed_files_become_masters_and_packed_files_again_byte_for_byte(
    saved: Path, tmp_path: Path, linear_class: str
) -> None:
    first = packed_files(saved, tmp_path / "first", linear_class)
    masters, frozen = built(first, trained=True), built(first, trained=False)
    assert [type(module) for module in frozen.modules()].count(TernaryLinear) == 14
    check_weights(frozen)
    with torch.no_grad():
        logits = built(saved, trained=True)(IDS).logits
        for model in (masters, frozen):  # 1 / (1 / s) may be s to the last bit or beside it
            assert torch.allclose(model(IDS).logits, logits, atol=1e-4 if linear_class == "autobitlinear" else 1e-2)
    masters.save_pretrained(tmp_path / "masters")
    again = packed_files(tmp_path / "masters", tmp_path / "again", linear_class)
    one, two = load_file(first / "model.safetensors"), load_file(again / "model.safetensors")
    for name, tensor in one.items():
        if name.endswith("_scale") and linear_class == "bitlinear":
            assert torch.allclose(two[name], tensor, rtol=2e-7)
        else:
            assert torch.equal(two[name], tensor), name


def test_packed_files_without_their_scale_or_of_another_shape_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = packed_files(saved, tmp_path / "packed", "autobitlinear")
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for change, said in (
        ({f"{name}_scale": None}, "without its weight_scale"),
        ({name: whole[name][:4]}, "packed bytes are of a matrix"),
        ({f"{name}_scale": torch.zeros(1)}, "not a positive number"),
        ({name: torch.full_like(whole[name], 255)}, "stands for no ternary value"),
    ):
        tensors = {key: tensor for key, tensor in {**whole, **change}.items() if tensor is not None}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(FtcliError, match=said):
            built(folder, trained=True)


def test_a_frozen_layer_passes_gradients_on_and_notices_lost_state() -> None:
    layer = TernaryLinear(ternarise(torch.randn(8, 6)), None, "here")
    x = torch.randn(3, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.frozen_weight().dequantize(torch.float32).sum(0).expand(3, 6), atol=1e-6)
    layer.ternary[0, 0] = 3
    with pytest.raises(FtcliError, match="not -1, 0 and 1"):
        layer.check_state()


def test_the_gated_unit_on_the_kernels_is_transformers_own(saved: Path) -> None:
    model = built(saved, trained=True)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, bitnet.RoundedMlp)
    found = []
    for backend in ("torch", "triton"):
        mlp.gate_proj.backend = backend  # in the interpreter
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = mlp(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    for one, two in zip(*found, strict=True):
        assert float((one - two).norm()) <= 2e-3 * float(one.norm())  # a rounding may go the other way


def test_layers_behind_one_norm_share_its_rounded_output(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = built(saved, trained=True), []
    plain = bitnet.norm_quantize

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(bitnet, "norm_quantize", counted)

    norms = 4 if model.config.model_type == "bitnet" else 2
    model(IDS)
    assert len(made) == norms * 2


def test_kernels_are_left_off_where_layers_round_their_input(saved: Path) -> None:
    from ftcli.model.patch import patch

    model = built(saved, trained=False)
    done = patch(model, "reference")
    assert not any(entry.on for entry in done.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ternary_values_that_were_written_out_are_kept_and_not_shrunk(
    saved: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """What GGUF and packed files become in other hands. Rounding them by their mean gives 0.6 to 0.7 of their scale."""
    model = built(saved, trained=True)
    tensors = {name: t.to(dtype) for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}
    wanted = {}
    for name, module in model.named_modules():
        if isinstance(module, BitLinear):
            wanted[name] = Ternary(module.ternary.data, module.ternary.scale.to(dtype).float())
            tensors[f"{name}.weight"] = wanted[name].dequantize(dtype)
    del model.config.quantization_config
    model.config.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    masters, frozen = built(tmp_path, trained=True), built(tmp_path, trained=False)
    for name, ternary in wanted.items():
        assert float(ternary.scale) > 1.2 * float(ternarise(ternary.dequantize(torch.float32)).scale)
        for found in (masters.get_submodule(name).ternary, frozen.get_submodule(name).frozen_weight()):
            assert torch.equal(found.data, ternary.data)
            assert float(found.scale) == float(ternary.scale)
    masters.save_pretrained(tmp_path / "again")  # as masters, whose values may all be of one size as well
    again = built(tmp_path / "again", trained=True)
    assert all(float(again.get_submodule(name).ternary.scale) == float(t.scale) for name, t in wanted.items())
    warming = ModelStorage(SETTINGS.model_copy(update={"lambda_warmup_steps": 5}), torch.float32, torch.device("cpu"))
    config = read_config(str(tmp_path), revision=None, offline=True)
    with pytest.raises(FtcliError, match="FT340"):
        load_quantized(str(tmp_path), config, replace(warming, trained=True), "sdpa", revision=None, offline=True)


def test_no_other_weights_are_taken_for_ternary_ones() -> None:
    values = ternarise(torch.randn(8, 6)).data.float()
    for weight, found in (
        (values * 0.5, True),
        (values.sign().masked_fill(values == 0, 1.0), True),
        (values * 0.5 + torch.eye(8, 6) * 1e-3, False),
        (torch.zeros(8, 6), False),
        (values * 1e-6, False),
        (values * torch.inf, False),
    ):
        linear = torch.nn.Linear(6, 8, bias=False)
        linear.weight = torch.nn.Parameter(weight)
        assert (already_ternary(linear, "here") is not None) == found


@pytest.fixture
def normed(saved: Path, tmp_path: Path) -> Path:
    """The masters of a model with a norm on every layer's input, as training has left them."""
    settings = SETTINGS.model_copy(update={"use_rms_norm": True})
    model = built(saved, trained=True)
    bitnet.round_in_norms(model, kernels=True, settings=settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in bit_layers(model):
            assert layer.rms_norm is not None
            assert torch.equal(layer.rms_norm.weight, torch.ones(layer.in_features))
            layer.rms_norm.weight += 0.2 * torch.randn(layer.in_features)
    model.save_pretrained(tmp_path / "normed")
    return tmp_path / "normed"


def test_norms_of_layers_are_those_of_transformers_and_are_trained(normed: Path) -> None:
    from transformers import AutoModelForCausalLM

    declared = json.loads((normed / "config.json").read_text())["quantization_config"]
    assert (declared["use_rms_norm"], declared["rms_norm_eps"]) == (True, 1e-6)
    model = built(normed, trained=True)
    norms = {name for name, parameter in model.named_parameters() if ".rms_norm." in name and parameter.requires_grad}
    assert len(norms) == len(bit_layers(model)) == 14
    assert not [module for module in model.modules() if isinstance(module, bitnet.RoundingNorm)]
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(normed, dtype=torch.float32)
        for layer in bit_layers(model):
            x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
            theirs = plain.get_submodule(layer.layer_name)(x)
            assert torch.allclose(layer(x), theirs, atol=1e-5 * float(theirs.abs().max()))
        assert float((plain(IDS).logits - model(IDS).logits).norm() / plain(IDS).logits.norm()) < 0.05
    before = bit_layers(model)[0].rms_norm.weight.clone()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for share in (0.5, 1.0):
        set_share(model, share)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert not torch.equal(bit_layers(model)[0].rms_norm.weight, before)  # type: ignore[union-attr]


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_packed_files_with_norms_of_layers_are_read(normed: Path, tmp_path: Path, linear_class: str) -> None:
    wanted = built(normed, trained=True)
    packed = packed_files(normed, tmp_path / "packed", linear_class)
    for trained in (True, False):
        found = built(packed, trained=trained)
        for layer in bit_layers(wanted):
            norm = found.get_submodule(f"{layer.layer_name}.rms_norm")
            assert torch.equal(norm.weight, layer.rms_norm.weight)  # type: ignore[union-attr]
            assert norm.weight.requires_grad == trained
        with torch.no_grad():
            tolerance = 1e-4 if linear_class == "autobitlinear" else 1e-2
            assert torch.allclose(found(IDS).logits, wanted(IDS).logits, atol=tolerance)


def test_norms_that_config_json_names_and_files_lack_are_missed(normed: Path) -> None:
    """A layer without its norm would compute something else, and nothing would say so."""
    whole = load_file(normed / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.rms_norm.weight"
    for tensors, said in (
        ({key: tensor for key, tensor in whole.items() if key != name}, "up_proj.rms_norm is not stored"),
        ({**whole, name: torch.ones(3)}, "its rms_norm has shape"),
        ({**whole, "lm_head.rms_norm.weight": torch.ones(32)}, "lm_head"),
    ):
        save_file(tensors, normed / "model.safetensors")
        with pytest.raises(FtcliError, match=said):
            built(normed, trained=True)
    save_file(whole, normed / "model.safetensors")
    config = json.loads((normed / "config.json").read_text())
    del config["quantization_config"]["use_rms_norm"]
    (normed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FtcliError, match="no place for the stored tensor"):
        built(normed, trained=True)
