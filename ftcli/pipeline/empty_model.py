"""Looks at the model of a family without arithmetic for `ftcli check`, built without memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.config.model import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.shape import Linear
from ftcli.plan.trained import PlannedAdapters, TrainedParameters, optimizer_state
from ftcli.preflight.checks.context import NotMade
from ftcli.preflight.report import PreflightReport
from ftcli.tables import code_of, quantizations
from ftcli.units import gib

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The least memory of training, in bytes: all but activations and workspaces, which only arithmetic tells."""

    weights: int
    adapters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.adapters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without memory.

    Attributes:
        parameters: How many it has.
        attention: What its layers take.
        adapters: What would be adapted; None for full fine-tuning.
        at_least: None where it is not known what is trained.
    """

    parameters: int
    attention: str
    adapters: PlannedAdapters | None
    at_least: LeastMemory | None


def outline_of(report: PreflightReport) -> Outline:
    """Builds the recipe's model without memory.

    Raises FtcliError (exit 3): FT305 where it cannot be built, FT311 to FT314 for names that mean nothing in it, FT333
    for settings that adapters of experts do not take, FT336 where it has nothing to quantize, FT337 for an attention
    that it does not have, FT443 where documents would see each other, FT601 where what training holds at least is more
    than the device has.
    """
    from ftcli.model.load import config_of
    from ftcli.model.lora_targets import planned_adapters
    from ftcli.model.pretrained import hollow
    from ftcli.model.quantized import layers_to_quantize

    recipe, model = report.recipe, hollow(config_of(report.facts.raw))
    stores = quantizations.row(recipe.quantization.method).quantize is not None
    packed = layers_to_quantize(model) if stores else frozenset[str]()
    adapters = None if recipe.lora is None else planned_adapters(model, recipe.lora, packed)
    found = Outline(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention=_attention(report, model),
        adapters=adapters,
        at_least=_least_memory(report, model, adapters, packed),
    )
    _require_documents_apart(report, model)
    _require_room(report, model, found)
    return found


def _attention(report: PreflightReport, model: PreTrainedModel) -> str:
    from ftcli.model.pretrained import usable_attention

    chosen = report.recipe.model.attention
    found = usable_attention(report.plan.execution.attention, chosen=chosen != "auto", model=model)
    if found == "sdpa" and not model._supports_sdpa:
        raise FtcliError.single(
            "FT337",
            f"model.attention: {chosen}, which transformers does not have for a {type(model).__name__}",
            exit_code=ExitCode.PREFLIGHT,
            help="use model.attention: auto, which takes one that it has",
        )
    return found


def _least_memory(
    report: PreflightReport, model: PreTrainedModel, adapters: PlannedAdapters | None, packed: Collection[str]
) -> LeastMemory | None:
    recipe, dtypes = report.recipe, report.dtypes
    trained = _language_parameters(model) if adapters is None else adapters.parameters
    if trained is None:
        return None
    state = optimizer_state(recipe.train.optim, TrainedParameters(trained, ()))
    return LeastMemory(
        weights=_weights(model, packed, recipe.quantization, dtypes.parameter_bytes),
        adapters=0 if adapters is None else dtypes.trained_bytes * trained,
        gradients=dtypes.gradient_bytes * trained,
        optimizer=state.device,
    )


def _language_parameters(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    parts = [model.get_decoder(), *([] if head is None else [head])]
    elements: dict[int, int] = {id(p): p.numel() for part in parts for p in part.parameters()}
    return sum(elements.values())


def _weights(model: PreTrainedModel, packed: Collection[str], settings: QuantizationConfig, element: int) -> int:
    reference = quantizations.row(settings.method).stored_bytes
    stored: Callable[[Linear, QuantizationConfig], int] | None = None if reference is None else code_of(reference)
    total: int = element * sum(parameter.numel() for parameter in model.parameters())
    for name in packed:
        layer = model.get_submodule(name)
        assert stored is not None  # as the method quantizes
        linear = Linear(name, int(layer.in_features), int(layer.out_features))
        total += stored(linear, settings) - element * linear.parameters
    return total


def not_tried(report: PreflightReport) -> tuple[NotMade, ...]:
    """Checks that only a run can make of a family without arithmetic."""
    if not _shares_rows(report):
        return ()
    return (
        NotMade("documents that share a row", "whether this model keeps them apart is tried before training (FT443)"),
    )


def _shares_rows(report: PreflightReport) -> bool:
    return report.recipe.data.packing or report.plan.execution.batches.layout == "unpadded"


def _require_documents_apart(report: PreflightReport, model: PreTrainedModel) -> None:
    """Layers that carry state from token to token have a convolution over them, which takes no mask of documents."""
    from torch.nn import Conv1d

    parents = model.get_decoder().modules() if _shares_rows(report) else ()
    recurrent = next((each for each in parents if any(isinstance(child, Conv1d) for child in each.children())), None)
    if recurrent is not None:
        raise FtcliError.single(
            "FT443",
            "this model does not keep packed documents apart: its "
            f"{type(recurrent).__name__} carries state from token to token",
            exit_code=ExitCode.PREFLIGHT,
            help="train with data.packing: false and data.padding_free: false",
        )


def _require_room(report: PreflightReport, model: PreTrainedModel, found: Outline) -> None:
    available, least = report.plan.device.available_bytes, found.at_least
    if least is None or available is None or least.total <= available:
        return
    stored = " or ".join(name for name in quantizations.names(freezes_base=True) if _fits(report, model, name))
    quantized = f", `quantization.method: {stored}` with `lora`" if stored else ""
    raise FtcliError.single(
        "FT601",
        f"does not fit: weights, adapters, gradients and optimizer alone need {gib(least.total)} GiB, "
        f"{report.device.name} has {gib(available)} GiB",
        exit_code=ExitCode.PREFLIGHT,
        help=f"use a smaller model{quantized}, or a larger GPU",
    )


def _fits(report: PreflightReport, model: PreTrainedModel, method: str) -> bool:
    """True if the device holds the model's weights as a quantization that freezes them stores them."""
    from ftcli.model.quantized import layers_to_quantize

    recipe, available = report.recipe, report.plan.device.available_bytes
    if available is None or (recipe.lora is not None and recipe.quantization.method == method):
        return False
    settings = recipe.quantization.model_copy(update={"method": method})
    try:
        packed = layers_to_quantize(model)
    except FtcliError:  # FT336: it has none
        return False
    return _weights(model, packed, settings, report.dtypes.parameter_bytes) <= available
