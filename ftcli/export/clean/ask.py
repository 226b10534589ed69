"""The questions that every format has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from ftcli.export.clean.request import ATTENTION_MASK, INPUT_IDS, PROMPT, ReloadRequest
from ftcli.export.probe import NEW_TOKENS, STREAMED_TOKENS, TEXTS, Probe
from ftcli.facts.device import cpu_device

#: What the process takes beside the weights, libraries included.
_BESIDE = 2**30


def fits(parameters: int) -> bool:
    """Whether memory holds a model of so many numbers as a whole, in float32."""
    free = cpu_device().free_bytes
    # Loaded as it is stored and widened then: for a moment both are there.
    return free is None or 4 * parameters + 2 * parameters + _BESIDE <= free


def tokens_compared(parameters: int) -> int:
    """How many tokens a model of so many numbers generates: fewer where each one reads all the weights anew."""
    return NEW_TOKENS if fits(parameters) else STREAMED_TOKENS


def model_request(
    folder: Path,
    probe: Probe,
    parameters: int,
    *,
    dtype: Literal["stored", "float32"] = "stored",
    **more: bool | dict[str, int] | dict[str, str],
) -> ReloadRequest:
    """Loads ``folder`` as transformers does, in float32: whole where memory holds that, else layer by layer.

    Args:
        parameters: How many numbers the model has.
        dtype: ``stored``: all weights are rounded first to the dtype that config.json names.
    """
    from_disk = not fits(parameters)
    return ReloadRequest(
        "model",
        str(folder),
        dtype=dtype,
        from_disk=from_disk,
        new_tokens=0 if from_disk else probe.new_tokens,
        texts=TEXTS,
        **more,  # type: ignore[arg-type]
    )


def sent(probe: Probe) -> dict[str, Tensor]:
    """The tensors of a probe, as a request sends them."""
    return {INPUT_IDS: probe.input_ids, ATTENTION_MASK: probe.attention_mask, PROMPT: probe.prompt}
