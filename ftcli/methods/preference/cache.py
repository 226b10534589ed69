"""Log-probabilities of a reference on disk: a folder for each reference, with entries of units (pairs, or single rows)
that are found by their content.

An entry is a folder with one file, written aside and renamed: it is complete or absent. It never changes, and a unit
that stands in two entries is that of the first. Whatever an entry says is proven by its digest. Entries may be deleted
at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import transformers

from ftcli import __version__
from ftcli.data.tokens import DIGEST_BYTES
from ftcli.model.backbone import base_of
from ftcli.model.initial_adapters import start_of
from ftcli.model.weight_digests import weight_digests
from ftcli.plain import JsonObject
from ftcli.run.atomic import read_bytes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job

#: Of a pair: the log-probabilities of its chosen and its rejected answer, then both with the weights of ``ld_alpha``.
#: Of a single row: that of its answer.
LogProbs: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

#: How many numbers a unit has, by its rows.
WIDTHS = {1: 1, 2: 4}
_FILE, _MAGIC = "pairs.bin", b"ftcli reference 1\n"
_HEAD_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_NAME = re.compile(r"\d{8}")
#: Of an entry: 33 million pairs.
_MOST_BYTES = 1 << 30


class ReferenceCache:
    """The entries of one reference.

    Args:
        warn: Told of entries that are damaged, and when nothing can be kept; the run goes on without.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None], width: int = 4) -> None:
        self._folder, self._warn = folder, warn
        self._record = np.dtype([("unit", "u1", (DIGEST_BYTES,)), ("values", "<f4", (width,))])

    @property
    def is_there(self) -> bool:
        return bool(self._entries())

    def read(self) -> dict[bytes, LogProbs]:
        """All units that are known. Damaged entries are removed: their units are computed again."""
        return self._read(self._entries())

    def add(self, units: Mapping[bytes, LogProbs]) -> dict[bytes, LogProbs]:
        """Keeps these units, and returns them as they are kept: as another run has them that was faster."""
        kept = dict(units)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                entries = self._entries()
                theirs = self._read(entries)
                kept |= {unit: values for unit, values in theirs.items() if unit in units}
                missing = {unit: values for unit, values in units.items() if unit not in theirs}
                number = int(entries[-1].name) + 1 if entries else 1
                if not missing or self._write(self._folder / f"{number:08}", missing):
                    return kept
        except OSError as error:
            self._warn(f"the reference's log-probabilities cannot be kept in {self._folder} ({error})")
        return kept

    def _entries(self) -> Sequence[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        except OSError:
            return ()

    def _read(self, entries: Sequence[Path]) -> dict[bytes, LogProbs]:
        found: dict[bytes, LogProbs] = {}
        for entry in entries:
            try:
                of_entry = _read(entry / _FILE, self._record)
            except (OSError, ValueError) as error:
                self._warn(f"the reference's log-probabilities in {entry} are damaged and computed again ({error})")
                shutil.rmtree(entry, ignore_errors=True)
                continue
            for unit, values in of_entry.items():
                found.setdefault(unit, values)
        return found

    def _write(self, path: Path, units: Mapping[bytes, LogProbs]) -> bool:
        """False where another run has written ``path`` meanwhile."""
        staged = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._folder))
        try:
            _write(staged / _FILE, units, self._record)
            staged.rename(path)
        except OSError:
            if not path.exists():
                raise
            return False
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return True


def _write(path: Path, units: Mapping[bytes, LogProbs], record: np.dtype[np.void]) -> None:
    records = np.zeros(len(units), record)
    records["unit"] = np.frombuffer(b"".join(units), np.uint8).reshape(-1, DIGEST_BYTES)
    records["values"] = np.stack(list(units.values()))
    body = records.tobytes()
    with path.open("wb") as file:
        file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, record: np.dtype[np.void]) -> dict[bytes, LogProbs]:
    """Raises OSError or ValueError for a file that is not as it was written."""
    content = read_bytes(path, _MOST_BYTES)
    head, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
    if head != _MAGIC + hashlib.sha256(body).digest():
        raise ValueError("its content is not what was written")
    records = np.frombuffer(body, record)
    return {unit.tobytes(): values for unit, values in zip(records["unit"], records["values"], strict=True)}


#: Part of every key: raised whenever the same model and tokens give other log-probabilities.
_SCORING = 1


def reference_key(
    job: Job, model: PreTrainedModel | PeftModel, ld_alpha: float, *, rows: int = 2, shares: int = 1
) -> str:
    """A digest of each weight of the reference as it is in memory, its configuration, how it is computed and by which
    code. No setting of training is in it. All ranks call it where the weights are sharded, and have the same.
    """
    base, plan, batches = base_of(model), job.plan, job.batches(model)
    config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
    execution = plan.execution
    computed: JsonObject = {
        "ld_alpha": ld_alpha,
        "rows": [rows, shares],
        "dtypes": [job.dtypes.compute, job.dtypes.autocast, plan.stream],
        "kernels": [job.recipe.model.kernels, execution.on_kernels, execution.layers.code, execution.attention],
        "attention": str(base.config._attn_implementation),
        "quantization": job.recipe.quantization.model_dump(mode="json"),
        "batches": [batches.layout, batches.shares_prompts],
        "device": job.device.type,
        "adapters": _scales(model) if start_of(model) else None,
        "matmul": torch.get_float32_matmul_precision(),
        "code": [_SCORING, __version__, torch.__version__, transformers.__version__],
    }
    if not isinstance(job.vision, str):
        computed["images"] = job.vision.identity  # how they are prepared
    text = json.dumps([computed, config, weight_digests(model)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _scales(model: Any) -> list[Any]:
    """Settings of a model's adapters that are computed with."""
    config = model.peft_config[model.active_adapter]
    names = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    return [getattr(config, name) for name in names]
