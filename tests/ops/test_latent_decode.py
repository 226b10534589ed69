"""Latent attention of one token against pages of latents: kernels and plain torch against float64 with keys formed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ftkernels.latent_decode import absorbed, decode_latents, decode_latents_reference, expanded
from ftkernels.latent_heads import LatentSizes
from ftkernels.limits import CACHE_PAGE as PAGE
from ftkernels.projection import Projection
from torch import Tensor

NAN = float("nan")
LENGTHS = [1, PAGE, 0, PAGE + 1, 3 * PAGE - 1, 5 * PAGE + 7]


@dataclass
class Case:
    """Rows in pages, and their whole sequences (length, E) beside."""

    q: Tensor
    new: Tensor
    pool: Tensor
    table: Tensor
    lengths: Tensor
    sequences: list[Tensor]


def case(lengths: list[int], heads: int, width: int, rotated: int, dtype: torch.dtype, device: str) -> Case:
    """Sequences at random pages of a pool in which everything else is NaN."""
    reach, count = max(-(-length // PAGE) for length in lengths) + 1, sum(-(-length // PAGE) for length in lengths)
    features = width + rotated
    order = iter(torch.randperm(count + 3).tolist())
    pool = torch.full((count + 3, PAGE, features), NAN, dtype=dtype, device=device)
    table = torch.zeros((len(lengths), reach), dtype=torch.int32, device=device)
    sequences = [torch.randn((length, features), device=device).to(dtype) for length in lengths]
    new = torch.randn((len(lengths), 1, 2 * features), device=device).to(dtype)[:, 0, features:]  # a part of a buffer
    for row, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        for start in range(0, length, PAGE):
            page = next(order)
            table[row, start // PAGE] = page
            part = sequence[start : min(start + PAGE, length - 1)]  # the new token is not written yet
            pool[page, : len(part)] = part
        if length:
            new[row] = sequence[-1]
    q = torch.randn((len(lengths), heads, 2, features), device=device).to(dtype)[:, :, 0]
    return Case(q, new, pool, table, torch.tensor(lengths, dtype=torch.int32, device=device), sequences)


def exact(c: Case, width: int, scale: float) -> Tensor:
    """Each row for itself in float64."""
    rows = []
    for q, sequence in zip(c.q.double(), c.sequences, strict=True):
        weights = torch.softmax(q @ sequence.double().t() * scale, -1)
        rows.append(weights @ sequence.double()[:, :width])
    return torch.stack(rows)


def run(c: Case, width: int, scale: float, backend: Any) -> Tensor:
    return decode_latents(c.q, c.new, c.pool, c.table, c.lengths, width=width, scale=scale, backend=backend)


@pytest.mark.parametrize(("heads", "width", "rotated"), [(4, 16, 8), (20, 40, 4), (2, 24, 16), (35, 16, 2)])
def test_both_against_float64(heads: int, width: int, rotated: int, device: str, tools: Any) -> None:
    c = case(LENGTHS, heads, width, rotated, torch.float32, device)
    expected = exact(c, width, 0.3)
    for backend in ("torch", "triton"):
        c.pool[c.table[4, 2], (LENGTHS[4] - 1) % PAGE] = NAN
        out = run(c, width, 0.3, backend)
        assert tools.relative(out, expected) < 1e-5
        assert not out[2].any()
        there = 0
        for row, sequence in enumerate(c.sequences):  # every token lies in its page, and nothing elsewhere
            assert torch.equal(c.pool[c.table[row].long()].flatten(0, 1)[: len(sequence)], sequence)
            there += sequence.numel()
        assert int(c.pool.isfinite().sum()) == there
        assert torch.equal(run(c, width, 0.3, backend), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_torchs(dtype: torch.dtype, device: str, tools: Any) -> None:
    c = case(LENGTHS, 20, 64, 32, dtype, device)
    expected = exact(c, 64, 0.1)
    ours, plain = (run(c, 64, 0.1, backend) for backend in ("triton", "torch"))
    assert ours.dtype == dtype
    assert tools.relative(ours, expected) <= max(1.5 * tools.relative(plain, expected), 1e-3)
    assert tools.relative(ours, expected) < 1e-2


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    """To the bit, wherever it stands, as long as the number of shares is the same."""
    c = case([200, 77, 130, 1], 4, 32, 8, torch.float32, device)
    whole = run(c, 32, 0.2, "triton")
    order = [2, 0, 3, 1]
    moved = Case(c.q[order], c.new[order], c.pool, c.table[order], c.lengths[order], [])
    assert torch.equal(run(moved, 32, 0.2, "triton"), whole[order])


def test_the_bound_on_lengths_changes_nothing(device: str) -> None:
    c = case([100, 3], 4, 16, 8, torch.float32, device)
    c.table = torch.nn.functional.pad(c.table, (0, 9))
    given = (c.q, c.new, c.pool, c.table, c.lengths)
    whole = decode_latents_reference(*given, width=16, scale=1.0)
    assert torch.equal(decode_latents_reference(*given, width=16, scale=1.0, longest=100), whole)


@pytest.mark.parametrize("rank", [0, 3])
def test_absorbed_and_expanded_are_the_layer_that_makes_keys_and_values(rank: int, device: str, tools: Any) -> None:
    """With scores and outputs of keys and values that are formed, an adapter's part in them."""
    sizes, width, scaling = LatentSizes(5, 12, 4, 10), 24, 0.7
    make = {"dtype": torch.float64, "device": device}
    weight = torch.randn(5 * 22, width, **make)
    a, b = torch.randn(rank, width, **make), torch.randn(5 * 22, rank, **make)
    whole = weight + scaling * b @ a
    projection = Projection(weight, None, a if rank else None, b if rank else None, scaling)
    q, latents = torch.randn(3, 5, 12, **make), torch.randn(7, width, **make)
    keys, values = (latents @ whole.t()).view(7, 5, 22).split([12, 10], dim=-1)
    scores = absorbed(q, projection, sizes) @ latents.t()
    assert tools.relative(scores, torch.einsum("bhn,jhn->bhj", q, keys)) < 1e-12
    weights = torch.softmax(scores, -1)
    assert tools.relative(expanded(weights @ latents, projection, sizes), torch.einsum("bhj,jhv->bhv", weights, values)) < 1e-12  # fmt: skip  # noqa: E501


def test_what_does_not_fit_is_refused(device: str) -> None:
    c = case([5], 4, 16, 8, torch.float32, device)
    given = (c.q, c.new, c.pool, c.table, c.lengths)
    for q, width in ((c.q[..., :9], 16), (c.q, 24), (c.q[0], 16)):
        with pytest.raises(ValueError, match="are not latents"):
            decode_latents(q, *given[1:], width=width, scale=1.0)
    with pytest.raises(ValueError, match="do not take"):
        decode_latents(c.q, c.new.double(), *given[2:], width=16, scale=1.0)
    with pytest.raises(ValueError, match="int32"):
        decode_latents(*given[:3], c.table.long(), c.lengths, width=16, scale=1.0)
    with pytest.raises(ValueError, match="are not of 1 rows"):
        decode_latents(*given[:4], c.lengths.repeat(2), width=16, scale=1.0)
    with pytest.raises(ValueError, match="next to each other"):
        decode_latents(c.q.transpose(1, 2).contiguous().transpose(1, 2), *given[1:], width=16, scale=1.0)
