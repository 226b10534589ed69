"""The backward that stores weights, against float64: every kind of mask, queries in one chunk and in several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles, StoredTiles
from ftkernels.attention_mask import AttentionMask
from torch import Tensor

from tests.ops.test_attention_branches import ROW, branches

_TILE = AttentionTile(32, 32, 4, 1)
_PLAIN = AttentionTiles(_TILE, _TILE, _TILE, _TILE, None)
STORED = StoredTiles(
    weights=AttentionTile(32, 16, 4, 1), d_query=AttentionTile(32, 16, 4, 1), d_key=AttentionTile(16, 16, 4, 1),
    depth=16, width=32,
)  # fmt: skip
#: A tile of queries a chunk, whatever the shape; and all that there are.
CHUNKS = {"chunks": replace(STORED, workspace=1), "whole": STORED}


def masks(device: str) -> dict[str, tuple[AttentionMask, int, int]]:
    """By name: a mask, and the lengths of queries and keys."""
    documents = torch.tensor([0, 30, 31, 50, 70], device=device)
    tokens = torch.arange(35, device=device) < torch.tensor([[35], [20]], device=device)
    return {
        "causal": (AttentionMask.causal_mask(), 97, 97),
        "cached": (AttentionMask.causal_mask(), 33, 50),
        "window": (AttentionMask.causal_mask(20), 83, 83),
        "full": (AttentionMask.full(), 41, 41),
        "packed": (AttentionMask.from_cu_seqlens(documents, 70), 70, 70),
        "packed window": (AttentionMask.from_cu_seqlens(documents, 70, window=8), 70, 70),
        "padded": (AttentionMask.from_padding(tokens.flip(1)), 35, 35),
        "branches": (branches(*ROW, device=device), sum(map(sum, ROW)), sum(map(sum, ROW))),
        # Both branches begin within the trunk's window, and end beyond it by more than a tile.
        "long branches": (branches((20, 90, 90), window=12, device=device), 200, 200),
    }


def check(tools: Any, tiles: StoredTiles, mask: AttentionMask, tensors: tuple[Tensor, ...], **options: Any) -> None:
    def run(function: Any, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = function(*heads_first, mask, scale=0.2, **options, **more)
        return out.transpose(1, 2)

    kernels = partial(run, attention, backend="triton", tiles=replace(_PLAIN, stored=tiles))
    tools.assert_float32(kernels, partial(run, attention_reference), tensors)


def inputs(device: str, batch: int, heads: tuple[int, int], lengths: tuple[int, int], size: int) -> tuple[Tensor, ...]:
    q = torch.randn(batch, lengths[0], heads[0], size, device=device)
    return q, *(torch.randn(batch, lengths[1], heads[1], size, device=device) for _ in range(2))


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", masks("cpu"))
def test_masks(device: str, tools: Any, name: str, chunks: str) -> None:
    mask, *lengths = masks(device)[name]
    tensors = inputs(device, 2 if name == "padded" else 1, (2, 1), (lengths[0], lengths[1]), 16)
    check(tools, CHUNKS[chunks], mask, tensors, softcap=5.0 if name in ("window", "branches") else 0.0)


@pytest.mark.parametrize(("size", "heads"), [(48, (4, 2)), (272, (1, 1)), (512, (2, 2))])
def test_heads(device: str, tools: Any, size: int, heads: tuple[int, int]) -> None:
    """Sizes that no part divides, and more than one row, key head and part."""
    check(tools, CHUNKS["chunks"], AttentionMask.causal_mask(), inputs(device, 2, heads, (35, 35), size))


def test_sinks(device: str, tools: Any) -> None:
    """Their gradient needs delta, which has a kernel of its own here."""
    tensors = (*inputs(device, 2, (2, 1), (40, 40), 16), torch.randn(2, device=device))

    def run(function: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **more: Any) -> Tensor:
        out: Tensor = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), AttentionMask.causal_mask(),
                               scale=0.2, sinks=sinks, **more)  # fmt: skip
        return out.transpose(1, 2)

    tiles = replace(_PLAIN, stored=CHUNKS["chunks"])
    kernels = partial(run, attention, backend="triton", tiles=tiles)
    tools.assert_float32(kernels, partial(run, attention_reference), tensors)


@pytest.mark.parametrize("wanted", [(True, False, True), (False, True, False)], ids=str)
def test_what_is_not_wanted_has_no_gradient(device: str, wanted: tuple[bool, ...]) -> None:
    tensors = [x.transpose(1, 2).requires_grad_(want) for x, want in zip(
        inputs(device, 1, (2, 1), (40, 40), 16), wanted, strict=True)]  # fmt: skip
    tiles = replace(_PLAIN, stored=CHUNKS["chunks"])
    out = attention(*tensors, AttentionMask.causal_mask(), scale=0.2, backend="triton", tiles=tiles)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert [x.grad is not None for x in tensors] == list(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_tiles_of_heads_of_512(device: str, tools: Any, chunked: bool, dtype: torch.dtype) -> None:
    """As the machine runs them, by TMA; two runs give the same bits."""
    from ftkernels.attention_config import choose_tiles
    from ftkernels.device import gpu_of

    tiles = choose_tiles(gpu_of(torch.device(device)), dtype, 512)
    if tiles.stored is None:
        pytest.skip("no such tiles for this GPU")
    if chunked:
        tiles = replace(tiles, stored=replace(tiles.stored, workspace=1))
    documents = torch.tensor([0, 130, 500, 1111], device=device)
    mask = AttentionMask.from_cu_seqlens(documents, 1111)
    tensors = inputs(device, 1, (4, 2), (1111, 1111), 512)

    def run(function: Any, dtype: torch.dtype, **more: Any) -> list[Tensor]:
        q, k, v = (x.to(dtype).transpose(1, 2).requires_grad_() for x in tensors)
        out = function(q, k, v, mask, scale=512**-0.5, **more)
        generator = torch.Generator(device).manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator, device=device).to(out.dtype))
        return [x.grad for x in (q, k, v)]

    exact = run(attention_reference, torch.float64)
    once, again = (run(attention, dtype, backend="triton", tiles=tiles) for _ in range(2))
    plain = run(attention, dtype, backend="triton", tiles=replace(tiles, stored=None))
    for found, twice, other, truth in zip(once, again, plain, exact, strict=True):
        assert torch.equal(found, twice)
        error, reference = ((x.double() - truth).norm() / truth.norm() for x in (found, other))
        assert error <= max(1.5 * float(reference), 1e-4)
        assert error <= 1e-2
