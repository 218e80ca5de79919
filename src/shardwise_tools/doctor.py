"""Says what this machine is, what is installed, and what keeps a run from training: `shardwise doctor`.

It imports torch only to measure (device_speed.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

from shardwise.config.paths import ROOT
from shardwise.errors import ConfigError, count
from shardwise.plan.hardware import installed
from shardwise_tools import read_words
from shardwise_tools.machine import Accelerator, Machine, Speed, describe_machine

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Package:
    """A package that pyproject.toml or a requirements file asks for."""

    name: str
    asked: str  # which versions, e.g. ">=2.11,<2.14"; empty: any
    version: str | None  # that is installed; None: none
    fits: bool  # whether it is one of those; True where that cannot be told
    brings: str = ""  # what it is good for, by the comment beside it
    install: str = ""  # the command that brings it


def required(root: Path = ROOT) -> list[Package]:
    """What every run needs. Empty: there is no pyproject.toml."""
    project = _read(root / "pyproject.toml").get("project", {})
    made = [_package(word, install="pip install -r requirements.txt") for word in project.get("dependencies", [])]
    if python := project.get("requires-python"):
        import platform

        version = platform.python_version()
        made.append(Package("python", python, version, _fits(version, python), install="install another Python"))
    return made


def optional(root: Path = ROOT) -> list[Package]:
    """The extras of pyproject.toml, each with the comment beside it and the command that installs it."""
    path = root / "pyproject.toml"
    extras: dict[str, list[str]] = _read(path).get("project", {}).get("optional-dependencies", {})
    lines = path.read_text().splitlines() if extras else []
    made = []
    for extra, words in extras.items():
        own = root / f"requirements-{extra}.txt"
        install = f"pip install -r {own.name}" if own.exists() else f"pip install -e '.[{extra}]'"
        above = _comment(lines, rf"^{re.escape(extra)}\s*=")
        made += [
            _package(w, install, _comment(lines, re.escape(f'"{w}"')) or above or f"the extra {extra}") for w in words
        ]
    return made


def other_files(root: Path = ROOT) -> Iterator[tuple[str, str, list[str]]]:
    """Every other requirements-*.txt: its name, what its first line says, and the packages of it that are missing."""
    extras = _read(root / "pyproject.toml").get("project", {}).get("optional-dependencies", {})
    for path in sorted(root.glob("requirements-*.txt")):
        if path.stem.removeprefix("requirements-") not in extras:
            text = path.read_text()
            names = [m[0] for line in text.splitlines() if (m := _NAME.match(line))]
            first = text.partition("\n")[0].lstrip("# ").rstrip(".")
            yield path.name, first, [name for name in names if installed(name) is None]


def _comment(lines: list[str], pattern: str) -> str:
    """The comment at the end of the first line that has `pattern`."""
    line = next((line for line in lines if re.search(pattern, line)), "")
    return line.partition(" # ")[2].strip()


def _package(word: str, install: str, brings: str = "") -> Package:
    found = _NAME.match(word)
    assert found is not None
    asked = re.sub(r"^\[[^\]]*\]", "", word[found.end() :]).partition(";")[0].strip()
    version = installed(found[0])
    return Package(found[0], asked, version, version is None or _fits(version, asked), brings, install)


def _fits(version: str, asked: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version
    except ImportError:  # torch and lightning bring it
        return True
    return bool(SpecifierSet(asked).contains(Version(version).public, prereleases=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError:  # installed without its sources
        return {}


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
        from shardwise_tools.device_speed import measure_all

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


HELP = """\
usage: shardwise doctor [--measure] [--json] [cluster=NAME] [runs_dir=DIR]

What this machine is, in about a second: NVIDIA's GPUs with driver, memory and links, the names of other accelerators,
CPUs, memory, disk, versions, and which optional packages are installed, with what each missing one would bring.
Problems come first.

  --measure        also how fast each device's memory and products of matrices are, beside the cluster file's figures
  --json           the same for a program to read
  cluster=NAME     whose figures (conf/cluster/); left out: the one that has this GPU
  runs_dir=DIR     the folder of all runs (runs)

Exit code: 0 this machine can train; 1 something is broken, and named first; 2 a mistake in the words.
"""


@dataclass
class DoctorConfig:
    cluster: str | None = None
    runs_dir: str = "runs"


def run(words: list[str]) -> int:
    flags = {"--measure", "--json"} & set(words)
    alone, config = read_words([word for word in words if word not in flags], DoctorConfig)
    if alone:
        raise ConfigError(f"{alone[0]}: doctor takes --measure, --json, cluster=NAME and runs_dir=DIR")
    if config.cluster is not None and "--measure" not in flags:
        raise ConfigError(f"cluster={config.cluster}: its figures are for --measure; give that too, or leave it out")
    report = examine(config.runs_dir)
    if "--measure" in flags:
        measure(report, [] if config.cluster is None else [f"cluster={config.cluster}"])
    text = as_json(report) if "--json" in flags else show(report)
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))
    return 1 if report.problems else 0
