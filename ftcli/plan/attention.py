"""Chooses the attention backend of a call: a pure function of the GPU and the call.

The model asks it for each call that it makes; preflight asks it for the calls that a run will make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftkernels.limits import Gpu, capability_text, why_no_attention

#: ``eager`` is plain torch with all scores; the others but ``triton`` are torch's scaled dot product attention.
Backend = Literal["cudnn", "flash", "sdpa", "triton", "eager"]

#: ``plain``: causal over the whole sequence, with or without a window; ``intervals``: padding, documents or a cached
#: prefix, still one interval of keys a query; ``any``: something else, for dense masks only.
MaskKind = Literal["plain", "intervals", "any"]

#: Which kernels a caller wants: the fastest backend, ours wherever the call allows them, or plain torch.
Kernels = Literal["auto", "triton", "torch"]


#: Features of a head that torch's fused backends take; for wider ones it forms all scores.
WIDEST_DENSE_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The properties of one call of attention that the choice of a backend depends on.

    Attributes:
        dtype: Dtype of the products, by torch's name: autocast's, or that of the inputs.
        windowed: There is a sliding window, and it is shorter than the sequence.
        decoding: Each row has one query, against cached keys.
        sinks: The softmax counts a learned score a head besides those of the keys.
    """

    dtype: str
    head_dim: int
    softcap: float = 0.0
    windowed: bool = False
    mask: MaskKind = "plain"
    decoding: bool = False
    dropout: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend, and the reason as one clause."""

    backend: Backend
    reason: str


def choose_attention(
    gpu: Gpu, call: AttentionCall, kernels: Kernels = "auto", *, interpreted: bool = False
) -> AttentionChoice:
    """The backend of one attention call. ``interpreted``: triton's interpreter can run the kernels on a CPU, if
    ``kernels`` insists on them. Raises ValueError: ``kernels="triton"`` on a machine that cannot run them.
    """
    refusal = _why_no_kernel(gpu, call, kernels, interpreted=interpreted)
    plain = call.mask == "plain" and not call.decoding
    if call.softcap or call.sinks:
        beyond = f"{'scores are capped' if call.softcap else 'there are sinks'}, which SDPA cannot do"
        if refusal is None:
            return AttentionChoice("triton", beyond)
        return AttentionChoice("eager", f"{beyond}, and {refusal}")
    if not plain or call.windowed or kernels == "triton":
        if refusal is None:
            masked = "padding, packed documents or a cached prefix are masked"
            what = "a sliding window is in force" if plain else masked
            return AttentionChoice("triton", f"{what}, which dense backends cannot skip")
        return AttentionChoice("sdpa", f"with a dense mask: {refusal}")
    if refusal is None and call.head_dim > WIDEST_DENSE_HEAD:
        return AttentionChoice("triton", f"heads of {call.head_dim} features are wider than dense backends take")
    return _dense_backend(gpu.capability, call)


def _why_no_kernel(gpu: Gpu, call: AttentionCall, kernels: Kernels, *, interpreted: bool) -> str | None:
    """The reason why our kernels do not serve the call, or None."""
    if kernels == "torch":
        machine = "plain torch was asked for"
    elif gpu.capability is None and not (kernels == "triton" and interpreted):
        machine = "the kernels need a CUDA GPU"
    else:
        machine = why_no_attention(gpu, call.dtype, call.head_dim) or ""
    if machine and kernels == "triton":
        raise ValueError(f"the Triton kernels were asked for, but {machine}")
    if call.dropout:
        return "the kernels have no dropout of probabilities"
    if call.mask == "any":
        return "the mask is not made of intervals"
    if call.decoding:
        return "one query a row would leave the kernels' tiles empty"
    return machine or None


def _dense_backend(capability: tuple[int, int] | None, call: AttentionCall) -> AttentionChoice:
    """The backend for causal attention over whole sequences, without cap, sinks, window or padding."""
    if capability is None:
        return AttentionChoice("sdpa", "a CPU has no fused backend")
    if call.dropout:
        return AttentionChoice("sdpa", "dropout of probabilities")
    if call.dtype not in ("bfloat16", "float16"):
        return AttentionChoice("sdpa", f"{call.dtype} has no fused backend")
    if capability >= (9, 0):
        return AttentionChoice("cudnn", "dense causal attention on capability 9.0 or more")
    if capability >= (8, 0):
        return AttentionChoice("flash", "dense causal attention on capability 8.x")
    return AttentionChoice("sdpa", f"capability {capability_text(capability)} has no flash attention")
