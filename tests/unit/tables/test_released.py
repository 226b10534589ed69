"""A packed form of released weights is a row and a class: the program reads and exports one it has never seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.export.tensorfile import opened
from ftcli.plain import JsonMap
from ftcli.plan.released import released_form
from ftcli.tables.released import TABLE, ReleasedForm
from tests.quantized import load
from tests.small_models import build
from tests.unit.export.conftest import tokenizer

END = "_half"


def words(config: JsonMap) -> str:
    return "halves"


class Halves:
    """The made-up form: matrices are stored divided by two, under names of their own."""

    def __init__(self, config: JsonMap) -> None:
        self.config = config

    def part_of(self, key: str) -> tuple[str, str] | None:
        return (key.removesuffix(END), END) if key.endswith(END) else None

    def shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        return parts[END]

    def dequantized(self, name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        return parts[END].to(device, dtype) * 2


def test_a_made_up_form_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ReleasedForm(f"{__name__}:words", f"{__name__}:Halves")
    monkeypatch.setattr("ftcli.plan.released.TABLE", {**TABLE, "halves": row})
    build("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    full = load_file(path)
    stored = {f"{k}{END}" if "proj" in k else k: x / 2 if "proj" in k else x for k, x in full.items()}
    save_file(stored, path, metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "halves"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert released_form(config) == (row, "halves")
    model = load(tmp_path, QuantizationConfig(method="none"))
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in full.items())
    (file,) = opened([path], config, torch.float32)
    assert file.entries.keys() == full.keys()
    for name, weight in full.items():
        assert torch.equal(file.read(name), weight)
        written = weight.bfloat16() if "proj" in name else weight
        assert b"".join(file.pieces(name)) == written.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
