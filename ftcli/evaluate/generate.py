"""Completions of prompts: many at once, or one piece by piece while it is generated, which is how `ftcli chat` asks;
and greedy ones with the likelihood of other tokens, which a server's answers are compared with.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import ftkernels.sampling
import torch
from ftkernels.sampling import GREEDY, Sampling, row_seed

from ftcli.config.evaluation import GenerateConfig
from ftcli.data.pixels import PixelReader
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.data.tokens import RowImage
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.loss import halved, row_too_large
from ftcli.generation.generator import OpenedGenerator, open_generator
from ftcli.generation.requests import (
    Completion,
    GenerationRequest,
    NotFinite,
    PromptImages,
    StopCheck,
    StopConditions,
    TextUntilStop,
    cut,
    shown_by,
)
from ftcli.model.backbone import base_of, compute_context, head_of, hidden_states, logits_of
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Progress, Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ftcli.job import Job


@dataclass(frozen=True, slots=True)
class Window:
    """The last tokens of a text, at most ``length`` of them.

    Attributes:
        max_new_tokens: Longest completion.
        length: Most tokens of prompt and completion; None for no limit.
        sliding: Completions go on where the window is full (``eval.generate.overflow``).
    """

    max_new_tokens: int
    length: int | None
    sliding: bool

    @property
    def slides(self) -> bool:
        """True if completions go on when the window is full."""
        return self.sliding and self.length is not None

    def next(self, ids: Sequence[int], made: int) -> tuple[tuple[int, ...], int]:
        """The part of ``ids``, the last ``made`` of them by the model, that it sees next, and how many tokens may
        follow.

        A window that is full drops its oldest quarter: the rest is read anew, from position 0.
        """
        limit = self.max_new_tokens - made
        if self.length is not None:
            if self.slides and len(ids) >= self.length:
                ids = ids[len(ids) - self.length + max(1, self.length // 4) :]
            limit = min(limit, self.length - len(ids))
        return tuple(ids), limit


#: Of the likeliest tokens so many are sampled from where the model's generation_config does not say: transformers' own.
_TOP_K = 50


def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    config: GenerateConfig,
    *,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    stops: Sequence[int],
    max_length: int | None = None,
    marks: ReasoningMarks | None = None,
    templated: Sequence[bool] = (),
    images: Sequence[tuple[RowImage, ...]] = (),
    pixels: PixelReader | None = None,
) -> list[Answer]:
    """One completion for each prompt text, special tokens removed, in the order given. As :func:`complete`.

    It ends before the first of ``config.stop_strings``.

    Args:
        marks: Tell answers from their reasoning; without them all of it is the answer.
        templated: Whether a template wrote each prompt; empty where one wrote all.
        images: Of each prompt; empty where none has any. ``pixels`` reads them.

    Raises:
        FtcliError: FT761 (exit 5) when one prompt alone does not fit, FT762 (exit 6) when the model's logits are not
            finite.
    """
    if not prompts:
        return []
    ids: list[list[int]] = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]  # the template wrote them
    shown: Sequence[PromptImages | None] = ()
    if pixels is not None and any(images):
        shown = [shown_by(n, tokens, some, pixels) for n, (tokens, some) in enumerate(zip(ids, images, strict=True))]
        ids = [tokens if one is None else one.row.input_ids for one, tokens in zip(shown, ids, strict=True)]
    stopping = StopCheck(StopConditions(frozenset(stops), config.stop_strings), tokenizer)
    generated = complete(
        model,
        ids,
        config,
        pad=int(tokenizer.pad_token_id),
        batch_size=batch_size,
        plan=plan,
        device=device,
        reporter=reporter,
        stopping=stopping,
        max_length=max_length,
        images=shown,
    )
    marks = marks or ReasoningMarks(tokenizer, None)
    answers = []
    for tokens, prompt, by_template in zip(generated, prompts, templated or [True] * len(prompts), strict=True):
        said = marks.split(tokens, prompt, templated=by_template)
        text, ended = cut(said.text, config.stop_strings), bool(tokens) and stopping.stopped(tokens)
        answers.append(replace(said, text=text, cut=not ended))
    return answers


def complete(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    pad: int,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    stopping: StopCheck,
    max_length: int | None = None,
    images: Sequence[PromptImages | None] = (),
) -> list[list[int]]:
    """The tokens of one completion for each prompt, that which ended it among them, in the order given.

    What is sampled depends on torch's random numbers and on the prompt's place among ``prompts``, not on the others.

    Args:
        batch_size: Most rows at once. Where so many do not fit into memory it is halved, with the warning FT764.
        max_length: Most tokens of a prompt and its completion, which ends there; how many did is told. Every prompt is
            shorter. Where ``config.overflow`` is ``sliding`` a completion goes on, and the model sees so many of the
            last tokens; not of prompts with ``images``.

    Raises:
        FtcliError: FT761 (exit 5) when one prompt alone does not fit, FT762 (exit 6) when the model's logits are not
            finite.
    """
    seed = int(torch.randint(2**62, ())) if config.do_sample else 0
    asked = _Asked(model, plan, device, pad, _sampling(model, config), stopping, reporter)
    shown = images or [None] * len(prompts)
    window = Window(config.max_new_tokens, max_length, sliding=config.overflow == "sliding" and not any(shown))
    generated: list[list[int]] = [[] for _ in prompts]
    going, cut, turn = list(range(len(prompts))), 0, 0

    def request(at: int) -> GenerationRequest:
        seen, limit = window.next([*prompts[at], *generated[at]], len(generated[at]))
        return GenerationRequest(seen, limit, (row_seed(seed + turn, at),), shown[at])

    with answering(model), reporter.progress(len(prompts), "generating") as progress:
        while going:
            done = _complete(asked, [request(at) for at in going], min(batch_size, len(going)), progress)
            limited = []
            for at, found in zip(going, done, strict=True):
                generated[at] += found.tokens
                if found.ended == "limit" and len(generated[at]) < config.max_new_tokens:
                    limited.append(at)
            going, turn = (limited, turn + 1) if window.slides else ([], turn)
            cut = len(limited)
    if cut and not window.slides:
        reporter.warn(f"{cut:,} of {len(prompts):,} answers were ended by data.max_seq_len {max_length}")
    return generated


@contextmanager
def answering(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which ``model`` generates, in evaluation mode.

    Raises FtcliError FT762 (exit 6) when its logits are not finite.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    except NotFinite as error:
        message = "the model's logits are not finite, so it has no answers"
        help = "take an earlier checkpoint (--checkpoint STEP), or train again with a lower train.learning_rate"
        raise FtcliError.single("FT762", message, exit_code=ExitCode.DIVERGED, help=help) from error
    finally:
        if was_training:
            model.train()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Everything about a generation but its prompts."""

    model: PreTrainedModel | PeftModel
    plan: DtypePlan
    device: torch.device
    pad: int
    sampling: Sampling
    stopping: StopCheck
    reporter: Reporter


def _complete(asked: _Asked, requests: Sequence[GenerationRequest], rows: int, progress: Progress) -> list[Completion]:
    """All requests, ``rows`` at once and fewer where they do not fit. Raises FtcliError FT761 when one does not."""
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        # The longest come first: what does not fit is seen at once.
        left = sorted({*range(len(requests))} - {*done}, key=lambda at: -len(requests[at].prompt))
        if _finished(asked, requests, left, rows, done, progress):
            break
        if rows == 1:
            raise row_too_large("generation", None)
        asked.reporter.finding(halved("generation", rows, rows // 2))
        rows //= 2
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()
    return [done[at] for at in range(len(requests))]


def _finished(
    asked: _Asked,
    requests: Sequence[GenerationRequest],
    left: Sequence[int],
    rows: int,
    done: dict[int, Completion],
    progress: Progress,
) -> bool:
    """Completes the requests that are left; False when memory ran out, with those in ``done`` that were complete."""
    chosen = [requests[at] for at in left]
    longest = max(len(one.prompt) + one.limit for one in chosen)
    found = [Completion() for _ in chosen]
    try:
        # Without a copy of the weights: it may be between two steps of training.
        opened = open_generator(
            asked.model,
            asked.plan,
            asked.device,
            rows=rows,
            longest=longest,
            pad=asked.pad,
            merge=False,
        )
        if opened.reason is not None:
            asked.reporter.info(opened.summary)
        for token in opened.generator.run(chosen, asked.sampling, asked.stopping):
            found[token.request].add(token)
            if token.ended is not None:
                done[left[token.request]] = found[token.request]
                progress.advance(1)
    except torch.OutOfMemoryError:
        return False
    return True


def _sampling(model: PreTrainedModel | PeftModel, config: GenerateConfig) -> Sampling:
    """The recipe's temperature; what it does not know is the model's generation_config's."""
    if not config.do_sample:
        return GREEDY
    own = base_of(model).generation_config
    top_k, top_p, min_p = (getattr(own, name, None) for name in ("top_k", "top_p", "min_p"))
    return Sampling(config.temperature, _TOP_K if top_k is None else top_k, top_p or 1.0, min_p or 0.0)


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
    images: tuple[RowImage, ...] = (),
    pixels: PixelReader | None = None,
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
        images: What the prompt shows, read by ``pixels``; its window does not slide.

    Raises:
        FtcliError: FT762 (exit 6) when the model's logits are not finite.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    shown = None
    if pixels is not None and images:
        shown = shown_by(0, ids, images, pixels)
        ids = ids if shown is None else shown.row.input_ids
    slides = slides and shown is None
    window = Window(sampling.max_new_tokens, max_length, slides)
    longest = max_length if slides else min(max_length, len(ids) + sampling.max_new_tokens)
    opened = opened or listening(model, tokenizer, plan=plan, device=device, max_length=longest)
    text, until, made = Detokenizer(tokenizer), TextUntilStop(sampling.stop_strings), list[int]()
    stopping = StopCheck(StopConditions(frozenset(stops), sampling.stop_strings), tokenizer)
    ended, going = False, True
    with answering(model):
        while going:
            seen, room = window.next((*ids, *made), len(made))
            request = GenerationRequest(seen, room, (int(torch.randint(2**62, ())),), shown)
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


#: Tokens of each place whose log-probabilities are kept. What another program chooses is among them, or far from right.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy completion.

    Attributes:
        tokens: Its ids; that which ended it is among them.
        stopped: A stop token ended it, and not its limit.
        likeliest: For each of ``tokens``, the log-probabilities in nats of the likeliest ids at its place, best first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool
    likeliest: tuple[Mapping[int, float], ...]

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens without the one that ended it."""
        return self.tokens[:-1] if self.stopped else self.tokens

    def log_prob(self, at: int, token: int) -> float:
        """The log-probability of ``token`` at a place; of one that is not kept, an upper bound."""
        kept = self.likeliest[at]
        return kept.get(token, min(kept.values()))


def greedy_answers(
    model: PreTrainedModel | PeftModel, job: Job, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[GreedyAnswer]:
    """One for each prompt, in the order given.

    Raises FtcliError FT761 (exit 5) when one alone does not fit into memory, FT762 (exit 6) for logits that are not
    finite.
    """
    recipe, stopping = job.recipe, StopCheck(StopConditions(frozenset(job.stops)), job.tokenizer)
    changes = {"max_new_tokens": max_new_tokens, "do_sample": False, "stop_strings": (), "overflow": "end"}
    completions = complete(
        model,
        prompts,
        recipe.eval.generate.model_copy(update=changes),
        pad=job.pad_token_id,
        batch_size=recipe.eval.per_device_eval_batch_size,
        plan=job.dtypes,
        device=job.device,
        reporter=job.reporter,
        stopping=stopping,
        max_length=recipe.data.max_seq_len,
    )
    with answering(model), torch.no_grad():
        return [
            GreedyAnswer(tuple(prompt), tuple(made), stopping.stopped(made), _likeliest(model, job, prompt, made))
            for prompt, made in zip(prompts, completions, strict=True)
        ]


def _likeliest(
    model: PreTrainedModel | PeftModel, job: Job, prompt: Sequence[int], made: Sequence[int]
) -> tuple[dict[int, float], ...]:
    """The likeliest ids at the place of each token of ``made``, with their log-probabilities."""
    ids = torch.tensor([[*prompt, *made[:-1]]], device=job.device)
    with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
        states = hidden_states(model, {"input_ids": ids}).tensor[0, len(prompt) - 1 :]
        logits = logits_of(model, head_of(model), states)
    found = logits.float().log_softmax(-1).topk(min(_KEPT, logits.shape[-1]))
    places = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return tuple(dict(zip(ids, values, strict=True)) for ids, values in places)
