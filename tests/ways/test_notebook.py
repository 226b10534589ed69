"""The notebook runs from its first cell to its last, here on the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
#: What the notebook's program does with a line that begins with `!`, and the one name that it has of IPython.
SHELL = """
import os, subprocess, sys, types
def shell(line, names):
    for name in ("MODEL", "DATA", "STEPS"):
        line = line.replace("$" + name, str(names.get(name)))
    done = subprocess.run(["bash", "-c", line])
    assert done.returncode == 0, line
display = types.ModuleType("IPython.display")
display.HTML = lambda text: print(len(text), "characters of report")
sys.modules["IPython"] = types.ModuleType("IPython"); sys.modules["IPython.display"] = display
"""


def notebook() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((NOTEBOOKS / "first-run.ipynb").read_text(encoding="utf-8"))
    return found


def program() -> str:
    """The notebook's code cells as one program."""
    lines = [SHELL]
    for cell in notebook()["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                lines.append(f"shell({line[1:]!r}, globals())" if line.startswith("!") else line)
    return "\n".join(lines)


def test_it_is_what_its_maker_writes_and_holds_no_output(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "maker", "__file__": str(NOTEBOOKS / "make.py")}
    exec(compile((NOTEBOOKS / "make.py").read_text(), "make.py", "exec"), scope)
    found = notebook()
    assert found == scope["notebook"]()
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    assert not any(cell.get("outputs") for cell in found["cells"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_it_runs_to_its_end_on_the_bundled_model(tmp_path: Path) -> None:
    small = {"MODEL": "bundled:tiny-gemma2", "DATA": "bundled:smoke-train", "STEPS": "4"}
    environment = {
        **os.environ,
        **{f"FTCLI_NOTEBOOK_{name}": value for name, value in small.items()},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "FTCLI_CACHE": str(tmp_path / "cache"),
    }
    (tmp_path / "cells.py").write_text(program())
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "characters of report" in done.stdout
    assert (tmp_path / "runs" / "mine" / "export" / "safetensors" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "runs" / "mine" / "eval.json").read_text())["run"]["loss"] > 0
