"""Small random models of the families on the kernels, through train, eval and export on a GPU.

Heads have 16 features, the least that the attention kernels take.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.tables.families import TABLE
from tests import small_models
from tests.e2e.conftest import User
from tests.unit.export.conftest import tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ON_KERNELS = (
    *(name for name, family in TABLE.items() if family.kernels == "layers" and name in small_models.TEXT),
    "gemma3", "mistral3", "muse_glimmer", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl_moe", "gemma4", "gemma4_unified",
)  # fmt: skip
OTHERS = ("mamba2", "bloom", "gpt2")
OF_HEADS = ("head_dim", "query_pre_attn_scalar", "linear_value_head_dim")
#: Linear layers that are quantized, of two layers of seven each where nothing else is said.
QUANTIZED = {"phi3": 8, "qwen3_5": 3 * 8 + 7}
SAVED = {"r": 4, "modules_to_save": ["norm", "lm_head"]}


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> User:
    return User(tmp_path, capsys)


def wider(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Twice the width of the small models, in heads of 16; keys of delta nets have 32 features."""
    text, multimodal = deepcopy(small_models.TEXT), deepcopy(small_models.MULTIMODAL)
    for values in (text[model_type],) if model_type in text else multimodal[model_type][:2]:
        values.update({key: 16 for key in OF_HEADS if values.get(key) == 8})
        values.update({key: 32 for key in ("linear_key_head_dim", "global_head_dim") if key in values})
        values.update({key: 64 for key in ("out_hidden_size",) if key in values})
        if "embed_dim" in values:
            values["hidden_size"] = 64
        if "mrope_section" in values.get("rope_parameters", {}):
            values["rope_parameters"]["mrope_section"] = [2, 3, 3]
    wide = {**small_models._COMMON, "hidden_size": 64, "intermediate_size": 96}
    for name, table in (("TEXT", text), ("MULTIMODAL", multimodal), ("_COMMON", wide)):
        monkeypatch.setattr(small_models, name, table)
    if model_type == "mistral3":
        multimodal[model_type][1]["head_dim"] = 8  # Pixtral's own: 16 features in two heads


def through(model_type: str, user: User, dtype: str, **sections: Any) -> dict[str, Any]:
    """Trains, evaluates and exports; the manifest."""
    base = user.folder / "base"
    small_models.build(model_type).to(getattr(torch, dtype)).save_pretrained(base)
    tokenizer().save_pretrained(base)
    model = {"name_or_path": str(base), "dtype": dtype}
    path = user.recipe(model=model, train={"max_steps": 3}, export={"formats": ["safetensors"]}, **sections)
    trained = user.done("train", path)
    measured = user.done("eval", path, "--run", str(user.folder / "r"))
    assert measured["run"]["loss"] == trained["eval"]["loss"]
    (export,) = user.done("export", str(user.folder / "r"))["exports"]
    assert export["verification"]["relative_error"] < 1e-4
    manifest: dict[str, Any] = json.loads((user.folder / "r" / "manifest.json").read_text())
    return manifest


@pytest.mark.parametrize("model_type", ON_KERNELS)
def test_on_the_kernels(model_type: str, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    wider(monkeypatch, model_type)
    manifest = through(model_type, user, "bfloat16")
    assert any(entry["on"] for entry in manifest["kernels"])
    assert manifest["self_check"]["passed"]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "ernie4_5_moe", "qwen3_5_moe"])
def test_experts_that_are_trained_whole(model_type: str, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    wider(monkeypatch, model_type)
    small_models.build(model_type).save_pretrained(user.folder / "base")
    tokenizer().save_pretrained(user.folder / "base")
    model = {"name_or_path": str(user.folder / "base"), "dtype": "bfloat16"}
    train = {"max_steps": 3, "router_aux_loss_coef": 0.1}
    path = user.recipe("r", model=model, lora=None, train=train, export={"formats": ["safetensors"]})
    user.done("train", path)
    (export,) = user.done("export", str(user.folder / "r"))["exports"]
    assert export["verification"]["relative_error"] < 1e-4
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    assert all(entry["on"] for entry in manifest["kernels"])
    assert manifest["self_check"]["passed"]


@pytest.mark.parametrize("model_type", OTHERS)
def test_on_transformers_own_layers(model_type: str, user: User) -> None:
    through(model_type, user, "bfloat16")


@pytest.mark.parametrize("method", ["nf4", "fp8"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_vl", "phi3", "olmo3", "qwen3_5"])
def test_on_a_quantized_base(model_type: str, method: str, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    wider(monkeypatch, model_type)
    manifest = through(model_type, user, "bfloat16", quantization={"method": method})
    assert manifest["self_check"]["passed"]
    assert len(manifest["quantization"]) == QUANTIZED.get(model_type, 14)


@pytest.mark.parametrize(("model_type", "dtype"), [("llama", "bfloat16"), ("qwen3", "float16"), ("phi3", "bfloat16")])
def test_with_modules_that_are_trained_whole(
    model_type: str, dtype: str, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider(monkeypatch, model_type)
    through(model_type, user, dtype, lora=SAVED)
