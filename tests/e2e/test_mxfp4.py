"""gpt-oss as it is released, in MXFP4: trained, evaluated and merged into a model that plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear
from tests.e2e.conftest import User
from tests.mxfp4_files import released
from tests.quantized import load
from tests.tiers import further

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


@torch.no_grad()
def answers(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def dense(layer: Any) -> torch.Tensor:
    found: torch.Tensor = layer.frozen_weight().dequantize(torch.float32)
    return found


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_full(base: Path, stacks: dict[str, torch.Tensor]) -> Any:
    """The same model in full precision, as transformers has it."""
    config = AutoConfig.from_pretrained(base)
    del config.quantization_config
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    others = {name: x.float() for name, x in stored_in(base).items() if not name.endswith(("_blocks", "_scales"))}
    made.load_state_dict({**others, **stacks})
    return made


@pytest.mark.parametrize("method", ["nf4", *further("none", "fp8")])
def test_trained_and_merged(method: str, user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    stacks = released(base)
    path = recipe(user, base, quantization={"method": method})
    checked = user.done("check", path)
    assert not [each for each in checked["findings"] if each["code"] in ("FT316", "FT443")]
    assert user.run("train", path)[0] == 0
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    assert [entry["layer"] for entry in manifest["kernels"] if entry["on"]] == ["layers.0", "layers.1", "norm"]
    assert user.run("eval", path, "--run", str(user.folder / "r"))[0] == 0
    merged, adapter = (each["path"] for each in user.done("export", str(user.folder / "r"))["exports"])

    assert "quantization_config" not in json.loads((Path(merged) / "config.json").read_text())
    names = {name.removesuffix("_blocks") for name in stored_in(base) if not name.endswith("_scales")}
    assert set(stored_in(Path(merged))) == names
    trained_on = in_full(base, stacks)
    quantized = load(base, QuantizationConfig(method=method), kept=9 if method == "nf4" else 0)
    for name, module in quantized.named_modules():  # fp8 rounds what it multiplies as well, which no merge can
        if isinstance(module, QuantizedLinear | DequantizedLinear):
            numbers = module.weight if isinstance(module, DequantizedLinear) else dense(module)
            trained_on.get_submodule(name).weight.data = numbers.detach()
    for name in stacks:
        trained_on.get_parameter(name).data = quantized.get_parameter(name).detach() + 0  # its numbers, where packed
    bare = answers(trained_on)
    wanted = answers(peft.PeftModel.from_pretrained(trained_on, adapter))
    found = answers(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert (bare - wanted).norm() > 1e-3 * wanted.norm()


def test_merged_experts_are_in_bfloat16_where_no_dtype_is_asked_for(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    stacks = released(base)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    path = recipe(user, base, lora=lora, export={"formats": ["safetensors"]})
    assert user.run("train", path)[0] == 0
    (merged,) = (each["path"] for each in user.done("export", str(user.folder / "r"))["exports"])
    found = stored_in(Path(merged))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, stack in stacks.items():  # which no adapter is on
        assert torch.equal(found[name].float(), stack), name


@pytest.mark.long
def test_trained_whole_and_saved_in_full_precision(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    stacks = released(base)
    apart: dict[str, Any] = {"data": {"packing": False}, "export": {"formats": ["safetensors"]}}
    path = recipe(user, base, lora=None, train={"max_steps": 1, "learning_rate": 1e-2}, **apart)
    status, document = user.run("train", path)
    assert status == 0, document["findings"]
    result = user.folder / "r" / "model"
    assert "quantization_config" not in json.loads((result / "config.json").read_text())
    found = stored_in(result)
    assert all(not torch.equal(found[name].float(), stack) for name, stack in stacks.items())
    assert user.run("export", str(user.folder / "r"))[0] == 0
