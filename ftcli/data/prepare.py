"""Rows to token ids and labels, with an account of every token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftcli.config import DataConfig, DatasetConfig
from ftcli.data.formats import Example, Layout, to_examples
from ftcli.data.ledger import DatasetLedger, quantiles
from ftcli.data.load import Row, data_error, raise_findings, read_rows
from ftcli.data.mask import IGNORE_INDEX, end_at_stop, labels_of
from ftcli.data.template import Rendered, Renderer
from ftcli.errors import Finding, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["assistant", "completion", "all"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized row: ``input_ids`` and ``labels`` of equal length, and where it came from."""

    row: Row
    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tokenized sources in recipe order, and one ledger for each."""

    sequences: list[Tokens]
    ledgers: list[DatasetLedger]


def prepare(
    sources: Sequence[DatasetConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
) -> Prepared:
    """Reads, renders, tokenizes and masks all ``sources``.

    Raises FtcliError (exit 4): what reading and rendering raise, FT431 rows longer than max_seq_len under
    ``overlong: error``, FT432 rows without a supervised token, FT433 turns without a stop token.
    """
    renderer = Renderer(tokenizer, data.chat_template)
    sequences: list[Tokens] = []
    ledgers: list[DatasetLedger] = []
    for source in sources:
        layout, examples = to_examples(read_rows(source), data.format)
        tokenized = _tokenize(examples, layout, data, renderer, tokenizer, stops)
        kept, ledger = _fit(tokenized, source, layout, data)
        sequences.extend(kept)
        ledgers.append(ledger)
    return Prepared(sequences, ledgers)


def resolve_loss_on(requested: str, layout: Layout) -> LossOn:
    """What ``loss_on: auto`` means for a layout; an explicit value is kept."""
    if requested in ("assistant", "completion", "all"):
        return requested  # type: ignore[return-value]
    return {"text": "all", "prompt_completion": "completion"}.get(layout, "assistant")  # type: ignore[return-value]


def _tokenize(
    examples: Sequence[Example],
    layout: Layout,
    data: DataConfig,
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
) -> list[Tokens]:
    loss_on = resolve_loss_on(data.loss_on, layout)
    rendered = [_render(example, loss_on, renderer, tokenizer) for example in examples]
    chat = [example.messages is not None for example in examples]
    encoded = tokenizer(
        [r.text for r in rendered], add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    result: list[Tokens] = []
    findings: list[Finding] = []
    for index, example in enumerate(examples):
        ids: list[int] = encoded["input_ids"][index]
        labels = labels_of(ids, encoded["offset_mapping"][index], rendered[index].spans)
        if all(label == IGNORE_INDEX for label in labels):
            message = f"no token of this row would be trained (loss_on {loss_on})"
            findings.append(Finding("FT432", message, example.row.origin))
        elif chat[index] and loss_on != "all" and not end_at_stop(labels, stops):
            message = "the chat template ends an assistant turn without a stop token, so a model never learns to stop"
            findings.append(Finding("FT433", message, example.row.origin))
        result.append(Tokens(example.row, ids, labels))
    raise_findings(findings)
    return result


def _render(example: Example, loss_on: LossOn, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    if example.messages is not None:
        if loss_on == "all":
            text = renderer.text(example.messages, example.row)
            return Rendered(text, ((0, len(text)),))
        rendered = renderer.conversation(example.messages, example.row)
        return Rendered(rendered.text, rendered.spans[-1:]) if loss_on == "completion" else rendered
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
    text = f"{bos}{example.text}{eos}"
    if loss_on == "assistant":
        raise data_error(
            "FT434",
            "loss_on: assistant needs conversations, this row is plain text",
            example.row.origin,
            help="use loss_on: completion for prompt_completion rows, all for text",
        )
    if loss_on == "completion" and example.prompt_text is None:
        raise data_error("FT434", "loss_on: completion needs a prompt and a completion", example.row.origin)
    start = len(bos) + len(example.prompt_text or "") if loss_on == "completion" else 0
    return Rendered(text, ((start, len(text)),))


def _fit(
    sequences: Sequence[Tokens], source: DatasetConfig, layout: Layout, data: DataConfig
) -> tuple[list[Tokens], DatasetLedger]:
    limit = data.max_seq_len
    long = [s for s in sequences if len(s.input_ids) > limit]
    if long and data.overlong == "error":
        raise_findings(
            [
                Finding(
                    "FT431",
                    f"{len(s.input_ids)} tokens, more than data.max_seq_len {limit}",
                    s.row.origin,
                    help="raise data.max_seq_len, or choose data.overlong: drop or truncate",
                )
                for s in long
            ]
        )
    kept = list(sequences)
    if long and data.overlong == "drop":
        kept = [s for s in sequences if len(s.input_ids) <= limit]
    elif long:
        cut = [Tokens(s.row, s.input_ids[:limit], s.labels[:limit]) for s in sequences]
        kept = [s for s in cut if any(label != IGNORE_INDEX for label in s.labels)]
    if not kept:
        raise data_error("FT404", f"no row of {source.path} is left ({len(long)} too long)", Origin(source.path))
    return kept, _ledger(sequences, kept, source, layout, data)


def _ledger(
    sequences: Sequence[Tokens], kept: Sequence[Tokens], source: DatasetConfig, layout: Layout, data: DataConfig
) -> DatasetLedger:
    lengths = [len(s.input_ids) for s in sequences]
    kept_rows = {(s.row.source, s.row.number) for s in kept}
    dropped = [s for s in sequences if (s.row.source, s.row.number) not in kept_rows]
    tokens = sum(len(s.input_ids) for s in kept)
    dropped_tokens = sum(len(s.input_ids) for s in dropped)
    return DatasetLedger(
        name=source.path,
        layout=layout,
        rows=len(sequences),
        kept_rows=len(kept),
        dropped_rows=len(dropped),
        truncated_rows=sum(length > data.max_seq_len for length in lengths) - len(dropped)
        if data.overlong == "truncate"
        else 0,
        tokens=tokens,
        supervised_tokens=sum(label != IGNORE_INDEX for s in kept for label in s.labels),
        cut_tokens=sum(lengths) - tokens - dropped_tokens,
        dropped_tokens=dropped_tokens,
        length_quantiles=quantiles(lengths),
    )
