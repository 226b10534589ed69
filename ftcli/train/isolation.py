"""Checks by trial that packed documents, and answers that share a prompt, do not see each other, before a run is spent
on it.

Whether they do depends on the model's own code, the attention backend and the kernels together. So this runs the model
that will be trained, instead of asking a list of model names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.collate import Pair, lengths_once, packed_batch, shared_batch, shared_beginning
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import compute_context, hidden_states, rotation_kept
from ftcli.model.quantized import has_coarse_products
from ftcli.model.routing import Routing, same_routing
from ftcli.model.selfcheck import relative_difference, rounded_otherwise
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_LONGEST = 128
#: Largest relative difference (Frobenius norm) of a document's hidden states in a pack and alone, by compute dtype:
#: other shapes round differently. A document that sees another, or has wrong positions, differs by tens of percent.
_ALONE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: Each layer enlarges what rounding left in the one before it: 80 layers of random weights in bfloat16 come to 0.1. So
#: a document may differ by this many times what it differs by at the head of a row, where nothing stands before it,
_ROUNDINGS = 2.0
#: if that, in turn, is at most this many times the number above: the filler behind it must not be seen, either.
#: Products coarser than the compute dtype enlarge a last place, and none may differ at the head of a row: a delta net's
#: chunks begin there as they do alone. So as much is allowed, up to this, as one more rounding of the embeddings makes.
#: In random Qwen3.5 and Llama on fp8 a document differed by 0.093 at most, 0.28 of such a rounding (2 to 24 layers),
#: one whose boundary is wrong by 0.44 at least, 1.35 of it (4 and 8 layers; torch on a CPU, 2026-11-27).
_FILLER = 5.0
#: With the same shapes and other neighbours, nothing but atomics could differ.
_NEIGHBOURS = 1e-6


@torch.no_grad()
def check_isolation(
    model: PreTrainedModel | PeftModel,
    rows: Sequence[TokenizedRow],
    plan: DtypePlan,
    device: torch.device,
    *,
    pad_token_id: int,
) -> None:
    """Compares a document's hidden states in a pack with those beside another neighbour, and with those alone.

    Raises FtcliError FT443 (exit 3) when a document's hidden states depend on its neighbours, or are NaN.
    """
    first, second = _documents(rows)
    changed = TokenizedRow(first.row, first.input_ids[::-1], first.labels)
    start, length = len(first.input_ids), len(second.input_ids)
    usual = _ALONE[plan.compute]
    was_training = model.training
    model.eval()
    with (
        rotation_kept(model),
        compute_context(device, plan.compute, plan.autocast),
        same_routing(model) as routers,
    ):
        packed = _hidden(model, [[first, second], [second]], device, pad_token_id)
        neighbour = _hidden(model, [[changed, second], [second]], device, pad_token_id)
        inside, at_head = packed[0, start : start + length], packed[1, :length]
        among_others = relative_difference(neighbour[0, start : start + length], inside)
        chosen = [router.first for router in routers]
        _to_experts_of(routers, chosen, slice(packed.shape[1], packed.shape[1] + length))
        ahead = relative_difference(at_head, _hidden(model, [[second]], device, pad_token_id)[0])
        _to_experts_of(routers, chosen, slice(start, start + length))
        alone = _hidden(model, [[second]], device, pad_token_id)[0]
        behind = relative_difference(inside, alone)
        allowed = max(usual, _ROUNDINGS * ahead)
        if behind > allowed and has_coarse_products(model):
            with rounded_otherwise(model, getattr(torch, plan.compute)):
                again = _hidden(model, [[second]], device, pad_token_id)[0]
            allowed = max(allowed, min(relative_difference(again, alone), _FILLER * usual))
    model.train(was_training)
    if not (among_others <= _NEIGHBOURS and behind <= allowed and ahead <= _FILLER * usual):  # NaN fails
        raise FtcliError.single(
            "FT443",
            "this model does not keep packed documents apart: a document's hidden states differ by "
            f"{among_others:.2g} with another neighbour, by {max(behind, ahead):.2g} without one (relative)",
            exit_code=ExitCode.PREFLIGHT,
            help="train with data.packing: false and data.padding_free: false, or try model.attention: eager and "
            "model.kernels: off",
        )


@torch.no_grad()
def check_branches(
    model: PreTrainedModel | PeftModel, pair: Pair, plan: DtypePlan, device: torch.device, *, pad_token_id: int
) -> None:
    """Compares the hidden states of a pair's second answer behind the first with those behind another one, and with
    those of its row alone.

    Raises FtcliError FT443 (exit 3) when they depend on the first answer, or are NaN.
    """
    first, second = _short(pair)
    shared = shared_beginning((first, second))
    turned = [*first.input_ids[:shared], *first.input_ids[shared:][::-1]]
    turned[shared] = first.input_ids[shared]  # what they share stays what it is
    length = len(second.input_ids)
    was_training = model.training
    model.eval()
    with (
        rotation_kept(model),
        compute_context(device, plan.compute, plan.autocast),
        same_routing(model) as routers,
    ):
        behind, start = _branch(model, (first, second), device, pad_token_id)
        other, _ = _branch(model, (TokenizedRow(first.row, turned, turned), second), device, pad_token_id)
        _to_experts_of(
            routers, [router.first for router in routers], slice(shared), slice(start, start + length - shared)
        )
        alone = _hidden(model, [[second]], device, pad_token_id)[0]
    model.train(was_training)
    among_others = relative_difference(other[start:], behind[start:])
    by_itself = relative_difference(torch.cat([behind[:shared], behind[start:]]), alone)
    if not (among_others <= _NEIGHBOURS and by_itself <= _FILLER * _ALONE[plan.compute]):
        raise FtcliError.single(
            "FT443",
            "this model does not keep the answers of a pair apart that share their prompt: the second one's hidden "
            f"states differ by {among_others:.2g} behind another first one, by {by_itself:.2g} without one (relative)",
            exit_code=ExitCode.PREFLIGHT,
            help="train with preference.share_prompts: off; train.method: reward with data.padding_free: false",
        )


def _to_experts_of(routers: Sequence[Routing], chosen: Sequence[Tensor | None], *tokens: slice) -> None:
    """Sends the next pass to the experts of these tokens of the first, which it is compared with."""
    for router, of_all in zip(routers, chosen, strict=True):
        router.first = None if of_all is None else torch.cat([of_all[some] for some in tokens])


def _short(pair: Pair) -> Pair:
    """The last tokens of what both rows begin with, and the first of what they go on with."""
    shared, half = shared_beginning(pair), _LONGEST // 2
    first, second = (
        TokenizedRow(row.row, ids := row.input_ids[max(0, shared - half) : shared + half], ids) for row in pair
    )
    return first, second


def _branch(
    model: PreTrainedModel | PeftModel, pair: Pair, device: torch.device, pad_token_id: int
) -> tuple[Tensor, int]:
    """(S, H) of a pair as it is laid out, without filler, and where its second branch begins."""
    batch, _, _ = shared_batch([pair], Batches("unpadded", "a trial", shares_prompts=True), pad_token_id)
    states = hidden_states(model, {name: value.to(device) for name, value in batch.items()}).tensor.float()
    return states[0, : int(lengths_once(pair).sum())], len(pair[0].input_ids)


def _documents(rows: Sequence[TokenizedRow]) -> tuple[TokenizedRow, TokenizedRow]:
    """Two short documents of different lengths, the second the longer one where there are two."""
    short = [TokenizedRow(row.row, row.input_ids[:_LONGEST], row.labels[:_LONGEST]) for row in rows]
    by_length = sorted(short, key=lambda row: len(row.input_ids))
    first, second = by_length[len(by_length) // 2], by_length[-1]
    if len(set(first.input_ids)) < 2:  # reversed, it would be the same
        first = TokenizedRow(
            first.row, [*second.input_ids, *second.input_ids[:1]], [*second.labels, *second.labels[:1]]
        )
    return first, second


def _hidden(
    model: PreTrainedModel | PeftModel, packs: Sequence[Sequence[TokenizedRow]], device: torch.device, pad_token_id: int
) -> Tensor:
    batch = packed_batch(packs, pad_token_id)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "position_ids", "document_starts")}
    return hidden_states(model, inputs).tensor.float()
