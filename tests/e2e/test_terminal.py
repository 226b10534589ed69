"""A run in a real terminal, however narrow, and Ctrl-C in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import RECIPE, merged

LIMIT_SECONDS = 300
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(words: list[str], columns: int, *, interrupt_at: bytes) -> tuple[int, list[str]]:
    """Runs ftcli in a terminal of that width, types Ctrl-C when ``interrupt_at`` is seen; status and lines shown."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, "-m", "ftcli", *words], {**environment, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    shown, typed, until = b"", False, time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the other side is closed
            break
        shown += piece
        if not typed and interrupt_at in ESCAPE.sub(b"", shown):
            os.write(terminal, b"\x03")
            typed = True
    _, status = os.waitpid(process, 0)
    lines = re.split(r"[\r\n]+", ESCAPE.sub(b"", shown).decode(errors="replace"))
    return os.waitstatus_to_exitcode(status), [line for line in lines if line.strip()]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 80])
def test_the_line_keeps_step_and_time_and_ctrl_c_says_what_it_does(tmp_path: Path, columns: int) -> None:
    change = {"run": {"output_dir": str(tmp_path / "r")}, "train": {"max_steps": 400}, "eval": {"every_steps": 4}}
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(merged(RECIPE, change)))
    status, lines = in_terminal(["train", str(recipe), "--offline"], columns, interrupt_at=b"6/400")
    assert status == 130
    progress = [line for line in lines if re.search(r"\d+/400", line)]
    assert any("4/400" in line for line in progress)
    assert all(len(line.replace("^C", "")) <= columns for line in progress)
    assert all(re.search(r"\d+/400  ETA (\?|\w+)", line) for line in progress)
    text = "\n".join(lines)
    assert "held-out before training: loss" in text
    assert "held-out after step 4: loss" in text
    assert "Ctrl-C" in text
    assert "SIGINT: this step is finished and a checkpoint is written" in text
    assert re.search(r"error\[FT701\]: stopped by SIGINT after step \d+; checkpoint written to", text)
    if columns == 80:
        assert any("loss" in line and "held-out" in line and "lr" in line for line in progress)
