"""Loss scaling for float16: torch's GradScaler, where accelerate and transformers look for it.

A step whose gradients overflow is skipped and the scale halved; after a long run of good steps the scale doubles. The
scale is saved with each checkpoint and taken up again.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ftcli.errors import ExitCode, FtcliError

#: The scale starts at 2^16. So many steps skipped in a row leave it below 2^-4, where nothing overflows but what is
#: infinite to begin with.
MOST_SKIPPED = 20


class HasAccelerator(Protocol):
    """A trainer with an accelerator."""

    accelerator: Any
    optimizer: Any


def use_loss_scaling(trainer: HasAccelerator, device: torch.device) -> None:
    """Gives the trainer a scaler; called before training prepares its optimizer, which then steps through it.

    accelerate would make one itself only together with an autocast of its own, which the precision plan rules out.
    """
    trainer.accelerator.scaler = torch.amp.GradScaler(device.type)


def unscale(trainer: HasAccelerator) -> bool:
    """Divides the scale out of the gradients, once a step and before they are clipped; False without a scaler."""
    scaler = trainer.accelerator.scaler
    if scaler is None:
        return False
    scaler.unscale_(trainer.optimizer.optimizer)
    return True


class SkippedSteps:
    """Counts the steps in a row whose gradients overflowed."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, *, skipped: bool, step: int) -> None:
        """Raises FtcliError FT702 (exit 6) when no scale is small enough."""
        self._count = self._count + 1 if skipped else 0
        if self._count >= MOST_SKIPPED:
            raise FtcliError.single(
                "FT702",
                f"the gradients overflow float16 at every loss scale, {MOST_SKIPPED} steps in a row up to step {step}",
                exit_code=ExitCode.DIVERGED,
                help="use model.dtype: bfloat16 or float32, or a smaller learning rate; the last checkpoint is whole",
            )
