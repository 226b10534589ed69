"""Shows llama.cpp's library a picture, with a file and its projector, and holds its answer to the trained model's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftcli.data.pixels import as_read
from ftcli.data.vision import load_vision
from ftcli.export.clean.request import LOGITS, PICTURE, READ, ReloadRequest
from ftcli.export.gguf.file import ExpectedFile
from ftcli.export.images import picture_probe, png, seen_logits
from ftcli.export.lazy import computing_from
from ftcli.export.source import ExportSource, unwritten
from ftcli.export.verify import compare_logits, logits_problems, rendered_text
from ftcli.export.weights import MergedWeights, source_weights
from ftcli.rows.row import ImageSource, Row

#: The name that llama.cpp has for the place of a picture in text.
_MARKER = "<__media__>"
#: Relative error of the logits that passes at least: GELU is looked up in a table of float16 there.
IMAGE = 0.02


def compare_seen(
    source: ExportSource, wanted: ExpectedFile, path: Path, projector: Path, allowed: float
) -> tuple[dict[str, str | float], list[str]]:
    """Facts for the record, and problems. Which tokens stand around an image is llama.cpp's to say here.

    Args:
        allowed: The relative error of the logits that passes.
    """
    vision = load_vision(source.base, wanted.config.to_dict(), wanted.tokenizer, None, offline=source.offline)
    token: int | None = getattr(wanted.config, "image_token_id", None)
    if isinstance(vision, str) or token is None:
        return {"llama_cpp_image": "not asked: no image processor is at hand"}, []
    picture = picture_probe(vision, wanted.config)
    text = rendered_text(wanted.tokenizer, f"Name it:{_MARKER}") or f"Name it:{_MARKER}"
    shown = torch.from_numpy(np.array(picture))
    answer = wanted.reload(ReloadRequest("llama", str(path), texts=(text,), projector=str(projector)), {PICTURE: shown})
    if answer.unavailable or answer.problems:
        said = [f"with an image, in llama.cpp {problem}" for problem in answer.problems]
        return ({"llama_cpp_image": f"not asked: {answer.unavailable}"} if answer.unavailable else {}), said
    read = answer.tensors[READ].tolist()
    own = vision.ids_of(vision.looked_at(ImageSource(content=png(picture)), Row("a probe", 1, {})))
    if read.count(-1) != len(own):
        return {}, [f"an image of {picture.size} has {read.count(-1)} tokens in llama.cpp and {len(own)} here"]
    begin = read.index(-1)
    ids = torch.tensor([[*read[:begin], *own, *read[begin + len(own) :]]])
    given = {"input_ids": ids, **as_read(vision.of_pixels([picture]), torch.float32)}
    if vision.kind.marks is not None:
        given[vision.kind.marks] = (ids == token).int()
    compared = compare_logits(answer.tensors[LOGITS], _trained(source, wanted, given), allowed)
    problems = [f"with an image, in llama.cpp {problem}" for problem in logits_problems(compared, allowed)]
    return {"llama_cpp_image_error": compared.relative_error}, problems


def _trained(source: ExportSource, wanted: ExpectedFile, given: Mapping[str, Tensor]) -> Tensor:
    """The trained model's logits (1, vocabulary) behind the last token."""
    stored, adapted = source_weights(source)
    base = stored.base if isinstance(stored, MergedWeights) else stored
    model: Any = unwritten(wanted.config) if adapted is None else adapted
    with computing_from(model, base.read, base.names):
        return seen_logits(model, given)[-1:]
