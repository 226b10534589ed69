"""The commands of docs/quickstart.md do what the page says, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(\w+) (run|exit=\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_runs(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 7
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1"}
    for language, expected, text in blocks:
        command = ["bash", "-e", "-c", text] if language == "console" else [sys.executable, "-W", "ignore", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        status = 0 if expected == "run" else int(expected.removeprefix("exit="))
        assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / "my-first" / "report.html").exists()
