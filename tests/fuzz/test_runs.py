"""Run directories with damaged files: every command reads, refuses or goes on, and loses nothing that was whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import folders, recipes
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run

_COMMANDS = (
    ("runs", "."),
    ("compare", "run", "whole"),
    ("compare", "run", "whole", "--html", "page.html"),
    ("train", "r.yaml"),
    ("train", "r.yaml"),
    ("train", "r.yaml", "--max-steps", "4"),
    ("eval", "r.yaml", "--run", "run"),
    ("eval", "r.yaml", "--run", "run", "--checkpoint", "2"),
    ("eval", "r.yaml", "--run", "run", "--checkpoint", "best"),
    ("export", "run"),
    ("export", "run", "--checkpoint", "2"),
    ("check", "run/recipe.yaml"),
)


def _options(words: tuple[str, ...]) -> tuple[str, ...]:
    return ("--json",) if words[0] in ("runs", "compare") else ("--offline", "--json")


@pytest.fixture(scope="module")
def root(shared_reload: None) -> Iterator[Path]:
    """A folder with a finished run, ``whole``, of three steps with a checkpoint each."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        recipe = {
            **recipes.TRAINS,
            "run": {"output_dir": "whole"},
            "data": {**recipes.TRAINS["data"], "eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]},
            "train": {**recipes.TRAINS["train"], "max_steps": 3},
            "checkpoint": {"every_steps": 1, "keep_last": 9},
            "logging": {"every_steps": 1},
            "export": {"formats": ["adapter"]},
        }
        (root / "whole.yaml").write_bytes(recipes.written(recipe))
        recipe["run"] = {"output_dir": "run"}
        (root / "r.yaml").write_bytes(recipes.written(recipe))
        outcome = run(root, "train", "whole.yaml", "--offline", "--json")
        assert outcome.status == 0, outcome.stderr
        stored = root / "whole" / "recipe.yaml"
        values = yaml.safe_load(stored.read_text())
        stored.write_bytes(recipes.written({**values, "run": {**values["run"], "output_dir": "run"}}))
        run(root, "export", "whole", "--offline")
        shutil.rmtree(root / "whole" / "export")
        yield root


def _unfinished(folder: Path) -> None:
    """Takes the run back to when the machine goes away after its last checkpoint."""
    shutil.rmtree(folder / "adapter")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))


@examples(4, 30)
@given(data=st.data(), words=st.sampled_from(_COMMANDS), finished=st.booleans())
def test_damaged_runs(root: Path, data: st.DataObject, words: tuple[str, ...], finished: bool) -> None:
    folder = root / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "whole", folder)
    if not finished:
        _unfinished(folder)
    hurt = data.draw(folders.damage(folder, folders.files_of(folder)), label="damage")
    folders.apply(folder, hurt)
    kept = [name for name in folders.files_of(folder) if name.startswith(("checkpoints/", "adapter/"))]
    kept = [name for name in kept if not name.endswith("README.md")]  # `eval` writes its numbers into the card
    before = folders.fingerprints(folder, [name for name in kept if name not in hurt])
    hold(run(root, *words, *_options(words)), looks_only=False)
    _nothing_lost(folder, before, kept, set(hurt))


@examples(3, 30)
@given(data=st.data(), words=st.sampled_from(_COMMANDS), finished=st.booleans())
def test_what_is_no_file(root: Path, data: st.DataObject, words: tuple[str, ...], finished: bool) -> None:
    """A pipe, a device or a folder in the place of a file of a run is neither waited for nor read without end."""
    folder = root / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "whole", folder)
    if not finished:
        _unfinished(folder)
    names = [name for name in folders.files_of(folder) if not name.startswith("checkpoints/")] * 3
    names += folders.files_of(folder)
    kinds = st.sampled_from(list(folders.NO_FILES))
    hurt = data.draw(st.dictionaries(st.sampled_from(names), kinds, min_size=1, max_size=2), label="no files")
    folders.stand_in(folder, hurt)
    kept = [name for name in folders.files_of(folder) if name.startswith(("checkpoints/", "adapter/"))]
    kept = [name for name in kept if not name.endswith("README.md") and name not in hurt]
    before = folders.fingerprints(folder, kept)
    hold(run(root, *words, *_options(words)), looks_only=words[0] in ("runs", "compare"))
    _nothing_lost(folder, before, kept, set(hurt))


_ODD_NUMBERS = st.sampled_from(["NaN", "1e308", "-1e308", "1e-320", "Infinity", '"1"', "[1]", "{}", "true", "9" * 400])


@examples(4, 30)
@given(
    lines=st.lists(
        st.tuples(st.sampled_from(("step", "loss", "eval_loss", "reward", "tokens")), _ODD_NUMBERS), min_size=1
    ),
    words=st.sampled_from([each for each in _COMMANDS if each[0] in ("runs", "compare", "train")]),
)
def test_odd_metrics(root: Path, lines: list[tuple[str, str]], words: tuple[str, ...]) -> None:
    """A line of metrics for each value, before those that the run has written."""
    folder = root / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "whole", folder)
    path = folder / "metrics.jsonl"
    odd = "".join(f'{{"step": 1, "loss": 1.0, "{name}": {value}}}\n' for name, value in lines)
    path.write_text(odd + path.read_text())
    hold(run(root, *words, *_options(words)), looks_only=words[0] != "train")


def _nothing_lost(folder: Path, before: dict[str, str], kept: list[str], hurt: set[str]) -> None:
    after = folders.fingerprints(folder, kept)
    lost = [name for name, content in before.items() if after.get(name) != content and not _of_damaged(name, hurt)]
    assert not lost, f"lost or changed: {lost}"


def _of_damaged(name: str, hurt: set[str]) -> bool:
    """Whether a file belongs to a checkpoint or result of which another file is damaged: it may be written again."""
    parts = name.split("/")
    unit = "/".join(parts[:2] if parts[0] == "checkpoints" else parts[:1]) + "/"
    return any(other.startswith(unit) for other in hurt)
