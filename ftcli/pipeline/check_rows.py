"""`ftcli check` looks at rows as training and evaluation will: rendered by the chat template, as tokens, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.assets import bundled
from ftcli.config.data import DatasetConfig
from ftcli.errors import Finding, FtcliError
from ftcli.facts.config_file import looks_local
from ftcli.paths import exists
from ftcli.preflight.checks.context import NotMade
from ftcli.preflight.checks.support import is_installed
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.rows.places import is_hub, local_sources
from ftcli.tables import code_of, exports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.survey import RowSurvey, SurveyedSource
    from ftcli.data.tokens import TokenTable

#: Seconds for all rows of a recipe. Whatever is tokenized in that time is not tokenized again by the run.
SECONDS = 10.0
_CHECK = "rows as tokens"
#: Rows that are compared with each other in a second or two; the run compares more.
_MOST_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class RowsLookedAt:
    """The rows that were looked at, and the checks that could not be made."""

    rows: tuple[SurveyedSource, ...]
    not_made: tuple[NotMade, ...]


def look_at_rows(report: PreflightReport, session: Session) -> RowsLookedAt:
    """Looks at the rows of local sources with a tokenizer that is on this machine; warnings and notes are told.

    Raises FtcliError (exit 4) with what training and evaluation would refuse, all of it; whatever the tokenizer of a
    local model raises.
    """
    tokenizer, reason = _tokenizer(report)
    if tokenizer is None:
        return RowsLookedAt((), (NotMade(_CHECK, reason),))
    for finding in _unserved(report, tokenizer):
        session.reporter.finding(finding)
    from ftcli.data.survey import RowSurvey
    from ftcli.time_limit import TimeBudget

    looking = RowSurvey(
        report.recipe.data, tokenizer, TimeBudget(SECONDS), cache_dir=session.cache_dir, reporter=session.reporter
    )
    not_compared = _look(looking, report, tokenizer)
    for finding in dict.fromkeys(looking.findings):
        session.reporter.finding(finding)
    looking.raise_failures()
    hub = sorted({source.path for source in _all_sources(report) if is_hub(source)})
    not_made = [NotMade(f"{_CHECK}: {name}", "it is on the Hub; the run reads it") for name in hub]
    not_made += not_compared
    for one in looking.found:
        if not one.whole:
            looked = f"its first {one.rows:,} rows were, and nothing is wrong with them" if one.rows else "none was"
            not_made.append(NotMade(f"{_CHECK}: {one.source}", f"{looked}, in {SECONDS:g} s; the run looks at all"))
    return RowsLookedAt(tuple(looking.found), tuple(not_made))


def _tokenizer(report: PreflightReport) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The recipe's tokenizer if it is on this machine, or why it is not used."""
    named = report.recipe.model.tokenizer or report.recipe.model.name_or_path
    absent = f"the tokenizer of {named} is not on this machine; --show-sample N fetches it"
    if report.recipe.model.tokenizer is None and report.facts.tokenizer is None and _is_nowhere_here(named):
        return None, absent  # said without torch and transformers, whose import takes longer than the whole preflight
    from ftcli.data.template import Renderer
    from ftcli.model.load import config_of
    from ftcli.model.tokenizer import load_tokenizer, require_known_ids

    config_of(report.facts.raw)  # transformers reads it for the tokenizer as well, which is not at fault
    model, template = report.recipe.model, report.recipe.data.chat_template
    try:
        tokenizer = load_tokenizer(model, offline=True)
    except FtcliError:
        if report.facts.tokenizer is not None:
            raise
        return None, absent
    require_known_ids(tokenizer, report.facts)
    if template is not None:
        tokenizer.chat_template = Renderer(tokenizer, template).source
    return tokenizer, ""


def _unserved(report: PreflightReport, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yields what `ftcli export` will refuse: formats that cannot hold the tokenizer or its chat template."""
    from ftcli.model.tokenizer import stop_token_ids

    for name in report.recipe.export.formats:
        reference = exports.row(name).serves
        if reference is not None and is_installed("gguf"):
            try:
                code_of(reference)(tokenizer, stop_token_ids(report.facts, tokenizer), report.facts.vocab_size or 0)
            except FtcliError as error:
                for found in error.findings:
                    yield replace(found, message=f"export.formats: {name}: {found.message}", severity="note")


def _is_nowhere_here(name: str) -> bool:
    """True if a model is on the Hub and no file of it on this machine."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if bundled(name, "models") is not None or looks_local(name):
        return False
    return not exists(Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model")))


def _look(looking: RowSurvey, report: PreflightReport, tokenizer: PreTrainedTokenizerBase) -> list[NotMade]:
    """Looks at all rows; what could not be checked of them together."""
    from ftcli.data.asked import room_of_task
    from ftcli.model.tokenizer import stop_token_ids

    recipe, stops = report.recipe, stop_token_ids(report.facts, tokenizer)
    survey, not_made = report.plan.method.survey, []
    if survey is not None:
        code_of(survey)(looking, recipe)
    else:
        local = local_sources(recipe.data.train)
        table = looking.rows("data.train", local, stops)
        looking.rows("data.eval", local_sources(recipe.data.eval), stops)
        if table is not None and len(table) and len(local) == len(recipe.data.train):
            not_made = _look_at_all(looking, report, table)
    room = room_of_task(recipe.data, recipe.eval.generate)
    for task in recipe.eval.tasks:
        looking.prompts("eval.tasks", local_sources(task.data or recipe.data.eval), room, task.max_rows)
    return not_made


def _look_at_all(looking: RowSurvey, report: PreflightReport, table: TokenTable) -> list[NotMade]:
    """What training says of its rows together, such as labels that are all alike."""
    from ftcli.train.on_rows import RowMethod, row_method

    method = row_method(report.plan.method)
    if type(method).findings is RowMethod.findings:
        return []  # it compares none
    if len(table) > _MOST_ROWS:
        reason = f"there are {len(table):,}, and more than {_MOST_ROWS:,} take too long here; the run compares all"
        return [NotMade("rows compared with each other", reason)]
    try:
        looking.findings += method.findings(report.recipe, table)
    except FtcliError as error:
        looking.failures.append(error)
    return []


def _all_sources(report: PreflightReport) -> Iterator[DatasetConfig]:
    yield from (*report.recipe.data.train, *report.recipe.data.eval)
    yield from (source for task in report.recipe.eval.tasks for source in task.data)
