"""Answers before anything is built: will this recipe run here, and if not, what to change. See :func:`preflight`."""

from ftcli.facts.device import DEVICE_NAMES, DeviceFacts, named_device, probe_device
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.plan.memory.estimate import MemoryEstimate
from ftcli.plan.precision import DtypePlan, plan_dtypes
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight

__all__ = [
    "DEVICE_NAMES",
    "DeviceFacts",
    "DtypePlan",
    "MemoryEstimate",
    "ModelFacts",
    "PreflightReport",
    "named_device",
    "plan_dtypes",
    "preflight",
    "probe_device",
    "read_facts",
]
