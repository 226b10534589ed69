"""Released weights in packed forms, read into full precision tensor by tensor.

A form says which stored tensors make one weight. Names come from all files before anything is read, so parts may lie in
different files, and nothing waits in memory for its other half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ftcli.plain import JsonMap
from ftcli.plan.released import released_form
from ftcli.tables import code_of

#: The role of a tensor that has its own name in full precision.
WHOLE = ""
#: Of one that says nothing of weights.
PASSED_OVER = "-"


class Form(Protocol):
    """``read`` of a row of :mod:`ftcli.tables.released`, made of a config.json's content."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """A weight's key in full precision, and the role in it of the tensor stored under ``key``.

        None where the key is one of full precision itself, or that of a weight whose other parts say so.
        """
        ...

    def shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of a weight, by those of its parts. Raises FtcliError FT323 for parts that are missing."""
        ...

    def dequantized(self, name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A weight in ``dtype`` on ``device``. Raises FtcliError FT323 for parts that are missing or do not fit."""
        ...


def form_of(config: JsonMap) -> Form | None:
    """The form of a model's files, by config.json; None where they are in full precision, or packed otherwise."""
    found = released_form(config)
    if found is None:
        return None
    form: Form = code_of(found[0].read)(config)
    return form


def grouped(keys: Iterable[str], form: Form | None) -> dict[str, dict[str, str]]:
    """The stored tensors of each weight, by its key in full precision and by their roles, in the order of ``keys``."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        part = None if form is None else form.part_of(key)
        name, role = (key, WHOLE) if part is None else part
        if role != PASSED_OVER:
            found.setdefault(name, {})[role] = key
    return found


def read_group(
    form: Form | None,
    name: str,
    group: Mapping[str, str],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One weight of :func:`grouped`: as it is stored where it is whole and in no eight bits, else in full precision.

    Raises:
        FtcliError: FT323 for parts that are missing or do not fit together.
    """
    parts = {role: read(key) for role, key in group.items()}
    alone = parts[WHOLE] if set(parts) == {WHOLE} else None
    if form is None or (alone is not None and (alone.element_size() > 1 or not alone.is_floating_point())):
        return parts[WHOLE]
    return form.dequantized(name, parts, dtype, device)
