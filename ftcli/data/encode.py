"""Rows to token ids and labels: pure, a few rows at a time, the same in this process and in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from ftcli.config.data import DataConfig
from ftcli.data.answers import BoundaryTokenizer, Rendered, TokenizedText, answered_from, split_between
from ftcli.data.chats import Chats, stops_of
from ftcli.data.omissions import reasoning_of
from ftcli.data.template import Renderer, renderer_of, training_form
from ftcli.data.tokens import EncodedArrays, PlacedRow, RowImage, TokenizedRow, encoded_of
from ftcli.data.vision import Vision
from ftcli.errors import Finding, FtcliError
from ftcli.labels import IGNORE_INDEX, end_at_stop, without_loss
from ftcli.rows.layouts import misfit_finding, understand
from ftcli.rows.layouts.prompted import shared_beginnings
from ftcli.rows.row import Example, Message, Misfit, Row, data_error, surrogate
from ftcli.tables import layouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: Why rows with images are refused where nobody has said otherwise.
TEXT_ALONE = "this run trains on text alone"
#: From so many turns on, a conversation's length is looked at before its turns are.
_MANY_TURNS = 200
#: Rows whose conversations are rendered together, and the most turns of such a conversation: the texts up to each of
#: its answers are held at a time.
_TOGETHER = 16
_FEW_TURNS = 40


def training_renderer(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Renderer:
    """The recipe's renderer of training rows: with the training form of its template under ``history: template``.

    Raises FtcliError FT424.
    """
    renderer = renderer_of(tokenizer, data)
    form = training_form(tokenizer, renderer.source) if data.history == "template" and renderer.source else None
    if form is not None:
        renderer.use(form)
    return renderer


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """A few encoded rows. ``lengths`` are of all rows that could be tokenized, before any cut.

    ``findings`` are rows that are broken; ``overlong`` those that are refused under ``overlong: error``. ``totals``,
    ``counts`` and ``implicit`` are those of :class:`ftcli.data.ledger.DatasetLedger`.
    """

    encoded: EncodedArrays
    lengths: tuple[int, ...]
    findings: tuple[Finding, ...] = ()
    overlong: tuple[Finding, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    implicit: str = ""


_R = TypeVar("_R")


@dataclass(slots=True)
class TokenizedRows(Generic[_R]):
    """Rows at full length, in order (several of one conversation where its turns need them), and what is wrong.

    ``overlong`` are conversations of which it is clear without looking at their turns. ``implicit`` says where the
    first prompt ends that no column holds.
    """

    tokens: list[_R]
    findings: list[Finding]
    counts: Counter[str]
    overlong: list[Finding] = field(default_factory=list)
    implicit: str = ""


@dataclass(frozen=True, slots=True)
class _Made:
    """A row that is rendered, and what is counted once it is kept.

    Attributes:
        rendered: Of each of its examples; nothing of one that came as tokens.
    """

    examples: tuple[Example, ...]
    rendered: list[list[Rendered]]
    counts: Counter[str]
    images: tuple[RowImage, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedRow:
    """A row after ``data.overlong``: ``tokens`` reach the model; without, it is refused (``overlong``) or dropped."""

    tokens: TokenizedRow | PlacedRow | None
    length: int
    overlong: Finding | None = None


class Encoder:
    """Everything that turns rows of one layout into tokens. Can be sent to another process.

    Args:
        vision: What the model sees images with; or, as a clause, why rows with images are refused.

    Raises FtcliError FT435 when the tokenizer cannot say which characters a token stands for.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Collection[int],
        data: DataConfig,
        layout: str,
        vision: Vision | str = TEXT_ALONE,
    ) -> None:
        if not tokenizer.is_fast:
            raise FtcliError.single(
                "FT435",
                f"{type(tokenizer).__name__} cannot say which characters a token stands for, so no mask can be checked",
                help="use the model's tokenizer.json (a fast tokenizer), or name another with model.tokenizer",
            )
        self.tokenizer = tokenizer
        self.renderer = training_renderer(tokenizer, data)
        self.vision = vision
        if not isinstance(vision, str):
            self.renderer.written = vision.written
        self.layout = layout
        self.unit = layouts.row(layout).unit
        self._compares = not layouts.row(layout).imitated
        self.loss_on: str = layouts.row(layout).loss_on[0] if data.loss_on == "auto" else data.loss_on
        self._ends = stops_of(tokenizer, stops)
        self._history = data.history
        self._boundary = BoundaryTokenizer(tokenizer, split=data.history != "last")
        self._stops = frozenset(stops)
        self._limit = data.max_seq_len
        self._overlong = data.overlong
        self._drops_reasoning = data.reasoning == "drop"
        self._places = self.unit == 1 and isinstance(vision, str)

    def batch(self, rows: Sequence[Row]) -> EncodedRows:
        """Tokenizes ``rows``; raises FtcliError FT421 only, which concerns all of them."""
        read = self._read(rows)
        units = [read.tokens[at : at + self.unit] for at in range(0, len(read.tokens), self.unit)]
        fitted = [one for unit in units for one in self.fit(unit)]
        read.counts["rows_split"] += len(fitted) - len(read.tokens)
        kept = [one.tokens for one in fitted if one.tokens is not None]
        dropped = [one for one in fitted if one.tokens is None and one.overlong is None]
        cut = [one.length - one.tokens.length for one in fitted if one.tokens is not None]
        return EncodedRows(
            encoded=encoded_of(kept),
            lengths=tuple(one.length for one in fitted),
            findings=tuple(read.findings),
            overlong=(*read.overlong, *(one.overlong for one in fitted if one.overlong is not None)),
            totals={
                "dropped_rows": len(dropped),
                "dropped_tokens": sum(one.length for one in dropped),
                "truncated_rows": sum(count > 0 for count in cut),
                "cut_tokens": sum(cut),
            },
            counts=read.counts,
            implicit=read.implicit,
        )

    def rows(self, rows: Sequence[Row]) -> TokenizedRows[TokenizedRow]:
        """Each row's tokens at full length, and what is wrong with the others."""
        read = self._read(rows)
        whole = [one.tokenized() if isinstance(one, PlacedRow) else one for one in read.tokens]
        return TokenizedRows(whole, read.findings, read.counts, read.overlong, read.implicit)

    def _read(self, rows: Sequence[Row]) -> TokenizedRows[TokenizedRow | PlacedRow]:
        read = TokenizedRows[TokenizedRow | PlacedRow]([], [], Counter())
        made: list[_Made] = []
        for start in range(0, len(rows), _TOGETHER):
            understood = [self._understood(row) for row in rows[start : start + _TOGETHER]]
            with self._writing_ahead(understood):
                made += self._rendered(understood, read)
        self._tokenize(made, read)
        return read

    def _understood(self, row: Row) -> tuple[Row, Example | Exception]:
        try:
            return row, understand(row, self.layout)
        except (Misfit, FtcliError) as problem:
            return row, problem

    def _writing_ahead(self, understood: Sequence[tuple[Row, Example | Exception]]) -> AbstractContextManager[None]:
        """A block in which the conversations that need no template of their own are rendered already."""
        chats = [
            (one.messages, tuple if self.loss_on == "all" else partial(self._trained, one, one.messages, Counter()))
            for _, example in understood
            if isinstance(example, Example)
            for one in (example, *example.others)
            if one.messages is not None and not one.tools and not one.switches and len(one.messages) <= _FEW_TURNS
        ]
        return self.renderer.writing_ahead(chats)

    def _rendered(
        self, understood: Sequence[tuple[Row, Example | Exception]], read: TokenizedRows[TokenizedRow | PlacedRow]
    ) -> list[_Made]:
        made: list[_Made] = []
        for row, example in understood:
            counts: Counter[str] = Counter()
            try:
                if isinstance(example, Exception):
                    raise example
                images = self._images_of(example, counts)
                overlong = self._far_too_long(example)
                examples = (example, *example.others)
                rendered = [[] if overlong else self._render(one, counts) for one in examples]
                for one in (one for part in rendered for one in part):
                    one.text.encode("utf-8")
                self._require_one_form(rendered)
            except Misfit as misfit:
                read.findings.append(misfit_finding(row, misfit, self.layout))
            except UnicodeEncodeError as error:
                read.findings.append(surrogate(error, row))
            except FtcliError as error:
                if error.findings[0].code == "FT421":
                    raise
                read.findings.extend(error.findings)
            else:
                if overlong:
                    read.overlong.append(overlong)
                else:
                    made.append(_Made(examples, rendered, counts, images))
        return made

    def _images_of(self, example: Example, counts: Counter[str]) -> tuple[RowImage, ...]:
        """The images of a row, measured. Raises Misfit for one that cannot be trained on."""
        if not example.images:
            return ()
        if isinstance(self.vision, str):
            raise Misfit(f"the row has images, and {self.vision}")
        found = tuple(self.vision.looked_at(source, example.row) for source in example.images)
        counts["images"] += len(found)
        counts.update(f"images_{what}" for image in found for what in image.done)
        return found

    def _require_one_form(self, rendered: Sequence[Sequence[Rendered]]) -> None:
        """Raises Misfit where an answer that is compared would be several rows."""
        if self._compares and any(len(forms) > 1 for forms in rendered):
            raise Misfit(
                "the chat template shows the answer's earlier turns otherwise than it generated them, so it would be "
                "several rows; use `data.history: last`"
            )

    def _far_too_long(self, example: Example) -> Finding | None:
        """FT431 for a conversation of very many turns that nothing of could be trained.

        Each of its answers would be looked at for nothing.
        """
        if self._overlong != "error" or len(example.messages or ()) <= _MANY_TURNS:
            return None
        renderer = self.renderer.switched(example.switches, example.row)
        text = renderer.render(renderer.prepared(example.messages or (), example.row), example.row, tools=example.tools)
        text.encode("utf-8")
        length = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # Twice: generation may see the last turn under a shorter history than the whole conversation has.
        return self._refused(length, example.row) if length > 2 * self._limit else None

    def _refused(self, length: int, row: Row) -> Finding:
        message = f"{length:,} tokens, more than data.max_seq_len {self._limit}"
        remedy = "raise data.max_seq_len, or choose data.overlong: drop or truncate"
        if self._overlong == "split":
            message += (
                f"; pieces are made of rows of text with loss_on all (here {self.loss_on}), none of rows with images"
            )
        return Finding("FT431", message, row.origin, remedy)

    def _render(self, example: Example, counts: Counter[str]) -> list[Rendered]:
        if example.input_ids is not None:
            return []
        if example.messages is not None:
            counts["chats"] += 1
            return self._render_chat(example, example.messages, counts)
        if self.loss_on == "assistant":
            message = "loss_on: assistant needs conversations, this row is plain text"
            help = "use loss_on: completion for prompt_completion rows, all for text"
            raise data_error("FT434", message, example.row.origin, help=help)
        if example.prompt_text is not None:
            counts["plain_prompts"] += 1
        if self.loss_on == "completion":
            if example.prompt_text is None:
                message = "loss_on: completion needs a prompt and a completion"
                raise data_error("FT434", message, example.row.origin, help="use loss_on: auto")
            # The tokens of a prompt that nobody wrote alone are those that it has in its rows.
            return [replace(self.renderer.completion(example), answers=not example.implicit)]
        return [self.renderer.plain(example)]

    def _render_chat(self, example: Example, chat: Sequence[Message], counts: Counter[str]) -> list[Rendered]:
        renderer = self.renderer.switched(example.switches, example.row)
        if self._drops_reasoning:
            thoughts = (m["role"] == "assistant" and reasoning_of(m).strip() for m in chat)
            counts["reasoning_dropped"] += sum(map(bool, thoughts))
        if self.loss_on == "all":
            if example.untrained:
                marked = min(example.untrained) + 1
                message = f"turn {marked} is marked not to be trained, and loss_on: all trains everything"
                raise data_error("FT434", message, example.row.origin, "use loss_on: assistant, or remove the marks")
            text = renderer.text(chat, example.row, tools=example.tools)
            return [Rendered(text, ((0, len(text)),))]
        trained = self._trained(example, chat, counts)
        chosen = frozenset(trained)
        partly = {turn: ranges for turn, ranges in example.untrained.items() if ranges is not None and turn in chosen}
        chats = Chats(renderer, self._ends, self._history)
        rendered, left = chats.rows(chat, example.row, example.tools, trained, partly)
        counts["turns_untrained"] += left
        counts["turns_split"] += max(0, len(rendered) - 1)
        return rendered

    def _trained(self, example: Example, chat: Sequence[Message], counts: Counter[str]) -> list[int]:
        """The turns that bear loss. One that opens a conversation has no prompt, and is counted."""
        turns = [n for n, message in enumerate(chat) if message["role"] == "assistant" and n > 0]
        if self.loss_on == "completion":
            start = example.completion_from
            turns = turns[-1:] if start is None else [n for n in turns if n >= start]
        elif chat[0]["role"] == "assistant" and 0 not in example.untrained:
            counts["turns_opening"] += 1
        chosen = [n for n in turns if n not in example.untrained or example.untrained[n] is not None]
        counts["turns_marked"] += len(turns) - len(chosen)
        return chosen

    def _tokenize(self, made: Sequence[_Made], read: TokenizedRows[TokenizedRow | PlacedRow]) -> None:
        flat = [one for row in made for forms in row.rendered for one in forms]
        tokenized = iter(self._boundary.tokenized(flat))
        for row in made:
            parts = [[one for _ in forms for one in next(tokenized)] for forms in row.rendered]
            if row.examples[0].implicit:
                try:
                    parts, told = _with_implicit_prompt(row.examples, parts)
                except Misfit as misfit:
                    read.findings.append(misfit_finding(row.examples[0].row, misfit, self.layout))
                    continue
                row.counts["prompts_implicit"] += 1
                read.implicit = read.implicit or told
            elif len(parts) == 1 == len(parts[0]) and (placed := self._placed(row.examples[0], parts[0][0])):
                read.tokens.append(placed)
                for name, count in row.counts.items():
                    read.counts[name] += count
                continue
            rows = [one for part in parts for one in part]
            found = [
                masked
                for example, part in zip(row.examples, parts, strict=True)
                for masked in (
                    [self._masked(example, one, row.images) for one in part] if part else [self._given(example)]
                )
            ]
            problem = next((problem for _, problem in found if problem is not None), None) or self._alike(found)
            if problem is not None:  # a conversation is kept whole or not at all
                read.findings.append(problem)
                continue
            read.tokens.extend(tokens for tokens, _ in found)
            rendered = [one for forms in row.rendered for one in forms]
            counts = read.counts
            for name, count in row.counts.items():
                counts[name] += count
            counts["image_tokens"] += sum(tokens.image_tokens for tokens, _ in found)
            counts["turns_split"] += len(rows) - len(rendered)
            counts["pairs_split"] += len(row.examples) - self.unit
            counts["turns_untrained"] += sum([len(one.spans) for one in rendered])
            counts["turns_untrained"] -= sum([len(one.rendered.spans) for one in rows])
            counts["answers_joined"] += sum([not one.apart for one in rows])

    def _alike(self, found: Sequence[tuple[TokenizedRow | PlacedRow, Finding | None]]) -> Finding | None:
        """FT412 for a unit whose rows came to the same tokens, as where the template trims what told them apart."""
        first = found[0][0]
        if self.unit == 1 or any(tokens.input_ids != first.input_ids for tokens, _ in found):
            return None
        message = "its answers are the same once they are rendered, so there is nothing to prefer"
        return Finding("FT412", f"{message} (format {self.layout})", first.row.origin)

    def _placed(self, example: Example, one: TokenizedText) -> PlacedRow | None:
        """The row, where it is known to be sound without a look at each of its labels."""
        if not self._places or one.array is None or not one.ends_at(self._stops) or not (spans := one.spans()):
            return None
        return PlacedRow(Row(example.row.source, example.row.number, {}), one.array, spans, example.value)

    def _masked(
        self, example: Example, one: TokenizedText, images: tuple[RowImage, ...]
    ) -> tuple[TokenizedRow | PlacedRow, Finding | None]:
        """A rendered row's tokens, and what is wrong with its mask or its images. A row of an earlier answer has those
        that come before it.
        """
        placed = self._placed(example, one)
        if placed is not None:
            return placed, None
        labels = one.labels()
        problem = self._untrained(example, labels)
        if problem is None and not one.ends_at(self._stops):
            problem = self._check(example, labels)
        without_loss(labels, one.offsets, one.rendered.holes)
        made = TokenizedRow(Row(example.row.source, example.row.number, {}), one.ids, labels, example.value)
        if isinstance(self.vision, str) or problem is not None:
            return made, problem
        places = sum(token == self.vision.token_id for token in one.ids)
        try:
            return self.vision.expanded(made, self._shown(images, one, places)), None
        except FtcliError as error:
            return made, error.findings[0]

    @staticmethod
    def _shown(images: tuple[RowImage, ...], one: TokenizedText, places: int) -> tuple[RowImage, ...]:
        """Those of a row's images that its text shows."""
        known = one.rendered.images
        return images[: places if known is None else known]

    def _given(self, example: Example) -> tuple[TokenizedRow, Finding | None]:
        """A row that came as tokens. Nothing predicts its first one."""
        ids, labels = list(example.input_ids or ()), [IGNORE_INDEX, *(example.labels or ())[1:]]
        size = len(self.tokenizer)
        wrong = next((i for i in ids if not 0 <= i < size), None)
        problem = self._untrained(example, labels)
        if wrong is not None:
            message = f"id {wrong} is not among this tokenizer's {size:,}: the row was tokenized by another one"
            problem = Finding("FT412", message, example.row.origin)
        return TokenizedRow(Row(example.row.source, example.row.number, {}), ids, labels, example.value), problem

    def _untrained(self, example: Example, labels: list[int]) -> Finding | None:
        if any(label != IGNORE_INDEX for label in labels):
            return None
        message = f"no token of this row would be trained (loss_on {self.loss_on})"
        return Finding("FT432", message, example.row.origin, "fix or remove the row, or change data.loss_on")

    def _check(self, example: Example, labels: list[int]) -> Finding | None:
        """Ends supervised spans at their stop tokens, in place; returns what is wrong with the mask, if anything."""
        ended = end_at_stop(labels, self._stops)
        if ended or (example.messages is None and example.prompt_text is None):
            return None
        what = "an assistant turn" if example.messages is not None else "the completion"
        message = f"{what} ends without a stop token, so a model never learns to stop"
        help = "use the template that belongs to the model, or add its stop token to yours"
        return Finding("FT433", message, example.row.origin, help)

    def fit(self, unit: Sequence[TokenizedRow | PlacedRow]) -> list[FittedRow]:
        """Applies ``data.overlong`` to the rows of a unit; if one of them goes, all do, and are refused once.

        Rows that would be alike once they are cut have nothing to be compared by, and go.
        """
        first = unit[0]
        pieces = self._overlong == "split" and self.loss_on == "all" and len(unit) == 1
        if pieces and isinstance(first, TokenizedRow) and not first.images:
            return self._split(first)
        fitted = [self._fit(tokens) for tokens in unit]
        if len(fitted) == 1:
            return fitted
        kept = [one.tokens.input_ids for one in fitted if one.tokens is not None]
        alike = len(kept) == len(fitted) and all(ids == kept[0] for ids in kept)
        if len(kept) == len(fitted) and not alike:
            return fitted
        refused = next((one.overlong for one in fitted if one.overlong is not None), None)
        return [FittedRow(None, fitted[0].length, refused), *(FittedRow(None, one.length) for one in fitted[1:])]

    def _split(self, tokens: TokenizedRow) -> list[FittedRow]:
        """A row as pieces of which each begins with the last token of the one before: every token is learned once."""
        length, step = len(tokens.input_ids), self._limit - 1
        pieces = []
        for start in range(0, max(length - 1, 1), step):
            ids, labels = (part[start : start + self._limit] for part in (tokens.input_ids, tokens.labels))
            labels = [IGNORE_INDEX, *labels[1:]] if start else labels
            if not start or any(label != IGNORE_INDEX for label in labels):
                pieces.append(FittedRow(replace(tokens, input_ids=ids, labels=labels), len(ids)))
        return pieces

    def _fit(self, tokens: TokenizedRow | PlacedRow) -> FittedRow:
        length = tokens.length
        if length <= self._limit:
            return FittedRow(tokens, length)
        if isinstance(tokens, PlacedRow):
            tokens = tokens.tokenized()
        if self._overlong in ("error", "split"):
            return FittedRow(None, length, self._refused(length, tokens.row))
        if tokens.images and not isinstance(self.vision, str):
            cut = self.vision.cut(tokens, self._limit)
        else:
            short = slice(self._limit)
            cut = replace(tokens, input_ids=tokens.input_ids[short], labels=tokens.labels[short])
        if self._overlong == "drop" or all(label == IGNORE_INDEX for label in cut.labels):
            return FittedRow(None, length)
        return FittedRow(cut, length)


#: Characters of a prompt and of answers that are shown.
_SHOWN = 24


def _with_implicit_prompt(
    examples: Sequence[Example], parts: Sequence[Sequence[TokenizedText]]
) -> tuple[list[list[TokenizedText]], str]:
    """A pair of texts with the tokens that both begin with as the prompt, up to a whole word, and how that looks.

    No token goes from the prompt into an answer: prompt and answer have the tokens of the whole text. Raises Misfit
    where no word ends between two tokens.
    """
    texts = [str(example.text) for example in examples]
    (one,), (other,) = parts
    head = one.rendered.spans[0][0] - len(examples[0].prompt_text or "")
    place = split_between(one, other, (head + end for end in shared_beginnings(texts[0], texts[1]) if end))
    if place is None:
        raise Misfit("chosen and rejected have no tokens in common that could be their prompt: write it as `prompt`")
    asked = texts[0][: place - head]
    ends = [asked[-_SHOWN:], *(text[len(asked) : len(asked) + _SHOWN] for text in texts)]
    told = "{!r}, before {!r} and {!r}".format(*ends)
    return [[answered_from(place, one)] for (one,) in parts], f"{examples[0].row.origin}: {told}"
