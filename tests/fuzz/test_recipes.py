"""Recipes of every kind, and command lines of every kind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import recipes, values
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What is imported at the first call is not counted."""
    with tempfile.TemporaryDirectory() as name:
        for words in (["check", "r.yaml"], ["recipes", "list"], ["runs"], ["recipes", "schema"]):
            Path(name, "r.yaml").write_bytes(recipes.written(recipes.TRAINS))
            run(Path(name), *words)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A working directory with things that a path may lead to."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "folder").mkdir()
        (root / "empty").touch()
        (root / "loop").symlink_to("loop")
        (root / "dangling").symlink_to("nowhere")
        os.mkfifo(root / "fifo")
        (root / "good.yaml").write_bytes(recipes.written(recipes.TRAINS))
        (root / "grpo.yaml").write_bytes(recipes.written(recipes.SAMPLES))
        yield root


@examples(15)
@given(recipe=recipes.recipes)
def test_recipes_at_the_edges_of_the_schema(folder: Path, recipe: dict[str, Any]) -> None:
    (folder / "r.yaml").write_bytes(recipes.written(recipe))
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--as", "cpu"))


@examples(15)
@given(content=recipes.texts)
def test_files_that_are_hardly_recipes(folder: Path, content: bytes) -> None:
    (folder / "r.yaml").write_bytes(content)
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--as", "h100"))


_WORDS = (
    "train", "eval", "grpo", "export", "check", "bench", "chat", "sample", "runs", "compare", "sweep", "recipes", "list", "show",
    "copy", "schema", "new", "convert", "--set", "--json", "--quiet", "--offline", "--help", "--debug", "--resume", "--output-dir",
    "--max-steps", "--gpus", "--checkpoint", "--format", "--output", "--force", "--no-verify", "--as", "--show-sample", "--run",
    "--dry-rewards", "--html", "--version", "--steps", "--batch", "--layers", "--eval", "-h", "-q", "r.yaml", "folder", "smoke",
    "missing.yaml", "h100", "24GiB", "lora.r=0", "train.optim=x", "=", "a=", "lora.r", "data.train.0.path=x", "version=2",
)  # fmt: skip
#: What only looks, and may be given a recipe that works.
_LOOKS = ("check", "runs", "compare", "recipes")


def _overrides() -> st.SearchStrategy[str]:
    value = values.text | st.integers().map(str) | values.nested(values.scalars).map(lambda v: yaml.safe_dump(v)[:200])
    return st.tuples(st.sampled_from(recipes.KEYS), value).map("=".join)


_words = st.sampled_from(_WORDS) | values.text | _overrides()
_lines = st.lists(_words, max_size=6) | st.tuples(
    st.sampled_from(_LOOKS), st.sampled_from(["good.yaml", "grpo.yaml"]), st.lists(_words, max_size=4)
).map(lambda parts: [parts[0], parts[1], *parts[2]])


def _harmless(words: list[str]) -> bool:
    """Whether nothing is trained, and nothing is written beyond the folder."""
    outside = any(word.startswith(("/", "~", "..")) for word in words)
    return not (outside and set(words) & {"copy", "--output", "--output-dir", "--html"})


@examples(15)
@given(words=_lines.filter(_harmless))
def test_command_lines(folder: Path, words: list[str]) -> None:
    words = [word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") for word in words]
    hold(run(folder, *words))


@examples(15)
@given(changes=st.lists(_overrides(), min_size=1, max_size=3))
def test_overrides(folder: Path, changes: list[str]) -> None:
    words = [word for change in changes for word in ("--set", change)]
    hold(run(folder, "check", "good.yaml", "--json", "--offline", *words))
