"""How a run's layers are computed, as far as memory is concerned: on ftcli's kernels or not, and with which attention.

The same decisions as ``ftcli.model.patch`` and ``ftcli.model.attention`` make at run time, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftcli.config import Recipe
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan
from ftcli.preflight.memory.activations import ActivationPolicy, plain_policy
from ftcli.preflight.memory.fused_activations import fused_policy

Work = Literal["train", "grpo", "eval", "export"]

#: Families whose decoder layers the kernels can stand in for.
FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})
_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Execution:
    """``attention`` names the backend, ``kernels`` what stands in for the layers; ``policy`` counts their memory."""

    attention: str
    kernels: Literal["fused", "reference", "transformers"]
    policy: ActivationPolicy


def execution_of(recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, *, work: Work) -> Execution:
    """How the layers of this run are computed."""
    kernels = _kernels(recipe, facts, device, work)
    capped = bool(facts.attn_logit_softcapping)
    if kernels == "transformers":
        name = _plain_attention(recipe, capped)
        return Execution(name, kernels, plain_policy("eager" if name == "eager" else "sdpa"))
    on_gpu = device.capability is not None and device.capability >= (8, 0)
    narrow = facts.shape is not None and facts.shape.head_dim <= _WIDEST_HEAD
    by_kernel = on_gpu and narrow
    windowed = facts.sliding_window is not None and facts.sliding_window < recipe.data.max_seq_len
    policy = fused_policy(
        capped_without_kernel=capped and not by_kernel,
        reference=kernels == "reference",
        attention_by_kernel=by_kernel and (capped or windowed or recipe.data.packing),
    )
    if capped:
        return Execution("triton" if by_kernel else "eager", kernels, policy)
    return Execution("sdpa, triton where a window is in force" if windowed and by_kernel else "sdpa", kernels, policy)


def _kernels(
    recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work
) -> Literal["fused", "reference", "transformers"]:
    asked = recipe.model.kernels
    frozen = work == "eval" or (work == "train" and recipe.lora is not None)  # evaluation freezes full fine-tunes too
    if not frozen or asked == "off" or facts.model_type not in FUSED_FAMILIES:
        return "transformers"
    if asked == "reference":
        return "reference"
    return "fused" if device.kind == "cuda" else "transformers"


def _plain_attention(recipe: Recipe, capped: bool) -> str:
    if recipe.model.attention != "auto":
        return recipe.model.attention
    return "eager" if capped else "sdpa"
