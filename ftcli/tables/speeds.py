"""How much of a GPU's rate of products a training step reaches, as measured: docs/performance.md has each figure.

A share is tokens/s times operations per token (:mod:`ftcli.facts.flops`), over :data:`PRODUCTS` of the published rate.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Rate of bfloat16 products of 8192³ on an H100 and an H200 (790 TFLOP/s), over the published one.
PRODUCTS = 0.8
#: Devices on which steps were measured: a forecast for these is within the first of the two shares, for others within
#: the second, which is a judgement.
MEASURED = ("h100", "h200")
WITHIN, ELSEWHERE = 0.15, 0.4

#: Adapters in bfloat16, 8192 tokens at a time and no checkpointing, by the text model's type.
FAMILIES: Mapping[str, float] = {
    "gemma2": 0.65,
    "gemma3_text": 0.66,
    "gemma4_text": 0.56,
    "qwen3_5_text": 0.63,
    "qwen3_moe": 0.49,
    "qwen3_5_moe_text": 0.36,
    "gpt_oss": 0.49,
    "glm4_moe_lite": 0.455,
}
#: Other dense models, by parameters in 10^9 from which the share holds; and other mixtures.
DENSE: tuple[tuple[float, float], ...] = ((2.5, 0.70), (1.0, 0.65), (0.0, 0.52))
EXPERTS = 0.45
#: Experts beside an MLP, in a family whose dense models are in :data:`FAMILIES`.
GEMMA4_EXPERTS = 0.39

#: A share of 1 is multiplied by these: layers that are run again, fp8 products, transformers' own layers.
CHECKPOINTED, FP8, OFF_KERNELS = 1.06, 1.35, 0.65
#: Micro-batches of fewer tokens than the first number lose the second with each halving, and no more than a half.
FULL_TOKENS, A_HALVING = 2048, 0.08
#: Evaluation's tokens/s over training's.
EVALUATION = 2.2
#: Of several processes' rate, what is left when each has rows of its own.
TOGETHER = 0.98


def share_of(text_type: str, parameters: float, *, experts: bool) -> float:
    """The share for a model by its text model's type and its (active) parameters."""
    if text_type == "gemma4_text" and experts:
        return GEMMA4_EXPERTS
    if text_type in FAMILIES:
        return FAMILIES[text_type]
    if experts:
        return EXPERTS
    return next(share for least, share in DENSE if parameters / 1e9 >= least)
