"""Models as they are released in fp8: checked, trained, resumed, evaluated, and merged into what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import QuantizedLinear
from tests.e2e.conftest import User
from tests.fp8_files import blocks_of, by_formula, released
from tests.quantized import load

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's remarks

IDS = torch.randint(5, 250, (2, 24), generator=torch.Generator().manual_seed(3))


def recipe(user: User, base: Path, **change: Any) -> str:
    values: dict[str, Any] = {
        "model": {"name_or_path": str(base), "dtype": "float32", "kernels": "reference"},
        "lora": {"r": 4},
        "data": {"packing": True, "eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]},
        "train": {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2},
        "export": {"formats": ["safetensors", "adapter"], "dtype": "float32"},
    }
    return user.recipe(**{**values, **change})


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@torch.no_grad()
def answers(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("kind", "method", "block"),
    [
        ("qwen3_moe", "none", (16, 16)),
        ("qwen3_moe", "nf4", (16, 16)),
        ("llama", "fp8", (16, 16)),
        ("ministral3", "none", None),
        ("deepseek_v3", "none", (16, 24)),
    ],
)
def test_trained_and_merged(kind: str, method: str, block: Any, user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    full = released(base, kind, block=block)
    path = recipe(user, base, quantization={"method": method})
    checked = user.done("check", path)
    (said,) = [each for each in checked["findings"] if each["code"] in ("FT316", "FT327")]
    assert said["severity"] == "note"
    assert ("a scale for each matrix" if block is None else "a scale for each 16 x") in said["message"]
    assert ("exactly as they are" if method == "none" else f"once more, to {method}") in said["message"]
    assert user.run("train", path)[0] == 0
    assert user.run("eval", path, "--run", str(user.folder / "r"))[0] == 0
    exports = user.done("export", str(user.folder / "r"))["exports"]
    merged, adapter = (Path(each["path"]) for each in exports)

    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    assert set(stored_in(merged)) == set(full)
    trained_on = load(base, QuantizationConfig(method="none"))
    quantized = load(base, QuantizationConfig(method=method))
    for name, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear):
            numbers: Any = module.frozen_weight()
            trained_on.get_submodule(name).weight.data = numbers.dequantize(torch.float32)
    for name, parameter in quantized.named_parameters():
        trained_on.get_parameter(name).data = (parameter.detach() + 0.0).float()
    bare = answers(trained_on)
    wanted = answers(peft.PeftModel.from_pretrained(trained_on, adapter))
    found = answers(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert (bare - wanted).norm() > 1e-3 * wanted.norm()
    record = json.loads((merged / "ftcli_export.json").read_text())
    assert ("dequantized in float32" if method != "none" else "fp8 (a scale for each") in record["merged_with"]
    assert record["merged_with"] in (merged / "README.md").read_text()


def test_what_no_adapter_is_on_is_written_in_bfloat16(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    full = released(base, "qwen3_moe")
    path = recipe(user, base, lora={"r": 4, "target_modules": ["q_proj"]}, export={"formats": ["safetensors"]})
    assert user.run("train", path)[0] == 0
    (merged,) = (Path(each["path"]) for each in user.done("export", str(user.folder / "r"))["exports"])
    found = stored_in(merged)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, weight in full.items():
        if "q_proj" not in name:
            assert torch.equal(found[name], weight.bfloat16()), name


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    released(base, "qwen3_moe")
    path = recipe(user, base, checkpoint={"every_steps": 1}, export={"formats": ["adapter"]})
    assert user.run("train", path)[0] == 0
    user.goes_on_alike("r", path)


def test_a_base_that_changed_is_not_gone_on_with(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    released(base)
    path = recipe(user, base, checkpoint={"every_steps": 1}, export={"formats": ["adapter"]})
    assert user.run("train", path)[0] == 0
    user.cut_off("r")
    (file,) = base.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    save_file({**tensors, name: tensors[name] * 2}, file, metadata={"format": "pt"})
    status, document = user.run("train", path, "--resume", "auto")
    assert status != 0, document
    assert any("base" in each["message"] or "weights" in each["message"] for each in document["findings"])


def test_trained_whole_and_further_layers_kept_in_bfloat16(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    full = released(base, "qwen3_5_text", num_hidden_layers=4)
    (file,) = base.glob("*.safetensors")
    numbers, scales = blocks_of(torch.randn(32, 48, generator=torch.Generator().manual_seed(1)), (16, 16))
    further = {"mtp.layers.0.mlp.down_proj.weight": numbers, "mtp.layers.0.mlp.down_proj.weight_scale_inv": scales}
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    apart: dict[str, Any] = {"data": {"packing": False}, "export": {"formats": ["safetensors"]}}
    path = recipe(user, base, lora=None, train={"max_steps": 1, "learning_rate": 1e-2}, **apart)
    status, document = user.run("train", path)
    assert status == 0, document["findings"]
    result = user.folder / "r" / "model"
    assert "quantization_config" not in json.loads((result / "config.json").read_text())
    found = stored_in(result)
    moved = [name for name, weight in full.items() if not torch.equal(found[name].float(), weight)]
    assert len(moved) > 0.9 * len(full)
    (name,) = [name for name in found if name.startswith("mtp.")]
    assert torch.equal(found[name], by_formula(numbers, scales, (16, 16)).bfloat16())
    assert user.run("export", str(user.folder / "r"))[0] == 0


def test_an_adapter_is_merged_with_what_it_was_trained_beside(user: User, tmp_path: Path) -> None:
    """In bfloat16 each product of number and scale was rounded; an export in float32 adds to that."""
    base = tmp_path / "base"
    full = released(base)
    model = {"name_or_path": str(base), "dtype": "bfloat16", "kernels": "off"}
    path = recipe(user, base, model=model, lora={"r": 4, "alpha": 8, "target_modules": ["q_proj"]})
    assert user.run("train", path)[0] == 0
    merged, adapter = (Path(each["path"]) for each in user.done("export", str(user.folder / "r"))["exports"])
    found, factors = stored_in(merged), stored_in(adapter)
    for name, weight in full.items():
        if "q_proj" in name:
            stem = f"base_model.model.{name.removesuffix('weight')}lora_"
            delta = 2 * factors[f"{stem}B.weight"] @ factors[f"{stem}A.weight"]
            assert delta.abs().max() > 1e-4
            torch.testing.assert_close(found[name], weight.bfloat16().float() + delta, rtol=0, atol=1e-6)
            assert (found[name] - (weight + delta)).abs().max() > 1e-5
