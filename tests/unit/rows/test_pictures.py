"""Images of rows: strange and hostile files are refused with a reason, or read with what is done to them said."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ftcli.rows.layouts.messages import understand
from ftcli.rows.pictures import look_at, pixels_of
from ftcli.rows.row import IMAGE, ImageSource, Misfit, Row
from tests.vision import encoded

PLAIN = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(30, 40, 3))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels, and which ends right after."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(PLAIN, "JPEG", exif=exif)


def animated() -> bytes:
    return encoded(PLAIN, "GIF", save_all=True, append_images=[PLAIN.rotate(90)], duration=10)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.png", encoded(PLAIN)[:-30], "broken"),
        ("a.png", encoded(PLAIN)[:60] + b"\0" * 40 + encoded(PLAIN)[100:], "broken"),
        ("a.png", png_of_size(40, 30), "broken"),
        ("a.jpg", encoded(PLAIN, "JPEG")[:-300], "broken"),
        ("a.webp", encoded(PLAIN, "WEBP")[:-30], "broken|not an image"),
        ("a.png", png_of_size(50_000, 50_000), "taken for|attack"),
        ("a.png", png_of_size(12_000, 10_000), "attack"),
        ("a.png", b"", "not an image"),
        ("a.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ("a.tif", encoded(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"), "floating|32 bits"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Misfit, match=word):
        look_at(ImageSource(path=name), str(tmp_path))
    with pytest.raises(Misfit, match=word):
        look_at(ImageSource(content=content), None)


@pytest.mark.parametrize(
    ("name", "content", "done", "size"),
    [
        ("a.png", encoded(PLAIN), (), (40, 30)),
        ("a.jpg", turned(), ("turned",), (30, 40)),
        ("a.gif", animated(), ("first_frame",), (40, 30)),
        ("a.jpg", encoded(PLAIN.convert("CMYK"), "JPEG"), ("converted",), (40, 30)),
        ("a.png", encoded(Image.fromarray(np.full((30, 40), 40_000, dtype=np.uint16))), ("converted",), (40, 30)),
        ("a.png", encoded(PLAIN, "JPEG"), ("misnamed",), (40, 30)),
        ("a.png", encoded(PLAIN.convert("RGBA")), (), (40, 30)),
        ("a.png", encoded(PLAIN.convert("P")), (), (40, 30)),
    ],
)
def test_what_is_done_with_an_image_is_said(
    tmp_path: Path, name: str, content: bytes, done: tuple[str, ...], size: tuple[int, int]
) -> None:
    (tmp_path / name).write_bytes(content)
    found = look_at(ImageSource(path=name), str(tmp_path))
    assert (found.done, (found.width, found.height), found.bytes) == (done, size, len(content))
    read = pixels_of(tmp_path / name)
    assert (read.mode, read.size) == ("RGB", size)


def test_sixteen_bits_keep_their_brightness() -> None:
    """Pillow's own conversion would make all of it white."""
    content = encoded(Image.fromarray(np.full((3, 3), 40_000, dtype=np.uint16)))
    assert pixels_of(content).getpixel((1, 1)) == (40_000 >> 8,) * 3


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    upright = np.asarray(pixels_of(encoded(PLAIN.rotate(90, expand=True), "PNG")))
    exif = Image.Exif()
    exif[0x0112] = 8
    assert np.array_equal(np.asarray(pixels_of(encoded(PLAIN, "PNG", exif=exif))), upright)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("../secret.png", "outside"),
        ("/etc/hostname", "outside"),
        ("link.png", "outside"),
        ("none.png", "no image at"),
        (".", "no image at"),
        ("a\0b.png", "no path|no image"),
    ],
)
def test_paths_stay_in_the_folder_of_the_rows(tmp_path: Path, path: str, word: str) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(PLAIN))
    (rows / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(Misfit, match=word):
        look_at(ImageSource(path=path), str(rows))
    with pytest.raises(Misfit, match="no folder"):
        look_at(ImageSource(path=path), None)


URL = "data:image/png;base64," + base64.b64encode(encoded(PLAIN)).decode()
ANSWER = {"role": "assistant", "content": "a cat"}


def parts(*given: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*given, {"type": "text", "text": "what?"}]}


@pytest.mark.parametrize(
    ("fields", "sources", "content"),
    [
        ({"images": ["a.png"], "messages": [parts({"type": "image"}), ANSWER]}, ["a.png"], f"{IMAGE}what?"),
        ({"messages": [parts({"type": "image", "path": "a.png"}), ANSWER]}, ["a.png"], f"{IMAGE}what?"),
        ({"messages": [parts({"type": "image", "image": {"bytes": b"x"}}), ANSWER]}, [b"x"], f"{IMAGE}what?"),
        ({"messages": [parts({"type": "image_url", "image_url": {"url": URL}}), ANSWER]}, [...], f"{IMAGE}what?"),
        (
            {"image": "a.png", "messages": [{"role": "user", "content": "see <image>: what?"}, ANSWER]},
            ["a.png"],
            f"see {IMAGE}: what?",
        ),
        (
            {"images": ["b.png"], "messages": [parts({"type": "image", "path": "a.png"}, {"type": "image"}), ANSWER]},
            ["a.png", "b.png"],
            f"{IMAGE}{IMAGE}what?",
        ),
        ({"messages": [{"role": "user", "content": "write <image> in HTML"}, ANSWER]}, [], "write <image> in HTML"),
    ],
)
def test_ways_to_say_where_an_image_is(fields: dict[str, Any], sources: list[Any], content: str) -> None:
    example = understand(Row("rows", 1, fields))
    assert example.messages is not None
    assert example.messages[0]["content"] == content
    found = [each.path or each.content for each in example.images]
    assert found == [encoded(PLAIN) if each is ... else each for each in sources]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"images": ["a.png"], "messages": [{"role": "user", "content": "q"}, ANSWER]}, "1 images and 0 places"),
        ({"images": ["a"], "messages": [parts({"type": "image"}, {"type": "image"}), ANSWER]}, "1 images and 2 places"),
        ({"images": ["a", "b"], "messages": [parts({"type": "image"}), ANSWER]}, "2 images and 1 places"),
        ({"messages": [parts({"type": "image"}), ANSWER]}, "0 images and 1 places"),
        ({"messages": [parts({"type": "image_url", "image_url": "https://x.org/a.png"}), ANSWER]}, "network"),
        ({"messages": [parts({"type": "image_url", "image_url": "data:image/png;base64,%%"}), ANSWER]}, "not base64"),
        ({"messages": [parts({"type": "image_url", "image_url": "data:image/png,abc"}), ANSWER]}, "must be base64"),
        ({"images": [3], "messages": [parts({"type": "image"}), ANSWER]}, "must be a path"),
        ({"messages": [parts({"type": "video", "path": "a.mp4"}), ANSWER]}, "other than text and images"),
        ({"image": "a", "images": ["b"], "messages": [parts({"type": "image"}), ANSWER]}, "only one of them"),
    ],
)
def test_images_that_have_no_place_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(Misfit, match=word):
        understand(Row("rows", 1, fields))
