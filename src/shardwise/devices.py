"""CPUs and GPUs that this process may use. No torch."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def count_cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def count_granted_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """That this process may use, and that the quota of its container lets it use at a time."""
    quota = period = ""
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
    with suppress(OSError):  # the first version of cgroups
        quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
        period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
    if not (quota.isdigit() and period.isdigit()):  # "max" and "-1" are no limit
        return count_cpus()
    return min(count_cpus(), max(1, int(quota) // int(period)))


def count_cuda_devices(environ: Mapping[str, str] = os.environ) -> int:
    """CUDA devices visible to this process, without importing torch (NVML, else the device files)."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        wanted = [word for word in visible.split(",") if word.strip() not in ("", "-1", "NoDevFiles")]
        return min(len(wanted), _installed_cuda_devices()) if wanted else 0
    return _installed_cuda_devices()


def _installed_cuda_devices() -> int:
    if (nvml := _nvml()) is not None and (count := _nvml_count(nvml)) is not None:
        return count
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])


def name_gpu(environ: Mapping[str, str] = os.environ) -> str | None:
    """The GPUs' name, e.g. "NVIDIA H200", without importing torch. None: NVML is missing, the GPUs of this machine are
    not all alike (NVML and CUDA number them differently), or they are cut into MIG instances, slower than the name."""
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", "") or (nvml := _nvml()) is None:
        return None
    names = {_nvml_name(nvml, index) for index in range(_nvml_count(nvml) or 0)}
    return names.pop() if len(names) == 1 else None


def gpu_capability() -> tuple[int, int] | None:
    """The lowest compute capability of this machine's GPUs, e.g. (9, 0), without importing torch; None: no NVML."""
    if (nvml := _nvml()) is None:
        return None
    found = [_nvml_capability(nvml, index) for index in range(_nvml_count(nvml) or 0)]
    known = [capability for capability in found if capability is not None]
    return min(known, default=None) if len(known) == len(found) else None


def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def _nvml_count(nvml: ctypes.CDLL) -> int | None:
    count = ctypes.c_uint()
    return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None


def _nvml_name(nvml: ctypes.CDLL, index: int) -> str | None:
    device, name, mig, pending = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return None
    if nvml.nvmlDeviceGetMigMode(device, ctypes.byref(mig), ctypes.byref(pending)) == 0 and mig.value:
        return None
    return name.value.decode() if nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name))) == 0 else None


def _nvml_capability(nvml: ctypes.CDLL, index: int) -> tuple[int, int] | None:
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return None
    known = nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    return (major.value, minor.value) if known else None
