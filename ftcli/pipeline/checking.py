"""`ftcli check`: preflight, nothing built.

It looks at rows as training and evaluation will read them: rendered by the chat template, as tokens, measured; on
request it shows some. ``--as all`` answers for every GPU that has a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftcli.assets import bundled
from ftcli.config.load import LoadedRecipe
from ftcli.errors import Finding, FtcliError
from ftcli.facts.config_file import looks_local
from ftcli.facts.device import GPUS, named_device
from ftcli.judges import judge_name, judging_tasks
from ftcli.paths import exists
from ftcli.plain import FLATTENED, LEFT_OUT
from ftcli.plan.checkpointing import with_graphs_that_fit
from ftcli.plan.execution import ExecutionPart
from ftcli.plan.forecast import Forecast, TokenCounts, forecast, why_unknown
from ftcli.plan.memory.candidates import Level, candidate
from ftcli.plan.run import RunPlan
from ftcli.plan.trained import PlannedAdapters, left_out
from ftcli.preflight.checks.context import Context, NotMade
from ftcli.preflight.checks.support import is_installed
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import checked, preflight, with_sources
from ftcli.reporting import Session
from ftcli.rows.places import is_away, local_sources
from ftcli.tables import code_of, exports, policies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.survey import RowSurvey, SampledRow, SurveyedSource
    from ftcli.data.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer of `ftcli check`. ``attention``: what the layers take, where the report says otherwise; ``judges``:
    those of `ftcli sample`; ``forecast``: time and cost, where a price was given.
    """

    report: PreflightReport = field(metadata=FLATTENED)
    adapters: PlannedAdapters | None
    rows: tuple[SurveyedSource, ...] = ()
    attention: str = field(default="", metadata=LEFT_OUT)
    judges: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    samples: tuple[SampledRow, ...] = field(default=(), metadata=LEFT_OUT)
    forecast: Forecast | None = field(default=None, metadata=LEFT_OUT)


def check_recipe(
    loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0, prices: Prices | None = None
) -> CheckResult:
    """The preflight report, with ``samples`` rows of each training source as tokens, and what the run costs.

    Raises FtcliError with all findings of the first stage that has errors; the last one is what the rows come to, as
    training and evaluation read them, as far as that can be said here and now.
    """
    report = checked(loaded, session, "check", named_device(as_gpu) if as_gpu is not None else None)
    adapters, attention = _arithmetic(report), ""
    if report.plan.described is None:
        measured = report.plan.measured
        adapters, attention = measured.adapters, measured.attention
        report = replace(report, parts=tuple(_corrected(part, attention) for part in report.parts))
    shown = _samples(session, report, samples) if samples else ()
    rows, not_made = look_at_rows(report, session)
    report = replace(report, not_made=(*report.not_made, *not_made))
    found = None if prices is None else _forecast(report, rows, prices.of(as_gpu or report.device.name))
    if isinstance(found, NotMade):
        report, found = replace(report, not_made=(*report.not_made, found)), None
    recipe = report.recipe
    judges = tuple(one.file or judge_name(one) for one in recipe.rewards or judging_tasks(recipe))
    return CheckResult(report, adapters, rows, attention, judges, shown, found)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a GPU for an hour: one for all, or by name."""

    every: float | None = None
    by_gpu: Mapping[str, float] = field(default_factory=dict)

    def of(self, gpu: str) -> float | None:
        """The price of a GPU by its name in ``--as``; None where it is not known."""
        return self.by_gpu.get(gpu.strip().lower(), self.every)


def _forecast(report: PreflightReport, rows: Sequence[SurveyedSource], price: float | None) -> Forecast | NotMade:
    counted = _token_counts(report, rows)
    reason = counted if isinstance(counted, str) else why_unknown(report.plan)
    if price is None:
        reason = f"no price is known of {report.device.name}"
    if reason is not None or price is None or isinstance(counted, str):
        return NotMade("time and cost", str(reason))
    return forecast(report.plan, counted, price)


def _token_counts(report: PreflightReport, rows: Sequence[SurveyedSource]) -> TokenCounts | str:
    """Tokens of the recipe's rows, or why they are not known."""
    from ftcli.data.order import mixture  # which imports torch

    of = {key: [one for one in rows if one.key == key] for key in ("data.train", "data.eval")}
    unknown = [one.source for found in of.values() for one in found if one.tokens is None]
    trained, held_out = (sum(one.tokens or 0 for one in of[key]) for key in ("data.train", "data.eval"))
    data = report.recipe.data
    if len(of["data.train"]) < len(data.train) or len(of["data.eval"]) < len(data.eval):
        return "not all rows are on this machine, or no tokenizer is (--show-sample 1 fetches it)"
    if unknown:
        return f"the tokens of {unknown[0]} are not known"
    repeats = mixture([max(1, round(one.kept or 0)) for one in of["data.train"]], data.weights, data.epochs).repeats
    seen = list(zip(of["data.train"], repeats, strict=True))
    trained = sum((one.tokens or 0) * times for one, times in seen)
    kept = sum((one.kept or 0) * times for one, times in seen)
    return TokenCounts(trained, kept, held_out, exact=all(one.whole for one in rows))


def _corrected(part: ExecutionPart, attention: str) -> ExecutionPart:
    """The row of attention as the model has it: some families have no SDPA."""
    if part.part != "attention" or part.runs == attention:
        return part
    return replace(part, runs=attention, reason=f"transformers' own; this model has no {part.runs.upper()}")


def _arithmetic(report: PreflightReport) -> PlannedAdapters | None:
    """The planned adapters of a family whose shape is known; None for full fine-tuning."""
    shape = report.facts.shape
    if report.recipe.lora is None or shape is None:
        return None
    layers: Counter[str] = Counter()
    for each in report.plan.adapters:
        layers[each.linear.leaf] += each.layers
    return PlannedAdapters(layers, left_out(report.recipe, shape), report.plan.trained.elements)


def _samples(session: Session, report: PreflightReport, count: int) -> tuple[SampledRow, ...]:
    from ftcli.data.survey import sample_rows
    from ftcli.job import open_job

    job = open_job(report, session)
    return tuple(
        sample
        for source in job.recipe.data.train
        for sample in sample_rows(
            source,
            job.recipe.data,
            job.tokenizer,
            job.stops,
            count,
            prompts_only=report.plan.method.from_prompts,
            offline=session.offline,
            vision=job.vision,
        )
    )


#: Seconds for all rows of a recipe. Whatever is tokenized in that time is not tokenized again by the run.
SECONDS = 10.0
_CHECK = "rows as tokens"
#: Rows that are compared with each other in a second or two; the run compares more.
_MOST_ROWS = 20_000


def look_at_rows(report: PreflightReport, session: Session) -> tuple[tuple[SurveyedSource, ...], tuple[NotMade, ...]]:
    """Looks at the rows of local sources with a tokenizer that is on this machine; warnings and notes are told. Returns
    which rows were looked at, and the checks that could not be made.

    Raises FtcliError (exit 4) with what training and evaluation would refuse; whatever the tokenizer of a local model
    raises.
    """
    tokenizer, reason = _tokenizer(report)
    if tokenizer is None:
        return (), (NotMade(_CHECK, reason),)
    for finding in _unserved(report, tokenizer):
        session.reporter.finding(finding)
    from ftcli.data.survey import RowSurvey
    from ftcli.job import vision_of
    from ftcli.time_limit import TimeBudget

    looking = RowSurvey(
        report.recipe.data,
        tokenizer,
        TimeBudget(SECONDS),
        cache_dir=session.cache_dir,
        reporter=session.reporter,
        vision=vision_of(report, tokenizer, offline=True),
    )
    not_compared = _look(looking, report, tokenizer)
    for finding in dict.fromkeys(looking.findings):
        session.reporter.finding(finding)
    looking.raise_failures()
    of_tasks = (source for task in report.recipe.eval.tasks for source in task.data)
    every = (*report.recipe.data.train, *report.recipe.data.eval, *of_tasks)
    away = sorted({source.path for source in every if is_away(source)})
    not_made = [NotMade(f"{_CHECK}: {name}", "it is not on this machine; the run reads it") for name in away]
    not_made += not_compared
    for one in looking.found:
        if not one.whole:
            looked = f"its first {one.rows:,} rows were, and nothing is wrong with them" if one.rows else "none was"
            streamed = report.recipe.data.streaming and one.key == "data.train"
            rest = "nobody knows how many there are (data.streaming)" if streamed else f"in {SECONDS:g} s"
            not_made.append(NotMade(f"{_CHECK}: {one.source}", f"{looked}, {rest}; the run looks at all"))
    return tuple(looking.found), tuple(not_made)


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
    require_known_ids(tokenizer, report.facts, report.recipe.model.add_tokens)
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
    from ftcli.train.data import also_trained

    recipe, stops = report.recipe, stop_token_ids(report.facts, tokenizer)
    survey, not_made = report.plan.method.survey, []
    if survey is not None:
        code_of(survey)(looking, recipe)
    else:
        local = local_sources(recipe.data.train)
        table = looking.rows("data.train", local, stops)
        held_out = looking.rows("data.eval", local_sources(recipe.data.eval), stops)
        if table is not None and held_out is not None and len(table) <= _MOST_ROWS:
            looking.findings += also_trained(table, held_out)
        if table is not None and len(table) and len(local) == len(recipe.data.train):
            not_made = _look_at_all(looking, report, table)
    room = room_of_task(recipe.data, recipe.eval.generate)
    for task in recipe.eval.tasks:
        looking.prompts("eval.tasks", local_sources(task.data or recipe.data.eval), room, task.max_rows)
    return not_made


def _look_at_all(looking: RowSurvey, report: PreflightReport, table: TokenTable) -> list[NotMade]:
    """Findings of training on its rows together, such as labels that are all alike."""
    from ftcli.train.on_rows import row_method

    method = row_method(report.plan.method)
    if method.compares_rows and len(table) > _MOST_ROWS:
        reason = f"there are {len(table):,}, and more than {_MOST_ROWS:,} take too long here; the run compares all"
        return [NotMade("rows compared with each other", reason)]
    try:
        looking.findings += method.findings(report.recipe, table)
    except FtcliError as error:
        looking.failures.append(error)
    return []


_ROWS = "train.per_device_train_batch_size"
#: Batches that are tried, each twice the one before.
_DOUBLED = 10


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """The verdict of preflight on one GPU: ``refused``, with the ``reason``, for another thing than memory.
    ``most_rows`` are the recipe's rows a micro-batch, doubled as long as that fits under the same policy; seconds and
    cost are right ``within`` a share. What is not known is None.
    """

    gpu: str
    verdict: Level | Literal["refused"]
    peak_bytes: int | None
    available_bytes: int | None
    dtype: str | None = None
    gradient_checkpointing: str | None = None
    most_rows: int | None = None
    reason: str = ""
    seconds: float | None = field(default=None, metadata=LEFT_OUT)
    cost: float | None = field(default=None, metadata=LEFT_OUT)
    within: float | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class EveryGpu:
    """The answers for all GPUs, those with the least memory first. ``cheapest``: the one on which the run fits and
    costs least; ``unknown``: why nothing is said of costs, where a price was given.
    """

    gpus: tuple[GpuVerdict, ...]
    cheapest: str | None = field(default=None, metadata=LEFT_OUT)
    unknown: str | None = field(default=None, metadata=LEFT_OUT)


def check_every_gpu(loaded: LoadedRecipe, session: Session, prices: Prices | None = None) -> EveryGpu:
    """Preflight of the recipe for every GPU of the table; rows are looked at by the check for a single one. Raises
    FtcliError with what all of them are refused for alike, such as an error of the recipe or of the model.
    """
    loaded = replace(loaded, recipe=with_sources(Context(loaded.recipe, loaded.origins, "check"), session))
    names = sorted(GPUS, key=lambda name: GPUS[name].memory_bytes or 0)
    found = [_asked(loaded, session, name) for name in names]
    errors = [answer for answer in found if isinstance(answer, FtcliError)]
    if len(errors) == len(found) and len({_errors(error) for error in errors}) == 1:
        raise errors[0]
    verdicts = tuple(_verdict(name, answer) for name, answer in zip(names, found, strict=True))
    reports = [answer for answer in found if not isinstance(answer, FtcliError)]
    if prices is None or not reports:
        return EveryGpu(verdicts)
    counted = _token_counts(reports[0], look_at_rows(reports[0], session)[0])
    if isinstance(counted, str):
        return EveryGpu(verdicts, None, counted)
    priced, reasons = [], []
    for verdict, answer in zip(verdicts, found, strict=True):
        price = prices.of(verdict.gpu)
        reason = "" if isinstance(answer, FtcliError) else why_unknown(answer.plan)
        if isinstance(answer, FtcliError) or reason is not None or price is None:
            reasons += [reason] if reason else []
            priced.append(verdict)
            continue
        told = forecast(answer.plan, counted, price)
        priced.append(replace(verdict, seconds=told.seconds, cost=told.cost, within=told.within))
    fitting = [each for each in priced if each.cost is not None and each.verdict in ("fits", "tight")]
    cheapest = min(fitting, key=lambda each: each.cost or 0.0, default=None)
    unknown = None if cheapest is not None else next(iter(reasons), "no price is known of a GPU on which it fits")
    return EveryGpu(tuple(priced), None if cheapest is None else cheapest.gpu, unknown)


def _asked(loaded: LoadedRecipe, session: Session, name: str) -> PreflightReport | FtcliError:
    try:
        return preflight(loaded, command="check", device=named_device(name), offline=session.offline)
    except FtcliError as error:
        return error


def _errors(error: FtcliError) -> tuple[Finding, ...]:
    return tuple(finding for finding in error.findings if finding.severity == "error")


def _verdict(name: str, answer: PreflightReport | FtcliError) -> GpuVerdict:
    available = named_device(name).available_bytes
    if isinstance(answer, FtcliError):
        first = _errors(answer)[0]
        level: Level | Literal["refused"] = "does not fit" if first.code == "FT601" else "refused"
        reason = first.message if first.help is None else f"{first.message}; {first.help}"
        return GpuVerdict(name, level, None, available, reason=f"{first.code}: {reason}")
    verdict, plan = answer.verdict, answer.plan
    return GpuVerdict(
        name,
        "unknown" if verdict is None else verdict.level,
        None if verdict is None else verdict.needed_bytes,
        available,
        answer.dtypes.compute,
        policies.as_recipe(plan.recipe.train.checkpointing) if plan.trains else None,
        _most_rows(plan) if plan.trains and verdict is not None else None,
    )


def _most_rows(plan: RunPlan) -> int:
    rows = plan.recipe.train.per_device_train_batch_size
    for _ in range(_DOUBLED):
        found = candidate(with_graphs_that_fit(plan.changed({_ROWS: 2 * rows})))
        if found is None or found.level != "fits":
            break
        rows *= 2
    return rows
