"""Decoder layers whose mixer is a gated delta net, on the fused kernels.

They are :class:`ftcli.model.fused.FusedDecoderLayer` but for what mixes tokens: queries, keys and values of one linear
layer go through a short filter, then through the delta rule, whose state takes the place of keys and values kept; its
output is normalised and multiplied by a gate. Documents of a row are kept apart in the filter and in the state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from ftkernels.causal_conv import causal_conv
from ftkernels.delta_gates import delta_gates
from ftkernels.delta_rule import delta_rule, delta_rule_backend
from ftkernels.device import BackendName, without_autocast
from ftkernels.gated_norm import gated_norm
from ftkernels.lora_group import lora_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ftcli.model.fused import FusedDecoderLayer, LayerPacks, Rotation, norm_eps
from ftcli.model.masks import CallMask, plain_mask


class StateCache(Protocol):
    """What keeps the states of delta nets in generation: :mod:`ftcli.generation.cache`."""

    def filtered(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, backend: BackendName = "auto"
    ) -> Tensor:
        """The filter and SiLU (:func:`ftkernels.causal_conv.causal_conv`) in layer number ``layer``, after the inputs
        that are kept: (B, S, C) -> (B, S, C).
        """
        ...

    def carried(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, backend: BackendName = "auto"
    ) -> Tensor:
        """The delta rule (:func:`ftkernels.delta_rule.delta_rule`) from the states that are kept: (B, S, Hv, V)."""
        ...


class FusedDeltaLayer(FusedDecoderLayer):
    """One decoder layer with a gated delta net: projections with norm, filter, delta rule, gated norm, output with
    residual, MLP with norm and residual.
    """

    def call_mask(self, given: Any, hidden_states: Tensor) -> CallMask:
        """The mask of (B, S, H) from transformers' padding mask of it, (B, S) or None."""
        return given if isinstance(given, CallMask) else plain_mask(hidden_states, given)

    @property
    def offloaded_tensors(self) -> int:
        """As of every layer, but that no output of attention is sent."""
        return 1 if self.offloaded == "layers" else self._shape.half_inputs

    @property
    def _net(self) -> Any:
        nets = self._family.delta_nets
        assert nets is not None  # or the layer would not be of this class
        return self.get_submodule(nets.module)

    def _halves_of(self) -> tuple[nn.Module, nn.Module]:
        return self._net, self.mlp

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Rotation,
        packs: LayerPacks,
        kwargs: dict[str, Any],
        entered: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The net's output (B, S, Hv * V) before the output projection, and the residual (B, S, H)."""
        module = getattr(self, str(self._family.norms.before_attention))
        projections = self._projections("qkv", packs)
        joined, passed = lora_group(hidden_states, projections, norm=self._norm(module), backend=self._backend)
        if (cached := kwargs.get("cached")) is not None:
            with without_autocast(joined):
                return self._mixed(joined, None, cached), passed
        mask, documents = self.call_mask(attention_mask, hidden_states), kwargs.get("documents")
        if documents is not None:
            mask = documents.within(mask)
        starts, net = mask.starts(), self._net
        sizes = joined[..., : net.head_k_dim], joined[..., : net.head_v_dim]
        with without_autocast(joined):
            if torch.is_grad_enabled() and not delta_rule_backend(*sizes, self._backend).is_triton:
                # Plain torch would keep several times as much of each chunk.
                mixed = checkpoint(self._mixed, joined, starts, use_reentrant=False, preserve_rng_state=False)
                return mixed, passed
            return self._mixed(joined, starts), passed

    def _mixed(self, joined: Tensor, starts: Tensor | None, cached: StateCache | None = None) -> Tensor:
        """What enters the net (B, S, W), queries, keys and values first -> its output (B, S, Hv * V)."""
        net, backend = self._net, self._backend
        sizes = [2 * net.key_dim + net.value_dim, net.value_dim, net.num_v_heads, net.num_v_heads]
        mixed, gate, strength, decay = joined.split(sizes, dim=-1)
        weight, bias = net.conv1d.weight[:, 0], net.conv1d.bias
        if cached is None:
            filtered = causal_conv(mixed, weight, bias, starts=starts, backend=backend).out
        else:
            filtered = cached.filtered(net.layer_idx, mixed, weight, bias, backend=backend)
        q, k, v = filtered.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (net.num_k_heads, net.head_k_dim)) for x in (q, k))
        v, gate = (x.unflatten(-1, (net.num_v_heads, net.head_v_dim)) for x in (v, gate))
        g, beta = delta_gates(decay, strength, net.A_log, net.dt_bias, backend=backend)
        if cached is None:
            out = delta_rule(q, k, v, g, beta, starts=starts, backend=backend).out
        else:
            out = cached.carried(net.layer_idx, q, k, v, g, beta, backend=backend)
        return gated_norm(out, gate, net.norm.weight, norm_eps(net.norm), backend=backend).flatten(-2)
