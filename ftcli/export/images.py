"""Compares a model's logits behind an image before and after an export, and copies its image processor's files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.config.model import ModelConfig
from ftcli.data.pixels import as_read
from ftcli.data.tokens import TokenizedRow
from ftcli.data.vision import Vision, load_vision
from ftcli.export.clean.request import IMAGE, SEEN, ReloadAnswer
from ftcli.export.verify import compare_logits, logits_problems, rendered_ids
from ftcli.model.tokenizer import source_of
from ftcli.rows.row import ImageSource, Row
from ftcli.tables import code_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

#: What lies beside the weights of a model that takes images or sound.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SIDES = (96, 64)


def copy_processors(base: ModelConfig, folder: Path, *, offline: bool) -> None:
    """Copies how a multimodal base prepares images and sound, without which its other parts are of no use."""
    from transformers.utils.hub import cached_file

    source = source_of(base.name_or_path)
    if base.init != "pretrained" and not Path(source).is_dir():
        return
    for name in _PROCESSORS:
        found = cached_file(
            source,
            name,
            revision=base.revision,
            local_files_only=offline,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, folder / name)


def image_probe(
    base: ModelConfig, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, offline: bool
) -> dict[str, Tensor]:
    """A row of text with an image of noise in it, as transformers' model takes it; empty for models that see nothing,
    or whose image processor is not at hand.
    """
    vision = load_vision(base, config.to_dict(), tokenizer, None, offline=offline)
    if isinstance(vision, str) or vision.token_id != getattr(config, "image_token_id", None):
        return {}
    from PIL import Image

    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (*_SIDES[::-1], 3), generator=chance, dtype=torch.uint8)
    image = Image.fromarray(noise.numpy())
    row = Row("a probe", 1, {})
    ids = rendered_ids(tokenizer, vision.written(f"Name it:{vision.kind.placeholder}"))
    tokens = TokenizedRow(row, ids, ids)
    measured = vision.looked_at(ImageSource(content=png(image)), row)
    made = torch.tensor([vision.expanded(tokens, [measured]).input_ids])
    marks = vision.kind.marks
    given = {"input_ids": made, **as_read(vision.of_pixels([image]), torch.float32)}
    return given if marks is None else {**given, marks: (made == vision.token_id).int()}


def picture_probe(vision: Vision, config: PretrainedConfig) -> Any:
    """An image of noise whose size the processor leaves as it is: programs scale images each in a way of their own."""
    from PIL import Image

    seen: Any = getattr(config, "vision_config", None)
    merged = getattr(seen, "spatial_merge_size", None) or getattr(seen, "pooling_kernel_size", None)
    side = int(seen.patch_size) * int(merged or getattr(config, "spatial_merge_size", None) or 1)
    if vision.kind.both_ways == "all":
        size = seen.image_size, seen.image_size
    else:
        rows, columns = code_of(vision.kind.grid)(vision.processor, 448, 320, config.to_dict())
        size = columns * side, rows * side
    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (size[1], size[0], 3), generator=chance, dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def png(image: Any) -> bytes:
    """The bytes of a file of the image."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@torch.no_grad()
def seen_logits(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    """Float32 logits (tokens, vocabulary) of :func:`image_probe`'s row."""
    found: Tensor = model(**given, use_cache=False).logits[0].float()
    return found


def sent_with(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The row as a request sends it along."""
    return {f"{IMAGE}{name}": tensor for name, tensor in given.items()}


def check_seen(answer: ReloadAnswer, wanted: Tensor | None, allowed: float) -> tuple[list[str], dict[str, float]]:
    """Problems with what the written model makes of the row, and what the record says of it."""
    if wanted is None:
        return [], {}
    compared = compare_logits(answer.tensors[SEEN], wanted, allowed)
    problems = [f"with an image, {problem}" for problem in logits_problems(compared, allowed)]
    return problems, {"image_relative_error": compared.relative_error}
