"""Images on their way to a model that sees: the tokens that stand for each, their positions, and their pixels.

How many tokens an image has follows from its width and height. So rows are measured, cut and packed without a pixel in
memory; these are read when a step is near.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftcli.assets import asset, bundled
from ftcli.config.model import ModelConfig
from ftcli.data.tokens import Ints, RowImage, TokenizedRow, content_of, shown_digest
from ftcli.errors import FtcliError, Origin, first_line
from ftcli.labels import IGNORE_INDEX
from ftcli.plain import JsonMap
from ftcli.rows.pictures import look_at, pixels_of, place_of
from ftcli.rows.row import ImageSource, Misfit, Row, data_error
from ftcli.tables import code_of
from ftcli.tables.images import TABLE, ImageTokens

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

#: What image processors tell of images beside what models read.
_COUNTS = ("num_crops", "num_soft_tokens_per_image")
#: What an image processor makes of images, by name.
Pixels = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Vision:
    """The image processor of a model, and how its images stand among tokens. Can be sent to another process.

    Attributes:
        token_id, ends: Ids of :attr:`ftcli.tables.images.ImageTokens.token` and ``ends``.
    """

    kind: ImageTokens
    processor: Any
    token_id: int
    ends: tuple[int, ...]
    config: JsonMap

    @property
    def identity(self) -> str:
        """Everything that the tokens of an image depend on."""
        text = json.dumps([repr(self.kind), self.processor.to_dict()], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def both_ways(self) -> bool:
        """True if tokens of an image see each other in both directions in some layers."""
        asked = (self.config.get("text_config") or {}).get("use_bidirectional_attention")
        return self.kind.both_ways == "all" or (self.kind.both_ways == "windows" and asked == "vision")

    def written(self, text: str) -> str:
        """A rendered conversation as it is tokenized."""
        kind = self.kind
        return text if kind.written is None else text.replace(kind.placeholder, kind.written)

    def looked_at(self, source: ImageSource, row: Row) -> RowImage:
        """The image, measured. Raises Misfit for one that cannot be trained on."""
        found = look_at(source, row.folder)
        try:
            grid: tuple[int, int] = code_of(self.kind.grid)(self.processor, found.width, found.height, self.config)
        except ValueError as error:
            raise Misfit(f"an image of {found.width} x {found.height} pixels: {error}") from error
        place, digest = place_of(source, row.folder), ""
        if place is not None:
            try:
                digest = shown_digest(place.read_bytes())
            except OSError as error:
                raise Misfit(f"image {source.path!r} cannot be read: {error}") from error
        return RowImage(
            path=None if place is None else str(place),
            content=source.content,
            width=found.width,
            height=found.height,
            grid=grid,
            bytes=found.bytes,
            done=found.done,
            digest=digest,
        )

    def ids_of(self, image: RowImage) -> list[int]:
        """The tokens of one image."""
        rows, columns = image.grid
        if not self.ends:
            return [self.token_id] * (rows * columns)
        line = [self.token_id] * columns
        return [*[*line, self.ends[0]] * (rows - 1), *line, self.ends[1]]

    def expanded(self, tokens: TokenizedRow, images: Sequence[RowImage]) -> TokenizedRow:
        """The row with the tokens of each image in its place, none of which bears loss.

        Raises FtcliError FT415 where the text has another number of places than the row has images.
        """
        places = [at for at, one in enumerate(tokens.input_ids) if one == self.token_id]
        if len(places) != len(images):
            raise data_error(
                "FT415",
                f"the row's {len(images)} images have {len(places)} places ({self.kind.token}) in the rendered text",
                tokens.row.origin,
                "a chat template may show no image in a system turn: move it to a user's; and text must not hold "
                f"{self.kind.token} itself",
            )
        ids, labels, start = list[int](), list[int](), 0
        for at, image in zip(places, images, strict=True):
            own = self.ids_of(image)
            ids += [*tokens.input_ids[start:at], *own]
            labels += [*tokens.labels[start:at], *[IGNORE_INDEX] * len(own)]
            start = at + 1
        ids += tokens.input_ids[start:]
        labels += tokens.labels[start:]
        return replace(tokens, input_ids=ids, labels=labels, images=tuple(images))

    def spans(self, tokens: TokenizedRow) -> Iterator[tuple[int, int, RowImage]]:
        """Where the tokens of each image of a row begin and end."""
        at = 0
        for image in tokens.images:
            begin = tokens.input_ids.index(self.token_id, at)
            at = begin + len(self.ids_of(image))
            yield begin, at, image

    def cut(self, tokens: TokenizedRow, limit: int) -> TokenizedRow:
        """The row's first tokens, ``limit`` at most and none of an image that does not fit whole."""
        kept = []
        for begin, end, image in self.spans(tokens):
            if end > limit:
                limit = min(limit, begin)
                break
            kept.append(image)
        return replace(tokens, input_ids=tokens.input_ids[:limit], labels=tokens.labels[:limit], images=tuple(kept))

    def seen_at(self, tokens: TokenizedRow) -> Ints:
        """The places of a row's tokens that stand for what the tower saw, in order."""
        ids, found = np.asarray(tokens.input_ids), np.zeros(len(tokens.input_ids), dtype=bool)
        for begin, end, _ in self.spans(tokens):  # an answer may hold the token itself
            found[begin:end] = ids[begin:end] == self.token_id
        return np.flatnonzero(found)

    def positions(self, tokens: TokenizedRow) -> Ints:
        """(3, S): positions of time, row and column of a row's tokens; text has three alike, and goes on behind the
        larger side of an image.
        """
        found = np.empty((3, len(tokens.input_ids)), dtype=np.int64)
        at = position = 0
        for begin, end, image in self.spans(tokens):
            found[:, at:begin] = np.arange(position, position + begin - at)
            position += begin - at
            rows, columns = image.grid
            found[0, begin:end] = position
            found[1, begin:end] = position + np.repeat(np.arange(rows), columns)
            found[2, begin:end] = position + np.tile(np.arange(columns), rows)
            at, position = end, position + max(rows, columns)
        found[:, at:] = np.arange(position, position + found.shape[1] - at)
        return found

    def block_ends(self, tokens: TokenizedRow) -> Ints:
        """(S,): for each token the end of the tokens that it sees ahead: of its image, or itself."""
        found = np.arange(1, len(tokens.input_ids) + 1)
        for begin, end, _ in self.spans(tokens):
            found[begin:end] = end
        return found

    def processed(self, image: RowImage, origin: Origin) -> Pixels:
        """What the image processor makes of one image.

        Raises FtcliError FT416 (exit 4) for a file that is not what it was when it was measured.
        """
        try:
            held = content_of(image)
            content = held.read_bytes() if isinstance(held, Path) else held
            found = pixels_of(content)
        except (Misfit, OSError) as error:
            raise _changed(image, origin, first_line(error)) from error
        if found.size != (image.width, image.height):
            raise _changed(image, origin, f"it was {image.width} x {image.height} pixels, and is {found.size}")
        if image.digest and shown_digest(content) != image.digest:
            raise _changed(image, origin, "its content is another")
        return self.of_pixels([found])

    def of_pixels(self, images: Sequence[Image]) -> Pixels:
        """What the image processor makes of images in RGB."""
        made = self.processor(images=list(images), return_tensors="np")
        return {name: np.asarray(value) for name, value in made.items() if name not in _COUNTS}


def _changed(image: RowImage, origin: Origin, why: str) -> FtcliError:
    what = image.path or "an image in the row"
    help = "put the file back; or mend it, or remove the row, and begin anew: another file is other data"
    return data_error("FT416", f"{what} is not what it was taken for when the row was tokenized: {why}", origin, help)


def merged_patches(processor: Any, width: int, height: int, config: JsonMap) -> tuple[int, int]:
    """Qwen's: patches after resizing, several of which are one token. Raises ValueError for a side 200 times longer."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size, factor = processor.size, processor.patch_size * processor.merge_size
    high, wide = smart_resize(height, width, factor, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
    return high // factor, wide // factor


def as_many_as_said(processor: Any, width: int, height: int, config: JsonMap) -> tuple[int, int]:
    """Gemma-3's: every image is as many tokens as config.json says."""
    return 1, int(config.get("mm_tokens_per_image", 256))


def pixtral_patches(processor: Any, width: int, height: int, config: JsonMap) -> tuple[int, int]:
    """Mistral-3's: patches of an image no longer than the processor's longest edge; several are one token."""
    side = _merged_side(config)
    longest = int(processor.size["longest_edge"])
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return (height - 1) // side + 1, (width - 1) // side + 1


def _merged_side(config: JsonMap) -> int:
    """Pixels of the side of Mistral-3's merged patches."""
    vision = config.get("vision_config") or {}
    return int(vision.get("patch_size", 14)) * int(config.get("spatial_merge_size", 2))


def merges_patches(processor: Any, config: JsonMap) -> None:
    """Has Pixtral's image processor make whole merged patches, as Mistral-3's processor asks of it in each call."""
    processor.patch_size = {"height": _merged_side(config), "width": _merged_side(config)}


def takes_no_crops(processor: Any, config: JsonMap) -> None:
    """Has Gemma-3's image processor make one image of each, as its processor does unless it is asked in a call."""
    processor.do_pan_and_scan = False


def pooled_patches(processor: Any, width: int, height: int, config: JsonMap) -> tuple[int, int]:
    """Gemma-4's: as many patches as fit a budget, several of which are one token. Raises ValueError for a thin one."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    patch, pooled = processor.patch_size, processor.pooling_kernel_size
    most = processor.max_soft_tokens * pooled**2
    high, wide = get_aspect_ratio_preserving_size(height, width, patch, most, pooled)
    return high // (patch * pooled), wide // (patch * pooled)


def named(kind: ImageTokens, config: JsonMap, tokenizer: PreTrainedTokenizerBase) -> ImageTokens:
    """The row with the texts of the tokens that config.json names."""
    if not kind.by_ids:
        return kind
    before, token, behind = (str(tokenizer.convert_ids_to_tokens(int(config.get(key) or 0))) for key in kind.by_ids)
    return replace(kind, placeholder=token, token=token, written=f"{before}{token}{behind}")


def load_vision(
    model: ModelConfig,
    config: JsonMap,
    tokenizer: PreTrainedTokenizerBase,
    max_pixels: int | None,
    *,
    offline: bool,
) -> Vision | str:
    """What a model sees images with; or, as a clause, why none can be trained on.

    ``config`` is its config.json.
    """
    kind = TABLE.get(str(config.get("model_type")))
    if kind is None:
        return f"models of type {config.get('model_type')} are trained on text alone"
    kind = named(kind, config, tokenizer)
    names = (kind.token, *(kind.ends or ()))
    ids = [tokenizer.get_added_vocab().get(name) for name in names]
    if None in ids:
        return f"the tokenizer has no token {names[ids.index(None)]}"
    try:
        processor = _processor(model, offline=offline)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        return f"its image processor cannot be loaded: {first_line(error)[:200]}"
    if max_pixels is not None:
        if kind.most_pixels is None:
            return f"models of type {config.get('model_type')} have no data.image_max_pixels to set"
        size = dict(processor.size)
        size["shortest_edge"] = min(size["shortest_edge"], max_pixels)
        processor.size = {**size, kind.most_pixels: max_pixels}
    if kind.settles is not None:
        code_of(kind.settles)(processor, config)
    first, *ends = (int(one) for one in ids if one is not None)
    return Vision(kind, processor, first, tuple(ends), config)


def _processor(model: ModelConfig, *, offline: bool) -> Any:
    """transformers' image processor of a model, on Pillow: the same pixels wherever it runs."""
    from transformers import AutoImageProcessor

    source = bundled(model.name_or_path, "models") or model.name_or_path
    own = asset("configs", model.name_or_path.replace("/", "--"))
    if model.init == "random" and (own / "preprocessor_config.json").is_file():
        source = own
    return AutoImageProcessor.from_pretrained(
        str(source), revision=model.revision, local_files_only=offline, trust_remote_code=False, backend="pil"
    )
