"""Breaks one line of the program at a time and asks the nearest tests whether they notice.

    make mutants                                            # all of them: about an hour on two cores
    python -m tests.mutants.run --only train methods --jobs 1
    python -m tests.mutants.run --list

Each mutant is applied to a copy of the checkout, never to the checkout itself, and its tests run there: ``killed`` when
a test fails, ``SURVIVED`` when none does. The same tests have to pass in the copy without the mutant first. Results are
kept by the digest of the file, the mutant and its tests: a run that was stopped goes on where it ended, and a verdict
counts until one of those changes. Exit status: 0 when all were killed, 1 when one survived or could not be judged, 2
when a mutant's text is no longer in its file exactly once.

This lies in tests/ and not in docs/tools: the table says which test holds which line, moves with both, and is held
against the source in every test run by ``tests/unit/test_mutants.py``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Literal

from tests.mutants.table import ROOT, TABLE, Mutant, chosen

#: Where copies and results are kept; git ignores it.
FOLDER = ROOT / "dist" / "mutants"
#: Tests of one mutant take seconds to minutes; a mutant that makes them hang is noticed as well.
SECONDS = 900

Outcome = Literal["killed", "SURVIVED", "tests fail without it", "tests were not run"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant under its ``key``."""

    key: str
    name: str
    outcome: Outcome
    seconds: float
    said: str


class Results:
    """Lines of JSON, one a verdict, appended as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [Result(**json.loads(line)) for line in lines if line.endswith("}")]
        self._known = {result.key: result for result in kept}

    def of(self, key: str) -> Result | None:
        """The verdict of before."""
        return self._known.get(key)

    def add(self, result: Result) -> None:
        """Keeps a verdict."""
        with self._lock:
            self._known[result.key] = result
            with self._path.open("a", encoding="utf-8") as file:
                values = {name: getattr(result, name) for name in Result.__slots__}
                file.write(json.dumps(values) + "\n")


def checkout_files() -> list[str]:
    """The files that git knows or does not ignore."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listed.split("\0") if name]


def copy_checkout(to: Path) -> None:
    """Copies the checkout, in place of an earlier copy."""
    shutil.rmtree(to, ignore_errors=True)
    for name in checkout_files():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The status of pytest in the copy, and its last line; 1 where the tests take too long."""
    paths = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *paths]
    env = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}", "OMP_NUM_THREADS": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same length within a second would be taken for the original
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=tree, stdout=said, stderr=said, env=env, start_new_session=True)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 1, f"no end after {SECONDS} s"
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else "")
    return status, failed[:200]


def judge(mutant: Mutant, tree: Path, results: Results) -> Result:
    """Runs the mutant's tests without it, unless that is known to pass, and with it."""
    began, path = time.monotonic(), tree / mutant.file
    source = path.read_text(encoding="utf-8")
    key, plain = mutant.key(tree), Mutant("as it is", mutant.file, "", "", mutant.tests).key(tree)
    known = results.of(plain)
    if known is None or known.outcome != "SURVIVED":
        status, said = run_tests(tree, mutant.tests)
        if status != 0:
            outcome: Outcome = "tests fail without it" if status == 1 else "tests were not run"
            return Result(key, mutant.name, outcome, time.monotonic() - began, said)
        results.add(Result(plain, f"as it is: {mutant.file}", "SURVIVED", time.monotonic() - began, said))
    path.write_text(source.replace(mutant.text, mutant.instead), encoding="utf-8")
    try:
        status, said = run_tests(tree, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    verdicts: dict[int, Outcome] = {0: "SURVIVED", 1: "killed"}
    return Result(key, mutant.name, verdicts.get(status, "tests were not run"), time.monotonic() - began, said)


def judge_all(mutants: Sequence[Mutant], jobs: int, folder: Path) -> list[Result]:
    """Judges what has no verdict yet, ``jobs`` at a time, each in a copy of its own; prints a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is at work in {folder}: wait for it, or name another --folder") from None
        return _judged(mutants, jobs, folder)


def _judged(mutants: Sequence[Mutant], jobs: int, folder: Path) -> list[Result]:
    results, trees = Results(folder / "results.jsonl"), SimpleQueue[Path]()
    known = {mutant.name: results.of(mutant.key(ROOT)) for mutant in mutants}
    if any(found is None for found in known.values()):
        for number in range(jobs):
            copy_checkout(folder / f"tree-{number}")
            trees.put(folder / f"tree-{number}")

    def one(mutant: Mutant) -> Result:
        found, again = known[mutant.name], ""
        if found is None:
            tree = trees.get()
            try:
                found = judge(mutant, tree, results)
            finally:
                trees.put(tree)
            if found.outcome in ("killed", "SURVIVED"):
                results.add(found)
        else:
            again = " (known)"
        print(f"{found.outcome:10s} {found.seconds:5.0f} s  {mutant.name}: {found.said}{again}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def main() -> int:
    """Judges, and says what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help=f"{', '.join(TABLE)}, a name or a file")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which tests run at the same time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for copies and results")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()
    mutants = chosen(options.only)
    problems = [problem for mutant in mutants if (problem := mutant.problem(ROOT)) is not None]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{mutant.file}: {mutant.name} ({', '.join(mutant.tests)})" for mutant in mutants))
        return 0
    results = judge_all(mutants, options.jobs, options.folder.absolute())
    killed = sum(result.outcome == "killed" for result in results)
    print(f"\n{killed} of {len(results)} killed")
    for result in results:
        if result.outcome != "killed":
            print(f"{result.outcome}: {result.name}: {result.said}")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
