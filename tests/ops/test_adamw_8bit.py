"""AdamW with moments in 8 bits: the tables, the nearest value of them, and the step against the torch form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.adamw import AdamWSettings
from ftkernels.adamw_8bit import BLOCK, Moment8, adamw_step_8bit, dequantized, values_of

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
        assert (error <= best + 1e-7).all()


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
