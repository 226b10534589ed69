"""Decoder layers with multi-head latent attention, on the fused kernels.

They are :class:`ftcli.model.fused.FusedDecoderLayer` but for what is in front of attention: keys and values, and in
most models queries, are expanded from latent vectors with a norm of their own, and one rotated key serves all heads.
Attention itself sees heads of one size, as everywhere: values that are narrower than keys are filled up with zeros,
and the zeros that attention makes of them are cut off again.
"""

from __future__ import annotations

from typing import Any

from ftkernels.latent_heads import LatentSizes, latent_heads
from ftkernels.lora_group import lora_group
from ftkernels.lora_linear import lora_linear
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftcli.facts.shape import LatentAttention
from ftcli.model.fused import FusedDecoderLayer, LayerPacks, Rotation


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
        q, kv, shared = self._expanded(joined, packs)
        q, k, v = latent_heads(
            q, kv, shared, rotation[0], rotation[1], self._sizes,
            layout="pairs" if self._pairs else "halves", backend=self._backend,
        )  # fmt: skip
        interface = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        attended, _ = interface(
            attention,
            q,
            k,
            v,
            attention_mask,
            dropout=attention.attention_dropout if self.training else 0.0,
            scaling=attention.scaling,
            **kwargs,
        )
        return attended[..., : self._latent.value_dim].reshape(*hidden_states.shape[:-1], -1), passed

    def _expanded(self, joined: Tensor, packs: LayerPacks) -> tuple[Tensor, Tensor, Tensor]:
        """What the input gave (B, S, W) -> queries (B, S, Hq * D); keys and values (B, S, Hq * (N + V)); the shared
        key (B, S, R), which is not rotated yet.
        """
        attention, latent = self.self_attn, self._latent
        q, kv, shared = joined.split([latent.entering[0], latent.kv_rank, latent.rotary_dim], dim=-1)
        if latent.q_rank is None:
            kv = kv.contiguous()  # or the norm would keep the queries beside it, too
        else:
            (queries,) = self._projections("queries", packs)
            q = lora_linear(q, queries, norm=self._norm(attention.q_a_layernorm), backend=self._backend)
        (keys_values,) = self._projections("keys_values", packs)
        kv = lora_linear(kv, keys_values, norm=self._norm(attention.kv_a_layernorm), backend=self._backend)
        return q, kv, shared

    @property
    def _latent(self) -> LatentAttention:
        assert isinstance(self._mixer, LatentAttention)  # or the layer would not be of this class
        return self._mixer

    @property
    def _sizes(self) -> LatentSizes:
        return LatentSizes(self._latent.heads, self._latent.plain_dim, self._latent.rotary_dim, self._latent.value_dim)

    @property
    def _pairs(self) -> bool:
        config: Any = self.self_attn.config
        return bool(getattr(config, "rope_interleave", self._family.rotary == "pairs"))
