"""Files that are no recipe at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def write(path: str, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    Path(path).write_bytes(data)


BAD_CONTENT = [
    pytest.param(b"", "FT105", "r.yaml", "recipes list", id="empty"),
    pytest.param(b"  \n\n", "FT105", "r.yaml", "recipes list", id="blank"),
    pytest.param(b"# only a comment\n", "FT105", "r.yaml:1:1", "recipes list", id="comments only"),
    pytest.param(bytes(range(256)), "FT106", "r.yaml", "YAML file", id="binary"),
    pytest.param(b"PK\x03\x04rest", "FT106", "r.yaml", "UTF-8 text", id="zip"),
    pytest.param(b"version: 1\nmodel: \x07bell\n", "FT106", "r.yaml:2:8", "remove it", id="control character"),
    pytest.param("version: 1\n".encode("utf-16"), "FT107", "r.yaml", "UTF-8", id="utf-16"),
    pytest.param(b"version: 1\n# caf\xe9\n", "FT107", "r.yaml:2:6", "UTF-8", id="latin-1"),
]


@pytest.mark.parametrize(("content", "code", "at", "help"), BAD_CONTENT)
def test_content_that_is_no_text(refused: Callable[..., object], content: bytes, code: str, at: str, help: str) -> None:
    write("r.yaml", content)
    refused(["check", "r.yaml"], code=code, at=at, help=help)


def test_missing_file(refused: Callable[..., object]) -> None:
    refused(["check", "nowhere.yaml"], code="FT101", at="nowhere.yaml", help="recipes list")


def test_missing_file_with_a_neighbour(refused: Callable[..., object]) -> None:
    write("gemma.yaml", "version: 1\n")
    refused(["train", "gema.yaml"], code="FT101", at="gema.yaml", help="did you mean gemma.yaml?")


def test_directory(refused: Callable[..., object]) -> None:
    Path("folder").mkdir()
    refused(["check", "folder"], code="FT102", at="folder", help="name a recipe file")


def test_run_directory(refused: Callable[..., object]) -> None:
    Path("runs/one").mkdir(parents=True)
    write("runs/one/recipe.yaml", "version: 1\n")
    refused(["check", "runs/one"], code="FT102", at="runs/one", help="runs/one/recipe.yaml")


def test_unreadable_file(refused: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    write("r.yaml", "version: 1\n")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # as for anyone but root after `chmod 0`

    monkeypatch.setattr(Path, "open", denied)
    refused(["check", "r.yaml"], code="FT103", at="r.yaml", help="permissions")


def test_path_through_a_file(refused: Callable[..., object]) -> None:
    write("r.yaml", "version: 1\n")
    refused(["check", "r.yaml/inside.yaml"], code="FT103", at="r.yaml/inside.yaml", help="check the path")


def test_symbolic_link_to_itself(refused: Callable[..., object]) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    refused(["check", "loop.yaml"], code="FT103", at="loop.yaml", help="check the path")


def test_hundred_megabytes(refused: Callable[..., object]) -> None:
    with Path("huge.yaml").open("wb") as stream:
        stream.truncate(100 * 2**20)
    refused(["check", "huge.yaml"], code="FT104", at="huge.yaml", help="data file")


def test_a_little_too_large(refused: Callable[..., object]) -> None:
    write("large.yaml", "# comment\n" * 14_000)
    refused(["check", "large.yaml"], code="FT104", at="large.yaml", help="data file")


def test_device_file(refused: Callable[..., object]) -> None:
    refused(["check", "/dev/zero"], code="FT108", at="/dev/zero", help="to a file")


def test_pipe_that_nobody_writes_to(refused: Callable[..., object]) -> None:
    os.mkfifo("pipe.yaml")
    refused(["check", "pipe.yaml"], code="FT108", at="pipe.yaml", help="to a file")
