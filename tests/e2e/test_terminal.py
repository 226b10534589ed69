"""A run in a real terminal, however narrow, and Ctrl-C in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import NARROW, recipe_of
from tests.e2e.drill import Server
from tests.terminal import in_terminal


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("columns", [20, 80])
def test_the_line_keeps_step_and_time_and_ctrl_c_says_what_it_does(
    tmp_path: Path, columns: int, drill_server: Server
) -> None:
    change: dict[str, Any] = {"train": {"max_steps": 400}, "eval": {"every_steps": 100, "samples": 1}}
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(NARROW, tmp_path / "r", change)))
    with in_terminal("train", str(recipe), "--offline", columns=columns, server=drill_server) as terminal:
        # A hundred steps before the next evaluation, which a signal would leave at once.
        terminal.wait_for(r"held-out after step 100:[\s\S]*\b1\d\d/400")
        terminal.type("\x03")
        assert terminal.end() == 130
        lines = terminal.lines()
    progress = [line for line in lines if re.search(r"\d+/400", line)]
    assert any("100/400" in line for line in progress)
    assert all(len(line.replace("^C", "")) <= columns for line in progress)
    assert all(re.search(r"\d+/400  ETA (\?|\w+)", line) for line in progress)
    text = "\n".join(lines)
    assert "held-out before training: loss" in text
    assert "held-out after step 100: loss" in text
    assert "Ctrl-C" in text
    assert "SIGINT: stopping; training first finishes its step and writes a checkpoint" in text
    assert re.search(r"error\[FT701\]: stopped by SIGINT after step \d+; checkpoint written to", text)
    if columns == 80:
        assert any("loss" in line and "held-out" in line and "lr" in line for line in progress)
