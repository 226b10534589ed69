"""Small models as they are released in eight bits: written by transformers' own quantizer, read back by formula."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.small_models import build
from tests.unit.export.conftest import tokenizer

#: What released checkpoints leave in 16 bits.
_KEPT = re.compile(r"embed|lm_head|norm|mlp\.gate\.weight|conv|vision|visual|projector")


def blocks_of(
    weight: Tensor, block: tuple[int, int] | None, scale: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Numbers in eight bits and their scales, of whole blocks by transformers' own quantizer.

    Zeros fill up the last blocks and are cut off again. ``block`` None: one scale for the matrix.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    rows, columns = weight.shape[-2:]
    high, wide = block or (rows, columns)
    scale_fmt = "ue8m0" if scale == torch.float8_e8m0fnu else "float"
    settings = FineGrainedFP8Config(weight_block_size=(high, wide), scale_fmt=scale_fmt)
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    made = Fp8Quantize(FineGrainedFP8HfQuantizer(settings)).convert({"x.weight": filled})
    numbers = made["x.weight"][..., :rows, :columns].contiguous()
    scales = made["x.weight_scale_inv"].to(scale)
    return numbers, scales.squeeze() if block is None else scales


def by_formula(numbers: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """What they stand for, in float32: each number times the scale of its block, one by one."""
    if block is None:
        return numbers.float() * scales.float()
    rows, columns = numbers.shape[-2:]
    down = torch.arange(rows) // block[0]
    across = torch.arange(columns) // block[1]
    return numbers.float() * scales.float()[..., down[:, None], across[None, :]]


def released(
    folder: Path,
    kind: str = "llama",
    *,
    block: tuple[int, int] | None = (16, 16),
    scale: torch.dtype = torch.float32,
    stacked: bool = False,
    scales_apart: bool = False,
    **change: Any,
) -> dict[str, Tensor]:
    """Writes such a model, and answers with its weights in float32 by their keys in the files.

    Args:
        stacked: Experts lie in the files as the stacks that the model has.
        scales_apart: They lie in a file of their own.
    """
    model = build(kind, **change).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = model.state_dict() if stacked else load_file(path)
    made: dict[str, Tensor] = {}
    full: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() not in (2, 3) or _KEPT.search(name):
            made[name] = tensor.contiguous()
            full[name] = tensor.float()
            continue
        numbers, scales = blocks_of(tensor, block, scale)
        made[name] = numbers
        apart[f"{name}_scale_inv"] = scales
        full[name] = by_formula(numbers, scales, block)
        if block is None:
            apart[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(0.5, dtype=scale)
    files = {path.name: made, "model-scales.safetensors": apart} if scales_apart else {path.name: made | apart}
    for name, stored in files.items():
        save_file(stored, folder / name, metadata={"format": "pt"})
    if scales_apart:
        weight_map = {key: name for name, stored in files.items() for key in stored}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    state(folder, block)
    return full


def state(folder: Path, block: tuple[int, int] | None) -> None:
    """Writes into config.json what released ones say."""
    stated: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "static" if block is None else "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "mlp.gate"],
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
