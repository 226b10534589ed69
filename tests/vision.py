"""Image processors of small models, and files of images."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image


def processor_of(model_type: str, config: Mapping[str, Any]) -> Any:
    """transformers' image processor of a model of this config, on Pillow."""
    vision = config["vision_config"]
    if model_type == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        side = vision["image_size"]
        return Gemma3ImageProcessorPil(size={"height": side, "width": side})
    if model_type == "gemma4":
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        patch, pooled = vision["patch_size"], vision["pooling_kernel_size"]
        return Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=pooled, max_soft_tokens=70)
    if model_type == "mistral3":
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        side = vision["patch_size"] * config["spatial_merge_size"]
        return PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size={"height": side, "width": side})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = vision["patch_size"]
    return Qwen2VLImageProcessorPil(
        patch_size=side,
        temporal_patch_size=vision["temporal_patch_size"],
        merge_size=vision["spatial_merge_size"],
        size={"shortest_edge": (2 * side) ** 2, "longest_edge": 12 * (2 * side) ** 2},
    )


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a file of the image."""
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()
