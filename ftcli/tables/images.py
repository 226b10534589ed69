"""Models that see: how an image stands in their text and among their tokens, and the code that knows their towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

#: What ``model.train`` may name.
TrainedPart = Literal["language", "projector", "vision"]
#: All that is trained unless a recipe says more.
LANGUAGE: tuple[TrainedPart, ...] = ("language",)


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
        frozen: Code: the same as ``tower``, faster, where nothing of it is trained and layers are on the kernels; None
            where there is none.
        example: Code: a function of transformers' config, a number of images and the patches of their sides that gives
            tensors for ``tower``.
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
        vision, projector: Where the parts that ``model.train`` names stand in the model, by the beginnings of paths
            below ``model.``. A projector within the tower is no part of that.
    """

    placeholder: str
    token: str
    grid: str
    tower: str
    example: str
    frozen: str | None = None
    written: str | None = None
    settles: str | None = None
    ends: tuple[str, str] | None = None
    marks: str | None = "mm_token_type_ids"
    three_rows: bool = False
    both_ways: Literal["all", "windows"] | None = None
    by_ids: tuple[str, ...] = ()
    most_pixels: str | None = None
    vision: tuple[str, ...] = ("vision_tower",)
    projector: tuple[str, ...] = ("multi_modal_projector",)

    def part_of(self, name: str) -> TrainedPart | None:
        """The part that a module or parameter of the whole model belongs to; None for sound, and for the head."""
        inner = name.removeprefix("model.")
        places: dict[TrainedPart, tuple[str, ...]] = {
            "projector": self.projector,
            "vision": self.vision,
            "language": ("language_model",),
        }
        for part, paths in places.items():
            if any(inner == path or inner.startswith(f"{path}.") for path in paths):
                return part
        return None


_QWEN = ImageTokens(
    placeholder="<|image_pad|>",
    token="<|image_pad|>",  # noqa: S106 - a token of a vocabulary
    grid="ftcli.data.vision:merged_patches",
    tower="ftcli.model.vision:qwen",
    example="ftcli.model.vision:example_of_qwen",
    three_rows=True,
    most_pixels="longest_edge",
    vision=("visual",),
    projector=("visual.merger", "visual.deepstack_merger_list"),
)
_QWEN3 = replace(_QWEN, frozen="ftcli.model.qwen_tower:qwen3")

#: By ``model_type`` of the whole checkpoint.
TABLE: Mapping[str, ImageTokens] = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": ImageTokens(
        placeholder="<start_of_image>",
        token="<image_soft_token>",  # noqa: S106 - a token of a vocabulary
        grid="ftcli.data.vision:as_many_as_said",
        tower="ftcli.model.vision:gemma3",
        example="ftcli.model.vision:example_of_gemma3",
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
        example="ftcli.model.vision:example_of_gemma4",
        both_ways="windows",
        by_ids=("boi_token_id", "image_token_id", "eoi_token_id"),
        projector=("embed_vision",),
    ),
    "mistral3": ImageTokens(
        placeholder="[IMG]",
        token="[IMG]",  # noqa: S106 - a token of a vocabulary
        grid="ftcli.data.vision:pixtral_patches",
        tower="ftcli.model.vision:mistral3",
        example="ftcli.model.vision:example_of_mistral3",
        settles="ftcli.data.vision:merges_patches",
        ends=("[IMG_BREAK]", "[IMG_END]"),
        marks=None,
    ),
}
