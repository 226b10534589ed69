"""manifest.json: what a run was made of, so that it can be explained and repeated."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ftcli import __version__
from ftcli.facts.device import DeviceFacts
from ftcli.plain import JsonMap, JsonObject, maps, plain
from ftcli.plan.execution import ExecutionPart
from ftcli.plan.memory.estimate import MemoryEstimate
from ftcli.plan.memory.host_total import HostEstimate
from ftcli.plan.precision import DtypePlan
from ftcli.run.atomic import utc_now
from ftcli.run.inputs import Fingerprint
from ftcli.tables import installed_version

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
#: What a run began with; later processes are held to it.
_KEPT_ON_RESUME = ("inputs", "micro_batches")


#: A checkout may be somebody else's, and its configuration names programs: monitors, hooks, filters, transports of
#: missing objects. None of them is run for a line in the manifest.
_GIT = (
    *("env", "GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1", "git", "--no-optional-locks"),
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
)
_TRACKED_ONLY = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all")
_FILTER_KEYS = ("clean=", "smudge=", "process=", "required=false")


def git_state(folder: Path) -> JsonObject | None:
    """The commit of the checkout around ``folder``, and whether tracked files differ from it (None: git does not say);
    None outside of a checkout.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, *_no_filters(folder), "status", *_TRACKED_ONLY)
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _no_filters(folder: Path) -> list[str]:
    """Options that take the checkout's own filters away: ``git status`` would run them to compare contents."""
    names = _git(folder, "config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\.") or ""
    found = sorted({name.rpartition(".")[0] for name in names.splitlines()})
    return [word for name in found for key in _FILTER_KEYS for word in ("-c", f"{name}.{key}")]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 fixed words, no shell
            [*_GIT, "-C", str(folder), *arguments],
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
    device: DeviceFacts,
    seeds: Mapping[str, int],
    dtype_plan: DtypePlan,
    parts: Sequence[ExecutionPart],
    activations: JsonMap,
    predicted_memory: MemoryEstimate | None,
    predicted_host_memory: HostEstimate | None = None,
    data: Sequence[Fingerprint],
    held_out: Sequence[Fingerprint] = (),
    judges: Sequence[Fingerprint] = (),
    ranks: int = 1,
    micro_batches: int = 1,
    resume_step: int = 0,
    previous: JsonMap | None = None,
    folder: Path | None = None,
) -> JsonObject:
    """Builds manifest.json before the model is built; the kernels of its layers are added then.

    ``held_out`` are fingerprints of what results before and after training are measured on, ``judges`` those of files
    that rewards and tasks name; ``micro_batches`` is what a step learns from, over all ranks. Of ``previous``, the
    manifest of the run so far, the ``processes`` are kept, and the ``inputs`` that it began with. git is asked in
    ``folder``, by default the current one.
    """
    process = {
        "started": utc_now(),
        "from_step": resume_step,
        "ftcli": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: version for name in LIBRARIES if (version := installed_version(name)) is not None},
        "git": git_state(folder or Path.cwd()),
        "device": device,
    }
    before = dict(previous or {}) if resume_step else {}
    manifest: JsonObject = {
        "micro_batches": micro_batches,
        **{key: before[key] for key in _KEPT_ON_RESUME if key in before},
        "format": 1,
        "command": command,
        **{key: value for key, value in process.items() if key != "from_step"},
        "recipe_sha256": hashlib.sha256(recipe_yaml.encode()).hexdigest(),
        "seeds": seeds,
        "dtype_plan": dtype_plan,
        "kernels": (),
        "data": data,
        "held_out": held_out,
        "judges": judges,
        "processes": [*maps(before.get("processes")), process],
        "parts": parts,
        "activations": activations,
        "predicted_memory": predicted_memory,
        "predicted_host_memory": predicted_host_memory,
        "ranks": ranks,
    }
    return {key: plain(value) for key, value in manifest.items()}
