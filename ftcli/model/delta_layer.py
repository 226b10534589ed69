"""Decoder layers whose mixer is a gated delta net, on the fused kernels.

They are :class:`ftcli.model.fused.FusedDecoderLayer` but for what mixes tokens: queries, keys and values of one linear
layer go through a short filter, then through the delta rule, whose state takes the place of keys and values kept; its
output is normalised and multiplied by a gate. Documents of a row are kept apart in the filter and in the state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from ftkernels.delta_net import NetSizes, NetWeights, delta_net
from ftkernels.delta_rule import delta_rule_backend
from ftkernels.device import BackendName, without_autocast
from ftkernels.lora_group import lora_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ftcli.model.fused import FusedDecoderLayer, LayerPacks, Rotation, norm_eps
from ftcli.model.masks import CallMask, plain_mask


class StateCache(Protocol):
    """States of delta nets as a layer of one call knows them: :mod:`ftcli.generation.cache`."""

    def mix(
        self, layer: int, joined: Tensor, weights: NetWeights, sizes: NetSizes, *, backend: BackendName = "auto"
    ) -> Tensor:
        """:func:`ftkernels.delta_net.delta_net` of decoder layer number ``layer``, from the states that are kept."""
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
        return self._net, self._mlp_module

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
        net, cached = self._net, kwargs.get("cached")
        if cached is not None:
            with without_autocast(joined):
                return self._generated(joined, cached), passed
        mask, documents = self.call_mask(attention_mask, hidden_states), kwargs.get("documents")
        if documents is not None:
            mask = documents.within(mask)
        starts = mask.starts()
        heads = joined[..., : net.head_k_dim], joined[..., : net.head_v_dim]  # of these sizes
        with without_autocast(joined):
            if torch.is_grad_enabled() and not delta_rule_backend(*heads, self._backend).is_triton:
                # Plain torch would keep several times as much of each chunk.
                return checkpoint(self._mixed, joined, starts, use_reentrant=False, preserve_rng_state=False), passed
            return self._mixed(joined, starts), passed

    def _mixed(self, joined: Tensor, starts: Tensor | None) -> Tensor:
        """What enters the net (B, S, W) -> its output (B, S, Hv * V)."""
        return delta_net(joined, *self._parts(), starts=starts, backend=self._backend)

    def _generated(self, joined: Tensor, cached: StateCache) -> Tensor:
        """As :meth:`_mixed`, from the states of earlier tokens."""
        return cached.mix(self._net.layer_idx, joined, *self._parts(), backend=self._backend)

    def _parts(self) -> tuple[NetWeights, NetSizes]:
        net, filter = self._net, self._net.conv1d
        weights = NetWeights(
            filter.weight[:, 0], filter.bias, net.A_log, net.dt_bias, net.norm.weight, norm_eps(net.norm)
        )
        return weights, NetSizes(net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim)
