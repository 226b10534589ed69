"""Log-probabilities and entropies of a linear head in tiles."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from ftkernels.limits import log_prob_bytes
from ftkernels.linear_log_prob import linear_log_prob, linear_log_prob_reference

ours = partial(linear_log_prob, backend="triton")


def _case(device: str, rows: int = 13, hidden: int = 33, vocabulary: int = 301) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias, labels; a third of the labels is ignored."""
    x = torch.randn(rows, hidden, device=device)
    w = torch.randn(vocabulary, hidden, device=device) * 0.6
    b = torch.randn(vocabulary, device=device)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    labels[::3] = -100
    return x, w, b, labels


def _call(function: Any, labels: torch.Tensor, **options: Any) -> Any:
    return lambda x, w, b: function(x, w, labels, bias=b, **options)


#: One tile of all; and tiles of which the last is smaller, in rows and in the vocabulary, which has one in between.
TILES = [(2048, 16384), (8, 128)]
OPTIONS = [
    {},
    {"temperature": 0.5},
    {"softcap": 30.0, "logit_scale": 0.5},
    {"softcap": 5.0, "logit_scale": 2.0, "temperature": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=["one tile", "many tiles"])
def test_both_outputs_and_all_gradients_match_float64(
    device: str, tools: Any, options: dict[str, Any], tile: tuple[int, int]
) -> None:
    *inputs, labels = _case(device)
    tools.assert_float32(
        _call(ours, labels, tile=tile, **options), _call(linear_log_prob_reference, labels, **options), inputs
    )


#: Every three of what decides how a gradient is gathered, and every two of these and of what logits go through.
GATHERED = [
    (OPTIONS[(number + half * 2) % 4], *how)
    for number, how in enumerate(product((False, True), (False, True), TILES))
    for half in (0, 1)
]


@pytest.mark.parametrize(("options", "entropy", "hint", "tile"), GATHERED, ids=str)
def test_a_frozen_head_gives_the_same_gradient_of_its_input(
    device: str, tools: Any, options: dict[str, Any], entropy: bool, hint: bool, tile: tuple[int, int]
) -> None:
    x, w, b, labels = _case(device)

    def call(function: Any, **more: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            found = function(x, w.to(x.dtype), labels, bias=b.to(x.dtype), **options, **more)
            return found[0] * 1.5 - found[1] if entropy else found[0] * 1.5

        return run

    tools.assert_float32(call(ours, entropy_gradient=hint, tile=tile), call(linear_log_prob_reference), (x,))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (3, 127), (129, 129), (2, 9001)])
def test_odd_shapes(device: str, tools: Any, rows: int, vocabulary: int) -> None:
    x, w, b, _ = _case(device, rows, 5, vocabulary)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    tools.assert_float32(_call(ours, labels, tile=(64, 512)), _call(linear_log_prob_reference, labels), (x, w, b))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])  # fmt: skip  # noqa: E501
def test_bfloat16_is_as_good_as_torch(
    device: str, tools: Any, dtypes: tuple[Any, Any], frozen: bool, backend: Any
) -> None:
    x, w, _, labels = _case(device, 24, 64, 300)

    if frozen:

        def head(x: torch.Tensor) -> torch.Tensor:
            fixed = w.to(dtypes[1])
            return fixed.double() if x.dtype == torch.float64 else fixed

        tools.assert_bfloat16(
            lambda x: linear_log_prob(x, head(x), labels, backend=backend, tile=(8, 128))[0],
            lambda x: linear_log_prob_reference(x, head(x), labels)[0],
            (x,),
            dtypes[:1],
        )
        return
    tools.assert_bfloat16(
        lambda x, w: linear_log_prob(x, w, labels, backend=backend, tile=(8, 128)),
        lambda x, w: linear_log_prob_reference(x, w, labels),
        (x, w),
        dtypes,
    )


def test_logits_are_not_rounded_to_bfloat16(device: str) -> None:
    """Rounding them costs 0.02 nats a token on average at the size that trained models' logits have."""
    x, w, _, labels = _case(device, 48, 64, 400)
    x, w = x.bfloat16(), (w * 4).bfloat16()
    exact = linear_log_prob_reference(x.double(), w.double(), labels)
    rounded = linear_log_prob_reference(x, w, labels)
    for backend in ("triton", "torch"):
        found = linear_log_prob(x, w, labels, backend=backend, tile=(16, 64))
        for value, truth, theirs in zip(found, exact, rounded, strict=True):
            assert (value - truth).abs().max() < 1e-4
            assert (theirs - truth).abs().max() > 1e-2


def test_autocast_gives_what_explicit_casts_give(device: str) -> None:
    x, w, _, labels = _case(device, 8, 32, 100)
    leaves = [x.requires_grad_(), w.clone().requires_grad_()]
    with torch.autocast(device, torch.bfloat16):
        found = ours(leaves[0], leaves[1], labels)[0].sum()
        grads = torch.autograd.grad(found, leaves)
    low = [x.detach().bfloat16().requires_grad_(), w.bfloat16().requires_grad_()]
    expected = ours(low[0], low[1], labels)[0].sum()
    assert torch.equal(found, expected)
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    for got, want in zip(grads, torch.autograd.grad(expected, low), strict=True):
        assert (got - want.float()).norm() / want.float().norm() < 5e-3


def test_the_gradient_of_a_confident_token_survives_bfloat16(device: str) -> None:
    """p = 0.9995 rounds to 1 in bfloat16: taken from the sum over the vocabulary, 1 - p would be gone."""
    torch.manual_seed(1)
    w = torch.randn(65, 32, device=device).bfloat16()
    x = (w[3] * 0.4).clone()[None]
    labels = torch.tensor([3], device=device)
    exact = x.double().requires_grad_()
    log_prob = linear_log_prob_reference(exact, w.double(), labels)[0]
    assert 1e-5 < -float(log_prob.detach()) < 1e-2
    (want,) = torch.autograd.grad(log_prob.sum(), exact)
    for backend in ("triton", "torch"):
        leaf = x.clone().requires_grad_()
        (got,) = torch.autograd.grad(linear_log_prob(leaf, w, labels, backend=backend)[0].sum(), leaf)
        assert (got.double() - want).norm() / want.norm() < 1e-2


def test_tied_head_sums_both_gradients(device: str) -> None:
    ids = torch.randint(0, 50, (9,), device=device)
    labels = torch.randint(0, 50, (9,), device=device)
    grads = []
    for function in (ours, linear_log_prob_reference):
        embedding = torch.nn.Embedding(50, 16, device=device)
        with torch.no_grad():
            embedding.weight.copy_(torch.arange(800, device=device).view(50, 16).sin())
        function(embedding(ids) * 4, embedding.weight, labels)[0].sum().backward()
        grads.append(embedding.weight.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_second_backward_through_a_retained_graph(device: str, frozen: bool) -> None:
    x, w, b, labels = _case(device)
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w, b))]
    found = ours(x, w, labels, bias=b)[0].sum()
    first = torch.autograd.grad(found, leaves, torch.tensor(2.0, device=device), retain_graph=True)
    second = torch.autograd.grad(found, leaves, torch.tensor(1.0, device=device))
    for a, c in zip(first, second, strict=True):
        assert torch.allclose(a, 2 * c, rtol=1e-5, atol=1e-6)


def test_no_rows_and_no_labels_give_zero(device: str) -> None:
    for frozen in (False, True):
        w = torch.randn(20, 8, device=device, requires_grad=not frozen)
        for rows in (0, 3):
            x = torch.randn(rows, 8, device=device, requires_grad=True)
            found = ours(x, w, torch.full((rows,), -100, device=device))
            leaves = (x,) if frozen else (x, w)
            grads = torch.autograd.grad(found[0].sum(), leaves)
            assert all(float(value.detach().abs().sum()) == 0.0 for value in (*found, *grads))


def test_strided_inputs(device: str, tools: Any) -> None:
    x, w, _, labels = _case(device, 12, 32)
    tools.assert_float32(
        lambda x, w: ours(x.view(12, 2, 16)[:, 1], w[:, ::2], labels),
        lambda x, w: linear_log_prob_reference(x.view(12, 2, 16)[:, 1], w[:, ::2], labels),
        (x, w),
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_twice_the_same_bits(device: str, frozen: bool) -> None:
    x, w, b, labels = _case(device)
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w, b))]
    runs = [torch.autograd.grad(ours(x, w, labels, bias=b, tile=(3, 32))[0].sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, c) for a, c in zip(*runs, strict=True))


def test_nothing_of_the_callers_is_overwritten(device: str) -> None:
    x, w, b, labels = _case(device)
    tensors = (x, w, b, labels)
    kept = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    ours(x.requires_grad_(), w, labels, bias=b, tile=(4, 64))[0].sum().backward()
    assert versions == [t._version for t in tensors]
    assert all(torch.equal(a.detach(), c) for a, c in zip(tensors, kept, strict=True))


def test_evaluation_gathers_no_gradient(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ftkernels.linear_log_prob")
    gathered: list[bool] = []

    def recording(*args: Any, weights: Any, **kwargs: Any) -> Any:
        gathered.append(weights is not None)
        return fold(*args, weights=weights, **kwargs)

    fold = module.fold
    monkeypatch.setattr(module, "fold", recording)
    x, w, b, labels = _case(device)
    training = ours(x.requires_grad_(), w, labels, bias=b)
    with torch.no_grad():
        evaluating = ours(x, w, labels, bias=b)
    ours(x, w.requires_grad_(), labels, bias=b)
    # In two parts each: the last columns of such a vocabulary are products of their own. A trained head goes over its
    # tiles again in backward.
    assert gathered == [True, True, False, False, False, False]
    assert all(torch.equal(a.detach(), c) for a, c in zip(training, evaluating, strict=True))


def test_the_workspace_grows_neither_with_the_vocabulary_nor_with_the_length(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = torch.empty

    def counting(*shape: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*shape, **kwargs)
        made.append(out.numel())
        return out

    monkeypatch.setattr(torch, "empty", counting)
    sizes = set()
    for rows, vocabulary in ((32, 512), (64, 512), (32, 1024)):
        x, w, _, _ = _case(device, rows, 32, vocabulary)
        labels = torch.randint(0, vocabulary, (rows,), device=device)
        made.clear()
        ours(x.requires_grad_(), w, labels, tile=(16, 256))[0].sum().backward()
        sizes.add(max(size for size in made if size != rows * 32))
    assert sizes == {16 * 256}
    assert len({log_prob_bytes(rows, 4096, v, 2, on_gpu=True) for rows in (4096, 10**6) for v in (32768, 256_000)}) == 1


def test_huge_logits_under_a_cap_are_finite(device: str) -> None:
    x = torch.tensor([[1e9], [-1e9]], device=device, requires_grad=True)
    w = torch.tensor([[1.0], [-1.0], [0.0]], device=device)
    log_prob, entropy = ours(x, w, torch.tensor([1, 0], device=device), softcap=30.0)
    log_prob.sum().backward()
    assert torch.allclose(log_prob, torch.tensor([-60.0, -60.0], device=device), atol=1e-3)
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(x.grad).all()


def test_entries_that_are_ruled_out_do_not_count(device: str) -> None:
    """A bias of -inf, as padding of a vocabulary has: 0 * -inf must not make the entropy NaN."""
    x, w, b, labels = _case(device)
    labels = labels.clamp(max=200)
    b = b.clone()
    b[250:] = float("-inf")
    for backend in ("triton", "torch"):
        leaf = x.clone().requires_grad_()
        found = linear_log_prob(leaf, w, labels, bias=b, backend=backend, entropy_gradient=True, tile=(4, 48))
        expected = linear_log_prob_reference(x, w[:250], labels, bias=b[:250])
        assert all(torch.allclose(a, c, atol=1e-5) for a, c in zip(found, expected, strict=True))
        (found[0] + found[1]).sum().backward()
        assert torch.isfinite(leaf.grad).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
def test_not_a_number_stays_one(device: str) -> None:
    x, w, b, labels = _case(device)
    x[1, 0] = float("nan")
    log_prob, _ = ours(x, w, labels, bias=b, tile=(4, 64))
    assert torch.isnan(log_prob).tolist() == [index == 1 for index in range(13)]


def test_gradcheck(device: str) -> None:
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, device=device, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, -100, 4], device=device)
    assert torch.autograd.gradcheck(lambda x, w: ours(x, w, labels, softcap=3.0, tile=(2, 3)), (x, w))
    # A second backward goes over the tiles again, and rounds otherwise.
    assert torch.autograd.gradcheck(
        lambda x: ours(x, w.detach(), labels, softcap=3.0, tile=(2, 3))[0], (x,), nondet_tol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 301])}, "label 301"),
        ({"hidden": torch.ones(2, 301)}, "logits"),
        ({"hidden": torch.ones(3, 33)}, "2 labels for 3 rows"),
        ({"weight": torch.ones(301 * 33 // 2, dtype=torch.uint8)}, "expected hidden"),
        ({"bias": torch.ones(5)}, "bias"),
        ({"softcap": -1.0}, "softcap"),
        ({"temperature": 0.0}, "temperature"),
        ({"tile": (0, 16)}, "tile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(2, 33),
        "weight": torch.ones(301, 33),
        "labels": torch.tensor([0, 1]),
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        linear_log_prob(**arguments)
