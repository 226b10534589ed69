"""transformers' own ``generate`` behind the engine's interface, for models that the engine does not run.

Rows are padded on the left and leave when the last one of their batch has ended. Random numbers are torch's, seeded
with the first row's seed: what is sampled depends on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.sampling import GREEDY, Sampling
from torch import Tensor, nn
from transformers import StoppingCriteriaList

from ftcli.data.pixels import joined
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
from ftcli.model.backbone import compute_context
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class TransformersGenerator:
    """The interface of :class:`ftcli.generation.engine.Engine`.

    Args:
        pad: The id that fills rows up.
        rows: Most at once.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        plan: DtypePlan,
        device: torch.device,
        *,
        pad: int,
        rows: int,
    ) -> None:
        self._model = model
        self._plan = plan
        self._device = device
        self._pad = pad
        self._rows = rows

    def converse(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck, turns: Turns
    ) -> list[list[Completion]]:
        """See :meth:`ftcli.generation.engine.Engine.converse`; each turn computes all before it anew."""
        return in_rounds(self.complete, requests, sampling, stopping, turns)

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]:
        """See :meth:`ftcli.generation.engine.Engine.complete`."""
        return collected(requests, self.run(requests, sampling, stopping))

    def run(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> Generator[Token, None, None]:
        """See :meth:`ftcli.generation.engine.Engine.run`. One completion comes token by token, several batch by batch.

        Raises:
            NotFinite: the model's logits are not finite.
        """
        stopping = stopping or StopCheck(StopConditions(), None)
        rows = [
            _Row(number, completion, request, seed)
            for number, request in enumerate(requests)
            for completion, seed in enumerate(request.seeds)
        ]
        was_training = self._model.training
        self._model.eval()
        try:
            with finite_logits(self._model):
                for start in range(0, len(rows), self._rows):
                    chosen = rows[start : start + self._rows]
                    several = len(chosen) > 1
                    yield from (
                        self._batch(chosen, sampling, stopping) if several else self._one(chosen[0], sampling, stopping)
                    )
        finally:
            self._model.train(was_training)

    def _batch(self, rows: Sequence[_Row], sampling: Sampling, stopping: StopCheck) -> Iterator[Token]:
        width = max(len(row.request.prompt) for row in rows)
        new = self._generate(rows, sampling, stopping, [_Ended(rows, width, stopping)])[:, width:].tolist()
        for row, tokens in zip(rows, new, strict=True):
            yield from row.tokens(tokens, stopping)

    def _one(self, row: _Row, sampling: Sampling, stopping: StopCheck) -> Iterator[Token]:
        """Token by token, from a thread; closing the iterator ends it after the token that is being computed."""
        queue: SimpleQueue[int | None] = SimpleQueue()
        leave = Event()
        criteria = [_Ended([row], len(row.request.prompt), stopping), _left(leave)]
        with ThreadPoolExecutor(1, "generation") as executor:
            future = executor.submit(self._generate, [row], sampling, stopping, criteria, _Queue(queue))
            future.add_done_callback(lambda _: queue.put(None))
            try:
                yield from row.tokens(iter(queue.get, None), stopping)
                future.result()  # raises what the thread has raised
            finally:
                leave.set()

    @torch.no_grad()
    def _generate(
        self,
        rows: Sequence[_Row],
        sampling: Sampling,
        stopping: StopCheck,
        criteria: list[Any],
        streamer: _Queue | None = None,
    ) -> Tensor:
        """Prompts and completions, (rows, width), padded."""
        width = max(len(row.request.prompt) for row in rows)
        ids = torch.full((len(rows), width), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, width - len(row.request.prompt) :] = torch.tensor(row.request.prompt)
            mask[at, width - len(row.request.prompt) :] = 1
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            compute_context(self._device, self._plan.compute, self._plan.autocast),
        ):
            torch.manual_seed(rows[0].seed)
            output: Any = self._model.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=max(row.request.limit for row in rows),
                pad_token_id=self._pad,
                eos_token_id=list(stopping.ids) or [-1],  # in place of the model's own
                stopping_criteria=StoppingCriteriaList(criteria),
                streamer=streamer,
                synced_gpus=False,  # ranks that share weights keep in step by themselves
                **self._images(rows, ids),
                **_sampling(sampling),
                **_router_logits_off(self._model),
            )
        found: Tensor = output
        return found

    def _images(self, rows: Sequence[_Row], ids: Tensor) -> dict[str, Tensor]:
        """The prompts' images, on the device; empty without any."""
        found = [row.request.images for row in rows if row.request.images is not None]
        if not found:
            return {}
        given, vision = joined([images.pixels.of([images.row]) for images in found]), found[0].pixels.vision
        if vision.kind.marks is not None:
            given[vision.kind.marks] = (ids == vision.token_id).int()
        return {name: value.to(self._device) for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion of a request."""

    number: int
    completion: int
    request: GenerationRequest
    seed: int

    def tokens(self, tokens: Any, stopping: StopCheck) -> Iterator[Token]:
        """Tokens up to the end; the rest is padding, or beyond this row's own limit."""
        seen: list[int] = []
        for token in tokens:
            seen.append(token)
            stopped = stopping.stopped(seen)
            ended: StopReason | None = "stop" if stopped else "limit" if len(seen) == self.request.limit else None
            yield Token(self.number, self.completion, token, None, ended)
            if ended is not None:
                return


def _sampling(sampling: Sampling) -> dict[str, Any]:
    if sampling.greedy:
        return {"do_sample": False}
    # 0 turns off the 50 that transformers would take.
    chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return {**chosen, "min_p": sampling.min_p} if sampling.min_p else chosen


def _router_logits_off(model: PreTrainedModel | PeftModel) -> dict[str, bool]:
    """A config may ask for the router's logits in every call; with a cache, transformers fails on them."""
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


class _Ended:
    """A criterion that marks rows that have ended, by a stop token or string or by their own limits."""

    def __init__(self, rows: Sequence[_Row], width: int, stopping: StopCheck) -> None:
        self._rows = rows
        self._width = width
        self._stopping = stopping
        self._done = [False] * len(rows)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        new = input_ids[:, self._width :].tolist()
        for at, (row, tokens) in enumerate(zip(self._rows, new, strict=True)):
            self._done[at] = self._done[at] or len(tokens) >= row.request.limit or self._stopping.stopped(tokens)
        return torch.tensor(self._done, device=input_ids.device)


class _Queue:
    """Takes the ids that transformers hands over, the prompt's first, and queues those of the completion."""

    def __init__(self, queue: SimpleQueue[int | None]) -> None:
        self._queue = queue
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """``value``: int64, the prompt (1, tokens) in the first call, then (1,) for each token."""
        if self._prompt_came:
            for token in value.flatten().tolist():
                self._queue.put(token)
        self._prompt_came = True

    def end(self) -> None:
        """Does nothing: the thread's end is the end."""


def _left(leave: Event) -> Callable[..., Tensor]:
    """A criterion that stops when nobody waits for the completion any more."""
    return lambda ids, scores, **_: torch.full((len(ids),), leave.is_set(), dtype=torch.bool, device=ids.device)


@contextmanager
def finite_logits(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which ``model`` generates.

    From such logits torch samples nothing: on a CPU it raises an error of its own, and on a GPU an assertion in a
    kernel makes the device unusable for the rest of the process. The look waits for the device, as generation does for
    each token anyway.

    Raises:
        NotFinite: the output of the model's head, float (rows, tokens, vocabulary), is not finite at its last token.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_hook(_require_finite)
    try:
        yield
    finally:
        hook.remove()


def _require_finite(_head: nn.Module, _inputs: object, output: Tensor) -> None:
    if not bool(torch.isfinite(output[:, -1]).all()):
        raise NotFinite
