"""Writes a run's exports: each format goes into a hidden folder, is verified there, and only then gets its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from ftcli import __version__
from ftcli.config.evaluation import ExportConfig
from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.export.adapter import with_its_vocabulary
from ftcli.export.clean.process import CleanProcess
from ftcli.export.further import missing_further
from ftcli.export.gguf.verify import ABSENT, has_llama_cpp
from ftcli.export.source import (
    ADAPTER_WEIGHTS,
    ExportSource,
    held_base,
    local_config,
    resolve_source,
    sha256,
    source_stops,
    source_tokenizer,
    unusable,
)
from ftcli.export.tensorfile import require_room
from ftcli.export.verify import Verified
from ftcli.export.weights import source_config
from ftcli.facts.config_file import hub_errors
from ftcli.facts.weights import EXPORT_RECORD, MODEL_CARD
from ftcli.gguf import require_quantizer
from ftcli.paths import make_folder
from ftcli.plain import JsonObject, plain, plain_fields
from ftcli.plan.quantization import stores_ternary_masters
from ftcli.preflight.checks.support import is_installed
from ftcli.reporting import Reporter
from ftcli.run.atomic import (
    TRASH_PREFIX,
    json_object_in,
    replace_directory,
    storage_errors,
    utc_now,
    write_json,
    writing_into,
)
from ftcli.run.directory import RunDirectory
from ftcli.run.integrity import hold_result, result_files
from ftcli.run.report.card import write_card
from ftcli.tables import code_of, exports
from ftcli.tables.gguf import architecture_of

#: The code of a format's row in :mod:`ftcli.tables.exports`: writes a source into an empty folder, loads it again and
#: compares; the last argument is told what takes time. Raises FtcliError FT741 where what was written is not what it
#: should be, FT742 where the source is damaged, OSError where nothing can be written.
WriteFormat = Callable[[ExportSource, Path, Callable[[str], None]], Verified]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """One verified export.

    Attributes:
        verification: What was compared and what came out, as in ``ftcli_export.json``.
    """

    format: str
    path: Path
    bytes: int
    verification: Verified

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self.verification.warnings

    def as_dict(self) -> JsonObject:
        warnings = [{"code": warning.code, "message": warning.message} for warning in self.warnings]
        return {**plain_fields(self), "warnings": warnings}


def export_run(
    source: RunDirectory | Path,
    formats: Sequence[str],
    *,
    reporter: Reporter,
    offline: bool,
    destination: Path | None = None,
    checkpoint: Path | None = None,
    settings: ExportConfig | None = None,
    force: bool = False,
    verify: bool = True,
) -> list[ExportResult]:
    """Write each of ``formats`` to ``<destination>/<format>`` and verify it by loading it again.

    Args:
        source: A run directory, or a folder with a PEFT adapter.
        formats: Names from :mod:`ftcli.tables.exports`. A format that needs an adapter is skipped for a full
            fine-tune, with a warning (FT745) only, since such a format is among the defaults.
        checkpoint: Of a run, a folder with other weights than its result; they go below
            ``<run>/export/step-…``.
        settings: What is asked of the formats; the defaults when None.
        force: Replace what an earlier export of something else, or otherwise, has left.
        destination: ``<run>/export`` when None (beside an adapter: ``<adapter>-export``).

    Raises FtcliError FT740 nothing to export, FT741 verification failed (exit 1, nothing is left), FT742 the source is
    damaged, FT743 the destination holds something else, or an export of something else and not ``force``, FT747 and
    FT748 for merges that cannot be made, FT723 or FT724 when it cannot be written: FT724 before anything is, where the
    disk has too little room for all that is asked for.
    """
    found = resolve_source(source, destination, checkpoint)
    for finding in hold_result(source) if isinstance(source, RunDirectory) and checkpoint is None else ():
        reporter.finding(finding)
    try:
        files = result_files(found.folder)
    except OSError as error:
        raise unusable(found.folder, f"{error.filename} cannot be read ({error.strerror})") from error
    found = replace(found, settings=settings or found.settings, verify=verify, files=files, offline=offline)
    skipped = [name for name in formats if found.kind == "model" and exports.row(name).needs_adapter]
    if skipped and len(skipped) == len(formats):
        reason = f"there is nothing to export in {found.folder.parent}: a full fine-tune has no adapter"
        raise _unfit(reason, exports.names(needs_adapter=False))
    _require_fit(found, formats)
    wanted = [name for name in dict.fromkeys(formats) if name not in skipped]
    unchanged = {} if force else {name: _unchanged(found, name, reporter) for name in wanted}
    made = [name for name in wanted if unchanged.get(name) is None]
    for name in skipped:
        message = f"a full fine-tune has no adapter: the format {name} is skipped"
        reporter.finding(Finding("FT745", message, severity="warning"))
    merging = any(exports.row(name).merges for name in wanted)
    for finding in held_base(found) if merging else ():
        reporter.finding(finding)
    with ExitStack() as stack:
        merges = any(exports.row(name).merges for name in made)
        whole = stack.enter_context(with_its_vocabulary(found)) if merges else found
        require_room(found.destination, sum(needed_bytes(whole, name) for name in made))
        _require_served(whole, made)
        require_quantizer(exports.gguf_types(made, found.settings.gguf.types))
        process = stack.enter_context(CleanProcess())
        if verify and made:
            process.start()  # what it imports takes as long as writing a small model
        found = replace(found, reload=process.ask, llama_cpp=_llama_cpp(made, verify, reporter))
        whole = replace(found, folder=whole.folder, vocabulary=whole.vocabulary)
        return [unchanged.get(name) or _written(found, whole, name, reporter) for name in wanted]


def _require_served(source: ExportSource, names: Sequence[str]) -> None:
    """Raises FtcliError FT756 or FT759 for a tokenizer that one of the formats cannot hold, before any is written."""
    served = [reference for name in names if (reference := exports.row(name).serves) is not None]
    if served and is_installed("gguf"):
        tokenizer = source_tokenizer(source)
        stops = source_stops(source, tokenizer)
        text = source_config(source).get_text_config()
        for reference in served:
            if architecture_of(text.model_type) is not None:  # else the tokenizer is the converter's business
                code_of(reference)(tokenizer, stops, text.vocab_size)


def _llama_cpp(made: Sequence[str], verify: bool, reporter: Reporter) -> bool:
    """True if a format is for llama.cpp, and that is there; that it is not is said once for all of them."""
    if not verify or not any(exports.row(name).llama_cpp for name in made):
        return False
    if not has_llama_cpp():
        reporter.info(ABSENT)
        return False
    return True


def _written(source: ExportSource, whole: ExportSource, name: str, reporter: Reporter) -> ExportResult:
    result = _export(source, whole, name, reporter)
    for warning in result.warnings:
        reporter.finding(warning)
    proof = f"verified ({result.verification.compared})" if source.verify else "not verified"
    reporter.info(f"{result.path}: {result.bytes / 2**20:,.1f} MiB, {proof}")
    return result


def _export(source: ExportSource, whole: ExportSource, name: str, reporter: Reporter) -> ExportResult:
    """One format, of ``source`` as it is, or as it is merged: with its embeddings trained ``whole``."""
    target = source.destination / name
    _require_replaceable(target)

    def say(text: str) -> None:
        reporter.info(f"export {name}: {text}")

    write: WriteFormat = code_of(exports.row(name).write)
    with _staged(target) as staged:
        verified = write(whole if exports.row(name).merges else source, staged, say)
        if exports.row(name).further:
            verified = replace(verified, warnings=(*verified.warnings, *missing_further(source)))
        write_json(staged / EXPORT_RECORD, plain({**_record(source, name, verified), "files": _sizes(staged)}))
        if source.run is not None:
            run = RunDirectory(source.run[0])
            write_card(run, staged, of_result=source.of_result, merged_with=verified.merged_with)
        for path in staged.iterdir():  # safetensors writes files that only their owner may read
            path.chmod((staged / EXPORT_RECORD).stat().st_mode)
        size = sum(path.stat().st_size for path in staged.iterdir())
    return ExportResult(name, target, size, verified)


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` that takes its place when the block ends, and is removed when it fails."""
    staged = target.with_name(f".tmp-{target.name}")
    with storage_errors(target):
        shutil.rmtree(staged, ignore_errors=True)
        make_folder(target.parent)
        staged.mkdir()
    try:
        with writing_into(staged, target):
            yield staged
            replace_directory(staged, target)
        for leftover in target.parent.glob(f"{TRASH_PREFIX}{target.name}.*"):  # of an export that was killed just here
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _require_replaceable(target: Path) -> None:
    """Refuses to replace anything but an earlier export and an empty folder."""
    if not target.exists() or (target / EXPORT_RECORD).is_file():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    help = "move it away; ftcli replaces only what it wrote"
    raise FtcliError.single("FT743", f"{target} exists and was not written by ftcli export", help=help)


def _unchanged(source: ExportSource, name: str, reporter: Reporter) -> ExportResult | None:
    """An earlier export of the same weights and settings, whole; None where there is none.

    Raises FtcliError FT743 for one of something else.
    """
    target = source.destination / name
    _require_replaceable(target)
    try:
        record = json_object_in(target / EXPORT_RECORD)
        told = dict(record["verification"])
        same = record["made_of"] == _made_of(source) and record["files"] == _sizes(target)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        message = f"{target} is an earlier export with other weights or settings, or was changed since"
        raise FtcliError.single("FT743", message, help="--force replaces it; --output DIR writes elsewhere")
    reporter.info(f"{target}: there already, with the same weights and settings; --force writes it again")
    return ExportResult(name, target, sum(record["files"].values()), Verified(str(told.pop("compared")), told))


def _made_of(source: ExportSource) -> JsonObject:
    """The identity of an export's source: the same again would be written again."""
    settings, template = source.settings.model_dump(mode="json", exclude={"formats"}), source.chat_template
    return {
        "ftcli": __version__,
        "files": source.files,
        "settings": settings,
        "template": template if template is None or not Path(template).is_file() else sha256(Path(template)),
        "verified": source.verify,
    }


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of the written files; evaluations write into the card later."""
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.name not in (EXPORT_RECORD, MODEL_CARD)
    }


def _record(source: ExportSource, name: str, verification: Verified) -> JsonObject:
    weights = source.folder / ADAPTER_WEIGHTS
    return {
        "format": name,
        "written": utc_now(),
        "ftcli": __version__,
        "base": source.base.name_or_path if source.kind == "adapter" else None,
        "revision": source.base.revision if source.kind == "adapter" else None,
        "adapter_sha256": sha256(weights) if weights.is_file() else None,
        "made_of": _made_of(source),
        "merged_with": verification.merged_with or None,
        "verification": verification,
    }


def _require_fit(source: ExportSource, formats: Sequence[str]) -> None:
    """FT740 for formats that would hold masters as plain weights, or cannot hold what scores rows."""
    place = source.folder.parent
    unfit = [name for name in formats if not exports.row(name).masters]
    if source.kind == "model" and unfit and stores_ternary_masters(local_config(source.folder).to_dict()):
        reason = f"{place} was trained with ternary weights; {unfit[0]} would store their float32 masters "
        raise _unfit(f"{reason}as ordinary weights", exports.of_masters())
    unfit = [name for name in formats if not exports.row(name).scores]
    if source.classifier and unfit:
        reason = f"{place} holds a reward model, which {unfit[0]} has no place for"
        raise _unfit(reason, [name for name, row in exports.TABLE.items() if row.scores])


def _unfit(reason: str, fit: Sequence[str]) -> FtcliError:
    """FT740: the formats that were asked for cannot hold what was trained; ``fit`` can."""
    return FtcliError.single("FT740", reason, help=f"use export.formats: [{', '.join(fit)}]")


def push(results: Sequence[ExportResult], repo: str) -> str:
    """Upload all exports into ``repo`` by one commit, whole or not at all: one export to its root, several to a folder
    each. The repository is made if it is not there, and so is the branch of ``NAME@BRANCH``.

    Returns:
        The address of what was committed.

    Raises FtcliError FT755 (exit 2) for one that was not verified, (exit 3) when the Hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    unproved = [result.format for result in results if "verified" in result.verification.facts]
    if unproved:
        raise _refused(f"{unproved[0]} was written with --no-verify", ExitCode.RECIPE, "leave --no-verify out")
    name, _, branch = repo.partition("@")
    added = [
        CommitOperationAdd(str(Path("." if len(results) == 1 else result.format, path.relative_to(result.path))), path)
        for result in results
        for path in sorted(result.path.rglob("*"))
        if path.is_file()
    ]
    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True, private=True)
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        said = f"{', '.join(result.format for result in results)}, verified by ftcli"
        done = api.create_commit(name, added, commit_message=said, revision=branch or None)
    except hub_errors() as error:
        help = "log in with `hf auth login`, check the name and the network; the export itself is complete"
        raise _refused(first_line(error), ExitCode.PREFLIGHT, help) from error
    return str(done.commit_url)


def _refused(reason: str, exit_code: ExitCode, help: str) -> FtcliError:
    return FtcliError.single("FT755", f"nothing is uploaded: {reason}", exit_code=exit_code, help=help)


def needed_bytes(source: ExportSource, name: str) -> int:
    """Bytes on disk that a format takes at most; 0 where it cannot be known before it is written.

    What keeps an export from being made is said by whoever makes it.
    """
    reference = exports.row(name).size
    if reference is None:
        return 0
    try:
        needed: int = code_of(reference)(source)
    except (FtcliError, OSError, SafetensorError):
        return 0
    return needed
