"""Decoder layers on the fused kernels, and all layers of a model as one function of hidden states.

A fused layer holds the original layer's own modules under their own names. Parameters, PEFT's adapters and the content
of a checkpoint stay what they were; only the computation between them differs. Cached generation goes through the
original layer.

transformers' own forward calls the layers one at a time, in Python. A CUDA graph needs them all at once. So while a
:class:`DecoderStack` is collecting, each layer hands its call on, and the last one has the stack run them all; nothing
of transformers' is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from ftkernels.adapter_packs import AdapterPacks
from ftkernels.attention import KeptOutput
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import FrozenWeight, Norm, Packed, Projection
from ftkernels.rms_norm import rms_norm, rms_norm_add
from ftkernels.side_stream import DeferredStream
from ftkernels.weight_copies import WeightCopies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftcli.facts.shape import SHARED_INPUTS
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.masks import CallMask
from ftcli.model.quantized import QuantizedLinear
from ftcli.tables.families import Family, family_of

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
    """The prepared inputs of each group of a layer."""

    qkv: PreparedGroup = PreparedGroup()
    o: PreparedGroup = PreparedGroup()
    gate_up: PreparedGroup = PreparedGroup()
    down: PreparedGroup = PreparedGroup()


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
        weight = _weight_for(self.weight, hidden_states, self._form)
        return rms_norm(hidden_states, weight, self.eps, form=self._form, backend=self._backend)


def _weight_for(weight: Tensor, x: Tensor, form: NormForm) -> Tensor:
    """The weight in a dtype that keeps the norm's output in ``x``'s: one that is trained whole is held in float32."""
    return weight if form == "gemma" else weight.to(x.dtype)


class FusedDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One decoder layer: QKV with norm and rotation, attention, output with residual, MLP with norm and residual.

    ``selective``, ``offload`` and ``offloaded`` are set by :mod:`ftcli.model.gradient_checkpointing`, ``stack`` by
    :mod:`ftcli.model.cuda_graphs`, ``packs``, the adapters packed already, by :mod:`ftcli.generation.forward`.
    """

    def __init__(self, original: nn.Module, family: Family, activation: Activation, backend: BackendName) -> None:
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
        self.window = window_of(original.self_attn)
        self._family = family
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
        if past_key_values is not None or position_embeddings is None:
            output: Tensor = self.original(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return output
        return self.compute(hidden_states, attention_mask, position_embeddings, self.packs, **kwargs)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer; while its stack is collecting, hands the call on to it."""
        if self.stack is None or not self.stack.collects:
            return super().__call__(hidden_states, *args, **kwargs)
        mask, documents = kwargs["attention_mask"], kwargs["documents"]
        return self.stack.take(self, hidden_states, LayerCall(documents.within(mask), kwargs["position_embeddings"]))

    @property
    def drops(self) -> bool:
        """True if training draws random numbers: dropout of adapters or of attention."""
        dropouts = [module.p for module in self.modules() if isinstance(module, nn.Dropout)]
        return any(dropouts) or bool(self.self_attn.attention_dropout)

    def groups(self) -> list[list[Projection]]:
        """The projections that share an input: q, k and v; o; gate and up; down. As :class:`LayerPacks` names them."""
        groups = (SHARED_INPUTS[0], ("self_attn.o_proj",), SHARED_INPUTS[1], ("mlp.down_proj",))
        return [projections_of([self.get_submodule(name) for name in group]) for group in groups]

    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: tuple[Tensor, Tensor],
        packs: LayerPacks = UNPACKED,
        **kwargs: Any,
    ) -> Tensor:
        """The layer on the kernels, under the policy that was set on it: (B, S, H) -> (B, S, H).

        ``packs``: what is prepared for its projections.
        """
        attend = partial(self._attention_half, mask=attention_mask, rotation=rotation, packs=packs, kwargs=kwargs)
        if self.offload is None or not (self.training and torch.is_grad_enabled()):
            return self._mlp_half(attend(hidden_states), packs)
        if self.offloaded == "layers":
            return self.offload.checkpoint(lambda z: self._mlp_half(attend(z), packs), hidden_states)
        kwargs["kept"] = KeptOutput(self.offload.keep)
        hidden_states = self.offload.checkpoint(attend, hidden_states)
        with self.offload.saving(hidden_states):
            return self._mlp_half(hidden_states, packs)

    @property
    def offloaded_tensors(self) -> int:
        """Tensors that ``offload`` sends to the host for this layer: its input; or by halves the inputs of both,
        attention's output where our kernels made it, and the MLP's output where that is normalised.
        """
        if self.offloaded == "layers":
            return 1
        return self._family.most_sent

    def _attention_half(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        packs: LayerPacks,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """(B, S, H) -> (B, S, H): attention, added to the residual stream."""
        attended, residual = self._attend(hidden_states, mask, rotation, packs, kwargs)
        (projection,) = projections_of([self.self_attn.o_proj], packs.o)
        # Gemma-2 and Gemma-3 normalise each half once more before it is added.
        if self._family.block == "sandwich":
            out = lora_linear(attended, projection, backend=self._backend)
            return self._add_normed(out, residual, self.post_attention_layernorm)
        # Where the sum is kept as well, the half that is run again may stop before the output projection.
        save: Literal["products", "input"] = "input" if self._halves else "products"
        return lora_linear(attended, projection, residual=residual, save=save, backend=self._backend)

    def _mlp_half(self, hidden_states: Tensor, packs: LayerPacks) -> Tensor:
        """(B, S, H) -> (B, S, H): the MLP, added to the residual stream."""
        if self._family.block == "sandwich":
            norm = self._norm(self.pre_feedforward_layernorm)
            mlp, residual = self._mlp(hidden_states, norm, packs, "return")
            return self._add_normed(mlp, residual, self.post_feedforward_layernorm)
        norm = self._norm(self.post_attention_layernorm)
        summed: Tensor = self._mlp(hidden_states, norm, packs, "add")
        return summed

    def _mlp_save(self) -> Save:
        """Tensors that the MLP keeps.

        A checkpoint around the whole layer runs a sandwich's MLP again anyway, for the input of its closing norm;
        everywhere else it stops before the MLP.
        """
        whole = self.gradient_checkpointing or (self.offload is not None and not self._halves)
        stops = whole and self._family.block != "sandwich"
        return "input" if self.selective or self._halves or stops else "gate_up_once"

    @property
    def _halves(self) -> bool:
        """True if each half is run again by itself, from an input on the host."""
        return self.offload is not None and self.offloaded == "halves"

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        packs: LayerPacks,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Attention's output (B, S, Hq * D) before the output projection, and the residual (B, S, H)."""
        attention = self.self_attn
        head_norms = None
        if self._family.head_norm:
            head_norms = self._norm(attention.q_norm), self._norm(attention.k_norm)
        q, k, v, residual = lora_qkv(
            hidden_states,
            *projections_of([attention.q_proj, attention.k_proj, attention.v_proj], packs.qkv),
            head_dim=attention.head_dim,
            norm=self._norm(self.input_layernorm),
            head_norms=head_norms,
            rope=position_embeddings,
            backend=self._backend,
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
            sliding_window=self.window,
            softcap=getattr(attention, "attn_logit_softcapping", None),
            **kwargs,
        )
        return attended.reshape(*hidden_states.shape[:-1], -1), residual

    def _mlp(self, hidden_states: Tensor, norm: Norm, packs: LayerPacks, residual: Any) -> Any:
        return lora_mlp(
            hidden_states,
            *projections_of([self.mlp.gate_proj, self.mlp.up_proj], packs.gate_up),
            *projections_of([self.mlp.down_proj], packs.down),
            activation=self._activation,
            norm=norm,
            residual=residual,
            save=self._mlp_save(),
            backend=self._backend,
        )

    def _norm(self, norm: Any) -> Norm:
        return Norm(norm.weight, norm_eps(norm), self._family.norm)

    def _add_normed(self, x: Tensor, residual: Tensor, norm: Any) -> Tensor:
        weight = _weight_for(norm.weight, x, self._family.norm)
        return rms_norm_add(x, residual, weight, norm_eps(norm), form=self._family.norm, backend=self._backend)


def window_of(attention: Any) -> int | None:
    """The layer's sliding window: the attention module's own, else its config's when every layer has one (Mistral)."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    config = attention.config
    if getattr(attention, "layer_type", None) is not None:
        return None
    family = family_of(str(getattr(config, "model_type", None)))
    every = family is not None and family.window_on_config
    return getattr(config, "sliding_window", None) if every else None


Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's arguments besides hidden states: its mask, and (cos, sin), each (B or 1, S, R).

    Layers of one type share theirs.
    """

    mask: CallMask
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class StackCall:
    """One call of the layers: what the first one reads, (B, S, H), and what each layer is called with."""

    hidden: Tensor
    layer_calls: tuple[LayerCall, ...]


class Runner(Protocol):
    """Runs a call of a stack: :class:`ftcli.model.cuda_graphs.GraphRunner`."""

    def __call__(self, call: StackCall) -> Tensor: ...


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
        found = found or [PreparedGroup()] * (4 * len(self.layers))
        self._packs = [LayerPacks(*found[at : at + 4]) for at in range(0, len(found), 4)]
        self.runner: Runner | None = None
        self.drops = any(layer.drops for layer in self.layers)
        self._layer_calls: list[LayerCall] | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, the layers hand their calls on, for one forward pass of the model without a cache."""
        self._layer_calls = []
        try:
            yield
        finally:
            self._layer_calls = None

    @property
    def collects(self) -> bool:
        """True if layers hand their calls on."""
        return self._layer_calls is not None

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
        hidden = call.hidden
        for layer, layer_call, packs in zip(self.layers, call.layer_calls, self._packs, strict=True):
            given = (hidden, layer_call.mask, layer_call.rotation, packs)
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                hidden = checkpoint(layer.compute, *given, use_reentrant=False, preserve_rng_state=self.drops)
            else:
                hidden = layer.compute(*given)
        return hidden


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
