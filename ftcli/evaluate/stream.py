"""One completion, piece by piece while it is generated: the only way in which `ftcli chat` asks a model."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ftcli.evaluate.generate import answering, router_logits_off, tokens_of
from ftcli.facts.precision import DtypePlan
from ftcli.model.backbone import compute_context

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Why a completion ended: a token that ends a turn, or a limit.
StopReason = Literal["stop", "max_new_tokens", "max_seq_len"]

#: What a decoder makes of bytes that are no character, or not yet a whole one.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the likeliest one, and ``top_p`` then has no meaning."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Completed:
    """What is known once a completion has ended; ``tokens`` counts the token that ended the turn as well."""

    tokens: int
    stop: StopReason


class Detokenizer:
    """Text of tokens as they come: whole characters only, special tokens left out.

    The pieces together are the text that the tokenizer decodes of all tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self._ids: list[int] = []
        # A token may be written otherwise at the beginning of a text, so each piece is what a token adds to the
        # text of those before it, of which the last few are enough.
        self._before = 0
        self._told = 0

    def add(self, token: int) -> str:
        """What can be told now; nothing while a character is incomplete."""
        if token in self._special:
            return ""
        self._ids.append(token)
        return self._next(last=False)

    def finish(self) -> str:
        """What is left, bytes of an incomplete character included."""
        return self._next(last=True)

    def _next(self, *, last: bool) -> str:
        before = self._text(self._ids[self._before : self._told])
        now = self._text(self._ids[self._before :])
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not last):
            return ""
        self._before, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def stream(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling,
    *,
    plan: DtypePlan,
    device: torch.device,
    stops: tuple[int, ...],
    max_length: int,
) -> Generator[str, None, Completed]:
    """Pieces of the completion of a rendered ``prompt``; the generator's value says how it ended.

    Closing the generator, or an exception in whoever waits for it, ends generation after the token that is being
    computed. Random numbers are torch's own: seed them before.

    Args:
        stops: Ids that end the turn. They are not part of the text.
        max_length: Most tokens of prompt and completion; the prompt is shorter.

    Raises:
        FtcliError: FT762 (exit 6) when the model's logits are not finite.
    """
    batch = tokens_of(tokenizer, [prompt], device)
    left = max_length - int(batch["input_ids"].shape[1])
    room = min(sampling.max_new_tokens, left)
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        # 0 turns off the 50 that transformers would take.
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    tokens = _Tokens()
    leave = Event()

    def work() -> None:
        with compute_context(device, plan.compute, plan.autocast):
            model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=room,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=list(stops),
                streamer=tokens,
                stopping_criteria=StoppingCriteriaList([_Left(leave)]),
                **chosen,
                **router_logits_off(model),
            )

    text, count, ended = Detokenizer(tokenizer), 0, False
    with answering(model), ThreadPoolExecutor(1, "generation") as executor:
        future = executor.submit(work)
        future.add_done_callback(lambda _: tokens.queue.put(None))
        try:
            while (token := tokens.queue.get()) is not None:
                count += 1
                ended = ended or token in stops
                piece = "" if ended else text.add(token)
                if piece:
                    yield piece
            future.result()  # raises what the thread has raised
        finally:
            leave.set()
    rest = text.finish()
    if rest:
        yield rest
    if ended:
        return Completed(count, "stop")
    return Completed(count, "max_new_tokens" if room == sampling.max_new_tokens else "max_seq_len")


class _Tokens(BaseStreamer):  # type: ignore[misc]
    """Takes the ids that transformers hands over, the prompt's first, and queues those of the completion."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | None] = SimpleQueue()
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """``value``: int64, the prompt (1, tokens) in the first call, then (1,) for each token."""
        if self._prompt_came:
            for token in value.flatten().tolist():
                self.queue.put(token)
        self._prompt_came = True

    def end(self) -> None:
        """The end is told by the thread's own."""


class _Left(StoppingCriteria):  # type: ignore[misc]
    """Stops when nobody waits for the completion any more."""

    def __init__(self, leave: Event) -> None:
        self._leave = leave

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._leave.is_set(), dtype=torch.bool, device=input_ids.device)
