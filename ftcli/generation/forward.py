"""The model as generation calls it: prompts laid out one after the other, or one token a row; then the head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.adapter_packs import AdapterPacks
from ftkernels.limits import CACHE_PAGE
from torch import Tensor

from ftcli.data.collate import with_images
from ftcli.data.tokens import TokenizedRow
from ftcli.facts.generation import CacheShape, cache_shape
from ftcli.facts.shape import shape_of
from ftcli.generation.cache import NO_SLOT, Cache, Decode, Prefill, PromptStates
from ftcli.generation.requests import PromptImages
from ftcli.model import attention
from ftcli.model.backbone import base_of, decoder_layers, head_of, hidden_states, logits_of, root_of
from ftcli.model.fused import (
    UNPACKED,
    FusedDecoderLayer,
    LayerPacks,
    PreparedGroup,
    pack_stacks,
    packs_of,
    stacks_with_packs,
)
from ftcli.plan.precision import DtypePlan
from ftcli.tables.families import family_of
from ftcli.tables.images import TABLE

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def cache_dtype(model: PreTrainedModel | PeftModel, plan: DtypePlan) -> torch.dtype:
    """Dtype of keys and values: that of products under autocast, else the model's own."""
    dtype: torch.dtype = getattr(torch, plan.compute) if plan.autocast else base_of(model).dtype
    return dtype


def kept_shape(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> CacheShape:
    """What the model's layers keep of the tokens before, keys and values in ``dtype``.

    Raises TypeError for layers that :mod:`ftcli.facts.shape` does not describe.
    """
    shape = shape_of(base_of(model).config.get_text_config().to_dict())
    if shape is None:
        raise TypeError("the model's layers are not described")
    return cache_shape(shape, dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt's tokens and ``images``, the pages that take its keys and values, and the slot of its last states."""

    tokens: Sequence[int]
    pages: Sequence[int]
    slot: int = NO_SLOT
    images: PromptImages | None = None


class Forward:
    """Forward passes of one model, without gradients, in evaluation mode and under our attention.

    Args:
        model: Adapted or not, on the kernels or as transformers built it.
        suppressed: Ids that are never chosen (``suppress_tokens`` of a generation_config.json).
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, plan: DtypePlan, device: torch.device, suppressed: Sequence[int] = ()
    ) -> None:
        self.model = model
        self._plan = plan
        self._device = device
        self._head = head_of(model)  # refuses a head that cannot be read
        self._suppressed = torch.tensor(suppressed, dtype=torch.int64).to(device) if suppressed else None
        kind = TABLE.get(base_of(model).config.model_type)
        self._three_rows = kind is not None and kind.three_rows
        self._packed = _PackedAdapters(model, cache_dtype(model, plan))

    @property
    def why_not_captured(self) -> str | None:
        """The reason why a CUDA graph cannot hold a pass, as one clause; None if it can."""
        base = base_of(self.model)
        family = family_of(base.config.get_text_config().model_type)
        if family is None or family.experts is None:
            return None
        ours = all(isinstance(layer, FusedDecoderLayer) for layer in decoder_layers(base))
        return None if ours else "transformers' code of experts asks the device how many tokens each has"

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A block of calls; afterwards the model is as it was."""
        base, was_training = base_of(self.model), self.model.training
        before = None if attention.is_ours(base) else attention.use(base)
        self.model.eval()
        try:
            with torch.no_grad(), self._context(), self._packed.held():
                yield
        finally:
            if was_training:  # to say so to each of a thousand modules takes milliseconds
                self.model.train()
            if before is not None:
                attention.use(base, before)

    def prefill(self, prompts: Sequence[PlacedPrompt], cache: Cache) -> Tensor:
        """Logits after each prompt, (prompts, V); keys, values and states of all go to the cache."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        pages: list[int] = []
        for prompt, length in zip(prompts, lengths, strict=True):
            starts += [len(ids)] * length
            ids += prompt.tokens
            positions += range(length)
            pages += [prompt.pages[at // CACHE_PAGE] for at in range(length)]
        ids_, positions_, pages_ = (self._row(values) for values in (ids, positions, pages))
        starts_ = self._row(starts).to(torch.int32)
        last = torch.tensor(lengths).cumsum(0).to(self._device) - 1
        slots = self._row([prompt.slot for prompt in prompts])[0]
        own = PromptStates(starts_, last.to(torch.int32), slots) if cache.has_states else None
        inputs = {"input_ids": ids_, "position_ids": positions_, "document_starts": starts_}
        if any(prompt.images is not None for prompt in prompts):
            inputs = self._with_images(inputs, prompts)
        cached = Prefill(cache, pages_[0], positions_[0] % CACHE_PAGE, own)
        states = hidden_states(self.model, inputs, cached=cached).tensor[0]
        return self._logits(states[last])

    def _with_images(self, inputs: dict[str, Tensor], prompts: Sequence[PlacedPrompt]) -> dict[str, Tensor]:
        """The prompts' inputs with those of their images, as in training."""
        found = [one.images for one in prompts if one.images is not None]
        rows = [
            TokenizedRow(found[0].row.row, list(one.tokens), []) if one.images is None else one.images.of(one.tokens)
            for one in prompts
        ]
        batch = with_images({name: value.cpu() for name, value in inputs.items()}, [rows], found[0].pixels)
        return {name: value.to(self._device) for name, value in batch.items()}

    def decode(self, ids: Tensor, positions: Tensor, decode: Decode, shifts: Tensor | None = None) -> Tensor:
        """Logits after one more token of each row, (B, V). ``ids``, ``positions`` and ``shifts``: (B,) int64; the last
        is each row's :attr:`ftcli.generation.requests.PromptImages.shift`.
        """
        # A mask of ones keeps transformers from looking for documents, which would wait for the device.
        ones = torch.ones((ids.shape[0], 1), dtype=torch.bool, device=ids.device)
        where = positions[:, None]
        if self._three_rows and shifts is not None:
            where = torch.stack([where, *[where + shifts[:, None]] * 3])
        inputs = {"input_ids": ids[:, None], "position_ids": where, "attention_mask": ones}
        return self._logits(hidden_states(self.model, inputs, cached=decode).tensor[:, 0])

    def _context(self) -> torch.autocast:
        """The plan's, without autocast's cache on a GPU: what a CUDA graph has cast must be cast in each replay."""
        dtype, kind = getattr(torch, self._plan.compute), self._device.type
        return torch.autocast(kind, dtype=dtype, enabled=self._plan.autocast, cache_enabled=kind != "cuda")

    def _row(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)[None]

    def _logits(self, states: Tensor) -> Tensor:
        """cap(scale · head(h)): (N, H) -> (N, V), and -inf for what is suppressed."""
        logits = logits_of(self.model, self._head, states)
        return logits if self._suppressed is None else logits.index_fill(1, self._suppressed, float("-inf"))


class _PackedAdapters:
    """The adapters of layers on the kernels, packed once for all steps of a run: they do not change within it."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
        layers: Iterable[Any] = decoder_layers(base_of(model)) if root_of(model) is None else ()
        self._layers = [one for one in layers if isinstance(one, FusedDecoderLayer)]
        groups = [group for layer in self._layers for group in layer.groups()]
        self._packs = AdapterPacks(groups, dtype)
        self._experts = [stacks_with_packs(layer, dtype) for layer in self._layers]

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which the layers take them, as they are now."""
        self._packs.refresh()
        pack_stacks(self._experts)
        found = [PreparedGroup(packed) for packed in self._packs.packs]
        try:
            for layer, packs in zip(self._layers, LayerPacks.of_layers(found, packs_of(self._experts)), strict=True):
                layer.packs = packs
            yield
        finally:
            for layer in self._layers:
                layer.packs = UNPACKED
