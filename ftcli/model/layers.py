"""Fused decoder layers that are :class:`ftcli.model.fused.FusedDecoderLayer` but for a part.

Where a gated delta net mixes tokens, queries, keys and values of one linear
layer go through a short filter, then through the delta rule, whose state takes the place of keys and values kept; its
output is normalised and multiplied by a gate. Documents of a row are kept apart in the filter and in the state.

With multi-head latent attention keys and values, and in
most models queries, are expanded from latent vectors with a norm of their own, and one rotated key serves all heads.
Attention itself sees heads of one size, as everywhere: values that are narrower than keys are filled up with zeros,
and the zeros that attention makes of them are cut off again. Generation keeps latents, and expands nothing.

In Gemma-4 keys and values come from linears of their own; one
linear for both, whose output is normalised twice; or an earlier layer of their kind. That one puts its keys and values
into a map that goes with the call, and their gradients reach it through the graph that autograd has of its first
forward pass: a layer that is run again, under any checkpointing policy, leaves the map as it is. Values are normalised
without weights. A layer may add what it makes of its own input of a token, and multiplies what it gives by a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from ftkernels.delta_net import NetSizes, NetWeights, delta_net
from ftkernels.delta_rule import delta_rule_backend
from ftkernels.device import BackendName, without_autocast
from ftkernels.latent_decode import absorbed, expanded
from ftkernels.latent_heads import LatentSizes, latent_heads
from ftkernels.lora_group import lora_group
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm
from ftkernels.rms_norm import rms_norm
from ftkernels.rope import apply_rope
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftcli.facts.layers import LatentAttention, Layer
from ftcli.facts.shape import ModelShape
from ftcli.model.experts import mixture
from ftcli.model.fused import Beside, FusedDecoderLayer, LayerPacks, Rotation, SharedKeys, norm_eps, weight_for
from ftcli.model.masks import CallMask, plain_mask
from ftcli.tables.architecture import LAYER_INPUT

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from ftkernels.limits import Activation, RopeLayout


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
        """The net's input (B, S, W) -> its output (B, S, Hv * V)."""
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
        """The input's projection (B, S, W) -> queries (B, S, Hq * D); the latent of keys and values (B, S, C) before
        its norm; the shared key (B, S, R), which is not rotated yet.
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


class FusedGemma4Layer(FusedDecoderLayer):
    """One decoder layer: projections with norms and rotation, or queries alone; attention; output and MLP, each with
    norm and residual; what it makes of its own input; a factor.
    """

    def __init__(
        self, original: nn.Module, shape: ModelShape, described: Layer, activation: Activation, backend: BackendName
    ) -> None:
        super().__init__(original, shape, described, activation, backend)
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        assert described.attention is not None  # or the family would not be one of these
        self._attention = described.attention
        self._scalar = str(shape.family.layer_scalar)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        per_layer_input: Tensor | None = None,
        shared_kv_states: SharedKeys | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, S, H) -> (B, S, H). Arguments as transformers' layer has them."""
        if past_key_values is not None or position_embeddings is None:
            # Gemma-4-12B's layers know no inputs of their own.
            inputs = () if per_layer_input is None else (per_layer_input,)
            output: Tensor = self.original(
                hidden_states,
                *inputs,
                shared_kv_states=shared_kv_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
            return output
        rotation = self.rotation_at(position_embeddings, position_ids)
        beside = Beside(per_layer_input, shared_kv_states)
        return self.compute(hidden_states, attention_mask, rotation, self.packs, beside, **kwargs)

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Rotation,
        packs: LayerPacks,
        kwargs: dict[str, Any],
        entered: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention's output (B, S, Hq * D) before the output projection, and the residual (B, S, H)."""
        others = {name: value for name, value in kwargs.items() if name != "shared"}
        q, k, v, passed = self._heads(hidden_states, (rotation[0], rotation[1]), packs, kwargs.get("shared"))
        attended = self._attended(q, k, v, attention_mask, others)
        return attended.reshape(*hidden_states.shape[:-1], -1), passed

    def _heads(
        self, z: Tensor, rope: tuple[Tensor, Tensor], packs: LayerPacks, shared: SharedKeys | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of z (B, S, H), as :func:`ftkernels.lora_qkv.lora_qkv` gives them."""
        attention, module, size = self._attention, self.self_attn, self._attention.head_dim
        norm = self._norm(getattr(self, str(self._family.norms.before_attention)))
        projections, of_q = self._projections("qkv", packs), self._norm(module.q_norm)
        if attention.keys == "own":
            norms = of_q, self._norm(module.k_norm)
            q, k, v, passed = lora_qkv(
                z, *projections, head_dim=size, norm=norm, head_norms=norms, rope=rope, backend=self._backend
            )
            v = self._normed(v.transpose(1, 2), self._value_norm)
        else:
            joined, passed = lora_group(z, projections, norm=norm, backend=self._backend)
            q, *keys = (x.view(*x.shape[:-1], -1, size) for x in self._split(joined))
            q = self._normed(q, of_q)
            k, v = q[:, :0], q[:, :0]
            if keys:
                k, v = self._normed(keys[0], self._norm(module.k_norm)), self._normed(keys[0], self._value_norm)
            q, k = apply_rope(q, k, *rope, backend=self._backend)
        if attention.keys == "shared":
            assert shared is not None  # transformers' model, and the stack, bring one
            k, v = shared[module.layer_type]
        elif shared is not None and module.store_full_length_kv:
            shared.setdefault(module.layer_type, (k, v))
        return q, k, v, passed

    def _split(self, joined: Tensor) -> tuple[Tensor, ...]:
        """(B, S, N) -> what q_proj gives, and, where they are not shared, what k_proj does."""
        width, attention = self._attention.width, self._attention
        return torch.split(joined, [width, attention.key_width] if attention.keys == "one" else [width], dim=-1)

    @property
    def _value_norm(self) -> Norm:
        return self._norm(getattr(self.self_attn, str(self._family.value_norm)))

    def _normed(self, by_token: Tensor, norm: Norm) -> Tensor:
        """(B, S, heads, D) -> (B, heads, S, D), each head normalised."""
        out = rms_norm(by_token, norm.weight, norm.eps, form=norm.form, backend=self._backend)
        return out.to(by_token.dtype).transpose(1, 2)

    def _mlp_half(self, hidden_states: Tensor, packs: LayerPacks) -> Tensor:
        """(B, S, H) -> (B, S, H): the MLP, and beside it the mixture of experts if there is one, added to the residual
        stream.
        """
        experts, norms = self._experts, self._family.norms
        if experts is None or experts.beside_mlp is None:
            return super()._mlp_half(hidden_states, packs)
        behind_mlp, before, behind = experts.beside_mlp
        mlp, residual = self._mlp(hidden_states, norms.before_mlp, packs)
        mixed = mixture(
            self,
            experts,
            self._enter(hidden_states, before, apart=True)[0],
            [],
            None,
            activation=self._activation,
            save="input" if self._mlp_save() == "input" else "gate_up",
            prepared=packs.experts,
            routed=hidden_states,
            backend=self._backend,
        )
        both = self._add_normed(mixed, self._enter(mlp, behind_mlp, apart=True)[0], getattr(self, behind))
        return self._add_normed(both, residual, getattr(self, str(norms.after_mlp)))

    def _behind(self, hidden_states: Tensor, packs: LayerPacks, layer_input: Tensor | None) -> Tensor:
        """(B, S, H) -> (B, S, H): ``(h + norm(projection(act(gate(h)) * input))) * scalar``, the first part alone where
        there is an input.
        """
        if layer_input is not None:
            (gate,), (projection,) = (
                self._projections("input_gate", packs),
                self._projections("input_projection", packs),
            )
            gated = self.act_fn(lora_linear(hidden_states, gate, backend=self._backend))
            inner = gated * layer_input.to(gated.dtype)
            added = lora_linear(inner, projection, backend=self._backend)
            hidden_states = self._add_normed(added, hidden_states, getattr(self, LAYER_INPUT.norm))
        scalar: Tensor = getattr(self, self._scalar)
        return hidden_states * scalar.to(hidden_states.dtype)
