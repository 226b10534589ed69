"""Models of ternary weights (``quantization.method: bitnet``) in GGUF: rounded first, then written.

A file holds ``s t`` for each matrix: in the types TQ1_0 and TQ2_0 the values t of a block of 256 beside s in float16,
in the others the products. Masters would be rounded in another way, by blocks, and to other signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.ternary import ternarise
from torch import Tensor

from ftcli.export.bitnet import load_masters, rounded_weights
from ftcli.export.probe import Probe, compare_logits, logits
from ftcli.export.weights import ModelWeights
from ftcli.gguf.names import no_place
from ftcli.plan.quantization import stores_ternary_masters
from ftcli.tables.gguf import NORMS_OF_LAYERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Largest relative error of the logits that rounding the activations may make: training does so by token and to eight
#: bits, the model that a file is put into not at all, llama.cpp by token and block.
ACTIVATIONS = 0.5


class TernaryWeights:
    """What masters are rounded to, in float32; the other tensors as they are.

    Args:
        layers: Names of the weights that are rounded.
    """

    def __init__(self, masters: ModelWeights, layers: frozenset[str]) -> None:
        self._masters, self._layers = masters, layers

    @property
    def names(self) -> Sequence[str]:
        """All that are stored."""
        return self._masters.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._masters.shape(name)

    def read(self, name: str) -> Tensor:
        """A tensor, rounded where training rounds it."""
        tensor = self._masters.read(name)
        return ternarise(tensor).dequantize(torch.float32) if name in self._layers else tensor


def rounded_layers(config: PretrainedConfig) -> frozenset[str]:
    """Names of the weights that are rounded in every product; empty for a model of plain weights.

    Raises FtcliError FT756 where these layers have norms of their own.
    """
    said: Any = config.to_dict()
    if not stores_ternary_masters(said):
        return frozenset()
    if said["quantization_config"].get("use_rms_norm"):
        raise no_place(NORMS_OF_LAYERS)
    return rounded_weights(config)


def activations_rounded(folder: Path, probe: Probe, unrounded: Tensor) -> tuple[dict[str, float], list[str]]:
    """How far rounding the activations, which no file says anything of, moves the logits: for the record, and problems.

    Args:
        folder: Of the masters.
        unrounded: What the ternary weights give without it.
    """
    found = compare_logits(unrounded, logits(load_masters(folder), probe), ACTIVATIONS)
    problems = []
    if not found.relative_error <= ACTIVATIONS:
        problems.append(f"the ternary weights' logits differ by {found.relative_error:.3g} from the trained model's")
    facts = {"activations_rounding": found.relative_error, "activations_top1_agreement": found.top1_agreement}
    return facts, problems
