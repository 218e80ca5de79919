"""Judges whether this machine can train, and shows what it is: `shardwise doctor`. No torch, unless it measures."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from shutil import which
from typing import Any

from shardwise.errors import count
from shardwise.preflight.extras import Package, optional, other_files, required
from shardwise.preflight.machine import Accelerator, Machine, Speed, describe_machine

# The oldest driver that runs what is built with each CUDA: NVIDIA's table of minor version compatibility
_OLDEST_DRIVER = {"13": 580, "12": 525, "11": 450}
_LEAST_DISK_GIB = 1.0
_LEAST_SHARED_GIB = 0.25  # docker's own is 0.06
_SLOW = 0.5  # of the cluster file's figure


@dataclass
class Report:
    """Everything that the doctor says."""

    problems: list[str]  # that keep a run from training, or from using the accelerators
    notes: list[str]
    machine: Machine
    packages: list[Package]
    extras: list[Package]
    other_files: list[tuple[str, str, list[str]]]
    speeds: list[Speed] = field(default_factory=list)


def examine(runs_dir: str) -> Report:
    """Look at this machine and what is installed, and judge them."""
    return judge(describe_machine(runs_dir), required(), optional())


def judge(machine: Machine, packages: list[Package], extras: list[Package]) -> Report:
    """What of this keeps a run from training."""
    return Report(
        problems=[*_of_packages(packages, extras), *_of_accelerators(machine), *_of_folders(machine)],
        notes=_notes(machine),
        machine=machine,
        packages=packages,
        extras=extras,
        other_files=list(other_files()),
    )


def _of_packages(packages: list[Package], extras: list[Package]) -> list[str]:
    found = []
    for package in packages:
        if package.version is None:
            found.append(f"{package.name} is not installed: {package.install}")
        elif not package.fits:
            found.append(
                f"{package.name} {package.version} is installed, and {package.asked} is needed: {package.install}"
            )
    for package in extras:
        if not package.fits:
            found.append(f"{package.name} {package.version} is installed, and {package.brings} needs {package.asked}: "
                         f"{package.install}")  # fmt: skip
    return found


def _of_accelerators(machine: Machine) -> list[str]:
    found = list(machine.trouble)
    for number, one in enumerate(machine.accelerators):
        found += [f"{one.name} (number {number}): {fault}" for fault in one.faults]
    gpus = [one for one in machine.accelerators if one.maker == "NVIDIA"]
    built, version = machine.torch_built_for, machine.versions["torch"]
    if version is None or not gpus:
        return found
    if "cuda" not in built:
        target = " and ".join(f"{key} {value}" for key, value in built.items()) or "the CPU alone"
        found.append(
            f"this machine has {count(len(gpus), 'GPU')} of NVIDIA, and torch {version} is built for {target}: pip "
            f"install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    found += _of_driver(machine, built.get("cuda"))
    return found


def _of_driver(machine: Machine, cuda: str | None) -> list[str]:
    needed = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    driver = next((one.driver for one in machine.accelerators if one.maker == "NVIDIA" and one.driver), None)
    if needed is None or driver is None or not driver.partition(".")[0].isdigit():
        return []
    if int(driver.partition(".")[0]) >= needed:
        return []
    return [f"NVIDIA's driver {driver} is too old for torch's CUDA {cuda}, which needs {needed}: install a newer "
            f"driver, or a torch for an older CUDA"]  # fmt: skip


def _of_folders(machine: Machine) -> list[str]:
    if not machine.runs_dir_is_writable:
        return [f"runs_dir={machine.runs_dir} cannot be written: give runs_dir= a folder of yours"]
    if machine.runs_dir_gib is not None and machine.runs_dir_gib < _LEAST_DISK_GIB:
        return [f"runs_dir={machine.runs_dir} has {machine.runs_dir_gib:.2f} GiB left: checkpoints need more"]
    return []


def _notes(machine: Machine) -> list[str]:
    found = []
    shared = machine.shared_memory_gib
    if shared is not None and shared < _LEAST_SHARED_GIB:
        found.append(f"/dev/shm has {shared * 1024:.0f} MiB: data workers and NCCL exchange through it; "
                     f"docker run --shm-size=8g")  # fmt: skip
    if machine.cpus_granted < machine.cpus:
        found.append(f"this container may use {machine.cpus_granted} of the {machine.cpus} CPUs at a time")
    return found


# ---- To read


def show(report: Report) -> str:
    """The whole report as text. Nothing in it depends on the terminal."""
    machine = report.machine
    lines = [f"problem: {line}" for line in report.problems] + [f"note: {line}" for line in report.notes]
    if not report.problems:
        lines.insert(0, f"{machine.host} is well")
    rows = [*_machine_rows(machine), *((f"measured: {s.device}", _speed(s)) for s in report.speeds)]
    lines += ["", *_columns(rows)]
    if report.extras:
        lines += ["", "optional packages", *_columns([_extra(package) for package in report.extras])]
    for name, first, missing in report.other_files:
        if missing:
            lines.append(f"{name} ({first}): {count(len(missing), 'package')} missing; pip install -r {name}")
    return "\n".join(lines)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _extra(package: Package) -> tuple[str, ...]:
    if package.version is None:
        return package.name, "missing", package.brings, package.install
    return package.name, package.version, package.brings, "" if package.fits else f"needs {package.asked}"


def _machine_rows(machine: Machine) -> list[tuple[str, ...]]:
    same = Counter(map(_accelerator, machine.accelerators))
    gpus = [f"{number} x {text}" for text, number in same.items()] or ["none: runs train on the CPU"]
    built = ", ".join(f"{key} {value}" for key, value in machine.torch_built_for.items()) or "the CPU"
    torch = machine.versions["torch"]
    limit = f", {_gib(machine.memory_limit_gib)} for this container" if machine.memory_limit_gib else ""
    without = "sbatch fails here: sbatch --version says why" if which("sbatch") else "no sbatch here"
    left = f"{_gib(machine.runs_dir_gib)} free" if machine.runs_dir_is_writable else "cannot be written"
    return [
        *(("accelerators" if number == 0 else "", text) for number, text in enumerate(gpus)),
        ("CPUs", f"{machine.cpus_granted} of {machine.cpus_of_machine}"),
        ("memory", f"{_gib(machine.memory_gib)}, {_gib(machine.free_memory_gib)} free{limit}"),
        ("shared memory", _gib(machine.shared_memory_gib)),
        ("runs_dir", f"{machine.runs_dir}: {left}"),
        ("Slurm", machine.slurm or without),
        ("system", machine.system),
        ("Python", str(machine.versions["python"])),
        ("torch", f"{torch}, built for {built}" if torch else "not installed"),
        ("lightning", machine.versions["lightning"] or "not installed"),
    ]


def _accelerator(one: Accelerator) -> str:
    parts = {
        one.name: True,
        _gib(one.memory_gib): one.memory_gib,
        f"driver {one.driver}": one.driver,
        count(one.links or 0, "NVLink"): one.links,
        f"PCIe {one.pcie}": one.pcie,
    }
    return ", ".join(text for text, known in parts.items() if known)


def _speed(speed: Speed) -> str:
    share = f", {speed.share:.0%} of the cluster file's {speed.expected:,.0f}" if speed.share and speed.expected else ""
    value = f"{speed.value:,.1f}" if speed.value >= 1 else f"{speed.value:.2g}"  # a busy CPU has hundredths
    return f"{value} {speed.unit}, {speed.what}{share}"


def _gib(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.1f} GiB"


def as_json(report: Report) -> str:
    content: dict[str, Any] = {"well": not report.problems, **dataclasses.asdict(report)}
    return json.dumps(content, indent=2)


# ---- To measure


def measure(report: Report, words: list[str]) -> None:
    """Add how fast each device's memory and products of matrices are. Imports torch; takes a few seconds a device.

    `words`: of a run, which name the cluster.

    Raises:
        ConfigError: a word is wrong.
    """
    from shardwise.config.compose import compose

    command = compose(words)
    job = command.jobs[0]
    known = [job.config.cluster, *job.clusters]
    try:
        from shardwise.preflight.speed import measure_all

        report.speeds = measure_all(known)
    except Exception as error:  # torch cannot be imported, or its device does not work
        if report.machine.versions["torch"] is None:
            return  # which is a problem already
        text = " ".join(str(error).split())[:200]
        report.problems.append(f"measuring ended with {type(error).__name__}: {text}")
        return
    gpus = [one for one in report.machine.accelerators if one.maker == "NVIDIA"]
    if gpus and report.machine.torch_built_for and all(speed.device == "CPU" for speed in report.speeds):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "its driver does not answer torch"
        report.problems.append(f"torch sees none of the {count(len(gpus), 'GPU')}: {why}")
    for speed in report.speeds:
        if speed.share is not None and speed.share < _SLOW:
            report.notes.append(f"{speed.device}: {speed.what} reach {speed.share:.0%} of what the cluster file says")
