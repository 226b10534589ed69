"""The same through a process of its own: status, no traceback, and an answer within a second.

Seconds are those of the processor: what others do on a machine at the same time is no property of ftcli.
docs/performance.md has wall-clock times of an idle machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n"
CASES = [
    ("unknown key", ["check", "r.yaml"], HEAD + "train: {learning_rte: 1}\n", "FT201"),
    ("many problems", ["train", "r.yaml"], HEAD + "sequence_len: 1\nlora: {r: 0}\ntrain: {epochs: x}\n", "FT202"),
    ("tab", ["eval", "r.yaml"], "lora:\n\tr: 8\n", "FT111"),
    ("hundred megabytes", ["grpo", "r.yaml"], None, "FT104"),
    ("missing file", ["check", "nowhere.yaml"], "", "FT101"),
    ("bad override", ["bench", "r.yaml", "--set", "lora.r=x"], HEAD, "FT204"),
    ("usage", ["train"], "", "FT150"),
]


def timed(argv: list[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """One run, and the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from ftcli.cli.app import main; sys.exit(main())", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("argv", "text", "code"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_answer_of_a_process(tmp_path: Path, argv: list[str], text: str | None, code: str) -> None:
    with (tmp_path / "r.yaml").open("w") as stream:
        stream.truncate(100 * 2**20) if text is None else stream.write(text)
    done, seconds = timed(argv, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"error[{code}]" in done.stderr
    assert "help: " in done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < 1.0


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from ftcli.cli.app import main; status = main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'yaml', 'triton', 'numpy'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "Commands:" in done.stdout
    assert done.stderr.strip() == "[]"
    assert any(timed(["--help"], tmp_path)[1] < 0.3 for _ in range(3))


def test_bad_recipe_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(HEAD + "lora: {r: 0}\n")
    code = (
        "import sys; from ftcli.cli.app import main; status = main(['check', 'r.yaml']); "
        "print('torch' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "False"


def test_a_model_of_which_nothing_is_here_is_checked_without_torch(tmp_path: Path) -> None:
    """Its config.json is bundled, and rows are not tokenized without its tokenizer."""
    code = (
        "import sys; from ftcli.cli.app import main; "
        "status = main(['check', sys.argv[1], '--as', 'h100', '--offline', '--json']); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(status)"
    )
    recipe = Path(__file__).parents[3] / "recipes" / "gemma2-9b.yaml"
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)],
        cwd=tmp_path, env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stderr.splitlines()[-1] == "False"
    not_made = json.loads(done.stdout)["result"]["not_made"]
    assert any("the tokenizer of google/gemma-2-9b-it is not on this machine" in item["reason"] for item in not_made)
