"""Describes this machine for `shardwise doctor`: accelerators, CPUs, memory, disks. No torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.devices import amd_gpus, count_cpus, count_granted_cpus, has_apple_gpu, intel_gpus, torch_build
from shardwise.plan.hardware import installed
from shardwise.preflight.node_report import Gpu, count_links, read_gpus, run_program

_NVIDIA_ON_THE_BUS = ("0x10de", "0x03")  # PCI's number of the maker; the class of displays and of GPUs without one


@dataclass
class Accelerator:
    """One device. None: not known."""

    maker: str  # NVIDIA, AMD, Intel or Apple
    name: str
    memory_gib: float | None = None
    driver: str | None = None
    links: int | None = None  # to other GPUs: NVLinks that are up
    pcie: str | None = None  # the most that the slot and the GPU can do, e.g. "5.0 x16"
    faults: list[str] = field(default_factory=list)  # why it cannot be trusted


@dataclass
class Machine:
    """What stands here, and what is installed."""

    host: str
    system: str
    accelerators: list[Accelerator]
    trouble: list[str]  # with the tools of a maker
    torch_built_for: dict[str, str]  # see devices.torch_build
    cpus: int  # that this process may use
    cpus_granted: int  # those of them that its container lets it use at a time
    cpus_of_machine: int
    memory_gib: float | None
    free_memory_gib: float | None
    memory_limit_gib: float | None  # of this process's container
    shared_memory_gib: float | None
    runs_dir: str
    runs_dir_gib: float | None  # free; None: it cannot be looked at
    runs_dir_is_writable: bool
    slurm: str | None  # its version
    versions: dict[str, str | None]


@dataclass
class Speed:
    """What one device did in a second or two."""

    device: str
    what: str  # e.g. "products of matrices in bf16"
    value: float
    unit: str
    expected: float | None = None  # the cluster file's figure

    @property
    def share(self) -> float | None:
        return None if not self.expected else self.value / self.expected


def describe_machine(runs_dir: str, root: Path = Path("/")) -> Machine:
    """Look at this machine. `root`: where the files of the system are."""
    with ThreadPoolExecutor() as pool:  # the programs take a while each
        slurm = pool.submit(lambda: run_program("sbatch", "--version"))
        gpus, trouble = _safely_nvidia()
        code, text = slurm.result()
    memory = _memory(root)
    folder = _existing(runs_dir)
    return Machine(
        host=platform.node(),
        system=platform.platform(),
        accelerators=[*gpus, *_others(root)],
        trouble=trouble + _without_driver(gpus, root),
        torch_built_for=torch_build(),
        cpus=count_cpus(),
        cpus_granted=count_granted_cpus(),
        cpus_of_machine=os.cpu_count() or 1,
        memory_gib=memory.get("MemTotal"),
        free_memory_gib=memory.get("MemAvailable"),
        memory_limit_gib=_memory_limit(root),
        shared_memory_gib=_size_gib(root / "dev/shm"),
        runs_dir=runs_dir,
        runs_dir_gib=_free_gib(folder),
        runs_dir_is_writable=folder.is_dir() and os.access(folder, os.W_OK),
        slurm=text.strip().removeprefix("slurm ") if code == 0 and text.strip() else None,
        versions={
            "python": platform.python_version(),
            **{p: installed(p) for p in ("torch", "lightning", "shardwise")},
        },
    )


Found = tuple[list[Accelerator], list[str]]


def _safely_nvidia() -> Found:
    """A nvidia-smi that prints what nobody expects must not end the doctor."""
    try:
        return _nvidia()
    except Exception as error:
        return [], [f"nvidia-smi was not understood: {type(error).__name__}: {error}"]


def _nvidia() -> Found:
    with ThreadPoolExecutor() as pool:
        links = pool.submit(lambda: count_links(run_program("nvidia-smi", "nvlink", "-s")[1]))
        query = ("--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits")
        rest = pool.submit(lambda: run_program("nvidia-smi", *query))
        gpus, trouble = read_gpus()
        code, text = rest.result()
        counts = links.result()
    rows = [line.split(", ") for line in text.splitlines()] if code == 0 else []
    made = []
    for number, gpu in enumerate(gpus):
        row = rows[number] if number < len(rows) and len(rows[number]) == 3 else [None] * 3
        pcie = f"{row[1]}.0 x{row[2]}" if row[1] and row[1].isdigit() else None
        name = gpu.name if gpu.name.startswith("NVIDIA") else f"NVIDIA {gpu.name}"
        links_up = counts[number] if number < len(counts) else None
        made.append(Accelerator("NVIDIA", name, gpu.memory_gib, row[0], links_up, pcie, _faults(gpu)))
    if not made and code not in (0, 127):
        trouble.append(f"nvidia-smi ended with exit code {code}: {' '.join(text.split())[-200:]}")
    return made, trouble


def _faults(gpu: Gpu) -> list[str]:
    return [
        *([f"{gpu.uncorrected} ECC errors that were not corrected"] if gpu.uncorrected else []),
        *(["memory rows that wait for a reset of the GPU"] if gpu.remapping == "pending" else []),
        *(["its memory rows could not be remapped"] if gpu.remapping == "failed" else []),
        *([f"nvidia-smi says {gpu.broken}"] if gpu.broken else []),
    ]


def _without_driver(nvidia: list[Accelerator], root: Path) -> list[str]:
    """A line for GPUs of NVIDIA that are plugged in, where no driver answers."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            number, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += number == _NVIDIA_ON_THE_BUS[0] and kind.startswith(_NVIDIA_ON_THE_BUS[1])
    if not count or nvidia:
        return []
    return [f"NVIDIA GPUs on the PCI bus: {count}; no driver answers for them: install NVIDIA's driver, or give the "
            f"container the GPUs (docker run --gpus all)"]  # fmt: skip


def _others(root: Path) -> list[Accelerator]:
    """The GPUs of other makers, by name alone. Those in a processor are listed too."""
    found = [Accelerator("AMD", name or "AMD GPU") for name in amd_gpus(root)]
    found += [Accelerator("Intel", f"Intel GPU {number}") for number in intel_gpus(root)]
    return [*found, Accelerator("Apple", "Apple GPU")] if has_apple_gpu() else found


def _memory(root: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    with suppress(OSError):
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE):
            found[name] = int(size) / 2**20
    if not found:
        with suppress(OSError, ValueError):  # not Linux
            found["MemTotal"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return found


def _memory_limit(root: Path) -> float | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError):
            text = (root / name).read_text().strip()
            if text.isdigit() and int(text) < 2**60:  # a larger number is no limit
                return int(text) / 2**30
    return None


def _existing(folder: str) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free_gib(path: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(path).free / 2**30
    return None


def _size_gib(path: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(path).total / 2**30
    return None
