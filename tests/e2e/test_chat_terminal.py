"""`ftcli chat` as a person has it: a process of its own in a terminal."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import RECIPE, merged
from tests.e2e.drill import Server
from tests.terminal import Terminal, in_terminal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on random weights: its model says the last character again and again, and never ends an answer."""
    from ftcli.cli.app import main

    folder = tmp_path_factory.mktemp("talk")
    change = {
        "run": {"output_dir": str(folder / "run")},
        "model": {"init": "random"},
        "data": {"max_seq_len": 1024},
        "train": {"max_steps": 1},
    }
    recipe = folder / "r.yaml"
    recipe.write_text(yaml.safe_dump(merged(RECIPE, change)))
    assert main(["train", str(recipe), "--offline", "--quiet"]) == 0
    return folder / "run"


@contextlib.contextmanager
def talking(run: Path, *options: str, server: Server) -> Iterator[Terminal]:
    words = ("chat", str(run), "--offline", "--raw", "--temperature", "0", *options)
    with in_terminal(*words, server=server) as terminal:
        terminal.wait_for(r"^> $")
        yield terminal


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_talk_in_a_terminal_ends_with_0(run: Path, drill_server: Server) -> None:
    with talking(run, "--max-new-tokens", "4", server=drill_server) as terminal:
        assert "/reset starts over, /exit or Ctrl-D quits" in terminal.shown()
        terminal.type("xyz\n")
        assert "> xyz\nzzzz\n(ended by --max-new-tokens 4)\n> " in terminal.wait_for(r"^> ", 2)
        terminal.type("/what\n")
        assert terminal.wait_for(r"^> ", 3).count("/exit or Ctrl-D quits") == 2
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_stops_the_answer_and_at_the_prompt_it_ends_with_130(run: Path, drill_server: Server) -> None:
    with talking(run, "--max-new-tokens", "1000", server=drill_server) as terminal:
        terminal.type("xyz\n")
        terminal.wait_for(r"^zzz")
        terminal.type("\x03")
        shown = terminal.wait_for(r"^> ", 2)
        assert re.search(r"^z+(\^C)?z*\n\(stopped\)\n> $", shown, re.MULTILINE), shown
        for _ in range(
            20
        ):  # Python's readline shows the prompt just before it waits; a signal in between waits for a key
            time.sleep(0.3)
            terminal.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                terminal.process.wait(30)
                break
        assert terminal.end() == 130
        assert "Traceback" not in terminal.shown()
