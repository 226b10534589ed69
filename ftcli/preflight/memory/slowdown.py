"""How much slower a change makes training, so that the cheapest one that fits can be proposed. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ftcli.config import Recipe
from ftcli.config.training import Checkpointing
from ftcli.preflight.execution import Work

#: Time of a step over that of `false`: the means of Llama-3.1-8B and Gemma-2-9B on an H200, 2026-11-21;
#: docs/performance.md has later runs, within 0.02 of these.
ON_KERNELS: Mapping[Checkpointing, float] = MappingProxyType(
    {False: 1.0, "selective": 1.19, "offload": 1.31, True: 1.36}
)
#: Layers of transformers: 1.42 for two other tools there. What copying to the host adds to it was not measured.
_PLAIN: Mapping[Checkpointing, float] = MappingProxyType({False: 1.0, "selective": 1.42, "offload": 1.45, True: 1.42})
#: What a pass costs however few tokens it has, in tokens: launches, weights read and dequantised, half-filled tiles.
#: An assumption, not a measurement: half the batch costs 3% at 8192 tokens, 11% at 2048 and 33% at 512.
_FIXED_TOKENS = 256


def relative_time(recipe: Recipe, *, work: Work, on_kernels: bool) -> float:
    """Time for a token of training, over that without checkpointing in batches of any size."""
    policy = recipe.train.checkpointing
    return (ON_KERNELS if on_kernels else _PLAIN)[policy] * (1 + _FIXED_TOKENS / _tokens(recipe, work))


def _tokens(recipe: Recipe, work: Work) -> int:
    """Tokens of a micro-batch at its largest."""
    length = recipe.data.max_seq_len
    if work == "grpo" and recipe.grpo is not None:
        length = recipe.grpo.max_prompt_length + recipe.grpo.max_completion_length
    return recipe.train.per_device_train_batch_size * length
