"""Compares a written model with its source, tensor by tensor, and computes its logits.

At most one tensor, or one layer, of each is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from ftcli.errors import FtcliError
from ftcli.export.loading import not_verified, plain_config
from ftcli.export.merge import Rounding
from ftcli.export.tensorfile import TensorFile
from ftcli.export.verify import UNIT_ROUNDOFF, WeightUpdate, shortened
from ftcli.export.weights import ModelWeights, StoredTensors, StoredWeights, untied
from ftcli.model.pretrained import hollow, read_config, weight_files

#: Elements that are compared at once.
_PIECE = 1 << 24


def open_written(folder: Path) -> StoredWeights:
    """The weights in ``folder``.

    Raises:
        FtcliError: FT741 for files that do not make the model of the folder's config.json.
    """
    try:
        config = read_config(str(folder), revision=None, offline=True)
        return StoredWeights(weight_files(str(folder), None, offline=True), hollow(plain_config(config)))
    except FtcliError as error:
        raise not_verified(folder, [finding.message for finding in error.findings]) from error
    except OSError as error:
        raise not_verified(folder, [str(error)]) from error


def compare_written(
    written: StoredWeights, base: StoredWeights, changes: Mapping[str, WeightUpdate], rounding: Rounding
) -> list[str]:
    """Problems found tensor by tensor; empty when there are none.

    Tensors that the adapter does not change must be the base's byte for byte, or rounded from those alike. Merged ones
    may differ by one unit in the last place, since the order of sums may be another.

    Args:
        changes: What the adapter does, from its file and without PEFT.
    """
    problems: list[str] = []
    unknown = set(changes) - {*base.names, *base.ties}
    problems += [f"the adapter changes {name}, which the base model does not have" for name in sorted(unknown)]
    files = {key: file for each in written.stored for key, file in zip(each.keys, each.files, strict=True)}
    keys: set[str] = set()
    for stored in base.stored:
        same = all(base.is_as_stored(name) and name not in changes for name in stored.names) and not stored.packed
        if same:
            keys |= set(stored.keys)
            problems += _compare_files(stored, files, rounding)
        else:
            problems += _compare_merged(stored.names, written, base, changes, rounding)
    names = untied(base, changes)
    problems += _compare_merged(names, written, base, changes, rounding)
    expected = {name for stored in base.stored for name in stored.names} | set(names)
    for each in written.stored:
        foreign = set(each.names) - expected if each.names else set(each.keys) - keys
        problems += [f"{name} is not in the base model" for name in sorted(foreign)]
    return shortened(problems)


def _compare_files(stored: StoredTensors, files: Mapping[str, TensorFile], rounding: Rounding) -> Iterator[str]:
    """Problems of tensors that are the base's, by their names in the files."""
    for key, file in zip(stored.keys, stored.files, strict=True):
        if key not in files:
            yield f"{key} is missing"
            continue
        found, entry, wanted = files[key], files[key].entries[key], file.entries[key]
        if entry.shape != wanted.shape:
            yield f"{key} is {entry.shape} instead of {wanted.shape}"
        elif not stored.names or rounding.of(stored.names[0], stored) == file.dtype(key):
            equal = entry.dtype == wanted.dtype and all(
                one == other for one, other in zip_longest(found.pieces(key), file.pieces(key))
            )
            if not equal:
                yield f"{key} differs from the base model's"
        else:
            problem = difference(found.read(key), file.read(key), rounding.of(stored.names[0], stored), exact=True)
            if problem:
                yield f"{key} {problem}"


@torch.no_grad()
def _compare_merged(
    names: tuple[str, ...],
    written: StoredWeights,
    base: StoredWeights,
    changes: Mapping[str, WeightUpdate],
    rounding: Rounding,
) -> Iterator[str]:
    for name in names:
        if name not in written.names:
            yield f"{name} is missing"
            continue
        change, want = changes.get(name), base.read(name)
        if change is not None:
            want = change.applied(want.float())
        exact = change is None or change.whole is not None
        problem = difference(written.read(name), want, rounding.of(name, base.of(name)), exact=exact)
        if problem:
            yield f"{name} {problem}"


def difference(found: Tensor, want: Tensor, dtype: torch.dtype, *, exact: bool) -> str | None:
    """What is wrong with ``found``, which ``want`` was to be rounded to ``dtype`` for."""
    if found.shape != want.shape or found.dtype != dtype:
        return f"is {found.dtype} {tuple(found.shape)} instead of {dtype} {tuple(want.shape)}"
    pieces = list(zip(torch.split(found.reshape(-1), _PIECE), torch.split(want.reshape(-1), _PIECE), strict=True))
    if all(torch.equal(got, wished.to(dtype)) for got, wished in pieces):
        return None
    if not bool(torch.isfinite(found).all()):
        return "holds NaN or infinity"
    differences = [float((got.float() - wished.to(dtype).float()).abs().max()) for got, wished in pieces]
    if exact:
        return f"differs from what it should be by up to {max(differences):.3g}"
    # Where W and its change nearly cancel, the last place of the sum is that of the larger one.
    largest = 1e-7 * float(want.abs().max())
    for got, wished in pieces:
        rounded = wished.to(dtype).float()
        room = 2 * UNIT_ROUNDOFF[dtype] * rounded.abs() + largest
        if bool(((got.float() - rounded).abs() > room).any()):
            return f"differs from W + s B A by up to {max(differences):.3g}"
    return None


def elements(weights: ModelWeights) -> int:
    """Numbers of the model."""
    return sum(torch.Size(weights.shape(name)).numel() for name in weights.names)
