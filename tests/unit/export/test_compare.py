"""What a written tensor may differ by: one unit in the last place where an adapter was merged, else nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ftcli.export.merge import Rounding
from ftcli.export.verify import _compare_merged, compare_written, difference, open_written
from ftcli.export.weights import MergedWeights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def off_by(tensor: Tensor, units: int) -> Tensor:
    """Its first number moved by so many units in the last place."""
    moved = tensor.clone()
    for _ in range(units):
        moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(9.0, dtype=tensor.dtype))
    return moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_merged_weight_may_be_one_unit_off_and_no_more(dtype: torch.dtype) -> None:
    want = torch.full((2, 3), 1.5)
    written = want.to(dtype)
    assert difference(written, want, dtype, exact=False) is None
    assert difference(off_by(written, 1), want, dtype, exact=False) is None
    assert "differs from W + s B A" in (difference(off_by(written, 8), want, dtype, exact=False) or "")
    assert "differs from what it should be" in (difference(off_by(written, 1), want, dtype, exact=True) or "")
    assert difference(written * torch.nan, want, dtype, exact=False) == "holds NaN or infinity"
    assert "instead of" in (difference(written[:1], want, dtype, exact=False) or "")


class Weights:
    """Tensors by name, as they are stored."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors, self.names = tensors, tuple(tensors)
        self.ties: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def of(self, name: str) -> Any:
        return type("Stored", (), {"packed": False, "dtype": self._tensors[name].dtype})


class Doubled:
    """A change of a weight that an adapter makes, or a module that was trained ``whole``."""

    def __init__(self, whole: Tensor | None = None) -> None:
        self.whole = whole

    def applied(self, weight: Tensor) -> Tensor:
        return 2 * weight if self.whole is None else self.whole


def test_only_what_an_adapter_changes_may_be_off() -> None:
    weight = torch.full((2, 3), 1.5)
    base: Any = Weights(kept=weight, merged=weight, trained=weight)
    changes: Any = {"merged": Doubled(), "trained": Doubled(3 * weight)}
    rounding = Rounding(None, torch.float32, lambda name: False)

    def problems(**written: Tensor) -> list[str]:
        of: Any = Weights(**written)
        merged = MergedWeights(base, changes)
        return [problem.split()[0] for problem in _compare_merged(base.names, of, merged, rounding)]

    assert problems(kept=weight, merged=2 * weight, trained=3 * weight) == []
    off = {"kept": off_by(weight, 1), "merged": off_by(2 * weight, 1), "trained": off_by(3 * weight, 1)}
    assert problems(**off) == ["kept", "trained"]
    assert problems(kept=weight, merged=weight, trained=3 * weight) == ["merged"]
    assert problems(merged=2 * weight, trained=3 * weight) == ["kept"]


def test_a_tensor_that_the_base_does_not_have_is_named(tmp_path: Path) -> None:
    base, written = tmp_path / "base", tmp_path / "written"
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **small)).save_pretrained(base)
    shutil.copytree(base, written)
    rounding = Rounding(None, torch.float32, lambda name: False)
    assert compare_written(open_written(written), MergedWeights(open_written(base), {}), rounding) == []
    tensors = load_file(written / "model.safetensors")
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"  # which the model has no place for and leaves alone
    foreign = {**tensors, ignored: torch.zeros(2)}
    save_file(foreign, written / "model.safetensors", metadata={"format": "pt"})
    (problem,) = compare_written(open_written(written), MergedWeights(open_written(base), {}), rounding)
    assert problem == f"{ignored} is not in the base model"
