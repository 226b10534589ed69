"""Tokenized sources on disk, found again by what they were made of: a second run starts at once.

An entry is a folder, written aside and renamed: it is complete or absent. Entries may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.data.tokens import TokenStore, TokenWriter
from ftcli.paths import scratch
from ftcli.plain import JsonObject, plain_fields
from ftcli.rows.hub import hub_commit
from ftcli.rows.places import files_of, is_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.vision import Vision

#: Part of every key: raised whenever the same input gives other tokens or other files.
FORMAT = 7
#: The same of rows that may have images.
IMAGES = 2


def contents_of(source: DatasetConfig, *, offline: bool) -> list[tuple[str, str]] | None:
    """Name and SHA-256 of each file of the source now; of a Hub dataset its commit, None where nobody can say that.

    Raises FtcliError FT401, FT402, FT407 as :func:`files_of`, OSError for an unreadable file.
    """
    if is_hub(source):
        commit = hub_commit(source, offline=offline)
        return None if commit is None else [(source.path, commit)]
    found = []
    for file in files_of(source):
        with file.path.open("rb") as stream:
            found.append((file.name, hashlib.file_digest(stream, "sha256").hexdigest()))
    return found


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything in a tokenizer that its token ids depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    specials = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    text = json.dumps([type(tokenizer).__name__, state, specials])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def key_of(
    source: DatasetConfig,
    contents: list[tuple[str, str]],
    data: DataConfig,
    template: str | None,
    tokenizer: str,
    stops: Collection[int],
    vision: Vision | None = None,
) -> str:
    """The name of the entry: a hash of everything that tokens, labels and the names of rows depend on.

    Not in it: where a dataset lies, unless its rows may name images beside it; when it was written, its weight, and how
    many processes read it.
    """
    chosen = source.model_dump(mode="json", include={"columns", "remove_columns", "max_rows", "name", "split"})
    names = {"format", "max_seq_len", "overlong", "max_bad_rows", "loss_on", "history", "reasoning"}
    names |= {"chat_template_kwargs"}
    if source.part is not None:
        chosen["part"] = plain_fields(source.part)
    settings = data.model_dump(mode="json", include=names)
    parts: list[Any] = [FORMAT, contents, chosen, settings, template, tokenizer]
    if vision is not None:
        folders = [] if is_hub(source) else sorted({str(file.path.parent.absolute()) for file in files_of(source)})
        parts += [vision.identity, folders, IMAGES]
    text = json.dumps([*parts, sorted(stops)], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class TokenCache:
    """Entries below ``folder``. With no folder, entries live as long as this object does.

    Args:
        warn: Told when the cache cannot be used; the run goes on without it.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._scratch: Path | None = None
        self._folder = folder / "tokens" if folder is not None else None

    def find(self, key: str | None, *, sees: bool = False) -> TokenStore | None:
        """The entry, or None when it is absent or damaged: every byte of it is compared. Where rows may name images in
        files of their own (``sees``), None also when one was changed, or when one may be why a row was skipped.
        """
        if self._folder is None or key is None:
            return None
        path = self._folder / key
        if not path.is_dir():
            return None
        try:
            found = TokenStore(path)
            if not sees or (found.shows_the_same() and not found.facts["ledger"]["bad_rows"]):
                return found
        except (OSError, ValueError) as error:
            self._warn(f"the tokenized data in {path} is damaged and will be made again ({error})")
        shutil.rmtree(path, ignore_errors=True)
        return None

    def make(self, key: str | None, fill: Callable[[TokenWriter], JsonObject]) -> TokenStore:
        """Writes an entry with ``fill``, which returns its facts, and opens it. Without a key it is not kept."""
        if self._folder is not None and key is not None:
            staged = self._staged(self._folder)
            if staged is not None:
                try:
                    write_store(staged, fill)
                    return self._keep(staged, self._folder / key)
                except OSError as error:
                    self._warn(f"tokenized data cannot be cached in {self._folder} ({error}); going on without a cache")
                finally:
                    shutil.rmtree(staged, ignore_errors=True)
        if self._scratch is None:
            stack = ExitStack()
            self._scratch = stack.enter_context(scratch("tokens")).path
            weakref.finalize(self, stack.close)
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        write_store(folder, fill)
        return TokenStore(folder)

    def _staged(self, root: Path) -> Path | None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".writing-", dir=root))
        except OSError as error:
            self._warn(f"tokenized data cannot be cached in {root} ({error}); going on without a cache")
            return None

    @staticmethod
    def _keep(staged: Path, path: Path) -> TokenStore:
        try:
            staged.rename(path)
        except OSError as error:
            try:
                return TokenStore(path)  # another run was faster, and wrote the same
            except (OSError, ValueError):
                raise error from None
        return TokenStore(path)


def write_store(folder: Path, fill: Callable[[TokenWriter], JsonObject]) -> JsonObject:
    """Writes a store into ``folder`` with ``fill``, which returns its facts; returns these."""
    writer = TokenWriter(folder)
    try:
        facts = fill(writer)
        writer.finish(facts)
    finally:
        writer.close()
    return facts
