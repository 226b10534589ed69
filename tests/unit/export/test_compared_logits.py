"""An answer that is clearly another one is a disagreement, and one that was undecided is not."""

from __future__ import annotations

import pytest
import torch

from ftcli.export.verify import compare_logits


@pytest.mark.parametrize(
    ("found", "firm", "agreement"),
    [([[4.0, 0.0, -4.0], [1.0, 0.999, -2.0]], 0, 1.0), ([[4.0, 0.0, -4.0], [0.999, 1.0, -2.0]], 0, 0.5),
     ([[0.0, 4.0, -4.0], [1.0, 0.999, -2.0]], 1, 0.5)],
    ids=["the same", "where it was undecided", "where it was clear"],
)  # fmt: skip
def test_firm_disagreements(found: list[list[float]], firm: int, agreement: float) -> None:
    compared = compare_logits(torch.tensor(found), torch.tensor([[4.0, 0.0, -4.0], [1.0, 0.999, -2.0]]), 1e-2)
    assert compared.firm_disagreements == firm
    assert compared.top1_agreement == agreement
