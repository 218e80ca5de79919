"""Hands a run's numbers to Prometheus, from rank 0 for all ranks: in a file, or on a port. docs/telemetry.md

Names and units are Prometheus's: seconds, bytes, hertz and shares of one, `_total` for what only grows. A number that
differs between ranks has the labels rank, host and gpu. The step is a number and no label: a label of it would make
Prometheus keep a series for every step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.files import PROMETHEUS, PROMETHEUS_TARGETS, partial_path, write_whole

_SECONDS = 5.0  # between two writes of the file; Prometheus looks every 15 to 60 s
_JOIN_SECONDS = 1.0
_RUN_LABELS = ["run", "runs_dir"]


@dataclass(frozen=True)
class Series:
    """A number's name in Prometheus, which gets `shardwise_` before it."""

    name: str
    says: str
    factor: float = 1.0  # from our unit to Prometheus's
    kind: str = "gauge"  # or "counter", whose name gets `_total` behind it


_GIB, _MHZ = 2.0**30, 1e6
# Of the run: names of metrics.csv
RUN_SERIES = {
    "train/loss": Series("loss", "Mean loss over the global batch of the last logged step."),
    "train/gradient_norm": Series("gradient_norm", "Norm of the gradients before clipping."),
    "train/learning_rate": Series("learning_rate", "Learning rate of the first group of parameters."),
    "train/samples": Series("samples", "Samples that the run has consumed.", kind="counter"),
    "train/step_seconds": Series("step_seconds", "Mean seconds of a step since the row before."),
    "train/samples_per_second": Series("samples_per_second", "Samples of all ranks a second."),
    "train/tokens_per_second": Series("tokens_per_second", "Tokens of all ranks a second."),
    "train/mfu": Series("mfu_ratio", "Share of the GPUs' peak that the model's arithmetic took."),
    "train/goodput": Series("goodput_ratio", "Share of the time since the first start that became steps."),
    "train/training_seconds": Series("training_seconds", "Seconds of steps that were not lost.", kind="counter"),
}
# Of each rank: names of ranks.csv
RANK_SERIES = {
    "train/data_wait": Series("data_wait_ratio", "Share of the time in which the rank waited for data."),
    "train/memory_allocated_gib": Series("memory_allocated_peak_bytes", "Peak of what tensors took.", _GIB),
    "train/memory_reserved_gib": Series("memory_reserved_peak_bytes", "Peak of what the allocator took.", _GIB),
    "gpu/power_watts": Series("gpu_power_watts", "Power of the GPU."),
    "gpu/sm_clock_mhz": Series("gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors.", _MHZ),
    "gpu/temperature_celsius": Series("gpu_temperature_celsius", "Temperature of the GPU."),
    "gpu/memory_temperature_celsius": Series("gpu_memory_temperature_celsius", "Temperature of its memory."),
    "gpu/held_down_by_power": Series("gpu_held_down_by_power_ratio", "Share of the time at the power limit."),
    "gpu/held_down_by_heat": Series("gpu_held_down_by_heat_ratio", "Share of the time held down by heat."),
    "gpu/held_down_by_sync_boost": Series("gpu_held_down_by_sync_boost_ratio", "The same by other GPUs."),
    "gpu/held_down_by_board_limit": Series("gpu_held_down_by_board_limit_ratio", "The same by the board's limit."),
    "gpu/held_down_by_reliability": Series("gpu_held_down_by_reliability_ratio", "The same by the voltage."),
    "gpu/held_down_by_power_brake": Series("gpu_held_down_by_power_brake_ratio", "The same by the power supply."),
    "gpu/held_down_by_hardware": Series("gpu_held_down_by_hardware_ratio", "Share of looks with a slowdown."),
    "gpu/utilization": Series("gpu_utilization_ratio", "Share of the time with any kernel, waiting ones too."),
    "gpu/sm_active": Series("gpu_sm_active_ratio", "Share of the multiprocessors that were busy."),
    "gpu/sm_occupancy": Series("gpu_sm_occupancy_ratio", "Share of the warps that were resident."),
    "gpu/tensor_active": Series("gpu_tensor_active_ratio", "Share of the time with tensor cores at work."),
    "gpu/dram_active": Series("gpu_dram_active_ratio", "Share of the memory's bandwidth that was used."),
    "gpu/nvlink_sent_bytes_per_second": Series("gpu_nvlink_sent_bytes_per_second", "Sent over NVLink."),
    "gpu/nvlink_received_bytes_per_second": Series("gpu_nvlink_received_bytes_per_second", "Received over NVLink."),
    "gpu/pcie_sent_bytes_per_second": Series("gpu_pcie_sent_bytes_per_second", "Sent over PCIe."),
    "gpu/pcie_received_bytes_per_second": Series("gpu_pcie_received_bytes_per_second", "Received over PCIe."),
    "gpu/xid_errors": Series("gpu_xid_errors", "Xids since this start of the run.", kind="counter"),
    "gpu/ecc_corrected_errors": Series("gpu_ecc_corrected_errors", "Since this start.", kind="counter"),
    "gpu/ecc_uncorrected_errors": Series("gpu_ecc_uncorrected_errors", "Since this start.", kind="counter"),
    "gpu/remapped_rows": Series("gpu_remapped_rows", "Rows of memory since this start.", kind="counter"),
    "host/rank_cpu_cores": Series("host_rank_cpu_cores", "Cores that the rank's process keeps busy."),
    "host/rank_memory_gib": Series("host_rank_memory_bytes", "Memory of the rank's process.", _GIB),
    "host/cpu_busy": Series("host_cpu_busy_ratio", "Share of the node's cores that are busy."),
    "host/memory_available_gib": Series("host_memory_available_bytes", "Memory that the node has left.", _GIB),
}
# A row has what was taken since the row before; Prometheus wants the sum
SUMMED_SERIES = {
    "gpu/energy_joules": Series("gpu_energy_joules", "Energy since this start of the run.", kind="counter"),
}
# What no row has
OTHER_SERIES = {
    "step": Series("step", "Optimizer steps that the run has made, as of the last logged one."),
    "saves": Series("checkpoints_saved", "Checkpoints that this start of the run has saved.", kind="counter"),
    "restarts": Series("restarts", "How often the run was started again.", kind="counter"),
    "energy": Series("energy_joules", "Energy of all GPUs since the run's first start.", kind="counter"),
    "row time": Series("last_row_timestamp_seconds", "When the last step was logged, in seconds since 1970."),
}


@dataclass(frozen=True)
class RankLabels:
    host: str
    gpu: str  # its UUID; empty: none


@dataclass
class Numbers:
    """The last row. A new object for each row: another thread may be reading the last one."""

    of_run: dict[str, float] = field(default_factory=dict)  # names of RUN_SERIES and OTHER_SERIES
    of_ranks: dict[str, list[float]] = field(default_factory=dict)  # names of RANK_SERIES and SUMMED_SERIES


class Exporter:
    """The run's numbers in a registry of their own, and the thread or server that gives them to Prometheus."""

    def __init__(self, plan: Plan, ranks: list[RankLabels]) -> None:
        self.plan, self.ranks, self.numbers = plan, ranks, Numbers()
        self._sums: dict[str, list[float]] = {}
        self._stop = threading.Event()
        self._new = threading.Event()
        self._end: list[Callable[[], Any]] = []

    def start(self) -> str:
        """Begin to write or to listen. Returns where, for the user.

        Raises:
            OSError: the files cannot be written, or the address cannot be listened on. Nothing of it stays then.
        """
        try:
            return self._begin()
        except OSError:
            self.stop()
            raise

    def _begin(self) -> str:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        remove_abandoned(self.plan)
        if self.plan.metrics.prometheus == "textfile":
            self._write()
            thread = threading.Thread(target=self._write_again, name="prometheus", daemon=True)
            thread.start()
            self._end += [self._new.set, lambda: thread.join(_JOIN_SECONDS)]
            return str(paths(self.plan)[-1])
        address = self.plan.metrics.prometheus_address
        server, thread = start_http_server(self.plan.metrics.prometheus_port, address, self._registry)
        self._end += [server.shutdown, server.server_close, lambda: thread.join(_JOIN_SECONDS)]
        host = self.ranks[0].host if address in ("0.0.0.0", "::") else address
        where = f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
        write_targets(self.plan, where)
        return f"http://{where}/metrics, which {paths(self.plan)[-1]} names"

    def why_not(self, error: OSError) -> str:
        """Why `start` has failed, with the words that it was told by."""
        reason = error.strerror or str(error)
        if self.plan.metrics.prometheus == "textfile":
            return f"{error.filename or 'the file'} cannot be written: {reason}"
        words = f"metrics.prometheus_address={self.plan.metrics.prometheus_address}"
        if error.errno == errno.EADDRINUSE:
            words = f"metrics.prometheus_port={self.plan.metrics.prometheus_port}"
            return f"{words}: {reason}; metrics.prometheus_port=0 takes a free port"
        if error.errno in (errno.EACCES, errno.EPERM):
            return f"metrics.prometheus_port={self.plan.metrics.prometheus_port}: {reason}; give one above 1023, or 0"
        return f"{words}: {reason}; give an address of this node, or 0.0.0.0 for every one"

    def update(self, of_run: dict[str, float], of_ranks: dict[str, list[float]]) -> None:
        """Take a row: the run's numbers by name, and those of each rank, NaN where a rank does not know one."""
        for name in SUMMED_SERIES.keys() & of_ranks.keys():
            before = self._sums.get(name, [math.nan] * len(self.ranks))
            self._sums[name] = [_plus(a, b) for a, b in zip(before, of_ranks[name], strict=True)]
        self.numbers = Numbers(dict(of_run), of_ranks | self._sums)
        self._new.set()

    def stop(self) -> None:
        """End the thread or the server, and remove the files."""
        self._stop.set()
        for call in self._end:
            call()
        remove(self.plan)

    def _write(self) -> None:
        from prometheus_client import generate_latest

        write_numbers(self.plan, generate_latest(self._registry).decode())

    def _write_again(self) -> None:
        """Write each new row. A disk that is full or slow costs the file and no step."""
        while not self._stop.wait(_SECONDS):
            self._new.wait()
            self._new.clear()
            if self._stop.is_set():
                return
            try:
                self._write()
            except OSError:  # it is tried again with the next row
                continue

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks a collector for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        numbers = self.numbers
        # Two runs may have one name: what a node exporter reads twice with the same labels, it drops
        run = [self.plan.run_id, os.path.dirname(os.path.abspath(self.plan.run_dir))]
        for name, series in (RUN_SERIES | OTHER_SERIES).items():
            if name in numbers.of_run:
                family = families[series.kind](f"shardwise_{series.name}", series.says, labels=_RUN_LABELS)
                family.add_metric(run, numbers.of_run[name] * series.factor)
                yield family
        for name, series in (RANK_SERIES | SUMMED_SERIES).items():
            known = {r: v for r, v in enumerate(numbers.of_ranks.get(name, [])) if not math.isnan(v)}
            if known:
                family = families[series.kind](
                    f"shardwise_{series.name}", series.says, labels=[*_RUN_LABELS, "rank", "host", "gpu"]
                )
                for rank, value in known.items():
                    labels = self.ranks[rank]
                    family.add_metric([*run, str(rank), labels.host, labels.gpu], value * series.factor)
                yield family


def _plus(total: float, new: float) -> float:
    """Their sum; a number that is not known, NaN, adds nothing."""
    if math.isnan(new) or math.isnan(total):
        return total if math.isnan(new) else new
    return total + new


# The files by which Prometheus finds a run's numbers, and their removal: one that stays is scraped for ever.
#
# In the run's folder, and in the site's folder if there is one, where the files of many runs lie beside each other.
# Each names its owner: a process that is gone owns nothing. No torch: the launcher removes them too.

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
