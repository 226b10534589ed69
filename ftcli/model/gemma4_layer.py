"""Decoder layers of Gemma-4 on the fused kernels.

They are :class:`ftcli.model.fused.FusedDecoderLayer` but for where keys and values come from: linears of their own; one
linear for both, whose output is normalised twice; or an earlier layer of their kind. That one puts its keys and values
into a map that goes with the call, and their gradients reach it through the graph that autograd has of its first
forward pass: a layer that is run again, under any checkpointing policy, leaves the map as it is. Values are normalised
without weights. A layer may add what it makes of its own input of a token, and multiplies what it gives by a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ftkernels.lora_group import lora_group
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm
from ftkernels.rms_norm import rms_norm
from ftkernels.rope import apply_rope
from torch import Tensor, nn

from ftcli.facts.layers import Layer
from ftcli.facts.shape import ModelShape
from ftcli.model.experts import mixture
from ftcli.model.fused import Beside, FusedDecoderLayer, LayerPacks, Rotation, SharedKeys
from ftcli.tables.architecture import LAYER_INPUT

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from ftkernels.limits import Activation


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
