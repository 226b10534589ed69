"""Images of rows: where they lie, what their headers say, and their pixels; what strangers made is opened with care.

A file is read by its content, whatever its name ends in, by the decoders of :data:`FORMATS` alone. A broken one is
refused before anything is trained; of a JPEG the header and the end are looked at, others are decoded. Nothing is
fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.rows.row import ImageSource, Misfit
from ftcli.units import size

if TYPE_CHECKING:
    from PIL.Image import Image

#: What is opened, by Pillow's names, and the endings that such files usually have.
FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
}
#: Pixels of one image, and bytes of its file. Pillow takes more than this for an attack.
MAX_PIXELS = 89_478_485
MAX_FILE = 256 * 2**20
#: EXIF: the tag that says how a camera was held, and those of its values that exchange width and height.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
#: The last bytes of a whole JPEG, looked for near the end: some programs append something.
_END, _NEAR_THE_END = b"\xff\xd9", 4096
#: Modes that are 8 bits a colour, or a palette of such; what is converted from others is told.
_USUAL = ("RGB", "RGBA", "L", "LA", "P", "PA", "1")


@dataclass(frozen=True, slots=True)
class Picture:
    """Facts of an image's header: ``width`` and ``height`` as it is shown, ``bytes`` of its file, and what is ``done``
    with it (turned, first_frame, converted, misnamed).
    """

    width: int
    height: int
    bytes: int
    done: tuple[str, ...] = ()


def place_of(source: ImageSource, folder: str | None) -> Path | None:
    """The path of an image's file; None for one whose content the row holds.

    Raises Misfit for a path that leads out of the row's folder, or to nothing.
    """
    if source.path is None:
        return None
    if folder is None:
        raise Misfit(f"image {source.path!r} is a path, and rows of the Hub have no folder: put its bytes into the row")
    root = Path(folder).resolve()
    try:
        path = (root / source.path).resolve()
        inside = path.is_relative_to(root)
        there = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise Misfit(f"image {source.path[:200]!r} is no path: {error}") from error
    if not inside:
        raise Misfit(f"image {source.path!r} lies outside of the folder of the rows, {folder}")
    if not there:
        raise Misfit(f"there is no image at {path}")
    return path


def look_at(source: ImageSource, folder: str | None) -> Picture:
    """Reads the header of a file that is whole. Raises Misfit for everything that cannot be trained on."""
    path = place_of(source, folder)
    name = "the image in the row" if path is None else f"image {source.path!r}"
    held = len(source.content or b"") if path is None else path.stat().st_size
    if held > MAX_FILE:
        raise Misfit(f"{name} has {size(held)}, more than {size(MAX_FILE)}")
    with _opened(path or io.BytesIO(source.content or b""), name) as image:
        if image.format != "JPEG" or not _has_its_end(path, source.content):
            _load(image, name)
        kind, shown = str(image.format), _shown_size(image)
        done = list(_conversions(image))
        if path is not None and path.suffix and path.suffix.lower() not in FORMATS[kind]:
            done.append("misnamed")
    return Picture(*shown, held, tuple(done))


def pixels_of(content: Path | bytes) -> Image:
    """The image as it is shown, first frame, in RGB. Raises Misfit where it cannot be decoded."""
    import numpy as np
    from PIL import Image, ImageOps

    name = "the image"
    with _opened(content if isinstance(content, Path) else io.BytesIO(content), name) as image:
        _load(image, name)
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I;16"):  # Pillow would cut them off at 255
            turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
        return turned.convert("RGB")


def from_url(url: str) -> ImageSource:
    """The image of an OpenAI part: a data URL's content, or a path. Raises Misfit for an address of the network."""
    if url.startswith("data:"):
        head, comma, text = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise Misfit("a data URL of an image must be base64: data:image/png;base64,...")
        try:
            return ImageSource(content=base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise Misfit(f"a data URL of an image is not base64: {error}") from error
    if url.startswith("file://"):
        return ImageSource(path=url.removeprefix("file://"))
    if "://" in url:
        raise Misfit(f"image {url[:120]!r} is on the network, and nothing is fetched: download it beside the rows")
    return ImageSource(path=url)


def source_of(value: Any) -> ImageSource:
    """The image of a column or a part: a path, a data URL, bytes, or `datasets`' struct of ``bytes`` and ``path``.

    Raises Misfit.
    """
    if isinstance(value, dict):
        found = next((value[key] for key in ("bytes", "url", "path", "image") if value.get(key)), None)
        return source_of(found)
    if isinstance(value, bytes) and value:
        return ImageSource(content=value)
    if isinstance(value, str) and value:
        return from_url(value)
    raise Misfit("an image must be a path, a data URL, or bytes")


@contextmanager
def _opened(content: Path | io.BytesIO, name: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(content, formats=tuple(FORMATS))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise Misfit(f"{name} has more than {MAX_PIXELS:,} pixels, what Pillow takes for an attack") from error
    except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, MemoryError) as error:
        raise Misfit(f"{name} is not an image that can be read ({', '.join(FORMATS)})") from error
    with image:
        yield image


def _load(image: Image, name: str) -> None:
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, MemoryError) as error:
        raise Misfit(f"{name} is broken: {error}") from error


def _shown_size(image: Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) in _ON_ITS_SIDE else (width, height)


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (ValueError, TypeError, OSError, SyntaxError, LookupError):
        return 1  # a header that is no EXIF turns nothing


def _conversions(image: Image) -> Iterator[str]:
    if _orientation(image) != 1:
        yield "turned"
    if getattr(image, "n_frames", 1) > 1:
        yield "first_frame"
    if image.mode not in _USUAL:
        if image.mode in ("F", "I"):
            raise Misfit("an image of 32 bits a pixel has no colours: write it with 8 bits a colour")
        yield "converted"


def _has_its_end(path: Path | None, content: bytes | None) -> bool:
    if path is None:
        return _END in (content or b"")[-_NEAR_THE_END:]
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _NEAR_THE_END))
        return _END in stream.read()
