"""Adds an adapter to its base model: ``W' = cast(float32(W) + s · B A)``, one rounding, into the dtype W is stored in.

s is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA. A is (r, in), B is (out, r), W is (out, in); A and B are
float32. A stack of experts has a product for each of them. PEFT's own merge rounds twice: it rounds s B A to bfloat16
before it adds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
            layer, name = module.get_base_layer(), getattr(module, "parameter_name", "weight")
            weight = getattr(layer, name)
            delta = module.get_delta_weight(adapted.active_adapter)
            # A new parameter, not an addition in place: the old one may be tied to the embeddings.
            setattr(layer, name, torch.nn.Parameter(weight + delta.to(weight.dtype), requires_grad=False))
    model: PreTrainedModel = adapted.unload()
    _untie_where_they_differ(model)
    _cast(model, dtypes)
    return model


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
