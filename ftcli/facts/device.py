"""The machine: a table of GPUs that can be asked for by name, and the one that is here.

Only :func:`probe_device` asks the hardware, and only it imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from ftkernels.limits import FLOAT8_CAPABILITY, Gpu

from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.units import GIB

#: Lowest compute capability with bfloat16 in hardware.
BFLOAT16_CAPABILITY = (8, 0)

_KIB = 2**10


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The abilities of a machine.

    Attributes:
        memory_bytes: The total that torch reports: the nominal size less what the driver and ECC keep. On a CPU the
            RAM, or the container's limit if that is less; None where it cannot be found out.
        free_bytes: What is free now; None for a device that was only named.
        dense_tflops: Published dense matmul rate with 16-bit inputs and float32 accumulation; None when not in the
            table.
        bandwidth_gb_per_s: Published memory bandwidth in 10^9 bytes per second; None when not in the table.
        host_free_bytes: Free RAM of this machine where it has a GPU; None for a CPU and for named devices.
        failed_products: Why products of quantized weights do not work here, where they were tried; else None.
        unused: An accelerator of this machine that nothing is computed on, in words; None where there is none.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    capability: tuple[int, int] | None
    memory_bytes: int | None
    shared_memory_bytes: int | None
    multiprocessors: int
    dense_tflops: float | None = None
    bandwidth_gb_per_s: float | None = None
    free_bytes: int | None = None
    host_free_bytes: int | None = None
    probed: bool = False
    failed_products: str | None = None
    unused: str | None = None

    @property
    def has_bfloat16(self) -> bool:
        """True if bfloat16 runs without emulation (torch says yes on a T4, too). A CPU computes it as well, slowly."""
        return self.kind == "cpu" or (self.capability is not None and self.capability >= BFLOAT16_CAPABILITY)

    @property
    def has_float8(self) -> bool:
        """True if the GPU has float8 tensor cores."""
        return self.capability is not None and self.capability >= FLOAT8_CAPABILITY

    @property
    def available_bytes(self) -> int | None:
        """Memory that a run may use: what is free, or all of a device that was only named."""
        return self.free_bytes if self.free_bytes is not None else self.memory_bytes

    @property
    def gpu(self) -> Gpu:
        """The device as :mod:`ftkernels.limits` describes one."""
        return Gpu(self.capability, self.shared_memory_bytes or 0)

    def of_each(self, processes: int) -> DeviceFacts:
        """The share of each of so many processes in this machine: a GPU of its own, and its part of the RAM."""
        if processes == 1:
            return self
        host = None if self.host_free_bytes is None else self.host_free_bytes // processes
        if self.kind == "cuda":
            return replace(self, host_free_bytes=host)
        free, total = (None if size is None else size // processes for size in (self.free_bytes, self.memory_bytes))
        return replace(self, free_bytes=free, memory_bytes=total, host_free_bytes=host)


def _gpu(
    name: str, capability: tuple[int, int], gib: float, shared_kib: int, sms: int, tflops: float, gb_per_s: float
) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        kind="cuda",
        capability=capability,
        memory_bytes=int(gib * GIB),
        shared_memory_bytes=shared_kib * _KIB,
        multiprocessors=sms,
        dense_tflops=tflops,
        bandwidth_gb_per_s=gb_per_s,
    )


# Memory is what torch.cuda.get_device_properties reports, a little under the name on the box. Shared memory is the
# opt-in limit of a block (CUDA programming guide). Rates and bandwidths are the vendor's: dense, SXM if there is one.
GPUS: Mapping[str, DeviceFacts] = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", (7, 5), 14.6, 64, 40, 65, 320),
        _gpu("l4", (8, 9), 22.0, 99, 58, 121, 300),
        _gpu("a10", (8, 6), 22.0, 99, 72, 125, 600),
        _gpu("rtx3090", (8, 6), 23.6, 99, 82, 71, 936),
        _gpu("rtx4090", (8, 9), 23.5, 99, 128, 165, 1008),
        _gpu("rtx5090", (12, 0), 31.3, 99, 170, 209, 1792),
        _gpu("l40s", (8, 9), 44.4, 99, 142, 362, 864),
        _gpu("a100-40gb", (8, 0), 39.4, 163, 108, 312, 1555),
        _gpu("a100-80gb", (8, 0), 79.1, 163, 108, 312, 2039),
        _gpu("rtx-pro-6000", (12, 0), 94.9, 99, 188, 503, 1792),
        _gpu("h100", (9, 0), 79.1, 227, 132, 989, 3350),
        _gpu("h200", (9, 0), 139.8, 227, 132, 989, 4800),
        _gpu("b200", (10, 0), 178.3, 227, 148, 2250, 8000),
    )
}
DEVICE_NAMES: tuple[str, ...] = (*GPUS, "cpu")
_SIZE = re.compile(r"(\d{1,4}(?:\.\d+)?) ?gi?b")


#: What computes where a machine has no NVIDIA GPU.
INSTEAD = "the CPU computes, in plain torch (the reference of each kernel)"
#: Names of other vendors' devices, and what would drive them.
_OTHERS = (
    (re.compile(r"(amd|instinct|radeon)\b.*|mi\d{2,3}[a-z]?|rx ?\d{3,4}.*|gfx\w+|rocm|hip"), "an AMD GPU", "ROCm"),
    (re.compile(r"(intel|arc|gaudi)\b.*|gaudi\d|xpu|hpu"), "an Intel accelerator", "XPU and HPU"),
    (re.compile(r"(apple|metal)\b.*|mps|m[1-9]( ?(pro|max|ultra))?"), "an Apple GPU", "Metal"),
    (re.compile(r"tpu\b.*|trn\d\w*|trainium\d?"), "an XLA device", "XLA"),
)


def named_device(name: str, option: str = "--as") -> DeviceFacts:
    """The device that ``--as NAME`` means; ``cpu`` has this machine's memory and cores.

    A size such as ``24GiB`` means a GPU with that much memory of which nothing else is known: one from Ampere on, with
    the shared memory that all of them have. ``option``: where the name was given. Raises FtcliError FT506 (exit 2) for
    a name that is not in the table, FT519 (exit 3) for another vendor's device.
    """
    key = name.strip().lower()
    size = _SIZE.fullmatch(key)
    if size is not None and float(size[1]) > 0:
        return DeviceFacts(name.strip(), "cuda", (8, 0), int(float(size[1]) * GIB), 99 * _KIB, 0)
    if key == "cpu":
        return replace(cpu_device(), probed=False)
    if key in GPUS:
        return GPUS[key]
    origin, known = Origin(f"{option} {name}"), f"{', '.join(DEVICE_NAMES)}, or a size such as 24GiB"
    words = key.replace("-", " ").replace("_", " ")
    for pattern, kind, driver in _OTHERS:
        if pattern.fullmatch(words):
            raise _not_supported(f"{name} is {kind}", driver, f"known are: {known}", origin)
    close = get_close_matches(key, DEVICE_NAMES, 1, cutoff=0.6)
    message = f"unknown device {name!r}"
    help = f"did you mean {close[0]}? Known are: {known}" if close else f"known are: {known}"
    raise FtcliError.single("FT506", message, exit_code=ExitCode.RECIPE, origin=origin, help=help)


def _not_supported(what: str, driver: str, help: str, origin: Origin | None = None) -> FtcliError:
    message = f"{what}: ftcli computes on NVIDIA GPUs and on CPUs; {driver} is not supported"
    return FtcliError.single("FT519", message, exit_code=ExitCode.PREFLIGHT, origin=origin, help=help)


def probe_device() -> DeviceFacts:
    """The first CUDA device of this machine, or its CPU when there is none. Imports torch.

    Raises FtcliError FT519 (exit 3) for an AMD GPU, which a ROCm build of torch calls a CUDA device, too.
    """
    import torch

    if not torch.cuda.is_available():
        found = torch.accelerator.current_accelerator(check_available=True)
        named = {"mps": "an Apple GPU (Metal)", "xpu": "an Intel GPU (XPU)"}
        return replace(cpu_device(), unused=None if found is None else named.get(found.type, found.type))
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        help = f"use a machine with an NVIDIA GPU; HIP_VISIBLE_DEVICES=-1 hides this one, and {INSTEAD}"
        raise _not_supported(f"{properties.name} is an AMD GPU", "ROCm", help)
    free, total = torch.cuda.mem_get_info(0)
    known = _published(properties.name)
    return DeviceFacts(
        name=properties.name,
        kind="cuda",
        capability=(properties.major, properties.minor),
        memory_bytes=total,
        # torch's stubs lack the attribute; builds that lack it too state the smaller limit without opt-in.
        shared_memory_bytes=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        multiprocessors=properties.multi_processor_count,
        dense_tflops=known.dense_tflops if known else None,
        bandwidth_gb_per_s=known.bandwidth_gb_per_s if known else None,
        free_bytes=free,
        host_free_bytes=_ram()[1],
        probed=True,
    )


def cpu_device() -> DeviceFacts:
    """This machine's CPU: RAM within the container's limit, and the cores that this process may use. No torch."""
    total, free = _ram()
    return DeviceFacts(
        name="cpu",
        kind="cpu",
        capability=None,
        memory_bytes=total,
        shared_memory_bytes=None,
        multiprocessors=usable_cores(),
        free_bytes=free,
        probed=True,
    )


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, and no more than the share that its control group has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_cores()]))


def most_processes(cores: int) -> int:
    """Processes of a run that are started on so many CPU cores; two always, to try things out."""
    return max(2, cores)


def _published(driver_name: str) -> DeviceFacts | None:
    """The table's entry for a driver's name such as ``NVIDIA H100 80GB HBM3`` or ``Tesla T4``."""
    words = driver_name.lower().replace("-", " ").split()
    if "a100" in words:
        return GPUS["a100-80gb" if any(w.startswith("80gb") for w in words) else "a100-40gb"]
    joined = "".join(words)
    for key, gpu in GPUS.items():
        if key in words or (key.startswith("rtx") and key.replace("-", "") in joined):
            return gpu
    return None


#: A control group's folder, the file of its limit, and the line of memory.stat with its use: version 2, version 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "anon"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "total_rss"),
)


def _ram() -> tuple[int | None, int | None]:
    """(total, available) bytes of RAM, each at most the control group's limit; None where the system does not say."""
    fields = _meminfo(Path("/proc/meminfo"))
    total = fields.get("MemTotal") or _sysconf_total()
    free = fields.get("MemAvailable")
    for folder, file, anonymous in _CGROUPS:
        limit = _cgroup_bytes(folder / file)
        if limit is None or (total is not None and limit >= total):
            continue
        # Page cache counts as used in a control group but is given back on demand: only anonymous memory is taken off.
        used = _cgroup_stat(folder / "memory.stat", anonymous)
        return limit, min(limit - used, free) if free is not None else limit - used
    return total, free


def free_host_bytes() -> int | None:
    """Bytes of RAM that this process may still take; None where the system does not say."""
    return _ram()[1]


def _cgroup_cores() -> Iterator[int]:
    """Whole cores of each quota that limits this process: a container's, and those of groups around its own."""
    groups = _text(Path("/proc/self/cgroup")).splitlines()
    folder = Path("/sys/fs/cgroup", *(line.removeprefix("0::/") for line in groups if line.startswith("0::/")))
    first = Path("/sys/fs/cgroup/cpu")  # of the first version
    quotas = [_text(place / "cpu.max") for place in (folder, *folder.parents)]
    for each in (*quotas, f"{_text(first / 'cpu.cfs_quota_us')} {_text(first / 'cpu.cfs_period_us')}"):
        quota, _, period = each.partition(" ")
        if quota.isdigit() and period.isdigit():  # "max" and "-1" say that there is none
            yield int(quota) // max(1, int(period))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _meminfo(path: Path) -> dict[str, int]:
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {key: int(rest.split()[0]) * _KIB for key, _, rest in pairs if rest.split() and rest.split()[0].isdigit()}


def _sysconf_total() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _cgroup_bytes(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _cgroup_stat(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.startswith(f"{key} ")), 0)
