"""Datasets of the Hugging Face Hub: their rows, through `datasets`, and the commit that a revision means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftcli.config.data import DatasetConfig
from ftcli.errors import FtcliError, Origin, first_line
from ftcli.facts.config_file import hub_errors
from ftcli.rows.places import HUB
from ftcli.rows.readers import without_nulls
from ftcli.rows.row import data_error


def repository(source: DatasetConfig) -> str:
    """``org/name``."""
    return source.path.removeprefix(HUB)


def hub_rows(source: DatasetConfig, *, offline: bool, after: int = 0) -> Iterator[tuple[int, Any]]:
    """Number and fields of each row of the wanted split behind that with the number ``after``; streamed where the
    recipe asks for it, and ``offline`` out of this machine's cache of the Hub alone.

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
        for number, row in enumerate(rows.skip(after) if after else rows, after + 1):
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
