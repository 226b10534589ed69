"""All rows of one source of a recipe: its files in order, columns renamed, faults beside the rows.

Of a dataset on the Hugging Face Hub they come through `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ftcli.config.data import DatasetConfig, Part
from ftcli.errors import Finding, FtcliError, Origin, first_line
from ftcli.facts.config_file import hub_errors
from ftcli.rows.places import HUB, files_of, is_hub
from ftcli.rows.readers import BrokenRow, json_type, read_file, without_nulls
from ftcli.rows.row import BROKEN_HELP, NO_ROWS_HELP, Row, column_names, data_error


def iterate(source: DatasetConfig, *, offline: bool = False) -> Iterator[Row | Finding]:
    """Each row, or the finding (FT403, FT405) that says why it is none, up to ``max_rows`` of both together.

    Raises FtcliError (exit 4) when the source itself cannot be read: FT401, FT402, FT403, FT406, FT407.
    """
    part = source.part
    for name, folder, number, value in islice(_values(source, offline=offline), source.max_rows):
        found = _row(source, name, number, value)
        if part is None or _is_in(found, part):
            yield replace(found, folder=folder) if isinstance(found, Row) else found


def _is_in(found: Row | Finding, part: Part) -> bool:
    """True if a row belongs to a part of its source: by its content, wherever it stands. Faults are of the trained
    part, so that each is told once.
    """
    if not isinstance(found, Row):
        return not part.held_out
    text = json.dumps(found.fields, sort_keys=True, default=repr)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") < part.share * 2**64) == part.held_out


def no_rows(source: DatasetConfig) -> FtcliError:
    """FT404: there is a file, and no row in it, or none in the part of it that is read."""
    if source.part is not None:
        which = "held out" if source.part.held_out else "left to train on"
        message = f"data.held_out {source.part.share:g} leaves no row of {source.path} that is {which}"
        return data_error("FT404", message, Origin(source.path), "choose another share, or name rows in data.eval")
    return data_error("FT404", f"{source.path} holds no rows", Origin(source.path), NO_ROWS_HELP)


def _values(source: DatasetConfig, *, offline: bool) -> Iterator[tuple[str, str | None, int, Any]]:
    """Name and folder of each file, and number and value of each of its rows."""
    if is_hub(source):
        yield from ((source.path, None, number, value) for number, value in hub_rows(source, offline=offline))
        return
    for file in files_of(source):
        folder = str(file.path.parent.absolute())
        yield from ((file.name, folder, number, value) for number, value in read_file(file))


def _row(source: DatasetConfig, name: str, number: int, value: Any) -> Row | Finding:
    if isinstance(value, BrokenRow):
        return Finding("FT403", value.reason, Origin(name, number), BROKEN_HELP)
    if not isinstance(value, dict):
        message = f"a row must be a JSON object, this is {json_type(value)}"
        return Finding("FT403", message, Origin(name, number), BROKEN_HELP)
    if source.remove_columns:
        value = {key: item for key, item in value.items() if key not in source.remove_columns}
    if not source.columns:
        return Row(name, number, value)
    taken = set(source.columns.values())
    missing = [column for column in source.columns.values() if column not in value]
    if missing:
        message = f"column {missing[0]!r} (named by `columns`) is missing; this row has: {column_names(value)}"
        return Finding("FT405", message, Origin(name, number))
    renamed = {wanted: value[present] for wanted, present in source.columns.items()}
    return Row(name, number, {**{key: item for key, item in value.items() if key not in taken}, **renamed})


def repository(source: DatasetConfig) -> str:
    """``org/name``."""
    return source.path.removeprefix(HUB)


def hub_rows(source: DatasetConfig, *, offline: bool) -> Iterator[tuple[int, Any]]:
    """Number and fields of each row of the wanted split; streamed where the recipe asks for it, and ``offline`` out of
    this machine's cache of the Hub alone.

    Raises FtcliError FT406 when the dataset, its split or the network is not there.
    """
    import datasets

    local = offline or not _reachable(source)
    try:
        rows = datasets.load_dataset(
            _cached(source) if local else repository(source),
            name=source.name,
            split=source.split or "train",
            revision=None if local else source.revision,
            streaming=source.streaming,
        )
        for number, row in enumerate(rows, 1):
            yield number, without_nulls(dict(row))
    except _errors() as error:
        raise _unavailable(source, error, offline=offline) from error


def _cached(source: DatasetConfig) -> str:
    """The folder of the dataset's files in this machine's cache. Raises an OSError where there is none."""
    from huggingface_hub import snapshot_download

    # Given its name, `datasets` would ask the network for half a minute even when told to use local files only.
    folder = snapshot_download(repository(source), repo_type="dataset", revision=source.revision, local_files_only=True)
    _require_whole(Path(folder))
    return str(folder)


def _require_whole(folder: Path) -> None:
    """Raises OSError when a file of several (`-00001-of-00003`) is missing: a download that was broken off."""
    parts: dict[tuple[str, int], int] = {}
    for path in folder.rglob("*-of-*"):
        found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(.*)", path.relative_to(folder).as_posix())
        if found is not None:
            key = (found[1] + found[3], int(found[2]))
            parts[key] = parts.get(key, 0) + 1
    for (name, wanted), present in parts.items():
        if present < wanted:
            raise OSError(f"{present} of the {wanted} files of {name} are here: its download was interrupted")


def _reachable(source: DatasetConfig) -> bool:
    """True if the Hub answers, asked once: `datasets` would try for half a minute before it reads its own cache.

    Raises FtcliError FT406 when it answers that there is no such dataset, or none for this user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(repository(source), revision=source.revision)
    except HfHubHTTPError as error:
        raise _unavailable(source, error, offline=False) from error
    except _errors():
        return False
    return True


def _errors() -> tuple[type[Exception], ...]:
    """Errors of `datasets` and the Hub's client."""
    from datasets.exceptions import DatasetsError

    return hub_errors(RuntimeError, DatasetsError)


def _unavailable(source: DatasetConfig, error: BaseException, *, offline: bool) -> FtcliError:
    what = repository(source)
    reason = first_line(error)
    if offline:
        message = f"the dataset {what} is not in this machine's cache, and ftcli was told to use no network"
        help = f"run once without --offline, or `hf download --repo-type dataset {what}` and name the folder ({reason})"
        return data_error("FT406", message, Origin(source.path), help)
    help = "check name, configuration (`name`), `split`, `revision` and the network; gated data needs `hf auth login`"
    return data_error("FT406", f"the dataset {what} cannot be read from the Hub: {reason}", Origin(source.path), help)


def hub_commit(source: DatasetConfig, *, offline: bool) -> str | None:
    """The commit that ``revision`` means now; None when nobody can say."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    revision = source.revision or "main"
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    if offline:
        refs = Path(HF_HUB_CACHE) / f"datasets--{repository(source).replace('/', '--')}" / "refs" / revision
        return refs.read_text(encoding="utf-8").strip() if refs.is_file() else None
    try:
        found = HfApi().dataset_info(repository(source), revision=revision).sha
    except _errors():
        return None
    return None if found is None else str(found)
