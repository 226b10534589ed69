"""The user's functions can do anything but end the command."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import FtcliError, Unwinding
from ftcli.judges import UserJudge, load_function
from ftcli.judges.contained import contained
from tests.e2e.drill import Server


def judged(tmp_path: Path, body: str, head: str = "") -> list[float | None]:
    """What ``score`` with this body gives for two completions."""
    file = tmp_path / "mine.py"
    file.write_text(f"import os, sys\n{head}\ndef score(completions, prompts, **columns):\n    {body}\n")
    spec = f"{file}:score"
    return UserJudge(spec, load_function(spec), {}).scores(["a", "bb"], ["p", "q"], {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(0)", r"tried to end the program \(exit status 0\)"),
        ("os._exit(0)", r"tried to end the program \(exit status 0\)"),
        ("raise BaseException('mine')", "raised BaseException: mine"),
        ("raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})", "its text raises ZeroDivisionError"),
        ("return [10**400, 0]", "returned an integer beyond every float for completion 1"),
        ("return [float('inf'), 0]", "returned inf for completion 1"),
        (
            "return [0, type('F', (float,), {'__float__': lambda s: 1 / 0})(1)]",
            "a number that raised ZeroDivisionError",
        ),
        ("return [type('R', (), {'__repr__': lambda s: os._exit(0)})(), 0]", "an object of type R"),
    ],
)
def test_a_function_that_ends_the_program_is_a_coded_error(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(FtcliError, match=said) as caught:
        judged(tmp_path, body)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT765", 4)
    assert os._exit.__module__ == "posix"


@pytest.mark.parametrize("line", ["sys.exit(0)", "os._exit(0)", "raise BaseException", "1/0"])
def test_a_file_that_ends_the_program_when_loaded_is_a_coded_error(tmp_path: Path, line: str) -> None:
    known = set(sys.modules)
    with pytest.raises(FtcliError) as caught:
        judged(tmp_path, "return [0, 0]", head=line)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT452", 2)
    assert not {name for name in set(sys.modules) - known if name.startswith("_ftcli_user")}


@pytest.mark.parametrize("error", [KeyboardInterrupt, Unwinding])
def test_signals_pass_through(error: type[BaseException]) -> None:
    with pytest.raises(error), contained():
        raise error


def test_dataclasses_with_future_annotations_can_be_defined(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, KW_ONLY\n"
        "@dataclass\n"
        "class Point:\n"
        "    value: float\n"
        "    _: KW_ONLY\n"
        "    more: int = 0\n"
        "if True:\n"
        "    def score(completions, prompts, **columns):\n"
        "        return [Point(1.0).value for _ in completions]\n"
    )
    assert load_function(f"{file}:score")(completions=["a"], prompts=["b"]) == [1.0]


def test_a_fork_of_the_users_code_ends_as_it_likes_and_the_folder_is_the_old_one(tmp_path: Path) -> None:
    here = Path.cwd()
    body = (
        "pid = os.fork()\n    if pid == 0: os._exit(7)\n    os.chdir('/')\n    return [os.waitpid(pid, 0)[1] >> 8] * 2"
    )
    assert judged(tmp_path, body) == [7.0, 7.0]
    assert Path.cwd() == here


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)"])
def test_no_command_exits_0_without_its_result(tmp_path: Path, ending: str, drill_server: Server) -> None:
    (tmp_path / "mine.py").write_text(f"import os, sys\ndef score(completions, prompts, **kw):\n    {ending}\n")
    recipe: dict[str, Any] = {
        "model": "{name_or_path: 'bundled:tiny-gemma2', dtype: float32}",
        "data": "{train: ['bundled:smoke-train'], eval: [{path: 'bundled:smoke-eval', max_rows: 2}], max_seq_len: 64}",
        "eval": "{generate: {max_new_tokens: 2}, tasks: [{file: 'mine.py:score'}]}",
    }
    (tmp_path / "r.yaml").write_text("version: 1\n" + "".join(f"{k}: {v}\n" for k, v in recipe.items()))
    ran = drill_server.start("eval", "r.yaml", "--offline", cwd=tmp_path)
    assert ran.wait() == 4, ran.said
    assert "error[FT765]" in ran.said


def test_a_function_may_be_async() -> None:
    async def score(completions: list[str], prompts: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert UserJudge("a.py:score", score).scores(["a", "bc"], ["p", "p"], {}) == [1.0, 2.0]


def test_what_an_async_function_raises_is_its_error() -> None:
    async def score(completions: list[str], prompts: list[str]) -> list[float]:
        raise KeyError("gone")

    with pytest.raises(FtcliError, match="raised KeyError: 'gone'"):
        UserJudge("a.py:score", score).scores(["a"], ["p"], {})
