"""Decoder layers on the fused kernels, and all layers of a model as one function of hidden states.

A fused layer holds the original layer's own modules under their own names. Parameters, PEFT's adapters and the content
of a checkpoint stay what they were; only the computation between them differs. Cached generation goes through the
original layer.

transformers' own forward calls the layers one at a time, in Python. A CUDA graph needs them all at once. So while a
:class:`DecoderStack` is collecting, each layer hands its call on, and the last one has the stack run them all; nothing
of transformers' is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from ftkernels.attention import KeptOutput
from ftkernels.device import without_autocast
from ftkernels.experts import ExpertPacks, ExpertStack, empty_packs, pack_experts
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import ResidualMode, lora_mlp
from ftkernels.lora_qkv import lora_gated_qkv, lora_qkv
from ftkernels.output_gate import output_gate
from ftkernels.projection import AdapterPacks, FrozenWeight, Norm, Packed, Projection, WeightCopies
from ftkernels.rms_norm import rms_norm, rms_norm_add
from ftkernels.side_stream import DeferredStream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftcli.facts.layers import Layer
from ftcli.facts.shape import ModelShape
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.experts import mixture, stacks_of
from ftcli.model.masks import CallMask
from ftcli.model.quantized import QuantizedLinear
from ftcli.tables.architecture import Experts, Family, Groups

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from ftkernels.limits import Activation, NormForm
    from ftkernels.lora_mlp import Save
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.offload import Offload
    from ftcli.plan.memory.checkpointing import Offloaded


class PreparedGroup(NamedTuple):
    """Prepared inputs of a group of projections: packed adapters, or copies of trained weights in the products' dtype.

    Without, they are made in each call. ``deferred``: side stream for the adapters' gradients.
    """

    packed: Packed | None = None
    copies: tuple[Tensor, ...] = ()
    deferred: DeferredStream | None = None


class LayerPacks(NamedTuple):
    """The prepared inputs of each group of a layer, as :class:`ftcli.tables.architecture.Groups` names them."""

    qkv: PreparedGroup = PreparedGroup()
    o: PreparedGroup = PreparedGroup()
    gate_up: PreparedGroup = PreparedGroup()
    down: PreparedGroup = PreparedGroup()
    gate: PreparedGroup = PreparedGroup()
    input_gate: PreparedGroup = PreparedGroup()
    input_projection: PreparedGroup = PreparedGroup()
    queries: PreparedGroup = PreparedGroup()
    keys_values: PreparedGroup = PreparedGroup()
    experts: tuple[ExpertPacks | Tensor | None, ...] = ()

    @classmethod
    def of_layers(
        cls, groups: Sequence[PreparedGroup], experts: Sequence[tuple[ExpertPacks | Tensor | None, ...]]
    ) -> list[LayerPacks]:
        """Those of each layer, from the groups of all layers and what is prepared of each one's experts: their packed
        adapters, or copies of trained stacks.
        """
        size = len(Groups._fields)
        parts = [groups[at : at + size] for at in range(0, len(groups), size)]
        named = [dict(zip(Groups._fields, part, strict=True)) for part in parts]
        return [cls(**part, experts=stacks) for part, stacks in zip(named, experts, strict=True)]


#: Keys and values (B, Hk, S, D) by the kind of the layers that share them, in one forward pass.
SharedKeys = MutableMapping[str, tuple[Tensor, Tensor]]


class Beside(NamedTuple):
    """Arguments of a layer's call beside hidden states, a mask and a rotation: its own input (B, S, P), and where
    layers that share keys and values put and find them.
    """

    layer_input: Tensor | None = None
    shared: SharedKeys | None = None


NOTHING = Beside()

#: Each group prepares its own.
UNPACKED = LayerPacks()
_UNPREPARED = PreparedGroup()


def projections_of(layers: Sequence[Any], prepared: PreparedGroup = _UNPREPARED) -> list[Projection]:
    """:func:`projection_of` each layer of a group."""
    copies = prepared.copies or (None,) * len(layers)
    pairs = zip(layers, copies, strict=True)
    return [projection_of(layer, prepared.packed, copy, prepared.deferred) for layer, copy in pairs]


def projection_of(
    layer: Any, packed: Packed | None = None, copy: Tensor | None = None, deferred: DeferredStream | None = None
) -> Projection:
    """The layer's weight, bias and active adapter; without the adapter while it is disabled or merged.

    ``packed``, ``copy`` and ``deferred`` are of :class:`PreparedGroup`: the copy of its own weight.
    """
    base = getattr(layer, "base_layer", layer)
    weight = _frozen(base)
    if base is layer or layer.disable_adapters or layer.merged or not layer.active_adapters:
        return Projection(weight, base.bias, copy=copy)
    name = layer.active_adapters[0]
    if name not in layer.lora_A:
        return Projection(weight, base.bias)
    dropout = layer.lora_dropout[name]
    return Projection(
        weight=weight,
        bias=base.bias,
        a=layer.lora_A[name].weight,
        b=layer.lora_B[name].weight,
        scaling=float(layer.scaling[name]),
        dropout=dropout.p if isinstance(dropout, nn.Dropout) and layer.training else 0.0,
        packed=packed,
        deferred=deferred,
    )


def _frozen(base: nn.Linear) -> Tensor | FrozenWeight:
    """The weight for kernels: a quantized layer's weight object, else the floating matrix."""
    return base.frozen_weight() if isinstance(base, QuantizedLinear) else base.weight


def norm_eps(norm: Any) -> float:
    """The epsilon of a transformers RMSNorm, whichever name its family uses."""
    eps: Any = getattr(norm, "variance_epsilon", None)
    return float(eps if eps is not None else norm.eps)


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    """LayerNorm by torch's own kernel, (..., H): in float32 and rounded once, as Cohere-2's is in steps that keep more.

    Without autocast, which would keep another copy of ``x``.
    """
    bias = getattr(norm, "bias", None)
    with without_autocast(x):
        cast = None if bias is None else bias.to(x.dtype)
        return nn.functional.layer_norm(x, x.shape[-1:], norm.weight.to(x.dtype), cast, norm_eps(norm))


class FusedNorm(nn.Module):
    """An RMSNorm on our kernel; shares ``weight`` with the module it stands for."""

    def __init__(self, original: Any, form: NormForm, backend: BackendName) -> None:
        super().__init__()
        self.weight = original.weight
        self.eps = norm_eps(original)
        self._form = form
        self._backend = backend

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        weight = weight_for(self.weight, hidden_states, self._form)
        return rms_norm(hidden_states, weight, self.eps, form=self._form, backend=self._backend)


def weight_for(weight: Tensor, x: Tensor, form: NormForm) -> Tensor:
    """The weight in a dtype that keeps the norm's output in ``x``'s: one that is trained whole is held in float32."""
    return weight.to(x.dtype) if form == "llama" else weight


class FusedDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One decoder layer: QKV with norm and rotation, attention, output with residual, MLP with norm and residual.

    ``selective``, ``offload`` and ``offloaded`` are set by :mod:`ftcli.model.gradient_checkpointing`, ``stack`` by
    :mod:`ftcli.model.cuda_graphs`, ``packs``, the adapters packed already, by :mod:`ftcli.generation.decoding`.

    Args:
        shape: Of the model; ``described``: this layer in it.
    """

    def __init__(
        self, original: nn.Module, shape: ModelShape, described: Layer, activation: Activation, backend: BackendName
    ) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        # Not a submodule: its children are ours already, and state_dict must not list them twice.
        object.__setattr__(self, "original", original)
        for name in ("layer_type", "attention_type"):
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))
        self.gradient_checkpointing = getattr(original, "gradient_checkpointing", False)
        if hasattr(original, "_gradient_checkpointing_func"):
            self._gradient_checkpointing_func = original._gradient_checkpointing_func
        self.selective = False
        self.offload: Offload | None = None
        self.offloaded: Offloaded = "halves"
        self.stack: DecoderStack | None = None
        self.packs = UNPACKED
        attention = described.attention
        self.window = None if attention is None else attention.window
        self.by_position = None if attention is None else position_scale(shape.family, original.self_attn)
        self._shape = shape
        self._family = shape.family
        self._mixer = described.mixer
        self._groups = described.groups
        self._experts = shape.family.experts if described.stacks else None
        self._rotates = attention is not None and attention.rotary_dim > 0
        self._multiplier = 1.0
        if shape.family.residual_multiplier is not None:
            self._multiplier = float(getattr(original, shape.family.residual_multiplier))
        self._query_multiplier = 1.0
        if shape.family.query_multiplier is not None:
            self._query_multiplier = float(getattr(original.self_attn, shape.family.query_multiplier))
        self._activation = activation
        self._backend = backend
        self.train(original.training)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        if past_key_values is not None or (position_embeddings is None and self._rotates):
            output: Tensor = self.original(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return output
        rotation = self.rotation_at(position_embeddings, position_ids)
        return self.compute(hidden_states, attention_mask, rotation, self.packs, **kwargs)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer; while its stack is collecting, hands the call on to it."""
        if self.stack is None or not self.stack.collects:
            return super().__call__(hidden_states, *args, **kwargs)
        mask, documents = self.call_mask(kwargs["attention_mask"], hidden_states), kwargs["documents"]
        rotation = self.stack.rotation_of(self, kwargs["position_embeddings"], kwargs.get("position_ids"))
        layer_input = next(iter(args), None)
        if layer_input is None:
            layer_input = self.stack.layer_input(kwargs.get("layer_inputs", ()))
        return self.stack.take(self, hidden_states, LayerCall(documents.within(mask), rotation, layer_input))

    @property
    def drops(self) -> bool:
        """True if training draws random numbers: dropout of adapters, of attention, or of what halves add."""
        dropouts = [module.p for module in self.modules() if isinstance(module, nn.Dropout)]
        halves = self._halves_of()
        of_scores = getattr(halves[0], "attention_dropout", 0.0)
        return any(dropouts) or bool(of_scores) or any(map(residual_dropout, halves))

    def groups(self) -> list[list[Projection]]:
        """The projections that share an input, as :class:`LayerPacks` names them."""
        return [projections_of([self.get_submodule(name) for name in group]) for group in self._groups]

    def stacks(self) -> tuple[ExpertStack, ...]:
        """The stacks of its experts; none where it has no experts."""
        experts = self._experts
        return () if experts is None else stacks_of(self.get_submodule(experts.block).experts, experts)

    def call_mask(self, given: Any, hidden_states: Tensor) -> Any:
        """The mask of a call on (B, S, H) as this layer takes it, from transformers' for layers of its kind."""
        return given

    def rotation_at(self, angles: Tensor | tuple[Tensor, Tensor] | None, positions: Tensor | None) -> Rotation:
        """(cos, sin), each (B or 1, S, R), as the kernels take them; and where queries are scaled by their position the
        factor, (B or 1, S). Empty where transformers hands over no angles (Muse Glimmer).
        """
        if angles is None:
            return ()
        if isinstance(angles, Tensor):  # `complex_angles`
            angles = angles.real, angles.imag
        cos, sin = angles
        if self._family.single_angles:
            cos, sin = (torch.cat((x, x), dim=-1) for x in angles)
        if self._family.repeated_angles:  # each pair's angle twice, side by side
            cos, sin = (torch.cat((x[..., ::2], x[..., ::2]), dim=-1) for x in angles)
        if self.by_position is None or positions is None:
            return cos, sin
        return cos, sin, self.by_position(positions)

    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Rotation,
        packs: LayerPacks = UNPACKED,
        beside: Beside = NOTHING,
        **kwargs: Any,
    ) -> Tensor:
        """The layer on the kernels, under the policy that was set on it: (B, S, H) -> (B, S, H).

        ``packs``: what is prepared for its projections.
        """
        if beside.shared is not None:
            kwargs["shared"] = beside.shared
        attend = partial(self._attention_half, mask=attention_mask, rotation=rotation, packs=packs, kwargs=kwargs)
        behind = partial(self._behind, packs=packs, layer_input=beside.layer_input)
        if self._shape.parallel:
            whole = partial(self._parallel_halves, attend=attend, packs=packs)
        else:
            whole = partial(self._halves_in_turn, attend=attend, behind=behind, packs=packs)
        if self.offload is None or not (self.training and torch.is_grad_enabled()):
            return whole(hidden_states)
        if self.offloaded == "layers" or self._shape.parallel:
            return self.offload.checkpoint(whole, hidden_states)
        kwargs["kept"] = KeptOutput(self.offload.keep)
        hidden_states = self.offload.checkpoint(attend, hidden_states)
        if self._experts is not None or not self._family.mlp_from_stream:
            hidden_states = self.offload.checkpoint(partial(self._mlp_half, packs=packs), hidden_states)
        else:
            with self.offload.saving(hidden_states):
                hidden_states = self._mlp_half(hidden_states, packs)
        return behind(hidden_states) if beside.layer_input is None else self.offload.checkpoint(behind, hidden_states)

    @property
    def offloaded_tensors(self) -> int:
        """Tensors that ``offload`` sends to the host for this layer: its input; or by halves the inputs of both,
        attention's output where our kernels made it, and the MLP's output where that is normalised.
        """
        return 1 if self.offloaded == "layers" else self._shape.most_sent

    def _halves_in_turn(
        self,
        hidden_states: Tensor,
        attend: Callable[[Tensor], Tensor],
        behind: Callable[[Tensor], Tensor],
        packs: LayerPacks,
    ) -> Tensor:
        return behind(self._mlp_half(attend(hidden_states), packs))

    def _behind(self, hidden_states: Tensor, packs: LayerPacks, layer_input: Tensor | None) -> Tensor:
        """(B, S, H) -> (B, S, H): what a layer does behind both halves, from its own input (B, S, P): what a tower saw
        is added.
        """
        return hidden_states if layer_input is None else hidden_states + layer_input.to(hidden_states.dtype)

    def _parallel_halves(self, hidden_states: Tensor, attend: Callable[..., Tensor], packs: LayerPacks) -> Tensor:
        """Both halves read one norm of ``hidden_states``."""
        entered = self._enter(hidden_states, self._family.norms.before_attention, apart=True)[0]
        mlp = self._mlp(entered, None, packs)[0]
        mlp = self._dropped(mlp, residual_dropout(self._halves_of()[1]))
        return torch.add(attend(hidden_states, entered=entered), mlp, alpha=self._multiplier)

    def _attention_half(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        rotation: Rotation,
        packs: LayerPacks,
        kwargs: dict[str, Any],
        entered: Tensor | None = None,
    ) -> Tensor:
        """(B, S, H) -> (B, S, H): attention, added to the residual stream. ``entered``: the norm, where it is there."""
        attended, residual = self._attend(hidden_states, mask, rotation, packs, kwargs, entered)
        (projection,) = self._projections("o", packs)
        dropout = residual_dropout(self._halves_of()[0])
        if self._adds_at_once(self._family.norms.after_attention, dropout):
            # Where the sum is kept as well, the half that is run again may stop before the output projection.
            save: Literal["products", "input"] = "input" if self._by_halves else "products"
            scale = self._multiplier
            return lora_linear(attended, projection, residual=residual, scale=scale, save=save, backend=self._backend)
        out = lora_linear(attended, projection, backend=self._backend)
        return self._add(out, residual, self._family.norms.after_attention, dropout)

    def _mlp_half(self, hidden_states: Tensor, packs: LayerPacks) -> Tensor:
        """(B, S, H) -> (B, S, H): the MLP, added to the residual stream."""
        norms, dropout = self._family.norms, residual_dropout(self._halves_of()[1])
        if self._experts is not None:
            return self._mixture(hidden_states, self._experts, packs)
        if self._adds_at_once(norms.after_mlp, dropout):
            return self._mlp(hidden_states, norms.before_mlp, packs, adds=True)[0]
        mlp, residual = self._mlp(hidden_states, norms.before_mlp, packs)
        return self._add(mlp, residual, norms.after_mlp, dropout)

    def _mixture(self, hidden_states: Tensor, experts: Experts, packs: LayerPacks) -> Tensor:
        """(B, S, H) -> (B, S, H): the mixture of experts, added to the residual stream."""
        entered = self._enter(hidden_states, self._family.norms.before_mlp, apart=True)[0]
        shared = [*self._projections("gate_up", packs), *self._projections("down", packs)]
        plain = self._multiplier == 1.0
        out = mixture(
            self.get_submodule(experts.block),
            experts,
            entered,
            shared,
            hidden_states if plain else None,
            activation=self._activation,
            save="input" if self._mlp_save() == "input" else "gate_up",
            prepared=packs.experts,
            backend=self._backend,
        )
        return out if plain else torch.add(hidden_states, out, alpha=self._multiplier)

    def _halves_of(self) -> tuple[nn.Module, nn.Module]:
        return self.self_attn, self._mlp_module

    @property
    def _mlp_module(self) -> nn.Module:
        return self.get_submodule("mlp" if self._experts is None else self._experts.block)  # type: ignore[no-any-return]

    def _adds_at_once(self, norm: str | None, dropout: float) -> bool:
        """True if a half's output is added as the last product gives it."""
        return norm is None and not (dropout and self.training)

    def _add(self, x: Tensor, residual: Tensor, norm: str | None, dropout: float) -> Tensor:
        """(..., H): a half's output, normalised or multiplied, added to the residual stream."""
        x = self._dropped(x, dropout)
        if norm is not None:
            return self._add_normed(x, residual, getattr(self, norm))
        return torch.add(residual, x, alpha=self._multiplier)

    def _dropped(self, x: Tensor, dropout: float) -> Tensor:
        return nn.functional.dropout(x, dropout) if dropout and self.training else x

    def _mlp_save(self) -> Save:
        """Tensors that the MLP keeps.

        A checkpoint around the whole layer runs the MLP again anyway where its output is normalised or multiplied;
        everywhere else it stops before the MLP.
        """
        whole = self.gradient_checkpointing or (self.offload is not None and not self._by_halves)
        stops = whole and not self._family.closes
        return "input" if self.selective or self._by_halves or stops else "gate_up_once"

    @property
    def _by_halves(self) -> bool:
        """True if each half is run again by itself, from an input on the host."""
        return self.offload is not None and self.offloaded == "halves" and not self._shape.parallel

    def _projections(self, group: str, packs: LayerPacks) -> list[Projection]:
        names: tuple[str, ...] = getattr(self._groups, group)
        return projections_of([self.get_submodule(name) for name in names], getattr(packs, group))

    def _enter(self, hidden_states: Tensor, norm: str | None, *, apart: bool = False) -> tuple[Tensor, Norm | None]:
        """The input of a half's first products, and the RMSNorm that these apply to it.

        ``apart``: the norm is applied here, for more than one group to read. LayerNorm always is.
        """
        if norm is None:
            return hidden_states, None
        module = getattr(self, norm)
        if self._family.norm == "layer":
            return layer_norm(hidden_states, module), None
        if apart:
            weight = weight_for(module.weight, hidden_states, self._family.norm)
            entered = rms_norm(hidden_states, weight, norm_eps(module), form=self._family.norm, backend=self._backend)
            return entered, None
        return hidden_states, self._norm(module)

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotation: Rotation,
        packs: LayerPacks,
        kwargs: dict[str, Any],
        entered: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention's output (B, S, Hq * D) before the output projection, and the residual (B, S, H)."""
        family, norm = self._family, None
        if entered is None:
            apart = family.output_gate is not None
            entered, norm = self._enter(hidden_states, family.norms.before_attention, apart=apart)
        settings: dict[str, Any] = {
            "head_dim": self._shape.head_dim,
            "norm": norm,
            "rope": (rotation[0], rotation[1]) if self._rotates else None,
            "rope_layout": family.rotary,
            "backend": self._backend,
            **self._head_norms(),
        }
        gate: Tensor | None = None
        if "q_gate" in family.joined:
            q, k, v, gate, passed = lora_gated_qkv(entered, *self._projections("qkv", packs), **settings)
        else:
            kv_heads = self._shape.num_kv_heads
            q, k, v, passed = lora_qkv(entered, *self._projections("qkv", packs), kv_heads=kv_heads, **settings)
        if len(rotation) > 2:
            q = q * rotation[2].to(q.dtype)[:, None, :, None]
        attended = self._attended(q, k, v, attention_mask, kwargs)
        if family.output_gate is not None:
            (projection,) = self._projections("gate", packs)
            gate = lora_linear(entered, projection, backend=self._backend)
        if gate is not None:
            attended = output_gate(attended, gate, backend=self._backend)
        attended = attended.reshape(*hidden_states.shape[:-1], -1)
        # Whoever uses what was handed through lets backward add both gradients in one kernel.
        return attended, passed if entered is hidden_states else hidden_states

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        """Attention of q (B, Hq, S, D) over k and v (B, Hk, S, D): (B, S, Hq, D)."""
        attention = self.self_attn
        interface = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        attended: Tensor = interface(
            attention,
            q,
            k,
            v,
            mask,
            dropout=attention.attention_dropout if self.training else 0.0,
            scaling=attention.scaling * self._query_multiplier,
            sliding_window=self.window,
            softcap=getattr(attention, "attn_logit_softcapping", None),
            s_aux=getattr(attention, "sinks", None),
            **kwargs,
        )[0]
        return attended

    def _head_norms(self) -> dict[str, Any]:
        norms = self._family.head_norm
        if norms is None:
            return {}
        pair = getattr(self.self_attn, norms.q), getattr(self.self_attn, norms.k)
        found: dict[str, Any] = {"head_norms": tuple(self._norm(each) for each in pair)}
        if "q_gate" in self._family.joined:
            return found
        return found | {"norm_span": norms.span, "norm_after_rope": norms.after_rotation}

    def _mlp(
        self, hidden_states: Tensor, norm: str | None, packs: LayerPacks, *, adds: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output, with ``adds`` added to the residual stream; and the residual stream, each (B, S, H)."""
        entered, inner = self._enter(hidden_states, norm, apart=len(self._family.mlp) == 2)
        first, (down,) = self._projections("gate_up", packs), self._projections("down", packs)
        if len(self._family.mlp) == 2:
            through = partial(self._two_linears, first=first[0], last=down)
            residual = hidden_states if adds else None
            if self.selective and self.training and torch.is_grad_enabled():
                out = checkpoint(through, entered, residual, use_reentrant=False, preserve_rng_state=self.drops)
            else:
                out = through(entered, residual)
            return out, hidden_states
        gate, up = first if len(first) == 2 else (first[0], None)
        given = entered is hidden_states
        mode: ResidualMode = "none" if not given else "add" if adds else "return"
        made = lora_mlp(
            entered,
            gate,
            up,
            down,
            activation=self._activation,
            norm=inner,
            residual=mode,
            scale=self._multiplier if mode == "add" else 1.0,
            save=self._mlp_save(),
            backend=self._backend,
        )
        if isinstance(made, tuple):
            return made
        if adds and not given:
            made = torch.add(hidden_states, made, alpha=self._multiplier)
        return made, hidden_states

    def _two_linears(self, x: Tensor, residual: Tensor | None, first: Projection, last: Projection) -> Tensor:
        """(..., H) -> (..., H): an MLP without a gate."""
        act = self.mlp.act_fn if hasattr(self.mlp, "act_fn") else self.mlp.act  # transformers' own module
        entered = lora_linear(x, first, backend=self._backend)
        with without_autocast(x):  # which would square in float32 and keep that
            activated = act(entered)
        scale = 1.0 if residual is None else self._multiplier
        return lora_linear(activated, last, residual=residual, scale=scale, backend=self._backend)

    def _norm(self, norm: Any) -> Norm:
        return Norm(getattr(norm, "weight", None), norm_eps(norm), self._rms_form)

    @property
    def _rms_form(self) -> NormForm:
        return "llama" if self._family.norm == "layer" else self._family.norm

    def _add_normed(self, x: Tensor, residual: Tensor, norm: Any) -> Tensor:
        weight = weight_for(norm.weight, x, self._rms_form)
        return rms_norm_add(x, residual, weight, norm_eps(norm), form=self._rms_form, backend=self._backend)


def residual_dropout(half: Any) -> float:
    """Probability that an element of what a half adds to the residual stream is dropped in training (Seed-OSS)."""
    return float(getattr(half, "residual_dropout", 0.0))


def position_scale(family: Family, attention: Any) -> Callable[[Tensor], Tensor] | None:
    """Factors of queries by their position, (B or 1, S) -> (B or 1, S) in float32; None without any.

    1 + beta * log(1 + floor(position / original_max_position_embeddings)), as Llama-4 and Ministral-3 have it.
    """
    settings = attention.config.rope_parameters if family.scaled_by_position else {}
    beta, original = settings.get("llama_4_scaling_beta"), settings.get("original_max_position_embeddings")
    if not beta or not original:
        return None
    return lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / original))


#: (cos, sin), each (B or 1, S, R); and the factor of queries by their position, (B or 1, S), where there is one.
Rotation = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's arguments besides hidden states: its mask, its rotation, and its own input (B, S, P), if any.

    Layers of one type share the first two.
    """

    mask: CallMask
    rotation: Rotation
    layer_input: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackCall:
    """One call of the layers: what the first one reads, (B, S, H), and what each layer is called with."""

    hidden: Tensor
    layer_calls: tuple[LayerCall, ...]


class DecoderStack:
    """The fused layers of one model, in order.

    ``runner`` runs a call; :meth:`run` where there is none.

    Args:
        dtype: Of the layers' products. The adapters of all layers are packed at once in it, and trained weights of
            another dtype copied; None has each layer see to its own.
    """

    def __init__(self, layers: Sequence[FusedDecoderLayer], dtype: torch.dtype | None = None) -> None:
        self.layers = tuple(layers)
        groups = [] if dtype is None else [group for layer in self.layers for group in layer.groups()]
        self._adapters = AdapterPacks(groups, dtype or torch.float32)
        self._copies = WeightCopies(groups, dtype or torch.float32)
        #: Where a backward pass whose gradients are read at its end alone makes those of the adapters.
        self.deferred = DeferredStream()
        pairs = zip(self._adapters.packs, self._copies.copies, strict=True)
        found = [PreparedGroup(packed, copies, self.deferred) for packed, copies in pairs]
        self._experts = [] if dtype is None else [stacks_with_packs(layer, dtype) for layer in self.layers]
        prepared = [
            tuple(packs if stack.trained[0] is None else self._copies.add(stack.trained[0]) for stack, packs in pairs)
            for pairs in self._experts
        ]
        self._packs = LayerPacks.of_layers(found, prepared) or [UNPACKED] * len(self.layers)
        #: :class:`ftcli.model.cuda_graphs.GraphRunner`, where there are graphs.
        self.runner: Callable[[StackCall], Tensor] | None = None
        self.drops = any(layer.drops for layer in self.layers)
        self._layer_calls: list[LayerCall] | None = None
        self._rotations: dict[int, tuple[Any, Rotation]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, the layers hand their calls on, for one forward pass of the model without a cache."""
        self._layer_calls, self._rotations = [], {}
        try:
            yield
        finally:
            self._layer_calls, self._rotations = None, {}

    @property
    def collects(self) -> bool:
        """True if layers hand their calls on."""
        return self._layer_calls is not None

    def rotation_of(
        self, layer: FusedDecoderLayer, angles: tuple[Tensor, Tensor] | None, positions: Tensor | None
    ) -> Rotation:
        """The layer's rotation. Layers that are given the same angles share one."""
        kept = self._rotations.get(id(angles))
        if kept is None:  # the angles are kept as well: their id belongs to them while they live
            kept = self._rotations[id(angles)] = angles, layer.rotation_at(angles, positions)
        return kept[1]

    def layer_input(self, of_first: Sequence[Tensor]) -> Tensor | None:
        """The own input of the layer whose call comes next, from those of the first layers."""
        index = len(self._layer_calls or ())
        return of_first[index] if index < len(of_first) else None

    def take(self, layer: FusedDecoderLayer, hidden: Tensor, layer_call: LayerCall) -> Tensor:
        """A layer hands its call on: ``hidden`` as it came; from the last layer what all make of it, (B, S, H)."""
        assert self._layer_calls is not None
        if layer is not self.layers[len(self._layer_calls)]:
            raise RuntimeError("the layers of a stack were called out of order")
        self._layer_calls.append(layer_call)
        if len(self._layer_calls) < len(self.layers):
            return hidden
        call = StackCall(hidden, tuple(self._layer_calls))
        self._layer_calls = None
        return (self.runner or self.run)(call)

    @property
    def copies(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Trained weights, each with the copy of it that products read."""
        return self._copies.pairs

    def weights_changed(self) -> None:
        """Marks the copies of trained weights as outdated, after a step of an optimizer that does not write them."""
        self._copies.outdate()

    def run(self, call: StackCall) -> Tensor:
        """(B, S, H) -> (B, S, H): the layers one after the other."""
        self._adapters.refresh()
        self._copies.refresh()
        pack_stacks(self._experts)
        hidden, shared = call.hidden, dict[str, tuple[Tensor, Tensor]]()
        for layer, layer_call, packs in zip(self.layers, call.layer_calls, self._packs, strict=True):
            beside = Beside(layer_call.layer_input, shared)
            given = (hidden, layer_call.mask, layer_call.rotation, packs, beside)
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                hidden = checkpoint(layer.compute, *given, use_reentrant=False, preserve_rng_state=self.drops)
            else:
                hidden = layer.compute(*given)
        return hidden


#: The stacks of a layer's experts, each with memory for its packed adapters.
PackedStacks = list[tuple[ExpertStack, ExpertPacks | None]]


def stacks_with_packs(layer: FusedDecoderLayer, dtype: torch.dtype) -> PackedStacks:
    """A layer's, whose packs hold nothing yet."""
    return [(stack, empty_packs(stack, dtype)) for stack in layer.stacks()]


def packs_of(stacks: Sequence[PackedStacks]) -> list[tuple[ExpertPacks | None, ...]]:
    """The packs of each layer."""
    return [tuple(packs for _, packs in pairs) for pairs in stacks]


def pack_stacks(stacks: Sequence[PackedStacks]) -> None:
    """Copies the adapters of all experts as they are now into their packs."""
    for stack, packs in (pair for pairs in stacks for pair in pairs):
        if packs is not None:
            pack_experts(stack, packs)


def stack_of(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> DecoderStack | str:
    """The layers of ``model`` as one function; or, as one clause, which of them is not on the kernels.

    ``dtype``: see :class:`DecoderStack`; that of a stack that the layers have already stays what it is.
    """
    fused = []
    for index, layer in enumerate(decoder_layers(base_of(model))):
        if not isinstance(layer, FusedDecoderLayer):
            return f"layers.{index} is not on the kernels"
        fused.append(layer)
    stack = fused[0].stack or DecoderStack(fused, dtype)
    for layer in fused:
        layer.stack = stack
    return stack
