"""manifest.json: what a run was made of, so that it can be explained and repeated."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ftcli import __version__
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.run.atomic import finite, storage_errors, write_json
from ftcli.run.clock import utc_now
from ftcli.run.ledger import read_json_object

#: Distributions whose versions can change what a run computes.
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "bitsandbytes",
    "pydantic",
)

_GIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of one data file: its name as the recipe gives it, its size and its content's SHA-256."""

    name: str
    bytes: int
    sha256: str


def fingerprint(name: str, path: Path) -> Fingerprint:
    """The fingerprint of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Fingerprint(name, file.tell(), digest)


def library_versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Versions of those of ``names`` that are installed; nothing is imported."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the git checkout around ``folder`` and whether tracked files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 fixed words, no shell
            ["git", "-C", str(folder), *arguments],  # noqa: S607 git from the PATH is meant
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def build_manifest(
    *,
    command: str,
    recipe_yaml: str,
    device: Mapping[str, Any],
    seeds: Mapping[str, int],
    dtype_plan: Mapping[str, Any],
    kernels: Sequence[Mapping[str, Any]],
    data: Sequence[Fingerprint],
    resume_step: int = 0,
    previous: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Everything manifest.json holds.

    Args:
        command: ``train``, ``grpo`` …
        recipe_yaml: The resolved recipe; its SHA-256 is kept.
        device: Name, capability, memory as plain values.
        kernels: One map per layer: name, kernel, on or off, reason.
        data: Fingerprints of the data files.
        resume_step: Step this process starts from.
        previous: The manifest of the run so far; its ``processes`` are kept and this one is appended.
        folder: Where git is asked; the current directory when None.
        **extra: Further entries, such as the self-check's result.
    """
    process = {
        "started": utc_now(),
        "from_step": resume_step,
        "ftcli": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": library_versions(),
        "git": git_state(folder or Path.cwd()),
        "device": dict(device),
    }
    earlier = list((previous or {}).get("processes", ())) if resume_step else []
    return {
        "format": 1,
        "command": command,
        **{key: value for key, value in process.items() if key != "from_step"},
        "recipe_sha256": hashlib.sha256(recipe_yaml.encode()).hexdigest(),
        "seeds": dict(seeds),
        "dtype_plan": dict(dtype_plan),
        "kernels": [dict(layer) for layer in kernels],
        "data": [{"name": f.name, "bytes": f.bytes, "sha256": f.sha256} for f in data],
        "processes": [*earlier, process],
        **extra,
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json; NaN and infinity become null.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(path):
        write_json(path, finite(dict(manifest)))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, or an empty map when there is none that can be read."""
    return read_json_object(path)


def require_same_data(previous: Mapping[str, Any], data: Sequence[Fingerprint]) -> None:
    """Refuse to continue a run on data whose content has changed since it began.

    Args:
        previous: The manifest of the run so far; one without fingerprints proves nothing and is accepted.
        data: Fingerprints of the training files now.

    Raises:
        FtcliError: FT731 with each changed file.
    """
    known = {entry["name"]: entry["sha256"] for entry in previous.get("data", ())}
    changed = [f for f in data if known.get(f.name, f.sha256) != f.sha256]
    if not changed:
        return
    findings = [
        Finding(
            "FT731",
            f"{f.name} has changed since this run began: sha256 {known[f.name][:12]} -> {f.sha256[:12]}",
            help="restore the file to continue; or start anew with --resume never, which keeps the old run beside it",
        )
        for f in changed
    ]
    raise FtcliError(findings, ExitCode.RECIPE)
