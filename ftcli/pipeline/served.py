"""Tells why a server's answers differ from the trained model's, with which each is compared token by token.

Token ids reach the weights past the chat template; conversations go through it. So what differs in the second alone is
the template's doing, and what differs in both the weights'.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from ftcli.data.reasoning import ReasoningMarks
from ftcli.evaluate.generate import GreedyAnswer
from ftcli.pipeline.server import ServedAnswer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: How an answer compares: the same, another one of two equally likely tokens, another token, text after the trained
#: model's end, or an end before it.
Kind = Literal["same", "tie", "other", "went_on", "ended_early"]
#: How a server's prompt differs from the trained one.
PromptKind = Literal["same", "missing_bos", "doubled_bos", "added_bos", "template"]
#: Of the allowed gap: how far log-probabilities of the same tokens may differ on average.
_MEAN_SHARE = 0.1
#: Other tokens of other weights: beyond this gap on average, in nats, and where fewer tokens are alike than this share.
_FAR, _MOSTLY = 1.0, 0.5
_UNFINISHED = "�"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer beside the trained model's.

    Attributes:
        alike: Tokens that both begin with.
        gap: By how many nats the first other token is less likely than the trained model's, at least; 0 without one.
        moved: Of the tokens that are alike, the differences of log-probability where the server tells its own.
    """

    kind: Kind
    alike: int
    tokens: int
    gap: float
    moved: tuple[float, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.kind in ("same", "tie")


class Comparer:
    """Compares answers. ``tolerance``: the gap in nats up to which two tokens are equally likely."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], marks: ReasoningMarks, tolerance: float
    ) -> None:
        self.tolerance = tolerance
        self._tokenizer = tokenizer
        self._stops = stops
        self._marks = marks

    def compare(self, own: GreedyAnswer, served: ServedAnswer, limit: int) -> Comparison:
        """``served`` beside ``own``, both of at most ``limit`` tokens."""
        if served.reasoning is not None:
            return self._parsed(own, served)
        text, said = served.text.lstrip().rstrip(_UNFINISHED), own.said
        pieces = [self._text(said[:count]) for count in range(len(said) + 1)]
        whole = text.strip() == pieces[-1].strip()  # servers trim ends
        alike = len(said) if whole else max(count for count, piece in enumerate(pieces) if text.startswith(piece))
        moved = tuple(
            abs(value - own.log_prob(at, own.tokens[at])) for at, value in enumerate(served.log_probs[:alike])
        )
        ended, full = text.strip() == pieces[alike].strip(), served.finish == "length"
        unheard = own.stopped and len(own.tokens) < limit and full  # a stop token has no text
        shorter = ended and full and served.tokens is not None and served.tokens < limit
        longer = alike == len(said) and not own.stopped
        if whole or longer or shorter:
            return Comparison("went_on" if whole and unheard else "same", alike, len(said), 0.0, moved)
        silent = ended and full  # its further tokens have no text
        other = min(own.likeliest[alike].values()) if silent else self._other(own, alike, None if ended else text)
        gap = own.log_prob(alike, own.tokens[alike]) - other
        kind: Kind = "ended_early" if ended and not silent else "went_on" if alike == len(said) else "other"
        return Comparison("tie" if gap <= self.tolerance else kind, alike, len(said), gap, moved)

    def _other(self, own: GreedyAnswer, at: int, text: str | None) -> float:
        """The log-probability of the server's token at a place: that of a stop, or of what its text goes on with."""
        if text is None:
            return max((own.log_prob(at, stop) for stop in self._stops), default=-math.inf)
        before = self._text(own.tokens[:at])
        for token, value in own.likeliest[at].items():
            piece = self._text((*own.tokens[:at], token))
            if token != own.tokens[at] and len(piece) > len(before) and text.startswith(piece):
                return value
        return min(own.likeliest[at].values())

    def _parsed(self, own: GreedyAnswer, served: ServedAnswer) -> Comparison:
        """An answer whose reasoning the server has taken out: its words alone can be compared."""
        split = self._marks.split(own.said, self._tokenizer.decode(list(own.prompt)))
        mine, theirs = (
            "".join(part.rstrip(_UNFINISHED).strip() for part in (one.reasoning or "", one.text))
            for one in (split, served)
        )
        same, count = _common(mine, theirs), len(own.said)
        if mine == theirs:
            return Comparison("same", count, count, 0.0)
        return Comparison("other", count * same // max(len(mine), 1), count, 0.0)

    def leaves(self, theirs: Sequence[int], own: Sequence[int]) -> str:
        """Describes the place at which a server's prompt leaves the trained one."""
        at = _common(theirs, own)
        texts = (self._tokenizer.decode(list(ids)) for ids in (own[max(at - 8, 0) : at], theirs[at:][:8], own[at:][:8]))
        before, one, other = (str(text) for text in texts)
        return f": after {before!r} it has {one!r} where training has {other!r}"

    def _text(self, ids: Sequence[int]) -> str:
        """Text as servers begin it, without the bytes of an unfinished character."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).lstrip().rstrip(_UNFINISHED)


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of their elements two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(frozen=True, slots=True)
class ChannelResult:
    """How the answers of one way of asking compare.

    Attributes:
        same, near_ties, other, went_on, ended_early: Answers by their kind.
        tokens_alike: Share of the trained model's tokens up to the first other one.
        gap: Mean over other tokens, in nats.
        log_prob_difference: Mean over tokens that are alike, in nats; None where the server does not say.
    """

    asked: int
    same: int
    near_ties: int
    other: int
    went_on: int
    ended_early: int
    tokens_alike: float
    gap: float | None
    log_prob_difference: float | None


def summed(found: Sequence[Comparison]) -> ChannelResult:
    """All comparisons of one way of asking."""
    count = Counter(one.kind for one in found)
    gaps = [one.gap for one in found if one.kind != "same" and one.gap]
    moved = [value for one in found for value in one.moved]
    return ChannelResult(
        asked=len(found),
        same=count["same"],
        near_ties=count["tie"],
        other=count["other"],
        went_on=count["went_on"],
        ended_early=count["ended_early"],
        tokens_alike=sum(one.alike for one in found) / max(sum(one.tokens for one in found), 1),
        gap=sum(gaps) / len(gaps) if gaps else None,
        log_prob_difference=sum(moved) / len(moved) if moved else None,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which the server answers otherwise than the trained model, by its name in ``docs/export.md``."""

    name: str
    message: str
    help: str


#: Messages and remedies by name. ``asked`` answers were compared, ``count`` of them show the fault.
_FAULTS: Mapping[str, tuple[str, str]] = {
    "template": (
        "the server writes conversations otherwise than in training{more}; {count} of {asked} answers differ",
        "give it the chat_template.jinja that `ftcli export` writes: vLLM and SGLang take --chat-template FILE, "
        "llama-server --jinja --chat-template-file FILE; for Ollama export `ollama`",
    ),
    "missing_bos": (
        "the server leaves out the token that begins every text in training; {count} of {asked} answers differ",
        "begin the server's template with it, or serve the export, whose tokenizer adds it "
        "(GGUF: tokenizer.ggml.add_bos_token)",
    ),
    "doubled_bos": (
        "the server begins every conversation with the beginning-of-text token twice; "
        "{count} of {asked} answers differ",
        "take it out of the server's template, or keep its tokenizer from adding it "
        "(GGUF: tokenizer.ggml.add_bos_token)",
    ),
    "added_bos": (
        "the server begins every conversation with a beginning-of-text token that training did not have; "
        "{count} of {asked} answers differ",
        "keep its tokenizer from adding it (GGUF: tokenizer.ggml.add_bos_token), or serve the export",
    ),
    "stop": (
        "{count} of {asked} answers go on after the token that ended them in training",
        "tell the server the stop tokens of training: eos_token_id in the export's generation_config.json for vLLM "
        "and SGLang, the end-of-turn token in the GGUF file, PARAMETER stop in Ollama's Modelfile",
    ),
    "early_stop": (
        "{count} of {asked} answers end where the trained model goes on",
        "take stop strings out of the server's settings, and compare its eos_token_id with the export's",
    ),
    "adapter": (
        "the server answers as the base model: the adapter is not loaded ({count} of {asked} answers)",
        "vLLM: --enable-lora --lora-modules NAME=DIR, then --model NAME here; SGLang: --lora-paths NAME=DIR; "
        "llama-server: --lora FILE; or serve the merged model",
    ),
    "numerics": (
        "the server computes in another precision: {count} of {asked} answers have another token{more}",
        "serve the dtype of training, or evaluate what is served (--tolerance allows more); the repeat penalty of "
        "the server has to be 1",
    ),
    "weights": (
        "the server answers as another model: {count} of {asked} answers differ{more}",
        "serve the export of this run, and not another checkpoint; its repeat penalty has to be 1",
    ),
    "chat": (
        "{count} of {asked} conversations are answered otherwise, though their tokens alone are not",
        "the server's settings for chats differ: sampling defaults, penalties, a parser of reasoning or tools, "
        "or a template of as many tokens",
    ),
}


def _fault(name: str, count: int, asked: int, more: str = "") -> Fault:
    message, help = _FAULTS[name]
    return Fault(name, message.format(count=count, asked=asked, more=more), help)


def _moved_text(found: ChannelResult) -> str:
    parts = [f"{found.tokens_alike:.0%} of the tokens before the first are alike"]
    parts += [] if found.gap is None else [f"others are {found.gap:.2g} nats less likely"]
    moved = found.log_prob_difference
    return f" ({', '.join([*parts, *([] if moved is None else [f'log-probabilities differ by {moved:.2g}'])])})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a server: the trained model's ``own`` answers; those under the server's template (``chat``)
    and to the prompts token by token (``given``), empty where it gives none; its token ids of each conversation; how
    the trained model answers other prompts, and the ``base`` model these (None without an adapter).
    """

    own: Sequence[GreedyAnswer]
    chat: Sequence[ServedAnswer]
    given: Sequence[ServedAnswer]
    prompts: Sequence[Sequence[int]]
    bos: int | None
    answers: Callable[[Sequence[Sequence[int]]], list[GreedyAnswer]]
    base: Callable[[Sequence[int]], list[GreedyAnswer]] | None
    limit: int


class Diagnosis:
    """Tells apart why a server's answers differ."""

    def __init__(self, evidence: Evidence, comparer: Comparer) -> None:
        self.evidence = evidence
        self._comparer = comparer

    @cached_property
    def chat(self) -> list[Comparison]:
        """Answers under the server's template beside the trained model's."""
        return self._compared(self.evidence.own, self.evidence.chat)

    @cached_property
    def given(self) -> list[Comparison]:
        """Answers to given tokens beside the trained model's."""
        return self._compared(self.evidence.own, self.evidence.given)

    @cached_property
    def prompt_tokens(self) -> list[int]:
        """By how many tokens the server's conversations are longer; empty where it cannot be told.

        A server that miscounts tokens it was given is not believed.
        """
        given, chat = (
            [
                one.prompt_tokens - len(own.prompt)
                for one, own in zip(answers, self.evidence.own, strict=False)
                if one.prompt_tokens is not None
            ]
            for answers in (self.evidence.given, self.evidence.chat)
        )
        return [] if any(given) else chat

    def faults(self) -> list[Fault]:
        """Every fault that the evidence shows; none where the model is served as it was trained."""
        kind = self._prompt_kind()
        changed = sum(not one.agrees for one in self.chat)
        found = [] if kind == "same" else [_fault(kind, changed, len(self.chat), self._first_other_prompt())]
        reached = self.given or (self._under_their_prompts(kind) if kind != "template" else [])
        found += self._of_answers(reached)
        if found or not self.given or not changed:
            return found
        ends = [fault for fault in self._of_answers(self.chat) if fault.name in ("stop", "early_stop")]
        return ends or [_fault("chat", changed, len(self.chat))]

    def _compared(self, own: Sequence[GreedyAnswer], served: Sequence[ServedAnswer]) -> list[Comparison]:
        return [
            self._comparer.compare(mine, theirs, self.evidence.limit) for mine, theirs in zip(own, served, strict=False)
        ]

    def _prompt_kind(self) -> PromptKind:
        """How the server's prompts differ: by its own tokens, else by their number, else by the answers."""
        seen = self.evidence
        if not seen.chat:
            return "same"
        begins = seen.bos is not None and all(own.prompt[0] == seen.bos for own in seen.own)
        more: PromptKind = "doubled_bos" if begins else "added_bos"
        if seen.prompts:
            pairs = [(tuple(theirs), own.prompt) for theirs, own in zip(seen.prompts, seen.own, strict=True)]
            if all(theirs == own for theirs, own in pairs):
                return "same"
            if all(theirs == (seen.bos, *own) for theirs, own in pairs):
                return more
            return "missing_bos" if begins and all(theirs == own[1:] for theirs, own in pairs) else "template"
        counted = set(self.prompt_tokens)
        if seen.bos is not None and counted == {1}:
            return more
        if begins and counted == {-1}:
            return "missing_bos"
        if counted - {0}:
            return "template"
        # Where tokens are not counted: other answers of the same weights.
        same_weights = bool(seen.given) and all(one.agrees for one in self.given)
        return "template" if not counted and same_weights and any(one.kind == "other" for one in self.chat) else "same"

    def _under_their_prompts(self, kind: PromptKind) -> list[Comparison]:
        """Answers under the server's template beside those of the trained model to the same prompts."""
        if kind == "same":
            return self.chat
        prompts = [one.prompt for one in self.evidence.own]
        changed = [one[1:] if kind == "missing_bos" else (self.evidence.bos or 0, *one) for one in prompts]
        return self._compared(self.evidence.answers(changed), self.evidence.chat)

    def _first_other_prompt(self) -> str:
        """Describes the place at which the server's first prompt leaves the trained one, where it tells its tokens."""
        pairs = zip(self.evidence.prompts, self.evidence.own, strict=False)
        return next(
            (self._comparer.leaves(theirs, own.prompt) for theirs, own in pairs if tuple(theirs) != own.prompt), ""
        )

    def _of_answers(self, found: Sequence[Comparison]) -> list[Fault]:
        """Ends that differ, an adapter that is not loaded, other numerics, or other weights."""
        total, kinds = summed(found), Counter(one.kind for one in found if not one.agrees)
        moved = _moved_text(total)
        if not kinds:
            apart = (total.log_prob_difference or 0.0) > self._comparer.tolerance * _MEAN_SHARE
            return [_fault("numerics", 0, len(found), moved)] if apart else []
        # Other weights now and then end an answer elsewhere; ends alone that differ are the server's settings.
        most = max(kinds, key=lambda kind: (kinds[kind], kind == "other"))
        if most != "other":
            return [_fault("stop" if most == "went_on" else "early_stop", kinds[most], len(found))]
        other = [at for at, one in enumerate(found) if not one.agrees]
        if self.evidence.base is not None and self._is_base(found, other):
            return [_fault("adapter", len(other), len(found))]
        near = total.tokens_alike >= _MOSTLY or (total.gap is not None and total.gap <= _FAR)
        return [_fault("numerics" if near else "weights", len(other), len(found), moved)]

    def _is_base(self, found: Sequence[Comparison], other: Sequence[int]) -> bool:
        """True if most of the other answers are nearer to the base model's."""
        assert self.evidence.base is not None
        served = self.evidence.given or self.evidence.chat
        base = self._compared(self.evidence.base(other), [served[at] for at in other])
        nearer = [
            one.agrees or (one.alike > found[at].alike and one.gap < found[at].gap)
            for at, one in zip(other, base, strict=True)
        ]
        return sum(nearer) * 2 > len(other)
