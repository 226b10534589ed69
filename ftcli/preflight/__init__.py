"""Answers before anything is built: will this recipe run here, and if not, what to change. See :func:`preflight`."""

from ftcli.preflight.device import DEVICE_NAMES, DeviceFacts, named_device, probe_device
from ftcli.preflight.estimate import MemoryEstimate
from ftcli.preflight.facts import ModelFacts, read_facts
from ftcli.preflight.memory import estimate_memory
from ftcli.preflight.precision import DtypePlan, plan_dtypes
from ftcli.preflight.report import PreflightReport, preflight

__all__ = [
    "DEVICE_NAMES",
    "DeviceFacts",
    "DtypePlan",
    "MemoryEstimate",
    "ModelFacts",
    "PreflightReport",
    "estimate_memory",
    "named_device",
    "plan_dtypes",
    "preflight",
    "probe_device",
    "read_facts",
]
