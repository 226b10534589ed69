"""`ftcli sample` with odd options, and what was written earlier damaged: folders of samples, and references' caches."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import folders, recipes
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run

#: As short as sampling can be.
_RECIPE: dict[str, Any] = {
    **recipes.TRAINS,
    "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 3}], "max_seq_len": 64},
    "eval": {"tasks": [{"use": "regex", "pattern": "[a-m]"}], "generate": {"max_new_tokens": 3}},
}
_WORDS = ("sample", "r.yaml", "-n", "3", "--seed", "5", "--truncated", "keep", "--output", "out", "--offline", "--json")


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder with samples, ``whole``, a reference's cache, ``kept``, and a run, ``run``."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "r.yaml").write_bytes(recipes.written({**_RECIPE, "run": {"output_dir": "run"}}))
        assert run(root, *_WORDS).status == 0
        (root / "out").rename(root / "whole")
        assert run(root, "train", "r.yaml", "--offline", "--json").status == 0
        for method in ("dpo", "kto"):
            recipe = {**recipes.BASES[method], "preference": {"reference_cache": str(root / "cache")}}
            (root / f"{method}.yaml").write_bytes(recipes.written({**recipe, "run": {"output_dir": "of-cache"}}))
            assert run(root, "train", f"{method}.yaml", "--resume", "never", "--offline", "--json").status == 0
        (root / "cache").rename(root / "kept")
        yield root


def _copied(root: Path, name: str, copy: str) -> Path:
    shutil.rmtree(root / copy, ignore_errors=True)
    shutil.copytree(root / name, root / copy)
    return root / copy


_changed = st.sampled_from(
    [(), (), ("--force",), ("--seed", "6"), ("-n", "4"), ("--max-prompts", "2"), ("--as", "sft")]
)


@examples(3, 30)
@given(data=st.data(), more=_changed)
def test_damaged_samples(root: Path, data: st.DataObject, more: tuple[str, ...]) -> None:
    folder = _copied(root, "whole", "out")
    folders.apply(folder, data.draw(folders.damage(folder, folders.files_of(folder)), label="damage"))
    hold(run(root, *_WORDS, *more), looks_only=False)


@examples(2, 20)
@given(data=st.data(), more=_changed)
def test_samples_that_are_no_files(root: Path, data: st.DataObject, more: tuple[str, ...]) -> None:
    folder = _copied(root, "whole", "out")
    kinds = st.sampled_from(list(folders.NO_FILES))
    hurt = data.draw(st.dictionaries(st.sampled_from(folders.files_of(folder)), kinds, min_size=1, max_size=2))
    folders.stand_in(folder, hurt)
    hold(run(root, *_WORDS, *more), looks_only=False)


_ODD = st.sampled_from(["NaN", "1e308", "-1e308", "Infinity", '"1"', "[1]", "{}", "true", "null", "9" * 400, "1e-320"])


@examples(2, 20)
@given(data=st.data(), more=_changed)
def test_odd_lines_of_samples(root: Path, data: st.DataObject, more: tuple[str, ...]) -> None:
    """A value inside of a line of answers or scores is another one."""
    folder = _copied(root, "whole", "out")
    path = folder / data.draw(st.sampled_from(["answers.jsonl", "scores.jsonl"]))
    lines = path.read_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    ways = list(folders.paths_of(json.loads(lines[at])))
    changed = folders.replaced(json.loads(lines[at]), data.draw(st.sampled_from(ways)), "@odd@")
    lines[at] = json.dumps(changed).replace('"@odd@"', data.draw(_ODD))
    path.write_text("\n".join(lines) + "\n")
    hold(run(root, *_WORDS, *more), looks_only=False)


_NUMBERS = st.sampled_from(
    ["0", "1", "2", "-1", "1e308", "nan", "inf", "5e-324", "1.0", "", "x", "1e-7", "9" * 30, "0.5"]
)
_OPTIONS = st.sampled_from(
    ["-n", "--temperature", "--top-p", "--top-k", "--max-new-tokens", "--seed", "--max-prompts", "--min-score", "--min-margin", "--per-prompt"]
)  # fmt: skip
_SWITCHES = st.sampled_from(
    [("--as", "sft"), ("--as", "pairs"), ("--truncated", "drop"), ("--truncated", "reject"), ("--run", "run"), ("--run", "whole"),
     ("--run", "nowhere"), ("--checkpoint", "best"), ("--checkpoint", "2"), ("--checkpoint", "x"), ("--output", "whole"), ("--output", "run"),
     ("--output", "r.yaml"), ("--output", "out/deep"), ("--output", ""), ("--output", "/dev/null"), ("--output", "/proc/x"), ("--force",)]
)  # fmt: skip


@examples(3, 30)
@given(options=st.lists(st.tuples(_OPTIONS, _NUMBERS), max_size=3), switches=st.lists(_SWITCHES, max_size=2))
def test_options_of_sampling(root: Path, options: list[tuple[str, str]], switches: list[tuple[str, ...]]) -> None:
    shutil.rmtree(root / "out", ignore_errors=True)
    ours = {".lock", "sample.json", "answers.jsonl", "scores.jsonl", "sft.jsonl", "pairs.jsonl"}
    names = [name for name in folders.files_of(root / "run") if name not in ours]
    before = folders.fingerprints(root / "run", names)
    words = [word for pair in (*options, *switches) for word in pair]
    hold(run(root, *_WORDS, "--max-prompts", "3", *words), looks_only=False)
    assert folders.fingerprints(root / "run", names) == before


@examples(2, 20)
@given(data=st.data(), method=st.sampled_from(["dpo", "kto"]))
def test_damaged_references(root: Path, data: st.DataObject, method: str) -> None:
    folder = _copied(root, "kept", "cache")
    names = folders.files_of(folder)
    if data.draw(st.booleans()):
        folders.apply(folder, data.draw(folders.damage(folder, names), label="damage"))
    else:
        kinds = st.sampled_from(list(folders.NO_FILES))
        folders.stand_in(
            folder, data.draw(st.dictionaries(st.sampled_from(names), kinds, min_size=1), label="no files")
        )
    outcome = run(root, "train", f"{method}.yaml", "--resume", "never", "--offline", "--json")
    hold(outcome, looks_only=False)
    assert outcome.status == 0, "what is only kept is computed again"
