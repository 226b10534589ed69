"""The step of AdamW: against float64, in every dtype; and stochastic rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.adamw import AdamWSettings, adamw_step, stochastic_round

BF16, F32 = torch.bfloat16, torch.float32
SETTINGS = AdamWSettings(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)


def steps(dtype: torch.dtype, device: str, backend: Any, count: int = 5, **changes: Any) -> list[torch.Tensor]:
    """Parameter and moments after some steps, all from the same numbers in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(7, 301, generator=generator).to(BF16)
    p = start.to(device, dtype)
    moments = torch.float64 if dtype == torch.float64 else F32
    m, v = (torch.zeros(p.shape, dtype=moments, device=device) for _ in range(2))
    for step in range(1, count + 1):
        g = torch.randn(7, 301, generator=generator).to(BF16).to(device, dtype)
        adamw_step(p, g, m, v, replace(SETTINGS, step=step, seed=step, **changes), backend=backend)
    return [p, m, v]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_it_is_torchs_adamw(device: str, backend: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(7, 301, generator=generator).to(BF16).to(device, torch.float64))
    theirs = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        p.grad = torch.randn(7, 301, generator=generator).to(BF16).to(device, torch.float64)
        theirs.step()
    found = steps(F32, device, backend)
    for ours, wanted in zip(
        found, (p.detach(), theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"]), strict=True
    ):
        assert (ours.double() - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bfloat16_parameters_are_rounded_once_a_step_and_moments_not_at_all(device: str, backend: Any) -> None:
    exact = steps(torch.float64, device, "torch", count=1)
    p, m, v = steps(BF16, device, backend, count=1)
    assert (p.dtype, m.dtype, v.dtype) == (BF16, F32, F32)
    assert (p.double() - exact[0]).abs().max() <= exact[0].abs().max() * 2**-8
    assert torch.equal(p, exact[0].float().to(BF16)) or (p != exact[0].float().to(BF16)).float().mean() < 1e-3
    for ours, wanted in zip((m, v), exact[1:], strict=True):
        assert (ours.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_the_kernel_rounds_stochastically_as_torch_does_and_twice_alike(device: str) -> None:
    runs = [steps(BF16, device, backend, rounding="stochastic") for backend in ("triton", "triton", "torch")]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    # Float32 differs in the last bit where a multiplication and an addition are one operation.
    assert (runs[0][0] != runs[2][0]).float().mean() < 2e-3
    other = steps(BF16, device, "triton", rounding="nearest")
    assert (runs[0][0] != other[0]).float().mean() > 0.1


def test_stochastic_rounding_goes_to_a_neighbour_and_to_the_number_itself_on_average() -> None:
    numbers = torch.cat([torch.tensor([1.0, -1.0, 1.001, -1.001, 3.0e-39, -0.1, 65000.1]), torch.randn(41)])
    drawn = torch.stack([stochastic_round(numbers, seed * 2654435761 % 2**31).double() for seed in range(4000)])
    down = (numbers.view(torch.int32) & -65536).view(F32).double()
    up = ((numbers.view(torch.int32) & -65536) + 65536).view(F32).double()
    exact = numbers.double()
    assert ((drawn == down) | (drawn == up)).all()
    assert (drawn[:, exact == down] == exact[exact == down]).all()  # what bfloat16 holds stays
    spread = (up - down).abs()
    assert ((drawn.mean(0) - exact).abs() <= 0.04 * spread + 1e-45).all()  # five standard errors


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_is_not_finite_stays_so(device: str, backend: Any) -> None:
    p = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device=device, dtype=BF16)
    m, v = torch.zeros(4, device=device), torch.ones(4, device=device)
    settings = replace(SETTINGS, rounding="stochastic", seed=2**31 - 1, weight_decay=0.0)
    adamw_step(p, torch.zeros_like(p), m, v, settings, backend=backend)
    assert torch.isnan(p[0])
    assert p[1:].tolist() == [float("inf"), -float("inf"), 1.0]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_small_updates_arrive_with_stochastic_rounding_alone(device: str, backend: Any) -> None:
    """Updates of 1e-4 on weights of 1, of which half a bfloat16 step is 4e-3."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        p = torch.ones(2000, device=device, dtype=BF16)
        m, v = torch.zeros(2000, device=device), torch.zeros(2000, device=device)
        for step in range(1, 51):
            settings = replace(SETTINGS, lr=1e-4, weight_decay=0.0, step=step, rounding=rounding, seed=977 * step)
            adamw_step(p, torch.ones_like(p), m, v, settings, backend=backend)
        moved[rounding] = float(1.0 - p.float().mean())
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(50 * 1e-4, rel=0.1)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gradients_are_clipped_on_the_way(device: str, backend: Any) -> None:
    clip = torch.tensor(0.5, device=device)
    states = []
    for factor, given in ((1.0, clip), (0.5, None)):
        p, m, v = (torch.zeros(40, device=device) for _ in range(3))
        adamw_step(p, factor * torch.arange(40.0, device=device), m, v, SETTINGS, clip=given, backend=backend)
        states.append((p, m, v))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_copy_follows_the_parameter(device: str, backend: Any) -> None:
    p, m, v = torch.randn(5, 33, device=device), torch.zeros(5, 33, device=device), torch.zeros(5, 33, device=device)
    copy = torch.empty(5, 33, device=device, dtype=BF16)
    adamw_step(p, torch.randn(5, 33, device=device), m, v, SETTINGS, copy=copy, backend=backend)
    assert torch.equal(copy, p.to(BF16))


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ((torch.zeros(3), torch.zeros(4), torch.zeros(3), torch.zeros(3)), {}, "shapes differ"),
        ((torch.zeros(3).to(BF16), torch.zeros(3), torch.zeros(3).to(BF16), torch.zeros(3)), {}, "moments"),
        ((torch.zeros(4, 3).t(), *[torch.zeros(3, 4)] * 3), {}, "contiguous"),
        ((torch.zeros(3), *[torch.zeros(3)] * 3), {"rounding": "stochastic"}, "bfloat16"),
    ],
    ids=["shapes", "moments", "layout", "rounding"],
)
def test_what_does_not_fit_is_named(tensors: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adamw_step(*tensors, replace(SETTINGS, **changes), backend="torch")
