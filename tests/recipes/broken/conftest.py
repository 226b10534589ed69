"""What every broken recipe and command line is held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.config.recipe import Recipe


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True, scope="module")
def _one_schema() -> Iterator[None]:
    """The schema, which each command line makes anew to explain what is wrong, is made once."""
    made = Recipe.model_json_schema()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "model_json_schema", lambda: made)
        yield


@pytest.fixture
def ftcli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs a command line in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> Outcome:
        capsys.readouterr()
        status = main(list(argv))
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run


@pytest.fixture
def refused(ftcli: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Asserts that a command line is refused with this code, at this place, with this help and exit status.

    The same command line with ``--json`` must say the same in one JSON document and nothing else on stdout.
    """

    def check(argv: Sequence[str], *, code: str, at: str, help: str, status: int = 2) -> Outcome:
        outcome = ftcli(*argv)
        assert outcome.status == status, outcome.stderr
        assert outcome.stdout == ""
        assert "Traceback" not in outcome.stderr
        assert "bug in ftcli" not in outcome.stderr
        block = _block(outcome.stderr, f"{at}: error[{code}]: ")
        told = "\n".join(line for line in block if line.startswith(("  help: ", "        ")))
        assert told, f"no help in {block}"
        assert help in told
        _assert_caret(block, at)
        document = json.loads(ftcli(*argv, "--json").stdout)
        assert document["ok"] is False
        assert document["exit_code"] == status
        assert any(finding["code"] == code and _place(finding) == at for finding in document["findings"])
        return outcome

    return check


def _block(text: str, start: str) -> list[str]:
    """The lines of the finding that begins so."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith(start)]
    assert begins, f"nothing begins with {start!r} in:\n{text}"
    block = [lines[begins[0]]]
    for line in lines[begins[0] + 1 :]:
        if not line.startswith("  "):
            break
        block.append(line)
    return block


def _assert_caret(block: list[str], at: str) -> None:
    """A place with a line and column shows that line, with the caret below that column."""
    found = re.fullmatch(r".+:(\d+):(\d+)", at)
    if found is None or at.startswith("--"):
        return
    gutter = f"  {found[1]} | "
    assert block[1].startswith(gutter), block
    assert block[2].index("^") == len(gutter) + int(found[2]) - 1, block


def _place(finding: dict[str, Any]) -> str:
    parts = (finding["source"], finding["line"], finding["column"])
    return ":".join(str(part) for part in parts if part is not None) or "ftcli"
