"""Named and probed devices, and the precision plan that follows from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.cli.commands.doctor import examine
from ftcli.config.model import Kernels
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.facts import device as device_module
from ftcli.facts.device import DEVICE_NAMES, GPUS, DeviceFacts, cpu_device, named_device, probe_device, usable_cores
from ftcli.facts.shape import shape_of
from ftcli.plan.execution import LayerChoice, choose_layers, why_no_kernels
from ftcli.plan.precision import DtypePlan, plan_dtypes
from ftcli.preflight.checks import machine
from ftcli.preflight.checks.context import Context
from ftcli.reporting import Session

GIB = 2**30


def test_the_table_holds_what_the_contract_names() -> None:
    promised = "t4 l4 a10 rtx3090 rtx4090 rtx5090 l40s a100-40gb a100-80gb rtx-pro-6000 h100 h200 b200 cpu"
    assert " ".join(DEVICE_NAMES) == promised


@pytest.mark.parametrize(
    ("name", "capability", "nominal_gb", "bfloat16", "float8"),
    [
        ("t4", (7, 5), 16, False, False),
        ("l4", (8, 9), 24, True, True),
        ("a10", (8, 6), 24, True, False),
        ("rtx3090", (8, 6), 24, True, False),
        ("rtx4090", (8, 9), 24, True, True),
        ("rtx5090", (12, 0), 32, True, True),
        ("l40s", (8, 9), 48, True, True),
        ("rtx-pro-6000", (12, 0), 96, True, True),
        ("a100-40gb", (8, 0), 40, True, False),
        ("a100-80gb", (8, 0), 80, True, False),
        ("h100", (9, 0), 80, True, True),
        ("h200", (9, 0), 141, True, True),
        ("b200", (10, 0), 192, True, True),
    ],
)
def test_gpus(name: str, capability: Any, nominal_gb: int, bfloat16: bool, float8: bool) -> None:
    gpu = named_device(name.upper())
    assert gpu.capability == capability
    assert (gpu.has_bfloat16, gpu.has_float8) == (bfloat16, float8)
    assert gpu.memory_bytes is not None
    assert 0.85 * nominal_gb * GIB < gpu.memory_bytes <= nominal_gb * GIB
    assert (
        gpu.shared_memory_bytes
        == {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99}.get(capability, 227) * 1024
    )
    assert gpu.dense_tflops
    assert gpu.bandwidth_gb_per_s
    assert not gpu.probed


@pytest.mark.parametrize(("text", "gib"), [("24GiB", 24.0), ("80gb", 80.0), ("11.5 GiB", 11.5)])
def test_a_size_is_a_gpu_of_which_nothing_else_is_known(text: str, gib: float) -> None:
    gpu = named_device(text)
    assert (gpu.name, gpu.memory_bytes, gpu.kind) == (text, int(gib * GIB), "cuda")
    assert gpu.has_bfloat16
    assert not gpu.has_float8
    for wrong in ("0GiB", "GiB", "-4GiB", "1e3GiB", "99999GiB"):
        with pytest.raises(FtcliError):
            named_device(wrong)


def test_an_unknown_name_is_a_usage_error_with_a_suggestion() -> None:
    with pytest.raises(FtcliError) as caught:
        named_device("h10")
    (finding,) = caught.value.findings
    assert (finding.code, caught.value.exit_code) == ("FT506", ExitCode.RECIPE)
    assert finding.help is not None
    assert finding.help.startswith("did you mean h100?")
    for nothing_near in ("", "gtx1080", "k80"):
        with pytest.raises(FtcliError) as caught:
            named_device(nothing_near)
        assert str(caught.value.findings[0].help).startswith("known are: t4, l4, ")


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        *(
            (name, "ROCm")
            for name in ("mi300x", "MI250", "AMD-Instinct-MI300X", "rx7900xtx", "Radeon Pro W7900", "gfx942")
        ),
        *((name, "XPU") for name in ("gaudi2", "arc-a770")),
        *((name, "Metal") for name in ("mps", "m3-max", "apple")),
        *((name, "XLA") for name in ("tpu-v5e", "trn1")),
    ],
)
def test_another_vendors_device_is_not_supported_and_says_so(name: str, driver: str) -> None:
    with pytest.raises(FtcliError) as caught:
        named_device(name, "--gpu")
    (finding,) = caught.value.findings
    assert (finding.code, caught.value.exit_code) == ("FT519", ExitCode.PREFLIGHT)
    assert f"; {driver}" in finding.message
    assert finding.message.endswith("not supported")
    assert finding.origin is not None
    assert finding.origin.source == f"--gpu {name}"
    assert set(DEVICE_NAMES) <= set(str(finding.help).replace(",", "").split())


def test_the_cpu_has_the_memory_of_this_machine() -> None:
    cpu = named_device("cpu")
    assert cpu.kind == "cpu"
    assert cpu.memory_bytes is not None
    assert cpu.free_bytes is not None
    assert 0 < cpu.free_bytes <= cpu.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 <= cpu.multiprocessors <= len(os.sched_getaffinity(0))
    assert not cpu.probed
    assert cpu_device().probed


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "6400000 100000"}, 8),
        ({"/proc/self/cgroup": "0::/jobs/one", "/sys/fs/cgroup/jobs/one/cpu.max": "300000 100000"}, 3),
        ({"/proc/self/cgroup": "1:cpu:/\n0::/jobs/one", "/sys/fs/cgroup/jobs/cpu.max": "300000 100000"}, 3),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(device_module, "_text", lambda path: files.get(str(path), ""))
    assert usable_cores() == cores


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_cgroup_bytes", lambda path: 3 * GIB)
    monkeypatch.setattr(device_module, "_cgroup_stat", lambda path, key: GIB)
    monkeypatch.setattr(device_module, "_meminfo", lambda path: {"MemTotal": 64 * GIB, "MemAvailable": 60 * GIB})
    cpu = cpu_device()
    assert (cpu.memory_bytes, cpu.free_bytes) == (3 * GIB, 2 * GIB)


def test_a_containers_limit_counts_in_the_first_version_of_control_groups_too(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"/sys/fs/cgroup/memory/memory.limit_in_bytes": 128 * GIB}
    used = {("/sys/fs/cgroup/memory/memory.stat", "total_rss"): 5 * GIB}
    monkeypatch.setattr(device_module, "_cgroup_bytes", lambda path: limits.get(str(path)))
    monkeypatch.setattr(device_module, "_cgroup_stat", lambda path, key: used[str(path), key])
    monkeypatch.setattr(device_module, "_meminfo", lambda path: {"MemTotal": 2000 * GIB, "MemAvailable": 1900 * GIB})
    assert (cpu_device().memory_bytes, cpu_device().free_bytes) == (128 * GIB, 123 * GIB)
    limits["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = 2**63 - 4096  # how that version says that there is none
    assert cpu_device().free_bytes == 1900 * GIB


def test_probing_a_gpu_reads_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA A100-SXM4-80GB",
        major=8,
        minor=0,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        multi_processor_count=108,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60 * GIB, 79 * GIB))
    found = probe_device()
    assert (found.kind, found.capability, found.probed) == ("cuda", (8, 0), True)
    assert (found.free_bytes, found.memory_bytes, found.available_bytes) == (60 * GIB, 79 * GIB, 60 * GIB)
    host = cpu_device().free_bytes
    assert host is not None
    assert found.host_free_bytes == pytest.approx(host, rel=0.2)
    assert named_device("a100-80gb").host_free_bytes is None
    assert found.shared_memory_bytes == 166912
    assert found.dense_tflops == GPUS["a100-80gb"].dense_tflops


def test_an_amd_gpu_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm build of torch says cuda, and capability 9.4 of an MI300X."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    found = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    with pytest.raises(FtcliError, match=r"AMD Instinct MI300X is an AMD GPU.*ROCm is not supported") as caught:
        probe_device()
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    said = examine(Session())
    assert "AMD" in str(said.device_problem)
    assert {row.runs for row in said.kernels} == {False}, "what runs once it is hidden"
    assert all("plain torch runs instead" in row.reason for row in said.kernels)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_driver_names_find_their_published_rates(driver: str, name: str | None) -> None:
    found = device_module._published(driver)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("dtype", "lora", "device", "expected"),
    [
        ("auto", True, "h100", ("bfloat16", "float32", "bfloat16", True)),
        ("auto", False, "h100", ("float32", None, "bfloat16", True)),
        ("auto", True, "t4", ("float32", "float32", "float32", False)),
        ("auto", False, "t4", ("float32", None, "float32", False)),
        ("auto", True, "cpu", ("float32", "float32", "float32", False)),
        ("bfloat16", True, "t4", ("bfloat16", "float32", "bfloat16", True)),
        ("float32", False, "h100", ("float32", None, "float32", False)),
        ("float32", True, "h100", ("float32", "float32", "float32", False)),
    ],
)
def test_precision_plans(
    dtype: str, lora: bool, device: str, expected: tuple[Any, ...], load: Callable[..., Any]
) -> None:
    recipe = load("lora: {r: 8}\n" if lora else "", f"model.dtype={dtype}").recipe
    plan = plan_dtypes(recipe, named_device(device))
    assert (plan.parameter, plan.adapter, plan.compute, plan.autocast) == expected


def test_the_plan_gives_its_reason_and_never_asks_torch(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise AssertionError("torch says yes on a T4")

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", refuse)
    recipe = load("").recipe
    assert plan_dtypes(recipe, GPUS["t4"]).reason == "t4 has compute capability 7.5, and bfloat16 needs 8.0"
    assert plan_dtypes(recipe, GPUS["a10"]).reason == "a10 has compute capability 8.6, and bfloat16 needs 8.0"


def machine_codes(context: Context, device: Any) -> list[tuple[str, str]]:
    plan = plan_dtypes(context.recipe, device)
    return [(f.code, f.severity) for f in machine.check(context, device, plan) if isinstance(f, Finding)]


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("model.dtype=bfloat16", "t4", [("FT501", "error")]),
        ("model.dtype=bfloat16", "l4", []),
        ("model.dtype=auto", "t4", []),
        ("model.dtype=bfloat16", "cpu", [("FT505", "warning")]),
        ("model.attention=eager", "t4", []),
        ("quantization.method=fp8", "a100-80gb", [("FT508", "error")]),
        ("quantization.method=fp8", "l4", []),
        ("quantization.method=fp8", "h200", []),
        ("quantization.method=fp8", "cpu", [("FT508", "warning")]),
        ("model.dtype=float32,quantization.method=fp8", "h200", [("FT508", "warning")]),
    ],
)
def test_machine_rules(setting: str, device: str, expected: Any, context: Callable[..., Any]) -> None:
    assert machine_codes(context("", *setting.split(",")), named_device(device)) == expected


def test_the_kernels_need_a_gpu_of_capability_7() -> None:
    assert why_no_kernels(GPUS["t4"]) is None
    assert why_no_kernels(named_device("cpu")) == "the kernels need a CUDA GPU"
    pascal = replace(GPUS["t4"], capability=(6, 1))
    assert why_no_kernels(pascal) == "the kernels need compute capability 7.0, not 6.1"


def test_layers_stay_transformers_own_where_the_kernels_cannot_run() -> None:
    """Under `kernels: auto` any CUDA GPU got the kernels, and the first launch failed."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = shape_of({"model_type": "llama", **dict.fromkeys(sizes, 8)})

    def chosen(device: DeviceFacts, kernels: Kernels = "auto") -> LayerChoice:
        gpu = device.gpu if device.kind == "cuda" else None
        return choose_layers("llama", shape, "silu", kernels, device=device.name, gpu=gpu)

    pascal = replace(GPUS["t4"], name="GTX 1080", capability=(6, 1))
    assert chosen(pascal) == LayerChoice("transformers", "the kernels need compute capability 7.0, not 6.1")
    assert chosen(pascal, "reference").code == "reference"
    assert chosen(GPUS["t4"]).code == "fused"
    assert chosen(named_device("cpu")) == LayerChoice("transformers", "cpu is not a CUDA GPU")


def test_a_busy_gpu_is_warned_of(context: Callable[..., Any]) -> None:
    busy = replace(GPUS["h100"], free_bytes=40 * GIB, probed=True)
    assert machine_codes(context(""), busy) == [("FT504", "warning")]
    idle = replace(GPUS["h100"], free_bytes=78 * GIB, probed=True)
    assert machine_codes(context(""), idle) == []


def test_a_plan_knows_its_bytes(tmp_path: Path) -> None:
    plan = DtypePlan("float32", None, "bfloat16", True, "")
    assert (plan.parameter_bytes, plan.compute_bytes) == (4, 2)
