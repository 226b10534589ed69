"""The judge `python_tests`: a completion's code passes where the row's tests run through after it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ftcli.facts.device import usable_cores
from ftcli.judges.verdicts import Scorer, Verdict

#: What a completion's code is, where it is fenced; else all of it.
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
#: No longer code is run.
_MOST_CHARS = 100_000
#: Beyond the program's own time: starting two interpreters, and ending what it leaves behind.
_GRACE_SECONDS = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def python_tests(timeout: float = 5.0, memory_mb: int = 512) -> Scorer:
    """Passes where the code of a completion and then the tests, which are the row's ``answer``, run to their end.

    Each program has a process group, a folder and limits of its own (:mod:`ftcli.judges.supervisor`), nothing of this
    process' environment, and ``timeout`` seconds. Limits are no boundary: see docs/grpo.md.
    """

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        with ThreadPoolExecutor(usable_cores()) as threads:
            passed = threads.map(partial(_passes, seconds=timeout, memory_mb=memory_mb), completions, answers)
            return [float(each) for each in passed]

    return score


def code_of_completion(text: str) -> str:
    """The first fenced block of Python, or all of the text."""
    found = _FENCED.search(text[:_MOST_CHARS])
    return found.group(1) if found is not None else text[:_MOST_CHARS]


def _passes(completion: str, tests: str, seconds: float, memory_mb: int) -> bool:
    # A number that only the end of the program says: code that leaves early with 0 has passed no test. The program
    # comes on stdin, so that it does not lie in a file beside what it runs.
    number = secrets.randbelow(100) + 101
    program = f"{code_of_completion(completion)}\n\n{tests}\n\nraise SystemExit({number})\n"
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    with tempfile.TemporaryDirectory(prefix="ftcli-tests-") as folder:
        command = [sys.executable, "-I", str(_SUPERVISOR), "program", str(seconds), str(memory_mb * 2**20)]
        try:
            done = subprocess.run(  # noqa: S603 - untrusted on purpose, and contained
                command,
                input=program.encode("utf-8", "replace"),
                env=environment,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=seconds + _GRACE_SECONDS,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
    return done.returncode == number
