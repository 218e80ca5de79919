"""Makes what Slurm is given, from a command line and a cluster's file: options of sbatch, environment. No torch.

What the Plan decides is refused here with the word that decides it, since the run learns it from Slurm.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.config.groups import ClusterConfig
from shardwise.config.paths import ROOT
from shardwise.errors import ConfigError, count
from shardwise.plan import Plan

SIGNAL_SECONDS = 300  # slurm/*.sbatch ask by --signal for a signal this long before the end
_NAME = re.compile(r"[a-z]+(?:[-_][a-z]+)+|[a-z]{2,}")
_DEVICES, _ARRAY = "devices=N says how many ranks and GPUs a node has", "-m makes an array, and array_limit=N bounds it"
_DECIDED = {
    "nodes": "nodes=N says how many there are",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node", "gpus", "gpus-per-task"), _DEVICES),
    **dict.fromkeys(("ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core", "gpus-per-socket"), _DEVICES),
    "array": _ARRAY,
    "chdir": "submit from that folder: the run's folder and its log are found from there",
    "parsable": "it is always given",
    "test-only": "--dry-run prints the command, and sbatch --test-only … takes it",
    "wait": "follow=true waits until the job is over",
    "wrap": "what runs is slurm/job.sh; prolog=LINE runs a line of yours before the run",
}
_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds, "
    "e.g. 24:00:00 or 1-00, and 24h, 90m or 1d12h are read as well"
)
_TIMES = ("time", "time-min", "begin", "deadline")
_MODULE = re.compile(r"[\w.+/@:~=-]+", re.ASCII)
_PASSED_ON = ("PYTHON", "RESTARTS_WITHOUT_PROGRESS")  # of slurm/job.sh's variables, those that have no word here
_CHECKED = ("gpus-per-node", "signal", "export", "gres", "time")
_TEXT = {"true": True, "false": None, "null": None}

SbatchOptions = dict[str, str | bool | None]  # by the name that sbatch has; True: a flag; None: it is to be left out


def read_options(given: Mapping[str, str | int | bool | None], where: str) -> SbatchOptions:
    """Options of sbatch, checked. `where`: what stands before a name for the user, e.g. `sbatch.`

    Raises:
        ConfigError: a name or a value that cannot be one, or what the run decides itself.
    """
    read: SbatchOptions = {}
    for key, value in given.items():
        word, name = f"{where}{key}={value}", key.replace("_", "-")
        if not _NAME.fullmatch(key):
            raise ConfigError(f"{word}: names no option of sbatch; they are written in full, e.g. {where}constraint=ib")
        if name in read:
            raise ConfigError(f"{word}: --{name} is given already; give it once")
        if name == "gres" and re.search(r"\bgpu\b", str(value)):
            raise ConfigError(f"{word}: {_DEVICES}; for a kind of GPU give {where}gpus-per-node=KIND")
        # sbatch reads the beginning of a name as the name, if it is the only one that begins so
        if decided := next((said for own, said in _DECIDED.items() if own.startswith(name)), None):
            raise ConfigError(f"{word}: the run decides this: {decided}")
        if full := next((own for own in _CHECKED if own.startswith(name) and own != name), None):
            raise ConfigError(f"{word}: options of sbatch are written in full: {where}{full}=…")
        if name in _TIMES and isinstance(value, int):
            raise ConfigError(f"{word}: YAML reads 24:00:00 as a number of seconds; quote it: {name}: '24:00:00'")
        value = _TEXT.get(value, value) if isinstance(value, str) else value
        if isinstance(value, str) and (not value or not value.isprintable()):
            raise ConfigError(f"{word}: must be one line of text")
        read[name] = None if value is False else value if isinstance(value, bool | str | None) else str(value)
        _check_value(word, name, read[name])
    return read


def _check_value(word: str, name: str, value: str | bool | None) -> None:
    if name == "export" and str(value).partition(",")[0] != "ALL" and value is not None:
        raise ConfigError(
            f"{word}: the batch script is told in its environment where everything is; give ALL,NAME=VALUE"
        )
    if name == "signal" and _signal_seconds(value) is None:
        raise ConfigError(f"{word}: a run saves and leaves at SIGUSR2 to its tasks: give USR2@SECONDS")


def _signal_seconds(value: str | bool | None) -> int | None:
    found = re.fullmatch(r"(?:R:)?(?:SIG)?USR2@(\d{1,5})", str(value))
    return None if found is None else int(found[1])


def gpus_per_node(value: str | bool | None, devices: int, where: str) -> str:
    """The value of --gpus-per-node for a node with `devices` GPUs: `KIND:8`, of `KIND`, `KIND:8` or `8`."""
    found = re.fullmatch(r"([A-Za-z][\w.-]*)|(?:([A-Za-z][\w.-]*):)?(\d+)", str(value))
    if found is None or value is True or (found[3] is not None and int(found[3]) != devices):
        raise ConfigError(
            f"{where}gpus-per-node={value}: this run has {count(devices, 'GPU')} a node, as devices= or the cluster "
            f"says; give the kind alone, e.g. {where}gpus-per-node=a100"
        )
    kind = found[1] or found[2]
    return f"{kind}:{devices}" if kind else str(devices)


def check_time(word: str, time: str, signal: str | None) -> tuple[str, list[str]]:
    """The value of --time, and a line if the user may have meant another length.

    Raises:
        ConfigError: no length of time, or so short that the signal to leave comes before the run has begun.
    """
    seconds, is_slurms = _seconds(time), True
    if seconds is None and re.fullmatch(r"UNLIMITED|INFINITE", time, re.IGNORECASE):
        return time, []
    if seconds is None:
        seconds, is_slurms = _in_units(time), False
    if seconds is None:
        raise ConfigError(f"{word}={time}: Slurm takes {_FORMS}")
    early = SIGNAL_SECONDS if signal is None else _signal_seconds(signal) or 0
    if 0 < seconds <= 2 * early:
        raise ConfigError(
            f"{word}={time}: the job asks for the signal to leave {early} s before the end, and it may come a minute "
            f"earlier: give more than {count(-(-2 * early // 60), 'minute')}, or a later signal, sbatch.signal=USR2@60"
        )
    days, hours, minutes, rest = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60, seconds % 60
    parts = ((days, "day"), (hours, "hour"), (minutes, "minute"), (rest, "second"))
    said = " ".join(count(number, noun) for number, noun in parts if number) or "no limit"
    value = time if is_slurms else f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    is_plain = is_slurms and ("-" in time or time.count(":") == 2)
    return value, [] if is_plain else [f"{word}={time} is {said}: --time={value}"]


def _seconds(time: str) -> int | None:
    """Seconds of a time in one of Slurm's forms; None: it is in none of them."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, re.ASCII)
    if found is None:
        return None
    days, *rest = (int(number or 0) for number in found.groups())
    if found[1] is None and found[4] is None:
        return rest[0] * 60 + rest[1]
    return ((days * 24 + rest[0]) * 60 + rest[1]) * 60 + rest[2]


def _in_units(time: str) -> int | None:
    """Seconds of `1d12h`, `24h`, `90m` or `90min`; None: it is not written so, or is no time at all."""
    pattern = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?"
    found = re.fullmatch(pattern, time, re.IGNORECASE | re.ASCII)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def merge_options(
    cluster: ClusterConfig, typed: Mapping[str, str], named: Mapping[str, str], gpus: int
) -> tuple[SbatchOptions, list[str]]:
    """The options of sbatch that a user and a cluster's file give, and lines on how they are read.

    `typed`: as `sbatch.NAME=VALUE`. `named`: those that have a word of their own, such as `time=`. `gpus`: of a node.

    Raises:
        ConfigError: see `read_options`, `gpus_per_node` and `check_time`; or an option is given twice.
    """
    defaults, own = read_options(cluster.sbatch, "cluster.sbatch."), read_options(typed, "sbatch.")
    if gpus < (cluster.devices_per_node or 0):  # the rest of the node is for others
        defaults.pop("exclusive", None)
        if defaults.get("mem") == "0":
            del defaults["mem"]
    if not gpus:
        defaults.pop("gpus-per-node", None)
    words = {name.replace("_", "-"): name for name in named}
    if twice := next((name for name in words if name in own), None):
        raise ConfigError(f"{words[twice]}= and sbatch.{twice}= are one option of sbatch: give it once")
    merged: SbatchOptions = defaults | own | {name: named[word] for name, word in words.items()}
    where = {name: "sbatch." if name in own else "cluster.sbatch." for name in merged}
    if (kind := merged.pop("gpus-per-node", None)) is not None:
        merged["gpus-per-node"] = gpus_per_node(kind, gpus, where["gpus-per-node"])
    notices: list[str] = []
    if (time := merged.get("time")) is not None:
        word, signal = words.get("time", f"{where['time']}time"), merged.get("signal")
        merged["time"], notices = check_time(word, str(time), None if signal is None else str(signal))
    return merged, notices


def batch_environment(
    cluster: ClusterConfig, container: str | None, mounts: str | None, modules: str | None, prolog: str | None
) -> dict[str, str]:
    """The variables that slurm/job.sh reads. A word goes before the caller's own variable, and that before the file.

    Raises:
        ConfigError: a mount or a module that cannot be one, or mounts without a container.
    """
    found = {"SHARDWISE_HOME": str(ROOT)}
    found |= {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    if (image := os.environ.get("CONTAINER", "") if container is None else container) not in ("", "null"):
        found["CONTAINER"] = image
    elif mounts is not None:
        raise ConfigError(
            f"mounts={mounts}: without a container all folders are there; give container=IMAGE, or leave it out"
        )
    if "CONTAINER" not in found and Path(sys.executable).parent != ROOT / ".venv/bin":  # which job.sh finds by itself
        found.setdefault("PYTHON", sys.executable)
    own = None if mounts is None else ",".join(_mount(word, "mounts") for word in _listed(mounts))
    site = ",".join(_mount(word, "cluster.mounts") for word in cluster.mounts)
    if "CONTAINER" in found and (value := _first(own, "CONTAINER_MOUNTS", site)):
        found["CONTAINER_MOUNTS"] = value
    own = None if modules is None else _modules(_listed(modules), "modules")
    if value := _first(own, "SHARDWISE_MODULES", _modules(cluster.modules, "cluster.modules")):
        found["SHARDWISE_MODULES"] = value
    if value := _first("" if prolog == "null" else prolog, "SHARDWISE_PROLOG", cluster.prolog or ""):
        found["SHARDWISE_PROLOG"] = value
    return found


def _first(typed: str | None, variable: str, default: str) -> str:
    return typed if typed is not None else os.environ.get(variable) or default


def _listed(words: str) -> list[str]:
    """The words of `[a, b]` or `a,b`."""
    plain = "" if words == "null" else words.removeprefix("[").removesuffix("]")
    return [word.strip() for word in plain.split(",") if word.strip()]


def _modules(names: Sequence[str], word: str) -> str:
    if wrong := next((name for name in names if not _MODULE.fullmatch(name)), None):
        raise ConfigError(f"{word}={wrong}: names no environment module; e.g. {word}=[cuda/12.4,gcc/13.2]")
    return " ".join(names)


def _mount(word: str, key: str) -> str:
    """`/data` as enroot reads it: `/data:/data`."""
    source, _, rest = word.partition(":")
    source = os.path.expanduser(source)
    if not source.startswith("/") or (rest and not rest.startswith("/")) or "," in word:
        raise ConfigError(f"{key}={word}: a folder begins with /; give {key}=[/data] or {key}=[/data:/inside]")
    return f"{source}:{rest or source}"


def explain_mounts(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Lines about folders and files of a run that its container does not see."""
    if "CONTAINER" not in environment:
        return []
    inside = list(dict.fromkeys([environment["SHARDWISE_HOME"], os.getcwd()]))
    inside += [mount.split(":")[1] for mount in environment.get("CONTAINER_MOUNTS", "").split(",") if ":" in mount]
    paths = {"runs_dir": str(Path(plan.run_dir).parent), "init_from": plan.init_from, "resume": plan.resume}
    paths |= dict(_paths(plan.data, "data")) | dict(_paths(plan.module, "module"))
    lines = []
    for word, path in paths.items():
        if path and not any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in inside):
            lost = "what the run writes there is lost with the container; " * (word == "runs_dir")
            lines.append(
                f"{word}={path}: is in no folder that the container sees ({', '.join(inside)}); "
                f"{lost}give mounts={os.path.abspath(path)}"
            )
    return lines


def _paths(node: Any, word: str) -> Iterator[tuple[str, str]]:
    """The values of a node that are written like paths outside of the working folder, and their words."""
    if isinstance(node, str) and node.startswith(("/", "~/", "../")):
        yield word, os.path.expanduser(node)
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _paths(value, f"{word}.{key}")
