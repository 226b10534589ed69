"""Tries whether fp8 products with row scales work on a GPU, in a process of its own, unless it is known.

``torch._scaled_mm`` takes another kernel on each generation. On capability 8.9 the one of torch before 2.12 ignores the
stream that it is called on and can hang the GPU (pytorch#177651); on 12.0 it has failed (pytorch#192707); and some
builds of torch have none. A hang cannot be caught in the process that it happens in, so another one tries.

Needs neither torch nor triton; run as a script it is the trial, and imports torch.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version as installed_version

#: How long a trial may take in all: importing torch and opening the GPU take most of it.
SECONDS = 120
#: Largest relative error (Frobenius) of a product: fast accumulation has 5e-3.
_ALLOWED = 2e-2
_WORKS = "works"


def why_no_rows(capability: tuple[int, int], torch_version: str | None = None) -> str | None:
    """The reason why fp8 products with scales by rows are not to be relied on, by what is known of a GPU; None if they
    are.

    Args:
        torch_version: That of the installed torch when None.
    """
    release = tuple(int(part) for part in (torch_version or installed_version("torch")).split(".")[:2])
    if capability == (8, 9) and release < (2, 12):
        return "fp8 products with scales by rows can hang on capability 8.9 before torch 2.12"
    if capability[0] == 12:
        return f"fp8 products with scales by rows have failed on capability {capability[0]}.{capability[1]}"
    return None


@cache
def why_no_rows_here(capability: tuple[int, int]) -> str | None:
    """The reason why they do not work on this machine's first GPU, which is tried once a process; None if they do.

    Where they are known to hang nothing is tried: the GPU would stay busy.
    """
    if capability == (8, 9) and (known := why_no_rows(capability)) is not None:
        return known
    return outcome([sys.executable, "-P", __file__], SECONDS)


def outcome(command: list[str], seconds: float) -> str | None:
    """The problem that the trial ``command`` finds; None when the products work."""
    process = subprocess.Popen(  # noqa: S603  # the interpreter and a file of this package
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # what waits for a GPU that hangs may outlive even that
            process.communicate(timeout=5)
        return f"fp8 products with scales by rows gave no answer in {seconds:g} s when they were tried on this GPU"
    lines = (said.strip() or errors.strip()).splitlines()
    last = lines[-1][:200] if lines else f"exit status {process.returncode}"
    if process.returncode == 0 and last == _WORKS:
        return None
    return f"fp8 products with scales by rows failed when they were tried on this GPU: {last}"


def _try() -> str:
    """Multiplies on the GPU's default stream and on another one, and compares with plain products."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    worst = 0.0
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for rows, columns, features in ((512, 1024, 256), (300, 512, 1040), (4096, 4096, 1024)):
                a, b = (
                    torch.randn((count, features), device="cuda", generator=generator).to(torch.float8_e4m3fn)
                    for count in (rows, columns)
                )
                scale_a, scale_b = (
                    2.0 ** torch.randint(-3, 4, (count, 1), device="cuda", generator=generator).float()
                    for count in (rows, columns)
                )
                found = torch._scaled_mm(
                    a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True
                ).float()
                wanted = (a.float() * scale_a) @ (b.float() * scale_b).t()
                worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        stream.synchronize()
    return _WORKS if worst <= _ALLOWED else f"a product was {worst:.2g} off"


if __name__ == "__main__":
    sys.stdout.write(f"{_try()}\n")
