"""Every kernel compiles for GPUs that are not here, without spilling registers where it matters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = Path(__file__).resolve().parents[2] / "kernels" / "bench" / "offline.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "ranks", "may_spill"),
    [("90", "bfloat16", "16 64", False), ("89", "bfloat16", "32 64", True), ("75", "float16", "16", True)],
    ids=["h200", "rtx-4090", "t4"],
)
def test_kernels_compile(capability: str, dtype: str, ranks: str, may_spill: bool, tmp_path: Path) -> None:
    """Within the GPU's shared memory: rank 64 needed more than an H200 has, rank 16 more than an RTX 4090."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(OFFLINE), "--capability", capability, "--dtype", dtype, "--ranks", *ranks.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) >= 20
    assert "FAILED" not in ran.stdout
    if not may_spill:
        # Up to four registers outside the loops cost nothing: those tiles were measured to be the fastest. With heads
        # of 256 the rotation spills ten, and is as fast as memory all the same.
        spilled = {line: int(re.findall(r"spilled (\d+)", line)[0]) for line in lines if "rank  16" in line}
        assert len(spilled) >= 20
        assert [line for line, size in spilled.items() if size > 16 and "heads" not in line] == []
