"""Every measurement says how it is run, needs no GPU to say so, and is what the pages name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "kernels" / "bench"
#: Parts of the scripts; the rest is run by people.
SHARED = {"common", "timing", "rows"}
SCRIPTS = sorted(file.stem for file in BENCH.glob("*.py") if file.stem not in SHARED)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_run(
    name: str, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script(name)
    assert f"python kernels/bench/{name}.py" in module.__doc__
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_one_line_says_so(
    name: str, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script(name)
    monkeypatch.setattr(script("common"), "gpu", lambda: None)
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert str(ended.value.code).startswith("no CUDA GPU here")


def test_every_script_that_a_page_names_is_there_and_every_script_is_named() -> None:
    named = set()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "kernels").glob("*.md")]:
        named |= set(re.findall(r"kernels/bench/(\w+)\.(?:py|sh)", page.read_text(encoding="utf-8")))
    assert named == set(SCRIPTS)


def test_a_table_prints_rows_in_markdown_and_keeps_what_has_no_column(
    script: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    common = script("common")
    table = common.Table({"what": "", "ms": ".2f"})
    table.add(what="a", ms=1.234, more=[1])
    table.add(what="b")
    table.save(tmp_path / "rows.json")
    assert capsys.readouterr().out == "| what | ms |\n|---|---|\n| a | 1.23 |\n| b |  |\n"
    kept = common.json.loads((tmp_path / "rows.json").read_text())
    assert kept["rows"] == [{"what": "a", "ms": 1.234, "more": [1]}, {"what": "b"}]
    assert {"command", "date", "device", "torch"} <= set(kept)


def test_an_ftcli_command_that_fails_is_an_answer_with_its_error(script: Callable[[str], Any], tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("version: 1\nmodel: {name_or_path: google/gemma-2-9b}\ndata: {train: [x.jsonl], cutoff: 4}\n")
    answer = script("common").bench(str(recipe), log=tmp_path / "log")
    assert answer.status == 2
    assert answer.result == {}
    assert "error[FT2" in answer.said
    assert answer.said in (tmp_path / "log").read_text()
