"""Finds a model's config.json: bundled, in a local folder, in the Hub's cache, or on the Hub. Of weights only how many
bytes are not on this machine yet.

The order is bundled model, local folder, bundled config of a known Hub id, cache, Hub. ``huggingface_hub`` is imported
only for the last two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ftcli.assets import BUNDLED, asset
from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, FtcliError, Origin, first_line
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.paths import OPEN_IT, exists, expanded, is_file, is_folder, why_closed
from ftcli.plain import JsonObject

_MAX_CONFIG_BYTES = 16 * 2**20
_PROBE_SECONDS = 3.0
#: The remedy of a damaged file of a model.
RESTORE = "restore the file from where it came"

SourceKind = Literal["bundled model", "local folder", "bundled config", "hub cache", "hub"]

#: Those whose folder must hold tokenizer and weights as well: there is nowhere else to look for them.
LOCAL_SOURCES: tuple[SourceKind, ...] = ("bundled model", "local folder")

#: ``fetch(repo_id, revision, offline)`` answers the local path of the repository's config.json.
Fetch = Callable[[str, str | None, bool], Path]


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A config.json in ``folder``, with its ``values`` and over them those of an alias: instruct models share the
    bundled file of their base model and differ in their stop tokens.
    """

    kind: SourceKind
    folder: Path
    values: JsonObject

    @property
    def is_local(self) -> bool:
        """True if tokenizer and weights must be in the same folder."""
        return self.kind in LOCAL_SOURCES


def preflight_error(code: str, message: str, origin: Origin | None, help: str | None = None) -> FtcliError:
    """A single finding with exit status 3."""
    return FtcliError.single(code, message, exit_code=ExitCode.PREFLIGHT, origin=origin, help=help)


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors of the Hub's client, and ``others``. Those of its HTTP library are no OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*others, OSError, ValueError, *HfHubHTTPError.__bases__)


def fetch_from_hub(repo_id: str, revision: str | None, offline: bool) -> Path:
    """The local path of a Hub repository's config.json, from the cache or downloaded; generation_config.json, where
    there is one, is put beside it.

    Raises huggingface_hub's errors; ConnectionError at once when the Hub cannot be reached, instead of after half a
    minute of retries.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(repo_id, "config.json", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        if offline:
            raise
        require_connection(constants.ENDPOINT)
        path = Path(hf_hub_download(repo_id, "config.json", revision=revision))
    if not offline:
        _fetch_stops(repo_id, revision)
    return path


def _fetch_stops(repo_id: str, revision: str | None) -> None:
    """Puts generation_config.json, which has the stop tokens, beside config.json in the cache, once."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    if try_to_load_from_cache(repo_id, "generation_config.json", revision=revision) is not None:
        return  # it is there, or known to be nowhere
    with suppress(*hub_errors()):  # many models have none
        require_connection(constants.ENDPOINT)
        hf_hub_download(repo_id, "generation_config.json", revision=revision)


def require_connection(endpoint: str) -> None:
    """Raises ConnectionError when the Hub does not answer within seconds."""
    import socket  # with urllib.request 50 ms, and few runs come here
    import urllib.request

    if urllib.request.getproxies():
        return  # a direct connection proves nothing where a proxy is in use
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{endpoint} does not answer ({error})") from error


def find_config(
    model: ModelConfig, *, offline: bool, origin: Origin | None, fetch: Fetch = fetch_from_hub
) -> ConfigSource:
    """The config of ``model.name_or_path``.

    Raises FtcliError (exit 3): FT303 no such model, FT304 no config.json, FT305 not a JSON object, FT306 offline and
    not cached, FT307 gated, FT308 the Hub does not answer.
    """
    name = model.name_or_path
    if name.startswith(BUNDLED):
        return _bundled_model(name, origin)
    if looks_local(name):
        return _folder(expanded(name), origin)
    known = bundled_configs()
    if model.revision is None and name in known:
        folder, overlay = known[name]
        return ConfigSource("bundled config", folder, {**read_json(folder / "config.json", origin), **overlay})
    try:
        path = fetch(name, model.revision, offline)
    except hub_errors() as error:
        raise hub_error(error, model, origin, offline=offline) from error
    return ConfigSource("hub cache" if offline else "hub", path.parent, read_json(path, origin))


def looks_local(name: str) -> bool:
    """True for a name that means a path: it exists, or no Hub id is written like it."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or exists(expanded(name))


def bundled_configs() -> dict[str, tuple[Path, JsonObject]]:
    """Hub ids whose config.json ships with ftcli, each with its folder and the values that override the file's."""
    root = asset("configs")
    known: dict[str, tuple[Path, JsonObject]] = {
        folder.name.replace("--", "/", 1): (folder, {}) for folder in root.iterdir() if folder.is_dir()
    }
    aliases = json.loads((root / "aliases.json").read_text(encoding="utf-8"))
    for alias, values in aliases.items():
        overlay = {key: value for key, value in values.items() if key != "config"}
        known[alias] = (root / values["config"], overlay)
    return known


def read_json(path: Path, origin: Origin | None, *, limit: int = _MAX_CONFIG_BYTES) -> JsonObject:
    """A JSON object from a file. Raises FtcliError FT305 (exit 3) for anything else."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device never ends
            raise preflight_error("FT305", f"{path} is not a regular file", origin, help=RESTORE)
        if path.stat().st_size > limit:
            raise preflight_error("FT305", f"{path} is larger than {limit >> 20} MiB", origin, help=RESTORE)
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise preflight_error("FT305", f"{path} cannot be read as JSON: {error}", origin, help=RESTORE) from error
    if not isinstance(value, dict):
        message = f"{path} must hold a JSON object, not a {type(value).__name__}"
        raise preflight_error("FT305", message, origin, help=RESTORE)
    return value


def _bundled_model(name: str, origin: Origin | None) -> ConfigSource:
    stem = name.removeprefix(BUNDLED)
    root = asset("models")
    names = sorted(f.name for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
    if stem not in names:
        close = get_close_matches(stem, names, 1)
        hint = f"did you mean {BUNDLED}{close[0]}?" if close else f"bundled are: {', '.join(names) or 'none'}"
        raise preflight_error("FT303", f"ftcli bundles no model named {stem!r}", origin, help=hint)
    found = _folder(root / stem, origin)
    return ConfigSource("bundled model", found.folder, found.values)


def _folder(folder: Path, origin: Origin | None) -> ConfigSource:
    if is_file(folder):
        raise preflight_error("FT303", f"{folder} is a file", origin, help="name the folder that holds config.json")
    closed = why_closed(folder)
    if closed is not None:
        raise preflight_error("FT303", f"{folder} cannot be read: {closed}", origin, help=OPEN_IT)
    if not is_folder(folder):
        help = "check the path; a model of the Hub is written OWNER/NAME"
        raise preflight_error("FT303", f"no model folder at {folder.absolute()}", origin, help=help)
    path = folder / "config.json"
    if not is_file(path):
        adapter = is_file(folder / ADAPTER_CONFIG)
        message = f"{folder} holds no config.json"
        help = (
            "this is an adapter: name its base model, or merge it first with `ftcli export`"
            if adapter
            else "name a folder in Transformers format (it has a config.json)"
        )
        raise preflight_error("FT304", message, origin, help=help)
    return ConfigSource("local folder", folder, read_json(path, origin))


def hub_error(error: Exception, model: ModelConfig, origin: Origin | None, *, offline: bool) -> FtcliError:
    """The message for a failure of :func:`fetch_from_hub`. ``error`` is one of huggingface_hub's."""
    from huggingface_hub import errors as hub

    name = model.name_or_path
    elsewhere = "or name a local folder in its place"
    code, message = "FT308", f"the Hub gives no answer about {name}: {first_line(error)}"
    help = f"try again, {elsewhere}"
    match error:
        case hub.HFValidationError():
            code, message, help = "FT303", f"{name!r} is neither a folder here nor a Hub id", "write OWNER/NAME"
        case hub.GatedRepoError():
            page = f"https://huggingface.co/{name}"
            code, message, help = "FT307", f"{name} is gated", f"ask for access at {page}, then `hf auth login`"
        case hub.RepositoryNotFoundError():
            close = get_close_matches(name, bundled_configs(), 1, cutoff=0.8)
            code, message = "FT303", f"the Hub has no model {name}"
            help = f"check the spelling; private ones need a login, {elsewhere}"
            help = f"did you mean {close[0]}?" if close else help
        case hub.RevisionNotFoundError():
            code, message, help = "FT303", f"{name} has no revision {model.revision!r}", "check the revision"
        case hub.LocalEntryNotFoundError() if offline:
            message = f"{name} is not in the local cache, and --offline forbids asking the Hub"
            code, help = "FT306", f"run once without --offline, {elsewhere}"
        case hub.EntryNotFoundError() if not isinstance(error, hub.LocalEntryNotFoundError):
            code, message = "FT304", f"{name} holds no config.json"
            help = "choose a repository in Transformers format (it has a config.json)"
    return preflight_error(code, message, origin, help=help)


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
