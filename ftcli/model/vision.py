"""Images in a model: its tower on the images of a micro-batch, and the language model's input with that in its places.

The tower runs once for all images of a micro-batch. It is transformers' own, but for those of which nothing is trained
and that the table has other code for; these leave nothing behind for backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.model.attention import is_ours
from ftcli.tables import code_of
from ftcli.tables.images import TABLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Where the batch holds the places of what was seen, (N,) int64 into its (B * S) tokens.
PLACES = "image_places"
#: What a tower's code reads on the host: a copy of it on the device would have to be waited for.
READ_BY_HOST = ("image_grid_thw",)
#: Tensors that image processors make.
_OF_PROCESSORS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")


@dataclass(frozen=True, slots=True)
class Seen:
    """Features of towers for N places: ``features`` (N, H), read in place of the tokens' embeddings; and what is added
    to the output of the first layers, (N, H) each.
    """

    features: Tensor
    added: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenInputs:
    """The language model's input of a micro-batch with images: ``embeds`` (B, S, H), and what is added to the output
    of its first layers, (B, S, H) each, which is zero but in the images' ``places``; ``of_tokens``: what the model
    makes of the ids themselves, by the names of its arguments.
    """

    embeds: Tensor
    added: tuple[Tensor, ...]
    places: Tensor
    seen: Seen
    of_tokens: Mapping[str, Tensor]


class TowerOf(Protocol):
    """The code of a row's ``tower``."""

    def __call__(self, model: Any, given: Mapping[str, Tensor]) -> Seen: ...


def taken_apart(inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A batch's own inputs, and those of its images."""
    names = (PLACES, *_OF_PROCESSORS)
    own = {name: value for name, value in inputs.items() if name not in names}
    return own, {name: inputs[name] for name in names if name in inputs}


def see(base: PreTrainedModel, ids: Tensor, given: Mapping[str, Tensor]) -> SeenInputs:
    """Runs the tower on ``given``, what :func:`taken_apart` found, for tokens ``ids`` (B, S)."""
    model: Any = base.model
    row, trained = TABLE[base.config.model_type], trains_tower(base)
    tower: TowerOf = code_of(row.frozen if row.frozen and not trained and is_ours(base) else row.tower)
    places, embedding = given[PLACES], base.get_input_embeddings()
    with nullcontext() if trained else torch.no_grad():
        seen = tower(model, given)
    # An id of images may lie beyond the vocabulary; what is looked up in its place is not read, but by layers' inputs.
    padding = base.config.get_text_config().pad_token_id or 0
    ids = ids.flatten().index_fill(0, places, padding).view_as(ids)
    embeds, of_tokens = embedding(ids), dict[str, Tensor]()
    if getattr(base.config.get_text_config(), "hidden_size_per_layer_input", None):
        of_tokens["per_layer_inputs"] = model.language_model.get_per_layer_inputs(ids, embeds)
    flat = embeds.reshape(-1, embeds.shape[-1])
    embeds = flat.index_copy(0, places, seen.features.to(flat.dtype)).view_as(embeds)
    zeros = torch.zeros_like(flat) if seen.added else flat
    added = tuple(zeros.index_copy(0, places, each.to(flat.dtype)).view_as(embeds) for each in seen.added)
    return SeenInputs(embeds, added, places, seen, of_tokens)


def trains_tower(model: Any) -> bool:
    """True if something of a model, with adapters or without, is trained beside its language model and head."""
    kind = TABLE.get(getattr(getattr(model, "config", None), "model_type", ""))
    if kind is None:
        return False
    named = ((name.removeprefix("base_model.model."), p) for name, p in model.named_parameters())
    return any(p.requires_grad and kind.part_of(name) in ("projector", "vision") for name, p in named)


def attend_in_tower(base: Any) -> None:
    """Has the tower of a model take SDPA, whatever attention its language model needs: scores that are kept for
    backward would be gigabytes an image.
    """
    for path in TABLE[base.config.model_type].vision:
        base.model.get_submodule(path).set_attn_implementation("sdpa")


def qwen(model: Any, given: Mapping[str, Tensor]) -> Seen:
    """Qwen's: merged patches of all images in one row; Qwen3-VL adds what some layers of the tower see."""
    visual = model.visual
    pixels = given["pixel_values"].to(visual.dtype)
    seen = visual(pixels, grid_thw=given["image_grid_thw"].to(pixels.device), return_dict=True)
    return Seen(seen.pooler_output, tuple(getattr(seen, "deepstack_features", None) or ()))


def masks_both_ways(base: Any, embeds: Tensor, block_ends: Tensor, positions: Tensor | None) -> Any:
    """transformers' masks of rows (B, S, H) in which the tokens of an image see each other in both directions."""
    family = base.config.model_type
    create: Any = import_module(f"transformers.models.{family}.modeling_{family}").create_masks_for_vision_model
    ahead = torch.arange(1, block_ends.shape[1] + 1, device=block_ends.device)
    alone = (block_ends == ahead) & F.pad(block_ends[:, :-1] < ahead[1:], (1, 0), value=True)
    return create(
        config=base.config.get_text_config(),
        inputs_embeds=embeds,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        block_sequence_ids=torch.where(alone, -1, block_ends),
    )


def gemma3(model: Any, given: Mapping[str, Tensor]) -> Seen:
    """Gemma-3's: as many features for each image."""
    pixels = given["pixel_values"].to(model.vision_tower.dtype)
    return Seen(model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1))


def gemma4(model: Any, given: Mapping[str, Tensor]) -> Seen:
    """Gemma-4's: images of several sizes, filled up to a budget of patches; their pooled patches."""
    pixels = given["pixel_values"].to(model.vision_tower.dtype)
    seen = model.get_image_features(pixels, given["image_position_ids"], return_dict=True).pooler_output
    return Seen(seen if isinstance(seen, Tensor) else torch.cat(tuple(seen)))


def mistral3(model: Any, given: Mapping[str, Tensor]) -> Seen:
    """Mistral-3's: images of several sizes, filled up, and their merged patches."""
    pixels = given["pixel_values"].to(model.vision_tower.dtype)
    layer = model.config.vision_feature_layer
    seen = model.get_image_features(pixels, given["image_sizes"], vision_feature_layer=layer, return_dict=True)
    return Seen(torch.cat(tuple(seen.pooler_output)))


def example_of_qwen(config: Any, images: int, side: int) -> dict[str, Tensor]:
    """Square images of ``side`` x ``side`` patches, black, as Qwen's processor gives them."""
    vision = config.vision_config
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, side, side]] * images)
    return {"pixel_values": torch.zeros(images * side**2, pixels), "image_grid_thw": grid}


def example_of_gemma3(config: Any, images: int, side: int) -> dict[str, Tensor]:
    """Inputs as Gemma-3's processor gives them."""
    edge = side * config.vision_config.patch_size
    return {"pixel_values": torch.zeros(images, 3, edge, edge)}


def example_of_gemma4(config: Any, images: int, side: int) -> dict[str, Tensor]:
    """Inputs as Gemma-4's processor gives them."""
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    pixels = torch.zeros(images, side**2, 3 * config.vision_config.patch_size**2)
    return {"pixel_values": pixels, "image_position_ids": place.expand(images, -1, -1)}


def example_of_mistral3(config: Any, images: int, side: int) -> dict[str, Tensor]:
    """Inputs as Mistral-3's processor gives them."""
    edge = side * config.vision_config.patch_size
    sizes = torch.tensor([[edge, edge]] * images)
    return {"pixel_values": torch.zeros(images, 3, edge, edge), "image_sizes": sizes}
