"""The gated delta rule against float64: chunks, documents, states, decays and strengths at their ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ftkernels.delta_rule import (
    delta_rule,
    delta_rule_backend,
    delta_rule_chunked,
    delta_rule_ends,
    delta_rule_reference,
)
from torch import Tensor

from tests.tiers import further

Tensors = tuple[Tensor, ...]


def tensors(device: str, shape: tuple[int, int, int, int, int, int], *, rate: float = 0.5) -> Tensors:
    """q, k, v, g and beta, of (B, S, Hk, Hv, K, V)."""
    batch, length, key_heads, heads, keys, values = shape
    given = [torch.randn(batch, length, key_heads, keys, device=device) for _ in range(2)]
    given += [torch.randn(batch, length, heads, values, device=device)]
    given += [-rate * torch.rand(batch, length, heads, device=device), torch.rand(batch, length, heads, device=device)]
    return tuple(given)


def reference(*given: Tensor, **options: Any) -> Tensor:
    return delta_rule_reference(*given, **options).out


def kernels(*given: Tensor, **options: Any) -> Tensor:
    return delta_rule(*given, backend="triton", **options)


def begun_at(length: int, *begins: int) -> Tensor:
    """(1, length) starts of documents that begin at 0 and ``begins``."""
    starts = torch.zeros(1, length, dtype=torch.int32)
    for begin in begins:
        starts[:, begin:] = begin
    return starts


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 70, 1, 3, 32, 64), {}),
        ((1, 129, 2, 2, 32, 16), {"normalize": False, "scale": 0.25}),
        ((1, 1, 1, 2, 32, 16), {}),
        ((1, 64, 1, 1, 128, 128), {}),
    ],
    ids=["grouped", "not normalized", "one token", "whole heads"],
)
def test_output_and_gradients(device: str, tools: Any, shape: Any, options: dict[str, Any]) -> None:
    given = tensors(device, shape)
    if not options.get("normalize", True):  # else the state grows with every token
        given = (given[0], given[1] / shape[4] ** 0.5, *given[2:])
    tools.assert_float32(partial(kernels, **options), partial(reference, **options), given)


def test_torchs_chunks_equal_the_recurrence(tools: Any) -> None:
    starts = begun_at(150, 5, 64, 65, 140)
    given = tensors("cpu", (2, 150, 2, 4, 16, 8))
    compared = tools.compare(
        partial(delta_rule, starts=starts, backend="torch"), partial(reference, starts=starts), given
    )
    assert compared.error < 2e-6
    assert delta_rule_chunked(*(t.double() for t in given)).dtype == torch.float64


def test_the_reference_is_what_transformers_writes() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    given = tensors("cpu", (2, 70, 2, 4, 16, 32))
    mine = delta_rule_reference(*given)
    for rule in (modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule):
        out, last = rule(*given, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert torch.allclose(mine.out, out, atol=2e-5)
        assert torch.allclose(mine.last, last, atol=2e-5)


def test_the_reference_keeps_documents_apart() -> None:
    given = [t.double() for t in tensors("cpu", (1, 20, 1, 2, 16, 16))]
    whole = delta_rule_reference(*given, starts=begun_at(20, 7, 8)).out
    alone = [delta_rule_reference(*(t[:, a:b] for t in given)).out for a, b in ((0, 7), (7, 8), (8, 20))]
    assert torch.equal(whole, torch.cat(alone, 1))


@pytest.mark.parametrize("telling", [True, *further(False)])
def test_documents_that_begin_anywhere_in_a_chunk(device: str, tools: Any, telling: bool) -> None:
    """A row for each place: its second document begins there, and ends in the chunk after."""
    places = torch.tensor([0, 1, 2, 3, 15, 16, 31, 33, 49, 50, 62, 63] if telling else range(64))[:, None]
    rows, length = len(places), 80
    tokens = torch.arange(length)[None]
    starts = torch.where(tokens < places, 0, torch.where(tokens < places + 14, places, places + 14)).int()
    given = tensors(device, (rows, length, 1, 1, 32, 16))
    tools.assert_float32(
        partial(kernels, starts=starts.to(device)), partial(reference, starts=starts.to(device)), given
    )


def test_a_document_hears_nothing_of_others(device: str, tools: Any) -> None:
    """Neither outputs nor gradients change with the neighbours' numbers, not even those of another size."""
    starts = begun_at(100, 30, 75).to(device)
    given = tensors(device, (1, 100, 1, 2, 32, 16))
    loud = [t.clone() for t in given]
    for tensor, factor in zip(loud[:4], (100.0, -30.0, 1000.0, 20.0), strict=True):
        tensor[:, :30] *= factor
        tensor[:, 75:] *= factor
    quiet, other = (tools.run(partial(kernels, starts=starts), of, [torch.float32] * 5) for of in (given, loud))
    for one, two in zip(quiet, other, strict=True):
        assert tools.relative(two[:, 30:75], one[:, 30:75]) < 2e-6


@pytest.mark.parametrize("decay", [0.0, -0.001, -3.0, -50.0, -1e4, float("-inf")])
def test_decays_at_their_ends(device: str, tools: Any, decay: float) -> None:
    """No decay over two chunks, and decays whose inverse is no float32 number."""
    given = list(tensors(device, (1, 100, 1, 2, 32, 16)))
    given[3] = torch.full_like(given[3], decay)
    exact = tools.run(reference, [*given], [torch.float64] * 5)
    got = tools.run(kernels, given, [torch.float32] * 5)
    for place, (value, truth) in enumerate(zip(got, exact, strict=True)):
        if place == 4 and decay < -20.0:  # dg, of which nothing is left
            assert value.abs().max() < 1e-6
        else:
            assert tools.relative(value, truth) <= 1e-5


def test_a_decay_that_forgets_does_not_blur_those_after_it(device: str, tools: Any) -> None:
    given = list(tensors(device, (1, 64, 1, 2, 32, 16)))
    given[3][:, ::9] = -1e6
    exact = tools.run(reference, given, [torch.float64] * 5)
    got = tools.run(kernels, given, [torch.float32] * 5)
    for value, truth in zip(got, exact, strict=True):
        assert tools.relative(value, truth) <= 1e-4


@pytest.mark.parametrize("documents", [(), (30, 31, 90)], ids=["one", "four"])
def test_what_is_owed_to_tokens_that_forget_most(device: str, tools: Any, documents: tuple[int, ...]) -> None:
    """Among tokens that forget little, of which the sum of d total leaves rounding: 5e-3 of what A_log has to learn."""
    starts = begun_at(150, *documents).to(device)
    given = list(tensors(device, (1, 150, 1, 2, 64, 32)))
    given[3] = -8.0 * torch.nn.functional.softplus(torch.randn_like(given[3]))
    exact = tools.run(partial(reference, starts=starts), given, [torch.float64] * 5)
    got = tools.run(partial(kernels, starts=starts), given, [torch.float32] * 5)
    owed, truth = ((dg.double() * given[3].double()).sum(1) for dg in (got[4], exact[4]))
    assert tools.relative(owed, truth) <= 5e-5


@pytest.mark.parametrize("beta", [0.0, 1.0, "both"])
def test_strengths_at_their_ends(device: str, tools: Any, beta: Any) -> None:
    """A beta of 0 writes nothing and still has a gradient."""
    given = list(tensors(device, (1, 70, 1, 2, 32, 16)))
    given[4] = (torch.rand_like(given[4]) > 0.5).float() if beta == "both" else torch.full_like(given[4], beta)
    exact = tools.run(reference, given, [torch.float64] * 5)
    got = tools.run(kernels, given, [torch.float32] * 5)
    for value, truth in zip(got, exact, strict=True):
        if truth.norm() == 0:
            assert value.abs().max() < 1e-15
        else:
            assert tools.relative(value, truth) <= 1e-5


def test_the_same_key_again_and_again(device: str, tools: Any) -> None:
    """The worst case of the inverse: its powers grow as binomial coefficients, itself it stays small."""
    given = list(tensors(device, (1, 64, 1, 1, 32, 16), rate=0.0))
    given[1] = given[1][:, :1].expand(given[1].shape).contiguous()
    given[4] = torch.ones_like(given[4])
    exact = tools.run(reference, given, [torch.float64] * 5)
    got = tools.run(kernels, given, [torch.float32] * 5)
    for place, (value, truth) in enumerate(zip(got, exact, strict=True)):
        if place == 4:  # each token writes over what the last one wrote, however much of it was forgotten
            assert value.abs().max() < 3e-5
        else:
            assert tools.relative(value, truth) <= 1e-5


@pytest.mark.parametrize("size", [32, 64, 128])
def test_half_precision(device: str, tools: Any, size: int) -> None:
    """Against torch's own products in bfloat16: chunks under autocast. Heads of 64 are what Triton 3.6 miscompiles on
    Hopper where an accumulator is transposed for a product.
    """

    def own(*given: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=given[0].dtype == torch.bfloat16):
            return delta_rule_chunked(*given)

    given = tensors(device, (1, 150, 1, 2, size, size))
    dtypes = [torch.bfloat16] * 3 + [torch.float32] * 2
    stored = [t.to(d) for t, d in zip(given, dtypes, strict=True)]
    exact = tools.run(own, stored, [torch.float64] * 5)
    got, plain = (tools.run(f, stored, dtypes) for f in (kernels, own))
    for value, theirs, truth in zip(got, plain, exact, strict=True):
        assert tools.relative(value, truth) <= min(1.5 * tools.relative(theirs, truth), 1e-2)


def test_views_of_one_projection(device: str, tools: Any) -> None:
    """q, k and v beside each other as the convolution leaves them, and gates by head."""

    def joined(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(both: Tensor, gates: Tensor) -> Tensor:
            q, k, v = (both[..., a:b].unflatten(-1, (-1, 32)) for a, b in ((0, 64), (64, 128), (128, 256)))
            g, beta = gates.transpose(1, 2).chunk(2, -1)
            return function(q, k, v, -torch.sigmoid(g), torch.sigmoid(beta))

        return run

    given = torch.randn(2, 10, 256, device=device), torch.randn(2, 8, 10, device=device)
    tools.assert_float32(joined(kernels), joined(reference), given)
    expanded = torch.randn(1, 10, 1, 1, device=device, requires_grad=True).expand(1, 10, 1, 32)
    g = torch.zeros(1, 10, 1, device=device)
    assert torch.isfinite(
        torch.autograd.grad(kernels(expanded, expanded, expanded, g, g + 0.5).sum(), expanded)[0]
    ).all()


def test_two_runs_give_the_same_bits_and_no_tokens_no_launch(device: str, tools: Any) -> None:
    given = tensors(device, (1, 70, 1, 2, 32, 16))
    dtypes = [torch.bfloat16] * 3 + [torch.float32] * 2
    first, again = (tools.run(kernels, given, dtypes) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    out, *_ = tools.run(kernels, [t[:, :0] for t in given], [torch.float32] * 5)
    assert out.shape[1] == 0


def test_what_the_kernels_do_not_take_runs_in_torch(device: str) -> None:
    for keys, dtype, word in (
        (16, torch.float32, "keys of 32, 64 and 128 features, not of 16"),
        (24, torch.float32, "not of 24"),
        (32, torch.float64, "float64"),
    ):
        x = torch.zeros(1, 2, 1, keys, dtype=dtype, device=device)
        assert word in delta_rule_backend(x, x, "triton").reason
        assert kernels(x, x, x, x[..., 0], x[..., 0]).shape == x.shape


def test_what_does_not_fit_is_refused() -> None:
    q, v, g = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 4, 16), torch.zeros(1, 4, 4)
    starts = torch.zeros(1, 4, dtype=torch.int32)
    for given, options, words in (
        ((q, q[:, :3], v, g, g), {}, r"expected \(B, S"),
        ((q, q, v[:, :, :3], g, g), {}, "no multiple"),
        ((q, q, v.double(), g, g), {}, "one floating dtype"),
        ((q, q, v, g[..., :2], g), {}, "not a number a value head"),
        ((q, q, v, g, g), {"starts": starts.long()}, "not int32"),
    ):
        with pytest.raises(ValueError, match=words):
            delta_rule(*given, **options)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_states_at_the_ends_of_documents(device: str, tools: Any, backend: Any) -> None:
    """Before, on and behind the boundaries of chunks, several in one, some documents over two; of each as if alone."""
    begins = [0, 3, 4, 30, 64, 65, 128, 150, 191, 320]
    ends = [b - 1 for b in begins[1:]] + [329]
    given = tensors(device, (1, 330, 2, 4, 32, 32))
    asked = torch.tensor([end for end in ends if end != 149], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"starts": begun_at(330, *begins[1:]).to(device), "backend": backend}
    made = delta_rule_ends(*given, asked, **options)
    alone = [
        delta_rule_reference(*(t[:, a : b + 1].double() for t in given)) for a, b in zip(begins, ends, strict=True)
    ]
    assert tools.relative(made.out, torch.cat([one.out for one in alone], 1)) <= 1e-5
    exact = [one.last for one, end in zip(alone, ends, strict=True) if end != 149]
    for found, truth in zip(made.last, exact, strict=True):
        assert tools.relative(found, truth[0]) <= 1e-5


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_states_within_a_document(device: str, tools: Any, backend: Any) -> None:
    given = tensors(device, (1, 140, 1, 2, 32, 16))
    asked = torch.tensor([0, 62, 63, 64, 100, 139], dtype=torch.int32, device=device)
    made = delta_rule_ends(*given, asked, backend=backend)
    for token, found in zip(asked.tolist(), made.last, strict=True):
        exact = delta_rule_reference(*(t[:, : token + 1].double() for t in given)).last
        assert tools.relative(found, exact[0]) <= 1e-5
    none = delta_rule_ends(*given, asked[:0], backend=backend)
    assert none.last.shape == (0, 2, 32, 16)
    for rows, ends in ((2, asked), (1, asked.long())):
        with pytest.raises(ValueError, match="of one row"):
            delta_rule_ends(*(t.expand(rows, *t.shape[1:]) for t in given), ends, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3])
def test_states_at_ends_of_prompts_in_bfloat16(group: int, tools: Any) -> None:
    """Heads of 128 as models have them: those of prompts of 512 tokens, and of one, as if alone."""
    given = tensors("cuda", (1, 2048, 4, 4 * group, 128, 128))
    given = (*(t.bfloat16() for t in given[:3]), *given[3:5])
    begins = [0, 512, 1024, 1025, 1536]
    asked = torch.tensor([511, 1023, 1024, 1535, 2047], dtype=torch.int32, device="cuda")
    made = delta_rule_ends(*given, asked, starts=begun_at(2048, *begins[1:]).cuda(), backend="triton")
    for begin, end, found in zip(begins, asked.tolist(), made.last, strict=True):
        exact = delta_rule_reference(*(t[:, begin : end + 1].double() for t in given))
        assert tools.relative(found, exact.last[0]) <= 1e-2
        assert tools.relative(made.out[:, begin : end + 1], exact.out) <= 1e-2
