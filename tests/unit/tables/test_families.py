"""A model family is a row: a made-up one is counted, checked and trained on the kernels' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ftcli.tables import families
from ftcli.tables.architecture import Family
from tests.e2e.conftest import User

#: Llama under another name; this version of ftcli has no row for it.
MADE_UP = "internlm3"


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> User:
    return User(tmp_path, capsys)


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(
        MADE_UP,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        architectures=["InternLM3ForCausalLM"],
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return {"name_or_path": str(folder), "tokenizer": "bytes", "init": "random", "kernels": "reference"}


def test_without_a_row_layers_stay_as_transformers_wrote_them(user: User, model: dict[str, Any]) -> None:
    result = user.done("check", user.recipe(model=model, lora={"r": 4}))
    assert result["memory"]["total_bytes"] > 0  # as measured on a model without memory
    assert MADE_UP not in families.TABLE
    assert [row["runs"] for row in result["kernel_table"]][:1] == ["transformers"]


def test_a_made_up_family_is_counted_and_runs_on_the_kernels(
    user: User, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "TABLE", {**families.TABLE, MADE_UP: Family(qkv_bias="attention_bias", head_dim=128)})
    recipe = user.recipe("r", model=model, lora={"r": 4}, train={"max_steps": 2})
    checked = user.done("check", recipe)
    built = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model["name_or_path"])
    )
    assert checked["model"]["parameters"] == sum(p.numel() for p in built.parameters())
    assert checked["memory"]["total_bytes"] > 0
    assert checked["kernels"] == "reference"
    user.done("train", recipe)
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    # The self-check has held each fused layer against the one that it stands for, gradients included.
    assert {entry["layer"] for entry in manifest["kernels"] if entry["on"]} == {"layers.0", "layers.1", "norm"}
    assert manifest["self_check"]["worst"]["gradient"] < 1e-4


def test_rows_are_consistent() -> None:
    for name, row in families.TABLE.items():
        assert len(row.mlp) in (2, 3), name
        assert (row.norms.after_attention is None) == (row.norms.after_mlp is None), name  # halves close alike
        assert not (row.closes and row.parallel), name
        assert not (row.norm_bias and row.norm != "layer"), name
        assert row.repeated_angles <= (row.rotary == "pairs"), name
        assert row.window is not None or row.full_attention_every is None, name
        linears = [linear for group in row.groups for linear in group]
        assert len(set(linears)) == len(linears), name
