"""Bytes of a model of the Hub that are not on this machine yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from ftcli.facts.config_file import hub_errors, require_connection

#: ``sizes(repo_id, revision)`` answers the bytes of each file of a repository by name, and the commit they are of.
Sizes = Callable[[str, str | None], tuple[Mapping[str, int], str | None]]


def sizes_on_hub(repo_id: str, revision: str | None) -> tuple[Mapping[str, int], str | None]:
    """Asks the Hub; empty where it does not answer."""
    from huggingface_hub import HfApi, constants

    with suppress(*hub_errors()):
        require_connection(constants.ENDPOINT)
        found = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        return {file.rfilename: file.size or 0 for file in found.siblings or ()}, found.sha
    return {}, None


def missing_bytes(repo_id: str, revision: str | None, *, sizes: Sizes = sizes_on_hub) -> int:
    """Bytes of the weight files that loading the model will download; 0 where none are, or nobody knows."""
    from huggingface_hub import try_to_load_from_cache

    files, commit = sizes(repo_id, revision)
    # transformers takes `model.safetensors` or its shards; others lie in folders or are adapters.
    weights = {name: size for name, size in files.items() if name.startswith("model") and name.endswith(".safetensors")}
    return sum(
        size
        for name, size in weights.items()
        if not isinstance(try_to_load_from_cache(repo_id, name, revision=commit), str)
    )
