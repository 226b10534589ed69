"""Matrices written ahead: the same numbers whatever was guessed, and the guess is right from the second step on."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels import Projection, lora_linear, lora_mlp
from ftkernels.ahead import Ahead, write_matrix
from ftkernels.nf4 import NF4Weight, quantize_nf4

F32, BF16 = torch.float32, torch.bfloat16
Groups = list[list[NF4Weight]]


def _groups(device: str, ahead: Ahead | None = None, layers: int = 3) -> Groups:
    """A pair, a single one and a wide one for each of some layers."""
    sizes = [(32, 16), (64,), (96, 8)]
    return [
        [replace(quantize_nf4(torch.randn(rows, 64, device=device)), ahead=ahead) for rows in group]
        for _ in range(layers)
        for group in sizes
    ]


def _ask(ahead: Ahead, asked: Sequence[Sequence[NF4Weight]], dtype: torch.dtype = F32, *, back: bool = False) -> None:
    for group in asked:
        matrix = ahead.matrix(group, dtype, back=back)
        ahead.start()
        assert torch.equal(matrix, write_matrix(group, dtype, ahead.device))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_are_learned(device: str, checkpointing: bool) -> None:
    """Forward, then backward in the opposite order, with or without each layer run again before: no request of the
    third step finds its matrix unwritten.
    """
    ahead = Ahead(torch.device(device))
    groups = _groups(device)
    layers = [groups[index : index + 3] for index in (0, 3, 6)]

    def step() -> None:
        _ask(ahead, groups)
        for layer in reversed(layers):
            _ask(ahead, layer[:2] if checkpointing else [])  # what runs again stops before the last product
            _ask(ahead, layer[::-1], back=True)

    step()
    step()
    before = ahead.hits
    step()
    assert ahead.hits - before == 18 + 6 * checkpointing
    before = ahead.hits
    _ask(ahead, [*groups, *groups])  # evaluation: forward alone
    assert ahead.hits - before >= 2 * len(groups) - 2


def test_a_wrong_guess_and_another_dtype_change_no_number(device: str) -> None:
    ahead = Ahead(torch.device(device))
    groups = _groups(device)
    for _ in range(2):
        _ask(ahead, groups)
    _ask(ahead, [groups[index] for index in (0, 4, 8, 1, 3, 3, 5, 0, 1)])
    _ask(ahead, groups, BF16)
    _ask(ahead, groups[:2], F32)


def test_two_matrices_do_not_share_memory(device: str) -> None:
    ahead = Ahead(torch.device(device))
    groups = _groups(device)
    _ask(ahead, groups)
    held = []
    for group in groups:
        held.append(ahead.matrix(group, F32))
        ahead.start()
    for group, matrix in zip(groups, held, strict=True):
        assert torch.equal(matrix, write_matrix(group, F32, ahead.device))


def test_a_product_that_fails_leaves_nothing_wrong(device: str) -> None:
    """Its ``start`` never comes: the memory that was set aside must not be taken for a matrix."""
    ahead = Ahead(torch.device(device))
    groups = _groups(device)
    _ask(ahead, groups)
    ahead.matrix(groups[0], F32)
    _ask(ahead, groups[1:])


def test_forgetting_lets_weights_go(device: str) -> None:
    import weakref

    ahead = Ahead(torch.device(device))
    groups = _groups(device)
    _ask(ahead, groups)
    watched = weakref.ref(groups[3][0].data)
    groups.clear()
    gc.collect()
    assert watched() is not None
    ahead.forget()
    gc.collect()
    assert watched() is None


def test_copies_learn_for_themselves(device: str) -> None:
    ahead = Ahead(torch.device(device))
    groups = _groups(device, ahead)
    _ask(ahead, groups)
    first, second = copy.deepcopy([groups[0][0], groups[1][0]])
    assert first.ahead is second.ahead is not None
    assert first.ahead is not ahead
    assert pickle.loads(pickle.dumps(ahead)).device == ahead.device


def test_operations_give_the_same_bits(device: str, layers: Any) -> None:
    """Loss and gradients of a small network, three steps, with and without."""
    dtype = BF16 if device == "cuda" else F32
    weights = {
        n: quantize_nf4(torch.randn(*s, device=device))
        for n, s in {"o": (64, 64), "g": (48, 64), "u": (48, 64), "d": (64, 48)}.items()
    }
    adapters = {name: layers.make(*weight.shape, 4) for name, weight in weights.items()}
    z = torch.randn(1, 7, 64, device=device, dtype=dtype)

    def steps(ahead: Ahead | None) -> list[torch.Tensor]:
        made = {n: Projection(replace(w, ahead=ahead), a=adapters[n].a, b=adapters[n].b) for n, w in weights.items()}
        out = []
        for _ in range(3):
            x = z.clone().requires_grad_(True)
            h = lora_linear(x, made["o"], backend="triton")
            y = lora_mlp(h, made["g"], made["u"], made["d"], backend="triton")
            y.float().square().mean().backward()
            assert x.grad is not None
            out += [y.detach(), x.grad]
        return out

    ahead = Ahead(torch.device(device))
    for got, wanted in zip(steps(ahead), steps(None), strict=True):
        assert torch.equal(got, wanted)
    assert ahead.hits >= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA machine")
def test_streams_keep_their_order_under_load() -> None:
    """Products that take longer than writing, and memory that changes hands all the time."""
    ahead = Ahead(torch.device("cuda", 0))
    groups = [[quantize_nf4(torch.randn(rows, 4096, device="cuda"))] for rows in (4096, 14336, 1024, 8192)]
    x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    wanted = [x @ write_matrix(group, BF16, ahead.device).t() for group in groups]
    for _ in range(10):
        for group, right in zip(groups, wanted, strict=True):
            matrix = ahead.matrix(group, BF16)
            y = x @ matrix.t()
            ahead.start()
            del matrix
            scratch = torch.full((4096, 4096), float("nan"), device="cuda", dtype=BF16)
            assert torch.equal(y, right)
            del scratch
    assert ahead.hits >= 34
    at_rest = torch.cuda.memory_allocated()
    ahead.forget()
    assert torch.cuda.memory_allocated() <= at_rest
