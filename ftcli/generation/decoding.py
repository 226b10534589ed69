"""The model as generation calls it: prompts laid out one after the other, or one token a row; then the head.

Rows are decoded together. A step of few tokens is bound by the host, which would launch hundreds of small kernels; a
CUDA graph launches them at once. There is one for each number of rows that steps are made with, and each way to sample.
The first steps of a size run as usual, which compiles and chooses whatever is chosen on first use; then one is
captured. All graphs share one pool of memory: they never run at the same time, and their results lie outside of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ftkernels.decode_attention import LINE, SharedPages
from ftkernels.limits import CACHE_PAGE
from ftkernels.projection import AdapterPacks
from ftkernels.sampling import Sampling, choose
from torch import Tensor

from ftcli.data.collate import with_images
from ftcli.data.tokens import TokenizedRow
from ftcli.facts.generation import CacheShape, bucket_of, cache_shape
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
    """Shape of the cache of the model's layers, keys and values in ``dtype``.

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


@dataclass(eq=False, slots=True)
class DecodingRow:
    """One completion that is being generated.

    Attributes:
        request, completion: Whose it is.
        prompt: Tokens of its prompt.
        pages: Its pages of the cache, in order.
        slot: Its states.
        issued: Tokens that have been asked of the device; the host may not have seen the last few.
        tokens: Those that it has seen.
        ended: It saw one that ends the completion, or this turn of it.
        given: Tokens that stand in the place of what the next steps choose.
        turn: Tokens before the ones of this turn.
        waits: It has ended a turn, and keeps its pages for the next one.
        shift: How much further its positions are than its tokens, behind images.
    """

    request: int
    completion: int
    seed: int
    prompt: int
    limit: int
    pages: list[int]
    slot: int = NO_SLOT
    issued: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    given: deque[int] = field(default_factory=deque)
    turn: int = 0
    waits: bool = False
    shift: int = 0

    @property
    def over(self) -> bool:
        """True if nothing more is to be asked of it."""
        return self.ended or self.issued >= self.limit

    @property
    def shared(self) -> int:
        """Pages that its prompt fills, which all completions of it begin with."""
        return self.prompt // CACHE_PAGE


class DecodeBatch:
    """State of up to ``rows`` rows on the device; graphs read and write it in place, so it stays where it is.

    Args:
        longest: Most tokens of a row, prompt and completion.
    """

    def __init__(self, rows: int, table_pages: int, device: torch.device) -> None:
        size = bucket_of(rows)
        self._device = device
        self._rows: list[DecodingRow] = []
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        self.shifts = torch.zeros(size, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.table = torch.zeros((size, table_pages), dtype=torch.int32, device=device)
        self.slots = torch.full((size,), NO_SLOT, dtype=torch.int32, device=device)
        #: Whether rows of one request are told as such: where some have several completions.
        self.shares = False
        self.shared = SharedPages(
            torch.full((size, LINE), -1, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
        )
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(size, dtype=torch.float32, device=device)

    @property
    def rows(self) -> Sequence[DecodingRow]:
        """The rows, in their order on the device."""
        return self._rows

    @property
    def size(self) -> int:
        """Rows that a step computes: those that are there, and empty ones."""
        return bucket_of(len(self._rows))

    @property
    def longest(self) -> int:
        """Tokens of the longest row in the next step."""
        return max(row.prompt + row.issued for row in self._rows)

    def arrange(self, rows: Sequence[DecodingRow], first_tokens: Tensor | None) -> None:
        """Takes ``rows`` in place of what was there.

        Args:
            rows: Some of those that are there, then those that are new.
            first_tokens: (new rows,) int64, what the prompts' logits gave.
        """
        where = {id(row): at for at, row in enumerate(self._rows)}
        kept = [where[id(row)] for row in rows if id(row) in where]
        parts = [self.ids[torch.tensor(kept, dtype=torch.int64, device=self._device)]]
        if first_tokens is not None:
            parts.append(first_tokens.clamp(min=0))
        self._rows = list(rows)
        count, size = len(rows), self.size
        self.ids[:count] = torch.cat(parts)
        self.ids[count:] = 0
        table = np.zeros((size, self.table.shape[1]), dtype=np.int32)
        for at, row in enumerate(rows):
            table[at, : len(row.pages)] = row.pages
        self._put(self.table, table)
        # The token that goes in next is the last one that was issued: it has this number among the row's tokens.
        self._put(self.lengths, np.array([row.prompt + row.issued for row in rows] + [0] * (size - count), np.int32))
        self._put(self.counts, np.array([row.issued for row in rows] + [0] * (size - count), np.int64))
        self._put(self.shifts, np.array([row.shift for row in rows] + [0] * (size - count), np.int64))
        self._put(self.slots, np.array([row.slot for row in rows] + [NO_SLOT] * (size - count), np.int32))
        if self.shares:
            self._put(self.shared.members, lines_of([row.request for row in rows], size))
            self._put(self.shared.pages, np.array([row.shared for row in rows] + [0] * (size - count), np.int32))
        self._put(self.seeds, np.array([row.seed for row in rows] + [0] * (size - count), np.int64))

    def replace(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Puts tokens in the places of what the last step has chosen for some rows: (row, token) each."""
        places, values = zip(*tokens, strict=True)
        self.ids[torch.tensor(places, device=self._device)] = torch.tensor(values, device=self._device)

    def _put(self, into: Tensor, values: np.ndarray) -> None:
        into[: len(values)].copy_(torch.from_numpy(values))

    def step(self, forward: Forward, cache: Cache, sampling: Sampling, size: int, longest: int | None) -> None:
        """One token of the first ``size`` rows, into ``tokens`` and ``logprobs``; the rows are then ready for the next.

        Nothing in it asks the device anything: it can be captured.
        """
        ids, lengths, counts = self.ids[:size], self.lengths[:size], self.counts[:size]
        positions = (lengths.long() - 1).clamp(min=0)
        shared = SharedPages(self.shared.members[:size], self.shared.pages[:size]) if self.shares else None
        decode = Decode(cache, self.table[:size], lengths, longest, slots=self.slots[:size], shared=shared)
        logits = forward.decode(ids, positions, decode, self.shifts[:size])
        tokens, logprobs = choose(logits, sampling, self.seeds[:size], counts)
        self.tokens[:size] = tokens
        self.logprobs[:size] = logprobs
        ids.copy_(tokens.clamp(min=0))
        lengths.add_((lengths > 0).to(lengths.dtype))
        counts.add_(1)


def lines_of(requests: Sequence[int], size: int) -> np.ndarray:
    """(size, LINE) int32: rows of the same request in each line, -1 behind them (:class:`SharedPages`)."""
    rows: dict[int, list[int]] = {}
    for at, request in enumerate(requests):
        rows.setdefault(request, []).append(at)
    lines = [same[at : at + LINE] for same in rows.values() for at in range(0, len(same), LINE)]
    made = np.full((size, LINE), -1, dtype=np.int32)
    for into, line in zip(made, lines, strict=False):
        into[: len(line)] = line
    return made


#: Steps of a size and sampling that run as usual before one is captured.
_BEFORE = 2


#: What a graph is captured for: rows, how they are sampled, whether pages are shared.
_Key = tuple[int, Sampling, bool]


@dataclass(slots=True)
class StepStatus:
    """State of an engine's CUDA graphs: sizes captured, steps by graphs and without, why they were given up."""

    sizes: list[int] = field(default_factory=list)
    replays: int = 0
    without: int = 0
    stopped: str | None = None


class Stepper:
    """Runs the steps of a batch, by graphs unless there is a reason against them (``stopped``)."""

    def __init__(self, forward: Forward, cache: Cache, batch: DecodeBatch, *, stopped: str | None) -> None:
        self.status = StepStatus(stopped=stopped)
        self._forward = forward
        self._cache = cache
        self._batch = batch
        self._pool: Any = None
        self._before: dict[_Key, int] = {}
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}

    def step(self, sampling: Sampling) -> None:
        """One token of each row of the batch."""
        key = (self._batch.size, sampling, self._batch.shares)
        graph = self._graphs.get(key) or self._captured(key)
        if graph is None:
            self.status.without += 1
            self._run(key)
        else:
            self.status.replays += 1
            graph.replay()

    def _run(self, key: _Key) -> None:
        size, sampling, _ = key
        longest = self._batch.longest if self._pool is None else None
        self._batch.step(self._forward, self._cache, sampling, size, longest)

    def _captured(self, key: _Key) -> torch.cuda.CUDAGraph | None:
        """A graph of steps like this one; None where it runs as usual. Capturing does not run anything."""
        if self.status.stopped is not None:
            return None
        self._before[key] = self._before.get(key, 0) + 1
        if self._before[key] <= _BEFORE:
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run(key)
        except torch.OutOfMemoryError:
            self.give_up("no memory was left for another CUDA graph")
            return None
        self._graphs[key] = graph
        self.status.sizes.append(key[0])
        return graph

    def give_up(self, reason: str) -> None:
        """Frees what graphs keep to themselves; steps go on without them."""
        self.status.stopped = reason
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()


def why_no_graphs(forward: Forward, device: torch.device, *, wanted: bool) -> str | None:
    """The reason why steps are run one kernel after the other, as one clause; None if CUDA graphs hold them."""
    if device.type != "cuda":
        return "CUDA graphs need a GPU"
    return forward.why_not_captured if wanted else "CUDA graphs were not asked for"
