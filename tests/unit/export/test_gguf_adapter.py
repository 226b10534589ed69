"""Adapters that are written alone as GGUF, for llama.cpp to put on a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftcli.errors import FtcliError
from ftcli.gguf import ReadFile
from tests.small_models import build
from tests.unit.export.gguf_runs import VARIANTS, adapt, export

pytest.importorskip("gguf")


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("qwen2_vl", {}),
        ("starcoder2", {}),
        ("qwen3_5_text", {}),
        ("llama", VARIANTS["rank pattern"]),
        *(pytest.param(name, {}, marks=pytest.mark.long) for name in ("llama", "gemma2", "glm4", "granite")),
    ],
)
def test_an_adapter_is_written_alone(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    made = adapt(tmp_path, build(family), use_rslora=bool(variant), **variant)
    result = export(made, "f32", lora=True)
    assert result.verification.facts["adapter_relative_error"] < 1e-5
    file = ReadFile(result.path / "run-LoRA-F32.gguf")
    assert file.values["general.type"] == "adapter"
    if not variant and family == "gemma2":
        stored = load_file(made.run.adapter_dir / "adapter_model.safetensors")
        b = stored["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        assert torch.equal(file.read("blk.0.attn_q.weight.lora_b"), b)


@pytest.mark.parametrize("variant", ["dora", "head trained whole"])
def test_an_adapter_that_is_more_than_two_matrices_is_refused(variant: str, tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="two matrices alone"):
        export(adapt(tmp_path, build("llama"), **VARIANTS[variant]), "f32", lora=True)
