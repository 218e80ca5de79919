"""CPUs and GPUs that this process may use. No torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
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
    """CUDA devices visible to this process, AMD's included, without importing torch (NVML, else the device files)."""
    if rocm := count_rocm_devices(environ):
        return rocm
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


def torch_build(package: Path | None = None) -> dict[str, str]:
    """What torch was built for, e.g. {"cuda": "13.0"}, by its own record. Empty: for the CPU alone, or it is missing.

    The package is looked up and not imported.
    """
    if package is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return {}
        package = Path(found.origin).parent
    try:
        text = (package / "version.py").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^(cuda|hip|xpu)\s*(?::[^=\n]*)?=\s*'([^']+)'", text, re.MULTILINE))


# Numbers of PCI devices that libdrm's list of AMD's GPUs has
_AMD_NAMES = {0x7408: "MI250X", 0x740F: "MI210", 0x74A0: "MI300A", 0x74A1: "MI300X", 0x74A5: "MI325X",
              0x75A0: "MI350X", 0x75A3: "MI355X"}  # fmt: skip


def amd_gpus(root: Path = Path("/")) -> list[str | None]:
    """The name of each AMD GPU that the driver for computing shows (/dev/kfd); None: a name that is not known."""
    if not (root / "dev/kfd").exists():
        return []
    names: list[str | None] = []
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        with suppress(OSError, ValueError):
            properties = {key: int(value) for key, value in map(str.split, path.read_text().splitlines())}
            if properties.get("simd_count"):  # the other nodes are CPUs
                name = _AMD_NAMES.get(properties.get("device_id", 0))
                names.append(None if name is None else f"AMD Instinct {name}")
    return names


def name_amd_gpu() -> str | None:
    """The name of this machine's AMD GPUs; None: they are not all alike, or it is not known."""
    names = set(amd_gpus())
    return names.pop() if len(names) == 1 else None


def count_visible(count: int, variables: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> int:
    """How many of `count` devices are left by each of the environment's lists of numbers."""
    for variable in variables:
        if (visible := environ.get(variable)) is not None:
            count = min(count, len([word for word in visible.split(",") if word.strip() not in ("", "-1")]))
    return count


def count_rocm_devices(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """AMD's GPUs that torch calls CUDA devices: none, unless torch is built for ROCm."""
    if "hip" not in torch_build():
        return 0
    return count_visible(
        len(amd_gpus(root)), ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), environ
    )


def intel_gpus(root: Path = Path("/")) -> list[str]:
    """The PCI device of each Intel GPU, e.g. 0x0bd5; a GPU of several tiles is there once for each, as torch counts."""
    found: list[str] = []
    for device in sorted((root / "sys/class/drm").glob("renderD*/device")):
        with suppress(OSError):
            if (device / "vendor").read_text().strip() == "0x8086":
                number = (device / "device").read_text().strip()
                found += [number] * max(1, len(list(device.glob("tile[0-9]*"))))
    return found


def has_apple_gpu() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
