"""Opens a generator for a model: the engine or transformers, and how much memory it may take.

It may read a second model that shares everything with the first one but the weights of its products. Those are copies
in the dtype of the products, with their adapters in them: ``cast(float32(W) + s · B A)``, rounded once, written anew
whenever the adapters have changed. The first model is only read. Adding an adapter to its base and subtracting it again
would change the base a little each time.

Ranks that hold shards of the weights make passes in step, each with something of its own to compute.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from ftkernels.device import dtype_name, gpu_of
from ftkernels.limits import why_no_decode_attention
from ftkernels.projection import join_weights
from ftkernels.sampling import GREEDY, Sampling
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ftcli.config.model import Kernels
from ftcli.facts.generation import choose_layout, why_no_engine
from ftcli.generation.decoding import Forward, cache_dtype, kept_shape
from ftcli.generation.engine import AHEAD, Engine
from ftcli.generation.fallback import TransformersGenerator
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, Token, Turns
from ftcli.model.backbone import base_of, decoder_layers, head_of, root_of, set_root
from ftcli.model.fsdp import JoinedLinear
from ftcli.model.fused import FusedDecoderLayer
from ftcli.model.lora import merged_weight
from ftcli.model.patch import patch
from ftcli.model.quantized import QuantizedLinear, TrainedQuantizedLinear
from ftcli.model.shards import forwards_in_step, with_whole_weights
from ftcli.plan.precision import DtypePlan
from ftcli.tables import quantizations
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup

#: Settings of a generation_config.json that change which token is likeliest, with the values that do not.
_UNKNOWN = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "watermarking_config": (None,),
}


class Completer(Protocol):
    """Completes requests."""

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]: ...

    def converse(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck, turns: Turns
    ) -> list[list[Completion]]: ...


class Streamer(Completer, Protocol):
    """Gives tokens as they come, too: :class:`ftcli.generation.engine.Engine`, or transformers behind its interface."""

    def run(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> Generator[Token, None, None]: ...


@dataclass(frozen=True, slots=True)
class OpenedGenerator:
    """The generator of a model.

    Attributes:
        reason: Why it is transformers, as one clause; None where it is the engine.
        merged: The engine's second model, which must be refreshed when adapters have changed.
    """

    generator: Streamer
    reason: str | None = None
    merged: MergedModel | None = None

    @property
    def summary(self) -> str:
        """One line for people."""
        if self.reason is not None:
            return f"generation: transformers' own ({self.reason})"
        return f"generation: the engine{'' if self.merged is None else ', adapters merged into a copy of the weights'}"

    def refresh(self) -> None:
        """Takes over what training has changed."""
        if self.merged is not None:
            self.merged.refresh()


def open_generator(
    model: PreTrainedModel | PeftModel,
    plan: DtypePlan,
    device: torch.device,
    *,
    rows: int,
    longest: int,
    pad: int,
    kernels: Kernels = "off",
    own_settings: bool = True,
    merge: bool = True,
    room_bytes: int | None = None,
    ahead: int = AHEAD,
    waiting: int = 0,
) -> OpenedGenerator:
    """Opens a generator of up to ``rows`` sequences of up to ``longest`` tokens at once.

    Args:
        waiting: Further ones that may have begun, and wait for what stands between turns, where memory has room.
        pad: The id that fills rows up, where transformers generates.
        kernels: The recipe's; puts merged weights on the kernels where the model is not.
        own_settings: The model's ``generation_config`` counts, for what is not in a ``Sampling``.
        merge: Merge weights into a copy where memory has room, on a GPU.
        room_bytes: Memory for the cache and a merged copy; None: what is free on a GPU.
        ahead: As :data:`ftcli.generation.engine.AHEAD`.

    Raises:
        torch.OutOfMemoryError: There is no room for a single sequence.
    """
    reason = _why_not(model, plan, device, own_settings)
    if reason is not None:
        return OpenedGenerator(TransformersGenerator(model, plan, device, pad=pad, rows=rows), reason)
    on_gpu = device.type == "cuda"
    shape = kept_shape(model, cache_dtype(model, plan))
    room = free_gpu_bytes(device) if room_bytes is None and on_gpu else room_bytes
    copied = copied_bytes(model, plan) if on_gpu and merge else None
    layout = choose_layout(shape, rows, longest, room_bytes=room, copy_bytes=copied, waiting=waiting)
    if layout is None:
        raise torch.OutOfMemoryError(f"no room for the key-value cache of {longest} tokens")
    merged = merged_model(model, plan, kernels) if layout.merged else None
    suppressed = _suppressed(base_of(model)) if own_settings else ()
    forward = Forward(model if merged is None else merged.model, plan, device, suppressed)
    alone = root_of(model) is None  # a graph cannot hold all-gathers over ranks
    return OpenedGenerator(Engine(forward, layout, longest, plan, device, graphs=alone, ahead=ahead), None, merged)


def _suppressed(base: PreTrainedModel) -> tuple[int, ...]:
    """Ids that the model's ``generation_config`` has never chosen, within its vocabulary."""
    stated: Any = getattr(base.generation_config, "suppress_tokens", None) or ()
    return tuple(int(each) for each in stated if 0 <= int(each) < base.config.get_text_config().vocab_size)


def free_gpu_bytes(device: torch.device) -> int:
    """GPU memory that this process could use: what is free, and what torch has reserved without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _why_not(
    model: PreTrainedModel | PeftModel, plan: DtypePlan, device: torch.device, own_settings: bool
) -> str | None:
    base = base_of(model)
    config: Any = base.config.get_text_config()
    on_kernels = all(isinstance(layer, FusedDecoderLayer) for layer in decoder_layers(base))
    reason = why_no_engine(config.to_dict(), family_of(config.model_type), on_kernels=on_kernels)
    if reason is not None:
        return reason
    dtype = cache_dtype(model, plan)
    head_dim = kept_shape(model, dtype).widest_head
    reason = why_no_decode_attention(gpu_of(device), dtype_name(dtype), head_dim)
    if reason is not None:
        return reason
    if base.get_output_embeddings() is None:
        return "the model has no head"
    try:
        head_of(model)
    except TypeError as error:
        return str(error)
    settings = base.generation_config
    if not own_settings or settings is None:
        return None
    for name, without in _UNKNOWN.items():
        value = getattr(settings, name, None)
        if value not in without:
            return f"the model's generation_config asks for {name} {value}"
    return None


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """A frozen linear layer with a weight of its own, and the layer of the first model that it stands for."""

    linear: nn.Linear
    source: Any

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the weight as it is now."""
        base = getattr(self.source, "base_layer", self.source)
        weight = base.frozen_weight().dequantize(torch.float32) if isinstance(base, QuantizedLinear) else base.weight
        if _adapts(self.source):
            weight = merged_weight(self.source, weight.detach().float())
        self.linear.weight.copy_(weight)


def _copy_of(source: Any, dtype: torch.dtype) -> MergedLinear:
    """A copy of ``source`` with unwritten weights; the bias is shared."""
    base = getattr(source, "base_layer", source)
    linear = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    empty = torch.empty((base.out_features, base.in_features), dtype=dtype, device=base.weight.device)
    linear.weight = nn.Parameter(empty, requires_grad=False)
    linear.bias = base.bias
    return MergedLinear(linear, source)


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The second model; its copied layers, which :meth:`refresh` writes."""

    model: PreTrainedModel
    layers: tuple[MergedLinear, ...]

    def refresh(self) -> None:
        """Makes the model answer as the first one does now."""
        for layer in self.layers:
            layer.refresh()


def copied_bytes(model: PreTrainedModel | PeftModel, plan: DtypePlan) -> int | None:
    """Bytes of the weights that :func:`merged_model` would copy; None where it has nothing to copy."""
    sizes = [_elements(linear) for linear in _copied(base_of(model), plan).values()]
    return sum(sizes) * plan.compute_bytes if sizes else None


def merged_model(model: PreTrainedModel | PeftModel, plan: DtypePlan, kernels: Kernels) -> MergedModel:
    """A second model, whose copies are written.

    Args:
        kernels: Puts a second model's layers on the kernels, where the first one's are not.
    """
    base = base_of(model)
    dtype = getattr(torch, plan.compute)
    copies = {number: _copy_of(linear, dtype) for number, linear in _copied(base, plan).items()}
    config = copy.deepcopy(base.config)
    configs = {id(base.config): config, id(base.config.get_text_config()): config.get_text_config()}
    for layer in decoder_layers(base):
        for names in _shared_inputs(base, layer):
            group = [copies[id(one)].linear.weight for name in names if id(one := _at(layer, name)) in copies]
            if len(group) == len(names):
                join_weights(group)
    second: PreTrainedModel = _shadow(base, {number: one.linear for number, one in copies.items()}, configs, {})
    found = MergedModel(second, tuple(copies.values()))
    found.refresh()
    if not any(isinstance(layer, FusedDecoderLayer) for layer in decoder_layers(second)):
        patch(second, kernels)
    return found


def unsharded_model(model: PreTrainedModel | PeftModel, merged_in: torch.dtype | None = None) -> PreTrainedModel:
    """A second model of one with sharded weights, while these are whole: it shares all of them, and gathers nothing.

    Args:
        merged_in: Dtype of products. Adapters of weights that are held in it are merged into what was gathered of them,
            which is thrown away after; None: adapters are computed beside their weights.
    """
    base, copies = base_of(model), dict[int, nn.Linear]()
    for linear in (linear for layer in decoder_layers(base) for linear in _linears(layer) if merged_in is not None):
        held: Any = getattr(linear, "base_layer", linear)
        if _adapts(linear) and type(held) in (nn.Linear, JoinedLinear) and held.weight.dtype == merged_in:
            copies[id(linear)] = _merged_in_place(linear)
    second: PreTrainedModel = _shadow(base, copies, {}, {})
    set_root(second, None)
    return second


@torch.no_grad()
def _merged_in_place(source: Any) -> nn.Linear:
    """A linear layer with the weight of the base of ``source``, into which its adapter is written."""
    base = source.base_layer
    linear, weight = nn.Linear(base.in_features, base.out_features, bias=False, device="meta"), base.weight.detach()
    weight.copy_(merged_weight(source, weight.float()))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = base.bias
    return linear


def _copied(base: PreTrainedModel, plan: DtypePlan) -> dict[int, Any]:
    """The linear layers that get a weight of their own, by the number (id) of the module that stands in the model.

    Of layers that share an input all are copied, so that their products can be one.
    """
    dtype = getattr(torch, plan.compute)
    found: dict[int, Any] = {}
    for layer in decoder_layers(base):
        alone = {id(module): module for module in _linears(layer) if _needs_copy(module, dtype)}
        found |= alone
        for names in _shared_inputs(base, layer):
            group = [_at(layer, name) for name in names]
            if any(id(one) in alone for one in group) and all(_is_copyable(one) for one in group):
                found |= {id(one): one for one in group}
    head = base.get_output_embeddings()
    if head is not None:
        found |= {id(module): module for module in _linears(head) if _needs_copy(module, dtype)}
    return found


def _shared_inputs(base: PreTrainedModel, layer: nn.Module) -> list[tuple[str, ...]]:
    """The linears of a layer that read one input, by their paths in it."""
    family = family_of(base.config.get_text_config().model_type)
    if family is None:
        return []
    kinds = [family.groups] if family.delta_nets is None else [family.groups, family.delta_groups]
    if family.latents is not None:
        kinds = [family.latent_groups(compressed=one) for one in (True, False)]
    found = [tuple(name for name in names if _at(layer, name) is not None) for groups in kinds for names in groups]
    return [names for names in dict.fromkeys(found) if len(names) > 1]


def _linears(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers of a module, itself among them; of a layer with adapters the whole, not its parts."""
    from peft.tuners.lora.layer import ParamWrapper

    if _is_copyable(module):
        yield module
        return
    if isinstance(module, ParamWrapper):  # whose A and B are multiplied beside what they adapt
        yield from _linears(module.base_layer)
        return
    for child in module.children():
        yield from _linears(child)


def _is_copyable(module: Any) -> bool:
    """True if a module is a linear layer, quantized or adapted or neither, that one matrix can stand for."""
    from peft.tuners.lora import Linear as LoraLinear

    base = module
    if isinstance(module, LoraLinear):
        base = module.base_layer
        several = len(module.active_adapters) != 1 or module.active_adapters[0] not in module.lora_A
        if module.fan_in_fan_out or module.merged or several or any(module.lora_bias.values()):
            return False
    if isinstance(base, QuantizedLinear):
        # What is multiplied as it is stored would be another product in another dtype.
        return quantizations.row(base.method).products is None
    if isinstance(base, TrainedQuantizedLinear):  # its weight is rounded before it is multiplied
        return False
    return isinstance(base, nn.Linear) and isinstance(base.weight, Tensor) and base.weight.is_floating_point()


def _needs_copy(module: Any, dtype: torch.dtype) -> bool:
    base = getattr(module, "base_layer", module)
    return _adapts(module) or isinstance(base, QuantizedLinear) or base.weight.dtype != dtype


def _adapts(module: Any) -> bool:
    """True if a layer has an adapter that is switched on."""
    return hasattr(module, "base_layer") and not module.disable_adapters


def _elements(linear: Any) -> int:
    base = getattr(linear, "base_layer", linear)
    return int(base.in_features) * int(base.out_features)


def _at(layer: nn.Module, name: str) -> nn.Module | None:
    module: Any = layer
    for part in name.split("."):
        module = getattr(module, part, None)
    return module if isinstance(module, nn.Module) else None


def _shadow(module: Any, copies: dict[int, nn.Linear], configs: dict[int, Any], made: dict[int, Any]) -> Any:
    """A module that shares its tensors with ``module``, and has ``copies`` and ``configs`` in their places."""
    if id(module) in copies:
        return copies[id(module)]
    if id(module) not in made:
        second = made[id(module)] = _alike(module)
        for name in ("_parameters", "_buffers", "_modules"):
            second.__dict__[name] = dict(module.__dict__[name])
        if id(module.__dict__.get("config")) in configs:
            second.__dict__["config"] = configs[id(module.__dict__["config"])]
        if isinstance(second, FusedDecoderLayer):
            second.stack = None
        for name, child in module._modules.items():
            second._modules[name] = None if child is None else _shadow(child, copies, configs, made)
    return made[id(module)]


def _alike(module: nn.Module) -> Any:
    """A shallow copy; of a layer that torch shards, as the class that it was, without what gathers its weights."""
    if not isinstance(module, FSDPModule):
        return copy.copy(module)
    kind: Any = next(kind for kind in type(module).__mro__[1:] if kind is not FSDPModule)
    second = kind.__new__(kind)
    second.__dict__.update(module.__dict__, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    return second


R = TypeVar("R")


def passes_in_step(
    group: RankGroup | None, model: PreTrainedModel | PeftModel, compute: Callable[[], R] | None
) -> R | None:
    """Runs ``compute``, any number of passes of ``model``, on each rank that has something to compute.

    Where the weights are sharded all ranks call this, and take part in the passes of all.

    Raises PeerFailed or RankLost when a rank is gone whose weights are needed.
    """
    if group is None or root_of(model) is None:
        return None if compute is None else compute()

    def announce(another: bool) -> bool:
        return any(told[0] for told in group.agree("generating", [another]))

    with group.exchanging():
        return forwards_in_step(model, compute, announce)


def led_by_first(group: RankGroup | None, model: PreTrainedModel | PeftModel, compute: Callable[[], R]) -> R | None:
    """:func:`passes_in_step` of rank 0 alone; None on the others."""
    return passes_in_step(group, model, compute if group is None or group.leads else None)


def generating(
    group: RankGroup | None,
    model: PreTrainedModel | PeftModel,
    compute: Callable[[PreTrainedModel | PeftModel], R] | None,
    *,
    whole: bool,
    merged_in: torch.dtype | None = None,
) -> R | None:
    """Runs ``compute`` with the model that it is to generate with. Where the weights are sharded all ranks call this.

    Args:
        whole: This rank has room for all weights. Where each has, they are gathered once, and no rank waits for what
            another one generates; else every pass gathers layer by layer, and all ranks make it.
        merged_in: As :func:`ftcli.generation.generator.unsharded_model`, for weights that are gathered once.

    Raises PeerFailed or RankLost when a rank is gone whose weights are needed.
    """
    if group is None or root_of(model) is None:
        return None if compute is None else compute(model)
    mine = compute
    if not all(told[0] for told in group.agree("gathering", [whole])):
        return passes_in_step(group, model, None if mine is None else lambda: mine(model))
    with group.exchanging():
        return with_whole_weights(model, lambda: None if mine is None else mine(unsharded_model(model, merged_in)))
