"""What a recipe trains, and the state that an optimizer keeps of it. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ftcli.config import Recipe
from ftcli.facts.shape import ModelShape
from ftcli.tables import optimizers


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained: how many elements, and the matrices (rows, columns, count), which some optimizers factor."""

    elements: int
    matrices: tuple[tuple[int, int, int], ...]


def trained_parameters(recipe: Recipe, shape: ModelShape) -> Trained:
    """What the recipe trains: all parameters of the language model, or adapters and ``modules_to_save``."""
    if recipe.lora is None:
        layer = [(x.out_features, x.in_features, shape.num_layers) for x in shape.linears]
        tables = [(shape.vocab_size, shape.hidden_size, 1 if shape.tied else 2)]
        return Trained(shape.language_parameters, tuple(layer + tables))
    rank, layers = recipe.lora.r, shape.num_layers
    matrices: list[tuple[int, int, int]] = []
    for linear in shape.adapted(recipe.lora.target_modules):
        matrices += [(rank, linear.in_features, layers), (linear.out_features, rank, layers)]
    for name in recipe.lora.modules_to_save:
        if name in ("lm_head", "embed_tokens"):
            matrices.append((shape.vocab_size, shape.hidden_size, 1))
        if name == "norm":  # as PEFT reads it: every module whose name ends so
            matrices.append((shape.norm_parameters, 1, 1))
        matrices += [(x.out_features, x.in_features, layers) for x in shape.linears if x.leaf == name]
    return Trained(sum(rows * columns * count for rows, columns, count in matrices), tuple(matrices))


def optimizer_state_bytes(optim: str, trained: Trained) -> int:
    """Bytes of state that the optimizer keeps of what is trained."""
    optimizer = optimizers.row(optim)
    if optimizer.factored:
        return sum(4 * (rows + columns) * count for rows, columns, count in trained.matrices)
    return optimizer.state_bytes * trained.elements
