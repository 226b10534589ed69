"""Rows to token ids and labels: pure, a few rows at a time, the same in this process and in others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig
from ftcli.data.template import Rendered, Renderer
from ftcli.data.tokens import Encoded, Tokens, encoded_of
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.labels import IGNORE_INDEX, end_at_stop, labels_of
from ftcli.rows.layouts import misfit_finding, understand
from ftcli.rows.row import Example, Misfit, Row, data_error
from ftcli.tables import layouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def resolve_loss_on(requested: str, layout: str) -> str:
    """``data.loss_on`` with `auto` resolved: "assistant", "completion" or "all"."""
    return layouts.row(layout).loss_on[0] if requested == "auto" else requested


@dataclass(frozen=True, slots=True)
class Batch:
    """What a few rows came to. ``lengths`` are of all rows that could be tokenized, before any cut.

    ``findings`` are rows that are broken; ``overlong`` those that are refused under ``overlong: error``;
    ``dropped_tokens`` belonged to rows that were dropped.
    """

    encoded: Encoded
    lengths: tuple[int, ...]
    findings: tuple[Finding, ...] = ()
    overlong: tuple[Finding, ...] = ()
    dropped_rows: int = 0
    dropped_tokens: int = 0
    truncated_rows: int = 0
    cut_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """What becomes of a row: ``tokens`` reach the model; without them it is refused (``overlong``) or dropped."""

    tokens: Tokens | None
    length: int
    overlong: Finding | None = None


class Encoder:
    """Everything that turns rows of one layout into tokens. Can be sent to another process.

    Raises FtcliError FT435 when the tokenizer cannot say which characters a token stands for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int], data: DataConfig, layout: str
    ) -> None:
        if not tokenizer.is_fast:
            raise FtcliError.single(
                "FT435",
                f"{type(tokenizer).__name__} cannot say which characters a token stands for, so no mask can be checked",
                exit_code=ExitCode.DATA,
                help="use the model's tokenizer.json (a fast tokenizer), or name another with model.tokenizer",
            )
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, data.chat_template)
        self.layout = layout
        self.loss_on = resolve_loss_on(data.loss_on, layout)
        self._stops = frozenset(stops)
        self._limit = data.max_seq_len
        self._overlong = data.overlong

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Tokenizes ``rows``; raises FtcliError FT421 only, which concerns all of them."""
        tokenized, findings = self.rows(rows)
        fitted = [self.fit(tokens) for tokens in tokenized]
        kept = [one.tokens for one in fitted if one.tokens is not None]
        dropped = [one for one in fitted if one.tokens is None and one.overlong is None]
        cut = [one.length - len(one.tokens.input_ids) for one in fitted if one.tokens is not None]
        return Batch(
            encoded=encoded_of(kept),
            lengths=tuple(one.length for one in fitted),
            findings=tuple(findings),
            overlong=tuple(one.overlong for one in fitted if one.overlong is not None),
            dropped_rows=len(dropped),
            dropped_tokens=sum(one.length for one in dropped),
            truncated_rows=sum(count > 0 for count in cut),
            cut_tokens=sum(cut),
        )

    def rows(self, rows: Sequence[Row]) -> tuple[list[Tokens], list[Finding]]:
        """Each row's tokens at full length, and what is wrong with the others."""
        findings: list[Finding] = []
        examples: list[Example] = []
        rendered: list[Rendered] = []
        for row in rows:
            try:
                example = understand(row, self.layout)
                rendering = self._render(example)
                rendering.text.encode("utf-8")
            except Misfit as misfit:
                findings.append(misfit_finding(row, misfit, self.layout))
            except UnicodeEncodeError as error:
                reason = f"a lone surrogate at character {error.start + 1} of its text: broken UTF-16"
                findings.append(Finding("FT412", reason, row.origin))
            except FtcliError as error:
                if error.findings[0].code == "FT421":
                    raise
                findings += error.findings
            else:
                examples.append(example)
                rendered.append(rendering)
        tokenized, more = self._tokenize(examples, rendered)
        return tokenized, [*findings, *more]

    def _render(self, example: Example) -> Rendered:
        if example.messages is not None:
            return self._render_chat(example, example.messages)
        if self.loss_on == "assistant":
            raise data_error(
                "FT434",
                "loss_on: assistant needs conversations, this row is plain text",
                example.row.origin,
                help="use loss_on: completion for prompt_completion rows, all for text",
            )
        if self.loss_on == "completion":
            if example.prompt_text is None:
                raise data_error("FT434", "loss_on: completion needs a prompt and a completion", example.row.origin)
            return self.renderer.completion(example)
        return self.renderer.plain(example)

    def _render_chat(self, example: Example, messages: Sequence[dict[str, object]]) -> Rendered:
        chat = list(messages)
        if self.loss_on == "all":
            text = self.renderer.text(chat, example.row, tools=example.tools)
            return Rendered(text, ((0, len(text)),))
        rendered = self.renderer.conversation(chat, example.row, example.tools)
        if self.loss_on == "assistant":
            return rendered
        if example.completion_from is None:
            return replace(rendered, spans=rendered.spans[-1:])
        answers = [n for n, message in enumerate(chat) if message["role"] == "assistant" and n > 0]
        of_completion = sum(n >= example.completion_from for n in answers)
        return replace(rendered, spans=rendered.spans[len(rendered.spans) - of_completion :])

    def _tokenize(
        self, examples: Sequence[Example], rendered: Sequence[Rendered]
    ) -> tuple[list[Tokens], list[Finding]]:
        if not examples:
            return [], []
        encoded = self.tokenizer(
            [r.text for r in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        tokenized: list[Tokens] = []
        findings: list[Finding] = []
        for example, ids, offsets, rendering in zip(
            examples, encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True
        ):
            labels = labels_of(ids, offsets, rendering.spans)
            problem = self._check(example, labels)
            if problem is None:
                tokenized.append(Tokens(Row(example.row.source, example.row.number, {}), ids, labels))
            else:
                findings.append(problem)
        return tokenized, findings

    def _check(self, example: Example, labels: list[int]) -> Finding | None:
        """Ends supervised spans at their stop tokens, in place; returns what is wrong with the mask, if anything."""
        if all(label == IGNORE_INDEX for label in labels):
            return Finding(
                "FT432", f"no token of this row would be trained (loss_on {self.loss_on})", example.row.origin
            )
        ended = end_at_stop(labels, self._stops)
        if ended or (example.messages is None and example.prompt_text is None):
            return None
        what = "an assistant turn" if example.messages is not None else "the completion"
        return Finding(
            "FT433",
            f"{what} ends without a stop token, so a model never learns to stop",
            example.row.origin,
            "use the template that belongs to the model, or add its stop token to yours",
        )

    def fit(self, tokens: Tokens) -> Fitted:
        """What ``data.overlong`` makes of a row."""
        length = len(tokens.input_ids)
        if length <= self._limit:
            return Fitted(tokens, length)
        if self._overlong == "error":
            message = f"{length:,} tokens, more than data.max_seq_len {self._limit}"
            remedy = "raise data.max_seq_len, or choose data.overlong: drop or truncate"
            return Fitted(None, length, Finding("FT431", message, tokens.row.origin, remedy))
        labels = tokens.labels[: self._limit]
        if self._overlong == "drop" or all(label == IGNORE_INDEX for label in labels):
            return Fitted(None, length)
        return Fitted(Tokens(tokens.row, tokens.input_ids[: self._limit], labels), length)
