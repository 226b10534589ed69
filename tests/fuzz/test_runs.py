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
    hold(run(root, *words, "--offline", "--json"), looks_only=False)
    after = folders.fingerprints(folder, kept)
    lost = [name for name, content in before.items() if after.get(name) != content and not _of_damaged(name, hurt)]
    assert not lost, f"lost or changed: {lost}"


def _of_damaged(name: str, hurt: dict[str, bytes | None]) -> bool:
    """Whether a file belongs to a checkpoint or result of which another file is damaged: it may be written again."""
    parts = name.split("/")
    unit = "/".join(parts[:2] if parts[0] == "checkpoints" else parts[:1]) + "/"
    return any(other.startswith(unit) for other in hurt)
