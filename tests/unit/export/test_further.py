"""Tensors that transformers passes over: kept by the run of a full fine-tune, or missed aloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.config.model import ModelConfig
from ftcli.errors import Finding
from ftcli.export.further import keep_passed_over
from ftcli.model.pretrained import load_whole
from ftcli.model.trained_weights import check_saved, load_weights, save_weights
from tests.small_models import build

HEADS = {"mtp.fc.weight": torch.arange(12.0).view(3, 4), "mtp.norm.weight": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    build("qwen3_5_text").save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **HEADS}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved(base: Path, folder: Path, **change: Any) -> tuple[Any, list[Finding]]:
    """A full fine-tune of ``base`` in ``folder``, with what is kept beside it; the model, and what was told."""
    model = build("qwen3_5_text")
    for key, value in change.items():
        setattr(model.config, key, value)
    save_weights(model, folder)
    told: list[Finding] = []
    keep_passed_over(model, ModelConfig(name_or_path=str(base)), folder, offline=True, tell=told.append)
    return model, told


def test_what_the_base_has_is_kept_as_it_is_and_is_no_part_of_the_model(base: Path, tmp_path: Path) -> None:
    model, told = saved(base, tmp_path / "model")
    assert not told
    kept = load_file(tmp_path / "model" / "model-further.safetensors")
    assert set(kept) == set(HEADS)
    assert all(torch.equal(kept[key], tensor) and kept[key].dtype == tensor.dtype for key, tensor in HEADS.items())
    check_saved(model, tmp_path / "model")
    load_weights(model, tmp_path / "model")
    again: Any = load_whole(str(tmp_path / "model"), offline=True)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("promised", [0, 1])
@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_base_that_is_gone_by_the_end_of_training_ends_nothing(
    damage: str, promised: int, base: Path, tmp_path: Path
) -> None:
    weights = base / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    if damage == "cut short":
        weights.write_bytes(data[:-8])
    _, told = saved(base, tmp_path / "model", mtp_num_hidden_layers=promised)
    assert not (tmp_path / "model" / "model-further.safetensors").exists()
    assert [finding.code for finding in told] == ["FT757"] * promised
    assert all(finding.help and str(base) in finding.message for finding in told)
