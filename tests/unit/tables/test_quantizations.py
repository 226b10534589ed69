"""A base quantization is a row and a file: the program trains on, counts and checks one that it has never seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.projection import FrozenWeight
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.facts.device import named_device
from ftcli.facts.layers import Linear
from ftcli.facts.model import read_facts
from ftcli.model.quantized import QuantizedLinear
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.preflight.checks import crossfield, support
from ftcli.preflight.checks.context import Context
from ftcli.tables import code_of, quantizations
from tests.e2e.conftest import User
from tests.estimates import plan_of


@dataclass(frozen=True)
class Int8Weight:
    """The made-up method: a byte an element and a float32 scale a row. ``data`` is (O, I), ``scale`` (O, 1)."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.data * self.scale).to(dtype)


class Int8Linear(QuantizedLinear):
    method = "int8"

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias, name)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("data", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def frozen_weight(self) -> FrozenWeight:
        buffers: Any = self._buffers
        return Int8Weight(buffers["data"], buffers["scale"])


def int8_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> Int8Linear:
    return Int8Linear(linear, name)


def int8_bytes(linear: Linear, settings: QuantizationConfig) -> int:
    return linear.in_features * linear.out_features + 4 * linear.out_features


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> None:
    row = quantizations.Quantization(
        reads=("keep_dequantized",),
        quantize=f"{__name__}:int8_linear",
        stored_bytes=f"{__name__}:int8_bytes",
    )
    monkeypatch.setattr(quantizations, "TABLE", {**quantizations.TABLE, "int8": row})


def test_a_made_up_quantization_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = User(tmp_path, capsys)

    def train(name: str, kernels: str, **settings: Any) -> list[dict[str, Any]]:
        recipe = user.recipe(
            name,
            model={"kernels": kernels},
            quantization={"method": "int8", **settings},
            data={"eval": []},
            train={"max_steps": 1},
        )
        user.done("train", recipe)
        if name == "stored":
            shown = user.done("check", recipe)
            assert shown["memory"]["parts"]["dequantized weights"] == 512 * 256 * 4  # one product's, in float32
        table: list[dict[str, Any]] = json.loads((tmp_path / name / "manifest.json").read_text())["quantization"]
        assert len(table) == 4 * 7
        return table

    stored, held = train("stored", "off"), train("held", "off", keep_dequantized=True)
    assert {(entry["method"], entry["dequantized"]) for entry in stored} == {("int8", False)}
    assert {(entry["method"], entry["dequantized"]) for entry in held} == {("int8", True)}
    assert next(entry for entry in stored if entry["shape"] == [512, 256])["bytes"] == 512 * 256 + 4 * 512
    train("on kernels", "reference")
    assert user.losses("held") == pytest.approx(user.losses("stored"), rel=1e-5)
    assert user.losses("on kernels") == pytest.approx(user.losses("stored"), rel=1e-5)


def test_its_bytes_are_counted(load: Callable[..., Any]) -> None:
    text = "model: {name_or_path: meta-llama/Llama-3.1-8B}\nlora: {}\ndata: {train: [a.jsonl]}\n"
    found = {}
    for method in ("none", "int8"):
        loaded = load(text, f"quantization.method={method}", "train.gradient_checkpointing=true")
        facts, gpu = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins), named_device("h200")
        found[method] = estimate_memory(plan_of(loaded.recipe, facts, gpu))
    linears = facts.shape.linears
    rows = sum(linear.out_features for linear in linears)
    saved = facts.shape.num_layers * (sum(linear.in_features * linear.out_features for linear in linears) - 4 * rows)
    assert found["none"].parts["weights"] - found["int8"].parts["weights"] == saved
    assert found["int8"].parts["dequantized weights"] == 2 * 14336 * 4096 * 2  # gate and up, in bfloat16


def test_what_its_row_says_is_known_to_the_checks(context: Callable[..., Context]) -> None:
    def found(text: str) -> list[str]:
        made = context(f"data: {{train: [a.jsonl]}}\n{text}")
        return [finding.message for finding in (*support.check(made), *crossfield.check(made))]

    settings = "quantization: {method: int8, keep_dequantized: true, double_quant: false}\n"
    assert found(f"lora: {{}}\n{settings}") == ["quantization.double_quant has no effect without method: nf4"]
    (frozen,) = found("quantization: {method: int8}\n")
    assert frozen == "quantization.method int8 freezes the base weights, so there is nothing to train"


def test_every_code_reference_resolves() -> None:
    for row in quantizations.TABLE.values():
        groups = [row, *(group for group in (row.products, row.packed_files) if group is not None)]
        for group in groups:
            values = [getattr(group, field.name) for field in fields(group)]
            for reference in values:
                if isinstance(reference, str):
                    assert code_of(reference) is not None


def test_what_a_recipe_of_another_version_names_is_told_too() -> None:
    assert [quantizations.is_stored(name) for name in (None, "none", "int8", "nf4", "of another version")] == [
        False,
        False,
        True,
        True,
        True,
    ]
