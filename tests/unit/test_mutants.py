"""Every mutant of `make mutants` can be applied, and the runner tells killed from survived without the checkout."""

from __future__ import annotations

import ast
import fcntl
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import run as runner
from tests.mutants.run import Results, judge_all
from tests.mutants.table import ROOT, TABLE, Mutant, chosen


def test_every_mutant_is_one_change_of_a_line_that_is_there_once() -> None:
    mutants = chosen([])
    assert [problem for mutant in mutants if (problem := mutant.problem(ROOT)) is not None] == []
    assert len(mutants) >= 40
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        changed = source.replace(mutant.text, mutant.instead)
        assert changed != source
        ast.parse(changed)  # a file that cannot be read fails every test
        assert mutant.tests


def test_a_line_that_is_gone_or_twice_there_is_named() -> None:
    mutant = TABLE["data"][0]
    assert "0 times" in (replace(mutant, text="no such line").problem(ROOT) or "")
    assert "times and not once" in (replace(mutant, text="labels").problem(ROOT) or "")
    assert "there is no" in (replace(mutant, file="ftcli/none.py").problem(ROOT) or "")
    assert "there is no" in (replace(mutant, tests=("unit/test_none.py",)).problem(ROOT) or "")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny program with a test, in place of the checkout."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    (root / "program.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    (root / "tests" / "test_program.py").write_text(
        "import program\n\n\ndef test_it():\n    assert program.double(3) == 6\n"
    )
    monkeypatch.setattr(runner, "ROOT", root)
    monkeypatch.setattr(runner, "checkout_files", lambda: ["program.py", "tests/test_program.py"])
    return root


def test_killed_survived_and_known(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (checkout / "program.py").read_bytes()
    noticed = Mutant("noticed", "program.py", "2 * x", "3 * x", ("test_program.py",))
    missed = Mutant("missed", "program.py", "x / 2", "x / 3", ("test_program.py",))
    folder = tmp_path / "work"
    found = judge_all([noticed, missed], 1, folder)
    assert [result.outcome for result in found] == ["killed", "SURVIVED"]
    assert (checkout / "program.py").read_bytes() == before
    assert (folder / "tree-0" / "program.py").read_bytes() == before
    assert "(known)" not in capsys.readouterr().out
    assert [result.outcome for result in judge_all([noticed, missed], 1, folder)] == ["killed", "SURVIVED"]
    assert capsys.readouterr().out.count("(known)") == 2
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"key": "cut of')  # a run that was killed while it wrote
    assert Results(folder / "results.jsonl").of(found[0].key) == found[0]


def test_tests_that_fail_without_the_mutant_are_no_verdict(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "test_program.py").write_text("def test_it():\n    assert False\n")
    mutant = Mutant("noticed", "program.py", "2 * x", "3 * x", ("test_program.py",))
    (found,) = judge_all([mutant], 1, tmp_path / "work")
    assert found.outcome == "tests fail without it"
    kept = tmp_path / "work" / "results.jsonl"
    assert not kept.exists() or found.key not in [json.loads(line)["key"] for line in kept.read_text().splitlines()]


def test_two_runs_do_not_share_a_folder(checkout: Path, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another run is at work"):
            judge_all([], 1, tmp_path)
