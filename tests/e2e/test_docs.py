"""The commands of pages in docs/ do what the page says, in order, in an empty folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.drill import Server

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Each page, how many blocks it has at least, and a file that it leaves.
PAGES = [
    ("quickstart", 7, "runs/my-first/report.html"),
    pytest.param("migrating", 12, "outputs/mine/export/safetensors/model.safetensors", marks=pytest.mark.long),
    pytest.param("sweeps", 2, "runs/rates/comparison.html", marks=pytest.mark.long),
    ("evaluation", 4, "runs/my/eval.json"),
    ("chat", 3, "answer.json"),
    ("troubleshooting", 10, "runs/trial.previous-1/report.html"),
]
BLOCK = re.compile(r"^```(\w+) (run|exit=\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "count", "left"), PAGES)
def test_a_page_runs(
    page: str, count: int, left: str, shell: dict[str, str], drill_server: Server, tmp_path: Path
) -> None:
    if page == "sweeps":  # whose runs are processes of their own, and know of no narrow model
        prepared = [each for each in json.loads(shell["DRILL_PREPARATIONS"]) if each[0] != "bundled_models"]
        shell = {**shell, "DRILL_PREPARATIONS": json.dumps(prepared)}
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(DOCS / "preemptible.sh", folder)
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(blocks) >= count
    for language, expected, text in blocks:
        status = 0 if expected == "run" else int(expected.removeprefix("exit="))
        if language == "python":
            script = tmp_path / "block.py"
            script.write_text(text, encoding="utf-8")
            ran = drill_server.start(cwd=folder, script=script)
            assert ran.wait() == status, f"{text}\n{ran.said}"
            continue
        command = ["bash", "-e", "-c", text]
        done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    assert (folder / left).exists()
