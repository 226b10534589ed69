"""Whether a server's answers are those of an adapter or of the base that it belongs to."""

from __future__ import annotations

import pytest
import torch

from ftcli.methods.grpo.served import uses_adapter


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_answers_tell_whose_they_are_as_soon_as_that_can_be_told(noise: float) -> None:
    generator = torch.Generator().manual_seed(3)
    base = -5 * torch.rand(4096, generator=generator)
    moved, errors = torch.randn(4096, generator=generator), noise * torch.randn(4096, generator=generator)
    for size in (0.0, 1e-4, 0.01, 0.3):
        adapted = base + size * moved
        found = uses_adapter(adapted + errors, adapted, base), uses_adapter(base + errors, adapted, base)
        certain = size >= (0.01 if noise else 1e-4)
        assert found == ((True, False) if certain else (None, None)), size
    assert uses_adapter(base[:0], base[:0], base[:0]) is None


def test_a_server_of_neither_is_not_taken_for_one_of_them() -> None:
    base = torch.zeros(64)
    assert uses_adapter(base + 1.0, base + 0.01 * torch.randn(64), base) is None
