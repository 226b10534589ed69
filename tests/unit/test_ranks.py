"""Processes that a command starts for itself: Ctrl-C in a terminal reaches them too, and is for the command alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, multiprocessing, os, signal, sys, time
from ftcli.ranks import ignore, start_deaf

def work(pipe):
    ignore([signal.SIGINT])
    pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    with contextlib.suppress(EOFError):
        pipe.recv()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    start_deaf(process, [signal.SIGINT])
    theirs.close()
    interrupted = 0
    while not ours.poll(0.002):  # from its first moment until it says that it is there
        try:
            os.killpg(0, signal.SIGINT)
            time.sleep(0.002)
        except KeyboardInterrupt:
            interrupted += 1
    print(interrupted > 5, ours.recv())
    ours.close()
    process.join(20)
    print(process.exitcode)
"""


def test_ctrl_c_reaches_no_process_that_is_just_starting(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600, start_new_session=True
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["True set()", "0"]
