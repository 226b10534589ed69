"""Packed forms of released weights: those that are read into full precision, exactly, whatever they are trained as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReleasedForm:
    """One packed form. ``words`` names code: a function of a config.json's content that gives the form in words where
    the files are of it and each number has one reading, else None; and ``read`` a function of it that makes a
    :class:`ftcli.model.released.Form`.
    """

    words: str
    read: str


#: By ``quantization_config.quant_method``.
TABLE: Mapping[str, ReleasedForm] = {
    "mxfp4": ReleasedForm("ftcli.plan.released:mxfp4", "ftcli.model.released:Mxfp4"),
    "fp8": ReleasedForm("ftcli.plan.released:fp8", "ftcli.model.released:ScaledFp8"),
    "compressed-tensors": ReleasedForm("ftcli.plan.released:compressed_fp8", "ftcli.model.released:ScaledFp8"),
}
