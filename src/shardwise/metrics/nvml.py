"""Reads an NVIDIA GPU through NVML, by the package nvidia-ml-py (module `pynvml`).

The GPU is found by its UUID or its PCI address: CUDA_VISIBLE_DEVICES renumbers what torch sees, and not what NVML sees.
Of a MIG instance only what GPM counts is its own: power, clocks and temperatures are those of the whole GPU, whose
other instances may belong to others, so they are left out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardwise.metrics.meter import Shown

_ALL_LINKS = 2**32 - 1  # the scope that adds up a counter over all NVLinks
_MIB = 2.0**20


@dataclass(frozen=True)
class _Field:
    """A value of nvmlDeviceGetFieldValues."""

    constant: str
    kind: Literal["levels", "rates"]
    factor: float  # from NVML's unit to ours
    scope: int = 0


_FIELDS = {
    "gpu/power_watts": _Field("NVML_FI_DEV_POWER_INSTANT", "levels", 1e-3),  # nvmlDeviceGetPowerUsage is a mean
    "gpu/memory_temperature_celsius": _Field("NVML_FI_DEV_MEMORY_TEMP", "levels", 1.0),
    # Nanoseconds for which the clock was held down: how much they grow in a second is the share of the time
    "gpu/held_down_by_power": _Field("NVML_FI_DEV_PERF_POLICY_POWER", "rates", 1e-9),
    "gpu/held_down_by_heat": _Field("NVML_FI_DEV_PERF_POLICY_THERMAL", "rates", 1e-9),
    "gpu/held_down_by_sync_boost": _Field("NVML_FI_DEV_PERF_POLICY_SYNC_BOOST", "rates", 1e-9),
    "gpu/held_down_by_board_limit": _Field("NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT", "rates", 1e-9),
    "gpu/held_down_by_reliability": _Field("NVML_FI_DEV_PERF_POLICY_RELIABILITY", "rates", 1e-9),
    "gpu/held_down_by_power_brake": _Field("NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", "rates", 1e-9),
}
_NVLINK_FIELDS = {  # KiB; read where there is no GPM
    "gpu/nvlink_sent_bytes_per_second": _Field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "rates", 1024.0, _ALL_LINKS),
    "gpu/nvlink_received_bytes_per_second": _Field(
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", "rates", 1024.0, _ALL_LINKS
    ),
}
# The counters of GPM, on Hopper and newer: percentages, and MiB a second
_GPM = {
    "gpu/sm_active": ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    "gpu/sm_occupancy": ("NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    "gpu/tensor_active": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    "gpu/dram_active": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    "gpu/nvlink_sent_bytes_per_second": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB),
    "gpu/nvlink_received_bytes_per_second": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB),
    "gpu/pcie_sent_bytes_per_second": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),
    "gpu/pcie_received_bytes_per_second": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
}
# What a GPU that is well does not report. SwPowerCap is not among them: under load it is the rule.
_HARDWARE_REASONS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # in the order of nvmlValueType_t
_MOST_EVENTS = 16  # that one look takes
# A process in which four threads asked for GPM at once crashed there. Datadog's agent asks for GPM and for field values
# in one thread at a time as well (DataDog/datadog-agent#54821).
_ONE_THREAD = threading.Lock()


class Nvml:
    """One GPU. `uuid` as torch gives it, without a prefix; `pci_address` as 00000000:1b:00.0."""

    name = "NVML"

    def __init__(self, uuid: str, pci_address: str) -> None:
        self.uuid, self.pci_address = uuid, pci_address
        self.calls = Calls()
        self._counts = ErrorCounts()
        self._xids = 0
        self._events: Any = None  # a set of events; None: Xids cannot be waited for
        self._samples: list[Any] = []  # two samples of GPM, the older first
        self._has_sample = False
        self._mig_instance: int | None = None  # the GPU instance; None: the whole GPU

    def open(self) -> None:
        """Raises ImportError: nvidia-ml-py is not installed; NVMLError: no driver, or no such GPU."""
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = self._find()
        if pynvml.nvmlDeviceIsMigDeviceHandle(self._device):
            self._mig_instance = pynvml.nvmlDeviceGetGpuInstanceId(self._device)
            self._device = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._device)
            self.calls.drop("all but GPM", "the GPU is a MIG instance, and the rest is the whole GPU's")
        self.calls("GPM", self._open_gpm)
        if self._mig_instance is None:
            self.calls("Xids", self._open_events)
        self._fields = _FIELDS if self._samples else _FIELDS | _NVLINK_FIELDS

    def _find(self) -> Any:
        for number in (f"GPU-{self.uuid}", f"MIG-{self.uuid}"):
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(number)
            except self._nvml.NVMLError:
                continue
        return self._nvml.nvmlDeviceGetHandleByPciBusId(self.pci_address)

    def _open_gpm(self) -> None:
        if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
            raise RuntimeError("it needs Hopper or newer")
        self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]

    def _open_events(self) -> None:
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._device, self._nvml.nvmlEventTypeXidCriticalError, events)
        self._events = events

    def read(self) -> Reading:
        reading = Reading()
        self.calls("GPM", self._read_gpm, reading)
        if self._mig_instance is not None:
            return reading
        self.calls("values of fields", self._read_fields, reading)
        if "gpu/power_watts" not in reading.levels:  # before the driver had that field
            self.calls("power", self._read_power, reading)
        self.calls("energy", self._read_energy, reading)
        self.calls("clocks", self._read_clock, reading)
        self.calls("why clocks are held down", self._read_reasons, reading)
        self.calls("temperature", self._read_temperature, reading)
        self.calls("utilization", self._read_utilization, reading)
        self.calls("ECC errors", self._read_ecc, reading)
        self.calls("remapped rows", self._read_remapped_rows, reading)
        if self._events is not None:
            self.calls("Xids", self._read_events, reading)
        return reading

    def _read_fields(self, reading: Reading) -> None:
        """All fields in one call; each of them may fail by itself."""
        asked = {
            name: field for name, field in self._fields.items()
            if field.constant not in self.calls.failed and hasattr(self._nvml, field.constant)
        }  # fmt: skip
        ids = [(getattr(self._nvml, field.constant), field.scope) for field in asked.values()]
        with _ONE_THREAD:
            values = self._nvml.nvmlDeviceGetFieldValues(self._device, ids)
        for (name, asked_for), value in zip(asked.items(), values, strict=True):
            if value.nvmlReturn:
                self.calls.drop(asked_for.constant, self._nvml.NVMLError(value.nvmlReturn))
            else:
                number = getattr(value.value, _VALUE_FIELDS[value.valueType])
                getattr(reading, asked_for.kind)[name] = number * asked_for.factor

    def _read_power(self, reading: Reading) -> None:
        reading.levels["gpu/power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3

    def _read_energy(self, reading: Reading) -> None:
        """Millijoules since the driver was loaded: differences are exact, as those of sampled power are not."""
        reading.sums["gpu/energy_joules"] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1e3

    def _read_clock(self, reading: Reading) -> None:
        nvml = self._nvml
        reading.levels["gpu/sm_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)

    def _read_reasons(self, reading: Reading) -> None:
        nvml = self._nvml
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._device)
        except nvml.NVMLError_FunctionNotFound:  # a driver before 535
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device)
        bad = any(reasons & getattr(nvml, f"nvmlClocksThrottleReason{word}") for word in _HARDWARE_REASONS)
        reading.levels["gpu/held_down_by_hardware"] = float(bad)

    def _read_temperature(self, reading: Reading) -> None:
        nvml = self._nvml
        try:
            degrees = nvml.nvmlDeviceGetTemperatureV(self._device, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError_FunctionNotFound:  # an older driver
            degrees = nvml.nvmlDeviceGetTemperature(self._device, nvml.NVML_TEMPERATURE_GPU)
        reading.levels["gpu/temperature_celsius"] = degrees

    def _read_utilization(self, reading: Reading) -> None:
        reading.levels["gpu/utilization"] = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100

    def _read_ecc(self, reading: Reading) -> None:
        nvml = self._nvml
        kinds = {"corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                 "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}  # fmt: skip
        for word, kind in kinds.items():
            count = nvml.nvmlDeviceGetTotalEccErrors(self._device, kind, nvml.NVML_VOLATILE_ECC)
            self._counts.note(reading, f"gpu/ecc_{word}_errors", count, f"{word} ECC errors of its memory")

    def _read_remapped_rows(self, reading: Reading) -> None:
        corrected, uncorrected, is_pending, _ = self._nvml.nvmlDeviceGetRemappedRows(self._device)
        pending = ", and a remapping waits for the GPU's next reset" if is_pending else ""
        self._counts.note(reading, "gpu/remapped_rows", corrected + uncorrected, f"remapped rows of memory{pending}")

    def _read_events(self, reading: Reading) -> None:
        nvml = self._nvml
        for _ in range(_MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError_Timeout:  # there is none
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                self._xids += 1
                xid = int(event.eventData)
                reading.errors.append(GpuError("xid", f"the driver reports Xid {xid}", {"xid": xid}))
        reading.changes["gpu/xid_errors"] = self._xids

    def _read_gpm(self, reading: Reading) -> None:
        """What the hardware has counted since the look before, at least 100 ms ago."""
        with _ONE_THREAD:
            self._read_counters(reading)

    def _read_counters(self, reading: Reading) -> None:
        nvml = self._nvml
        older, newer = self._samples
        if self._mig_instance is None:
            nvml.nvmlGpmSampleGet(self._device, newer)
        else:
            nvml.nvmlGpmMigSampleGet(self._device, self._mig_instance, newer)
        self._samples = [newer, older]
        if not self._has_sample:
            self._has_sample = True
            return
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM)
        asked.sample1, asked.sample2 = older, newer
        for number, (constant, _) in enumerate(_GPM.values()):
            asked.metrics[number].metricId = getattr(nvml, constant)
        nvml.nvmlGpmMetricsGet(asked)
        for number, (name, (constant, factor)) in enumerate(_GPM.items()):
            metric = asked.metrics[number]
            if metric.nvmlReturn:
                self.calls.drop(constant, nvml.NVMLError(metric.nvmlReturn))
            elif math.isfinite(metric.value):
                reading.levels[name] = metric.value * factor

    def close(self) -> None:
        for sample in self._samples:
            self.calls("GPM", self._nvml.nvmlGpmSampleFree, sample)
        if self._events is not None:
            self.calls("Xids", self._nvml.nvmlEventSetFree, self._events)
        self._nvml.nvmlShutdown()


# What a look at a rank's GPU and host gives: names, kinds of numbers, and calls that may fail.

# The names of a GPU's numbers, and how they appear in metrics.csv. Shares are between 0 and 1.
GPU_VALUES: dict[str, Shown] = {
    "gpu/power_watts": "spread",
    "gpu/energy_joules": "spread",  # since the row before
    "gpu/sm_clock_mhz": "spread",
    "gpu/temperature_celsius": "spread",
    "gpu/memory_temperature_celsius": "spread",
    # The share of the time in which the clock was held down, by the reason. A GPU at its power limit is at work as it
    # should be. The driver's counter for low utilization is left out: such a GPU has too little to do.
    "gpu/held_down_by_power": "spread",
    "gpu/held_down_by_heat": "spread",
    "gpu/held_down_by_sync_boost": "spread",
    "gpu/held_down_by_board_limit": "spread",
    "gpu/held_down_by_reliability": "spread",
    "gpu/held_down_by_power_brake": "spread",
    "gpu/held_down_by_hardware": "spread",  # hardware slowdown, its heat or the power brake, whenever it was looked at
    "gpu/utilization": "spread",  # the share of the time with any kernel: waiting for other ranks counts
    "gpu/sm_active": "spread",
    "gpu/sm_occupancy": "spread",
    "gpu/tensor_active": "spread",
    "gpu/dram_active": "spread",
    "gpu/nvlink_sent_bytes_per_second": "spread",
    "gpu/nvlink_received_bytes_per_second": "spread",
    "gpu/pcie_sent_bytes_per_second": "spread",
    "gpu/pcie_received_bytes_per_second": "spread",
    # How many there were since training began
    "gpu/xid_errors": "largest",
    "gpu/ecc_corrected_errors": "largest",
    "gpu/ecc_uncorrected_errors": "largest",
    "gpu/remapped_rows": "largest",
}

HOST_VALUES: dict[str, Shown] = {
    "host/rank_cpu_cores": "largest",  # the cores that this rank's own process keeps busy
    "host/rank_memory_gib": "largest",
    "host/cpu_busy": "largest",  # the share of the node's cores that anything keeps busy
    "host/memory_available_gib": "spread",  # of the node
}


@dataclass(frozen=True)
class GpuError:
    """An error that a GPU has just reported."""

    kind: str  # "xid" or "ecc"
    text: str  # what happened, without the rank and the GPU
    data: dict[str, Any]


@dataclass
class Reading:
    """What one look has given. A number whose call failed is left out."""

    levels: dict[str, float] = field(default_factory=dict)  # as they are now: a row has their mean
    rates: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grow in a second
    sums: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grew since the row before
    changes: dict[str, float] = field(default_factory=dict)  # counters: a row has how much they grew in the training
    errors: list[GpuError] = field(default_factory=list)


class ErrorCounts:
    """Notes how often a GPU has counted errors, and what is new since the look before."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def note(self, reading: Reading, name: str, count: int, what: str) -> None:
        """Put a count into `reading`, with a GpuError if it has grown. `what` was counted, in words."""
        reading.changes[name] = count
        new = count - self._before.get(name, count)
        if new > 0 and name != "gpu/ecc_corrected_errors":  # a corrected error has changed no number
            reading.errors.append(GpuError("ecc", f"{new} new {what}", {"value": name, "new": new}))
        self._before[name] = count


class Reader(Protocol):
    """Looks at one device. All calls come from one thread; each may fail, or never come back."""

    name: str  # of the library that answers
    calls: Calls

    def open(self) -> None: ...

    def read(self) -> Reading: ...

    def close(self) -> None: ...


class Calls:
    """Makes calls that may fail. One that has failed is not made again, and its failure is reported once."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # what the call is for → why it failed
        self._reported = 0

    def __call__(self, purpose: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; None: it fails, now or before."""
        if purpose in self.failed:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self.drop(purpose, error)
            return None

    def drop(self, purpose: str, reason: object) -> None:
        self.failed.setdefault(purpose, str(reason).strip() or type(reason).__name__)

    def new_failures(self) -> list[str]:
        """The failures since the last call, in words."""
        found = [f"{purpose} ({reason})" for purpose, reason in self.failed.items()][self._reported :]
        self._reported = len(self.failed)
        return found
