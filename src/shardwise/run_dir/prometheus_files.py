"""The files by which Prometheus finds a run's numbers, and their removal: one that stays is scraped for ever.

In the run's folder, and in the site's folder if there is one, where the files of many runs lie beside each other. Each
names its owner: a process that is gone owns nothing. No torch: the launcher removes them too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.files import PROMETHEUS, PROMETHEUS_TARGETS, partial_path, write_whole

_OWNER = "# written by shardwise: "  # begins the first line of a file of numbers; Prometheus takes it as a comment
_OWNER_LABEL = "__shardwise_owner"  # of a file of targets; Prometheus drops labels that begin so
_PREFIX = "shardwise-"  # of the names of our files in the site's folder


def check_directory(plan: Plan) -> None:
    """Raises ConfigError: the site's folder is not there, or cannot be written to. Rank 0's node is asked."""
    directory = plan.metrics.prometheus_directory
    if directory is not None and not os.access(directory, os.W_OK | os.X_OK):
        what = "cannot be written to" if os.path.isdir(directory) else "is no folder"
        raise ConfigError(
            f"metrics.prometheus_directory={directory} {what}: give the folder that Prometheus's node exporter "
            f"(--collector.textfile.directory), or a file_sd_configs of Prometheus, reads on this node"
        )


def paths(plan: Plan) -> list[Path]:
    """Where the file goes of `metrics.prometheus=textfile|http`; none: it is off."""
    if plan.metrics.prometheus == "none":
        return []
    name = PROMETHEUS if plan.metrics.prometheus == "textfile" else PROMETHEUS_TARGETS
    found = [Path(plan.run_dir) / name]
    if plan.metrics.prometheus_directory is not None:
        # Runs of one name may be in other folders
        unique = hashlib.sha256(os.path.abspath(plan.run_dir).encode()).hexdigest()[:8]
        site = Path(plan.metrics.prometheus_directory)
        found.append(site / f"{_PREFIX}{plan.run_id}-{unique}{Path(name).suffix}")
    return found


def write_numbers(plan: Plan, text: str) -> None:
    """Write the numbers in Prometheus's text format to all places. Raises OSError."""
    for path in paths(plan):
        write_whole(path, f"{_OWNER}{_this_process()}\n{text}", synced=False)


def write_targets(plan: Plan, address: str) -> None:
    """Write where this run's numbers can be asked for, as Prometheus's file_sd reads it. Raises OSError."""
    labels = {_OWNER_LABEL: _this_process()}  # a label run would rename that of the numbers
    for path in paths(plan):
        write_whole(path, json.dumps([{"targets": [address], "labels": labels}], indent=2) + "\n", synced=False)


def remove(plan: Plan) -> None:
    """Remove the files of this run."""
    _remove(paths(plan))


def remove_abandoned(plan: Plan) -> None:
    """Remove the files of runs that have ended on this node without removing them, this one's earlier start too."""
    earlier = [Path(plan.run_dir) / name for name in (PROMETHEUS, PROMETHEUS_TARGETS)]
    _remove(path for path in earlier if path.exists())
    if plan.metrics.prometheus_directory is not None:
        site = Path(plan.metrics.prometheus_directory)
        _remove(path for path in sorted(site.glob(f"{_PREFIX}*")) if _is_abandoned(path))


def _remove(found: Iterable[Path]) -> None:
    for path in found:
        for each in (path, partial_path(path)):
            with suppress(OSError):
                each.unlink(missing_ok=True)


def _this_process() -> str:
    return f"host {os.uname().nodename}, process {os.getpid()}, started {_start_of(os.getpid())}"


def _start_of(process: int) -> str:
    """When a process was started, in ticks of the machine; empty: there is none. Numbers of processes come again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_abandoned(path: Path) -> bool:
    """Whether the file's owner was a process of this node that is gone."""
    words = _owner(path).replace(",", "").split()
    if len(words) != 6 or words[1] != os.uname().nodename or not words[3].isdigit():
        return False
    return _start_of(int(words[3])) != words[5]


def _owner(path: Path) -> str:
    try:
        text = path.read_text()
        if path.suffix == Path(PROMETHEUS_TARGETS).suffix:
            targets: Any = json.loads(text)
            return str(targets[0]["labels"][_OWNER_LABEL])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    first = text.partition("\n")[0]
    return first.removeprefix(_OWNER) if first.startswith(_OWNER) else ""
