"""AdamW with moments in 8 bits: the tables, the nearest value of them, and the step against the torch form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.adamw import BLOCK, AdamWSettings, Moment8, adamw_step_8bit, dequantized, largest_step, values_of

SETTINGS = AdamWSettings(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)


@pytest.mark.parametrize("signed", [True, False])
def test_tables_are_those_of_the_paper(signed: bool) -> None:
    """Seven decades, of which each has twice as many values as the one below it; checked by counting."""
    values = values_of(signed=signed)
    assert values.unique().numel() == 256
    assert values[-1] == 1.0
    assert (values == 0).sum() == 1
    assert values[0] == pytest.approx(-0.99296875) if signed else values[0] == 0
    positive = values[(values > 0) & (values < 1)]
    counts = [int(((positive >= 10.0 ** (i - 7)) & (positive < 10.0 ** (i - 6))).sum()) for i in range(7)]
    assert counts == [2**i * (1 if signed else 2) for i in range(7)]


def stored(x: torch.Tensor, backend: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments after a step that makes the first ``x`` and the second ``x`` squared."""
    p = torch.zeros_like(x, device=device)
    m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
    adamw_step_8bit(p, x.to(device), m, v, replace(SETTINGS, beta1=0.0, beta2=0.0), backend=backend)
    return dequantized(m, signed=True).cpu(), dequantized(v, signed=False).cpu()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_is_kept_is_the_nearest_value_of_the_table(device: str, backend: Any) -> None:
    """Over eight decades, at every boundary between two values and on either side of it, by looking at all of them."""
    table = values_of(signed=True)
    middle = (table[1:] + table[:-1]) / 2
    x = torch.cat([table, middle * (1 - 1e-5), middle * (1 + 1e-5), 10.0 ** (-9 * torch.rand(2000))])
    x = torch.nn.functional.pad(x, (0, -x.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    x = torch.cat([x, torch.ones(x.shape[0], 1)], 1).flatten() * 3.7  # the scale of every block is 3.7
    first, second = stored(x, backend, device)
    for found, wanted, values in ((first, x, table), (second, x * x, values_of(signed=False))):
        scale = float(wanted.abs().max())
        best = (wanted.double()[:, None] / scale - values.double()).abs().amin(1)
        error = (found.double() - wanted.double()).abs() / scale
        raised = (wanted > 0) & (wanted / scale < values[values > 0].min() / 2) if values[0] == 0 else wanted.isnan()
        assert (error <= best + 1e-7)[~raised].all()
        assert torch.equal(found[raised], (values[1] * scale).expand(int(raised.sum())))  # never to 0
        assert bool(raised.any()) == (values[0] == 0)


def directions(count: int, betas: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """(steps, count) gradients: steady ones, noise, bursts that end, and those that are largest against AdamW's v,
    over nine decades within each block.
    """
    steps = 60
    power = torch.arange(steps, dtype=torch.float64)
    worst = (betas[0] / betas[1]) ** power.flip(0)  # of Cauchy and Schwarz the case of equality, at the last step
    kinds = torch.stack([torch.ones(steps).double(), (power < 20).double(), (power % 15 == 0).double(), worst])
    found = kinds[torch.randint(len(kinds), (count,), generator=generator)].T.clone()
    noise = torch.rand(count, generator=generator) < 0.2
    found[:, noise] = torch.randn(steps, int(noise.sum()), generator=generator).double()
    return found * 10.0 ** (-9 * torch.rand(count, generator=generator).double())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99)])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_no_step_is_larger_than_adamw_could_make(device: str, backend: Any, betas: tuple[float, float]) -> None:
    """AdamW in float64 beside it reaches the bound, but never exceeds it. Nor do moments in 8 bits."""
    gradients = directions(4 * BLOCK, betas, torch.Generator().manual_seed(0))
    now = replace(SETTINGS, lr=1.0, beta1=betas[0], beta2=betas[1], weight_decay=0.0)
    p = torch.zeros(gradients.shape[1], device=device)
    m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
    exact = torch.zeros(2, p.numel(), dtype=torch.float64)
    for step, g in enumerate(gradients, 1):
        now = replace(now, step=step)
        exact[0].lerp_(g, 1 - betas[0])
        exact[1].lerp_(g * g, 1 - betas[1])
        theirs = now.size * exact[0] / (exact[1].sqrt() * now.root + now.eps)
        assert theirs.abs().max() <= largest_step(now) * (1 + 1e-9)
        before = p.clone()
        adamw_step_8bit(p, g.float().to(device), m, v, now, backend=backend)
        ours = (before.double() - p.double()).abs().max().item()
        assert ours <= largest_step(now) + 1e-6 * p.abs().max().item()
    assert theirs.abs().max() >= 0.99 * largest_step(now)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_small_gradient_that_ends_leaves_small_steps(device: str, backend: Any) -> None:
    """Once it is 0, AdamW's steps shrink as the first moment does. A second moment of 0 would make them endless."""
    p = torch.zeros(BLOCK, device=device)
    m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
    g = torch.full_like(p, 1e-4)
    g[0] = 1.0
    now = replace(SETTINGS, lr=1.0, beta2=0.999, weight_decay=0.0)
    for step in (1, 2, 3):
        adamw_step_8bit(p, g, m, v, replace(now, step=step), backend=backend)
    before = p.clone()
    adamw_step_8bit(p, torch.zeros_like(g), m, v, replace(now, step=4), backend=backend)
    assert 0 < (before - p)[1:].abs().max() <= 1.0


def test_the_bound_has_an_end_where_there_is_none() -> None:
    """Where the first moment remembers longer than the second, and after very many steps."""
    assert largest_step(replace(SETTINGS, beta1=0.9, beta2=0.999, step=10**6)) == pytest.approx(7.27 * 1e-2, rel=1e-3)
    assert largest_step(replace(SETTINGS, beta1=0.99, beta2=0.9, step=10**6)) == float("inf")
    assert largest_step(replace(SETTINGS, beta2=0.0)) == float("inf")
    assert largest_step(replace(SETTINGS, beta1=0.9, beta2=0.81, step=4)) > 0
    assert largest_step(replace(SETTINGS, lr=0.0, step=9)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_the_torch_form(device: str, dtype: torch.dtype) -> None:
    """A last block that is not full, gradients of every size, clipping, and a copy in another dtype."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(5, 301, generator=generator).to(dtype)
    runs = []
    for backend in ("triton", "torch"):
        p = start.to(device, copy=True)
        m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
        copy = torch.empty_like(p, dtype=torch.bfloat16)
        numbers = torch.Generator().manual_seed(2)
        for step in range(1, 5):
            g = torch.randn(5, 301, generator=numbers) * 10.0 ** torch.randint(-6, 1, (5, 301), generator=numbers)
            clip = torch.tensor(0.5, device=device)
            now = replace(SETTINGS, step=step)
            adamw_step_8bit(p, g.to(device, dtype), m, v, now, clip=clip, copy=copy, backend=backend)
        assert torch.equal(copy, p.to(torch.bfloat16))
        runs.append((p, dequantized(m, signed=True), dequantized(v, signed=False)))
    for ours, wanted in zip(*runs, strict=True):
        # A last bit of difference takes a value that lies between two codes to the other one.
        assert (ours.float() - wanted.float()).norm() <= 1e-3 * wanted.float().norm()


def test_it_trains_as_adamw_with_moments_in_float32() -> None:
    """Linear regression in 64 dimensions, from the same start: the loss falls as far, by 99% and more."""
    generator = torch.Generator().manual_seed(0)
    x, wanted = torch.randn(512, 64, generator=generator), torch.randn(64, 64, generator=generator)
    ends, start = [], 0.0
    for eight in (True, False):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
        theirs = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
        for step in range(1, 301):
            loss = ((x @ (p - wanted)) ** 2).mean()
            start = loss.item() if step == 1 else start
            (p.grad,) = torch.autograd.grad(loss, [p])
            if eight:
                adamw_step_8bit(p.detach(), p.grad, m, v, replace(SETTINGS, weight_decay=0.0, step=step))
            else:
                theirs.step()
        ends.append(loss.item())
    assert ends[1] <= 0.01 * start
    assert ends[0] - ends[1] <= 0.002 * start


def test_what_does_not_fit_is_refused() -> None:
    p = torch.zeros(600)
    m, v = Moment8.zeros(p, signed=True), Moment8.zeros(p, signed=False)
    short = Moment8(v.codes, v.scales[:1])
    with pytest.raises(ValueError, match=r"\(600,\) with \(1,\) scales does not fit a parameter of \(600,\)"):
        adamw_step_8bit(p, p, m, short, SETTINGS)
    with pytest.raises(ValueError, match="uint8"):
        adamw_step_8bit(p, p, Moment8(p, m.scales), v, SETTINGS)
    with pytest.raises(ValueError, match="nearest"):
        adamw_step_8bit(p, p, m, v, replace(SETTINGS, rounding="stochastic"))
    with pytest.raises(ValueError, match="gradient"):
        adamw_step_8bit(p, torch.zeros(599), m, v, SETTINGS)
    with pytest.raises(ValueError, match="a copy of shape"):
        adamw_step_8bit(p, p, m, v, SETTINGS, copy=torch.zeros(599))
