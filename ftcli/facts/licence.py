"""The licence in the base model's own card."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from ftcli.facts.config_file import hub_errors, require_connection
from ftcli.facts.model import ModelFacts
from ftcli.facts.weights import MODEL_CARD
from ftcli.plain import JsonObject

_LONGEST_HEAD = 1 << 16
#: How the Hub writes a licence: `apache-2.0`, `gemma`, `other`.
_ID = re.compile(r"[a-z0-9][a-z0-9.\-]{0,63}")
_LINK = re.compile(r"https?://[^\s<>()\"'|]{1,300}")

#: ``fetch(repo_id, revision, offline)`` answers the local path of the repository's card, or None.
FetchCard = Callable[[str, str | None, bool], Path | None]


@dataclass(frozen=True, slots=True)
class Licence:
    """``id`` as the Hub writes it; ``name`` and ``link`` where that is ``other``."""

    id: str
    name: str | None = None
    link: str | None = None


def fetch_card(repo_id: str, revision: str | None, offline: bool) -> Path | None:
    """A Hub repository's card, from the cache or downloaded; None where there is none or no connection."""
    from huggingface_hub import constants, hf_hub_download

    with suppress(*hub_errors()):
        return Path(hf_hub_download(repo_id, MODEL_CARD, revision=revision, local_files_only=True))
    if offline:
        return None
    with suppress(*hub_errors()):
        require_connection(constants.ENDPOINT)
        return Path(hf_hub_download(repo_id, MODEL_CARD, revision=revision))
    return None


def licence_of(
    facts: ModelFacts, revision: str | None, *, offline: bool, fetch: FetchCard = fetch_card
) -> Licence | None:
    """The base model's licence by its card; None where that is not there, or says nothing that can be understood."""
    path = facts.folder / MODEL_CARD if facts.is_local else fetch(facts.name, revision, offline)
    if path is None:
        return None
    head = _front_matter(path)
    known = head.get("license")
    found = known[0] if isinstance(known, list) and known else known
    if not isinstance(found, str) or not _ID.fullmatch(found):
        return None
    name, link = head.get("license_name"), head.get("license_link")
    return Licence(
        found,
        name if isinstance(name, str) and _ID.fullmatch(name) else None,
        link if isinstance(link, str) and _LINK.fullmatch(link) else None,
    )


def _front_matter(path: Path) -> JsonObject:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_HEAD).decode("utf-8", errors="replace")
        match = re.match(r"---\r?\n(.*?)\r?\n---\s", text, re.DOTALL)
        values = yaml.safe_load(match[1]) if match is not None else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
