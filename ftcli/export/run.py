"""Exports a run: each format is written aside, verified, and only then given its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ftcli import __version__
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.export.adapter import verify_adapter, write_adapter
from ftcli.export.safetensors import copy_model, verify_copy, verify_merged, write_merged
from ftcli.export.source import ADAPTER_WEIGHTS, ExportSource, resolve_source, sha256
from ftcli.reporting import Reporter
from ftcli.run.atomic import finite, replace_directory, storage_error, storage_errors, utc_now, write_json
from ftcli.run.directory import RunDirectory

#: Lies beside each export and says what it was made of and how it was verified; other programs pass over it.
RECORD = "ftcli_export.json"

Format = Literal["adapter", "safetensors"]
Say = Callable[[str], None]
Checked = tuple[dict[str, Any], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """One verified export.

    Attributes:
        format: ``adapter`` or ``safetensors``.
        path: Its folder.
        bytes: Size of its files.
        verification: What was compared and what came out, as in ``ftcli_export.json``.
        warnings: What people should know about it.
    """

    format: str
    path: Path
    bytes: int
    verification: dict[str, Any]
    warnings: tuple[Finding, ...] = ()


def export_run(
    source: RunDirectory | Path,
    formats: Sequence[str],
    *,
    reporter: Reporter,
    offline: bool,
    destination: Path | None = None,
) -> list[ExportResult]:
    """Write each of ``formats`` to ``<destination>/<format>`` and verify it by loading it again.

    Args:
        source: A run directory, or a folder with a PEFT adapter.
        formats: ``adapter``, ``safetensors``. Of a full fine-tune there is no adapter: the format is passed over
            with a warning (FT745), because it is among the defaults.
        reporter: Told what is being done, and the warnings.
        offline: Download nothing.
        destination: ``<run>/export`` when None (beside an adapter: ``<adapter>-export``).

    Raises:
        FtcliError: FT740 nothing to export, FT741 verification failed (exit 1, nothing is left), FT742 the source
            is damaged, FT743 the destination holds something else, FT746 a format that ftcli does not write, FT747
            and FT748 for merges that cannot be made, FT723 or FT724 when it cannot be written.
    """
    found = resolve_source(source, destination)
    unknown = [name for name in formats if name not in ("adapter", "safetensors")]
    if unknown:
        raise _unsupported(unknown[0])
    if found.kind == "model" and set(formats) == {"adapter"}:
        raise _no_adapter(found)
    results = []
    for name in dict.fromkeys(formats):
        if name == "adapter" and found.kind == "model":
            reporter.finding(
                Finding("FT745", "a full fine-tune has no adapter: that format is passed over", severity="warning")
            )
            continue
        result = _export(found, name, reporter, offline)
        for warning in result.warnings:
            reporter.finding(warning)
        reporter.info(f"{result.path}: {result.bytes / 2**20:,.1f} MiB, verified ({result.verification['compared']})")
        results.append(result)
    return results


def _export(source: ExportSource, name: str, reporter: Reporter, offline: bool) -> ExportResult:
    target = source.destination / name
    _require_replaceable(target)

    def say(text: str) -> None:
        reporter.info(f"export {name}: {text}")

    warnings: tuple[Finding, ...] = ()
    with _staged(target) as staged:
        if name == "adapter":
            write_adapter(source, staged, offline=offline)
            verification = verify_adapter(source, staged, offline=offline)
        elif source.kind == "model":
            copy_model(source, staged, offline=offline)
            verification = verify_copy(source, staged, offline=offline)
        else:
            verification, warnings = _merged(source, staged, offline, say)
        write_json(staged / RECORD, finite(_record(source, name, verification)))
        for path in staged.iterdir():  # safetensors writes files that only their owner may read
            path.chmod((staged / RECORD).stat().st_mode)
        size = sum(path.stat().st_size for path in staged.iterdir())
    return ExportResult(name, target, size, verification, warnings)


def _merged(source: ExportSource, staged: Path, offline: bool, say: Say) -> Checked:
    reference = write_merged(source, staged, offline=offline, say=say)
    return verify_merged(source, staged, reference, offline=offline, say=say)


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` that takes its place when the block ends, and is removed when it fails."""
    staged = target.with_name(f".tmp-{target.name}")
    with storage_errors(target):
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    try:
        yield staged
        replace_directory(staged, target)
    except OSError as error:
        raise storage_error(error, target) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _require_replaceable(target: Path) -> None:
    """An earlier export is replaced; anything else in its place belongs to somebody."""
    if not target.exists() or (target / RECORD).is_file():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    raise FtcliError.single(
        "FT743",
        f"{target} is there and is no export of ftcli's",
        exit_code=ExitCode.RECIPE,
        help="move it away; ftcli replaces only what it wrote",
    )


def _record(source: ExportSource, name: str, verification: dict[str, Any]) -> dict[str, Any]:
    weights = source.folder / ADAPTER_WEIGHTS
    return {
        "format": name,
        "written": utc_now(),
        "ftcli": __version__,
        "base": source.base.name_or_path if source.kind == "adapter" else None,
        "revision": source.base.revision if source.kind == "adapter" else None,
        "adapter_sha256": sha256(weights) if weights.is_file() else None,
        "verification": verification,
    }


def _unsupported(name: str) -> FtcliError:
    return FtcliError.single(
        "FT746",
        f"export format {name} is not written by this version of ftcli",
        exit_code=ExitCode.RECIPE,
        help="use export.formats: [adapter, safetensors]",
    )


def _no_adapter(source: ExportSource) -> FtcliError:
    return FtcliError.single(
        "FT740",
        f"there is nothing to export in {source.folder.parent}: a full fine-tune has no adapter",
        exit_code=ExitCode.RECIPE,
        help="use export.formats: [safetensors]",
    )
