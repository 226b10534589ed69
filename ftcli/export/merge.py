"""Adds an adapter to its base model: ``W' = cast(float32(W) + s · B A)``, one rounding, into the dtype W is stored in.

s is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA. A is (r, in), B is (out, r), W is (out, in); A and B are
float32. A stack of experts has a product for each of them. PEFT's own merge rounds twice: it rounds s B A to bfloat16
before it adds it. DoRA's weights are then brought to the row lengths that were trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.model import merging

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Dtypes = dict[str, torch.dtype]


def stored_dtypes(model: PreTrainedModel) -> Dtypes:
    """The dtype of each parameter and persistent buffer, by name."""
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@torch.no_grad()
def merge(adapted: PeftModel, dtypes: Dtypes) -> PreTrainedModel:
    """Merge the only adapter and remove PEFT's layers. ``adapted`` cannot be used afterwards.

    Args:
        adapted: Base and adapter, both in float32.
        dtypes: What each tensor of the result is cast to: :func:`stored_dtypes` of the base.

    Tied embeddings of which only one side was adapted, or trained whole, are untied, and the config says so. Otherwise
    loading the result would copy one side over the other.
    """
    from peft.tuners.lora import LoraLayer

    for module in list(adapted.modules()):
        if isinstance(module, LoraLayer):
            # A new parameter, not an addition in place: the old one may be tied to the embeddings.
            total = torch.nn.Parameter(_merged(module), requires_grad=False)
            setattr(module.get_base_layer(), _leaf(module), total)
    model: PreTrainedModel = adapted.unload()
    _untie_where_they_differ(model)
    _cast(model, dtypes)
    return model


@contextmanager
def rounded(adapted: PeftModel, weights: Mapping[str, str], dtypes: Dtypes) -> Iterator[None]:
    """While it is entered, ``adapted`` answers as the merged model will, rounding included.

    In each forward a layer's W is ``cast(W + s B A) - s B A``, and the layer adds its adapter as it always does. Its
    answers differ from the merged model's by the order of float32 sums, if what a layer adds is what is merged. The
    modules that are trained whole are rounded for good, as merging will do.

    Args:
        adapted: Base and adapter, both in float32.
        weights: The name in ``dtypes`` of the weight of each layer with an adapter, by the layer's name.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    with ExitStack() as stack, torch.no_grad():
        for name, module in adapted.get_base_model().named_modules():
            if isinstance(module, LoraLayer):
                for handle in _round_in_forward(module, dtypes[weights[name]]):
                    stack.callback(handle.remove)
            elif isinstance(module, ModulesToSaveWrapper):
                for leaf, parameter in module.modules_to_save[adapted.active_adapter].named_parameters():
                    parameter.copy_(parameter.to(dtypes[f"{name}.{leaf}"]))
        yield


def _round_in_forward(module: Any, dtype: torch.dtype) -> list[Any]:
    kept: list[tuple[Tensor, Tensor | None]] = []

    def before(*_: object) -> None:
        weight, change, magnitude = _weight(module), merging.change(module), merging.magnitude_of(module)
        kept.append((weight.data, None if magnitude is None else magnitude.data))
        merged = _merged(module).to(dtype).float()
        weight.data = merged - change
        if magnitude is not None:  # so that the lengths that the layer gives the rows are those that they have
            magnitude.data = merging.lengths(module, weight.data + change)

    def after(*_: object) -> None:
        magnitude = merging.magnitude_of(module)
        _weight(module).data, lengths = kept.pop()
        if magnitude is not None and lengths is not None:
            magnitude.data = lengths

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _weight(module: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = getattr(module.get_base_layer(), _leaf(module))
    return weight


def _leaf(module: Any) -> str:
    """The name of the weight that a layer adapts; a stack of experts has one of its own."""
    return str(getattr(module, "parameter_name", "weight"))


def _merged(module: Any) -> Tensor:
    """The weight with the adapter in it, in float32."""
    return merging.merged(module, _weight(module).data)


def _untie_where_they_differ(model: PreTrainedModel) -> None:
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None or inputs.weight is outputs.weight:
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def _cast(model: PreTrainedModel, dtypes: Dtypes) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])
