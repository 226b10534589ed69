"""Mixtures of experts inside the fused layers: transformers' own router, then the experts on the kernels.

Stacks, adapters and their names stay transformers' and PEFT's, whose own path forms the delta of every expert in each
call. Here A and B are read from PEFT's wrappers and multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.experts import ExpertPacks, ExpertStack, lora_experts
from ftkernels.lora_mlp import lora_mlp
from torch import Tensor, nn

from ftcli.model.routing import choice_of
from ftcli.model.stacks import packed_stack
from ftcli.tables.architecture import Experts

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from ftkernels.experts import Save
    from ftkernels.limits import Activation
    from ftkernels.projection import Projection
    from peft.tuners.lora.layer import ParamWrapper


def mixture(
    block: Any,
    described: Experts,
    x: Tensor,
    shared: list[Projection],
    added: Tensor | None,
    *,
    activation: Activation,
    save: Save,
    prepared: tuple[ExpertPacks | Tensor | None, ...] = (),
    routed: Tensor | None = None,
    backend: BackendName,
) -> Tensor:
    """The output of a mixture of experts for its normalised input x (B, S, H), and ``added`` (B, S, H).

    Args:
        block: transformers' module, with PEFT's wrappers in it.
        prepared: of both stacks, the adapters, packed already, or a copy of weights that are trained.
        routed: what the router reads (B, S, H), where that is not x.
        shared: gate, up and down of the expert that every token goes to; empty where there is none.
    """
    read = x if routed is None else routed
    weights, index = choice_of(block.get_submodule(described.router)(read.reshape(-1, x.shape[-1])))
    if shared:
        gate, up, down = shared
        own = lora_mlp(x, gate, up, down, activation=activation, save="input" if save == "input" else "gate_up_once",
                       backend=backend)  # fmt: skip
        assert isinstance(own, Tensor)
        if described.shared_gate is not None:
            own = torch.sigmoid(block.get_submodule(described.shared_gate)(x)) * own
        added = own if added is None else added + own
    shape = (*x.shape[:-1], index.shape[-1])
    first, last = stacks_of(block.experts, described)
    if prepared:
        first, last = (_with(stack, one) for stack, one in zip((first, last), prepared, strict=True))
    return lora_experts(
        x, index.view(shape), weights.view(shape), first, last, unit="clamped" if described.clamped else activation,
        interleaved=described.interleaved, added=added, save=save, backend=backend,
    )  # fmt: skip


def _with(stack: ExpertStack, prepared: ExpertPacks | Tensor | None) -> ExpertStack:
    return replace(stack, copy=prepared) if isinstance(prepared, Tensor) else replace(stack, packed=prepared)


def stacks_of(experts: Any, described: Experts) -> tuple[ExpertStack, ExpertStack]:
    """Both stacks with their active adapters; without those that are disabled or merged."""
    wrappers = {wrapper.parameter_name: wrapper for wrapper in _wrappers(experts)}
    base = base_experts(experts)
    first, last = (_stack(base, name, wrappers, described) for name in ("gate_up_proj", "down_proj"))
    return first, last


def base_experts(experts: Any) -> Any:
    """transformers' module of the experts, beneath PEFT's wrappers."""
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    return experts


def _wrappers(experts: Any) -> Iterator[ParamWrapper]:
    while hasattr(experts, "base_layer"):
        yield experts
        experts = experts.base_layer


def _stack(base: Any, name: str, wrappers: dict[str, ParamWrapper], described: Experts) -> ExpertStack:
    bare = ExpertStack(
        packed_stack(getattr(base, name)),
        int(base.num_experts),
        bias=getattr(base, f"{name}_bias") if described.biases else None,
        transposed=described.transposed,
    )
    wrapper = wrappers.get(name)
    if wrapper is None or wrapper.disable_adapters or wrapper.merged or not wrapper.active_adapters:
        return bare
    adapter = wrapper.active_adapters[0]
    if adapter not in wrapper.lora_A:
        return bare
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    return replace(bare, a=a, b=b, scaling=float(wrapper.scaling[adapter]))


def why_not_experts(block: nn.Module, described: Experts) -> str | None:
    """The reason why the kernels cannot take a layer's experts, as one clause; None if they can."""
    experts = getattr(block, "experts", None)
    base = base_experts(experts)
    # What transformers says of the layout on the class of the experts.
    layout = {
        "is_transposed": described.transposed,
        "is_concatenated": not described.interleaved,
        "has_bias": described.biases,
        "has_gate": True,
    }
    if any(getattr(base, flag, wanted) is not wanted for flag, wanted in layout.items()):
        return "its experts are laid out otherwise"
    for name in ("gate_up_proj", "down_proj"):
        weight, bias = getattr(base, name, None), getattr(base, f"{name}_bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"its experts have no stack {name}"
        trained = weight.requires_grad or (isinstance(bias, Tensor) and bias.requires_grad)
        if trained and base is not experts:
            return "its experts are trained beside their adapters"
    if any(len(wrapper.active_adapters) > 1 for wrapper in _wrappers(experts)):
        return "several adapters are active at once"
    return None
