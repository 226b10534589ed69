"""What no test waits for: the disk, git's answer about this checkout, the rate of products, what libraries ask anew."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def unflushed(file: int) -> None:
    """In place of ``os.fsync``: what tests write need not outlast a power cut. A run flushes some thirty files, and a
    disk takes milliseconds for each. Real flushes are made by test_wheel.py.
    """
    os.fstat(file)  # it has to be open all the same


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Nothing is flushed, git is asked once whether this checkout is changed: three processes, for each run's manifest;
    and each dtype's rate, which takes a CPU without instructions for it two seconds, is measured once.
    """
    from ftcli.run import manifest

    ask = manifest.git_state
    once = functools.cache(lambda: ask(ROOT))
    patch.setattr(os, "fsync", unflushed)
    patch.setattr(manifest, "git_state", lambda folder: once() if folder == ROOT else ask(folder))
    if "torch" in sys.modules:
        from ftcli.train import bench

        patch.setattr(bench, "measure_matmul_rate", functools.cache(bench.measure_matmul_rate))
        _seed_only_what_is_there(patch)
    if "accelerate" in sys.modules:
        from accelerate.utils import imports

        # Asked several times in each step whether DeepSpeed is installed, it looks through all folders of packages.
        patch.setattr(imports, "_is_package_available", functools.cache(imports._is_package_available))


def _seed_only_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """For each kind of device that the machine lacks, ``torch.manual_seed`` keeps the seed for later, and with it the
    text of the whole stack.
    """
    import torch

    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            patch.setattr(devices, "manual_seed_all", lambda seed: None)
