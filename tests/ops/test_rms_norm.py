"""RMS norms: all forms, residual before and after, gradients of everything."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from ftkernels.rms_norm import (
    add_rms_norm,
    norm_backend,
    norm_forward,
    norm_forward_torch,
    rms_norm,
    rms_norm_add,
    rms_norm_reference,
)

EPS = 1e-6


def _reference_before(x: Any, r: Any, w: Any, form: Any) -> Any:
    total = x + r
    return rms_norm_reference(total, w, EPS, form=form), total


@pytest.mark.parametrize("shape", [(1, 3), (3, 127), (5, 129), (2, 40, 64), (1, 2050)])
@pytest.mark.parametrize("form", ["llama", "gemma", "plain"])
def test_norm_matches_float64(device: str, tools: Any, form: Any, shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
    ours = partial(rms_norm, eps=EPS, form=form, backend="triton")
    tools.assert_float32(ours, partial(rms_norm_reference, eps=EPS, form=form), (x, w))


@pytest.mark.parametrize("form", ["llama", "gemma", "plain"])
def test_residual_before_and_after_match_float64(device: str, tools: Any, form: Any) -> None:
    x, r, w = torch.randn(6, 33, device=device), torch.randn(6, 33, device=device), torch.randn(33, device=device)
    before = lambda x, r, w: add_rms_norm(x, r, w, EPS, form=form, backend="triton")  # noqa: E731
    tools.assert_float32(before, lambda x, r, w: _reference_before(x, r, w, form), (x, r, w))
    after = lambda x, r, w: rms_norm_add(x, r, w, EPS, form=form, backend="triton")  # noqa: E731
    tools.assert_float32(after, lambda x, r, w: r + rms_norm_reference(x, w, EPS, form=form), (x, r, w))


@pytest.mark.parametrize("form", ["llama", "gemma", "plain"])
def test_bfloat16_is_as_good_as_torch(device: str, tools: Any, form: Any) -> None:
    x, w = torch.randn(16, 256, device=device), torch.randn(256, device=device)
    ours = partial(rms_norm, eps=EPS, form=form, backend="triton")
    reference = partial(rms_norm_reference, eps=EPS, form=form)
    tools.assert_bfloat16(ours, reference, (x, w), torch.bfloat16)
    tools.assert_bfloat16(ours, reference, (x, w), (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_without_a_weight_it_matches_float64(device: str, tools: Any, backend: Any) -> None:
    x, r = torch.randn(6, 33, device=device), torch.randn(6, 33, device=device)
    kwargs = {"weight": None, "eps": EPS}
    ours, reference = partial(rms_norm, **kwargs, backend=backend), partial(rms_norm_reference, **kwargs)
    tools.assert_float32(ours, reference, (x,))
    tools.assert_bfloat16(ours, reference, (x,), torch.bfloat16)
    before, after = (partial(op, **kwargs, backend=backend) for op in (add_rms_norm, rms_norm_add))
    tools.assert_float32(before, lambda x, r: _reference_before(x, r, None, "llama"), (x, r))
    tools.assert_float32(after, lambda x, r: r + reference(x), (x, r))
    tools.assert_bfloat16(after, lambda x, r: r + reference(x), (x, r), torch.bfloat16)


def test_the_plain_form_rounds_once_and_adds_nothing(device: str) -> None:
    """As ``transformers.models.gpt_oss``: the product is taken in float32."""
    x = torch.randn(3, 256, device=device, dtype=torch.float16)
    w = torch.randn(256, device=device, dtype=torch.float16)
    n = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    y = rms_norm(x, w, EPS, form="plain", backend="triton")
    assert y.dtype == torch.float16
    assert ((y.double() - n * w.double()).abs() <= 2.0**-11 * (n * w.double()).abs() + 2.0**-24).all()


@pytest.mark.parametrize("same_weight", [True, False], ids=["weight of the same dtype", "float32 weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_rounds_before_the_weight_bit_for_bit(
    device: str, dtype: torch.dtype, same_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are trained with that rounding: a kernel without it is nearer to the exact value, and another model.

    The mean square of each row is 9, so that x / 3 lies far from where rounding turns, whatever the root's last bit.
    The interpreter cuts bfloat16 off, so kernels round nothing there (``store_dtype``); float16 it rounds as a GPU.
    """
    x = torch.tensor([5.0, -5.0, 4.0, 1.0, -1.0, 2.0, 0.0, 0.0]).repeat(3, 32).to(device, dtype)
    w = torch.randn(x.shape[1]).to(device, dtype if same_weight else torch.float32)
    n = (x.float() / 3.0).to(dtype)
    wanted = (n.float() * w.float()).to(w.dtype)
    assert not torch.equal((x.float() / 3.0 * w.float()).to(w.dtype), wanted)
    assert torch.equal(rms_norm_reference(x, w, EPS), wanted)
    assert torch.equal(norm_forward_torch(x, w, EPS, "llama", wanted.dtype)[0], wanted)
    if device == "cpu":
        if dtype == torch.bfloat16:
            return
        monkeypatch.setattr("ftkernels.rms_norm.triton_store_dtype", lambda _: tl.float16)
    zeros = torch.zeros_like(x)
    assert torch.equal(rms_norm(x, w, EPS, backend="triton"), wanted)
    assert torch.equal(add_rms_norm(x, zeros, w, EPS, backend="triton")[0], wanted)
    assert torch.equal(rms_norm_add(x, zeros, w, EPS, form="llama", backend="triton"), wanted)
    trained = w.requires_grad_()
    rms_norm(x[:1], trained, EPS, backend="triton").sum().backward()
    assert trained.grad is not None
    assert torch.equal(trained.grad, n[0].to(w.dtype))


@pytest.mark.parametrize(
    ("form", "x", "w", "expected"),
    [
        ("llama", torch.bfloat16, torch.float32, torch.float32),
        ("llama", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("gemma", torch.bfloat16, torch.float32, torch.bfloat16),
        ("plain", torch.bfloat16, torch.float32, torch.bfloat16),
        ("llama", torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_output_dtype_is_that_of_transformers(device: str, form: Any, x: Any, w: Any, expected: Any) -> None:
    value = torch.randn(2, 8, device=device, dtype=x)
    weight = torch.randn(8, device=device, dtype=w)
    assert rms_norm(value, weight, EPS, form=form, backend="triton").dtype == expected
    assert rms_norm_reference(value, weight, EPS, form=form).dtype == expected


def test_heads_of_a_fused_projection_are_read_in_place(device: str, tools: Any) -> None:
    qkv = torch.randn(2, 5, 6 * 16, device=device)
    w = torch.randn(16, device=device)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x[..., 16:80].unflatten(-1, (4, 16))

    tools.assert_float32(
        lambda x, w: rms_norm(heads(x), w, EPS, backend="triton"),
        lambda x, w: rms_norm_reference(heads(x), w, EPS),
        (qkv, w),
    )
    transposed = heads(qkv).transpose(1, 2)
    exact = rms_norm_reference(transposed.double(), w.double(), EPS)
    assert tools.relative(rms_norm(transposed, w, EPS, backend="triton"), exact) < 1e-6


def test_width_one_is_the_sign(device: str) -> None:
    """dx is 0 up to rounding there, so relative errors mean nothing."""
    x = torch.tensor([[2.0], [-3.0]], device=device, requires_grad=True)
    y = rms_norm(x, torch.ones(1, device=device), 1e-12, backend="triton")
    y.sum().backward()
    assert torch.allclose(y, torch.sign(x), atol=1e-6)
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-6


def test_no_rows(device: str) -> None:
    x = torch.randn(0, 8, device=device, requires_grad=True)
    w = torch.ones(8, device=device, requires_grad=True)
    rms_norm(x, w, EPS, backend="triton").sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 8)
    assert w.grad is not None
    assert w.grad.abs().sum() == 0


def test_twice_the_same_bits(device: str) -> None:
    x = torch.randn(700, 48, device=device, requires_grad=True)
    w = torch.randn(48, device=device, requires_grad=True)
    g = torch.randn(700, 48, device=device)
    first, second = (torch.autograd.grad(rms_norm(x, w, EPS, backend="triton"), (x, w), g) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck(device: str) -> None:
    x = torch.randn(2, 3, device=device, dtype=torch.float64, requires_grad=True)
    r = torch.randn(2, 3, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    for form in ("llama", "gemma", "plain"):
        assert torch.autograd.gradcheck(
            lambda x, r, w, form=form: add_rms_norm(x, r, w, EPS, form=form, backend="triton"), (x, r, w)
        )


def test_liger_370_376_dx_does_not_overwrite_dy(device: str) -> None:
    """In Gemma-2 the residual reads the same dy; an in-place dX corrupted it."""
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, device=device)
    dy = torch.randn(4, 16, device=device)
    kept = dy.clone()
    torch.autograd.grad(rms_norm(x, w, EPS, form="gemma", backend="triton"), x, dy)
    assert torch.equal(dy, kept)


def test_liger_74_gemma_adds_one_to_the_weight(device: str) -> None:
    x = torch.randn(4, 16, device=device)
    y = rms_norm(x, torch.zeros(16, device=device), EPS, form="gemma", backend="triton")
    assert torch.allclose(y.pow(2).mean(-1), torch.ones(4, device=device), atol=1e-4)


def test_unsloth_4533_a_trainable_weight_gets_its_gradient(device: str) -> None:
    w = torch.ones(16, device=device, requires_grad=True)
    rms_norm(torch.randn(4, 16, device=device), w, EPS, backend="triton").sum().backward()
    assert w.grad is not None
    assert w.grad.abs().sum() > 0


def test_fa_2611_bnb_1784_offsets_past_two_to_the_31(device: str) -> None:
    """Row 2 starts past 2**31 elements although its stride fits 31 bits. The memory between the rows is never
    touched.
    """
    stride = 2**30 + 64
    flat = torch.UntypedStorage(2 * (2 * stride + 64), device=device)
    x = torch.tensor([], dtype=torch.bfloat16, device=device).set_(flat, 0, (3, 64), (stride, 1))
    x.copy_(torch.randn(3, 64))
    y, _, _ = norm_forward(x, torch.ones(64, device=device, dtype=torch.bfloat16), EPS, "llama")
    exact = rms_norm_reference(x.double(), torch.ones(64, device=device, dtype=torch.float64), EPS)
    assert (y.double() - exact).norm() / exact.norm() < 1e-2


def test_wide_rows_fall_back_with_a_reason(device: str) -> None:
    x = torch.randn(1, 40000, device=device)
    choice = norm_backend(x, "triton")
    assert not choice.is_triton
    assert "40000" in choice.reason
    assert torch.isfinite(rms_norm(x, torch.ones(40000, device=device), EPS, backend="triton")).all()


def test_cpu_tensors_without_the_interpreter_take_torch() -> None:
    choice = norm_backend(torch.ones(1, 8))
    assert not choice.is_triton
    assert "CUDA" in choice.reason


@pytest.mark.parametrize(
    ("x", "w", "form"), [((2, 8), (7,), "llama"), ((2, 8), (8, 1), "llama"), ((2, 8), (8,), "layer")]
)
def test_bad_arguments_are_named(x: tuple[int, ...], w: tuple[int, ...], form: Any) -> None:
    with pytest.raises(ValueError, match=r"weight|form"):
        rms_norm(torch.ones(x), torch.ones(w), EPS, form=form)
