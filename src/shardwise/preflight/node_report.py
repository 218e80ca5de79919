"""Inspects one node: its GPUs as the driver sees them, disks, versions, code. No torch on import."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.devices import count_cuda_devices

# A program that queries the driver may take this long: without persistence mode it wakes every GPU first
_PATIENCE_SECONDS = 20
# nvidia-smi's names. A name that a driver does not know is left out; the reasons had other names before driver 535.
_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_FIELDS = (
    "name", "memory.total", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending",
    "remapped_rows.failure", "clocks.max.sm", "power.limit", "power.default_limit", "driver_version",
    *(f"clocks_event_reasons.{reason}" for reason in _REASONS),
    *(f"clocks_throttle_reasons.{reason}" for reason in _REASONS),
)  # fmt: skip
_BROKEN = ("requires reset", "Unknown Error", "GPU is lost")  # nvidia-smi prints these in the place of a value
# Xids that NVIDIA's catalogue blames on the GPU, its memory, its links or its board; a program may cause the others
_HARDWARE_XIDS = {48, 62, 64, 74, 79, 92, 95, 109, 110, 119, 120, 136, 140, *range(143, 151)}
_XID_HOURS = 24  # an older error does not count: jobs have run well since then, or the GPU has been reset


@dataclass
class Gpu:
    """A GPU as nvidia-smi describes it; None where it says nothing."""

    name: str
    memory_gib: float | None = None
    ecc: bool | None = None
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remapping: str | None = None  # the remapping of memory rows is "pending", until a reset, or has "failed"
    max_clock_mhz: float | None = None  # the clock of the SMs
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowed: list[str] = field(default_factory=list)  # the reasons why the hardware or heat lowers its clocks
    broken: str | None = None  # one of `_BROKEN`, where a value should be
    links: int | None = None  # the number of NVLinks that are up


@dataclass
class NodeReport:
    """What a node reports about itself."""

    host: str
    gpus: list[Gpu] = field(default_factory=list)
    topology: list[str] = field(default_factory=list)  # for each GPU a line: how it reaches each GPU, such as NV18
    trouble: list[str] = field(default_factory=list)  # problems in words: Xids, an nvidia-smi that fails
    free_gib: dict[str, float] = field(default_factory=dict)  # free space of runs_dir and of the temporary folder
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(raw: dict[str, Any]) -> NodeReport:
        """Make a report from JSON."""
        return NodeReport(**raw | {"gpus": [Gpu(**gpu) for gpu in raw["gpus"]]})


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name; under Slurm its name there, which `--exclude` takes."""
    return environ.get("SLURMD_NODENAME") or platform.node()


def inspect_node(runs_dir: str, cuda: bool) -> NodeReport:
    """Inspect this node. `cuda`: also the GPUs that this process may use."""
    found = NodeReport(host_name())
    if cuda:
        found.gpus, found.trouble = read_gpus()
        for gpu, links in zip(found.gpus, count_links(run_program("nvidia-smi", "nvlink", "-s")[1]), strict=False):
            gpu.links = links
        found.topology = read_topology(run_program("nvidia-smi", "topo", "-m")[1])
        with suppress(OSError, ValueError, IndexError):
            up_seconds = float(Path("/proc/uptime").read_text().split()[0])
            found.trouble += read_xids(
                run_program("dmesg")[1], up_seconds
            )  # if only root may run dmesg, nothing is found
    found.free_gib = {"runs_dir": _free_gib(runs_dir), "the temporary folder": _free_gib(tempfile.gettempdir())}
    try:
        found.versions = read_versions()
    except Exception as error:  # CUDA cannot use a GPU
        found.trouble.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return found


def read_gpus() -> tuple[list[Gpu], list[str]]:
    """Each GPU that this process may use, and what went wrong when nvidia-smi was called."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    code, text = _query(["-i", visible] if visible else [])
    if code and visible:  # one of these GPUs may be missing
        code, text = _query([])
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    gpus = [] if code else [read_gpu(dict(zip(_known, row, strict=True))) for row in rows if len(row) == len(_known)]
    count = count_cuda_devices()
    if gpus:
        return gpus, []
    output = " ".join(text.split())[-200:]
    trouble = [f"nvidia-smi ended with exit code {code}: {output}"] if count and code not in (0, 127) else []
    return [Gpu("GPU")] * count, trouble


_known: list[str] = list(_FIELDS)


def _query(which: list[str]) -> tuple[int, str]:
    """Run nvidia-smi without the fields that it does not know: it refuses a list with one, and names the first."""
    while True:
        code, text = run_program(
            "nvidia-smi", *which, f"--query-gpu={','.join(_known)}", "--format=csv,noheader,nounits"
        )
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in _known or len(_known) == 1:
            return code, text
        _known.remove(unknown[1])


def read_gpu(row: dict[str, str]) -> Gpu:
    """Make a Gpu from one line of nvidia-smi. `row`: its name of a field → value."""
    row = {key: value.strip() for key, value in row.items()}
    memory, uncorrected = _number(row.get("memory.total")), _number(row.get("ecc.errors.uncorrected.volatile.total"))
    remapping = {key: row.get(f"remapped_rows.{key}", "").lower() in ("yes", "1") for key in ("failure", "pending")}
    return Gpu(
        name=row.get("name", "GPU"),
        memory_gib=None if memory is None else memory / 1024,
        ecc={"Enabled": True, "Disabled": False}.get(row.get("ecc.mode.current", "")),
        uncorrected=None if uncorrected is None else int(uncorrected),
        remapping="failed" if remapping["failure"] else "pending" if remapping["pending"] else None,
        max_clock_mhz=_number(row.get("clocks.max.sm")),
        power_limit_w=_number(row.get("power.limit")),
        default_power_limit_w=_number(row.get("power.default_limit")),
        slowed=sorted(
            {key.partition(".")[2] for key, value in row.items() if "_reasons." in key and value == "Active"}
        ),
        broken=next((value for value in row.values() if any(word in value for word in _BROKEN)), None),
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # [N/A]
        return None


def count_links(text: str) -> list[int]:
    """Count each GPU's links that are up. `text`: from `nvidia-smi nvlink -s`."""
    counts: list[int] = []
    for line in text.splitlines():
        if re.match(r"GPU \d+:", line):
            counts.append(0)
        elif counts and re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            counts[-1] += 1
    return counts if any(counts) else []


def read_topology(text: str) -> list[str]:
    """Read from `nvidia-smi topo -m` what joins the GPUs, without adapters, whose names may differ between nodes."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return [" ".join(row[1 : 1 + len(gpus)]) for row in gpus]


def read_xids(text: str, up_seconds: float) -> list[str]:
    """Describe the hardware's errors of the last hours in the kernel's log, each once."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        xid = re.search(r"NVRM: Xid \(PCI:([\w:.]+)\): (\d+)", line)
        if xid is None or int(xid[2]) not in _HARDWARE_XIDS:
            continue
        since_boot = re.match(r"\[\s*(\d+\.\d+)\]", line)
        if since_boot is None or up_seconds - float(since_boot[1]) < _XID_HOURS * 3600:
            found[f"Xid {xid[2]} of GPU {xid[1]} in the kernel's log"] = None
    return list(found)


def read_versions() -> dict[str, str]:
    """The versions that must be the same on every node, with a hash of the code."""
    from shardwise.run_dir.events import describe_environment

    described = describe_environment()
    packages: dict[str, Any] = described.pop("packages")
    driver, _, _ = run_program("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[1].partition("\n")
    found = {
        **{key: described[key] for key in ("python", "cuda", "hip", "nccl", "commit", "uncommitted_changes")},
        **packages,
        "driver": driver if re.fullmatch(r"[\d.]+", driver) else None,
        "code": hash_code(),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def hash_code(root: Path | None = None) -> str:
    """Hash every Python file of this package: an outdated copy has another hash."""
    root = Path(__file__).parents[1] if root is None else root
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _free_gib(folder: str) -> float:
    """The free space of the file system that `folder` is on, or will be, in GiB."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free / 2**30
    except OSError:  # the file server is gone
        return 0.0


def run_program(*command: str) -> tuple[int, str]:
    """Run a program, and return its exit code and output; 127: there is no such program."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", timeout=_PATIENCE_SECONDS, check=False, env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {_PATIENCE_SECONDS} s"
    except OSError:
        return 127, ""
    return done.returncode, done.stdout
