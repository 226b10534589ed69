"""Attention of one token against pages: the kernels and plain torch against float64 without pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ftkernels.decode_attention import (
    LINE,
    Pages,
    SharedPages,
    decode_attention,
    decode_attention_reference,
    splits_for,
)
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


#: Rows by the pages that they begin with: more of one prompt than a line has, two of another, one alone, an empty one
#: and one whose prompt fills no page.
PROMPTS = {"long": [2, *range(5, 14)], "short": [0, 4], "alone": [1]}
SHARED_LENGTHS = [PAGE + 1, 3 * PAGE, 4 * PAGE + 9, 0, 2 * PAGE, 4 * PAGE + 1, 6 * PAGE + 5, *[5 * PAGE] * 7, 9]
SHARED_COUNTS = {"long": 4, "short": 1, "alone": 2}


def with_shared_pages(c: Case) -> SharedPages:
    """Has the rows of each prompt begin with the pages of its first one."""
    lines, pages = [], [0] * len(c.lengths)
    for prompt, rows in PROMPTS.items():
        count = SHARED_COUNTS[prompt]
        for row in rows:
            pages[row] = count
            for pool in (c.pages.keys, c.pages.values) if row != rows[0] else ():
                pool[c.table[row, :count].long()] = NAN
            c.table[row, :count] = c.table[rows[0], :count]
            for sequences in (c.keys, c.values):
                sequences[row][:, : count * PAGE] = sequences[rows[0]][:, : count * PAGE]
        lines += [rows[at : at + LINE] for at in range(0, len(rows), LINE)]
    members = torch.full((len(pages), LINE), -1, dtype=torch.int32)
    for into, line in zip(members, lines, strict=False):
        into[: len(line)] = torch.tensor(line)
    device = c.table.device
    return SharedPages(members.to(device), torch.tensor(pages, dtype=torch.int32, device=device))


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "softcap"),
    [(4, 2, 16, 0.0), (7, 1, 64, 20.0), (2, 2, 80, 0.0), (4, 1, 256, 0.0), (2, 1, 512, 0.0), (48, 1, 64, 0.0)],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_pages_that_rows_share(
    heads: int, key_heads: int, size: int, softcap: float, with_sinks: bool, device: str, tools: Any
) -> None:
    """Read for several rows at once they give each row what it has alone, whoever else shares them."""
    c = case(SHARED_LENGTHS, heads, key_heads, size, torch.float32, device)
    shared = with_shared_pages(c)
    sinks = torch.linspace(-2.0, 6.0, heads, device=device) if with_sinks else None
    given = (c.q, c.k, c.v, c.pages, c.table, c.lengths)
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": sinks, "backend": "triton"}
    out = decode_attention(*given, shared=shared, **options)
    assert tools.relative(out, exact(c, 0.3, softcap, None, sinks)) < 1e-5
    assert not out[3].any()
    assert torch.equal(out, decode_attention(*given, shared=shared, **options))
    fewer = SharedPages(shared.members.clone(), shared.pages.clone())
    gone = PROMPTS["long"][1:5]
    fewer.members[0] = torch.tensor([2, *PROMPTS["long"][5:8], -1, -1, -1, -1], device=device)
    c.lengths[gone] = 0
    fewer.pages[gone] = 0
    left = [row for row in range(len(SHARED_LENGTHS)) if row not in gone]
    again = decode_attention(*given, shared=fewer, **options)[left]
    # The interpreter's products are a BLAS's, which rounds a row by its place.
    assert torch.equal(again, out[left]) if device == "cuda" else tools.relative(again, out[left]) < 1e-6


def test_shared_pages_in_half_precision(device: str, tools: Any) -> None:
    c = case(SHARED_LENGTHS, 8, 2, 128, torch.bfloat16, device)
    shared, given = with_shared_pages(c), (c.q, c.k, c.v, c.pages, c.table, c.lengths)
    ours, plain = (decode_attention(*given, scale=0.1, shared=shared, backend=one) for one in ("triton", "torch"))
    expected = exact(c, 0.1, 0.0, None)
    assert tools.relative(ours, expected) <= max(1.5 * tools.relative(plain, expected), 1e-3)
    assert tools.relative(ours, expected) < 1e-2


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
    none = SharedPages(torch.full((1, LINE), -1, dtype=torch.int32, device=device), torch.zeros_like(c.lengths))
    with pytest.raises(ValueError, match="do not see the pages"):
        decode_attention(*given, scale=1.0, window=3, shared=none)
    with pytest.raises(ValueError, match="are not those of 1 rows"):
        decode_attention(*given, scale=1.0, shared=SharedPages(none.members.repeat(2, 1), none.pages))
    with pytest.raises(ValueError, match="must be int32"):
        decode_attention(*given, scale=1.0, shared=SharedPages(none.members.long(), none.pages))
    with pytest.raises(ValueError, match="are not of 1 rows"):
        decode_attention(*given[:5], c.lengths.repeat(2), scale=1.0)
    for sinks in (torch.zeros(2, device=device), torch.zeros(8, device=device)[::2], c.lengths.repeat(4)):
        with pytest.raises(ValueError, match="one for each of 4 query heads"):
            decode_attention(*given, scale=1.0, sinks=sinks)
