"""Experts with adapters against float64, each expert in turn: every routing, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.experts import (
    ExpertStack,
    empty_packs,
    lora_experts,
    lora_experts_reference,
    pack_experts,
)
from ftkernels.nf4 import quantize_nf4
from torch import Tensor

from tests.tiers import further

BF16 = torch.bfloat16


def routing(tokens: int, experts: int, top: int, kind: str, device: str) -> Tensor:
    """(tokens, top): random; all to the same experts; or none to half of the experts."""
    if kind == "one":
        return torch.arange(top, device=device).expand(tokens, top)
    scores = torch.rand(tokens, experts, device=device)
    if kind == "half":
        scores[:, ::2] = -1.0
    return scores.topk(top, dim=-1).indices


def inputs_of(
    experts: int, top: int, hidden: int, width: int, rank: int, tokens: int, device: str
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    at = {"device": device}
    adapters = [
        torch.randn(experts * rank, hidden, **at) / hidden**0.5,
        torch.randn(2 * width, rank * experts, **at) / rank**0.5,
        torch.randn(experts * rank, width, **at) / width**0.5,
        torch.randn(hidden, rank * experts, **at) / rank**0.5,
    ]
    stacks = (
        torch.randn(experts, 2 * width, hidden, **at) / hidden**0.5,
        torch.randn(experts, hidden, width, **at) / width**0.5,
    )
    return [torch.randn(tokens, hidden, **at), torch.rand(tokens, top, **at), *(adapters if rank else [])], stacks


def call(function: Any, index: Tensor, stacks: tuple[Tensor, Tensor], **options: Any) -> Any:
    def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
        experts = stacks[0].shape[0]
        pairs = (adapters[:2], adapters[2:]) if adapters else ((None, None), (None, None))
        first, second = (
            ExpertStack(w.to(x.dtype), experts, *pair, scaling=0.5) for w, pair in zip(stacks, pairs, strict=True)
        )
        out: Tensor = function(x, index, weights, first, second, **options)
        return out

    return of


@pytest.mark.parametrize("kind", ["random", "one", "half"])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "width", "rank", "tokens"),
    [(4, 2, 64, 32, 16, 37), (5, 3, 48, 40, 3, 50), (8, 1, 64, 64, 0, 9)],
    ids=str,
)
def test_output_and_every_gradient(
    device: str, tools: Any, kind: str, experts: int, top: int, hidden: int, width: int, rank: int, tokens: int
) -> None:
    inputs, stacks = inputs_of(experts, top, hidden, width, rank, tokens, device)
    index = routing(tokens, experts, top, kind, device)
    op, reference = (
        call(lora_experts, index, stacks, backend="triton"),
        call(lora_experts_reference, index, stacks),
    )
    tools.assert_float32(op, reference, inputs)
    tools.assert_float32(call(lora_experts, index, stacks, backend="torch"), reference, inputs)


@pytest.mark.parametrize("kind", ["random", *further("one")])
def test_in_half_precision(device: str, tools: Any, kind: str) -> None:
    inputs, stacks = inputs_of(8, 2, 128, 64, 16, 300, device)
    index = routing(300, 8, 2, kind, device)
    stacks = tuple(w.to(BF16).float() for w in stacks)
    op, reference = call(lora_experts, index, stacks, backend="triton"), call(lora_experts_reference, index, stacks)
    tools.assert_bfloat16(op, reference, inputs, BF16)


def test_the_input_alone_is_saved_with_the_same_bits(device: str, tools: Any) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index = routing(37, 4, 2, "random", device)
    kept, again = (call(lora_experts, index, stacks, backend="triton", save=save) for save in ("gate_up", "input"))
    dtypes = [torch.float32] * len(inputs)
    for one, other in zip(tools.run(kept, inputs, dtypes), tools.run(again, inputs, dtypes), strict=True):
        assert torch.equal(one, other)


def compare_all(tools: Any, index: Tensor, stacks: tuple[Tensor, Tensor], inputs: list[Tensor]) -> None:
    reference = call(lora_experts_reference, index, stacks)
    for backend in ("triton", "torch"):
        tools.assert_float32(call(lora_experts, index, stacks, backend=backend), reference, inputs)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_token_or_two(device: str, tools: Any, tokens: int) -> None:
    inputs, stacks = inputs_of(6, 3, 48, 40, 8, tokens, device)
    compare_all(tools, routing(tokens, 6, 3, "random", device), stacks, inputs)


def test_all_experts_but_one_are_empty(device: str, tools: Any) -> None:
    """Their adapters' gradients are zeros, and written: tests' fresh memory is NaN."""
    inputs, stacks = inputs_of(5, 1, 48, 40, 8, 37, device)
    index = torch.full((37, 1), 3, device=device)
    compare_all(tools, index, stacks, inputs)
    *_, a, b, _, _ = tools.run(call(lora_experts, index, stacks, backend="triton"), inputs, [torch.float32] * 6)
    assert a.view(5, 8, -1).abs().sum((1, 2)).ne(0).tolist() == [False, False, False, True, False]
    assert b.view(-1, 8, 5).abs().sum((0, 1)).ne(0).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("rank", [1, 24, 64])
def test_other_ranks(device: str, tools: Any, rank: int) -> None:
    inputs, stacks = inputs_of(3, 2, 48, 40, rank, 21, device)
    compare_all(tools, routing(21, 3, 2, "random", device), stacks, inputs)


@pytest.mark.parametrize("order", ["slice", "columns", "every second", "one for all"])
def test_strided_inputs_and_incoming_gradients(device: str, tools: Any, order: str) -> None:
    """Tokens, weights, what is added, and the gradient, which ``sum()`` makes of one number."""
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index = routing(37, 4, 2, "random", device)

    def strided(t: Tensor) -> Tensor:
        if order == "slice":
            return torch.cat([t, t + 1], dim=-1)[:, : t.shape[-1]]
        if order == "columns":
            return t.t().contiguous().t()
        if order == "every second":
            return t.repeat_interleave(2, dim=-1)[:, ::2]
        return t[:1].expand(t.shape)

    x, weights, added, incoming = (strided(t) for t in (*inputs[:2], torch.randn(37, 64, device=device), inputs[0]))
    assert not any(t.is_contiguous() for t in (x, weights, added, incoming))

    def run(function: Any, of: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaves = [of(t.detach().to(dtype)).requires_grad_() for t in (x, weights, added)]
        adapters = [t.to(dtype).requires_grad_() for t in inputs[2:]]
        out = call(function, index, stacks, added=leaves[2], **options)(*leaves[:2], *adapters)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *adapters], of(incoming.detach()).to(dtype))]

    wanted = run(lora_experts_reference, torch.Tensor.contiguous, torch.float64)
    for backend in ("triton", "torch"):
        found = run(lora_experts, lambda t: t, torch.float32, backend=backend)
        for one, exact in zip(found, wanted, strict=True):
            assert tools.relative(one, exact) < 1e-5


def test_twice_the_same_bits(device: str, tools: Any) -> None:
    inputs, stacks = inputs_of(6, 3, 64, 32, 16, 53, device)
    index = routing(53, 6, 3, "half", device)
    for backend in ("triton", "torch"):
        op = call(lora_experts, index, stacks, backend=backend)
        one, again = (tools.run(op, inputs, [torch.float32] * len(inputs)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def test_what_needs_no_gradient_gets_none_and_changes_no_other(device: str, tools: Any) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index = routing(37, 4, 2, "random", device)
    for save in ("gate_up", "input"):
        op = call(lora_experts, index, stacks, backend="triton", save=save)
        out, *every = tools.run(op, inputs, [torch.float32] * 6)
        incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(device)
        for frozen in ([1], [0], [0, 1], [0, 1, 2, 3], [0, 1, 4, 5], [1, 2, 3, 4, 5]):
            leaves = [t.detach().clone().requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
            again = op(*leaves)
            again.backward(incoming)
            assert torch.equal(again, out)
            for i, leaf in enumerate(leaves):
                assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, every[i]), (frozen, i)
    with torch.no_grad():
        assert torch.equal(op(*inputs), out)


@pytest.mark.parametrize("bare", [0, 1], ids=["gate_up", "down"])
def test_adapters_on_one_stack_alone(device: str, tools: Any, bare: int) -> None:
    inputs, stacks = inputs_of(4, 2, 48, 40, 3, 37, device)
    index = routing(37, 4, 2, "random", device)

    def on_one(function: Any, **options: Any) -> Any:
        def of(x: Tensor, weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
            found = [ExpertStack(w.to(x.dtype), 4) for w in stacks]
            found[1 - bare] = ExpertStack(stacks[1 - bare].to(x.dtype), 4, a, b, scaling=2.0)
            out: Tensor = function(x, index, weights, *found, **options)
            return out

        return of

    kept = [*inputs[:2], *(inputs[4:] if bare == 0 else inputs[2:4])]
    for backend in ("triton", "torch"):
        for save in ("gate_up", "input"):
            op = on_one(lora_experts, backend=backend, save=save)
            tools.assert_float32(op, on_one(lora_experts_reference), kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
def test_what_is_added_may_have_another_dtype(device: str, tools: Any, dtype: torch.dtype) -> None:
    """The sum is in the dtype that both promote to; the gradient of what is added in its own."""
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index, added = routing(37, 4, 2, "random", device), torch.randn(37, 64, device=device, dtype=dtype)
    for backend in ("triton", "torch"):
        leaf = added.clone().requires_grad_()
        out = call(lora_experts, index, stacks, backend=backend, added=leaf)(*inputs)
        alone = call(lora_experts, index, stacks, backend=backend)(*inputs)
        assert out.dtype == torch.promote_types(torch.float32, dtype)
        assert tools.relative(out.detach(), added.double() + alone.detach()) < 1e-6
        out.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert torch.equal(leaf.grad, torch.ones_like(added))


@pytest.mark.parametrize("rank", [16, 3])
def test_packed_adapters_are_taken_as_they_are_given(device: str, tools: Any, rank: int) -> None:
    """The same bits as packing in each call; and it is the packs that are multiplied by."""
    inputs, stacks = inputs_of(4, 2, 64, 32, rank, 37, device)
    index = routing(37, 4, 2, "random", device)

    def packing(scale: float) -> Any:
        def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
            found = []
            for weight, pair in zip(stacks, (adapters[:2], adapters[2:]), strict=True):
                stack = ExpertStack(weight, 4, *pair, scaling=0.5)
                packs = empty_packs(stack, torch.float32)
                assert packs is not None
                pack_experts(stack, packs)
                packs.b.mul_(scale)
                found.append(ExpertStack(weight, 4, *pair, scaling=0.5, packed=packs))
            return lora_experts(x, index, weights, *found, backend="triton")

        return of

    dtypes = [torch.float32] * 6
    wanted = tools.run(call(lora_experts, index, stacks, backend="triton"), inputs, dtypes)
    assert all(torch.equal(a, b) for a, b in zip(tools.run(packing(1.0), inputs, dtypes), wanted, strict=True))
    without = tools.run(call(lora_experts, index, stacks, backend="triton"), inputs[:2], dtypes[:2])
    assert torch.equal(tools.run(packing(0.0), inputs, dtypes)[0], without[0])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_activations_and_packed_weights(device: str, tools: Any, activation: Any) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index = routing(37, 4, 2, "random", device)
    packed = [quantize_nf4(w.view(-1, w.shape[-1])) for w in stacks]
    dense = tuple(p.dequantize(torch.float32).view(w.shape) for p, w in zip(packed, stacks, strict=True))

    def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
        first, second = (
            ExpertStack(p, 4, *pair, scaling=0.5) for p, pair in zip(packed, (adapters[:2], adapters[2:]), strict=True)
        )
        return lora_experts(x, index, weights, first, second, unit=activation, backend="triton")

    tools.assert_float32(of, call(lora_experts_reference, index, dense, unit=activation), inputs)
    plain = call(lora_experts, index, dense, unit=activation, backend="triton")
    for one, other in zip(*(tools.run(f, inputs, [torch.float32] * 6) for f in (of, plain)), strict=True):
        assert torch.equal(one, other)


FORMS = [
    pytest.param(True, True, True, "clamped", id="gpt-oss"),
    pytest.param(True, False, False, "silu", id="transposed"),
    pytest.param(False, True, False, "gelu_tanh", id="interleaved"),
    pytest.param(False, False, True, "clamped", id="biases and clamp"),
]


def call_form(
    function: Any, index: Tensor, stacks: tuple[Tensor, Tensor], biases: tuple[Tensor, Tensor] | None, *,
    transposed: bool, **options: Any,
) -> Any:  # fmt: skip
    """As :func:`call`; the weights (E, in, out) if ``transposed``, which ``stacks`` are not."""

    def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
        experts = stacks[0].shape[0]
        pairs = (adapters[:2], adapters[2:]) if adapters else ((None, None), (None, None))
        laid = [w.transpose(1, 2).contiguous() if transposed else w for w in stacks]
        made = [
            ExpertStack(w.to(x.dtype), experts, *pair, scaling=0.5, bias=bias, transposed=transposed)
            for w, pair, bias in zip(laid, pairs, biases or (None, None), strict=True)
        ]
        out: Tensor = function(x, index, weights, *made, **options)
        return out

    return of


def biases_of(stacks: tuple[Tensor, Tensor], scale: float = 8.0) -> tuple[Tensor, Tensor]:
    """Such that some gates and ups are beyond the clamp's 7, either side."""
    first, second = (torch.randn(w.shape[:2], device=w.device) for w in stacks)
    return scale * first, second


@pytest.mark.parametrize(("transposed", "interleaved", "biased", "unit"), FORMS)
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "width", "rank", "tokens"),
    [(5, 3, 48, 40, 3, 50), pytest.param(4, 2, 64, 32, 16, 37, marks=pytest.mark.long)],
    ids=str,
)
def test_other_forms(
    device: str, tools: Any, transposed: bool, interleaved: bool, biased: bool, unit: Any, experts: int, top: int,
    hidden: int, width: int, rank: int, tokens: int,
) -> None:  # fmt: skip
    inputs, stacks = inputs_of(experts, top, hidden, width, rank, tokens, device)
    index, biases = routing(tokens, experts, top, "random", device), biases_of(stacks) if biased else None
    options: Any = {"transposed": transposed, "interleaved": interleaved, "unit": unit}
    reference = call_form(lora_experts_reference, index, stacks, biases, **options)
    for backend in ("triton", "torch"):
        for save in ("gate_up", "input"):
            op = call_form(lora_experts, index, stacks, biases, backend=backend, save=save, **options)
            tools.assert_float32(op, reference, inputs)
    if not rank:
        return
    bare = call_form(lora_experts, index, stacks, biases, backend="triton", **options)
    tools.assert_float32(bare, reference, inputs[:2])


@pytest.mark.parametrize("kind", ["random", *further("one")])
def test_gpt_osss_form_in_half_precision(device: str, tools: Any, kind: str) -> None:
    inputs, stacks = inputs_of(8, 2, 128, 64, 16, 300, device)
    index = routing(300, 8, 2, kind, device)
    stacks = tuple(w.to(BF16).float() for w in stacks)
    # Hardly any are beyond the clamp: there the gradient jumps, and rounding decides on which side of it one is.
    biases = tuple(b.to(BF16).float() for b in biases_of(stacks, 0.5))
    options: Any = {"transposed": True, "interleaved": True, "unit": "clamped"}
    op = call_form(lora_experts, index, stacks, biases, backend="triton", **options)
    tools.assert_bfloat16(op, call_form(lora_experts_reference, index, stacks, biases, **options), inputs, BF16)


def test_gpt_osss_form_is_transformers(device: str, tools: Any) -> None:
    """Its own module of experts, output and every gradient."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    inputs, stacks = inputs_of(5, 3, 48, 40, 0, 50, device)
    index, biases = routing(50, 5, 3, "random", device), biases_of(stacks)
    config = GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=5)

    def theirs(x: Tensor, weights: Tensor) -> Tensor:
        module = GptOssExperts(config).to(x.device, x.dtype)
        for name, weight, bias in zip(("gate_up_proj", "down_proj"), stacks, biases, strict=True):
            getattr(module, name).data = weight.transpose(1, 2).to(x.dtype)
            getattr(module, f"{name}_bias").data = bias.to(x.dtype)
        out: Tensor = module(x, index, weights)
        return out

    options: Any = {"transposed": True, "interleaved": True, "unit": "clamped"}
    for function in (lora_experts_reference, lora_experts):
        chosen = {"backend": "triton"} if function is lora_experts else {}
        tools.assert_float32(call_form(function, index, stacks, biases, **chosen, **options), theirs, inputs)


def test_packed_weights_may_be_transposed(device: str, tools: Any) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index, biases = routing(37, 4, 2, "random", device), biases_of(stacks)
    laid = [w.transpose(1, 2).contiguous() for w in stacks]
    packed = [quantize_nf4(w.view(-1, w.shape[-1])) for w in laid]
    dense = tuple(p.dequantize(torch.float32).view(w.shape).transpose(1, 2) for p, w in zip(packed, laid, strict=True))

    def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
        made = [
            ExpertStack(p, 4, *pair, scaling=0.5, bias=bias, transposed=True)
            for p, pair, bias in zip(packed, (adapters[:2], adapters[2:]), biases, strict=True)
        ]
        assert [stack.shape for stack in made] == [tuple(w.shape) for w in stacks]
        return lora_experts(x, index, weights, *made, unit="clamped", interleaved=True, backend="triton")

    options: Any = {"transposed": False, "interleaved": True, "unit": "clamped"}
    tools.assert_float32(of, call_form(lora_experts_reference, index, dense, biases, **options), inputs)


def call_trained(
    function: Any, index: Tensor, *, transposed: bool = False, **options: Any
) -> Any:  # fmt: skip
    """A function of x, the router's weights, both stacks as they are stored, and their biases or nothing."""

    def of(x: Tensor, weights: Tensor, first: Tensor, second: Tensor, *biases: Tensor) -> Tensor:
        made = [
            ExpertStack(w, w.shape[0], bias=bias, transposed=transposed)
            for w, bias in zip((first, second), biases or (None, None), strict=True)
        ]
        out: Tensor = function(x, index, weights, *made, **options)
        return out

    return of


@pytest.mark.parametrize(("transposed", "interleaved", "biased", "unit"), [*FORMS, (False, False, False, "silu")])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "width", "tokens", "kind"),
    [(5, 3, 48, 40, 50, "half"), pytest.param(6, 1, 40, 72, 90, "one", marks=pytest.mark.long)],
    ids=str,
)
def test_stacks_that_are_trained(
    device: str, tools: Any, transposed: bool, interleaved: bool, biased: bool, unit: Any, experts: int, top: int,
    hidden: int, width: int, tokens: int, kind: str,
) -> None:  # fmt: skip
    """Output and the gradient of input, router's weights, stacks and biases, of experts without tokens, too."""
    (x, weights), stacks = inputs_of(experts, top, hidden, width, 0, tokens, device)
    index, biases = routing(tokens, experts, top, kind, device), biases_of(stacks) if biased else ()
    stored = [w.transpose(1, 2).contiguous() if transposed else w for w in stacks]
    inputs, options = [x, weights, *stored, *biases], {"transposed": transposed, "interleaved": interleaved}
    reference = call_trained(lora_experts_reference, index, unit=unit, **options)
    for backend in ("triton", "torch"):
        for save in ("gate_up", "input"):
            op = call_trained(lora_experts, index, unit=unit, backend=backend, save=save, **options)
            tools.assert_float32(op, reference, inputs)


@pytest.mark.parametrize("kind", ["random", *further("one")])
def test_trained_stacks_in_half_precision(device: str, tools: Any, kind: str) -> None:
    """Stacks in float32 beside copies in bfloat16 get gradients in float32, of what the copies are multiplied by."""
    tokens = 300 if device == "cuda" else 50
    (x, weights), stacks = inputs_of(8, 2, 64, 64, 0, tokens, device)
    index = routing(tokens, 8, 2, kind, device)
    op, reference = call_trained(lora_experts, index, backend="triton"), call_trained(lora_experts_reference, index)
    tools.assert_bfloat16(op, reference, [x, weights, *stacks])
    leaves = [w.to(BF16).float().requires_grad_() for w in stacks]
    copied = [ExpertStack(w, 8, copy=w.detach().to(BF16)) for w in leaves]
    plain = [w.detach().to(BF16).requires_grad_() for w in leaves]
    with torch.autocast(device, torch.bfloat16):
        lora_experts(x, index, weights, *copied, backend="triton").sum().backward()
        lora_experts(x, index, weights, *(ExpertStack(w, 8) for w in plain), backend="triton").sum().backward()
    for leaf, other in zip(leaves, plain, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        assert (leaf.grad.dtype, other.grad.dtype) == (torch.float32, BF16)
        assert tools.relative(other.grad, leaf.grad) < 5e-3  # one rounding
        idle = [e for e in range(8) if not (index == e).any()]
        assert not leaf.grad[idle].any()
        assert not other.grad[idle].any()


def test_what_is_not_trained_changes_no_gradient(device: str, tools: Any) -> None:
    (x, weights), stacks = inputs_of(4, 2, 64, 32, 0, 37, device)
    index, biases = routing(37, 4, 2, "random", device), biases_of(stacks)
    op = call_trained(lora_experts, index, unit="clamped", interleaved=True, backend="triton")
    inputs = [x, weights, *stacks, *biases]
    out, *every = tools.run(op, inputs, [torch.float32] * 6)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(device)
    for frozen in ([2], [3], [2, 4], [0, 1, 5], [0, 2, 3], [1, 3, 4, 5]):
        leaves = [t.detach().clone().requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
        op(*leaves).backward(incoming)
        for i, leaf in enumerate(leaves):
            assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, every[i]), (frozen, i)


def test_what_does_not_fit_is_refused(device: str) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 9, device)
    index, (x, weights, a1, b1, a2, b2) = routing(9, 4, 2, "random", device), inputs
    first, second = ExpertStack(stacks[0], 4, a1, b1), ExpertStack(stacks[1], 4, a2, b2)
    trained = ExpertStack(stacks[0].clone().requires_grad_(), 4, a1, b1)
    for words, changed in {
        "integers and numbers": {"index": index.float()},
        "needs index and weights": {"index": index[:-1]},
        "is no weight": {"gate_up": ExpertStack(stacks[0].to(torch.uint8), 4)},
        "frozen base weight": {"gate_up": trained},
        "does not take 64 features": {"gate_up": ExpertStack(stacks[0][..., 1:], 4)},
        "does not take 32 features": {"down": ExpertStack(stacks[1][:2], 2)},
        "both A and B": {"down": ExpertStack(stacks[1], 4, a2)},
        "bias must be": {"down": ExpertStack(stacks[1], 4, bias=stacks[0][0])},
        "do not fit 4 experts": {"gate_up": ExpertStack(stacks[0], 4, a2, b1)},
        "unknown save mode": {"save": "nothing"},
    }.items():
        asked: dict[str, Any] = {"index": index, "gate_up": first, "down": second, "save": "gate_up", **changed}
        with pytest.raises(ValueError, match=words):
            lora_experts(
                x, asked["index"], weights, asked["gate_up"], asked["down"], save=asked["save"], backend="triton"
            )
