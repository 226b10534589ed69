"""One completion, piece by piece while it is generated: the only way in which `ftcli chat` asks a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import ftkernels.sampling
import torch

from ftcli.evaluate.batching import row_too_large
from ftcli.evaluate.generate import answering
from ftcli.evaluate.window import Window
from ftcli.generation.generator import OpenedGenerator, open_generator
from ftcli.generation.requests import GenerationRequest, StopCheck, StopConditions, TextUntilStop
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Why a completion ended: a token that ends a turn or a string that stops it, or a limit.
StopReason = Literal["stop", "max_new_tokens", "max_seq_len"]

#: What a decoder makes of bytes that are no character, or not yet a whole one.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of sampling. ``temperature`` 0 takes the likeliest token, and ``top_p`` then has no meaning.

    The text ends before the first of ``stop_strings``.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()

    @property
    def of_tokens(self) -> ftkernels.sampling.Sampling:
        """The same as the sampler takes it."""
        return ftkernels.sampling.Sampling(self.temperature, top_p=self.top_p)


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    """The end of a completion; ``tokens`` counts the token that ended the turn as well, and ``ids`` holds it."""

    tokens: int
    stop: StopReason
    ids: tuple[int, ...] = field(default=(), compare=False)


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
        """The text that is complete by now; nothing while a character is incomplete."""
        if token in self._special:
            return ""
        self._ids.append(token)
        return self._next(last=False)

    def finish(self) -> str:
        """The rest, bytes of an incomplete character included."""
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


def listening(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    plan: DtypePlan,
    device: torch.device,
    max_length: int,
) -> OpenedGenerator:
    """A generator for one prompt at a time, of up to ``max_length`` tokens of prompt and completion.

    Raises FtcliError FT761 (exit 5) when so many do not fit into memory.
    """
    pad = int(tokenizer.pad_token_id)
    try:
        return open_generator(model, plan, device, rows=1, longest=max_length, pad=pad, ahead=1)
    except torch.OutOfMemoryError as error:
        raise row_too_large("generation", None) from error


def stream(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: StreamSettings,
    *,
    plan: DtypePlan,
    device: torch.device,
    stops: tuple[int, ...],
    max_length: int,
    opened: OpenedGenerator | None = None,
    slides: bool = False,
) -> Generator[str, None, CompletionEnd]:
    """Pieces of the completion of a rendered ``prompt``; the generator's value says how it ended.

    Closing the generator, or an exception in whoever waits for it, ends generation after the token that is being
    computed. Random numbers follow from torch's own: seed them before.

    Args:
        stops: Ids that end the turn. They are not part of the text.
        max_length: Most tokens of prompt and completion; the prompt is shorter.
        slides: Where there are so many the completion goes on all the same, and the model sees the last ones. The
            prompt may have any length then.
        opened: What :func:`listening` gave for this model, where more than one prompt is answered.

    Raises:
        FtcliError: FT762 (exit 6) when the model's logits are not finite.
    """
    ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    window = Window(sampling.max_new_tokens, max_length, slides)
    longest = max_length if slides else min(max_length, len(ids) + sampling.max_new_tokens)
    opened = opened or listening(model, tokenizer, plan=plan, device=device, max_length=longest)
    text, until, made = Detokenizer(tokenizer), TextUntilStop(sampling.stop_strings), list[int]()
    stopping = StopCheck(StopConditions(frozenset(stops), sampling.stop_strings), tokenizer)
    ended, going = False, True
    with answering(model):
        while going:
            seen, room = window.next((*ids, *made), len(made))
            request = GenerationRequest(seen, room, (int(torch.randint(2**62, ())),))
            with closing(opened.generator.run([request], sampling.of_tokens, stopping)) as tokens:
                for token in tokens:
                    made.append(token.token)
                    piece = "" if token.token in stopping.ids else until.add(text.add(token.token))
                    ended = token.ended == "stop" or until.ended
                    if piece:
                        yield piece
                    if ended:
                        break
            going = slides and not ended and len(made) < sampling.max_new_tokens
    rest = until.add(text.finish()) + until.finish()
    if rest:
        yield rest
    if ended:
        return CompletionEnd(len(made), "stop", tuple(made))
    limit: StopReason = "max_new_tokens" if len(made) == sampling.max_new_tokens else "max_seq_len"
    return CompletionEnd(len(made), limit, tuple(made))
