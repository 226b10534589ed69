"""Times how long the command line takes to answer: help, and a refused recipe, beside an empty Python program.

python kernels/bench/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 11
BAD_RECIPE = "version: 1\nmodel: {name_or_path: google/gemma-2-9b}\ndata: {train: [x.jsonl], cutoff_len: 4096}\n"


def median_seconds(command: list[str], status: int) -> float:
    """Wall seconds of a command that must exit with ``status``."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ran = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        times.append(time.perf_counter() - began)
        if ran.returncode != status:
            raise SystemExit(f"{' '.join(command)} exited {ran.returncode}: {ran.stderr.decode()}")
    return statistics.median(times)


def main() -> None:
    """A table in Markdown."""
    ftcli = str(Path(sys.executable).parent / "ftcli")
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "bad.yaml"
        recipe.write_text(BAD_RECIPE)
        rows = {
            "`python -c pass`": median_seconds([sys.executable, "-c", "pass"], 0),
            "`ftcli --help`": median_seconds([ftcli, "--help"], 0),
            "`ftcli check` of a bad recipe": median_seconds([ftcli, "check", str(recipe)], 2),
        }
    print("| command | seconds |\n|---|---|")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.3f} |")


if __name__ == "__main__":
    main()
