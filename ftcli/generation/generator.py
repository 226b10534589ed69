"""Opens a generator for a model: the engine or transformers, and how much memory it may take."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from ftkernels.device import dtype_name, gpu_of
from ftkernels.limits import why_no_decode_attention
from ftkernels.sampling import GREEDY, Sampling

from ftcli.config.model import Kernels
from ftcli.facts.generation import choose_layout, why_no_engine
from ftcli.generation.engine import AHEAD, Engine
from ftcli.generation.fallback import TransformersGenerator
from ftcli.generation.forward import Forward, cache_dtype, kept_shape
from ftcli.generation.merged import MergedModel, copied_bytes, merged_model
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, Token
from ftcli.generation.turns import Turns
from ftcli.model.backbone import base_of, decoder_layers, head_of, root_of
from ftcli.model.fused import FusedDecoderLayer
from ftcli.plan.precision import DtypePlan
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

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
    """Completes requests: :class:`ftcli.generation.engine.Engine`, or transformers behind its interface."""

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]: ...

    def converse(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck, turns: Turns
    ) -> list[list[Completion]]: ...

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

    generator: Completer
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
) -> OpenedGenerator:
    """Opens a generator of up to ``rows`` sequences of up to ``longest`` tokens at once.

    Args:
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
    layout = choose_layout(shape, rows, longest, room_bytes=room, copy_bytes=copied)
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
