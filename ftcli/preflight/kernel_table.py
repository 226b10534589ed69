"""Which implementation serves each part of the model on a device, and why: what `ftcli check` shows without that GPU.

The rules of ``ftkernels.device``, ``ftkernels.attention_config`` and ``ftcli.model.attention``, without torch;
a test holds them together. Floors, by compute capability: the elementwise kernels run from 7.0 on. Products inside
kernels and the attention kernels need 8.0: below it Triton makes no tensor-core code. SDPA has cuDNN from 9.0 on, flash
attention from 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ftcli.config import Recipe
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan
from ftcli.preflight.execution import FUSED_FAMILIES, Execution

#: Largest padded LoRA rank whose products ride in the elementwise kernels.
LARGEST_FUSED_RANK = 64
#: The attention kernels' smallest tiles need this much shared memory a block.
ATTENTION_SHARED_MEMORY = 99 * 1024
WIDEST_HEAD = 256
#: GPUs with fp8 instructions.
FP8_CAPABILITY = (8, 9)

Runs = Literal["triton", "torch", "fp8", "transformers", "cudnn", "flash", "sdpa", "eager"]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """``part`` of the model, what ``runs`` there, and the ``reason`` as one clause."""

    part: str
    runs: Runs
    reason: str


def kernel_rows(
    recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, execution: Execution
) -> tuple[KernelRow, ...]:
    """One row for each part of a training step, in the order of the model."""
    if execution.kernels == "transformers":
        layers = KernelRow("layers", "transformers", _why_transformers(recipe, facts, device))
        if _takes_parts(recipe, facts, device):
            return (layers, *_attention(recipe, facts, plan, device))
        own: Runs = "eager" if execution.attention == "eager" else "sdpa"
        return (layers, KernelRow("attention", own, "transformers' own"))
    elementwise: Runs = "torch" if execution.kernels == "reference" else "triton"
    why = "model.kernels: reference" if elementwise == "torch" else f"{device.name} runs Triton kernels"
    return (
        KernelRow("norms, rotary embedding, gated unit", elementwise, why),
        *_frozen(recipe, plan, device),
        _low_rank(recipe, plan, device, elementwise),
        *_attention(recipe, facts, plan, device),
        KernelRow("head and loss", elementwise, f"{why}; logits in chunks, never all at once"),
    )


def _takes_parts(recipe: Recipe, facts: ModelFacts, device: DeviceFacts) -> bool:
    """Whether norms and attention are on the kernels in layers that are not: ``ftcli.model.families``, ``parts``."""
    return facts.model_type == "phi3" and device.kind == "cuda" and recipe.model.kernels != "off"


def _why_transformers(recipe: Recipe, facts: ModelFacts, device: DeviceFacts) -> str:
    if recipe.model.kernels == "off":
        return "model.kernels: off"
    if device.kind != "cuda":
        return f"{device.name} is no CUDA GPU"
    if recipe.lora is None:
        return "the kernels keep base weights frozen, and full fine-tuning trains them"
    if _takes_parts(recipe, facts, device):
        return "q, k, v and gate, up are single layers with one adapter each; norms and attention are on the kernels"
    if facts.model_type in FUSED_FAMILIES:
        return "GRPO generates and trains on transformers' own layers"
    return f"model_type {facts.model_type} is not in the family table"


def _frozen(recipe: Recipe, plan: DtypePlan, device: DeviceFacts) -> list[KernelRow]:
    """The frozen products, where they are not plain ones: ``ftkernels.fp8.on_tensor_cores``."""
    if recipe.quantization.method != "fp8":
        return []
    part = "products of the frozen weights"
    if device.capability is None or device.capability < FP8_CAPABILITY:
        return [KernelRow(part, "torch", f"{device.name} has no fp8 instructions: dequantised to {plan.compute}")]
    if plan.compute != "bfloat16":
        return [KernelRow(part, "torch", f"fp8 products are written in bfloat16: dequantised to {plan.compute}")]
    return [KernelRow(part, "fp8", "e4m3 both ways, on tensor cores")]


def _low_rank(recipe: Recipe, plan: DtypePlan, device: DeviceFacts, elementwise: Runs) -> KernelRow:
    part = "LoRA products"
    rank = 0 if recipe.lora is None else recipe.lora.r
    if elementwise == "torch":
        return KernelRow(part, "torch", "model.kernels: reference")
    if rank > LARGEST_FUSED_RANK:
        return KernelRow(part, "torch", f"rank {rank} is above {LARGEST_FUSED_RANK}: products of their own")
    refusal = _no_products(plan, device)
    if refusal is not None:
        return KernelRow(part, "torch", f"{refusal}: products of their own")
    return KernelRow(part, "triton", "half precision on tensor cores: they ride in the elementwise kernels")


def _no_products(plan: DtypePlan, device: DeviceFacts) -> str | None:
    if plan.compute not in ("bfloat16", "float16"):
        return f"{plan.compute} products in a kernel would not use the tensor cores"
    return _below_8(device)


def _below_8(device: DeviceFacts) -> str | None:
    if device.capability is None or device.capability >= (8, 0):
        return None
    major, minor = device.capability
    return f"on capability {major}.{minor} Triton makes no tensor-core code"


def _attention(recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts) -> list[KernelRow]:
    """One row, or one for layers with and one for layers without a window that is in force."""
    window = facts.sliding_window
    in_force = window is not None and window < recipe.data.max_seq_len
    row = partial(_attention_row, facts, plan, device)
    packed = "documents are packed" if recipe.data.packing else None
    if not in_force:
        return [row("attention", packed)]
    rows = [row(f"attention, window {window}", "a sliding window is in force")]
    if facts.model_type not in ("mistral", "phi3"):  # there the window is every layer's
        rows.append(row("attention, global", packed))
    return rows


def _attention_row(facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, part: str, masked: str | None) -> KernelRow:
    """``masked``: why the call is not plainly causal, or None."""
    refusal = _no_attention_kernel(facts, device)
    if facts.attn_logit_softcapping:
        if refusal is None:
            return KernelRow(part, "triton", "scores are capped, which SDPA cannot do")
        return KernelRow(part, "eager", f"scores are capped, which SDPA cannot do, and {refusal}")
    if masked is not None:
        if refusal is None:
            return KernelRow(part, "triton", f"{masked}, and dense backends cannot skip what is not seen")
        return KernelRow(part, "sdpa", f"with a dense mask: {refusal}")
    if plan.compute not in ("bfloat16", "float16"):
        return KernelRow(part, "sdpa", f"{plan.compute} has no fused backend")
    capability = device.capability
    if capability is None:
        return KernelRow(part, "sdpa", f"{device.name} is no CUDA GPU")
    if capability >= (9, 0):
        return KernelRow(part, "cudnn", "dense causal attention on capability 9.0 or more")
    if capability >= (8, 0):
        return KernelRow(part, "flash", "dense causal attention on capability 8.x")
    return KernelRow(part, "sdpa", f"capability {capability[0]}.{capability[1]} has no flash attention")


def _no_attention_kernel(facts: ModelFacts, device: DeviceFacts) -> str | None:
    head = 0 if facts.shape is None else facts.shape.head_dim
    if head % 16 or not 0 < head <= WIDEST_HEAD:
        return f"the attention kernels take head sizes that are multiples of 16 up to {WIDEST_HEAD}, not {head}"
    below = _below_8(device)
    if below is not None:
        return below
    if device.capability is None:
        return f"{device.name} is no CUDA GPU"
    if (device.shared_memory_bytes or 0) < ATTENTION_SHARED_MEMORY:
        return f"{device.name} has too little shared memory for their tiles"
    return None
