"""The start-up self-check: one small batch through the patched and the unpatched model, loss and gradients compared.

Adapters start with B = 0, where the gradient of A vanishes and half of the backward would go unchecked; for the check
B holds small random numbers and is put back afterwards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.config.model import Kernels
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import compute_context, forward_loss
from ftcli.model.patch import Patch, patch
from ftcli.preflight.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel

ROWS = 2
LONGEST = 256
_B_STD = 0.02


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative difference of the loss, of all gradients together, and of one parameter's gradient."""

    loss: float
    gradients: float
    parameter: float


#: Half precision: both sides round differently in every layer; a wrong term shows as tens of percent.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-4, 1e-3),
    "bfloat16": Tolerance(1e-2, 0.1, 0.3),
    "float16": Tolerance(2e-3, 0.02, 0.1),
}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was compared; relative differences in the Frobenius norm. ``worst`` is the parameter that differs most."""

    passed: bool
    rows: int
    tokens: int
    loss_patched: float
    loss_unpatched: float
    loss_difference: float
    gradient_difference: float
    worst: str
    worst_difference: float
    tolerance: Tolerance

    def as_dict(self) -> dict[str, Any]:
        """For manifest.json."""
        return asdict(self)


def self_check(
    model: PeftModel, applied: Patch, kernels: Kernels, batch: Mapping[str, Tensor], plan: DtypePlan
) -> tuple[SelfCheck, Patch]:
    """Compares on at most two rows of 256 tokens; the model leaves as it came, patched.

    Args:
        applied: The patch in force. It is undone for the comparison and made anew.
        batch: ``input_ids`` and ``labels`` of shape (rows, seq_len), on the model's device.

    Returns:
        The result and the patch that is in force now.

    Raises:
        FtcliError: FT704 (exit 1) when loss or gradients differ by more than the tolerance, naming the layer.
    """
    small = {name: value[:ROWS, :LONGEST] for name, value in batch.items() if name in ("input_ids", "labels")}
    training = model.training
    model.eval()  # no dropout: both sides must see the same numbers
    with _random_adapters(model):
        patched = _loss_and_gradients(model, small, plan)
        applied.undo()
        unpatched = _loss_and_gradients(model, small, plan)
        again = patch(model, kernels)
    model.train(training)
    check = _compare(patched, unpatched, small["input_ids"], TOLERANCES[plan.compute])
    if not check.passed:
        raise FtcliError.single(
            "FT704",
            f"self-check failed: patched loss {check.loss_patched:.6g}, unpatched {check.loss_unpatched:.6g}; "
            f"gradients differ by {check.gradient_difference:.2g}, most in {check.worst} ({check.worst_difference:.2g})",
            exit_code=ExitCode.BUG,
            help="train with model.kernels: off, and report this with the run's manifest.json",
        )
    return check, again


Gradients = dict[str, Tensor]


def _loss_and_gradients(model: PeftModel, batch: dict[str, Tensor], plan: DtypePlan) -> tuple[float, Gradients]:
    model.zero_grad(set_to_none=True)
    with compute_context(batch["input_ids"].device, plan.compute, plan.autocast):
        items = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        loss = forward_loss(model, batch, num_items=items).loss
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients


def _compare(
    patched: tuple[float, Gradients], unpatched: tuple[float, Gradients], ids: Tensor, tolerance: Tolerance
) -> SelfCheck:
    loss = abs(patched[0] - unpatched[0]) / max(abs(unpatched[0]), 1e-12)
    differences: dict[str, float] = {}
    square, total = 0.0, 0.0
    for name, wanted in unpatched[1].items():
        found = patched[1].get(name)
        error = float((found - wanted).norm()) if found is not None else float("inf")
        size = float(wanted.norm())
        differences[name] = error / max(size, 1e-12)
        square, total = square + error**2, total + size**2
    worst = max(differences, key=lambda name: differences[name], default="")
    overall = (square / max(total, 1e-24)) ** 0.5
    most = differences.get(worst, 0.0)
    within = loss <= tolerance.loss and overall <= tolerance.gradients and most <= tolerance.parameter
    return SelfCheck(
        passed=within,  # NaN compares as False and fails
        rows=ids.shape[0],
        tokens=ids.numel(),
        loss_patched=patched[0],
        loss_unpatched=unpatched[0],
        loss_difference=loss,
        gradient_difference=overall,
        worst=worst,
        worst_difference=most,
        tolerance=tolerance,
    )


@contextmanager
def _random_adapters(model: PeftModel) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_B." in n and p.requires_grad}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in kept:
            noise = torch.randn(parameters[name].shape, generator=generator) * _B_STD
            parameters[name].copy_(noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)
