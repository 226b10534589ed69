"""Models that see: how an image stands in their text and among their tokens, and the code that knows their towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How images come to the models of one type.

    Attributes:
        placeholder: What chat templates write for an image.
        token: The token at whose places the language model reads what the tower saw.
        grid: Code: a function of an image processor, a width and a height, with what config.json says, that gives the
            rows and columns of tokens that an image has.
        tower: Code: a function of a model and the tensors of the image processor that gives what each layer of the
            language model reads of all images (:class:`ftcli.model.vision.Seen`).
        settles: Code: a function of an image processor and config.json that sets what transformers' processor of the
            family sets in each call; None: nothing.
        written: What stands in the text for ``placeholder`` before it is tokenized, with ``token`` in it once; None:
            the placeholder itself.
        ends: Tokens behind each row of an image but the last, and behind that; they are text to the model.
        marks: transformers' name of the argument that tells tokens of images from others, in generation; None: none is
            needed.
        three_rows: Positions are three numbers, of time, row and column; text goes on behind the larger side.
        both_ways: The layers in which tokens of an image see each other in both directions: all, or, where config.json
            asks for it, those with a window; None: none.
        by_ids: config.json's names of the ids of what stands before an image, in its places and behind it; the texts
            of these tokens are then the tokenizer's, and ``placeholder`` is that of the second. Empty: as said above.
        most_pixels: The key of the processor's ``size`` that ``data.image_max_pixels`` sets; None where it has none.
    """

    placeholder: str
    token: str
    grid: str
    tower: str
    written: str | None = None
    settles: str | None = None
    ends: tuple[str, str] | None = None
    marks: str | None = "mm_token_type_ids"
    three_rows: bool = False
    both_ways: Literal["all", "windows"] | None = None
    by_ids: tuple[str, ...] = ()
    most_pixels: str | None = None


_QWEN = ImageTokens(
    placeholder="<|image_pad|>",
    token="<|image_pad|>",  # noqa: S106 - a token of a vocabulary
    grid="ftcli.data.vision:merged_patches",
    tower="ftcli.model.vision:qwen",
    three_rows=True,
    most_pixels="longest_edge",
)

#: By ``model_type`` of the whole checkpoint.
TABLE: Mapping[str, ImageTokens] = MappingProxyType(
    {
        "qwen2_5_vl": _QWEN,
        "qwen3_vl": _QWEN,
        "qwen3_vl_moe": _QWEN,
        "qwen3_5": _QWEN,
        "qwen3_5_moe": _QWEN,
        "gemma3": ImageTokens(
            placeholder="<start_of_image>",
            token="<image_soft_token>",  # noqa: S106 - a token of a vocabulary
            grid="ftcli.data.vision:as_many_as_said",
            tower="ftcli.model.vision:gemma3",
            settles="ftcli.data.vision:takes_no_crops",
            written="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
            marks="token_type_ids",
            both_ways="all",
        ),
        "gemma4": ImageTokens(
            placeholder="",
            token="",
            grid="ftcli.data.vision:pooled_patches",
            tower="ftcli.model.vision:gemma4",
            both_ways="windows",
            by_ids=("boi_token_id", "image_token_id", "eoi_token_id"),
        ),
        "mistral3": ImageTokens(
            placeholder="[IMG]",
            token="[IMG]",  # noqa: S106 - a token of a vocabulary
            grid="ftcli.data.vision:pixtral_patches",
            tower="ftcli.model.vision:mistral3",
            settles="ftcli.data.vision:merges_patches",
            ends=("[IMG_BREAK]", "[IMG_END]"),
            marks=None,
        ),
    }
)
