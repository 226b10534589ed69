"""The fused operations with weights that are trained themselves: their gradients, by every way of saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ftkernels.lora_linear import lora_linear, lora_linear_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.projection import Norm, Projection, WeightCopies, join_weights
from torch import Tensor

from tests.pairs import all_pairs

BF16, F32 = torch.bfloat16, torch.float32


def weights(device: str, *shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(shape, device=device) / shape[1] ** 0.5 for shape in shapes]


def projected(function: Callable[..., Any], count: int, *, bias: bool = False, **kwargs: Any) -> Callable[..., Any]:
    """``function`` of z, a norm's weight, and the weights (and biases) of its projections, all trained."""

    def call(z: Tensor, norm: Tensor, *trained: Tensor) -> Any:
        biases: Sequence[Tensor | None] = trained[count:] if bias else [None] * count
        layers = [Projection(w, b) for w, b in zip(trained[:count], biases, strict=True)]
        return function(z, *layers, norm=Norm(norm, 1e-6, kwargs.get("form", "llama")), **plain)

    plain = {name: value for name, value in kwargs.items() if name != "form"}
    return call


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("save", ["products", "input"])
def test_linear_matches_float64(device: str, tools: Any, save: str, bias: bool, form: str) -> None:
    inputs = [torch.randn(2, 5, 40, device=device), torch.randn(40, device=device), *weights(device, (33, 40))]
    inputs += [torch.randn(33, device=device)] if bias else []
    op = projected(lora_linear, 1, bias=bias, form=form, save=save, backend="triton")
    reference = projected(lora_linear_reference, 1, bias=bias, form=form)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


@pytest.mark.parametrize("rope", [None, 16, 8], ids="rope{}".format)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
def test_qkv_matches_float64(device: str, tools: Any, layers: Any, bias: bool, rope: int | None) -> None:
    shapes = [(64, 40), (32, 40), (32, 40)]
    inputs = [torch.randn(2, 5, 40, device=device), torch.randn(40, device=device), *weights(device, *shapes)]
    inputs += [torch.randn(rows, device=device) for rows, _ in shapes] if bias else []
    kwargs: dict[str, Any] = {"head_dim": 16, "rope": None if rope is None else layers.angles(rope)}
    op = projected(lora_qkv, 3, bias=bias, backend="triton", **kwargs)
    reference = projected(lora_qkv_reference, 3, bias=bias, **kwargs)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


#: What is computed again needs the activation and the bias; the residual is added behind all of it.
MLPS = all_pairs(("silu", "gelu_tanh"), ("none", "add", "return"), ("gate_up", "gate_up_once", "input"), (False, True))


@pytest.mark.parametrize(("activation", "residual", "save", "bias"), MLPS)
def test_mlp_matches_float64(device: str, tools: Any, activation: str, residual: str, save: str, bias: bool) -> None:
    shapes = [(72, 40), (72, 40), (40, 72)]
    inputs = [torch.randn(2, 5, 40, device=device), torch.randn(40, device=device), *weights(device, *shapes)]
    inputs += [torch.randn(rows, device=device) for rows, _ in shapes] if bias else []
    kwargs: dict[str, Any] = {"activation": activation, "residual": residual}
    op = projected(lora_mlp, 3, bias=bias, save=save, backend="triton", **kwargs)
    reference = projected(lora_mlp_reference, 3, bias=bias, **kwargs)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


def mlp(z: Tensor, norm: Tensor, trained: Sequence[Tensor], copies: Sequence[Tensor | None], **kwargs: Any) -> Tensor:
    gate, up, down = (Projection(w, copy=c) for w, c in zip(trained, copies, strict=True))
    out = lora_mlp(z, gate, up, down, norm=Norm(norm, 1e-6), residual="add", backend="triton", **kwargs)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("save", ["gate_up", "gate_up_once", "input"])
def test_joined_weights_and_a_second_backward_give_the_same(device: str, save: str) -> None:
    trained = [w.requires_grad_() for w in weights(device, (72, 40), (72, 40), (40, 72))]
    z = torch.randn(10, 40, device=device, requires_grad=True)
    norm = torch.randn(40, device=device, requires_grad=True)
    leaves = [z, norm, *trained]
    apart = torch.autograd.grad(mlp(z, norm, trained, [None] * 3, save=save).square().sum(), leaves)
    join_weights(trained[:2])
    assert trained[0].untyped_storage().data_ptr() == trained[1].untyped_storage().data_ptr()
    assert all(w.requires_grad and w.is_leaf for w in trained)
    loss = mlp(z, norm, trained, [None] * 3, save=save).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    for a, b, c in zip(apart, first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(b, c)


def test_gradients_of_a_group_share_one_product_and_are_not_copied(device: str) -> None:
    """Autograd keeps what backward made, so that no gradient is there twice."""
    gate, up, down = (w.requires_grad_() for w in weights(device, (72, 40), (72, 40), (40, 72)))
    norm = torch.ones(40, device=device, requires_grad=True)
    mlp(torch.randn(10, 40, device=device), norm, [gate, up, down], [None] * 3).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert gate.grad.untyped_storage().data_ptr() == up.grad.untyped_storage().data_ptr()
    assert gate.grad.untyped_storage().nbytes() == 4 * (gate.numel() + up.numel())


def test_copies_are_what_products_read_and_float32_gradients_are_not_rounded(device: str) -> None:
    """bfloat16 products of float32 weights: copies change nothing, gradients are those of the rounded weights."""
    trained = [w.requires_grad_() for w in weights(device, (72, 40), (72, 40), (40, 72))]
    z = torch.randn(64, 40, device=device)
    norm = torch.randn(40, device=device, requires_grad=True)
    made = WeightCopies([[Projection(w) for w in trained[:2]], [Projection(trained[2])]], BF16)
    made.refresh()
    copies = [copy for group in made.copies for copy in group]
    assert [copy.dtype for copy in copies] == [BF16] * 3
    kind = torch.device(device).type
    grads = []
    for given in (copies, [None] * 3):
        with torch.autocast(kind, dtype=BF16):
            out = mlp(z, norm, trained, given)
        assert out.dtype == F32  # as wide as the residual stream
        grads.append(torch.autograd.grad(out.sum(), [norm, *trained]))
    for with_copies, without in zip(*grads, strict=True):
        assert with_copies.dtype == F32
        assert (with_copies - without).norm() <= 1e-2 * without.norm()  # one product or two
    assert any(not torch.equal(g, g.to(BF16).float()) for g in grads[0][1:])


@pytest.mark.parametrize("count", [1, 3])
def test_a_gradient_is_kept_in_bfloat16_where_the_weight_says_so(device: str, count: int) -> None:
    """As torch's own product in bfloat16 gives it; that of a weight which says nothing stays as accumulated."""
    torch.manual_seed(0)
    z = torch.randn(7, 40, device=device, dtype=BF16)
    trained = [weight.requires_grad_() for weight in weights(device, *[(16, 40)] * count)]
    gradients = {}
    for dtype in (F32, BF16):
        for weight in trained:
            weight.grad, weight.grad_dtype = None, dtype
        with torch.autocast(z.device.type, BF16):
            layers = [Projection(weight) for weight in trained]
            norm = Norm(torch.ones(40, device=device), 1e-6, "llama")
            if count == 1:
                made = [lora_linear(z, layers[0], norm=norm, backend="torch")]
            else:
                made = list(lora_qkv(z[None], *layers, norm=norm, head_dim=16, rope=None, backend="torch"))[:3]
        torch.stack([y.float().square().sum() for y in made]).sum().backward()
        gradients[dtype] = [weight.grad for weight in trained]
    for rounded, whole in zip(gradients[BF16], gradients[F32], strict=True):
        assert rounded is not None
        assert whole is not None
        assert (rounded.dtype, whole.dtype) == (BF16, F32)
        assert not torch.equal(whole, whole.to(BF16).float())  # which would show nothing
        torch.testing.assert_close(rounded, whole.to(BF16), rtol=2**-7, atol=1e-6)


def test_copies_are_made_again_when_told(device: str) -> None:
    weight = torch.randn(8, 4, device=device, requires_grad=True)
    made = WeightCopies([[Projection(weight)]], BF16)
    made.refresh()
    before = made.copies[0][0].clone()
    assert torch.equal(before, weight.detach().to(BF16))
    with torch.no_grad():
        weight.add_(1.0)
    made.refresh()
    assert torch.equal(made.copies[0][0], before)
    made.outdate()
    made.refresh()
    assert torch.equal(made.copies[0][0], weight.detach().to(BF16))


def test_weights_in_the_products_dtype_need_no_copies(device: str) -> None:
    frozen, trained = torch.randn(8, 4, device=device), torch.randn(8, 4, device=device, requires_grad=True)
    assert WeightCopies([[Projection(trained)], [Projection(frozen)]], F32).copies == [(), ()]
    assert WeightCopies([[Projection(frozen)]], BF16).copies == [()]


def test_an_adapter_on_a_trained_weight_is_refused() -> None:
    bad = Projection(torch.zeros(8, 4, requires_grad=True), a=torch.zeros(2, 4), b=torch.zeros(8, 2))
    with pytest.raises(ValueError, match="frozen base weight"):
        lora_linear(torch.zeros(3, 4), bad, backend="torch")
