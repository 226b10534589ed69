"""A model's parts (decoder layers, backbone, head), and the way from token ids to hidden states.

Hidden states and logits are different types here. The field's recurring bug is a loss that is given logits and
multiplies them by the head again ("a and b must have same reduction dim, but got [s0, 32000] X [4096, 32000]"). So
:class:`HiddenStates` are only made from the backbone's output, and :mod:`ftcli.model.loss` checks them against the head
before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from ftkernels.linear_cross_entropy import HeadGradient, TrainedRows, tied_embedding
from torch import Tensor, nn

from ftcli.facts.model import LOGIT_CAPS, LOGIT_MULTIPLIERS
from ftcli.model import attention
from ftcli.model.masks import CallMask, Documents, plain_mask
from ftcli.model.token_rows import with_rows
from ftcli.model.vision import SeenInputs, masks_both_ways, see, taken_apart
from ftcli.tables.families import family_of
from ftcli.tables.packing import why_documents_leak

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.attention import AttentionCache
    from ftcli.model.sequence_parallel import SequencePart

T = TypeVar("T")

#: Attribute of a model that holds its FSDP root.
_ROOT = "_ftcli_sharded_root"


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Output of the last norm: ``tensor`` of shape (batch, seq_len, hidden_size), any floating dtype."""

    tensor: Tensor

    def rows(self, positions: Tensor) -> Tensor:
        """(R, hidden_size), those at ``positions`` (R,) int64 of the (batch * seq_len), each of which is there once."""
        return self.tensor.reshape(-1, self.tensor.shape[-1]).index_select(0, positions)


@dataclass(frozen=True, slots=True)
class Head:
    """The language-model head: logits = cap(scale · (hidden @ weight.T + bias)).

    ``weight`` has shape (vocab_size, hidden_size); ``softcap`` 0 is off, else cap(x) = softcap · tanh(x / softcap).
    ``handed`` takes the weight's gradient where the embedding adds its own to it (:mod:`ftcli.model.backbone`);
    ``is_sharded`` where ranks hold shards of the model; ``rows`` are those of the weight that are trained, where the
    others are not (:mod:`ftcli.model.token_rows`).
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float
    logit_scale: float
    handed: HeadGradient | None = None
    is_sharded: bool = False
    rows: TrainedRows | None = None


class CollectingStack(Protocol):
    """The decoder layers as one function: :class:`ftcli.model.fused.DecoderStack`."""

    def collecting(self) -> AbstractContextManager[None]:
        """A block with one forward pass, in which the layers hand their calls on."""
        ...


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model beneath a PEFT wrapper, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def backbone_of(base: PreTrainedModel) -> nn.Module:
    """Everything but the head: what turns token ids into hidden states."""
    found = getattr(base, base.base_model_prefix, None)
    # Llama-4's text model names the prefix of the model that it was cut out of.
    backbone: nn.Module = found if found is not None and found is not base else base.model
    return backbone


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of the language model, also where that is a part of a model with other towers.

    Raises TypeError where transformers keeps them in no list of their number.
    """
    count = base.config.get_text_config().num_hidden_layers
    for module in base.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TypeError(f"{type(base).__name__} has no list of {count} decoder layers")


def stream_in(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
    """Has the residual stream begin in ``dtype``, in which it then stays: embeddings are held wider where they are
    trained, and nothing else would round what they give.
    """

    def rounded(_module: nn.Module, _given: object, output: Tensor) -> Tensor:
        return output.to(dtype)

    base_of(model).get_input_embeddings().register_forward_hook(rounded)


def hidden_states(
    model: PreTrainedModel | PeftModel,
    inputs: Mapping[str, Tensor],
    stack: CollectingStack | None = None,
    cached: AttentionCache | None = None,
    sequence: SequencePart | None = None,
) -> HiddenStates:
    """Runs the backbone (everything but the head) on ``input_ids``, ``attention_mask`` and the like.

    With ``document_starts`` (:class:`ftcli.model.masks.Documents`) no document sees another one. transformers' own
    attention reads that off ``position_ids`` which begin anew; ours gets the boundaries, and ``branch_starts`` where
    documents branch. Layers that carry a state know of documents by their boundaries alone, and so do those of families
    of whose documents transformers' masks know nothing.

    Args:
        stack: The model's layers as one function (:mod:`ftcli.model.fused`), for inputs without a padding mask.
        cached: The cache of keys and values that our attention reads and writes, in generation.
        sequence: Where ranks share rows: ``inputs`` are this rank's part of them, but for ``document_starts``.

    Raises:
        ValueError: Rows are shared or branch, and attention is not ours.
    """
    base = base_of(model)
    inputs, of_images = taken_apart(inputs)
    own = ("document_starts", "branch_starts", "rope_positions", "block_ends")
    given: dict[str, Any] = {name: value for name, value in inputs.items() if name not in own}
    ids, starts = inputs["input_ids"], inputs.get("document_starts")
    text_type = base.config.get_text_config().model_type
    family, untold = family_of(text_type), why_documents_leak(text_type) is not None
    # Layers with a state take no mask of ones, and wrappers that look both ways within images say of one "not causal".
    told = (family is not None and family.delta_nets is not None) or looks_both_ways(base.config.get_text_config())
    tells = stack is not None or "block_ends" in inputs
    if starts is None and (tells or (untold and cached is None and "attention_mask" not in inputs)):
        starts = _document_starts(ids, inputs.get("position_ids"))
    if starts is not None and attention.is_ours(base):
        # A mask of ones keeps transformers from looking for documents, which would wait for the device.
        given["attention_mask"] = _unpadded(base, ids) if told else torch.ones_like(ids, dtype=torch.bool)
        blocks, windowed = inputs.get("block_ends"), looks_both_ways(base.config.get_text_config())
        given["documents"] = Documents(starts, sequence, inputs.get("branch_starts"), blocks, windowed)
    elif sequence is not None:
        raise ValueError("ranks share rows around our own attention only")
    elif "branch_starts" in inputs:
        raise ValueError("documents branch within our own attention only")
    positions = given.get("position_ids")
    if positions is not None and family is not None and family.four_positions and positions.dim() < 3:
        given["position_ids"] = positions.expand(4, *ids.shape)
    if cached is not None:
        given["cached"] = cached
    backbone: Any = backbone_of(base)
    if of_images:
        if sequence is not None:
            raise ValueError("ranks cannot share rows with images")
        backbone = base.get_decoder()
        given |= _seen(base, given.pop("input_ids"), inputs, of_images, stack)
    with nullcontext() if stack is None else stack.collecting():
        return HiddenStates(backbone(**given, use_cache=False).last_hidden_state)


def _seen(
    base: PreTrainedModel,
    ids: Tensor,
    inputs: Mapping[str, Tensor],
    of_images: Mapping[str, Tensor],
    stack: CollectingStack | None,
) -> dict[str, Any]:
    """The language model's arguments, in place of ids (B, S), where a batch has images."""
    seen, positions = see(base, ids, of_images), inputs["position_ids"]
    found = {"inputs_embeds": seen.embeds, **seen.of_tokens, **_added(seen, ids, stack)}
    if "rope_positions" in inputs:
        found["position_ids"] = torch.cat([positions.expand(1, *ids.shape), inputs["rope_positions"]])
    if "block_ends" in inputs and not attention.is_ours(base):
        found["attention_mask"] = masks_both_ways(base, seen.embeds, inputs["block_ends"], positions)
    return found


def _added(seen: SeenInputs, ids: Tensor, stack: CollectingStack | None) -> dict[str, Any]:
    """How what is added to the first layers' outputs reaches them: through the stack, or transformers' own way."""
    if not seen.added:
        return {}
    if stack is not None:
        return {"layer_inputs": seen.added}
    mask = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, seen.places, True)
    return {"visual_pos_masks": mask.view_as(ids), "deepstack_visual_embeds": list(seen.seen.added)}


def looks_both_ways(config: Any) -> bool:
    """True if text tokens of an image see each other (Gemma-4's larger sizes), by the text model's config."""
    return getattr(config, "use_bidirectional_attention", None) == "vision"


def _unpadded(base: PreTrainedModel, ids: Tensor) -> dict[str, CallMask | None]:
    """The masks of whole rows by the kinds of layers: of a mask of ones transformers would ask the device whether it is
    one, or lay images over it where there are none.
    """
    config = base.config.get_text_config()
    masks: dict[str, CallMask | None] = {"linear_attention": None, "full_attention": plain_mask(ids)}
    if "sliding_attention" in config.layer_types:
        masks["sliding_attention"] = plain_mask(ids, window=config.sliding_window)
    return {kind: masks[kind] for kind in set(config.layer_types)}


def _document_starts(ids: Tensor, positions: Tensor | None) -> Tensor:
    """:attr:`ftcli.model.masks.Documents.starts` of rows whose positions begin anew with each document."""
    if positions is None:
        return torch.zeros((1, 1), dtype=torch.int32, device=ids.device)
    return (torch.arange(ids.shape[1], device=ids.device) - positions).to(torch.int32)


def head_of(model: PreTrainedModel | PeftModel) -> Head:
    """The model's head with the scaling that its config asks for.

    Raises TypeError when the weight is not a floating (vocab_size, hidden_size) matrix, as when it is packed.
    """
    base = base_of(model)
    layer, rows = with_rows(base.get_output_embeddings())
    config = base.config.get_text_config()
    weight: Tensor = layer.weight
    # OPT's smallest head is narrower than its layers; what it is multiplied by is checked in next_token_loss.
    width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] != width:
        raise TypeError(
            f"the head's weight is {weight.dtype} of shape {tuple(weight.shape)}; "
            f"expected a floating (vocab_size, {width})"
        )
    scale = next((found for name in LOGIT_MULTIPLIERS if (found := getattr(config, name, None)) is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    cap = next((found for name in LOGIT_CAPS if (found := getattr(config, name, None))), None)
    embedding = base.get_input_embeddings()
    return Head(
        weight=weight,
        bias=getattr(layer, "bias", None),
        softcap=float(cap or 0.0),
        logit_scale=float(scale) if scale is not None else 1.0 / scaling if scaling else 1.0,
        handed=embedding.head_gradient if isinstance(embedding, TiedEmbedding) else None,
        is_sharded=root_of(model) is not None,
        rows=rows,
    )


def logits_of(model: PreTrainedModel | PeftModel, head: Head, states: Tensor) -> Tensor:
    """cap(scale · head(h)): (N, H) -> (N, V), in float32 where anything is computed after the product."""
    layer: Any = base_of(model).get_output_embeddings()
    logits: Tensor = layer(states)
    if head.logit_scale == 1.0 and not head.softcap:
        return logits
    logits = logits.float()
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


def within_root(model: PreTrainedModel | PeftModel, compute: Callable[[], T]) -> T:
    """Runs ``compute`` inside the FSDP root's forward, with embedding, last norm and head all-gathered.

    Without sharded weights it is just called. With them all ranks call this; each layer is gathered in its own call.
    """
    root: Any = root_of(model)
    found: T = compute() if root is None or root.running else root(compute)
    return found


def root_of(model: PreTrainedModel | PeftModel) -> nn.Module | None:
    """The FSDP root of a model with sharded weights (:mod:`ftcli.model.fsdp`), or None."""
    found: nn.Module | None = vars(base_of(model)).get(_ROOT)
    return found


def set_root(base: PreTrainedModel, root: nn.Module | None) -> None:
    """Has :func:`within_root` call ``root``, or nothing."""
    object.__setattr__(base, _ROOT, root)  # not a submodule: it holds the model itself


@contextmanager
def rotation_kept(model: nn.Module) -> Iterator[None]:
    """Puts back the rotary tables that a forward pass inside changes: with dynamic scaling they grow with the longest
    sequence that a model has seen, and a check must not leave a trace.
    """
    rotary: list[Any] = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    kept = [(m, m.max_seq_len_cached, {n: b.clone() for n, b in m.named_buffers(recurse=False)}) for m in rotary]
    try:
        yield
    finally:
        for module, longest, buffers in kept:
            module.max_seq_len_cached = longest
            for name, value in buffers.items():
                setattr(module, name, value)


def compute_context(device: torch.device, compute: str, autocast: bool) -> torch.autocast:
    """Autocast to the plan's compute dtype; disabled when the parameters already hold it."""
    return torch.autocast(device.type, dtype=getattr(torch, compute), enabled=autocast)


class TiedEmbedding(nn.Embedding):
    """Takes the place of an ``nn.Embedding`` with its weight. ``head_gradient`` is what the head hands its own to."""

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight
        rows, columns = weight.shape
        super().__init__(rows, columns, padding_idx=embedding.padding_idx, _weight=weight.detach())
        self.weight = embedding.weight
        self.head_gradient = HeadGradient()
        self.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        """(...) int64 -> (..., H)."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return tied_embedding(input, self.weight, self.head_gradient, self.padding_idx)
        return super().forward(input)


def use_tied_embedding(base: PreTrainedModel) -> bool:
    """Has embedding and head of a model that is trained whole make one gradient, where they are one weight; whether
    they are.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not nn.Embedding or head is None or head.weight is not embedding.weight:
        return False
    if not embedding.weight.requires_grad or embedding.scale_grad_by_freq or embedding.max_norm is not None:
        return False
    name = next(name for name, module in base.named_modules() if module is embedding)
    tied = TiedEmbedding(embedding)
    tied._forward_hooks.update(embedding._forward_hooks)  # such as rounding what it gives
    base.set_submodule(name, tied)
    return True
