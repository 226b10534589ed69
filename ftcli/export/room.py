"""How much memory and disk an export takes, which is known before anything is written."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.lazy import WHOLE_LAYER
from ftcli.export.resolve import ADAPTER_WEIGHTS, ExportSource
from ftcli.export.tensorfile import TensorFile
from ftcli.export.weights import StoredWeights, base_weights, untied
from ftcli.plan.disk import existing_ancestor
from ftcli.tables import code_of, exports
from ftcli.units import size

_LAYER = re.compile(r"(.*?\.\d+)\.")
#: Bytes for each element: of a weight that is merged (as stored, s B A, that times s, rounded), of one that is read to
#: compute with (as stored, float32), of a layer (float32).
_MERGED, _READ, _COMPUTED = 14, 6, 4
#: Python, its libraries and the activations of the probe.
_BESIDE = 1 << 29


def merge_bytes(base: StoredWeights, changed: Collection[str]) -> int:
    """Bytes of memory that merging and verifying take at most: they depend on the largest weight and layer alone."""
    sizes = {name: math.prod(base.shape(name)) for name in base.names}
    layers: Counter[str] = Counter()
    for name, count in sizes.items():
        found = _LAYER.match(name)
        layers[found[1] if found else name] += count
    merged = max((sizes.get(base.ties.get(name, name), 0) for name in changed), default=0)
    whole = max((count for count in layers.values() if count <= WHOLE_LAYER), default=0)
    return _BESIDE + max(_MERGED * merged, _READ * max(sizes.values(), default=0), _COMPUTED * whole)


def adapter_bytes(source: ExportSource, *, offline: bool) -> int:
    """Bytes on disk of the format ``adapter``."""
    return sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())


def model_bytes(source: ExportSource, *, offline: bool) -> int:
    """Bytes on disk of a complete model in ``export.dtype``, or in the base's dtypes."""
    base = base_weights(source, offline=offline)
    wanted = None if source.settings.dtype == "auto" else getattr(torch, source.settings.dtype)

    def bytes_of(name: str) -> int:
        stored = base.of(name)
        dtype = getattr(torch, source.compute) if stored.packed else stored.dtype
        dtype = wanted if wanted is not None and dtype.is_floating_point else dtype
        return math.prod(base.shape(name)) * torch.empty((), dtype=dtype).element_size()

    return sum(bytes_of(name) for name in stored_names(source, base))


def stored_names(source: ExportSource, base: StoredWeights) -> list[str]:
    """What a merged model stores, by the names in the adapter's file: heads that it unties are among them."""
    trained: set[str] = set()
    if source.kind == "adapter":
        file = TensorFile(source.folder / ADAPTER_WEIGHTS)
        for key in file.entries:
            name, pair, _ = key.removeprefix("base_model.model.").partition(".lora_")
            trained.add(f"{name}.weight" if pair else name)
    return [*base.names, *untied(base, trained)]


def needed_bytes(source: ExportSource, name: str, *, offline: bool) -> int:
    """Bytes on disk that a format takes at most; 0 where it cannot be known before it is written.

    What keeps an export from being made is said by whoever makes it.
    """
    reference = exports.row(name).size
    if reference is None:
        return 0
    try:
        needed: int = code_of(reference)(source, offline=offline)
    except (FtcliError, OSError, SafetensorError):
        return 0
    return needed


def require_room(folder: Path, needed: int) -> None:
    """Raises FtcliError FT724 (exit 3) where ``folder``, or where it would be, has less than ``needed`` bytes free."""
    place = existing_ancestor(folder)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise FtcliError.single(
            "FT724",
            f"the export takes {size(needed)}, and {size(free)} are free in {place}",
            exit_code=ExitCode.PREFLIGHT,
            help="free disk space, or name another folder with --output",
        )
