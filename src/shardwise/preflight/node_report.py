"""What one node can say of itself: its GPUs as the driver sees them, disks, versions, code. No torch on import."""

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

_PATIENCE_SECONDS = 20  # for a program that asks the driver: without persistence mode it wakes every GPU first
# nvidia-smi's names. What a driver does not know is left out; the reasons had another name before driver 535.
_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_FIELDS = (
    "name", "memory.total", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending",
    "remapped_rows.failure", "clocks.max.sm", "power.limit", "power.default_limit", "driver_version",
    *(f"clocks_event_reasons.{reason}" for reason in _REASONS),
    *(f"clocks_throttle_reasons.{reason}" for reason in _REASONS),
)  # fmt: skip
_BROKEN = ("requires reset", "Unknown Error", "GPU is lost")  # in the place of a value
# Xids that NVIDIA's catalogue blames on the GPU, its memory, its links or its board; the others may be a program's
_HARDWARE_XIDS = {48, 62, 64, 74, 79, 92, 95, 109, 110, 119, 120, 136, 140, *range(143, 151)}
_XID_HOURS = 24  # jobs have run well on the node since an older one, or it has been reset: the log ends with a reboot


@dataclass
class Gpu:
    """As nvidia-smi says it; None: it does not say."""

    name: str
    memory_gib: float | None = None
    ecc: bool | None = None
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remapping: str | None = None  # of memory rows: "pending", until a reset, or "failed"
    max_clock_mhz: float | None = None  # of the SMs
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowed: list[str] = field(default_factory=list)  # why its clocks are held down, by the hardware or by heat
    broken: str | None = None  # said where a value should be
    links: int | None = None  # NVLinks that are up


@dataclass
class NodeReport:
    host: str
    gpus: list[Gpu] = field(default_factory=list)
    topology: list[str] = field(default_factory=list)  # a line a GPU: how it reaches each of them, NV18 say
    trouble: list[str] = field(default_factory=list)  # Xids, an nvidia-smi that fails: in words
    free_gib: dict[str, float] = field(default_factory=dict)  # of what is called runs_dir and the temporary folder
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(raw: dict[str, Any]) -> NodeReport:
        """From JSON."""
        return NodeReport(**raw | {"gpus": [Gpu(**gpu) for gpu in raw["gpus"]]})


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's own name for a node is the one that `--exclude` takes."""
    return environ.get("SLURMD_NODENAME") or platform.node()


def inspect_node(runs_dir: str, cuda: bool) -> NodeReport:
    """This node, as it is now. `cuda`: its GPUs as well, those that this process may use."""
    found = NodeReport(host_name())
    if cuda:
        found.gpus, found.trouble = read_gpus()
        for gpu, links in zip(found.gpus, count_links(_run("nvidia-smi", "nvlink", "-s")[1]), strict=False):
            gpu.links = links
        found.topology = read_topology(_run("nvidia-smi", "topo", "-m")[1])
        with suppress(OSError, ValueError, IndexError):
            up_seconds = float(Path("/proc/uptime").read_text().split()[0])
            found.trouble += read_xids(_run("dmesg")[1], up_seconds)  # often root's alone: then there is nothing
    found.free_gib = {"runs_dir": _free_gib(runs_dir), "the temporary folder": _free_gib(tempfile.gettempdir())}
    try:
        found.versions = read_versions()
    except Exception as error:  # a GPU that CUDA cannot begin with
        found.trouble.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return found


def read_gpus() -> tuple[list[Gpu], list[str]]:
    """Each GPU of the node that this process may use, and what went wrong with asking."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    code, text = _query(["-i", visible] if visible else [])
    if code and visible:  # one of them may be what is missing
        code, text = _query([])
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    gpus = [] if code else [read_gpu(dict(zip(_known, row, strict=True))) for row in rows if len(row) == len(_known)]
    count = count_cuda_devices()
    if gpus:
        return gpus, []
    said = " ".join(text.split())[-200:]
    trouble = [f"nvidia-smi ended with exit code {code}: {said}"] if count and code not in (0, 127) else []
    return [Gpu("GPU")] * count, trouble


_known: list[str] = list(_FIELDS)


def _query(which: list[str]) -> tuple[int, str]:
    """nvidia-smi refuses a list with a field that it does not know, and names the first."""
    while True:
        code, text = _run("nvidia-smi", *which, f"--query-gpu={','.join(_known)}", "--format=csv,noheader,nounits")
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in _known or len(_known) == 1:
            return code, text
        _known.remove(unknown[1])


def read_gpu(row: dict[str, str]) -> Gpu:
    """One line of nvidia-smi's, by its own names."""
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
    """Links that are up, GPU by GPU, as `nvidia-smi nvlink -s` lists them."""
    counts: list[int] = []
    for line in text.splitlines():
        if re.match(r"GPU \d+:", line):
            counts.append(0)
        elif counts and re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            counts[-1] += 1
    return counts if any(counts) else []


def read_topology(text: str) -> list[str]:
    """Of `nvidia-smi topo -m`, what joins the GPUs: not their adapters, whose names may differ between nodes."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return [" ".join(row[1 : 1 + len(gpus)]) for row in gpus]


def read_xids(text: str, up_seconds: float) -> list[str]:
    """The kernel log's errors of the last hours that are the hardware's, in words: once each."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        said = re.search(r"NVRM: Xid \(PCI:([\w:.]+)\): (\d+)", line)
        if said is None or int(said[2]) not in _HARDWARE_XIDS:
            continue
        since_boot = re.match(r"\[\s*(\d+\.\d+)\]", line)
        if since_boot is None or up_seconds - float(since_boot[1]) < _XID_HOURS * 3600:
            found[f"Xid {said[2]} of GPU {said[1]} in the kernel's log"] = None
    return list(found)


def read_versions() -> dict[str, str]:
    """What has to be the same on every node, the code included."""
    from shardwise.run_dir.environment import describe_environment

    described = describe_environment()
    packages: dict[str, Any] = described.pop("packages")
    driver, _, _ = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[1].partition("\n")
    found = {
        **{key: described[key] for key in ("python", "cuda", "nccl", "commit", "uncommitted_changes")},
        **packages,
        "driver": driver if re.fullmatch(r"[\d.]+", driver) else None,
        "code": hash_code(),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def hash_code(root: Path | None = None) -> str:
    """Of every Python file of this package: a copy of it that is out of date has another."""
    root = Path(__file__).parents[1] if root is None else root
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _free_gib(folder: str) -> float:
    """Of the file system that `folder` is on, or will be."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free / 2**30
    except OSError:  # a server that is gone
        return 0.0


def _run(*command: str) -> tuple[int, str]:
    """Exit code and output; 127: there is no such program."""
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
