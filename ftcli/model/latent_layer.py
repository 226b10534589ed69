"""Decoder layers with multi-head latent attention, on the fused kernels.

They are :class:`ftcli.model.fused.FusedDecoderLayer` but for what is in front of attention: keys and values, and in
most models queries, are expanded from latent vectors with a norm of their own, and one rotated key serves all heads.
Attention itself sees heads of one size, as everywhere: values that are narrower than keys are filled up with zeros,
and the zeros that attention makes of them are cut off again. Generation keeps latents, and expands nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from ftkernels.device import without_autocast
from ftkernels.latent_decode import absorbed, expanded
from ftkernels.latent_heads import LatentSizes, latent_heads
from ftkernels.lora_group import lora_group
from ftkernels.lora_linear import lora_linear
from ftkernels.rms_norm import rms_norm
from ftkernels.rope import apply_rope
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftcli.facts.layers import LatentAttention
from ftcli.model.fused import FusedDecoderLayer, LayerPacks, Rotation, weight_for

if TYPE_CHECKING:
    from ftkernels.limits import RopeLayout


class LatentCache(Protocol):
    """Latents of earlier tokens as a layer of one call knows them: :mod:`ftcli.generation.cache`."""

    def attend_latents(
        self, layer: int, latents: Tensor, query: Callable[[], Tensor], *, width: int, scaling: float
    ) -> Tensor | None:
        """Keeps ``latents`` (B, S, E) of decoder layer number ``layer``, each with the rotated key of its token.

        Args:
            query: Makes the queries (B, Hq, E) of one token a row; see :mod:`ftkernels.latent_decode`.
            width: Features of a latent without the key.

        Returns:
            Latents weighted by each head, (B, Hq, width); None where the queries see nothing but the call's own tokens,
            and attention is computed as without a cache.
        """
        ...


class FusedLatentLayer(FusedDecoderLayer):
    """One decoder layer with latent attention: latents with norm, heads with the latents' norms, rotation, attention,
    output with residual, MLP with norm and residual.
    """

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Rotation,
        packs: LayerPacks,
        kwargs: dict[str, Any],
        entered: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention's output (B, S, Hq * V) before the output projection, and the residual (B, S, H)."""
        attention: Any = self.self_attn
        norm = self._norm(getattr(self, str(self._family.norms.before_attention)))
        joined, passed = lora_group(hidden_states, self._projections("qkv", packs), norm=norm, backend=self._backend)
        q, kv, shared = self._parts(joined, packs)
        cached, others = kwargs.get("cached"), {name: value for name, value in kwargs.items() if name != "cached"}
        if cached is not None:
            with without_autocast(joined):
                attended = self._generated(cached, (q, kv, shared), rotation, packs)
            if attended is not None:
                return attended, passed
        (keys_values,) = self._projections("keys_values", packs)
        kv = lora_linear(kv, keys_values, norm=self._norm(attention.kv_a_layernorm), backend=self._backend)
        q, k, v = latent_heads(
            q, kv, shared, rotation[0], rotation[1], self._sizes, layout=self._layout, backend=self._backend
        )
        interface = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        attended, _ = interface(
            attention,
            q,
            k,
            v,
            attention_mask,
            dropout=attention.attention_dropout if self.training else 0.0,
            scaling=attention.scaling,
            **others,
        )
        return attended[..., : self._latent.value_dim].reshape(*hidden_states.shape[:-1], -1), passed

    def _parts(self, joined: Tensor, packs: LayerPacks) -> tuple[Tensor, Tensor, Tensor]:
        """What the input gave (B, S, W) -> queries (B, S, Hq * D); the latent of keys and values (B, S, C) before its
        norm; the shared key (B, S, R), which is not rotated yet.
        """
        latent = self._latent
        q, kv, shared = torch.split(joined, [latent.entering[0], *latent.kept], dim=-1)
        if latent.q_rank is None:
            return q, kv.contiguous(), shared  # or the latent's norm would keep the queries beside it, too
        (queries,) = self._projections("queries", packs)
        q = lora_linear(q, queries, norm=self._norm(self.self_attn.q_a_layernorm), backend=self._backend)
        return q, kv, shared

    def _generated(
        self, cached: LatentCache, parts: tuple[Tensor, Tensor, Tensor], rotation: Rotation, packs: LayerPacks
    ) -> Tensor | None:
        """Attention's output (B, 1, Hq * V) from the latents of earlier tokens; None where there are none."""
        attention: Any = self.self_attn
        q, kv, shared = parts
        by_head = q.view(*q.shape[:-1], self._latent.heads, -1).transpose(1, 2)
        plain, turned = torch.split(by_head, [self._latent.plain_dim, self._latent.rotary_dim], dim=-1)
        turned, key = apply_rope(
            turned, shared[:, None], rotation[0], rotation[1], layout=self._layout, backend=self._backend
        )
        norm = self._norm(attention.kv_a_layernorm)
        weight = weight_for(attention.kv_a_layernorm.weight, kv, norm.form)
        latents = torch.cat((rms_norm(kv, weight, norm.eps, form=norm.form, backend=self._backend), key[:, 0]), dim=-1)
        (projection,) = self._projections("keys_values", packs)

        def query() -> Tensor:
            return torch.cat((absorbed(plain[:, :, 0], projection, self._sizes), turned[:, :, 0]), dim=-1)

        width, scaling = self._latent.kv_rank, attention.scaling
        made = cached.attend_latents(attention.layer_idx, latents, query, width=width, scaling=scaling)
        return None if made is None else expanded(made.to(q.dtype), projection, self._sizes).flatten(1)[:, None]

    @property
    def _latent(self) -> LatentAttention:
        assert isinstance(self._mixer, LatentAttention)  # or the layer would not be of this class
        return self._mixer

    @property
    def _sizes(self) -> LatentSizes:
        return LatentSizes(self._latent.heads, self._latent.plain_dim, self._latent.rotary_dim, self._latent.value_dim)

    @property
    def _layout(self) -> RopeLayout:
        config: Any = self.self_attn.config
        return "pairs" if getattr(config, "rope_interleave", self._family.rotary == "pairs") else "halves"
