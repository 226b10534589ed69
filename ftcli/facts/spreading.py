"""What cannot be combined with weights that are spread over ranks; all else works as with whole weights."""

from __future__ import annotations

from ftcli.config import Recipe
from ftcli.facts.execution import Execution
from ftcli.tables import engines, optimizers


def spreads(recipe: Recipe) -> bool:
    """Whether the recipe's engine spreads weights over several processes."""
    return recipe.launch.num_processes > 1 and engines.row(recipe.launch.engine).spreads


def why_not_spread(recipe: Recipe, execution: Execution) -> str | None:
    """What of a recipe does not go with weights that are spread, as one clause that begins with its key; or None."""
    lora, train = recipe.lora, recipe.train
    if not execution.on_kernels:
        return f"model.kernels: the layers have to be on ftcli's kernels ({execution.layers.reason})"
    if lora is None:
        row = optimizers.row(train.optim)
        if row.build_own is None or row.state != "whole":
            return f"train.optim: {train.optim} works on whole matrices, or keeps state of its own kind"
        if recipe.model.dtype == "float16":
            return "model.dtype: float16, whose losses are scaled"
        if train.bf16_gradients:
            return "train.bf16_gradients: each GPU keeps its part of the sum in float32"
        return None
    if lora.changes_base:
        return f"lora.init_lora_weights: {lora.init_lora_weights} takes whole weights apart"
    if lora.modules_to_save:
        return f"lora.modules_to_save: {lora.modules_to_save[0]}, of which a copy would be made before it is spread"
    return None
