"""Rules that need the device: dtype, attention and kernels against what the GPU has. Pure: the facts are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ftkernels.limits import (
    ATTENTION_SHARED_MEMORY,
    ELEMENTWISE_CAPABILITY,
    ELEMENTWISE_SHARED_MEMORY,
    PRODUCTS_CAPABILITY,
)

from ftcli.facts.device import DeviceFacts
from ftcli.facts.precision import DtypePlan
from ftcli.facts.quantization import why_dequantized
from ftcli.preflight.checks.base import Context, Findings
from ftcli.tables import code_of, quantizations
from ftcli.units import gib

_BUSY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Need:
    """What a backend or kernel asks of a GPU: its compute capability, and shared memory of one block in bytes."""

    capability: tuple[int, int]
    shared_memory_bytes: int = 0


_TENSOR_CORE_ATTENTION = Need(PRODUCTS_CAPABILITY, ATTENTION_SHARED_MEMORY)
#: What each attention backend needs. Shared memory is that of the smallest tile in use at head_dim 256.
ATTENTION_NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "flash_attention_2": _TENSOR_CORE_ATTENTION,
        "flex_attention": _TENSOR_CORE_ATTENTION,
        "triton": _TENSOR_CORE_ATTENTION,
    }
)
#: ftcli's own Triton kernels: elementwise and row-wise ones, without tensor cores or large tiles.
KERNEL_NEED = Need(ELEMENTWISE_CAPABILITY, ELEMENTWISE_SHARED_MEMORY)


def unmet(need: Need, device: DeviceFacts) -> str | None:
    """Why ``device`` cannot run something, or None when it can."""
    if device.capability is None:
        return "it needs a CUDA GPU"
    if device.capability < need.capability:
        return (
            f"it needs compute capability {_version(need.capability)}, {device.name} has {_version(device.capability)}"
        )
    available = device.shared_memory_bytes
    if available is not None and available < need.shared_memory_bytes:
        wanted = need.shared_memory_bytes >> 10
        return f"it needs {wanted} KiB of shared memory a block, {device.name} has {available >> 10} KiB"
    return None


def check(context: Context, device: DeviceFacts, plan: DtypePlan) -> Findings:
    """FT501 dtype, FT502 attention backend, FT503 kernels, FT504 memory in use by others, FT505 slow on a CPU,
    FT508 products of weights as they are stored.
    """
    if plan.compute == "bfloat16" and not device.has_bfloat16:
        capability = _version(device.capability or (0, 0))
        yield context.error(
            "FT501",
            "model.dtype",
            f"{device.name} has no bfloat16: it needs compute capability 8.0, this GPU has {capability}",
            help="use model.dtype: float16 (the loss is then scaled) or float32 (twice the memory; auto takes it "
            "here); or a GPU from Ampere on (a10, l4, a100, ...)",
        )
    attention = context.recipe.model.attention
    if attention in ATTENTION_NEEDS:
        reason = unmet(ATTENTION_NEEDS[attention], device)
        if reason is not None:
            yield context.error(
                "FT502", "model.attention", f"model.attention {attention}: {reason}", help="use model.attention: auto"
            )
    if context.recipe.model.kernels == "triton":
        reason = unmet(KERNEL_NEED, device)
        if reason is not None:
            yield context.error(
                "FT503", "model.kernels", f"model.kernels triton: {reason}", help="use model.kernels: auto or reference"
            )
    yield from _occupied(context, device)
    yield from _stored_products(context, device, plan)
    if device.kind == "cpu" and plan.compute == "bfloat16":
        yield context.warning(
            "FT505", "model.dtype", "bfloat16 on a CPU is slower than float32", help="use model.dtype: auto"
        )


def _stored_products(context: Context, device: DeviceFacts, plan: DtypePlan) -> Findings:
    """A GPU without the products that a method is for is refused. On a CPU, and in another dtype, the weights are
    dequantised for each product, which is right and slow.
    """
    path, quantization = "quantization.method", context.recipe.quantization
    products = quantizations.row(quantization.method).products
    if products is None:
        return
    missing = unmet(Need(code_of(products.capability)), device)
    dequantized = why_dequantized(quantization, plan, device)
    if device.kind == "cuda" and missing is not None:
        others = " or ".join(name for name in quantizations.supported() if quantizations.row(name).products is None)
        yield context.error("FT508", path, f"{path} {quantization.method}: {missing}", help=f"use {path}: {others}")
    elif dequantized is not None:
        yield context.warning(
            "FT508",
            path,
            f"{path} {quantization.method}: {dequantized}; here the weights are dequantised to {plan.compute} first",
            help="use it here to try a recipe out; training without `quantization` is faster",
        )


def _occupied(context: Context, device: DeviceFacts) -> Findings:
    free, total = device.free_bytes, device.memory_bytes
    if device.kind != "cuda" or free is None or total is None or free >= _BUSY_SHARE * total:
        return
    yield context.warning(
        "FT504",
        "",
        f"other processes hold {gib(total - free)} of {gib(total)} GiB on {device.name}",
        help="nvidia-smi lists them",
    )


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
