"""New tokens: rows of embedding and head that no token had, or that are added. Under LoRA these rows alone are trained.

PEFT wraps both modules (``trainable_token_indices``), and names, saves and loads the rows. Its own forward pass copies
the whole matrix with the rows in it, and the backward pass makes the whole gradient, gigabytes for a vocabulary of
today. Here the rows are written into the frozen matrix itself, and it is used as it is. Gradients
are taken of the rows alone: the embedding's by a term that adds zero to its output, the head's by the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.linear_cross_entropy import TrainedRows
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def row_indices(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]]:
    """PEFT's ``trainable_token_indices``: the rows ``ids`` of the embedding, and of the head where that is another."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(module)]: list(ids) for module in ends}


@torch.no_grad()
def draw_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Writes the mean of all rows before the first of ``ids`` there, in embedding and head, as new tokens begin in
    transformers but for its noise. Adds the rows that are not there.
    """
    _grow(model, max(ids) + 1)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            weight: Tensor = module.weight
            weight[list(ids)] = weight[: min(ids)].mean(0, dtype=torch.float32).to(weight.dtype)


def _grow(model: PreTrainedModel, size: int) -> None:
    """Gives embedding and head ``size`` rows, of zeros, where they have less."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for module in (embedding, head):
        more = 0 if module is None else size - len(module.weight)
        if more <= 0:
            continue
        for name in ("weight", "bias"):
            old = getattr(module, name, None)
            if old is not None:
                added = old.new_zeros((more, *old.shape[1:]))
                setattr(module, name, nn.Parameter(torch.cat([old, added]), requires_grad=old.requires_grad))
        setattr(module, "out_features" if hasattr(module, "out_features") else "num_embeddings", size)
    if tied and head is not None:
        head.weight = embedding.weight
    for part in (model.config, model.config.get_text_config(), *model.modules()):  # some keep a copy of the number
        if isinstance(known := getattr(part, "vocab_size", None), int) and known < size:
            part.vocab_size = size


def use_rows(adapted: PeftModel, dtype: torch.dtype | None = None) -> None:
    """Has the rows that PEFT trains or has loaded lie in the matrices themselves.

    Args:
        dtype: Of the rows, where they are trained.
    """
    from peft.utils.other import TrainableTokensWrapper

    layers: list[Any] = [one.token_adapter for one in adapted.modules() if isinstance(one, TrainableTokensWrapper)]

    def place(_layer: Any, _given: object) -> None:  # those of the head as well, whose weight the loss reads itself
        for each in layers:
            _place(each)

    for layer in layers:
        if dtype is not None and layer.tied_adapter is None:
            rows = _rows_of(layer)
            rows.data = rows.data.to(dtype)
        layer.register_forward_pre_hook(place)
        if isinstance(layer.get_base_layer(), nn.Embedding):
            layer.register_forward_hook(_with_gradient)


def with_rows(module: Any) -> tuple[Any, TrainedRows | None]:
    """The module itself, with its rows in it, and what of it is trained; as it is where none of its rows is."""
    layer = getattr(module, "token_adapter", None)
    if layer is None:
        return module, None
    _place(layer)
    return layer.get_base_layer(), None if layer.disable_adapters else TrainedRows(_rows_of(layer), _ids_of(layer))


@torch.no_grad()
def _place(layer: Any) -> None:
    """Writes the rows into the matrix, or the base's where adapters are switched off.

    Rows that are trained are written each time: kernels of optimizers change them without telling torch.
    """
    weight, off, rows = layer.get_base_layer().weight, layer.disable_adapters, _rows_of(layer)
    if getattr(layer, _OFF, None) is off and (off or not rows.requires_grad):
        return
    values = layer.trainable_tokens_original[layer.active_adapters[0]] if off else rows
    # By `data`: what autograd holds of the matrix stays valid, since rows change between steps alone.
    weight.data.index_copy_(0, _ids_of(layer), values.to(weight.dtype))
    layer.merged_adapters = [] if off else [layer.active_adapters[0]]  # so that PEFT takes the matrix as it is
    setattr(layer, _OFF, off)


#: Attributes of PEFT's layer: whether the base's own rows lie in the matrix, and the ids of the rows.
_OFF, _IDS = "_ftcli_rows_off", "_ftcli_ids"


def _rows_of(layer: Any) -> Tensor:
    found: Tensor = layer.trainable_tokens_delta[layer.active_adapters[0]]
    return found


def _ids_of(layer: Any) -> Tensor:
    """(R,) int64 beside the matrix, made once: a copy to the device in each forward pass would wait for it."""
    device = layer.get_base_layer().weight.device
    found: Tensor | None = getattr(layer, _IDS, None)
    if found is None or found.device != device:
        found = torch.tensor(layer.token_indices[layer.active_adapters[0]], dtype=torch.long, device=device)
        object.__setattr__(layer, _IDS, found)
    return found


def _with_gradient(layer: Any, given: tuple[Any, ...], output: Tensor) -> Tensor:
    """The embedding's output (..., H), from which the rows of the tokens in ``given`` get their gradients."""
    rows = _rows_of(layer)
    if layer.disable_adapters or not torch.is_grad_enabled() or not rows.requires_grad:
        return output
    found = given[0].unsqueeze(-1) == _ids_of(layer)  # (..., R)
    which = found.to(torch.int64).argmax(-1)
    there = rows.index_select(0, which.reshape(-1)).view(*which.shape, -1)
    scale = getattr(layer.get_base_layer(), "embed_scale", None)
    there = there if scale is None else there * scale
    nothing = torch.where(found.any(-1, keepdim=True), there - there.detach(), torch.zeros((), device=there.device))
    return output + nothing.to(output.dtype)
