"""The traffic of one device with streams that do nothing: what goes where, and what is fetched ahead. The order between
real streams is tests/gpu/test_offload.py's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ftcli.model import offload
from ftcli.model.offload import HostBuffers, _Lane, _Ticket

MIB = 2**20


class Still:
    """A stream in which everything has happened already."""

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, Still)

    def wait_event(self, event: Any) -> None:
        assert event is not None

    def record_event(self) -> object:
        return object()


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> _Lane:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Still())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Still())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(offload, "HostBuffers", lambda pinned: HostBuffers(pinned=False))
    return _Lane(torch.device("cpu"), ahead=1)


def sent(lane: _Lane, *mib: int) -> tuple[list[torch.Tensor], list[_Ticket]]:
    """Tensors that left one after the other, with gradients wanted, and what stands for them; no two MiB are alike."""
    one = torch.randint(-9, 9, (512, 1024)).bfloat16()
    numbers = torch.arange(sum(mib)).bfloat16().split(mib)
    tensors = [(one + number[:, None, None]).requires_grad_() for number in numbers]
    return tensors, [lane.send(tensor) for tensor in tensors]


def test_tensors_come_back_from_their_pieces_and_the_next_is_on_its_way(lane: _Lane) -> None:
    tensors, tickets = sent(lane, 67, 3, 130)
    assert lane.buffers.allocated_bytes == 200 * MIB
    assert [len(ticket.parcel.pieces) for ticket in tickets] == [3, 2, 3]
    assert lane.fetch(tickets[2]) is tensors[2]  # the last one has not been let go
    assert tickets[1].parcel.arriving is not None
    assert tickets[0].parcel.arriving is None
    for index in (1, 0):
        back = lane.fetch(tickets[index])
        assert torch.equal(back, tensors[index])
        assert back is not tensors[index]
        assert not back.requires_grad
    del tickets
    assert lane.buffers.free_bytes == lane.buffers.allocated_bytes == 200 * MIB


def test_pieces_are_free_when_nothing_stands_for_their_tensor(lane: _Lane) -> None:
    _, tickets = sent(lane, 16, 16)
    lane.fetch(tickets[1])  # the first is fetched ahead, and never asked for
    tickets.clear()
    assert lane.buffers.free_bytes == 32 * MIB
    for _ in range(3):
        _, tickets = sent(lane, 16, 16)
        assert lane.buffers.free_bytes == 0
        tickets.clear()
    assert lane.buffers.allocated_bytes == 32 * MIB
