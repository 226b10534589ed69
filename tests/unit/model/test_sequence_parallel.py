"""Rows that several ranks share: loss and gradients are those of whole rows. Threads stand for the ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ftkernels.attention_mask import AttentionMask

from ftcli.data.collate import packed_batch, padded_batch, part_of, unpadded_batch
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.model.attention import ftcli_attention_forward
from ftcli.model.backbone import hidden_states
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss, target_positions
from ftcli.model.masks import CallMask
from ftcli.model.sequence_parallel import SequencePart
from ftcli.plan.execution import exchanged_key_heads
from ftcli.rows.row import Row
from ftcli.tables import families
from tests.small_models import TEXT, by_kind
from tests.unit.model.test_stack import adapted, taken

FAMILIES = [
    name
    for name, row in families.TABLE.items()
    if row.kernels == "layers" and row.delta_nets is None and name in TEXT  # states go through whole rows
]


class Meeting:
    """Stands for a team of ranks, one thread each."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._barrier = threading.Barrier(parts, timeout=600)
        self._sent: list[Any] = [None] * parts

    def exchange(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def exchange(sent: torch.Tensor) -> torch.Tensor:
            assert sent.is_contiguous()
            self._sent[part] = sent
            self._barrier.wait()
            came = torch.stack([other[part] for other in self._sent])
            self._barrier.wait()
            return came

        return exchange

    def together(self, work: Callable[[SequencePart], Any]) -> list[Any]:
        def one(part: int) -> Any:
            try:
                return work(SequencePart(part, self.parts, self.exchange(part)))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.parts) as pool:
            return [each.result() for each in [pool.submit(one, part) for part in range(self.parts)]]


def rows(*lengths: int) -> list[TokenizedRow]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in lengths:
        ids = torch.randint(3, 200, (length,), generator=generator).tolist()
        labels = [IGNORE_INDEX if i < length // 4 else token for i, token in enumerate(ids)]
        found.append(TokenizedRow(Row("d", length, {}), ids, labels))
    return found


BATCHES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "a whole row": lambda: unpadded_batch(rows(64), 0),
    "documents in one row": lambda: unpadded_batch(rows(17, 30, 9), 0),
    "packed rows of odd length": lambda: packed_batch([rows(11, 20), rows(7, 9, 5)], 0),
    "padded rows": lambda: padded_batch(rows(23, 40), 0),
}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole(model: Any, batch: dict[str, torch.Tensor], count: int, stack: Any = None) -> Any:
    inputs = {name: value for name, value in batch.items() if name != "lengths"}
    loss = forward_loss(model, inputs, num_items=count, stack=stack).loss
    loss.backward()
    return loss.detach(), gradients(model)


def shared(model: Any, batch: dict[str, torch.Tensor], count: int, parts: int, *, stacked: bool = False) -> Any:
    models = [copy.deepcopy(model) for _ in range(parts)]

    def work(sequence: SequencePart) -> Any:
        mine = part_of(batch, sequence.part, parts)
        mine.pop("lengths")
        mine["supervised"] = target_positions(mine["targets"].reshape(-1), 264)
        own = models[sequence.part]
        stack = taken(own) if stacked else None
        loss = forward_loss(own, mine, num_items=count, stack=stack, sequence=sequence).loss
        loss.backward()
        return loss.detach(), gradients(own)

    found = Meeting(parts).together(work)
    summed = {name: sum(each[1][name] for each in found) for name in found[0][1]}
    return sum(each[0] for each in found), summed


def require_equal(found: Any, wanted: Any) -> None:
    assert torch.allclose(found[0], wanted[0], rtol=1e-5), (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= 2e-5, (name, float(error))


@pytest.mark.parametrize("kind", list(BATCHES))
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_rows_give_the_loss_and_gradients_of_whole_rows(kind: str, parts: int) -> None:
    model, batch = adapted("gemma2"), BATCHES[kind]()  # caps, and a window on every other layer
    count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    wanted = whole(copy.deepcopy(model), batch, count)
    require_equal(shared(model, batch, count, parts), wanted)


@pytest.mark.parametrize("name", by_kind(FAMILIES))
def test_every_family_can_share_rows(name: str) -> None:
    model, batch = adapted(name), BATCHES["documents in one row"]()
    count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    wanted = whole(copy.deepcopy(model), batch, count)
    require_equal(shared(model, batch, count, 2, stacked=True), wanted)


@pytest.mark.parametrize("policy", ["selective", True, "offload"])
def test_layers_that_run_again_exchange_again(policy: Any) -> None:
    model, batch = adapted("llama"), BATCHES["a whole row"]()
    count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    wanted = whole(copy.deepcopy(model), batch, count)
    use_checkpointing(model, policy)
    require_equal(shared(model, batch, count, 2), wanted)


def test_a_part_of_a_row_sees_all_that_stands_before_it() -> None:
    """The silent failure would be attention within parts: the first token changes the last part's answer."""
    model, batch = adapted("llama").eval(), BATCHES["a whole row"]()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1

    def last(given: dict[str, torch.Tensor]) -> torch.Tensor:
        def work(sequence: SequencePart) -> torch.Tensor:
            mine = part_of(given, sequence.part, 2)
            inputs = {name: value for name, value in mine.items() if name not in ("lengths", "targets")}
            return hidden_states(copy.deepcopy(model), inputs, sequence=sequence).tensor.detach()

        found: torch.Tensor = Meeting(2).together(work)[1]
        return found

    assert (last(batch) - last(changed)).abs().amax() > 1e-4
    whole_rows = hidden_states(model, {"input_ids": batch["input_ids"]}).tensor
    assert torch.allclose(last(batch), whole_rows[:, 32:], atol=1e-5)


@pytest.mark.parametrize(
    ("query", "key", "parts", "exchanged"),
    [(32, 8, 2, 8), (32, 8, 16, 16), (12, 2, 4, 4), (12, 3, 2, 6), (14, 2, 7, 14), (32, 8, 3, None), (6, 2, 4, None)],
)
def test_key_heads_are_repeated_so_that_each_part_gets_its_own(
    query: int, key: int, parts: int, exchanged: int | None
) -> None:
    assert exchanged_key_heads(query, key, parts) == exchanged
    if exchanged is not None:  # the heads that a part's queries read are among those that it gets
        for part in range(parts):
            for head in range(part * query // parts, (part + 1) * query // parts):
                read = head // (query // key)
                copies = [h for h in range(exchanged) if h // (exchanged // key) == read]
                local = (head - part * query // parts) // (query // exchanged)
                assert part * exchanged // parts + local in copies


def test_parts_hold_every_supervised_token_once() -> None:
    for make in BATCHES.values():
        batch = make()
        count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        for parts in (2, 3, 4):
            found = [part_of(batch, part, parts) for part in range(parts)]
            assert sum(int((each["targets"] != IGNORE_INDEX).sum()) for each in found) == count
            real = batch["lengths"].sum() if "lengths" in batch else batch["attention_mask"].sum()
            assert sum(int(each["lengths"].sum()) for each in found) == int(real)


def test_each_part_attends_with_the_sinks_of_its_heads() -> None:
    """Output, and the sinks' gradient, which the parts' add up to."""
    torch.manual_seed(0)
    rows = [torch.randn(2, heads, 12, 16) for heads in (4, 2, 2)]
    sinks = torch.tensor([-2.0, 0.5, 3.0, 6.0])

    def run(tensors: list[torch.Tensor], sequence: SequencePart | None) -> tuple[torch.Tensor, torch.Tensor]:
        own, seen = sinks.clone().requires_grad_(), AttentionMask.causal_mask()
        mask = CallMask(
            12, 12, None, torch.device("cpu"), None, None, False, 2, lambda: seen.dense(12, 12), seen, sequence
        )
        out, _ = ftcli_attention_forward(torch.nn.Identity(), *tensors, mask, scaling=0.25, s_aux=own)
        return out.detach(), torch.autograd.grad(out.square().sum(), own)[0]

    found = Meeting(2).together(lambda part: run([each.chunk(2, dim=2)[part.part] for each in rows], part))
    out, gradient = run(rows, None)
    assert torch.allclose(torch.cat([each[0] for each in found], dim=1), out, atol=1e-6)
    assert torch.allclose(found[0][1] + found[1][1], gradient, rtol=1e-5, atol=1e-5)
