"""Measurements of a model that has no description: its sizes, and its layers' bytes.

The model is built without memory and run on tensors without memory (:mod:`ftcli.model.measure`), which imports torch
and transformers and takes seconds. This module has the values, and asks for them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ftcli.config.model import QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.layers import Linear
from ftcli.facts.model import ModelFacts
from ftcli.plain import JsonObject
from ftcli.plan.execution import Execution
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import PlannedAdapters, TrainedParameters
from ftcli.tables import code_of, quantizations
from ftcli.tables.families import MEASURED_BY, TOWER_MEASURED_BY
from ftcli.tables.images import TrainedPart


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a model; hashable, so that it is measured once.

    Attributes:
        config: The content of config.json, as JSON.
        classifier: The model has a score in place of its head.
        longest: Tokens of the longest row.
        documents: Documents of one row are kept apart by a mask.
    """

    config: str
    lora: str | None
    classifier: bool
    attention: str
    attention_chosen: bool
    parameter: str
    adapter: str | None
    compute: str
    autocast: bool
    longest: int
    window: int | None
    documents: bool
    stores: bool
    trains: bool
    parts: tuple[TrainedPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes as a function of rows and their length: ``fixed + rows · (a + b · length + c · length²)``."""

    fixed: float
    a: float
    b: float
    c: float

    def __call__(self, rows: int, length: int) -> int:
        """The bytes."""
        return max(0, round(self.fixed + rows * (self.a + self.b * length + self.c * length**2)))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Decoder layers that are built alike, and the bytes that one of them holds.

    Attributes:
        elements: Parameters of one, without adapters.
        kept: From its forward pass to its backward pass, what it hands on included.
        handed: What it hands on, and what autocast keeps of it where nothing else is kept.
        forward: The most that it allocates without gradients.
        backward: The most that its backward pass allocates on top of what is kept, without its weights' gradients.
    """

    count: int
    elements: int
    kept: Growth
    handed: Growth
    forward: Growth
    backward: Growth


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a forward and a backward pass: of each kind of layer, of what stands before the layers (``entry``: the
    embedding's output, masks, cosines and sines) and behind them (``last``, with the backbone's output).
    """

    kinds: tuple[LayerKind, ...]
    entry: Growth
    last: Growth


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model without a description; counts are elements. ``other_parameters``: beside the language model;
    ``outer_elements``: of the language model outside of its layers; ``packed``: linear layers that a quantization
    stores, and how many there are of each shape; ``recurrent``: a module that carries a state from token to token.

    ``adapters`` is None under full fine-tuning, ``activations`` where transformers' code does not run without memory:
    ``unknown`` says why.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    tied: bool
    parameters: int
    other_parameters: int
    outer_elements: int
    largest_layer: int
    largest_tensor: int
    packed: tuple[tuple[Linear, int], ...]
    attention: str
    recurrent: str | None
    adapters: PlannedAdapters | None
    trained: TrainedParameters
    activations: Activations | None
    unknown: str = ""

    def weight_bytes(self, quantization: QuantizationConfig, element: int, *, dequantized: bool = False) -> int:
        """Bytes of the base model; ``dequantized``: its quantized weights are held so."""
        reference = quantizations.row(quantization.method).stored_bytes
        if reference is None or dequantized:
            return self.parameters * element
        stored = code_of(reference)
        packed = sum(count * linear.in_features * linear.out_features for linear, count in self.packed)
        held: int = sum(count * stored(linear, quantization) for linear, count in self.packed)
        return (self.parameters - packed) * element + held


@dataclass(frozen=True, slots=True)
class TowerBytes:
    """Bytes a patch of what is trained beside the language model: what is ``kept`` for backward, and the most that
    backward allocates on top of it.
    """

    kept: float
    workspace: float


@dataclass(frozen=True, slots=True)
class MeasuredTower:
    """A vision tower and projector of which something is ``trained``, and its bytes where layers keep everything
    (``whole``) and where they are checkpointed (``again``).
    """

    trained: TrainedParameters
    whole: TowerBytes
    again: TowerBytes


def measured_tower(question: Question) -> MeasuredTower:
    """Measures the parts that are trained beside the language model. Raises as :func:`measured_model`."""
    found: MeasuredTower = code_of(TOWER_MEASURED_BY)(question)
    return found


def measured_model(question: Question) -> MeasuredModel:
    """Measures a model. Raises FtcliError FT305 (exit 3) where none can be built of its config.json; FT311 to FT314,
    FT333 and FT338 for adapters that it cannot have; FT336 with nothing to quantize; FT337 for an attention that it
    does not have.
    """
    found: MeasuredModel = code_of(MEASURED_BY)(question)
    return found


def question_of(
    recipe: Recipe, facts: ModelFacts, dtypes: DtypePlan, execution: Execution, *, trains: bool, classifier: bool
) -> Question:
    """The question that a setup has."""
    settings = recipe.grpo if trains else None
    longest = recipe.data.max_seq_len
    if settings is not None:
        longest = settings.max_prompt_length + settings.max_completion_length
    return Question(
        config=json.dumps(facts.raw, sort_keys=True),
        lora=None if recipe.lora is None else recipe.lora.model_dump_json(),
        classifier=classifier,
        attention=execution.attention,
        attention_chosen=recipe.model.attention != "auto",
        parameter=dtypes.parameter,
        adapter=dtypes.adapter,
        compute=dtypes.compute,
        autocast=dtypes.autocast,
        longest=longest,
        window=facts.sliding_window,
        documents=recipe.data.packing or execution.batches.layout == "unpadded",
        stores=quantizations.row(recipe.quantization.method).quantize is not None,
        trains=trains,
        parts=recipe.model.train,
    )


def config_in(question: Question) -> JsonObject:
    found: JsonObject = json.loads(question.config)
    return found
