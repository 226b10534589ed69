"""Tensors of more than 2^31 elements: every address that depends on a row is formed in 64 bits.

On a GPU with tensors that are that large, zero but for their last rows, which are compared with plain torch on those
rows alone. In the interpreter, whose integers wrap as the GPU's do, with rows that lie far apart in memory that is
never touched between them: this covers whatever kernels read through a stride.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_mask import AttentionMask
from ftkernels.cross_entropy import LossOptions, cross_entropy_rows, cross_entropy_rows_reference
from ftkernels.fp8 import quantize_fp8_torch, quantize_fp8_triton
from ftkernels.gemm import lowrank_add
from ftkernels.glu import GluLowRank, glu_backward, glu_forward, glu_reference
from ftkernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.nf4 import NF4_TABLE, NF4Weight
from ftkernels.projection import Norm, Projection
from ftkernels.qkv_norm_rope import qkv_rope_backward, qkv_rope_forward
from ftkernels.qkv_parts import Rotary
from ftkernels.rms_norm import norm_backward, norm_backward_torch, norm_forward, norm_forward_torch
from ftkernels.rope import _launch as rope_launch
from ftkernels.rope import apply_rope_reference
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
#: Rows at the end that hold something.
LAST = 64
#: Rows of 4096, of 32768 numbers that come to more than 2^31.
ROWS, FEW_ROWS = 2**31 // 4096 + LAST, 2**31 // 32768 + LAST
K = 16

# Linux's MAP_NORESERVE, which Python's mmap does not name before 3.12.
_NO_RESERVE = 0x4000


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs most of a GPU's memory."""
    found: Callable[..., None] = pytest.mark.gpu(pytest.mark.whole_card(test))
    return found


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests on a GPU need one with 48 GiB, and leave nothing behind."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 48 * 2**30:
        pytest.skip("needs a CUDA machine with 48 GiB")
    yield
    torch.cuda.empty_cache()


def sparse(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros on the GPU but for random numbers in the last rows (dimension -2)."""
    out = torch.zeros(shape, dtype=dtype, device="cuda")
    out[..., -LAST:, :] = torch.randn((*shape[:-2], LAST, shape[-1]), device="cuda").to(dtype)
    return out


def close(found: Tensor, wanted: Tensor, bound: float = 2e-2) -> None:
    """Relative error (Frobenius norm), NaN not allowed."""
    exact = wanted.detach().double()
    assert float((found.detach().double() - exact).norm() / exact.norm()) <= bound


def all_zero(tensor: Tensor) -> bool:
    return int(tensor.count_nonzero()) == 0


@on_gpu
def test_gated_units() -> None:
    width = 32768
    both = sparse(FEW_ROWS, 2 * width)
    gate, up = both[:, :width], both[:, width:]
    low = GluLowRank(
        sparse(FEW_ROWS, 2 * K),
        torch.randn(2 * width, K, device="cuda").to(BF16),
        torch.randn(K, width, device="cuda").to(BF16) / width**0.5,
    )
    assert low.a_down is not None
    xa, b = low.xa[-LAST:].float(), low.b.float()
    g = (gate[-LAST:].float() + xa[:, :K] @ b[:width].t()).requires_grad_()
    u = (up[-LAST:].float() + xa[:, K:] @ b[width:].t()).requires_grad_()
    wanted = glu_reference(g, u, "silu")
    h, ha = glu_forward(gate, up, "silu", low)
    assert ha is not None
    close(h[-LAST:], wanted)
    close(ha[-LAST:], wanted @ low.a_down.float().t())
    assert all_zero(h[:-LAST])
    del h
    dh, dya = sparse(FEW_ROWS, width), sparse(FEW_ROWS, K)
    full = dh[-LAST:].float() + dya[-LAST:].float() @ low.a_down.float()
    dg, du = torch.autograd.grad(wanted, (g, u), full)
    d_both, h_again, dxa = glu_backward(dh, gate, up, "silu", lowrank=low, dya=dya, want_h=True, out=both)
    assert h_again is not None
    assert dxa is not None
    close(d_both[-LAST:], torch.cat((dg, du), 1))
    close(h_again[-LAST:], wanted)
    close(dxa.sum(0)[-LAST:], torch.cat((dg @ b[:width], du @ b[width:]), 1))
    assert all_zero(d_both[:-LAST])


@on_gpu
@pytest.mark.parametrize("residual", ["none", "before", "after"])
def test_norms(residual: str) -> None:
    x, weight = sparse(ROWS, 4096), torch.rand(4096, device="cuda") + 0.5
    r = None if residual == "none" else sparse(ROWS, 4096)
    y, total, rstd = norm_forward(x, weight, 1e-5, "llama", residual=r, where=residual, out_dtype=BF16)  # type: ignore[arg-type]
    plain = x[-LAST:] if r is None or residual == "after" else x[-LAST:] + r[-LAST:]
    wanted, _ = norm_forward_torch(plain, weight, 1e-5, "llama", F32)
    close(y[-LAST:], wanted if residual != "after" or r is None else wanted + r[-LAST:])
    assert all_zero(y[:-LAST])
    if residual == "none":
        dx, _ = norm_backward(y, x, weight, rstd, "llama", d_sum=x)
        wanted, _ = norm_backward_torch(y[-LAST:], plain, weight, rstd[-LAST:], "llama", d_sum=plain)
        close(dx[-LAST:], wanted)
    elif total is not None:
        close(total[-LAST:], plain)


@on_gpu
def test_low_rank_addition() -> None:
    y, xa, residual = sparse(ROWS, 4096), sparse(ROWS, K), sparse(ROWS, 4096)
    b = torch.randn(4096, K, device="cuda").to(BF16)
    wanted = y[-LAST:].float() + xa[-LAST:].float() @ b.float().t() + residual[-LAST:].float()
    close(lowrank_add(y, xa, b, residual, triton_kernel=True)[-LAST:], wanted)
    assert all_zero(y[:-LAST])


def angles(length: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    phase = torch.rand(1, length, size // 2, device=device).repeat(1, 1, 2) * 6.0
    return phase.cos().to(BF16), phase.sin().to(BF16)


@on_gpu
def test_rotation() -> None:
    q, k = (sparse(1, ROWS, n * 128).view(1, ROWS, n, 128).transpose(1, 2) for n in (32, 8))
    cos, sin = angles(ROWS, 128, "cuda")
    found = rope_launch(q, k, cos, sin, transposed=False)
    end = [t[..., -LAST:, :] for t in (q, k)]
    wanted = apply_rope_reference(*end, cos[:, -LAST:], sin[:, -LAST:])
    for turned, plain in zip(found, wanted, strict=True):
        close(turned[..., -LAST:, :], plain)
        assert all_zero(turned[..., :-LAST, :])


@on_gpu
def test_rotation_with_low_rank_terms() -> None:
    width = 48 * 128
    cos, sin = angles(ROWS, 128, "cuda")
    rotary = Rotary(cos, sin, 32, 8, 128)
    xa, b = sparse(ROWS, 3 * K), torch.randn(width, K, device="cuda").to(BF16)
    y = sparse(ROWS, width)
    parts = ((0, 32), (32, 40), (40, 48))
    heads = [
        (
            y[-LAST:, 128 * lo : 128 * hi].float()
            + xa[-LAST:, K * i : K * i + K].float() @ b[128 * lo : 128 * hi].float().t()
        )
        .view(1, LAST, hi - lo, 128)
        .transpose(1, 2)
        .requires_grad_()
        for i, (lo, hi) in enumerate(parts)
    ]
    q, k = apply_rope_reference(heads[0], heads[1], cos[:, -LAST:].float(), sin[:, -LAST:].float())
    wanted = torch.cat([t.transpose(1, 2).reshape(LAST, -1) for t in (q, k, heads[2])], 1)
    close(qkv_rope_forward(y, xa, b, rotary)[-LAST:], wanted)
    assert all_zero(y[:-LAST])
    del y
    dq, dk, dv = (sparse(1, ROWS, n * 128).view(1, ROWS, n, 128).transpose(1, 2) for n in (32, 8, 8))
    upstream = [t[..., -LAST:, :].float() for t in (dq, dk, dv)]
    grads = torch.autograd.grad((q, k, heads[2] * 1.0), heads, upstream)
    flat = torch.cat([t.transpose(1, 2).reshape(LAST, -1) for t in grads], 1)
    d, dxa = qkv_rope_backward(dq, dk, dv, b, rotary, BF16)
    assert dxa is not None
    close(d[-LAST:], flat)
    for i, (lo, hi) in enumerate(parts):
        close(dxa.sum(0)[-LAST:, K * i : K * i + K], flat[:, 128 * lo : 128 * hi] @ b[128 * lo : 128 * hi].float())


@on_gpu
def test_cross_entropy() -> None:
    rows = 2**31 // 128256 + LAST
    logits, labels = sparse(rows, 128256), torch.randint(128256, (rows,), device="cuda")
    wanted = cross_entropy_rows_reference(logits[-LAST:].float(), labels[-LAST:], LossOptions(), want_grad=True)
    found = cross_entropy_rows(logits, labels, LossOptions(), want_grad=True)
    assert found.d_logits is not None
    assert wanted.d_logits is not None
    close(found.losses[-LAST:], wanted.losses)
    close(found.d_logits[-LAST:], wanted.d_logits)


@on_gpu
def test_the_head_and_its_loss() -> None:
    hidden, head = sparse(ROWS, 4096).requires_grad_(), torch.randn(1024, 4096, device="cuda").to(BF16) / 64
    labels = torch.randint(1024, (ROWS,), device="cuda")
    labels[-LAST // 2] = -100  # the last token of a row predicts nothing: rows are gathered
    linear_cross_entropy(hidden, head, labels, reduction="sum").backward()  # type: ignore[union-attr]
    end = hidden.detach()[-LAST:].float().requires_grad_()
    linear_cross_entropy_reference(end, head.float(), labels[-LAST:], reduction="sum").backward()  # type: ignore[union-attr]
    assert hidden.grad is not None
    assert end.grad is not None
    close(hidden.grad[-LAST:], end.grad)


@on_gpu
def test_attention() -> None:
    """A window keeps it short: the last queries see the last keys alone."""
    q, k, v = (torch.randn(1, ROWS, n * 128, device="cuda", dtype=BF16) for n in (32, 8, 8))
    q, k, v = (t.view(1, ROWS, -1, 128).transpose(1, 2).requires_grad_() for t in (q, k, v))
    mask, scale = AttentionMask.causal_mask(LAST), 128**-0.5
    end = [t.detach()[..., -rows:, :].float().requires_grad_() for t, rows in ((q, LAST), (k, 2 * LAST), (v, 2 * LAST))]
    wanted = attention_reference(*end, mask, scale=scale)  # type: ignore[misc]
    out = attention(q, k, v, mask, scale=scale, backend="triton")
    close(out[..., -LAST:, :], wanted)
    d_out = sparse(1, ROWS, 4096).view(1, ROWS, 32, 128).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    exact = torch.autograd.grad(wanted, end, d_out[..., -LAST:, :].float())
    for found, plain in zip(grads, exact, strict=True):
        close(found[..., -plain.shape[2] :, :], plain)
        assert all_zero(found[..., : -2 * LAST, :])


@on_gpu
def test_nf4() -> None:
    columns = 32768
    data = torch.zeros(FEW_ROWS * columns // 2, dtype=torch.uint8, device="cuda")
    data[-columns // 2 :] = torch.randint(256, (columns // 2,), device="cuda").to(torch.uint8)
    absmax = torch.rand(FEW_ROWS * columns // 64, device="cuda")
    table = torch.tensor(NF4_TABLE, device="cuda")
    found = NF4Weight(data, absmax, table, torch.Size((FEW_ROWS, columns))).dequantize(BF16)
    byte = data[-columns // 2 :].long()
    values = table[torch.stack((byte >> 4, byte & 15), 1).view(-1)] * absmax[-columns // 64 :].repeat_interleave(64)
    assert torch.equal(found[-1], values.to(BF16))
    assert torch.equal(found[-2], -absmax[-2 * columns // 64 : -columns // 64].repeat_interleave(64).to(BF16))


def projection(out_features: int, in_features: int) -> Projection:
    weight, a, b = (
        torch.randn(shape, device="cuda") / shape[1] ** 0.5
        for shape in ((out_features, in_features), (K, in_features), (out_features, K))
    )
    return Projection(weight.to(BF16), None, a.requires_grad_(), b.requires_grad_(), 2.0)


def adapters(*projections: Projection) -> list[Tensor]:
    return [t for p in projections for t in (p.a, p.b) if t is not None]


@on_gpu
def test_a_lora_mlp() -> None:
    """Rows of zeros leave no trace in the adapters' gradients: those of the last rows are all there is."""
    gate, up, down = projection(32768, 256), projection(32768, 256), projection(256, 32768)
    norm = Norm(torch.rand(256, device="cuda") + 0.5, 1e-5)
    z, dy = sparse(FEW_ROWS, 256).requires_grad_(), sparse(FEW_ROWS, 256)
    y = lora_mlp(z, gate, up, down, norm=norm, residual="add", save="input")
    assert isinstance(y, Tensor)
    found = torch.autograd.grad(y, (z, *adapters(gate, up, down)), dy)
    end = z.detach()[-LAST:].requires_grad_()
    plain = lora_mlp_reference(end, gate, up, down, norm=norm, residual="add")
    assert isinstance(plain, Tensor)
    wanted = torch.autograd.grad(plain, (end, *adapters(gate, up, down)), dy[-LAST:])
    close(y[-LAST:], plain)
    close(found[0][-LAST:], wanted[0])
    for ours, torchs in zip(found[1:], wanted[1:], strict=True):
        close(ours, torchs, 3e-2)


@on_gpu
def test_a_lora_qkv() -> None:
    q, k, v = projection(4096, 256), projection(1024, 256), projection(1024, 256)
    norm = Norm(torch.rand(256, device="cuda") + 0.5, 1e-5)
    rope = angles(ROWS, 128, "cuda")
    z = sparse(1, ROWS, 256).requires_grad_()
    upstream = [sparse(1, ROWS, n * 128).view(1, ROWS, n, 128).transpose(1, 2) for n in (32, 8, 8)]
    made = lora_qkv(z, q, k, v, head_dim=128, norm=norm, rope=rope)
    found = torch.autograd.grad(made[:3], (z, *adapters(q, k, v)), upstream)
    end = z.detach()[:, -LAST:].requires_grad_()
    plain = lora_qkv_reference(end, q, k, v, head_dim=128, norm=norm, rope=(rope[0][:, -LAST:], rope[1][:, -LAST:]))
    wanted = torch.autograd.grad(plain[:3], (end, *adapters(q, k, v)), [t[..., -LAST:, :] for t in upstream])
    for ours, torchs in zip(made[:3], plain[:3], strict=True):
        close(ours[..., -LAST:, :], torchs)
    close(found[0][:, -LAST:], wanted[0])
    for ours, torchs in zip(found[1:], wanted[1:], strict=True):
        close(ours, torchs, 3e-2)


# In the interpreter: rows far apart


@pytest.fixture
def apart(device: str) -> Callable[..., Tensor]:
    """``apart(stride, *shape)``: random float32, rows (dimension 0) ``stride`` elements apart.

    The memory is mapped and not reserved, and pages between the rows are never touched.
    """
    if device != "cpu":
        pytest.skip("a GPU has tests of its own")

    def make(stride: int, *shape: int) -> Tensor:
        inner = torch.randn(shape)
        count = (shape[0] - 1) * stride + inner[0].numel()
        memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        out = torch.frombuffer(memory, dtype=F32).as_strided(shape, (stride, *inner.stride()[1:]))
        return out.copy_(inner)

    return make


def test_gated_units_of_rows_far_apart(apart: Callable[..., Tensor]) -> None:
    gate, up, dh = apart(2**25, 66, 24), apart(2**25, 66, 24), torch.randn(66, 24)
    near = gate.contiguous(), up.contiguous()
    assert torch.equal(glu_forward(gate, up, "silu")[0], glu_forward(*near, "silu")[0])
    found, wanted = (glu_backward(dh.clone(), *pair, "silu", want_h=True) for pair in ((gate, up), near))
    assert all(torch.equal(a, b) for a, b in zip(found[:2], wanted[:2], strict=True) if a is not None and b is not None)


def test_norms_of_rows_far_apart(apart: Callable[..., Tensor]) -> None:
    x, weight = apart(2**30, 4, 40), torch.rand(40)
    y, _, rstd = norm_forward(x, weight, 1e-5, "llama")
    wanted, _, _ = norm_forward(x.contiguous(), weight, 1e-5, "llama")
    assert torch.equal(y, wanted)
    dy = torch.randn(4, 40)
    near = norm_backward(dy, x.contiguous(), weight, rstd, "llama")[0]
    assert torch.equal(norm_backward(dy, x, weight, rstd, "llama")[0], near)


def test_low_rank_addition_to_rows_far_apart(apart: Callable[..., Tensor]) -> None:
    y, xa, b, residual = apart(2**30, 4, 40), apart(2**30, 4, K), torch.randn(40, K), torch.randn(4, 40)
    wanted = lowrank_add(y.contiguous(), xa.contiguous(), b, residual, triton_kernel=True)
    assert torch.equal(lowrank_add(y, xa, b, residual, triton_kernel=True), wanted)


def test_rotation_of_tokens_far_apart(apart: Callable[..., Tensor]) -> None:
    q, k, v = (apart(2**30, 4, heads, 32)[None].transpose(1, 2) for heads in (4, 2, 2))
    cos, sin = (t.float() for t in angles(4, 32, "cpu"))
    near = [t.contiguous() for t in (q, k, v)]
    found, wanted = (rope_launch(*pair[:2], cos, sin, transposed=True) for pair in ((q, k), near))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    b, rotary = torch.randn(8 * 32, K), Rotary(cos, sin, 4, 2, 32)
    far, close_by = (qkv_rope_backward(*three, b, rotary, F32) for three in ((q, k, v), near))
    assert all(torch.equal(x, y) for x, y in zip(far, close_by, strict=True) if x is not None and y is not None)


def test_losses_of_rows_far_apart(apart: Callable[..., Tensor]) -> None:
    logits, labels = apart(2**30, 4, 100), torch.tensor([1, 99, 0, 50])
    wanted = cross_entropy_rows(logits.contiguous(), labels, LossOptions(), want_grad=True)
    found = cross_entropy_rows(logits, labels, LossOptions(), want_grad=True)
    assert found.d_logits is not None
    assert wanted.d_logits is not None
    assert torch.equal(found.losses, wanted.losses)
    assert torch.equal(found.d_logits, wanted.d_logits)


def test_quantization_of_rows_far_apart(apart: Callable[..., Tensor]) -> None:
    x = apart(2**30, 4, 96)
    for widest in (32768, 32):
        values, scales = quantize_fp8_triton(x, widest=widest)
        wanted, plain = quantize_fp8_torch(x.contiguous())
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, plain)


def test_attention_over_tokens_far_apart(apart: Callable[..., Tensor]) -> None:
    """Rows of one tile may be 2^31 apart and no more (``loadable``); tiles, further."""
    q, k, v = (apart(2**22, 544, 1, 16)[None].transpose(1, 2).requires_grad_() for _ in range(3))
    near = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    mask, d_out = AttentionMask.causal_mask(8), torch.randn(1, 1, 544, 16)
    results = []
    for three in ((q, k, v), near):
        out = attention(*three, mask, scale=0.25, backend="triton")  # type: ignore[misc]
        results.append([out, *torch.autograd.grad(out, three, d_out)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
