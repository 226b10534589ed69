"""A look at a recipe's rows as training reads them: rendered, tokenized and measured, for as long as a budget lasts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.data.asked import PromptLimit, asked_rows
from ftcli.data.cache import TokenCache
from ftcli.data.ledger import mostly_untrained
from ftcli.data.prepare import OutOfTime, SourceReader, accounts, raise_together
from ftcli.data.tokens import TokenStore, TokenTable
from ftcli.errors import Finding, FtcliError
from ftcli.reporting import Reporter
from ftcli.tables import layouts
from ftcli.time_limit import TimeBudget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SurveyedSource:
    """A source of which ``rows`` rows were looked at; ``whole`` where these are all that a run would read.

    ``key`` is where the recipe names it: ``data.train``, ``data.eval`` or ``eval.tasks``.
    """

    key: str
    source: str
    rows: int
    whole: bool


class RowSurvey:
    """Looks at sources of one recipe, all within one ``budget``; what is tokenized whole is kept in the cache.

    Attributes:
        found: What was looked at so far.
        findings: Warnings and notes.
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
    ) -> None:
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
        reader = SourceReader(self._data, self._tokenizer, tuple(stops), True, self._reporter, self._budget)
        stores: list[tuple[str, TokenStore]] = []
        for source in sources:
            if self._budget.spent():
                self.found.append(SurveyedSource(key, source.path, 0, whole=False))
                continue
            try:
                store, _ = reader.store(source, self._cache)
            except OutOfTime as error:
                self.found.append(SurveyedSource(key, source.path, error.rows, whole=False))
            except FtcliError as error:
                self.failures.append(error)
            else:
                stores.append((source.path, store))
        ledgers, findings = accounts(stores, self._data)
        self.findings += findings
        self.found += [SurveyedSource(key, ledger.name, ledger.rows, whole=True) for ledger in ledgers]
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
                    [source], self._data, self._tokenizer, room, offline=True, max_rows=max_rows, budget=self._budget
                )
            except FtcliError as error:
                self.failures.append(error)
            else:
                self.findings += warnings
                self.found.append(SurveyedSource(key, source.path, len(asked), whole=not self._budget.stopped))

    def raise_failures(self) -> None:
        """Raises FtcliError with all that is wrong, where anything is."""
        raise_together(self.failures)
