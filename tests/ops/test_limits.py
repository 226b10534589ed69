"""The rules about what the kernels can take: without torch, and in words that a report can print."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ftkernels.limits import (
    LOSS_WORKSPACE_BYTES,
    Gpu,
    attention_generation,
    loss_bytes,
    loss_rows,
    packed_rank,
    why_no_attention,
    why_no_decode_attention,
    why_no_fp8,
    why_no_products,
)

KIB = 1024
T4, A100, A10 = Gpu((7, 5), 64 * KIB), Gpu((8, 0), 163 * KIB), Gpu((8, 6), 99 * KIB)
H200, B200 = Gpu((9, 0), 227 * KIB), Gpu((10, 0), 227 * KIB)
NO_GPU = Gpu(None, 0)


def test_the_limits_need_neither_torch_nor_triton() -> None:
    program = (
        "import sys, ftkernels, ftkernels.limits\n"
        "heavy = {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("gpu", "dtype", "head_size", "reason"), [
    (H200, "bfloat16", 256, None),
    (H200, "bfloat16", 512, None),
    (A10, "float32", 16, None),
    (NO_GPU, "bfloat16", 64, None),
    (H200, "float64", 64, "not float64"),
    (H200, "bfloat16", 0, "multiples of 16 up to 512, not 0"),
    (H200, "bfloat16", 24, "multiples of 16 up to 512, not 24"),
    (H200, "bfloat16", 528, "multiples of 16 up to 512, not 528"),
    (T4, "float16", 64, "on capability 7.5 Triton makes no tensor-core code; the attention kernels need 8.0"),
    (Gpu((8, 0), 64 * KIB), "float16", 64, "need 99 KiB of shared memory a block, this GPU has 64 KiB"),
])  # fmt: skip
def test_attention(gpu: Gpu, dtype: str, head_size: int, reason: str | None) -> None:
    found = why_no_attention(gpu, dtype, head_size)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("gpu", "row"), [
    (NO_GPU, "interpreter"), (T4, None), (A10, "small"), (A100, "ampere"), (H200, "hopper"), (B200, "blackwell"),
    (Gpu((12, 0), 99 * KIB), "small"), (Gpu((9, 0), 163 * KIB), "ampere"),
])  # fmt: skip
def test_the_row_of_attention_tiles(gpu: Gpu, row: str | None) -> None:
    assert attention_generation(gpu) == row


def test_small_products_want_half_precision_on_tensor_cores() -> None:
    assert why_no_products(A100, "bfloat16") is None
    assert why_no_products(A100, "float16") is None
    assert "float32" in str(why_no_products(A100, "float32"))
    assert why_no_products(T4, "float16") == "on capability 7.5 Triton makes no tensor-core code"


def test_fp8_products_want_ada_or_hopper_and_bfloat16() -> None:
    assert why_no_fp8(H200, "bfloat16") is None
    assert why_no_fp8(Gpu((8, 9), 99 * KIB), "bfloat16") is None
    assert why_no_fp8(A100, "bfloat16") == "capability 8.0 has no fp8 instructions"
    assert "bfloat16, not float32" in str(why_no_fp8(H200, "float32"))
    assert "outside CUDA" in str(why_no_fp8(NO_GPU, "bfloat16"))


@pytest.mark.parametrize(("rank", "packed"), [(0, 0), (1, 16), (16, 16), (17, 32), (48, 64), (64, 64)])
def test_packed_ranks(rank: int, packed: int) -> None:
    assert packed_rank(rank) == packed


@pytest.mark.parametrize(("tokens", "vocabulary", "element", "on_gpu", "rows", "size"), [
    (0, 32000, 2, True, 256, None),
    (100, 32000, 2, True, 256, 100 * 32000 * 2),
    (8192, 128256, 2, True, 1024, 1024 * 128256 * 2),
    (8000, 128256, 2, True, 1024, 1000 * 128256 * 2),
    (2048, 128256, 2, True, 512, 512 * 128256 * 2),
    (16384, 32000, 2, True, 4096, 4096 * 32000 * 2),
    (8192, 256000, 2, True, 1024, 1024 * 256000 * 2),
    (8192, 128256, 4, False, 256, 256 * 128256 * 4 * 5),
    (600, 10**9, 2, True, 256, 200 * 10**9 * 2),
])  # fmt: skip
def test_chunks_of_the_loss(
    tokens: int, vocabulary: int, element: int, on_gpu: bool, rows: int, size: int | None
) -> None:
    assert loss_rows(tokens, vocabulary, element, on_gpu=on_gpu) == rows
    if size is not None:
        assert loss_bytes(tokens, vocabulary, element, on_gpu=on_gpu) == size
    if rows > 256:
        assert rows * vocabulary * element <= LOSS_WORKSPACE_BYTES


def test_a_trained_head_takes_larger_chunks() -> None:
    """Each but the first passes over its gradient in float32: logits may take as much memory."""
    assert loss_rows(8192, 151_936, 2, on_gpu=True, trained_width=2560) == 4096
    needed = loss_bytes(8192, 151_936, 2, on_gpu=True, trained_width=2560)
    assert needed == 4096 * 151_936 * 2 <= 4 * 151_936 * 2560
    assert loss_rows(8192, 151_936, 2, on_gpu=True) == 1024
    assert loss_rows(8192, 151_936, 4, on_gpu=False, trained_width=2560) == 256


@pytest.mark.parametrize(("gpu", "dtype", "head_size", "reason"), [
    (H200, "float32", 256, None),
    (A10, "bfloat16", 256, None),
    (A10, "float32", 128, None),
    (NO_GPU, "float32", 256, None),
    (H200, "float32", 512, None),
    (A10, "bfloat16", 512, None),
    (A10, "float32", 512, "keys of 512 features needs 160 KiB"),
    (A10, "float32", 256, "keys of 256 features needs 144 KiB of shared memory a block, this GPU has 99 KiB"),
    (T4, "float16", 64, "on capability 7.5 Triton makes no tensor-core code"),
    (Gpu((8, 0), 64 * KIB), "bfloat16", 64, "needs 99 KiB"),
])  # fmt: skip
def test_what_attends_to_cached_keys(gpu: Gpu, dtype: str, head_size: int, reason: str | None) -> None:
    found = why_no_decode_attention(gpu, dtype, head_size)
    assert found is None if reason is None else reason in str(found)
