"""The parameters that a recipe trains, and the state that an optimizer keeps of them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ftcli.config.recipe import Recipe
from ftcli.facts.adapters import LinearAdapter, adapters
from ftcli.facts.layers import Linear
from ftcli.facts.model import ModelFacts
from ftcli.facts.shape import ModelShape
from ftcli.plan.quantization import elements_beside
from ftcli.tables import methods, optimizers, quantizations

#: bitsandbytes keeps the state of smaller tensors in float32, and the driver does not page that of tensors below the
#: second number (bitsandbytes 0.50, ``optim/optimizer.py``). State in 8 bits has a float32 scale for each block.
SMALLEST_IN_8_BITS = 4096
_SMALLEST_PAGED = 100_000
_BLOCK = 256


#: What ``lora.modules_to_save`` calls the head and the embedding.
HEAD, EMBEDDING = "lm_head", "embed_tokens"
TABLES = (HEAD, EMBEDDING)


@dataclass(frozen=True, slots=True)
class TrainedMatrices:
    """``count`` trained tensors of (rows, columns). A ``hidden`` one is a matrix of a layer, or of an adapter."""

    rows: int
    columns: int
    count: int
    part: Literal["hidden", "embedding", "head", "vector"] = "hidden"

    @property
    def elements(self) -> int:
        """Elements of each."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters: number of elements, and the matrices. Norms and biases are in none of them."""

    elements: int
    matrices: tuple[TrainedMatrices, ...]

    def with_others(self, others: TrainedParameters) -> TrainedParameters:
        """These, and others beside them."""
        return TrainedParameters(self.elements + others.elements, (*self.matrices, *others.matrices))


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Bytes of state: on the device, and in memory that is on the device while there is room and on the host else."""

    device: int
    paged: int = 0

    @property
    def total(self) -> int:
        """All of it, as a checkpoint holds it."""
        return self.device + self.paged


@dataclass(frozen=True, slots=True)
class PlannedAdapters:
    """Number of layers of each name with adapters, the layers that cannot have any, and the number of trained
    parameters (None where PEFT itself turns names into stacks of experts).
    """

    layers: Mapping[str, int]
    left: Mapping[str, int]
    parameters: int | None


def adapters_of(recipe: Recipe, shape: ModelShape) -> tuple[LinearAdapter, ...]:
    """The adapters that the recipe puts into a model; none under full fine-tuning."""
    if recipe.lora is None:
        return ()
    found, left = adapters(shape, recipe.lora), _left(recipe, shape)
    return tuple(each for each in found if each.linear not in left)


def left_out(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """Linear layers without an adapter because PEFT takes their names for those of quantized experts: the last two
    parts of their names, and how many there are.
    """
    return {".".join(x.name.split(".")[-2:]): shape.layers_with(x) for x in _left(recipe, shape)}


def _left(recipe: Recipe, shape: ModelShape) -> list[Linear]:
    experts, lora = shape.family.experts, recipe.lora
    quantized = quantizations.row(recipe.quantization.method).quantize is not None
    if (
        lora is None
        or experts is None
        or not (experts.takes_names and quantized and isinstance(lora.target_modules, str))
    ):
        return []
    return [x for x in shape.linears if x.experts == 1 and x.leaf in shape.family.mlp]


def why_no_router_loss(recipe: Recipe, facts: ModelFacts) -> str | None:
    """The reason why the routers' auxiliary loss cannot be added, as one clause; None if it can."""
    experts = None if facts.shape is None else facts.shape.family.experts
    if experts is None or not experts.balanced:
        return f"there is none for {facts.text_type}"
    if recipe.lora is not None:
        return "routers are frozen beside adapters"
    if recipe.train.method != "sft":
        return f"train.method: {recipe.train.method} has a loss of its own"
    if recipe.launch.context_parallel_size > 1:
        return "ranks that share rows see only their part of the tokens"
    return None


def adds_router_loss(recipe: Recipe, facts: ModelFacts) -> bool:
    """True if supervised fine-tuning adds the routers' auxiliary loss: the recipe says so, or else config.json."""
    stated = recipe.train.router_aux_loss_coef
    asked = facts.language.get("output_router_logits") if stated is None else stated
    return bool(asked) and why_no_router_loss(recipe, facts) is None


def trained_parameters(recipe: Recipe, shape: ModelShape) -> TrainedParameters:
    """Parameters that the recipe trains: all of the language model, or adapters and ``modules_to_save``; of a reward
    model its score, and no head.
    """
    scores = methods.row(recipe.train.method).classifier
    score = [TrainedMatrices(1, shape.hidden_size, 1, "vector")] if scores else []
    if recipe.lora is None:
        layer = [
            TrainedMatrices(x.out_features * x.experts, x.in_features, shape.layers_with(x)) for x in shape.linears
        ]
        tables = [TrainedMatrices(shape.vocab_size, shape.hidden_size, 1, "embedding")]
        head = [] if shape.tied else [TrainedMatrices(shape.vocab_size, shape.hidden_size, 1, "head")]
        elements = shape.language_parameters + elements_beside(recipe.quantization, shape)
        if scores:
            elements += shape.hidden_size - sum(one.elements for one in head)
        return TrainedParameters(elements, tuple(layer + tables + (score if scores else head)))
    matrices = list(score)
    for each in adapters_of(recipe, shape):
        together = each.rank * each.linear.experts  # PEFT holds the matrices of all experts as one
        matrices.append(TrainedMatrices(together, each.linear.in_features, each.layers))
        matrices.append(TrainedMatrices(each.linear.out_features, together, each.layers))
        if recipe.lora.use_dora:
            matrices.append(TrainedMatrices(each.linear.out_features, 1, each.layers, "vector"))
    if recipe.model.add_tokens:
        ends = 1 if shape.tied else 2
        matrices.append(TrainedMatrices(len(recipe.model.add_tokens), shape.hidden_size, ends))
    for name in recipe.lora.modules_to_save:
        if name in TABLES:
            part: Literal["head", "embedding"] = "head" if name == HEAD else "embedding"
            matrices.append(TrainedMatrices(shape.vocab_size, shape.hidden_size, 1, part))
        if name == "norm":  # as PEFT reads it: every module whose name ends so
            matrices.append(TrainedMatrices(shape.norm_parameters, 1, 1, "vector"))
        saved = [x for x in shape.linears if x.leaf == name]
        matrices += [TrainedMatrices(x.out_features, x.in_features, shape.layers_with(x)) for x in saved]
    return TrainedParameters(sum(m.elements * m.count for m in matrices), tuple(matrices))


def optimizer_state(optim: str, trained: TrainedParameters) -> OptimizerState:
    """The state that the optimizer keeps of what is trained."""
    optimizer = optimizers.row(optim)
    if optimizer.state == "factored":
        return OptimizerState(sum(4 * (m.rows + m.columns) * m.count for m in trained.matrices))
    each = [(m, bytes_of(optimizer, m) * m.count) for m in trained.matrices]
    listed = sum(m.elements * m.count for m in trained.matrices)
    paged = sum(size for m, size in each if m.elements >= _SMALLEST_PAGED) if optimizer.paged else 0
    rest = optimizer.state_bytes * (trained.elements - listed)
    return OptimizerState(sum(size for _, size in each) - paged + rest, paged)


def optimizer_workspace(optim: str, trained: TrainedParameters, *, cuda: bool) -> int:
    """Bytes that a step of the optimizer allocates: see :class:`ftcli.tables.optimizers.Optimizer`."""
    workspace = optimizers.row(optim).workspace
    if workspace == "none":
        return 0
    hidden = [m for m in trained.matrices if m.part == "hidden"] if workspace == "largest" else []
    largest = (4 + 4 * 2) * max((m.elements for m in hidden), default=0)
    others = trained.elements - sum(m.elements * m.count for m in hidden)
    return max(largest, 4 * others if cuda else 0)


def bytes_of(optimizer: optimizers.Optimizer, matrix: TrainedMatrices) -> int:
    """Bytes of state of one matrix."""
    whole = optimizer.state_bytes * matrix.elements
    if optimizer.state == "momentum" and matrix.part == "hidden":
        return whole // 2
    if optimizer.state == "blockwise" and matrix.part != "embedding" and matrix.elements >= SMALLEST_IN_8_BITS:
        return whole // 4 + whole // _BLOCK
    return whole
