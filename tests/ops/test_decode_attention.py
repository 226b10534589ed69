"""Attention of one token against pages: the kernels and plain torch against float64 without pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ftkernels.decode_attention import Pages, decode_attention, decode_attention_reference, splits_for
from ftkernels.limits import CACHE_PAGE as PAGE
from torch import Tensor

NAN = float("nan")


@dataclass
class Case:
    """Rows in pages, and their whole sequences (Hkv, length, D) beside."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: Pages
    table: Tensor
    lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def case(lengths: list[int], heads: int, key_heads: int, size: int, dtype: torch.dtype, device: str) -> Case:
    """Sequences at random pages of a pool in which everything else is NaN."""
    reach = max(-(-length // PAGE) for length in lengths) + 1
    count = sum(-(-length // PAGE) for length in lengths)
    order = iter(torch.randperm(count + 3).tolist())
    pools = [torch.full((count + 3, key_heads, PAGE, size), NAN, dtype=dtype, device=device) for _ in range(2)]
    table = torch.zeros((len(lengths), reach), dtype=torch.int32, device=device)
    sequences: list[list[Tensor]] = [[], []]
    for row, length in enumerate(lengths):
        own = [torch.randn((key_heads, length, size), device=device).to(dtype) for _ in range(2)]
        for start in range(0, length, PAGE):
            page = next(order)
            table[row, start // PAGE] = page
            for pool, sequence in zip(pools, own, strict=True):
                part = sequence[:, start : min(start + PAGE, length - 1)]  # the new token is not written yet
                pool[page, :, : part.shape[1]] = part
        for all_of_them, sequence in zip(sequences, own, strict=True):
            all_of_them.append(sequence)
    # Strided, as views of one projection are; an empty row has any numbers.
    new = torch.randn((len(lengths), 1, 2 * key_heads, size), device=device).to(dtype)[:, 0]
    k, v = new[:, :key_heads], new[:, key_heads:]
    for row, length in enumerate(lengths):
        if length:
            k[row], v[row] = sequences[0][row][:, -1], sequences[1][row][:, -1]
    q = torch.randn((len(lengths), heads, 1, size), device=device).to(dtype)[:, :, 0]
    at = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Case(q, k, v, Pages(pools[0], pools[1]), table, at, *sequences)


def exact(c: Case, scale: float, softcap: float, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """Each row for itself in float64; a sink is one more key, whose value is zero."""
    rows = []
    for q, keys, values in zip(c.q.double(), c.keys, c.values, strict=True):
        if not keys.shape[1]:
            rows.append(torch.zeros_like(q))
            continue
        group = q.shape[0] // keys.shape[0]
        k, v = (x.double().repeat_interleave(group, 0)[:, -(window or x.shape[1]) :] for x in (keys, values))
        scores = (k @ q[:, :, None])[:, :, 0] * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        rows.append((torch.softmax(scores, -1)[:, None] @ v)[:, 0])
    return torch.stack(rows)


SHAPES = [(4, 2, 16), (2, 2, 24), (3, 1, 64), (2, 1, 256), (2, 1, 512), (2, 2, 80)]
LENGTHS = [1, PAGE, 0, PAGE + 1, 3 * PAGE - 1, 5 * PAGE + 7]


#: Where rows begin and what becomes of scores does not ask for the shape of heads: one shape has every setting.
SETTINGS = [(0.0, None), (20.0, None), (0.0, 70), (5.0, 3)]
CASES = [(*shape, *setting) for shape in SHAPES for setting in (SETTINGS if shape is SHAPES[0] else SETTINGS[::3])]


@pytest.mark.parametrize(("heads", "key_heads", "size", "softcap", "window"), CASES)
def test_both_against_float64(
    heads: int, key_heads: int, size: int, softcap: float, window: int | None, device: str, tools: Any
) -> None:
    c = case(LENGTHS, heads, key_heads, size, torch.float32, device)
    expected = exact(c, 0.3, softcap, window)
    for backend in ("torch", "triton"):
        c.pages.keys[c.table[4, 2], :, (LENGTHS[4] - 1) % PAGE] = NAN
        out = decode_attention(
            c.q, c.k, c.v, c.pages, c.table, c.lengths, scale=0.3, softcap=softcap, window=window, backend=backend
        )
        assert tools.relative(out, expected) < 1e-5
        assert not out[2].any()
        assert_written(c)
        again = decode_attention(
            c.q, c.k, c.v, c.pages, c.table, c.lengths, scale=0.3, softcap=softcap, window=window, backend=backend
        )
        assert torch.equal(out, again)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 16), (8, 1, 64), (3, 1, 80)])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (20.0, 70)])
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 0, PAGE + 3]], ids=["shares", "whole"])
def test_sinks_are_counted_once(
    heads: int,
    key_heads: int,
    size: int,
    softcap: float,
    window: int | None,
    lengths: list[int],
    device: str,
    tools: Any,
) -> None:
    """Over several shares and in one, among them shares without a page, and rows that are empty."""
    c = case(lengths, heads, key_heads, size, torch.float32, device)
    c.table = c.table if lengths is LENGTHS else c.table[:, :2].contiguous()
    assert (splits_for(len(lengths), key_heads, c.table.shape[1] * PAGE) > 1) == (lengths is LENGTHS)
    sinks = torch.linspace(-2.0, 6.0, heads, device=device)
    expected = exact(c, 0.3, softcap, window, sinks)
    for backend in ("torch", "triton"):
        first, again = (
            decode_attention(
                c.q, c.k, c.v, c.pages, c.table, c.lengths, scale=0.3, softcap=softcap, window=window,
                sinks=sinks, backend=backend,
            )
            for _ in range(2)
        )  # fmt: skip
        assert tools.relative(first, expected) < 1e-5
        assert not first[lengths.index(0)].any()
        assert torch.equal(first, again)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sinks_beyond_every_score(backend: Any, device: str) -> None:
    """One that takes everything leaves nothing, one of -inf is none; neither makes NaN, in an empty row either."""
    c = case(LENGTHS, 2, 1, 16, torch.float32, device)
    given = (c.q, c.k, c.v, c.pages, c.table, c.lengths)
    plain = decode_attention(*given, scale=0.3, backend=backend)
    sinks = torch.tensor([float("-inf"), 3e4], device=device)
    out = decode_attention(*given, scale=0.3, sinks=sinks, backend=backend)
    assert torch.allclose(out[:, 0], plain[:, 0], atol=1e-6)
    assert not out[:, 1].any()


def assert_written(c: Case) -> None:
    """Every token of every row lies in its page, and nothing lies elsewhere."""
    for pool, sequences in ((c.pages.keys, c.keys), (c.pages.values, c.values)):
        there = 0
        for row, sequence in enumerate(sequences):
            length = sequence.shape[1]
            found = pool[c.table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            assert torch.equal(found, sequence)
            there += sequence.numel()
        assert int(pool.isfinite().sum()) == there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_half_precision_is_as_good_as_torchs(dtype: torch.dtype, with_sinks: bool, device: str, tools: Any) -> None:
    c = case(LENGTHS, 8, 2, 64, dtype, device)
    sinks = torch.linspace(-2.0, 6.0, 8, device=device).to(dtype) if with_sinks else None
    expected = exact(c, 0.125, 30.0, None, sinks)
    options: dict[str, Any] = {"scale": 0.125, "softcap": 30.0, "sinks": sinks}
    ours, plain = (
        decode_attention(c.q, c.k, c.v, c.pages, c.table, c.lengths, backend=backend, **options)
        for backend in ("triton", "torch")
    )
    assert ours.dtype == dtype
    assert tools.relative(ours, expected) <= max(1.5 * tools.relative(plain, expected), 1e-3)
    assert tools.relative(ours, expected) < 1e-2


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    """To the bit, wherever it stands, as long as the number of shares is the same."""
    c = case([200, 77, 130, 1], 4, 2, 32, torch.float32, device)
    whole = decode_attention(c.q, c.k, c.v, c.pages, c.table, c.lengths, scale=0.2, backend="triton")
    order = [2, 0, 3, 1]
    moved = decode_attention(
        c.q[order], c.k[order], c.v[order], c.pages, c.table[order], c.lengths[order], scale=0.2, backend="triton"
    )
    assert torch.equal(moved, whole[order])


def test_the_bound_on_lengths_changes_nothing(device: str) -> None:
    c = case([100, 3], 4, 2, 16, torch.float32, device)
    c.table = torch.nn.functional.pad(c.table, (0, 9))
    given = (c.q, c.k, c.v, c.pages, c.table, c.lengths)
    whole = decode_attention_reference(*given, scale=1.0)
    assert torch.equal(decode_attention_reference(*given, scale=1.0, longest=100), whole)


def test_shares_fill_a_gpu_and_have_two_pages_each() -> None:
    assert splits_for(64, 8, 4096) == 3
    assert splits_for(1, 8, 131072) == 32
    assert splits_for(1, 8, 2 * PAGE) == 1
    assert splits_for(256, 8, 4096) == 1


def test_what_does_not_fit_is_refused(device: str) -> None:
    c = case([5], 4, 2, 16, torch.float32, device)
    given = (c.q, c.k, c.v, c.pages, c.table, c.lengths)
    with pytest.raises(ValueError, match="not heads of one token"):
        decode_attention(c.q[:, :3], *given[1:], scale=1.0)
    with pytest.raises(ValueError, match="do not take keys"):
        decode_attention(*(x.double() for x in given[:3]), *given[3:], scale=1.0)
    with pytest.raises(ValueError, match="int32"):
        decode_attention(*given[:4], c.table.long(), c.lengths, scale=1.0)
    with pytest.raises(ValueError, match="are not of 1 rows"):
        decode_attention(*given[:5], c.lengths.repeat(2), scale=1.0)
    for sinks in (torch.zeros(2, device=device), torch.zeros(8, device=device)[::2], c.lengths.repeat(4)):
        with pytest.raises(ValueError, match="one for each of 4 query heads"):
            decode_attention(*given, scale=1.0, sinks=sinks)
