"""The engine: one model, its key-value cache and states, and continuous batching of the rows that it decodes.

Rows that have ended leave, rows that wait enter, and the host does not wait for the device. A step of few tokens is
bound by the host, which would launch hundreds of small kernels; a CUDA graph launches them at once. There is one for
each number of rows that steps are made with, and each way to sample. The first steps of a size run as usual, which
compiles and chooses whatever is chosen on first use; then one is captured. All graphs share one pool of memory: they
never run at the same time, and their results lie outside of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ftkernels.limits import CACHE_PAGE
from ftkernels.sampling import GREEDY, NOT_FINITE, Sampling, choose
from torch import Tensor

from ftcli.facts.generation import PREFILL_TOKENS, EngineLayout, bucket_of, pages_of
from ftcli.generation.cache import NO_SLOT, Cache, Decode, PagePool, SlotPool
from ftcli.generation.forward import Forward, PlacedPrompt, cache_dtype, kept_shape
from ftcli.generation.requests import (
    Completion,
    GenerationRequest,
    NotFinite,
    StopCheck,
    StopConditions,
    StopReason,
    Token,
    collected,
)
from ftcli.plan.precision import DtypePlan


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
        ended: It saw one that ends the completion.
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

    @property
    def over(self) -> bool:
        """True if nothing more is to be asked of it."""
        return self.ended or self.issued >= self.limit


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
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.table = torch.zeros((size, table_pages), dtype=torch.int32, device=device)
        self.slots = torch.full((size,), NO_SLOT, dtype=torch.int32, device=device)
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
        self._put(self.slots, np.array([row.slot for row in rows] + [NO_SLOT] * (size - count), np.int32))
        self._put(self.seeds, np.array([row.seed for row in rows] + [0] * (size - count), np.int64))

    def _put(self, into: Tensor, values: np.ndarray) -> None:
        into[: len(values)].copy_(torch.from_numpy(values))

    def step(self, forward: Forward, cache: Cache, sampling: Sampling, size: int, longest: int | None) -> None:
        """One token of the first ``size`` rows, into ``tokens`` and ``logprobs``; the rows are then ready for the next.

        Nothing in it asks the device anything: it can be captured.
        """
        ids, lengths, counts = self.ids[:size], self.lengths[:size], self.counts[:size]
        positions = (lengths.long() - 1).clamp(min=0)
        decode = Decode(cache, self.table[:size], lengths, longest, slots=self.slots[:size])
        logits = forward.decode(ids, positions, decode)
        tokens, logprobs = choose(logits, sampling, self.seeds[:size], counts)
        self.tokens[:size] = tokens
        self.logprobs[:size] = logprobs
        ids.copy_(tokens.clamp(min=0))
        lengths.add_((lengths > 0).to(lengths.dtype))
        counts.add_(1)


#: Steps of a size and sampling that run as usual before one is captured.
_BEFORE = 2


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
        self._before: dict[tuple[int, Sampling], int] = {}
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}

    def step(self, sampling: Sampling) -> None:
        """One token of each row of the batch."""
        key = (self._batch.size, sampling)
        graph = self._graphs.get(key) or self._captured(key)
        if graph is None:
            self.status.without += 1
            self._run(key)
        else:
            self.status.replays += 1
            graph.replay()

    def _run(self, key: tuple[int, Sampling]) -> None:
        size, sampling = key
        longest = self._batch.longest if self._pool is None else None
        self._batch.step(self._forward, self._cache, sampling, size, longest)

    def _captured(self, key: tuple[int, Sampling]) -> torch.cuda.CUDAGraph | None:
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


#: New rows enter when one in so many places is free, so that several prompts are computed together.
_ENTER_SHARE = 8


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Parts of an engine that a schedule uses.

    ``rows``: most at once; ``ahead``: steps that the device may be behind the host.
    """

    forward: Forward
    cache: Cache
    pool: PagePool
    slots: SlotPool
    batch: DecodeBatch
    stepper: Stepper
    rows: int
    device: torch.device
    ahead: int


@dataclass(slots=True)
class _Started:
    """A request whose completions have not all begun: its prompt lies in ``pages``, the states after it in ``slot``.

    ``logits``: (V,) float32, after the prompt.
    """

    number: int
    request: GenerationRequest
    pages: list[int]
    slot: int
    logits: Tensor
    begun: int = 0


@dataclass(slots=True)
class _Copies:
    """What is copied in a cache before new rows go on: from where, and where to."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, source: int, target: int) -> None:
        """One more."""
        self.sources.append(source)
        self.targets.append(target)


@dataclass(frozen=True, slots=True)
class _Coming:
    """One token of each of ``rows``, on its way to the host; it has come when ``event`` is over, or None."""

    rows: tuple[DecodingRow, ...]
    tokens: Tensor
    logprobs: Tensor
    event: torch.cuda.Event | None


class Scheduler:
    """One run of an engine over some requests."""

    def __init__(
        self, tools: SchedulerParts, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck
    ) -> None:
        self._tools = tools
        self._sampling = sampling
        self._stopping = stopping
        self._waiting = deque(enumerate(requests))
        self._started: deque[_Started] = deque()
        self._active: list[DecodingRow] = []
        self._coming: deque[_Coming] = deque()

    def tokens(self) -> Iterator[Token]:
        """Yields tokens as they come; see :meth:`Engine.run`."""
        try:
            while self._waiting or self._started or self._active or self._coming:
                self._enter()
                if self._active:
                    self._step()
                while len(self._coming) > (self._tools.ahead if self._active else 0):
                    yield from self._look(self._coming.popleft())
                self._leave()
        finally:
            for row in self._active:
                self._free(row)
            for prompt in self._started:
                self._free(prompt)

    # -- a step ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        tools = self._tools
        if list(tools.batch.rows) != self._active:
            tools.batch.arrange(self._active, None)
        tools.stepper.step(self._sampling)
        for row in self._active:
            row.issued += 1
        count = len(self._active)
        self._bring(self._active, tools.batch.tokens[:count], tools.batch.logprobs[:count])

    def _bring(self, rows: Sequence[DecodingRow], tokens: Tensor, logprobs: Tensor) -> None:
        """Sends the host what was chosen, without waiting."""
        if tokens.device.type != "cuda":
            self._coming.append(_Coming(tuple(rows), tokens.clone(), logprobs.clone(), None))
            return
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, logprobs)]
        for into, tensor in zip(host, (tokens, logprobs), strict=True):
            into.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._coming.append(_Coming(tuple(rows), host[0], host[1], event))

    def _look(self, coming: _Coming) -> Iterator[Token]:
        """Tokens that have come; those after the end of a completion are dropped."""
        if coming.event is not None:
            coming.event.synchronize()
        for row, token, logprob in zip(coming.rows, coming.tokens.tolist(), coming.logprobs.tolist(), strict=True):
            if row.ended:
                continue
            if token == NOT_FINITE:
                raise NotFinite
            row.tokens.append(token)
            ended: StopReason | None = None
            if self._stopping.stopped(row.tokens):
                ended, row.ended = "stop", True
            elif len(row.tokens) == row.limit:
                ended = "limit"
            yield Token(row.request, row.completion, token, logprob, ended)

    def _leave(self) -> None:
        """Rows that are over free their pages and states. Steps that are still on their way may write to them, before
        whoever gets them next does.
        """
        for row in self._active:
            if row.over:
                self._free(row)
        self._active = [row for row in self._active if not row.over]

    def _free(self, one: DecodingRow | _Started) -> None:
        self._tools.pool.give_back(one.pages)
        self._tools.slots.give_back(one.slot)

    # -- new rows --------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Lets waiting rows in, as many as there are places and pages for, where enough places are free."""
        tools = self._tools
        free = tools.rows - len(self._active)
        if not (self._waiting or self._started) or (self._active and free < max(1, tools.rows // _ENTER_SHARE)):
            return
        new: list[DecodingRow] = []
        logits: list[Tensor] = []
        pages, slots = _Copies(), _Copies()
        while len(new) < free:
            if not self._started and not self._prefill(free - len(new)):
                break
            row = self._begin(self._started[0], pages, slots)
            if row is None:
                break
            new.append(row)
            logits.append(self._started[0].logits)
            if self._started[0].begun == len(self._started[0].request.seeds):
                self._started.popleft()
        if new:
            tools.cache.copy_pages(pages.sources, pages.targets)
            tools.cache.copy_states(slots.sources, slots.targets)
            self._choose_first(new, logits)
        elif not self._active:
            raise RuntimeError("the cache is too small for a single sequence")

    def _prefill(self, places: int) -> bool:
        """Computes prompts that wait: no more than ``places`` need, than fit a pass, and than there are pages for."""
        tools = self._tools
        chosen: list[tuple[int, GenerationRequest]] = []
        tokens, needed, completions = 0, 0, 0
        while self._waiting and completions < places:
            number, request = self._waiting[0]
            size = len(request.prompt)
            pages = pages_of(size + request.limit)  # of the prompt and of a first completion
            too_much = tokens + size > PREFILL_TOKENS[tools.device.type]
            if (chosen and too_much) or needed + pages + len(chosen) > tools.pool.free:
                break
            chosen.append((number, request))
            self._waiting.popleft()
            tokens, needed, completions = tokens + size, needed + pages, completions + len(request.seeds)
        if not chosen:
            return False
        taken = [(tools.pool.take(pages_of(len(request.prompt))), tools.slots.take()) for _, request in chosen]
        prompts = [PlacedPrompt(request.prompt, *where) for (_, request), where in zip(chosen, taken, strict=True)]
        logits = tools.forward.prefill(prompts, tools.cache)
        for (number, request), where, one in zip(chosen, taken, logits, strict=True):
            self._started.append(_Started(number, request, *where, one))
        return True

    def _begin(self, started: _Started, copied_pages: _Copies, copied_slots: _Copies) -> DecodingRow | None:
        """The next completion of a request; None while there are no pages for it.

        Completions share the pages that their prompt fills. Of a page that it fills in part, and of its states, each
        gets a copy, but the last one, which takes all that the prompt has.
        """
        request, pool = started.request, self._tools.pool
        size = len(request.prompt)
        full = size // CACHE_PAGE
        last = started.begun + 1 == len(request.seeds)
        prompt_pages = started.pages if last else started.pages[:full]
        own = pages_of(size + request.limit) - len(prompt_pages)
        if own > pool.free:
            return None
        if not last:
            pool.share(prompt_pages)
        pages = pool.take(own)
        slot = started.slot
        if not last:
            if full < len(started.pages):
                copied_pages.add(started.pages[full], pages[0])
            slot = self._tools.slots.take()
            copied_slots.add(started.slot, slot)
        seed, every = request.seeds[started.begun], [*prompt_pages, *pages]
        row = DecodingRow(started.number, started.begun, seed, size, request.limit, every, slot)
        started.begun += 1
        return row

    def _choose_first(self, new: list[DecodingRow], logits: list[Tensor]) -> None:
        """The first token of each new row, from its prompt's logits; then the rows join the others."""
        tools = self._tools
        seeds = torch.tensor([row.seed for row in new], dtype=torch.int64).to(tools.device)
        tokens, logprobs = choose(torch.stack(logits), self._sampling, seeds, torch.zeros_like(seeds))
        for row in new:
            row.issued = 1
        self._bring(new, tokens, logprobs)
        going_on = [at for at, row in enumerate(new) if not row.over]
        for row in new:
            if row.over:
                self._free(row)
        self._active += [new[at] for at in going_on]
        chosen = tokens[torch.tensor(going_on, dtype=torch.int64, device=tokens.device)]
        if self._active:
            tools.batch.arrange(self._active, chosen)


#: Steps that a GPU is given before the host looks at the first one's tokens. For a row that has ended, so many more are
#: computed and thrown away.
AHEAD = 4


class Engine:
    """Generates with one model, whose weights may change in place between runs.

    Args:
        layout: Rows and pages that there is room for (:func:`ftcli.facts.generation.choose_layout`).
        longest: Most tokens of a sequence, prompt and completion.
        graphs: Decode by CUDA graphs where there is a GPU and the layers can be captured.
        ahead: As ``AHEAD``; less for someone who waits for each token.
    """

    def __init__(
        self,
        forward: Forward,
        layout: EngineLayout,
        longest: int,
        plan: DtypePlan,
        device: torch.device,
        *,
        graphs: bool = True,
        ahead: int = AHEAD,
    ) -> None:
        dtype = cache_dtype(forward.model, plan)
        on_gpu = device.type == "cuda"
        cache = Cache(kept_shape(forward.model, dtype), layout, dtype, device)
        batch = DecodeBatch(layout.rows, pages_of(longest), device)
        self.layout = layout
        self.stepper = Stepper(forward, cache, batch, stopped=why_no_graphs(forward, device, wanted=graphs))
        self._longest = longest
        self._tools = SchedulerParts(
            forward, cache, PagePool(layout.pages), SlotPool(cache.slots), batch, self.stepper, layout.rows, device,
            ahead if on_gpu else 0,
        )  # fmt: skip

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in the order of its seeds. Raises as :meth:`run`."""
        return collected(requests, self.run(requests, sampling, stopping))

    def run(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> Generator[Token, None, None]:
        """Tokens as they come, those of one completion in order. Closing the iterator ends generation.

        Raises:
            NotFinite: the model's logits are not finite.
            ValueError: a request has more tokens than a sequence of this engine.
        """
        for request in requests:
            if len(request.prompt) + request.limit > self._longest:
                raise ValueError(f"{len(request.prompt)} + {request.limit} tokens do not fit {self._longest}")
        with self._tools.forward.generating():
            scheduler = Scheduler(self._tools, requests, sampling, stopping or StopCheck(StopConditions(), None))
            yield from scheduler.tokens()
