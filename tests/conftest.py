"""Settings of the whole test run that must be made before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

# Without a GPU, tests/ops runs the Triton kernels in Triton's interpreter, which Triton decides at its import.
# Nothing else # changes by it: ftkernels takes the interpreter only where a test asks for backend="triton".
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
