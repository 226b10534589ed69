"""K-quants through llama.cpp's own ``llama-quantize``, found by name; the gguf library cannot make them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ftcli.errors import ExitCode, FtcliError
from ftcli.tables.gguf import TYPES

_PROGRAM = "llama-quantize"


def quantize_file(source: Path, target: Path, kind: str) -> None:
    """Make ``target`` of the 16-bit file ``source``.

    Raises:
        FtcliError: FT758 where the program is not on the PATH, or fails.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise _unavailable(f"{TYPES[kind].ggml} is made by llama.cpp's {_PROGRAM}, which is not on the PATH")
    arguments = [program, str(source), str(target), TYPES[kind].ggml]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, errors="replace")  # noqa: S603
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise _unavailable(f"{_PROGRAM} failed (exit {done.returncode}): {said[-1] if said else 'it said nothing'}")


def _unavailable(reason: str) -> FtcliError:
    return FtcliError.single(
        "FT758",
        reason,
        exit_code=ExitCode.PREFLIGHT,
        help="install llama.cpp (brew install llama.cpp, or its releases), or use export.gguf.types: [q8_0]",
    )
