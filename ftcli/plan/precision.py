"""One precision plan for the whole run: which dtype parameters, adapters and arithmetic have. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftkernels.limits import capability_text

from ftcli.config.recipe import Recipe
from ftcli.facts.device import BFLOAT16_CAPABILITY, DeviceFacts

#: Bytes of one element of each dtype that a plan can name.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Dtypes by torch's names.

    Attributes:
        adapter: Of LoRA's matrices; None for full fine-tuning.
        autocast: Whether products are cast to ``compute``.
        reduction: Of sums over rows: norms, softmax, the loss.
        gradient, optimizer: Of what is trained.
        rounding: How updates, which are computed in float32, are rounded to parameters in bfloat16; None where what is
            trained is in float32.
        loss_scaling: The loss is multiplied by a scale before backward, so that float16 does not round gradients to
            zero; the gradients are divided by it before the step.
    """

    parameter: str
    adapter: str | None
    compute: str
    autocast: bool
    reason: str
    reduction: str = "float32"
    gradient: str = "float32"
    optimizer: str = "float32"
    loss_scaling: bool = False
    rounding: Literal["nearest", "stochastic"] | None = None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one base parameter."""
        return DTYPE_BYTES[self.parameter]

    @property
    def trained_bytes(self) -> int:
        """Bytes of one element of what is trained: of adapters, or of the base itself."""
        return DTYPE_BYTES[self.adapter or self.parameter]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of a gradient."""
        return DTYPE_BYTES[self.gradient]

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in a matrix product."""
        return DTYPE_BYTES[self.compute]


def plan_dtypes(recipe: Recipe, device: DeviceFacts) -> DtypePlan:
    """The plan of a recipe on a device.

    LoRA keeps the frozen base in the compute dtype and its adapters in float32; full fine-tuning keeps all parameters
    in float32, since an update is often smaller than half a bfloat16 step. With ``train.pure_bf16`` parameters and
    gradients are in bfloat16, and the optimizer computes in float32 and rounds; with ``train.bf16_gradients`` only the
    gradients of matrices are. All compute under autocast unless the compute dtype is float32. float16 ends at 6e-8
    where bfloat16 reaches 1e-38, so its losses are scaled. What the device lacks is not corrected here:
    ``checks.machine`` reports it.
    """
    compute, reason = _compute(recipe.model.dtype, device)
    autocast, scaled = compute != "float32", compute == "float16"
    if recipe.lora is not None:
        return DtypePlan(compute, "float32", compute, autocast, reason, loss_scaling=scaled)
    if recipe.train.pure_bf16 and compute == "bfloat16":  # else preflight refuses it
        rounding: Literal["nearest", "stochastic"] = "stochastic" if recipe.train.bf16_stochastic_round else "nearest"
        return DtypePlan(compute, None, compute, autocast, reason, gradient=compute, rounding=rounding)
    narrow = recipe.train.bf16_gradients and compute == "bfloat16"  # else preflight refuses it
    gradient = compute if narrow else "float32"
    return DtypePlan("float32", None, compute, autocast, reason, gradient=gradient, loss_scaling=scaled)


def _compute(asked: str, device: DeviceFacts) -> tuple[str, str]:
    if asked != "auto":
        return asked, "the recipe asks for it"
    if device.kind == "cpu":
        return "float32", "a CPU is fastest and exact in float32"
    found, needed = capability_text(device.capability or (0, 0)), capability_text(BFLOAT16_CAPABILITY)
    reason = f"{device.name} has compute capability {found}, and bfloat16 needs {needed}"
    return ("bfloat16" if device.has_bfloat16 else "float32"), reason
