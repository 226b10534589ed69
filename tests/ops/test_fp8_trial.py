"""Whether fp8 products work is tried in a process of its own, whatever that does."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from ftkernels import fp8_trial
from ftkernels.fp8_trial import outcome, why_no_rows


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('works')", None),
        ("print('a product was 0.3 off')", "a product was 0.3 off"),
        ("raise RuntimeError('no kernel image')", "RuntimeError: no kernel image"),
        ("import os; os.abort()", "exit status -6"),
        ("print('works'); raise SystemExit(1)", "works"),
    ],
)
def test_what_a_trial_says(code: str, said: str | None) -> None:
    found = outcome(python(code), 60)
    assert found is None if said is None else found is not None and found.endswith(said)


def test_a_trial_that_hangs_does_not_hang_us() -> None:
    started = time.monotonic()
    found = outcome(python("import signal, time\nsignal.signal(15, lambda *_: None)\ntime.sleep(600)"), 1)
    assert found is not None
    assert "no answer in 1 s" in found
    assert time.monotonic() - started < 300


@pytest.mark.parametrize(
    ("capability", "torch_version", "said"),
    [
        ((8, 9), "2.11.0+cu130", "can hang"),
        ((8, 9), "2.12.0", None),
        ((9, 0), "2.11.0", None),
        ((10, 0), "2.13.0", None),
        ((12, 0), "2.13.0", "have failed on capability 12.0"),
    ],
)
def test_what_is_known_of_gpus(capability: tuple[int, int], torch_version: str, said: str | None) -> None:
    found = why_no_rows(capability, torch_version)
    assert found is None if said is None else found is not None and said in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_trial_without_a_gpu_says_that_it_failed() -> None:
    found = outcome([sys.executable, "-P", str(fp8_trial.__file__)], 120)
    assert found is not None
    assert "failed when they were tried" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_trial_on_this_gpu() -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("no fp8")
    assert fp8_trial.why_no_rows_here(capability) is None
