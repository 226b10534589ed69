"""Released weights in eight bits are read as transformers reads them, into every form that a base is held in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.empty_weights import model_class
from ftcli.errors import FtcliError
from ftcli.model.experts import QuantizedStack
from ftcli.model.fp8 import Fp8Linear
from ftcli.model.nf4 import NF4Linear
from ftcli.model.released import ScaledFp8, grouped
from tests.fp8_files import blocks_of, by_formula, released
from tests.quantized import NF4, load

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' remarks

CPU = torch.device("cpu")
NONE = QuantizationConfig(method="none")
E8M0 = torch.float8_e8m0fnu


def form(block: Any = (128, 128)) -> ScaledFp8:
    return ScaledFp8({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})


def read(weight: Tensor, scales: Tensor, block: Any = (128, 128), dtype: torch.dtype = torch.float32) -> Tensor:
    return form(block).dequantized("x.weight", {"": weight, "scale": scales}, dtype, CPU)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_byte_under_many_scales_is_transformers_number(dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(64, 1)
    scales = torch.rand(16, 64, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-32, 32)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    assert torch.equal(read(weight, scales, (4, 4), dtype).nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("shape", [(256, 128), (192, 320), (576, 130), (5, 7), (129, 257), (1, 1000)])
def test_last_blocks_that_are_smaller(shape: tuple[int, int]) -> None:
    """As DeepSeek's kv_a_proj_with_mqa has them (576 rows): transformers' own products take them so."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight, scales = blocks_of(drawn(*shape), (128, 128))
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    found = read(weight, scales)
    assert torch.equal(found, by_formula(weight, scales, (128, 128)))
    assert torch.equal(found, _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32))
    assert 1e-3 < (found - drawn(*shape)).norm() / drawn(*shape).norm() < 4e-2


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, E8M0, torch.uint8], ids=str)
def test_scales_of_every_type(stored: torch.dtype) -> None:
    weight, scales = blocks_of(drawn(40, 24), (16, 16), E8M0 if stored == torch.uint8 else stored)
    told = scales.view(torch.uint8) if stored == torch.uint8 else scales
    assert torch.equal(read(weight, told, (16, 16)), by_formula(weight, scales, (16, 16)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_the_matrix(shape: tuple[int, ...]) -> None:
    weight, scale = blocks_of(drawn(6, 10), None, torch.bfloat16)
    assert torch.equal(read(weight, scale.reshape(shape), None), weight.float() * scale.float())


def test_a_stack_whose_gates_had_blocks_of_their_own() -> None:
    """Gate and up projection of 24 rows each in blocks of 16: their last blocks are of 8."""
    halves = [blocks_of(drawn(3, 24, 40), (16, 16)), blocks_of(drawn(3, 24, 41)[..., :40], (16, 16))]
    weight, scales = (torch.cat(both, dim=1) for both in zip(*halves, strict=True))
    assert scales.shape == (3, 4, 3)
    wanted = torch.cat([by_formula(*half, (16, 16)) for half in halves], dim=1)
    assert torch.equal(read(weight, scales, (16, 16)), wanted)
    whole = blocks_of(drawn(3, 48, 40), (16, 16))
    assert whole[1].shape == (3, 3, 3)
    assert torch.equal(read(*whole, (16, 16)), by_formula(*whole, (16, 16)))


def test_a_stack_with_one_scale_an_expert() -> None:
    weight, scales = drawn(3, 8, 6).to(torch.float8_e4m3fn), torch.tensor([0.5, 3.0, 7.0])
    for told in (scales, scales[:, None, None]):
        assert torch.equal(read(weight, told, None), weight.float() * scales[:, None, None])


WEIGHT, SCALES = blocks_of(drawn(40, 24), (16, 16))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"": WEIGHT}, "its scales are not"),
        ({"scale": SCALES}, "x.weight is not stored"),
        ({"": WEIGHT, "scale": SCALES[:2]}, "blocks are of 16 x 16"),
        ({"": WEIGHT, "scale": SCALES.T}, "blocks are of 16 x 16"),
        ({"": WEIGHT.float(), "scale": SCALES}, "has scales, and is"),
        ({"": WEIGHT.view(torch.int8), "scale": SCALES}, "has scales, and is"),
        ({"": WEIGHT[0], "scale": SCALES}, "has scales, and is"),
        ({"": WEIGHT, "scale": SCALES, "zero point": torch.ones(1)}, "zero points"),
    ],
)
def test_parts_that_make_no_weight_are_refused_by_name(parts: dict[str, Tensor], said: str) -> None:
    with pytest.raises(FtcliError, match=said) as caught:
        form((16, 16)).dequantized("x.weight", parts, torch.float32, CPU)
    assert caught.value.findings[0].code == "FT323"


def test_names_of_parts() -> None:
    keys = ["a.weight", "a.weight_scale_inv", "a.activation_scale", "b.weight", "b.weight_scale", "b.input_scale", "c"]
    keys += ["e.gate_up_proj", "e.gate_up_proj_scale_inv", "e.gate_up_proj_activation_scale", "s.k_scale", "b.bias"]
    assert grouped(keys, form()) == {
        "a.weight": {"": "a.weight", "scale": "a.weight_scale_inv"},
        "b.weight": {"": "b.weight", "scale": "b.weight_scale"},
        "c": {"": "c"},
        "e.gate_up_proj": {"": "e.gate_up_proj", "scale": "e.gate_up_proj_scale_inv"},
        "b.bias": {"": "b.bias"},
    }


def theirs(folder: Path) -> Any:
    """The same model by transformers, which dequantizes it where there is no GPU."""
    config = AutoConfig.from_pretrained(folder)
    return model_class(config).from_pretrained(folder, dtype=torch.float32)


#: Sizes of which every matrix has whole blocks of 16, which transformers' reading needs.
WHOLE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
CASES = {
    "llama": WHOLE,
    "qwen3_moe": {**WHOLE, "moe_intermediate_size": 16},
    "qwen3_5_moe_text": {**WHOLE, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "ministral3": WHOLE,
    "mistral3": {},
    "qwen3_5": {},
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("block", [(16, 16), None], ids=str)
def test_a_released_model_is_transformers_tensor_by_tensor(kind: str, block: Any, tmp_path: Path) -> None:
    released(tmp_path / "base", kind, block=block, scale=torch.bfloat16, **CASES[kind])
    found, wanted = (
        dict(load(tmp_path / "base", NONE).named_parameters()),
        dict(theirs(tmp_path / "base").named_parameters()),
    )
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter), name
        assert found[name].requires_grad  # adapters freeze them


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("scales_apart", [False, True])
def test_a_model_whose_last_blocks_are_smaller(kind: str, scales_apart: bool, tmp_path: Path) -> None:
    """Tensor by tensor as the formula has them; per-expert files become stacks."""
    full = released(tmp_path / "base", kind, block=(16, 24), scales_apart=scales_apart)
    plain = released_in_full(tmp_path / "plain", kind, full)
    found = dict(load(tmp_path / "base", NONE).named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter), name


def released_in_full(folder: Path, kind: str, full: dict[str, Tensor]) -> Any:
    """The same numbers in a file in full precision, as transformers loads it."""
    from tests.small_models import build

    build(kind).save_pretrained(folder)
    save_file(full, next(folder.glob("*.safetensors")), metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_stacks_in_the_files(tmp_path: Path) -> None:
    full = released(tmp_path / "base", "qwen3_moe", stacked=True)
    assert len([name for name in full if name.endswith("gate_up_proj")]) == 2
    found = load(tmp_path / "base", NONE)
    for name, weight in full.items():
        assert torch.equal(found.get_parameter(name), weight), name


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_quantized_anew(method: str, tmp_path: Path) -> None:
    """Each layer is what the method makes of the numbers in full precision; fp8 leaves experts in 16 bits."""
    full = released(tmp_path / "base", "qwen3_moe")
    released_in_full(tmp_path / "plain", "qwen3_moe", full)
    settings = NF4 if method == "nf4" else QuantizationConfig(method=method)
    found, wanted = load(tmp_path / "base", settings), load(tmp_path / "plain", settings)
    kinds: set[type] = set()
    for name, module in wanted.named_modules():
        for leaf, buffer in module._buffers.items():
            assert buffer is None or torch.equal(found.get_submodule(name)._buffers[leaf], buffer), f"{name}.{leaf}"
        kinds.add(type(module))
    assert (NF4Linear if method == "nf4" else Fp8Linear) in kinds
    for name, parameter in wanted.named_parameters():
        other = found.get_parameter(name)
        assert type(other) is type(parameter)
        if isinstance(parameter, QuantizedStack):
            other, parameter = (each.packed.dequantize(torch.float32) for each in (other, parameter))
        assert torch.equal(other, parameter), name


def test_rounding_once_more_to_rows_of_fp8_loses_what_the_page_says() -> None:
    """docs/quantization.md: 2.6% in the files already, 3.7% together, of weights that are normally distributed."""
    weight = drawn(512, 512)
    read_exactly = read(*blocks_of(weight, (128, 128)))
    linear = torch.nn.Linear(512, 512, bias=False)
    linear.weight.data = read_exactly
    from ftcli.model.fp8 import fp8_linear

    again = fp8_linear(linear, QuantizationConfig(method="fp8"), "x").frozen_weight().dequantize(torch.float32)
    size = weight.norm()
    assert float((read_exactly - weight).norm() / size) == pytest.approx(0.026, abs=0.002)
    assert float((again - weight).norm() / size) == pytest.approx(0.037, abs=0.003)


def test_weights_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight and its scales are read together, wherever they lie: nothing waits for its other half."""
    released(tmp_path / "base", scales_apart=True)
    taken: list[str] = []

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            return self._file

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def get_tensor(self, key: str) -> Tensor:
            taken.append(key)
            found: Tensor = self._file.get_tensor(key)
            return found

    monkeypatch.setattr("safetensors.safe_open", Counting)
    load(tmp_path / "base", NONE)
    scales = [at for at, key in enumerate(taken) if key.endswith("_scale_inv")]
    assert len(scales) == 14
    for at in scales:
        assert taken[at].removesuffix("_scale_inv") in (taken[at - 1], taken[at + 1])


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    released(tmp_path / "base")
    (path,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(FtcliError, match=r"q_proj.weight is stored in eight bits and its scales are not"):
        load(tmp_path / "base", NONE)


WRITTEN: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "block": {"strategy": "block", "block_structure": [16, 16]},
}


@pytest.mark.parametrize("strategy", WRITTEN)
def test_compressed_tensors_as_that_package_writes_and_reads_them(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **WRITTEN[strategy])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    released(tmp_path / "base")  # for its config and names
    (path,) = (tmp_path / "base").glob("*.safetensors")
    stored, full = {}, {}
    for name, tensor in load_file(path).items():
        if name.endswith("_scale_inv") or tensor.dtype != torch.float8_e4m3fn:
            if not name.endswith("_scale_inv"):
                stored[name] = full[name] = tensor
            continue
        weight, scales = tensor.float() * 0.01, scales_for(tensor.float() * 0.01, strategy)
        made = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in made.items()}
        full[name] = FloatQuantizationCompressor.decompress(made, scheme)["weight"]
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    found = dict(load(tmp_path / "base", NONE).named_parameters())
    for name, weight in full.items():
        assert torch.equal(found[name], weight.float()), name


def scales_for(weight: Tensor, strategy: str) -> Tensor:
    by: dict[str, Callable[[], Tensor]] = {
        "tensor": lambda: weight.abs().amax()[None],
        "channel": lambda: weight.abs().amax(1, keepdim=True),
        "block": lambda: weight.abs().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).amax((1, 3)),
    }
    return by[strategy]() / 448
