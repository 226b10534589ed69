"""A look at a recipe's rows as training reads them: rendered, tokenized and measured, for as long as a budget lasts.

And the first of them token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.data.asked import PromptLimit, asked_rows
from ftcli.data.cache import TokenCache
from ftcli.data.encode import TEXT_ALONE, Encoder, FittedRow
from ftcli.data.ledger import mostly_untrained
from ftcli.data.prepare import OutOfTime, SourceReader, accounts, raise_together
from ftcli.data.template import renderer_of
from ftcli.data.tokens import TokenizedRow, TokenStore, TokenTable
from ftcli.data.vision import Vision
from ftcli.errors import Finding, FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.plain import LEFT_OUT, JsonObject, plain_fields
from ftcli.reporting import Reporter
from ftcli.rows.layouts import layout_of, understand
from ftcli.rows.places import is_hub, local_sources
from ftcli.rows.prompts import prompts_of
from ftcli.rows.reading import iterate, no_rows
from ftcli.rows.row import Row, raise_findings
from ftcli.tables import layouts
from ftcli.time_limit import TimeBudget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Fate = Literal["kept", "truncated", "dropped: longer than data.max_seq_len", "refused: longer than data.max_seq_len"]


@dataclass(frozen=True, slots=True)
class SampleToken:
    """One token: its id, its text (special tokens spelled out) and whether it bears loss."""

    id: int
    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row. ``origin`` is ``file:row``; ``tokens`` are those that reach the model, all of them if none does.
    ``label`` is ``desirable`` or ``undesirable`` where the row calls its answer so.
    """

    origin: str
    layout: str
    template: str | None
    fate: Fate
    tokens: tuple[SampleToken, ...]
    label: str | None = field(default=None, metadata=LEFT_OUT)

    @property
    def trained(self) -> int:
        """Number of its tokens that bear loss."""
        return sum(token.trained for token in self.tokens)

    def as_dict(self) -> JsonObject:
        """The JSON form."""
        return {**plain_fields(self), "trained": self.trained}


def sample_rows(
    source: DatasetConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    count: int,
    *,
    prompts_only: bool = False,
    offline: bool = False,
    vision: Vision | str = TEXT_ALONE,
) -> list[SampledRow]:
    """The first ``count`` rows; with ``prompts_only`` the prompts of GRPO, of which nothing is trained.

    Raises FtcliError with what is wrong with these rows, as :func:`ftcli.data.prepare.prepare`.
    """
    looked_at = source.model_copy(
        update={"max_rows": min(count, source.max_rows or count), "streaming": is_hub(source)}
    )
    items = list(islice(iterate(looked_at, offline=offline), count))
    raise_findings([item for item in items if isinstance(item, Finding)])
    rows = [item for item in items if isinstance(item, Row)]
    if not rows:
        raise no_rows(source)
    template = data.chat_template or "the tokenizer's chat template"
    if prompts_only:
        return _prompts(rows, data, tokenizer, template)
    layout = layout_of(rows[0], data.format)
    encoder = Encoder(tokenizer, stops, data, layout, vision)
    read = encoder.rows(rows)
    raise_findings([*read.findings, *read.overlong])
    chats = {row.origin for row in rows if understand(row, layout).messages is not None}
    units = [read.tokens[at : at + encoder.unit] for at in range(0, len(read.tokens), encoder.unit)]
    return [
        _sampled(tokens, fitted, layout, tokenizer, template if tokens.row.origin in chats else None)
        for unit in units
        for tokens, fitted in zip(unit, encoder.fit(unit), strict=True)
    ]


def _prompts(rows: list[Row], data: DataConfig, tokenizer: PreTrainedTokenizerBase, template: str) -> list[SampledRow]:
    renderer = renderer_of(tokenizer, data)
    found = []
    for prompt in prompts_of(rows, data.format):
        ids = tokenizer(renderer.prompt(prompt), add_special_tokens=False)["input_ids"]
        shown = tuple(_tokens(ids, [IGNORE_INDEX] * len(ids), tokenizer))
        rendered = template if prompt.messages is not None else None
        found.append(SampledRow(str(prompt.row.origin), "prompt", rendered, "kept", shown))
    return found


def _sampled(
    tokens: TokenizedRow, fitted: FittedRow, layout: str, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> SampledRow:
    shown = fitted.tokens if isinstance(fitted.tokens, TokenizedRow) else tokens
    fate: Fate = "kept" if len(shown.input_ids) == fitted.length else "truncated"
    if fitted.tokens is None:
        refused = fitted.overlong is not None
        fate = "refused: longer than data.max_seq_len" if refused else "dropped: longer than data.max_seq_len"
    texts = tuple(_tokens(shown.input_ids, shown.labels, tokenizer))
    label = ("desirable" if tokens.value > 0 else "undesirable") if layouts.row(layout).labelled else None
    return SampledRow(str(tokens.row.origin), layout, template, fate, texts, label)


def _tokens(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[SampleToken]:
    """Tokens with their texts; of a character that is split over several tokens, the first one shows it."""
    shown: list[SampleToken] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))
        last = (
            end == len(ids)
            or end - start >= 4
            or (labels[end - 1] == IGNORE_INDEX) != (labels[end if end < len(ids) else end - 1] == IGNORE_INDEX)
        )
        if text.endswith("\ufffd") and not last:
            continue
        for position in range(start, end):
            part = text if position == start else ""
            shown.append(SampleToken(ids[position], part, labels[position] != IGNORE_INDEX))
        start = end
    return shown


@dataclass(frozen=True, slots=True)
class SurveyedSource:
    """A source of which ``rows`` rows were looked at; ``whole`` where these are all that a run would read.

    ``key`` is where the recipe names it: ``data.train``, ``data.eval`` or ``eval.tasks``. ``tokens`` of ``kept`` rows
    are what a run would make of all of them, as far as was seen; None where nobody can say.
    """

    key: str
    source: str
    rows: int
    whole: bool
    kept: float | None = field(default=None, metadata=LEFT_OUT)
    tokens: float | None = field(default=None, metadata=LEFT_OUT)


class RowSurvey:
    """Looks at sources of one recipe, all within one ``budget``; what is tokenized whole is kept in the cache.

    Attributes:
        failures: What is wrong with rows: what :func:`ftcli.data.prepare.prepare` would raise.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        budget: TimeBudget,
        *,
        cache_dir: Path | None,
        reporter: Reporter,
        vision: Vision | str = TEXT_ALONE,
    ) -> None:
        self._vision = vision
        self.found: list[SurveyedSource] = []
        self.findings: list[Finding] = []
        self.failures: list[FtcliError] = []
        self._data = data
        self._tokenizer = tokenizer
        self._budget = budget
        self._cache = TokenCache(cache_dir, reporter.warn)
        self._reporter = reporter

    def rows(self, key: str, sources: Sequence[DatasetConfig], stops: Collection[int]) -> TokenTable | None:
        """Rows of `data.train` or `data.eval`, as :func:`ftcli.data.prepare.prepare` reads them from local sources.

        Returns them where all were looked at and none is wrong.
        """
        reader = SourceReader(
            self._data, self._tokenizer, tuple(stops), True, self._reporter, self._budget, self._vision
        )
        stores: list[tuple[str, TokenStore]] = []
        for source in sources:
            if self._budget.spent():
                self.found.append(SurveyedSource(key, source.path, 0, whole=False))
                continue
            try:
                store, _ = reader.store(source, self._cache)
            except OutOfTime as error:
                share = error.share or None
                reckoned = (None, None) if share is None else (error.kept / share, error.tokens / share)
                self.found.append(SurveyedSource(key, source.path, error.rows, False, *reckoned))
            except FtcliError as error:
                self.failures.append(error)
            else:
                stores.append((source.path, store))
        ledgers, findings = accounts(stores, self._data)
        self.findings += findings
        streams = {source.path for source in sources if source.window is not None and key == "data.train"}
        self.found += [
            SurveyedSource(key, each.name, each.rows, each.name not in streams, each.kept_rows, each.tokens)
            for each in ledgers
        ]
        if len(ledgers) < len(sources):
            return None
        if key == "data.train" and (self._data.format == "auto" or layouts.row(self._data.format).imitated):
            untrained = mostly_untrained(ledgers, self._data.loss_on)
            self.findings += [untrained] if untrained is not None else []
        return TokenTable([store for _, store in stores])

    def prompts(
        self, key: str, sources: Sequence[DatasetConfig], room: PromptLimit, max_rows: int | None = None
    ) -> None:
        """Rows that the model is asked, as :func:`ftcli.data.asked.asked_rows` reads them from local sources."""
        for source in sources:
            try:
                asked, warnings = asked_rows(
                    [source],
                    self._data,
                    self._tokenizer,
                    room,
                    offline=True,
                    max_rows=max_rows,
                    budget=self._budget,
                    vision=self._vision,
                )
            except FtcliError as error:
                self.failures.append(error)
            else:
                self.findings += warnings
                self.found.append(SurveyedSource(key, source.path, len(asked), whole=not self._budget.stopped))

    def training_prompts(
        self, sources: Sequence[DatasetConfig], room: PromptLimit, require: Callable[[int], None]
    ) -> None:
        """The prompts of ``data.train`` that lie on this machine; ``require`` raises where all of them are too few."""
        self.prompts("data.train", local_sources(sources), room)
        if len(self.found) == len(sources) and all(one.whole for one in self.found):
            try:
                require(sum(one.rows for one in self.found))
            except FtcliError as error:
                self.failures.append(error)

    def raise_failures(self) -> None:
        """Raises FtcliError with all that is wrong, where anything is."""
        raise_together(self.failures)
