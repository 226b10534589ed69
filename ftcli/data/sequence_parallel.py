"""A rank's part of a batch, where several ranks share each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.labels import IGNORE_INDEX


def part_of(batch: Mapping[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """Part number ``part`` of ``parts`` equal ones of every row of a batch that :mod:`ftcli.data.collate` made.

    Returns:
        ``input_ids`` and ``targets`` (B, S / parts) int64, the target of a token being the label of the next one, which
        may lie in another part, -100 for none; ``position_ids`` (B or 1, S / parts), those of whole rows;
        ``document_starts`` of whole rows, as they came or (1, 1), a zero; ``lengths`` (B,), this part's tokens that
        fill nothing up, where the batch tells them. Rows whose length is not a multiple of ``parts`` are filled up at
        their end.
    """
    ids = batch["input_ids"]
    width = -(-ids.shape[1] // parts)
    more = parts * width - ids.shape[1]
    here = slice(part * width, (part + 1) * width)
    targets = F.pad(batch["labels"][:, 1:], (0, 1 + more), value=IGNORE_INDEX)
    found = {
        "input_ids": F.pad(ids, (0, more))[:, here].contiguous(),
        "targets": targets[:, here].contiguous(),
        "position_ids": _positions(batch, more)[:, here].contiguous(),
        "document_starts": _starts(batch, more),
    }
    if "attention_mask" in batch:
        found["lengths"] = batch["attention_mask"][:, here].sum(1)
    elif "lengths" in batch:
        found["lengths"] = (batch["lengths"] - here.start).clamp(0, width)
    return found


def _positions(batch: Mapping[str, Tensor], more: int) -> Tensor:
    """Positions of whole rows. Padding repeats the last position: rotation may depend on the largest."""
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(batch["input_ids"].shape[1])[None]
    return torch.cat([positions, positions[:, -1:].expand(-1, more)], dim=1)


def _starts(batch: Mapping[str, Tensor], more: int) -> Tensor:
    """Document starts of whole rows. Padding belongs to the last document, which does not attend to it."""
    starts = batch.get("document_starts")
    if starts is None:
        return torch.zeros((1, 1), dtype=torch.int32)
    return starts if starts.shape[-1] == 1 else torch.cat([starts, starts[:, -1:].expand(-1, more)], dim=1)
