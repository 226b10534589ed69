"""Every kernel compiles for GPUs that are not here, without spilling registers where it matters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.drill import Server
from tests.ops.compile_offline import unwritten

OFFLINE = Path(__file__).with_name("compile_offline.py")
#: One of each kind that compiles in half a second or so: `make test` compiles these for one GPU, and
#: `make test-families` all, those that need the most registers among them, for several.
TELLING = (
    *("cross_entropy plain", "norm backward llama", "quantize rows twice", "gated norm backward", "nf4 nested"),
    *("glu backward silu, joined", "output gate backward", "thin products", "latent heads backward"),
    *("causal conv backward", "delta gates backward", "delta step", "choose token, sampled", "delta rule scan, kept"),
    *("qkv rope backward, wide heads", "attention forward", "decode attention, widest heads"),
    *("rows to int8, twice", "experts' unit, 128"),
)
#: Bytes that kernels may spill all the same: of two value heads' gradients, those of k stay in registers. Attention at
#: 512 features holds tiles of them in registers: of those that compile, an H200 timed these as the fastest
#: (kernels/bench/tune.py --model gemma4-e4b --only attention, 2026-11-27).
SPILLING = {
    "delta rule gradients": 64,
    "attention forward": 832,
    "attention dq": 2560,
    "attention dk": 2112,
    "attention dv": 896,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "ranks", "may_spill", "only"),
    [
        pytest.param("90", "bfloat16", "16", False, TELLING, id="h200"),
        pytest.param("90", "bfloat16", "16", False, (), id="h200-all", marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", True, (), id="h200-rank-64", marks=pytest.mark.long),
        pytest.param("89", "bfloat16", "32 64", True, (), id="rtx-4090", marks=pytest.mark.long),
        pytest.param("75", "float16", "16", True, (), id="t4", marks=pytest.mark.long),
    ],
)
def test_kernels_compile(
    capability: str,
    dtype: str,
    ranks: str,
    may_spill: bool,
    only: tuple[str, ...],
    drill_server: Server,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    """Within the GPU's shared memory: rank 64 needed more than an H200 has, rank 16 more than an RTX 4090.

    What an earlier test run has compiled is taken from pytest's cache; Triton looks for it by the kernel's source, that
    of what it calls, the compiler and the options.
    """
    kept = getattr(pytestconfig, "cache", None)  # there is none under -p no:cacheprovider
    cache = str(tmp_path / "kernels" if kept is None else kept.mkdir("kernels"))
    words = ("--capability", capability, "--dtype", dtype, "--cache", cache, "--ranks", *ranks.split())
    words += ("--only", *only)
    ran = drill_server.start(*words, cwd=tmp_path, script=OFFLINE)
    assert ran.wait() == 0, ran.said
    lines = ran.said.splitlines()
    assert len(lines) >= 20
    assert "FAILED" not in ran.said
    if not may_spill:
        # Up to four registers outside the loops cost nothing: those tiles were measured to be the fastest. With heads
        # of 256 the rotation spills ten, and is as fast as memory all the same.
        spilled = {line: int(re.findall(r"spilled (\d+)", line)[0]) for line in lines}
        assert len(spilled) >= 20
        assert [line for line, size in spilled.items() if size > most(line) and "heads" not in line] == []


def most(line: str) -> int:
    """Bytes that the kernel of ``line`` may spill."""
    return next((size for name, size in SPILLING.items() if line.startswith(name)), 16)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("IADD3 R12, P0, R1, 0x2, RZ", True),  # the stack pointer
        ("IADD3 R10, P1, R10, 0x2, RZ", True),  # of the kernel that read beyond its shared memory on an H100
        ("IADD3 R10, P1, R5, 0x2, RZ", False),
        ("@!P0 VIADD R1, R1, 0xffffff08", False),
        ("STL.64 [R1+0x28], R4", False),
        ("LDC.64 R10, c[0x0][0x248]", False),
    ],
)
def test_what_ptxas_has_left_unwritten_is_found(line: str, found: bool) -> None:
    before = ("LDC R1, c[0x0][0x28]", "LDC.64 R4, c[0x0][0x248]")
    sass = "\n".join(
        f"        /*00a0*/                   {text} ;"
        for text in (*before, line, "BRA `(.L_x_0)", "IADD3 R7, R6, R5, RZ")
    )
    assert bool(unwritten(sass)) == found
