"""A small gpt-oss as it is released: experts in MXFP4, all else in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.small_models import build
from tests.unit.export.conftest import tokenizer

#: Sizes of which every stack's inputs are whole groups of 32.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
#: As the file of gpt-oss-20b has it.
STATED: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def drawn(experts: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a stack of (columns, rows) matrices, numbers of which some are 0 and most below 1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def theirs(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers by transformers' own reading."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return found


def released(folder: Path, *, shards: str = "50GB", **change: Any) -> dict[str, Tensor]:
    """Writes such a model, and answers with its experts' stacks (E, in, out) in float32.

    In several files (``shards``: of this size) the scales are all in one of their own.
    """
    model = build("gpt_oss", **{**SIZES, **change}).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer().save_pretrained(folder)
    full: dict[str, Tensor] = {}
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    apart = "model-scales.safetensors" if len(files) > 1 else next(iter(files))
    made: dict[str, dict[str, Tensor]] = {name: {} for name in (*files, apart)}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if not name.endswith((".gate_up_proj", ".down_proj")):
                made[file][name] = tensor
                continue
            experts, columns, rows = tensor.shape
            blocks, scales = drawn(experts, rows, columns, seed=len(full))
            full[name] = theirs(blocks, scales, torch.float32)
            made[file][f"{name}_blocks"], made[apart][f"{name}_scales"] = blocks, scales
    for file, tensors in made.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, tensors in made.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)  # the released config.json has none
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": STATED}))
    return full
