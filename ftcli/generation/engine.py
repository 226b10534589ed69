"""The engine: one model, its key-value cache and states, and continuous batching of the rows that it decodes.

Rows that have ended leave, rows that wait enter, and the host does not wait for the device. A completion of several
turns keeps its pages between them: what stands between two turns goes through the model token by token, beside the
tokens of other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from ftkernels.limits import CACHE_PAGE
from ftkernels.sampling import GREEDY, NOT_FINITE, Sampling, choose
from torch import Tensor

from ftcli.facts.generation import PREFILL_TOKENS, EngineLayout, pages_of
from ftcli.generation.cache import Cache, PagePool, SlotPool
from ftcli.generation.decoding import (
    DecodeBatch,
    DecodingRow,
    Forward,
    PlacedPrompt,
    Stepper,
    cache_dtype,
    kept_shape,
    why_no_graphs,
)
from ftcli.generation.requests import (
    Completion,
    GenerationRequest,
    NotFinite,
    StopCheck,
    StopConditions,
    StopReason,
    Token,
    Turns,
    collected,
    in_rounds,
)
from ftcli.plan.precision import DtypePlan

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
    """Copies in a cache that new rows need before they are decoded: from where, and where to."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, source: int, target: int) -> None:
        """One more."""
        self.sources.append(source)
        self.targets.append(target)


@dataclass(frozen=True, slots=True)
class _Coming:
    """One token of each of ``rows``, on its way to the host; it has come when ``event`` is over, or None.

    ``given`` are those that stand in the place of what was chosen, by row.
    """

    rows: tuple[DecodingRow, ...]
    tokens: Tensor
    logprobs: Tensor
    event: torch.cuda.Event | None
    given: Mapping[int, int] = field(default_factory=dict)


class Scheduler:
    """One run of an engine over some requests."""

    def __init__(
        self,
        tools: SchedulerParts,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        stopping: StopCheck,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        #: Rows between two turns, by request and completion; and those that have got what stands between them.
        self._between: dict[tuple[int, int], DecodingRow] = {}
        #: Rows of which all tokens are asked, but the host has not seen yet whether a turn has ended among them.
        self._unseen: list[DecodingRow] = []
        self._returning: deque[DecodingRow] = deque()
        self._tools = tools
        tools.batch.shares = any(len(one.seeds) > 1 and len(one.prompt) >= CACHE_PAGE for one in requests)
        self._sampling = sampling
        self._stopping = stopping
        self._waiting = deque(enumerate(requests))
        self._started: deque[_Started] = deque()
        self._active: list[DecodingRow] = []
        self._coming: deque[_Coming] = deque()

    def tokens(self) -> Iterator[Token]:
        """Yields tokens as they come; see :meth:`Engine.run`."""
        try:
            while self._waiting or self._started or self._active or self._coming or self._between or self._returning:
                self._go_on(wait=False)
                self._enter()
                if not self._active:  # what is given is waited for where nothing else can be computed
                    self._go_on(wait=not self._coming)
                if self._active:
                    self._step()
                while len(self._coming) > (self._tools.ahead if self._active else 0):
                    yield from self._look(self._coming.popleft())
                self._leave()
        finally:
            for row in (*self._active, *self._unseen, *self._between.values(), *self._returning):
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
        given = {at: row.given.popleft() for at, row in enumerate(self._active) if row.given}
        if given:
            tools.batch.replace(list(given.items()))
        count = len(self._active)
        self._bring(self._active, tools.batch.tokens[:count], tools.batch.logprobs[:count], given)

    def _bring(
        self, rows: Sequence[DecodingRow], tokens: Tensor, logprobs: Tensor, given: Mapping[int, int] | None = None
    ) -> None:
        """Sends the host what was chosen, without waiting."""
        given = given or {}
        if tokens.device.type != "cuda":
            self._coming.append(_Coming(tuple(rows), tokens.clone(), logprobs.clone(), None, given))
            return
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, logprobs)]
        for into, tensor in zip(host, (tokens, logprobs), strict=True):
            into.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._coming.append(_Coming(tuple(rows), host[0], host[1], event, given))

    def _look(self, coming: _Coming) -> Iterator[Token]:
        """Tokens that have come; those after the end of a completion are dropped."""
        if coming.event is not None:
            coming.event.synchronize()
        chosen = zip(coming.rows, coming.tokens.tolist(), coming.logprobs.tolist(), strict=True)
        for at, (row, token, logprob) in enumerate(chosen):
            if row.ended:
                continue
            if token == NOT_FINITE:
                raise NotFinite
            if at in coming.given:
                row.tokens.append(coming.given[at])
                yield Token(row.request, row.completion, coming.given[at], 0.0, None, given=True)
                continue
            row.tokens.append(token)
            ended: StopReason | None = None
            if self._stopping.stopped(row.tokens[row.turn :]):
                ended, row.ended = "stop", True
            elif len(row.tokens) == row.limit:
                ended, row.ended = "limit", True
            if ended is not None and self._turns is not None:
                row.waits = self._turns.ended(row.request, row.completion, row.tokens, ended)
            yield Token(row.request, row.completion, token, logprob, None if row.waits else ended)

    def _leave(self) -> None:
        """Rows that are over free their pages and states; those between two turns keep them. Steps that are still on
        their way may write to them, before whoever gets them next does.
        """
        for row in (*self._active, *self._unseen):
            if row.waits:
                self._between[row.request, row.completion] = row
            elif row.ended or (row.over and self._turns is None):
                self._free(row)
        if self._turns is not None:
            self._unseen = [row for row in (*self._active, *self._unseen) if row.over and not row.ended]
        self._active = [row for row in self._active if not row.over]

    def _go_on(self, *, wait: bool) -> None:
        """Lets rows begin their next turn. What steps have written behind the last one is written over."""
        tools = self._tools
        if self._turns is not None and self._between:
            for request, completion, tokens in self._turns.given(wait=wait and not self._returning):
                row = self._between.pop((request, completion))
                if not tokens:
                    self._free(row)
                    continue
                seen = len(row.tokens)
                self._returning.append(
                    DecodingRow(
                        request, completion, row.seed, row.prompt, row.limit, row.pages, row.slot, seen, row.tokens,
                        given=deque(tokens), turn=seen + len(tokens), shift=row.shift,
                    )
                )  # fmt: skip
        count = min(len(self._returning), tools.rows - len(self._active))
        if count:
            back = [self._returning.popleft() for _ in range(count)]
            self._active += back
            tools.batch.arrange(self._active, torch.tensor([row.tokens[-1] for row in back]).to(tools.device))

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
        elif not (self._active or self._between or self._returning):
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
        prompts = [PlacedPrompt(one.prompt, *where, one.images) for (_, one), where in zip(chosen, taken, strict=True)]
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
        shift = 0 if request.images is None else request.images.shift
        row = DecodingRow(started.number, started.begun, seed, size, request.limit, every, slot, shift=shift)
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
            if row.over and self._turns is None:
                self._free(row)
            elif row.over:
                self._unseen.append(row)
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

    def converse(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck, turns: Turns
    ) -> list[list[Completion]]:
        """The completions of each request, which ``turns`` may have go on where a turn has ended. Raises as
        :meth:`run`.

        Their pages stay between turns. States have taken in what was computed behind a turn's end, and come from the
        tokens again.
        """
        if self._tools.cache.has_states:
            return in_rounds(self.complete, requests, sampling, stopping, turns)
        return collected(requests, self.run(requests, sampling, stopping, turns))

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in the order of its seeds. Raises as :meth:`run`."""
        return collected(requests, self.run(requests, sampling, stopping))

    def run(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling = GREEDY,
        stopping: StopCheck | None = None,
        turns: Turns | None = None,
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
            stopping = stopping or StopCheck(StopConditions(), None)
            scheduler = Scheduler(self._tools, requests, sampling, stopping, turns)
            yield from scheduler.tokens()
