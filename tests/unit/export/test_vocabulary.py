"""Adapters that were trained elsewhere, with added tokens or rows of embeddings: PEFT's own merge is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.config.evaluation import ExportConfig
from ftcli.errors import FtcliError
from ftcli.export.writing import ExportResult, export_run
from ftcli.gguf import ReadFile
from tests.small_models import build
from tests.unit.export.conftest import Heard, edit_json, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's remarks on tied and on resized embeddings

IDS = torch.tensor([[2, 100, 101, 264, 50, 265, 3, 7]])
#: What PEFT is asked for, and how many tokens are added.
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "embedding and head trained whole": ({"modules_to_save": ["embed_tokens", "lm_head"]}, 6),
    "new rows saved unasked": ({}, 2),
    "rows of old tokens": ({"trainable_token_indices": [3, 7]}, 0),
    "rows of new tokens": ({"trainable_token_indices": [264, 265]}, 2),
    "rows by module": ({"trainable_token_indices": {"embed_tokens": [3], "lm_head": [7]}}, 0),
    "embedding trained whole and tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, 0),
}


def foreign(folder: Path, family: str, form: str, dtype: str = "float32") -> tuple[Path, Any, torch.Tensor]:
    """An adapter as PEFT saves it, the trained model, and what PEFT's own merge answers."""
    options, added = FORMS[form]
    model = build(family).to(getattr(torch, dtype))
    model.save_pretrained(folder / "base")
    own = tokenizer()
    own.save_pretrained(folder / "base")
    if added:
        own.add_tokens([f"<added {number}>" for number in range(added)])
        model.resize_token_embeddings(len(own), mean_resizing=False)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**settings, **options)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += 0.3 * torch.randn(parameter.shape).to(parameter.dtype)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "mine")
    own.save_pretrained(folder / "mine")
    ids = IDS.clamp(max=263 + added)
    with torch.no_grad():
        wanted = adapted.eval().float().merge_and_unload()(ids).logits
    return folder / "mine", ids, wanted


def exported(adapter: Path, *formats: str) -> list[ExportResult]:
    settings = ExportConfig.model_validate({"gguf": {"types": ["f32"]}})
    return export_run(adapter, formats, reporter=Heard(), offline=True, settings=settings)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


#: PEFT refuses different rows of the two sides of tied embeddings.
PAIRS = [
    (form, family) for form in FORMS for family in ("llama", "gemma2") if (form, family) != ("rows by module", "gemma2")
]


@pytest.mark.parametrize(("form", "family"), PAIRS)
def test_merged_is_what_peft_merges(form: str, family: str, tmp_path: Path) -> None:
    adapter, ids, wanted = foreign(tmp_path, family, form)
    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    merged, copied = exported(adapter, "safetensors", "adapter")
    model: Any = AutoModelForCausalLM.from_pretrained(merged.path, attn_implementation="eager", dtype="auto").float()
    with torch.no_grad():
        found = model.eval()(ids).logits
    assert found.shape == wanted.shape
    assert distance(found, wanted) < 1e-5
    assert merged.verification.facts["relative_error"] < 1e-5
    assert len(AutoTokenizer.from_pretrained(merged.path)) == 264 + FORMS[form][1]
    name = "adapter_model.safetensors"
    assert (copied.path / name).read_bytes() == before[name]
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before, "its own folder is left as it was"


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "embedding and head trained whole"),
        ("llama", "rows of new tokens"),
        ("gemma2", "rows of new tokens"),  # llama.cpp's has no head beside the embedding
    ],
)
def test_files_for_llama_cpp_have_the_added_tokens(family: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    adapter, _, _ = foreign(tmp_path, family, form)
    (result,) = exported(adapter, "gguf")
    assert result.verification.facts["f32_relative_error"] < 1e-5
    file = ReadFile(result.path / "mine-F32.gguf")
    size = 264 + FORMS[form][1]
    assert len(file.values["tokenizer.ggml.tokens"]) == size
    assert file.values["tokenizer.ggml.tokens"][264] == "<added 0>"
    assert ("output.weight" in file.names) == (family == "llama")
    assert {file.read(name).shape[0] for name in ("output.weight", "token_embd.weight") if name in file.names} == {size}


def test_a_bfloat16_base_is_rounded_once(tmp_path: Path) -> None:
    adapter, ids, wanted = foreign(tmp_path, "llama", "rows of new tokens", "bfloat16")
    (merged,) = exported(adapter, "safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(merged.path, attn_implementation="eager", dtype="auto")
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert distance(model.float().eval()(ids).logits, wanted) < 0.03
    base, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", merged.path))
    name = "model.embed_tokens.weight"
    assert torch.equal(after[name][:264], base[name]), "rows that were not trained are the base's"


def test_the_rows_of_a_head_that_is_nowhere_stored_are_missed(tmp_path: Path) -> None:
    adapter, _, _ = foreign(tmp_path, "llama", "new rows saved unasked")
    path = adapter / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "lm_head" not in name}
    save_file(tensors, path)
    for name in ("safetensors", "adapter"):
        with pytest.raises(FtcliError, match=r"the rows that lm_head\.weight has for them are not in it") as caught:
            exported(adapter, name)
        assert {finding.code for finding in caught.value.findings} == {"FT742"}
    assert not list((tmp_path / "mine-export").glob("*"))


def test_rows_that_their_indices_do_not_name_are_refused(tmp_path: Path) -> None:
    adapter, _, _ = foreign(tmp_path, "llama", "rows of old tokens")
    edit_json(adapter / "adapter_config.json", trainable_token_indices=[3, 7, 9])
    with pytest.raises(FtcliError, match="trainable_token_indices and the rows that are stored") as caught:
        exported(adapter, "safetensors")
    assert {finding.code for finding in caught.value.findings} == {"FT742"}


def test_adapted_embeddings_are_refused_by_name(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(270)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "mine")
    tokenizer().save_pretrained(tmp_path / "mine")
    with pytest.raises(FtcliError, match="lora_embedding_A") as caught:
        exported(tmp_path / "mine", "safetensors")
    assert {finding.code for finding in caught.value.findings} == {"FT742"}
