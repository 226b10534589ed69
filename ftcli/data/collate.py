"""Makes batches: rows padded to the longest, or documents one after the other, with positions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.plan.batches import Batches, unpadded_shape


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


def packed_batch(
    packs: Sequence[Sequence[TokenizedRow]], pad_token_id: int, *, width: int | None = None
) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and ``position_ids`` of shape (packs, width), ``lengths`` (packs,), all int64, and
    ``document_starts`` (packs, width), int32: where in its row the document of a token begins.

    Positions begin anew with each document. What fills a row up are documents too, without labels, and none longer
    than the longest of the others: scaled rotations may depend on the largest position. The first token of a document
    is never a label: what stands before it is another document's last token.

    Args:
        width: Tokens of a row; the longest pack's when None.
    """
    lengths = [sum(len(tokens.input_ids) for tokens in pack) for pack in packs]
    longest = max(len(tokens.input_ids) for pack in packs for tokens in pack)
    shape = (len(packs), max(lengths) if width is None else width)
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
        batch["position_ids"][index, start:] = torch.arange(shape[1] - start) % longest
    batch["document_starts"] = (torch.arange(shape[1]) - batch["position_ids"]).to(torch.int32)
    return batch


def unpadded_batch(documents: Sequence[TokenizedRow], pad_token_id: int) -> dict[str, Tensor]:
    """``documents`` in their :func:`unpadded_shape`: one row of all of them, or each a row of its own.

    The keys are those of :func:`packed_batch`. Rows of their own are whole where ``document_starts`` is a single zero;
    they need neither that nor ``position_ids`` where nothing is filled up.
    """
    sizes = [len(tokens.input_ids) for tokens in documents]
    rows, width = unpadded_shape(sizes)
    if rows != len(documents):
        return packed_batch([documents], pad_token_id, width=width)
    batch = {
        "input_ids": torch.full((rows, width), pad_token_id, dtype=torch.int64),
        "labels": torch.full((rows, width), IGNORE_INDEX, dtype=torch.int64),
        "lengths": torch.tensor(sizes, dtype=torch.int64),
    }
    for index, tokens in enumerate(documents):
        batch["input_ids"][index, : sizes[0]] = torch.tensor(tokens.input_ids, dtype=torch.int64)
        batch["labels"][index, 1 : sizes[0]] = torch.tensor(tokens.labels[1:], dtype=torch.int64)
    if width > sizes[0]:  # nothing supervised sees what follows; its position must not be a larger one
        batch["position_ids"] = torch.arange(width).clamp(max=sizes[0] - 1)[None]
        batch["document_starts"] = torch.zeros((1, 1), dtype=torch.int32)
    return batch


def documents_batch(documents: Sequence[TokenizedRow], batches: Batches, pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` of documents that are scored, and what else says how they are laid out.

    Padded on the right they need no mask: under causal attention nothing that is scored sees the padding.
    """
    if batches.layout == "unpadded":
        batch, left_out = unpadded_batch(documents, pad_token_id), "lengths"
    else:
        rows: list[Unpadded] = [{"input_ids": one.input_ids, "labels": one.labels} for one in documents]
        batch, left_out = PaddingCollator(pad_token_id)(rows), "attention_mask"
    return {name: value for name, value in batch.items() if name != left_out}


@dataclass(frozen=True, slots=True)
class EpochCollator:
    """Turns numbers of training sequences (``{"index": 3}``) into batches."""

    epochs: Epochs
    pad_token_id: int
    batches: Batches

    def __call__(self, units: Sequence[int]) -> dict[str, Tensor]:
        members = [self.epochs.members(unit) for unit in units]
        if self.batches.layout == "unpadded":
            documents = [tokens for pack in members for tokens in pack]
            return unpadded_batch(documents, self.pad_token_id)
        if self.epochs.packs is not None:
            return packed_batch(members, self.pad_token_id)
        rows: list[Unpadded] = [{"input_ids": tokens.input_ids, "labels": tokens.labels} for (tokens,) in members]
        return PaddingCollator(self.pad_token_id)(rows)
