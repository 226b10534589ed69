"""Saves checkpoints; ``python -m tests.unit.run.saving FOLDER DESCRIPTOR``, until stdin is closed, in children of its
own that save until they are killed: a fork of this small process takes no time.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from ftcli.run.checkpoint import Checkpoints


def save(checkpoints: Checkpoints, step: int, *, size: int = 1000) -> Path:
    """A checkpoint of three files, two of them of ``size`` bytes."""
    with checkpoints.staging(step) as folder:
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "state.bin").write_bytes(step.to_bytes(8, "big") * (size // 8))
        (folder / "model.safetensors").write_bytes(bytes([step % 256]) * size)
    return checkpoints.path(step)


def _save_on(checkpoints: Checkpoints, step: int, keep_last: int, promises: int) -> NoReturn:
    """Tells each step that staging() says is complete."""
    while True:
        step += 1
        save(checkpoints, step, size=100_000)
        checkpoints.rotate(keep_last)
        os.write(promises, step.to_bytes(4, "big"))


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(root: str, promises: int) -> None:
    """For each line, the step before and how many are kept, says the pid of a child, and when that has ended."""
    os.fsync = os.fstat  # type: ignore[assignment] # as in tests/quick.py: processes are killed, the power stays on
    for line in sys.stdin:
        step, keep_last = map(int, line.split())
        child = os.fork()
        if child == 0:
            _save_on(Checkpoints(Path(root)), step, keep_last, promises)
        _say(child)
        os.waitpid(child, 0)
        _say("ended")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
