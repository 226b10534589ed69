"""Reads the images of the next steps while this one runs, in threads: decoding and resizing leave Python's lock alone.

What is read for a step follows from its rows alone, so that it is the same however many threads there are.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.data.tokens import RowImage, TokenizedRow, content_of
from ftcli.data.vision import Pixels, Vision
from ftcli.facts.device import usable_cores
from ftcli.rows.pictures import pixels_of
from ftcli.rows.row import Misfit

if TYPE_CHECKING:
    from ftcli.errors import Origin

#: Threads that read images at most: more would be in each other's way.
MOST_THREADS = 8
#: Pixels of the longer side of an image on a page.
SMALL = 128
#: Bytes of pixels that are read ahead.
MOST_AHEAD = 2 * 2**30

#: An image as the tower takes it.
Read = dict[str, Tensor]
#: An image by its row and its number there.
_Key = tuple["Origin", int]


class PixelReader:
    """The pixels of images, read ahead where that was asked for.

    Args:
        dtype: Of the tower; pixels are rounded to it here, where time is.
        pinned: Whether those of a batch are put into page-locked memory, from which they are copied to a GPU.

    Attributes:
        waited: Seconds for which somebody waited for pixels since this was last set to zero.
    """

    def __init__(self, vision: Vision, dtype: torch.dtype, threads: int | None = None, *, pinned: bool = False) -> None:
        self.vision, self.waited = vision, 0.0
        self._dtype, self._pinned = dtype, pinned
        self._pool = ThreadPoolExecutor(threads or max(1, min(MOST_THREADS, usable_cores())), "images")
        self._ahead: dict[tuple[_Key, ...], tuple[list[RowImage], Future[Read]]] = {}

    def ahead(self, batches: Iterable[Sequence[TokenizedRow]]) -> None:
        """Begins to read the images of the batches that come next, and to join each batch's, as far as there is room.

        A thread that joins waits for those that read, which all began before it.
        """
        for rows in batches:
            key, images = _images_of(rows)
            held = sum(_size(image) for some, _ in self._ahead.values() for image in some)
            if images and key not in self._ahead and held < MOST_AHEAD:
                self._ahead[key] = images, self._pool.submit(self._joined, self._reads(key, images))

    def of(self, rows: Sequence[TokenizedRow]) -> Read:
        """What the tower takes of all images of these rows, in order; empty where they have none."""
        began = time.perf_counter()
        key, images = _images_of(rows)
        if not images:
            return {}
        known, ahead = self._ahead.pop(key, (None, None))
        if known is None:
            self._ahead.clear()  # what was read was for another order
        joined = ahead.result() if ahead and known == images else self._joined(self._reads(key, images))
        self.waited += time.perf_counter() - began
        return joined

    def _reads(self, keys: Sequence[_Key], images: Sequence[RowImage]) -> list[Future[Read]]:
        here: dict[int, Future[Read]] = {}  # completions of one prompt show the same
        for (origin, _), image in zip(keys, images, strict=True):
            if id(image) not in here:
                here[id(image)] = self._pool.submit(self._read, image, origin)
        return [here[id(image)] for image in images]

    def _joined(self, images: Sequence[Future[Read]]) -> Read:
        return joined([each.result() for each in images], pinned=self._pinned)

    def _read(self, image: RowImage, origin: Origin) -> Read:
        return as_read(self.vision.processed(image, origin), self._dtype)


def small(image: RowImage) -> str:
    """The image as a data URL for a page, no side longer than :data:`SMALL`; empty where it cannot be read."""
    try:
        found = pixels_of(content_of(image))
    except (Misfit, OSError):
        return ""
    found.thumbnail((SMALL, SMALL))
    out = io.BytesIO()
    found.save(out, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def as_read(made: Pixels, dtype: torch.dtype) -> Read:
    """What an image processor makes, as tensors: floating-point ones in ``dtype``."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}


def joined(images: Sequence[Read], *, pinned: bool = False) -> Read:
    """Images one after the other; those of several sizes are filled up to the largest."""
    if not images:
        return {}
    found: Read = {}
    for name in images[0]:
        parts = _of_one_size([image[name] for image in images])
        shape = (sum(len(each) for each in parts), *parts[0].shape[1:])
        found[name] = torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pinned))
    return found


def _images_of(rows: Iterable[TokenizedRow]) -> tuple[tuple[_Key, ...], list[RowImage]]:
    found = [((row.row.origin, number), image) for row in rows for number, image in enumerate(row.images)]
    return tuple(key for key, _ in found), [image for _, image in found]


def _of_one_size(tensors: Sequence[Tensor]) -> list[Tensor]:
    if tensors[0].dim() < 4:
        return list(tensors)
    high, wide = (max(each.shape[side] for each in tensors) for side in (-2, -1))
    return [F.pad(each, (0, wide - each.shape[-1], 0, high - each.shape[-2])) for each in tensors]


def _size(image: RowImage) -> int:
    """About how many bytes the pixels of an image take: four patches a token, each pixel twice, in two bytes."""
    return image.grid[0] * image.grid[1] * 4 * 2 * 3 * 16 * 16 * 2
