"""Rows of a table in host memory are those of the table, to the last bit; what is no row is NaN."""

from __future__ import annotations

import pytest
import torch
from ftkernels.host_rows import host_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 70, 4100])
def test_rows_are_the_tables(device: str, dtype: torch.dtype, columns: int) -> None:
    table = torch.randn(50, columns).to(dtype)
    held = table.pin_memory() if device == "cuda" else table
    for ids in (torch.randint(50, (3, 5)), torch.tensor(49, dtype=torch.int32), torch.empty(0, 4, dtype=torch.int64)):
        found = host_rows(held, ids.to(device), backend="triton")
        assert found.device.type == device
        assert torch.equal(found.cpu(), table[ids.long()])
    if device == "cpu":
        assert torch.equal(host_rows(held, torch.arange(50)), table)


def test_what_is_no_row_is_not_read(device: str) -> None:
    table = torch.randn(50, 70)
    held = table.pin_memory() if device == "cuda" else table
    ids = torch.tensor([[0, 50], [-1, 49]], device=device)
    found = host_rows(held, ids, backend="triton").cpu()
    assert torch.equal(found.isnan().all(-1), torch.tensor([[False, True], [True, False]]))
    assert torch.equal(found[0, 0], table[0])
    assert torch.equal(found[1, 1], table[49])


def test_what_cannot_be_read_is_refused(device: str) -> None:
    ids = torch.zeros(3, dtype=torch.int64, device=device)
    for table in (torch.zeros(4, 4).t(), torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4)):
        if table.dim() == 2 and table.is_floating_point():
            table = torch.zeros(4, 8)[:, ::2]
        with pytest.raises(ValueError, match="expected a contiguous"):
            host_rows(table, ids, backend="triton")
    with pytest.raises(ValueError, match="ids must be"):
        host_rows(torch.zeros(4, 4), ids.float(), backend="triton")
    if device == "cuda":
        with pytest.raises(ValueError, match="pinned memory"):
            host_rows(torch.zeros(4, 4), ids)


@pytest.mark.gpu
def test_a_graph_reads_what_lies_there_in_each_replay() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    table = torch.randn(50, 64).pin_memory()
    ids = torch.tensor([1, 2], device="cuda")
    host_rows(table, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = host_rows(table, ids)
    for wanted in ([3, 4], [49, 0]):
        ids.copy_(torch.tensor(wanted))
        graph.replay()
        assert torch.equal(found.cpu(), table[wanted])
