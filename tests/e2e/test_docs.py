"""The commands of pages in docs/ do what the page says, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Each page, how many blocks it has at least, and a file that it leaves.
PAGES = [("quickstart", 7, "runs/my-first/report.html"), ("evaluation", 4, "runs/my/eval.json")]
BLOCK = re.compile(r"^```(\w+) (run|exit=\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "count", "left"), PAGES)
def test_a_page_runs(page: str, count: int, left: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(blocks) >= count
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1"}
    for language, expected, text in blocks:
        command = ["bash", "-e", "-c", text] if language == "console" else [sys.executable, "-W", "ignore", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        status = 0 if expected == "run" else int(expected.removeprefix("exit="))
        assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / left).exists()
