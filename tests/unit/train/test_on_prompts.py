"""What a run on prompts is held to."""

from __future__ import annotations

from ftcli.data.asked import RenderedPrompt
from ftcli.data.tokens import RowImage, shown_digest
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row
from ftcli.train.on_prompts import images_digest


def prompt(*shown: bytes) -> RenderedPrompt:
    images = tuple(RowImage("a.bmp", None, 2, 2, (1, 1), 3, digest=shown_digest(content)) for content in shown)
    return RenderedPrompt(Prompt(Row("f", 1, {}), None, "q", None), "q", images)


def test_images_of_prompts_are_told_by_what_they_hold() -> None:
    """Their paths alone are in the files of rows: a run went on with others."""
    found = [images_digest([prompt(b"red"), prompt(last)]) for last in (b"red", b"blu")]
    assert len({*found, images_digest([prompt(b"red")])}) == 3
    assert images_digest([prompt(), prompt()]) is None
