"""The model that a GGUF file describes: transformers' config and weights, as the file alone has them.

Used by the process that loads exports again, so nothing of ftcli's models is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.export.gguf.metadata import config_changes, rotary
from ftcli.gguf.file import ReadFile
from ftcli.gguf.names import GATE, UP, from_file
from ftcli.tables.gguf import Architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Room for float32 arithmetic in comparing what should be equal.
ROUNDING = 1e-6


def take_description(config: PretrainedConfig, file: ReadFile, architecture: Architecture) -> list[str]:
    """Takes everything that ``file`` says of the language model into ``config``; problems are what it cannot say so."""
    values, text = file.values, config.get_text_config()
    said = {k.removeprefix(f"{architecture.name}."): v for k, v in values.items() if k.startswith(architecture.name)}
    changes = config_changes(said, architecture)
    problems: list[str] = []
    if "rope_freqs.weight" in file.names:
        turned = said["rope.dimension_count"]
        plain = said["rope.freq_base"] ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        found = plain / file.read("rope_freqs.weight").double()
        if not torch.allclose(found, rotary(text).double(), rtol=ROUNDING, atol=0.0):
            problems.append("the rotary frequencies differ")
    if any(name.startswith("rope_f") for name in file.names):
        changes.pop("rope_parameters")
    for key, value in changes.items():
        setattr(text, key, value)
    return problems


def reader_of(
    model: PreTrainedModel,
    file: ReadFile,
    names: Mapping[str, str],
    heads: Mapping[str, int],
    architecture: Architecture,
) -> Callable[[str], Tensor]:
    """Reads a weight of ``model`` from the file.

    Args:
        names: The name in the file of each tensor of the model.
        heads: As :func:`ftcli.gguf.names.from_file` takes them.
    """
    outputs: Any = model.get_output_embeddings()
    head = next((f"{name}.weight" for name, module in model.named_modules() if module is outputs), "")

    def read(weight: str) -> Tensor:
        halves = [f"{weight}{part}" for part in (GATE, UP)]
        if halves[0] in names:
            return torch.cat([read(half) for half in halves], dim=1)
        stored = names.get(weight)
        if stored is None and weight == head:  # llama.cpp takes the embedding where there is no head
            stored = "token_embd.weight"
        if stored is None:
            raise KeyError(f"the file has no {weight}")
        return from_file(stored, file.read(stored), heads, architecture)

    return read
