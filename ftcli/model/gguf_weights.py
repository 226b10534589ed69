"""Models of ternary weights that lie in GGUF files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.errors import FtcliError, first_line
from ftcli.gguf.file import ReadFile, require_gguf_package
from ftcli.gguf.names import from_file, names_of
from ftcli.model.quantized import unreadable_weights
from ftcli.tables.gguf import architecture_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tensors that say nothing of the weights: factors of the rotation, which the model's config has.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def ternary_tensors(path: Path, model: PreTrainedModel, layers: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Name in ``model`` and value, in float32, of every tensor of the GGUF file ``path``, one in memory at a time.

    Args:
        layers: Names of the linear layers, whose weights are ternary: -a, 0 and a.

    Raises:
        FtcliError: FT758 where the package gguf is not installed; FT323 when the file is damaged, of another model, or
            has other weights there. A file that was rounded by blocks, in a ternary type or another, is another model
            than the one it was made of.
    """
    config = model.config.get_text_config()
    architecture = architecture_of(config.model_type, getattr(config, "hidden_act", None) or "silu")
    if architecture is None:
        raise unreadable_weights(f"{path.name}: ftcli does not know how GGUF holds a model_type {config.model_type}")
    require_gguf_package()
    try:
        file = ReadFile(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise unreadable_weights(
            f"{path.name}: {first_line(error)} (bitnet.cpp's own types I2_S, TL1 and TL2 are not read: the same models "
            "are published as packed safetensors)"
        ) from error
    said = file.values.get("general.architecture")
    if said != architecture.name:
        raise unreadable_weights(
            f"{path.name} is of the architecture {said}, and config.json's model is {architecture.name}"
        )
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    try:
        names = names_of([name for name in model.state_dict() if name not in tied], architecture).in_model
    except FtcliError as error:
        raise unreadable_weights(f"{path.name}: {error.findings[0].message}") from error
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    for stored in file.names:
        if stored in _COMPUTED:
            continue
        if stored not in names:
            raise unreadable_weights(f"the model has no place for {stored} of {path.name}")
        tensor = file.read(stored)
        if names[stored].removesuffix(".weight") in layers and not _is_ternary(tensor):
            raise unreadable_weights(
                f"{stored} of {path.name} ({file.type_name(stored)}) has more values than -a, 0 and a: it is no "
                "BitNet model, or it was rounded by blocks and is no longer one"
            )
        yield names[stored], from_file(stored, tensor, heads, architecture)


def _is_ternary(tensor: Tensor) -> bool:
    return torch.equal(tensor.sign() * tensor.abs().amax(), tensor)
