"""Pads rows of a batch to their longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftcli.data.mask import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class PaddingCollator:
    """Makes ``input_ids``, ``attention_mask`` and ``labels`` of shape (batch, longest), int64, padded on the right.

    Rows keep an attention mask of their own, so the pad token's id never matters and may equal eos.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), longest), self.pad_token_id, dtype=torch.int64),
            "attention_mask": torch.zeros((len(rows), longest), dtype=torch.int64),
            "labels": torch.full((len(rows), longest), IGNORE_INDEX, dtype=torch.int64),
        }
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][index, :length] = torch.tensor(row["input_ids"], dtype=torch.int64)
            batch["attention_mask"][index, :length] = 1
            batch["labels"][index, :length] = torch.tensor(row["labels"], dtype=torch.int64)
        return batch
