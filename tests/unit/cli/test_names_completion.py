"""Completion by the shell: its scripts, what it completes, and that it answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.cli import names
from ftcli.cli.app import main

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "import sys; from ftcli.cli.app import main; sys.exit(main())"


def ftcli(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "mine.yaml",
        "other.yml",
        "notes.txt",
        "data/rows.jsonl",
        "runs/first/recipe.yaml",
        "runs/x/y/recipe.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_script_of_each_shell_is_shown_and_installed(shell: str, tmp_path: Path) -> None:
    # typer takes the shell from the command line where it is told not to look at the processes above it.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = ftcli(tmp_path, "--show-completion", shell, **named)
    assert shown.returncode == 0
    assert f"_FTCLI_COMPLETE=complete_{shell}" in shown.stdout
    installed = ftcli(tmp_path, "--install-completion", shell, **named)
    assert installed.returncode == 0, installed.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(f"complete_{shell}" in path.read_text() for path in written)


def test_the_shell_is_found_by_itself(tmp_path: Path) -> None:
    line = f"{sys.executable} -c '{PROGRAM}' --show-completion; echo $?"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600, check=False)
    assert "_FTCLI_COMPLETE=complete_bash" in done.stdout
    assert done.stdout.endswith("0\n")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ftcli tra", {"train"}),
        ("ftcli train m", {"mine.yaml"}),
        ("ftcli recipes show smoke-g", {"smoke-grpo"}),
        ("ftcli export runs/", {"runs/first", "runs/x/"}),
        ("ftcli check mine.yaml --as rtx50", {"rtx5090"}),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("ftcli eval mine.yaml --run ", {"runs/first", "runs/x/"}),
                ("ftcli compare runs/first runs/x/", {"runs/x/y"}),
                ("ftcli recipes convert a --from ll", {"llama-factory"}),
            )
        ),
    ],
)
def test_what_bash_is_told(words: str, completed: set[str], folder: Path) -> None:
    count = len(words.split()) - (not words.endswith(" "))
    done = ftcli(folder, COMP_WORDS=words, COMP_CWORD=str(count), _FTCLI_COMPLETE="complete_bash")
    assert done.returncode == 0
    assert done.stderr == ""
    assert set(done.stdout.split()) == completed


def test_an_answer_takes_a_moment_and_nothing_heavy(folder: Path) -> None:
    words = {"COMP_WORDS": "ftcli train m", "COMP_CWORD": "2", "_FTCLI_COMPLETE": "complete_bash"}
    done = ftcli(folder, **words, PYTHONPROFILEIMPORTTIME="1")
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "ftcli.cli.names" in imported
    assert not {"torch", "transformers", "numpy", "rich", "yaml"} & set(imported)
    assert len(imported) < 500


def test_files_and_folders(folder: Path) -> None:
    assert names.recipe_files("") == ["data/", "mine.yaml", "other.yml", "runs/"]
    assert names.recipe_files(f"{folder}/o") == [f"{folder}/other.yml"]
    assert names.run_folders("") == ["runs/first", "runs/x/"]
    assert names.run_folders("dat") == ["data/"]
    assert names.run_folders("nowhere/") == []
    assert names.runs_and_recipes("m") == ["mine.yaml"]
    assert names.gpus("h") == ["h100", "h200"]


def test_a_shell_that_is_not_known_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shellingham

    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("cmd", "cmd"))
    assert main(["--install-completion"]) == 2
    assert "cmd" in "".join(capsys.readouterr())
