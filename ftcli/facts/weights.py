"""Looks at the weight files of a local model folder, without reading the weights."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

#: transformers' name of the file that says which shard holds which tensor, PEFT's of an adapter's description, and
#: the Hub's of a model card.
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_CARD = "README.md"
#: Lies beside each export and says what it was made of and how it was verified; other programs pass over it.
EXPORT_RECORD = "ftcli_export.json"
#: The file of tensors that transformers passes over, beside those that it loads.
FURTHER_WEIGHTS = "model-further.safetensors"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder: safetensors ``files`` or, without any, a ``gguf`` file; ``missing`` shards that its
    index names; which are ``unreadable``, and why; ``pickle_only`` where there are weights, but only in pickle files,
    which ftcli does not load.
    """

    files: tuple[Path, ...]
    missing: tuple[str, ...]
    pickle_only: bool
    gguf: Path | None = None
    unreadable: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True when the folder holds every weight in safetensors."""
        return bool(self.files) and not self.missing and not self.unreadable


def inspect_weights(folder: Path) -> WeightFiles:
    """Inspects the weights in ``folder``. A broken index counts as naming no shards: loading reports it exactly."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    named = _indexed(folder / WEIGHTS_INDEX)
    present = {path.name for path in files}
    pickles = any(folder.glob("pytorch_model*.bin"))
    gguf = None if files or named else gguf_file(folder)
    alone = pickles and not files and not named and gguf is None
    unreadable = tuple(reason for path in (*files, *filter(None, [gguf])) if (reason := _unreadable(path)))
    return WeightFiles(files, tuple(sorted(named - present)), alone, gguf, unreadable)


def _unreadable(path: Path) -> str:
    """The reason why a file cannot be opened, with its name; empty if it can. A pipe is never opened: it would wait."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return f"{path.name} is no regular file"
        with path.open("rb"):
            return ""
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file in ``folder``, if there is just one."""
    found = list(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _indexed(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
