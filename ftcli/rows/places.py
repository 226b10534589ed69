"""From a recipe's ``path`` to files: one file, a folder of them, bundled data, or a dataset of the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.assets import BUNDLED, asset, bundled
from ftcli.config.data import DatasetConfig
from ftcli.errors import Origin, first_line
from ftcli.paths import expanded, is_file, is_folder
from ftcli.rows.row import data_error
from ftcli.tables import stores

HUB = "hub:"
#: A folder of more files and folders is no folder of data: `/`, or a home.
MAX_ENTRIES = 50_000
#: Each may be compressed: `.jsonl.gz`.
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")

#: Words in file names that mean a split, as the Hub understands them.
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "test",
    "evaluation": "test",
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to read. ``name`` is what messages and ledgers call it; ``kind`` is one of :data:`KINDS`."""

    name: str
    path: Path
    kind: str
    compressed: bool


def is_away(source: DatasetConfig) -> bool:
    """True if the source's rows are not on this machine: a dataset of the Hub, or what was not fetched."""
    return is_hub(source) or (source.files is None and stores.of(source.path) is not None)


def is_hub(source: DatasetConfig) -> bool:
    """True if the source is a dataset of the Hugging Face Hub."""
    return source.path.startswith(HUB)


def local_sources(sources: Sequence[DatasetConfig]) -> list[DatasetConfig]:
    """The sources whose files are on this machine."""
    return [source for source in sources if not is_away(source)]


def resolve_path(name: str) -> Path:
    """The file or folder that a ``path`` means; ``bundled:NAME`` is ``assets/data/NAME.jsonl`` or ``.jsonl.gz``."""
    stem = bundled(name, "data")
    if stem is None:
        return expanded(name)
    plain = Path(f"{stem}.jsonl")
    return plain if plain.exists() else Path(f"{stem}.jsonl.gz")


def files_of(source: DatasetConfig) -> list[DataFile]:
    """The files of a local source, in the order in which they are read (a folder's: by path).

    Raises FtcliError (exit 4): FT401 nothing there, FT402 a kind of file that is not read, FT407 a folder without data,
    or with several splits of which none is named.
    """
    if source.files is not None:
        return _fetched(source, source.files)
    if stores.of(source.path) is not None:
        help = "train, or copy the files to this machine"
        raise data_error(
            "FT410", f"{source.path} was not fetched: it is too large to be looked at", Origin(source.path), help
        )
    path = resolve_path(source.path)
    if is_folder(path):
        return _folder(source, path)
    if not is_file(path):
        raise data_error("FT401", _missing(source, path), Origin(source.path), _where(source))
    found = data_file(source.path, path)
    if found is None:
        help = f"convert it to one of {', '.join(KINDS)}, each also as .gz"
        raise data_error("FT402", f"{path.name} is not a kind of file that ftcli reads", Origin(source.path), help)
    return [found]


def _fetched(source: DatasetConfig, files: Sequence[tuple[str, Path]]) -> list[DataFile]:
    found = [file for file in (data_file(name, path) for name, path in files) if file is not None]
    if not found:
        help = f"name one of {', '.join(KINDS)}, each also as .gz"
        raise data_error("FT402", f"{source.path} is not a kind of file that ftcli reads", Origin(source.path), help)
    return found if len(files) == 1 else _of_split(source, found)


def data_file(name: str, path: Path) -> DataFile | None:
    """The file as data, or None when its ending is not known."""
    compressed = path.name.endswith(".gz")
    stem = path.name.removesuffix(".gz")
    kind = next((kind for kind in KINDS if stem.endswith(kind)), None)
    return None if kind is None else DataFile(name, path, kind, compressed)


def _missing(source: DatasetConfig, path: Path) -> str:
    ships = source.path.startswith(BUNDLED)
    return f"ftcli bundles no data named {source.path}" if ships else f"no data file at {path.absolute()}"


def _where(source: DatasetConfig) -> str:
    if source.path.startswith(BUNDLED):
        return f"bundled are: {', '.join(sorted(p.name.split('.')[0] for p in asset('data').glob('*.jsonl*')))}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source.path):
        return f"paths are relative to the current directory; a dataset of the Hub is written {HUB}{source.path}"
    return "paths are relative to the current directory"


def _folder(source: DatasetConfig, folder: Path) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():  # datasets' DatasetDict.save_to_disk
        splits = sorted(p.parent.name for p in folder.glob("*/state.json"))
        wanted = source.split or ("train" if splits == ["train"] else None)
        if wanted not in splits:
            raise _ambiguous(source, splits, wanted)
        folder = folder / str(wanted)
    if (folder / "state.json").is_file():  # datasets' Dataset.save_to_disk
        return _saved(source, folder)
    found = _walk(source, folder)
    if not found:
        help = f"looked for {', '.join(KINDS)}"
        raise data_error("FT407", f"{source.path} holds no file of data", Origin(source.path), help)
    return _of_split(source, found)


def _walk(source: DatasetConfig, folder: Path) -> list[DataFile]:
    base = source.path.rstrip("/")
    paths = sorted(_below(source, folder))
    found = [data_file(f"{base}/{path.relative_to(folder).as_posix()}", path) for path in paths]
    return [file for file in found if file is not None and is_file(file.path)]


def _below(source: DatasetConfig, folder: Path) -> Iterator[Path]:
    """Paths below a folder, except hidden ones. Raises FtcliError FT407 if they are too many."""
    looked_at = 0
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        looked_at += len(folders) + len(names)
        if looked_at > MAX_ENTRIES:
            message = f"{source.path} holds more than {MAX_ENTRIES:,} files and folders"
            raise data_error("FT407", message, Origin(source.path), "name the folder in which the data lies")
        yield from (Path(root, name) for name in names if not name.startswith((".", "_")))


def _saved(source: DatasetConfig, folder: Path) -> list[DataFile]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state.get("_data_files", ())]
        held = state.get("_split")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        message = f"{source.path} is a saved dataset whose state.json cannot be read: {first_line(error)}"
        raise data_error("FT402", message, Origin(source.path), "save the dataset again") from error
    if source.split is not None and held is not None and source.split != held:
        raise _ambiguous(source, [str(held)], source.split)
    return [DataFile(f"{source.path.rstrip('/')}/{name}", folder / name, ".arrow", False) for name in names]


def _split_of(relative: str) -> str | None:
    for word in re.split(r"[^a-z]+", relative.lower()):
        if word in _SPLIT_WORDS:
            return _SPLIT_WORDS[word]
    return None


def _of_split(source: DatasetConfig, files: Sequence[DataFile]) -> list[DataFile]:
    """Files of the wanted split: test rows must never slip into training because they lie in the same folder."""
    base = re.split(r"[*?\[]", source.path)[0]
    splits = {file.name: _split_of(file.name.removeprefix(base)) for file in files}
    present = sorted({split for split in splits.values() if split is not None})
    unnamed = [name for name, split in splits.items() if split is None]
    if source.split is None:
        if len(present) > 1 or (unnamed and present not in ([], ["train"])):
            raise _ambiguous(source, [*present, *unnamed], None)
        return list(files)
    wanted = _SPLIT_WORDS.get(source.split, source.split)
    chosen = [file for file in files if splits[file.name] == wanted]
    if not chosen or unnamed:  # of a file that names no split nobody knows whether it belongs to this one
        raise _ambiguous(source, [*present, *unnamed], source.split)
    return chosen


def _ambiguous(source: DatasetConfig, splits: Sequence[str], wanted: str | None) -> Exception:
    names = ", ".join(splits) or "none"
    message = (
        f"{source.path} holds several splits ({names}) and the recipe names none"
        if wanted is None
        else f"{source.path} has no split {wanted!r}; by their names its files are: {names}"
    )
    return data_error("FT407", message, Origin(source.path), "name one with `split:`, or name a single file")
