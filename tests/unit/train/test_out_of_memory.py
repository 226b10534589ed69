"""What is said when memory runs out in training: in words, and from the phases of the estimate."""

from __future__ import annotations

import errno
import resource
from typing import get_args

import pytest

from ftcli.errors import is_out_of_memory, said_of
from ftcli.plan.memory.terms import Phase
from ftcli.train.loop import Doing
from ftcli.train.out_of_memory import _estimated, _where


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("forward", "in the forward pass of step 5 (a batch of 2 rows of 1,024 tokens: a.jsonl:3, 17)"),
        ("backward", "in the backward pass of step 5 (a batch of 2 rows of 1,024 tokens: a.jsonl:3, 17)"),
        ("optimizer step", "in the optimizer step of step 5 (a batch of 2 rows of 1,024 tokens: a.jsonl:3, 17)"),
        ("generation", "in the generation of step 5 (a batch of 2 rows of 1,024 tokens: a.jsonl:3, 17)"),
        ("step", "in step 5 (a batch of 2 rows of 1,024 tokens: a.jsonl:3, 17)"),
        ("evaluation", "in the evaluation after step 4"),
        ("saving", "while step 4 was saved"),
    ],
)
def test_where_it_was(doing: Doing, said: str) -> None:
    assert _where(doing, 4, (2, 1024), "a.jsonl:3, 17") == said


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_memory_can_be_short_for_libraries_as_well(said: str, short: bool) -> None:
    assert is_out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(ImportError("No module named 'x'"))
    assert is_out_of_memory(RuntimeError(said)) is short
    assert not is_out_of_memory(ValueError(said))


@pytest.mark.parametrize(("limit", "short"), [(1 << 30, True), (resource.RLIM_INFINITY, False)])
def test_a_library_that_fails_without_a_word_has_too_little_under_a_limit(
    limit: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert is_out_of_memory(SystemError("error return without exception set")) is short


def test_all_that_a_trainer_does_is_a_phase_of_the_estimate_or_has_none() -> None:
    phases, others = (set(get_args(part)) for part in get_args(Doing))
    if "step" in phases:
        phases, others = others, phases
    assert phases == set(get_args(Phase))
    for doing in phases:
        assert doing in _estimated(doing)
    assert {_estimated(doing) for doing in others} == {()}


def test_the_line_that_speaks_of_memory_is_told() -> None:
    """NumPy's error begins with twenty lines of advice."""
    last = "Original error was: libopenblas.so: failed to map segment from shared object"
    assert said_of(ImportError(f"\n\nIMPORTANT: PLEASE READ THIS\n\n{last}\n")) == last
    assert said_of(MemoryError()) == "MemoryError"
