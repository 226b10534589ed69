"""An adapter's weight as one matrix with its base's: ``W + s · B A``, and what DoRA makes of it.

s is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA. A is (r, in), B is (out, r), W is (out, in). DoRA's weights are
then brought to the row lengths that were trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def merged(module: Any, weight: Tensor) -> Tensor:
    """``weight``, the base's of a PEFT LoRA layer, with the layer's only active adapter, in float32.

    A weight of fewer bits is added as it is: no copy of it in float32 is made.
    """
    summed, magnitude = change(module).add_(weight), magnitude_of(module)
    if magnitude is None:
        return summed
    factor = magnitude.data / lengths(module, summed)
    return summed.mul_(factor if module.fan_in_fan_out else factor[:, None])


def change(module: Any) -> Tensor:
    """s B A of a layer with an adapter, in float32."""
    delta: Tensor = module.get_delta_weight(module.active_adapters[0])
    return delta.float()


def magnitude_of(module: Any) -> torch.nn.Parameter | None:
    """The lengths of the rows (out,) that DoRA has trained; None for another adapter."""
    name = module.active_adapters[0]
    if not module.use_dora.get(name):
        return None
    found: torch.nn.Parameter = module.lora_magnitude_vector[name].weight
    return found


def lengths(module: Any, weight: Tensor) -> Tensor:
    """The length of each row (out,); of each column where the weight is stored as (in, out)."""
    found: Tensor = torch.linalg.vector_norm(weight, dim=0 if module.fan_in_fan_out else 1)
    return found
