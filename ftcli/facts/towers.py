"""Counts a multimodal model's parameters beside its language model, from config.json without torch.

Tests compare the numbers with models that transformers builds on the meta device.
"""

from __future__ import annotations

from ftcli.facts.language import Config, multimodal_of, text_values
from ftcli.plain import JsonMap
from ftcli.tables import code_of


def other_parameters(config: Config) -> int | None:
    """Parameters of towers and of what projects their output; 0 for a model of text.

    None where nothing is known of its towers. Raises ValueError: a value is not a positive whole number.
    """
    row = multimodal_of(config)
    if row is None:
        return 0
    if row.towers is None:
        return None
    return int(code_of(row.towers)(VisionConfig(config.get("vision_config") or {}), config))


class VisionConfig:
    """A vision_config, whose values are whole numbers; what it leaves out is what transformers takes."""

    def __init__(self, values: JsonMap) -> None:
        self.values = values

    def __call__(self, key: str, default: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"vision_config's {key} is {value!r}, not a positive whole number")
        return value


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def siglip(vision: VisionConfig, config: Config) -> int:
    """Gemma-3: SigLIP, and a projection to the language model's width."""
    hidden, inner = vision("hidden_size", 768), vision("intermediate_size", 3072)
    patch, side = vision("patch_size", 16), vision("image_size", 224)
    mlp = _linear(hidden, inner) + _linear(inner, hidden)
    layer = 4 * hidden + 4 * _linear(hidden, hidden) + mlp
    embedding = _linear(vision("num_channels", 3) * patch**2, hidden) + (side // patch) ** 2 * hidden
    pooling = hidden + 4 * _linear(hidden, hidden) + 2 * hidden + mlp
    head = pooling if vision.values.get("vision_use_head", True) else 0
    projection = hidden * text_values(config)["hidden_size"] + hidden
    return int(embedding + vision("num_hidden_layers", 12) * layer + 2 * hidden + head + projection)


def pixtral(vision: VisionConfig, config: Config) -> int:
    """Mistral-3: Pixtral's tower, a merger of patches and two linear layers."""
    hidden, inner = vision("hidden_size", 1024), vision("intermediate_size", 4096)
    layer = 2 * hidden + 4 * hidden**2 + 3 * hidden * inner
    tower = vision("num_channels", 3) * vision("patch_size", 14) ** 2 * hidden + hidden
    tower += vision("num_hidden_layers", 24) * layer
    width, bias = int(text_values(config)["hidden_size"]), bool(config.get("multimodal_projector_bias", False))
    taken = config.get("vision_feature_layer", -1)
    features = hidden * (len(taken) if isinstance(taken, list) else 1)
    merged = hidden + hidden * int(config.get("spatial_merge_size", 2)) ** 2 * hidden
    return tower + merged + _linear(features, width, bias=bias) + _linear(width, width, bias=bias)


def _patches(vision: VisionConfig, width: int, *, bias: bool, patch: int) -> int:
    pixels = vision("in_channels", 3) * vision("temporal_patch_size", 2) * vision("patch_size", patch) ** 2
    return _linear(pixels, width, bias=bias)


def _merger(vision: VisionConfig, width: int, out: int, norm: int) -> int:
    merged = width * vision("spatial_merge_size", 2) ** 2
    return norm + _linear(merged, merged) + _linear(merged, out)


def qwen2(vision: VisionConfig, config: Config) -> int:
    width = vision("embed_dim", 1280)
    inner = width * vision("mlp_ratio", 4)
    block = (
        4 * width + _linear(width, 3 * width) + _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    )
    patches = _patches(vision, width, bias=False, patch=14)
    return patches + vision("depth", 32) * block + _merger(vision, width, vision("hidden_size", 3584), 2 * width)


def qwen2_5(vision: VisionConfig, config: Config) -> int:
    width, inner = vision("hidden_size", 3584), vision("intermediate_size", 3420)
    mlp = 2 * _linear(width, inner) + _linear(inner, width)
    block = 2 * width + _linear(width, 3 * width) + _linear(width, width) + mlp
    patches = _patches(vision, width, bias=False, patch=14)
    return patches + vision("depth", 32) * block + _merger(vision, width, vision("out_hidden_size", 3584), width)


def qwen3(vision: VisionConfig, config: Config) -> int:
    """Qwen3-VL: as Qwen3.5's, and mergers of what some of its layers give."""
    width, out = vision("hidden_size", 1152), vision("out_hidden_size", 3584)
    taken = vision.values.get("deepstack_visual_indexes", (8, 16, 24))
    deep = _merger(vision, width, out, 2 * width * vision("spatial_merge_size", 2) ** 2)
    return qwen3_5(vision, config) + len(taken) * deep


def qwen3_5(vision: VisionConfig, config: Config) -> int:
    width, inner, out = vision("hidden_size", 1152), vision("intermediate_size", 4304), vision("out_hidden_size", 3584)
    block = (
        4 * width + _linear(width, 3 * width) + _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    )
    tower = _patches(vision, width, bias=True, patch=16) + vision("num_position_embeddings", 2304) * width
    return tower + vision("depth", 27) * block + _merger(vision, width, out, 2 * width)


def muse_glimmer(vision: VisionConfig, config: Config) -> int:
    width, inner = vision("hidden_size", 1536), vision("intermediate_size", 8960)
    layer = 4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    patches = _linear(vision("patch_temporal", 2) * 3 * vision("patch_size", 14) ** 2, width, bias=False)
    tower = patches + vision("pos_emb_height", 32) * vision("pos_emb_width", 32) * width + 4 * width
    outer = VisionConfig(config)
    projected = outer("projector_hidden_size", 4096)
    projector = _linear(outer("out_hidden_size", 6144), projected, bias=False) + projected**2
    return (
        tower
        + vision("num_hidden_layers", 50) * layer
        + projector
        + projected * int(text_values(config)["hidden_size"])
    )


def gemma4(vision: VisionConfig, config: Config) -> int:
    """Gemma-4: an encoder of patches, one of sound, and a projection of each to the language model's width."""
    width, total = int(text_values(config)["hidden_size"]), 0
    if config.get("vision_config") is not None:
        hidden, inner = vision("hidden_size", 768), vision("intermediate_size", 3072)
        head, heads = vision("head_dim", 64), vision("num_attention_heads", 12)
        attention = 2 * hidden * head * (heads + vision("num_key_value_heads", 12)) + 2 * head
        patches = 3 * vision("patch_size", 16) ** 2 + 2 * vision("position_embedding_size", 10 * 1024)
        layer = 4 * hidden + attention + 3 * hidden * inner
        total += patches * hidden + vision("num_hidden_layers", 16) * layer + hidden * width
    if config.get("audio_config") is not None:
        sound = VisionConfig(config["audio_config"])
        out = sound("output_proj_dims", 1536)
        total += _conformer(sound) + _linear(sound("hidden_size", 1024), out) + out * width
    return total


def _conformer(sound: VisionConfig) -> int:
    """Gemma-4's encoder of sound up to its last layer: filters, and layers of two MLPs, attention and a filter."""
    hidden = sound("hidden_size", 1024)
    channels = sound.values.get("subsampling_conv_channels") or (128, 32)
    first, second = (int(each) for each in channels)
    filters = 9 * first + first + 9 * first * second + second + first // 4 * second * hidden
    mlp = 8 * hidden**2 + 2 * hidden
    attention = 5 * hidden**2 + hidden // sound("num_attention_heads", 8)
    light = 3 * hidden**2 + hidden * sound("conv_kernel_size", 5) + 2 * hidden
    return filters + sound("num_hidden_layers", 12) * (2 * mlp + attention + light + 3 * hidden)


def gemma4_unified(vision: VisionConfig, config: Config) -> int:
    """Gemma-4 12B: patches and sound are projected without an encoder."""
    width, total = int(text_values(config)["hidden_size"]), 0
    if config.get("vision_config") is not None:
        inner, out = vision("mm_embed_dim", 3840), vision("output_proj_dims", 3840)
        pixels = 3 * (vision("patch_size", 16) * vision("pooling_kernel_size", 3)) ** 2
        total += 2 * pixels + _linear(pixels, inner) + 4 * inner + out * width
        total += 2 * vision("mm_posemb_size", 1120) * inner
    if config.get("audio_config") is not None:
        total += VisionConfig(config["audio_config"])("audio_embed_dim", 640) * width
    return total
