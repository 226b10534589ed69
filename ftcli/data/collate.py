"""Makes batches: rows padded to the longest, or packs of rows with positions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import Tokens
from ftcli.labels import IGNORE_INDEX


class Unpadded(TypedDict):
    """A row's tokens and labels, of one length, as they come to a batch."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class PaddingCollator:
    """Makes ``input_ids``, ``attention_mask`` and ``labels`` of shape (batch, longest), int64, padded on the right.

    Rows keep an attention mask of their own, so the pad token's id never matters and may equal eos.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Unpadded]) -> dict[str, Tensor]:
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


def packed_batch(packs: Sequence[Sequence[Tokens]], pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and ``position_ids`` of shape (packs, longest), and ``lengths`` (packs,), all int64.

    Positions begin anew with each document, and so does the padding at the end. There is no attention mask:
    transformers, given none, takes every position that does not follow the one before it as the start of another
    document, and lets no document see another. The first token of a document is never a label: what stands before it
    is another document's last token.
    """
    lengths = [sum(len(tokens.input_ids) for tokens in pack) for pack in packs]
    shape = (len(packs), max(lengths))
    batch = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
    }
    for index, pack in enumerate(packs):
        start = 0
        for tokens in pack:
            end = start + len(tokens.input_ids)
            batch["input_ids"][index, start:end] = torch.tensor(tokens.input_ids, dtype=torch.int64)
            batch["labels"][index, start + 1 : end] = torch.tensor(tokens.labels[1:], dtype=torch.int64)
            batch["position_ids"][index, start:end] = torch.arange(end - start)
            start = end
        batch["position_ids"][index, start:] = torch.arange(shape[1] - start)
    return batch


@dataclass(frozen=True, slots=True)
class EpochCollator:
    """Turns numbers of training sequences (``{"index": 3}``) into batches."""

    epochs: Epochs
    pad_token_id: int

    def __call__(self, chosen: Sequence[dict[str, int]]) -> dict[str, Tensor]:
        members = [self.epochs.members(row["index"]) for row in chosen]
        if self.epochs.packs is not None:
            return packed_batch(members, self.pad_token_id)
        rows: list[Unpadded] = [{"input_ids": tokens.input_ids, "labels": tokens.labels} for (tokens,) in members]
        return PaddingCollator(self.pad_token_id)(rows)
