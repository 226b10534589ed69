"""`ftcli doctor`: what is installed, what this machine is, and what it can and cannot run."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ftcli import __version__
from ftcli.cli import options
from ftcli.cli.render import result_text
from ftcli.errors import FtcliError
from ftcli.plain import LEFT_OUT, JsonMap, JsonObject
from ftcli.reporting import Session
from ftcli.tables import Package, exports, installed_version, judges, loggers, optimizers
from ftcli.units import size

if TYPE_CHECKING:
    from ftcli.facts.device import DeviceFacts

_REQUIRED = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "pydantic", "PyYAML",
    "rich", "typer", "jinja2", "jsonschema",
)  # fmt: skip

#: Needed by a recipe key, `eval.lm_eval`, and by no row of a table.
_HARNESS = Package("lm-eval", "ftcli[eval]", "public benchmarks")

#: ftcli's own kernels, by the operation that each fuses.
_KERNELS = ("rms_norm", "rope", "glu", "linear_cross_entropy", "lora_linear", "lora_mlp", "lora_qkv")


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional package: what it is for, its version, and how to install it where it is missing."""

    package: str
    use: str
    version: str | None
    install: str | None

    def as_dict(self) -> JsonObject:
        return {"package": self.package, "for": self.use, "version": self.version, "install": self.install}


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that this machine can run or not, and why."""

    name: str
    runs: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Examination:
    """The answer of `ftcli doctor`. Without torch, or with an AMD GPU, there is no device, and ``device_problem`` says
    why.
    """

    ftcli: str
    python: str
    platform: str
    packages: Mapping[str, str | None]
    extras: Sequence[Extra]
    environment: Mapping[str, str]
    offline: bool
    disk_free_bytes: int
    device: JsonMap | None = None
    device_problem: str | None = field(default=None, metadata=LEFT_OUT)
    unused: Sequence[Ability] = field(default=(), metadata=LEFT_OUT)
    attention: Sequence[Ability] = field(default=(), metadata=LEFT_OUT)
    kernels: Sequence[Ability] = field(default=(), metadata=LEFT_OUT)


def examine(session: Session) -> Examination:
    """Everything that `ftcli doctor` shows. What cannot be found out is reported with the reason."""
    found = Examination(
        ftcli=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: installed_version(name) for name in _REQUIRED},
        extras=[_extra(package) for package in _optional()],
        environment=dict(session.environment),
        offline=session.offline,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
    )
    try:
        from ftcli.facts.device import INSTEAD, cpu_device, probe_device

        device = probe_device()
    except ImportError as error:
        return replace(found, device_problem=f"torch cannot be imported: {error}")
    except FtcliError as error:
        first = error.findings[0]
        problem = first.message if first.help is None else f"{first.message}; {first.help}"
        # What runs once the GPU is hidden, as the help says.
        return replace(found, device_problem=problem, attention=_attention(), kernels=_kernels(cpu_device()))
    unused = [] if device.unused is None else [Ability(device.unused, False, f"not used: {INSTEAD}")]
    return replace(found, device=_machine(device), unused=unused, attention=_attention(), kernels=_kernels(device))


def _machine(device: DeviceFacts) -> JsonObject:
    """The device that training would take."""
    from ftkernels.limits import capability_text

    capability = capability_text(device.capability) if device.capability is not None else None
    said = {"name": device.name, "kind": device.kind, "capability": capability}
    for name in ("memory_bytes", "free_bytes", "shared_memory_bytes", "multiprocessors"):
        said[name] = getattr(device, name)
    return {**said, "bfloat16": device.has_bfloat16, "float8": device.has_float8}


def _attention() -> list[Ability]:
    """Each value of ``model.attention``, and whether this version has it. Those that it has run on every device."""
    from ftcli.config.model import SUPPORTED_ATTENTION, Attention

    missing = "not supported by this version of ftcli"
    names = [name for name in get_args(Attention) if name != "auto"]
    return [_row(name, None if name in SUPPORTED_ATTENTION else missing, "runs on every device") for name in names]


def _kernels(device: DeviceFacts) -> list[Ability]:
    """Each fused operation: its Triton kernel, or why plain torch computes it instead."""
    from ftcli.plan.execution import why_no_kernels

    problem = "triton is not installed" if installed_version("triton") is None else why_no_kernels(device)
    against = None if problem is None else f"{problem}; plain torch runs instead"
    return [_row(name, against, "Triton kernel on this GPU") for name in _KERNELS]


def _optional() -> list[Package]:
    """Optional packages that the rows of the tables need, each once."""
    found = [row.package for row in optimizers.TABLE.values()] + [row.package for row in exports.TABLE.values()]
    found += [_HARNESS, *(row.package for row in judges.TABLE.values())]
    logging = ((name, loggers.row(name)) for name in loggers.names())
    found += [Package(row.package, row.install, f"logging.{name}") for name, row in logging]
    return [package for package in dict.fromkeys(found) if package is not None]


def _row(name: str, against: str | None, otherwise: str) -> Ability:
    return Ability(name, against is None, against or otherwise)


def _extra(package: Package) -> Extra:
    found = installed_version(package.name)
    return Extra(package.name, package.use, found, None if found else f"pip install '{package.install}'")


def doctor_text(result: Examination) -> str:
    """The machine first, then what runs on it, then versions."""
    lines = [f"ftcli {result.ftcli}, Python {result.python}, {result.platform}", ""]
    if result.device is None:
        lines.append(f"device  unknown: {result.device_problem}")
    else:
        lines += result_text({"device": result.device}).splitlines()
    lines.append(f"disk    {size(result.disk_free_bytes)} free here")
    for title, rows in (("accelerators", result.unused), ("attention", result.attention), ("kernels", result.kernels)):
        width = max((len(row.name) for row in rows), default=0)
        lines += ["", title] if rows else []
        lines += [f"  {row.name:<{width}}  {'on ' if row.runs else 'off'}  {row.reason}" for row in rows]
    missing = [name for name, found in result.packages.items() if found is None]
    lines += ["", "packages", "  " + ", ".join(f"{name} {found}" for name, found in result.packages.items() if found)]
    lines += [f"  missing: {', '.join(missing)}"] if missing else []
    lines += ["", "extras"]
    for extra in result.extras:
        state = extra.version or f"not installed: {extra.install}"
        lines.append(f"  {extra.package:<12}  {extra.use:<26}  {state}")
    if result.environment:
        lines += ["", *result_text({"environment": result.environment}).splitlines()]
    return "\n".join(lines)


@options.command("doctor", lambda result: doctor_text(result))
def doctor(session: Session) -> Examination:
    """Show what this machine can run, and why.

    Versions, the device, and each kernel and extra with the reason why it can run or not.

    \b
    Examples:
      ftcli doctor
      ftcli doctor --json
    """
    return examine(session)
