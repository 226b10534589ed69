"""The same through a process of its own: status, no traceback, and little work.

Work is counted in calls of Python functions, which are as many on every machine: a million take less than a second, the
import of torch alone has several. docs/performance.md has wall-clock times of an idle machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import telling

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


#: Those that end in a room of their own: the schema, the reader of files, the command line.
TOLD = ("many problems", "hundred megabytes", "usage")


COUNTING = """
import sys
from pathlib import Path
count = 0
def called(frame, event, argument):
    global count
    count += event == "call"
sys.setprofile(called)
from ftcli.cli.app import main
from tests.tiers import telling
status = main()
sys.setprofile(None)
Path("calls").write_text(str(count))
sys.exit(status)
"""


def counted(argv: list[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """One run, and the calls that it took."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *argv], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    return done, int((folder / "calls").read_text())


@pytest.mark.parametrize(("argv", "text", "code"), telling({name: tuple(case) for name, *case in CASES}, *TOLD))
def test_answer_of_a_process(tmp_path: Path, argv: list[str], text: str | None, code: str) -> None:
    with (tmp_path / "r.yaml").open("w") as stream:
        stream.truncate(100 * 2**20) if text is None else stream.write(text)
    done, calls = counted(argv, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"error[{code}]" in done.stderr
    assert "help: " in done.stderr
    assert "Traceback" not in done.stderr
    assert calls < 1_000_000


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from ftcli.cli.app import main; status = main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'yaml', 'triton', 'numpy'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0
    assert "Commands:" in done.stdout
    assert done.stderr.strip() == "[]"
    assert counted(["--help"], tmp_path)[1] < 200_000


def test_bad_recipe_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(HEAD + "lora: {r: 0}\n")
    code = (
        "import sys; from ftcli.cli.app import main; status = main(['check', 'r.yaml']); "
        "print('torch' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
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
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stderr.splitlines()[-1] == "False"
    not_made = json.loads(done.stdout)["result"]["not_made"]
    assert any("the tokenizer of google/gemma-2-9b-it is not on this machine" in item["reason"] for item in not_made)
