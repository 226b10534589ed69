"""Decides which weights are sharded over ranks and which rows they share, and what cannot be combined with either."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftcli.config.recipe import Recipe
from ftcli.facts.generation import batch_dependent_rope
from ftcli.facts.model import ModelFacts
from ftcli.tables import optimizers, quantizations

if TYPE_CHECKING:
    from ftcli.plan.execution import Execution


def why_not_sharded(recipe: Recipe, execution: Execution) -> str | None:
    """The part of a recipe that does not go with sharded weights, as one clause that begins with its key; or None."""
    lora, train = recipe.lora, recipe.train
    if quantizations.row(recipe.quantization.method).training is not None:
        return f"quantization.method: {recipe.quantization.method} rounds whole matrices"
    if not execution.on_kernels and recipe.model.kernels == "triton":
        return f"model.kernels: triton, and the layers are not on it ({execution.layers.reason})"
    if lora is None:
        row = optimizers.row(train.optim)
        if row.build_own is None or row.state != "whole":
            return f"train.optim: {train.optim} works on whole matrices, or keeps state of its own kind"
        if recipe.model.dtype == "float16":
            return "model.dtype: float16, whose losses are scaled"
        if train.bf16_gradients:
            return "train.bf16_gradients: each GPU keeps its part of the sum in float32"
        return None
    if lora.use_dora:
        return "lora.use_dora: the lengths of its rows are taken from whole weights"
    if lora.changes_base:
        return f"lora.init_lora_weights: {lora.init_lora_weights} takes whole weights apart"
    if lora.modules_to_save:
        return f"lora.modules_to_save: {lora.modules_to_save[0]}, of which a copy would be made before it is sharded"
    return None


def exchanged_key_heads(query_heads: int, key_heads: int, parts: int) -> int | None:
    """Number of key heads to exchange, so that each part gets as many, and with them all that its query heads read:
    ``key_heads`` or a multiple of them. None if ``parts`` does not divide the query heads.
    """
    if query_heads % parts:
        return None
    repeated = math.lcm(key_heads, parts)
    return repeated if query_heads % repeated == 0 else query_heads


def why_rows_stay_whole(facts: ModelFacts, execution: Execution, parts: int) -> str | None:
    """The reason why ranks cannot share rows of this model, as one clause; None if they can."""
    if not execution.on_kernels:
        return f"the layers are transformers' own: {execution.layers.reason}"
    if facts.shape is None:
        return "the model's shape is not known"
    if facts.shape.delta_nets:
        return "its delta nets carry a state from token to token through whole rows"
    if exchanged_key_heads(facts.shape.num_heads, facts.shape.num_kv_heads, parts) is None:
        return f"its {facts.shape.num_heads} attention heads cannot be shared by {parts}"
    kind = batch_dependent_rope(facts.language)
    return None if kind is None else f"its rotary embeddings of kind {kind} depend on the longest row of a batch"
