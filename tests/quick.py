"""What no test waits for: the disk, and git's answer about this checkout."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def unflushed(file: int) -> None:
    """In place of ``os.fsync``: what tests write need not outlast a power cut. A run flushes some thirty files, and a
    disk takes milliseconds for each. Real flushes are made by test_wheel.py.
    """
    os.fstat(file)  # it has to be open all the same


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Nothing is flushed, and git is asked once whether this checkout is changed: three processes, for each run's
    manifest.
    """
    from ftcli.run import manifest

    ask = manifest.git_state
    once = functools.cache(lambda: ask(ROOT))
    patch.setattr(os, "fsync", unflushed)
    patch.setattr(manifest, "git_state", lambda folder: once() if folder == ROOT else ask(folder))
