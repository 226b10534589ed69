"""The life of one run, the same for SFT and GRPO: opened, written to, finished whatever happens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftcli.config import DatasetConfig, Recipe
from ftcli.config.load import dump_recipe
from ftcli.data.ledger import DatasetLedger
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Progress, Reporter, Session
from ftcli.rows.places import files_of, is_hub
from ftcli.run.atomic import replace_directory, storage_errors
from ftcli.run.directory import OpenedRun, RunDirectory, open_run
from ftcli.run.ledger import DatasetTokens, write_tokens
from ftcli.run.manifest import (
    Fingerprint,
    build_manifest,
    fingerprint,
    read_manifest,
    require_same_data,
    write_manifest,
)
from ftcli.run.metrics import MetricsWriter
from ftcli.run.report import write_report
from ftcli.run.signals import StopRequest, exit_code_of


@dataclass(frozen=True, slots=True)
class RunContext:
    """An open run: its directory, where it continues, where metrics go, and who may stop it."""

    recipe: Recipe
    session: Session
    command: str
    opened: OpenedRun
    metrics: MetricsWriter
    stop: StopRequest

    @property
    def directory(self) -> RunDirectory:
        """The run's paths."""
        return self.opened.directory

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Appends to metrics.jsonl; ``line`` has ``step``."""
        self.metrics.write(int(line["step"]), {key: value for key, value in line.items() if key != "step"})

    def save_result(self, *writers: Callable[[Path], object]) -> Path:
        """Writes adapter/ or model/ aside and renames it; each of ``writers`` is given the folder to write into.

        Raises FtcliError FT723 or FT724 when it cannot be written.
        """
        target = self.directory.adapter_dir if self.recipe.lora is not None else self.directory.model_dir
        staged = target.with_name(f".writing-{target.name}")
        with storage_errors(target):
            shutil.rmtree(staged, ignore_errors=True)  # left behind by a crash
            staged.mkdir()
            for write in writers:
                write(staged)
            for file in staged.iterdir():
                file.chmod(0o644)  # safetensors makes files that only their owner can read
            replace_directory(staged, target)
        return target


@contextmanager
def opened_run(
    recipe: Recipe, session: Session, report: PreflightReport, command: str, kernels: Sequence[Mapping[str, Any]] = ()
) -> Iterator[RunContext | None]:
    """Opens the recipe's run directory for this process, or yields None when its run is complete already.

    Whatever ends the block is written into status.json and the report, then goes on its way.
    """
    recipe_yaml = dump_recipe(recipe)
    with ExitStack() as stack:
        opened = stack.enter_context(open_run(Path(str(recipe.run.output_dir)), recipe.run.resume, recipe_yaml))
        for warning in opened.warnings:
            session.reporter.finding(warning)
        if opened.already_complete:
            yield None
            return
        stop = stack.enter_context(StopRequest(sigterm=recipe.checkpoint.on_sigterm))
        with _status(opened, session):
            _write_manifest(opened, recipe, recipe_yaml, report, command)
            metrics = stack.enter_context(MetricsWriter(opened.directory.metrics_path, resume_step=opened.resume_step))
            if opened.resume_from is not None:
                session.reporter.info(f"resuming from {opened.resume_from}")
            yield RunContext(recipe, session, command, opened, metrics, stop)


@contextmanager
def _status(opened: OpenedRun, session: Session) -> Iterator[None]:
    try:
        yield
    except FtcliError as error:
        opened.finish(error.exit_code, message=error.findings[0].message)
        _report(opened, session)
        raise
    except KeyboardInterrupt:
        opened.finish(ExitCode.INTERRUPTED, message="stopped at once by a second signal")
        raise
    except BaseException as error:
        memory = type(error).__name__ == "OutOfMemoryError"
        code = ExitCode.OUT_OF_MEMORY if memory else ExitCode.BUG
        opened.finish(code, message=f"{type(error).__name__}: {str(error)[:200]}")
        raise
    opened.finish(ExitCode.OK)
    _report(opened, session)


def _report(opened: OpenedRun, session: Session) -> None:
    path = write_report(opened.directory)
    session.reporter.info(f"report: {path}")


def _write_manifest(opened: OpenedRun, recipe: Recipe, recipe_yaml: str, report: PreflightReport, command: str) -> None:
    data = fingerprints(recipe.data.train)
    previous = read_manifest(opened.directory.manifest_path)
    if opened.resume_from is not None:
        require_same_data(previous, data)
    manifest = build_manifest(
        command=command,
        recipe_yaml=recipe_yaml,
        device=asdict(report.device),
        seeds={"seed": recipe.run.seed},
        dtype_plan=asdict(report.plan),
        kernels=[],
        data=data,
        resume_step=opened.resume_step,
        previous=previous,
        predicted_memory=report.memory.as_dict() if report.memory is not None else None,
    )
    write_manifest(opened.directory.manifest_path, manifest)


def fingerprints(sources: Sequence[DatasetConfig]) -> list[Fingerprint]:
    """Identity of every data file, by content."""
    files = (file for source in sources if not is_hub(source) for file in files_of(source))
    return [fingerprint(file.name, file.path) for file in files]


def add_to_manifest(context: RunContext, **entries: Any) -> None:
    """Adds facts that are known only once the model is built."""
    manifest = read_manifest(context.directory.manifest_path)
    write_manifest(context.directory.manifest_path, {**manifest, **entries})


def write_token_ledger(context: RunContext, ledgers: Mapping[str, Sequence[DatasetLedger]]) -> None:
    """tokens.json, from the ledgers of each split."""
    write_tokens(
        context.directory.tokens_path,
        [
            DatasetTokens(
                name=ledger.name,
                split=split,
                rows=ledger.rows,
                rows_kept=ledger.kept_rows,
                rows_dropped=ledger.dropped_rows,
                rows_truncated=ledger.truncated_rows,
                tokens=ledger.tokens + ledger.cut_tokens + ledger.dropped_tokens,
                tokens_kept=ledger.tokens,
                tokens_cut=ledger.cut_tokens + ledger.dropped_tokens,
                tokens_masked=ledger.masked_tokens,
                longest=ledger.length_quantiles.get("max", 0),
            )
            for split, split_ledgers in ledgers.items()
            for ledger in split_ledgers
        ],
    )


class StepProgress:
    """Progress over optimizer steps. The bar is made when training begins and its length is known."""

    def __init__(self, reporter: Reporter, description: str) -> None:
        self._reporter = reporter
        self._description = description
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._step = 0

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def begin(self, step: int, total: int) -> None:
        """Starts at ``step`` (0, or the checkpoint's) of ``total``."""
        self._progress = self._stack.enter_context(self._reporter.progress(total, self._description))
        self._step = 0
        self.show(step, {})

    def show(self, step: int, line: Mapping[str, Any]) -> None:
        """Moves to ``step`` and shows a metrics line when it is of this step."""
        if self._progress is None:
            return
        self._progress.advance(step - self._step)
        self._step = step
        names = ("loss", "reward", "learning_rate", "tokens_per_second")
        values = {name: line[name] for name in names if isinstance(line.get(name), int | float)}
        if values and line.get("step") == step:
            self._progress.update(**values)


def raise_if_stopped(context: RunContext, stopped_by: str | None, step: int) -> None:
    """Ends a run that a signal stopped, after its checkpoint was written (exit 75 or 130)."""
    if stopped_by is None:
        return
    checkpoint = context.directory.checkpoints.path(step)
    name = context.stop.requested or "SIGTERM"
    raise FtcliError(
        [
            Finding(
                "FT701",
                f"stopped by {stopped_by} after step {step}; checkpoint written to {checkpoint}",
                help="start the same command again: it goes on from there",
            )
        ],
        exit_code_of(name),
    )
