"""The tower of Qwen3-VL and Qwen3.5 where nothing of it is trained, on transformers' weights and modules.

transformers turns queries and keys by nine passes in float32, takes attention image by image, and asks the device for
the images' sizes in every layer: on an H200 that is nearly half of a tower's time. Here the rotation is one kernel,
images of one size are attended to at once, and their sizes are read once. A patch is multiplied as the row it comes as,
instead of by a convolution whose windows do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from ftkernels.device import without_autocast
from ftkernels.rope import apply_rope
from torch import Tensor

from ftcli.model.vision import Seen, qwen

#: Frames of an image, and their rows and columns of patches.
Grid = tuple[int, int, int]


def qwen3(model: Any, given: Mapping[str, Tensor]) -> Seen:
    """What :func:`ftcli.model.vision.qwen` gives, without what backward would need.

    Args:
        model: transformers' model, without its head.
        given: ``pixel_values`` (N, P), the patches of all images one after the other, and ``image_grid_thw``
            (images, 3), the frames, rows and columns of patches that each has.
    """
    visual, weight = model.visual, model.visual.patch_embed.proj.weight
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type):
        return qwen(model, given)  # which computes its products in half precision
    grids: list[Grid] = [(frames, rows, columns) for frames, rows, columns in given["image_grid_thw"].tolist()]
    with without_autocast(weight):
        hidden = F.linear(given["pixel_values"].to(weight.dtype), weight.flatten(1), visual.patch_embed.proj.bias)
        places = torch.cat([_places(visual, grid, weight.device) for grid in grids])
        hidden = hidden + _position_embedding(visual, places, grids).to(hidden.dtype)
        cos, sin = _rotation(visual, places)
        added = []
        for number, block in enumerate(visual.blocks):
            hidden = hidden + _attention(block.attn, block.norm1(hidden), cos, sin, grids)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if number in getattr(visual, "deepstack_visual_indexes", ()):
                merge = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)]
                added.append(merge(hidden))
        return Seen(visual.merger(hidden), tuple(added))


def _places(visual: Any, grid: Grid, device: torch.device) -> Tensor:
    """Row and column of each patch of an image, (frames * rows * columns, 2): those that are merged come together."""
    frames, rows, columns = grid
    side = visual.spatial_merge_size
    place = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
    place = place.view(rows // side, side, columns // side, side, 2).transpose(1, 2)
    return place.reshape(rows * columns, 2).repeat(frames, 1)


def _position_embedding(visual: Any, places: Tensor, grids: Sequence[Grid]) -> Tensor:
    """The learned square of embeddings, stretched to each image's size by linear interpolation: (N, H) float32."""
    side = int(visual.num_grid_per_side)
    sizes = torch.tensor([grid[1:] for grid in grids], device=places.device)
    counts = torch.tensor([_patches(grid) for grid in grids], device=places.device)
    last = (sizes - 1).clamp(min=1).repeat_interleave(counts, dim=0, output_size=len(places))
    at = places.float() * (side - 1) / last
    low = at.floor()
    share, low = at - low, low.long()
    high = (low + 1).clamp(max=side - 1)
    found = torch.zeros(len(places), visual.pos_embed.embedding_dim, device=places.device)
    for row, of_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
        for column, of_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
            found += visual.pos_embed(row * side + column) * (of_row * of_column)[:, None]
    return found


def _rotation(visual: Any, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (1, N, D) float32: a quarter of a head turns by the row, a quarter by the column, and again."""
    angles = (places[..., None].float() * visual.rotary_pos_emb.inv_freq.float()).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)[None]
    return angles.cos(), angles.sin()


def _attention(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Attention of the patches of a frame to each other, (N, H), and its output projection."""
    query, key, value = layer.qkv(hidden).view(1, len(hidden), 3, layer.num_heads, -1).transpose(1, 3).unbind(2)
    query, key = apply_rope(query, key, cos, sin)
    found, start = torch.empty_like(hidden), 0
    for count, patches in _runs(grids):
        part = slice(start, start := start + count * patches)
        q, k, v = (each[0, :, part].unflatten(1, (count, patches)).transpose(0, 1) for each in (query, key, value))
        seen = F.scaled_dot_product_attention(q, k, v, scale=layer.scaling)
        found[part].view(count, patches, layer.num_heads, -1).copy_(seen.transpose(1, 2))
    projected: Tensor = layer.proj(found)
    return projected


def _runs(grids: Sequence[Grid]) -> Iterator[tuple[int, int]]:
    """How many frames of one size follow each other, and their patches."""
    for patches, some in groupby((rows * columns for frames, rows, columns in grids for _ in range(frames))):
        yield len(list(some)), patches


def _patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]
