"""A library that answers in NVML's place, below the real nvidia-ml-py: its constants, structures and wrappers run.

It knows nothing that the functions used here do not need. It shows logic only: whether a GPU answers like this, only a
GPU can show (benchmarks/gpu_checks/telemetry.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pynvml

UUID = "11111111-2222-3333-4444-555555555555"
PCI = "00000000:1b:00.0"
SUCCESS, NOT_SUPPORTED, NOT_FOUND, TIMEOUT = 0, pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NOT_FOUND, 10


class FakeNvml:
    """A GPU whose counters grow by one look's worth whenever its energy is read."""

    def __init__(self, *, gpm: bool = True, mig: bool = False) -> None:
        self.gpm, self.mig = gpm, mig
        self.called: list[str] = []
        self.unsupported: set[str | int] = set()  # functions, and numbers of fields
        self.hangs_in: str | None = None
        self.goes_on = threading.Event()  # ends a hang
        self.joules, self.watts, self.uncorrected, self.remapped = 1e6, 650.0, 0, 0
        self.held_down_ns = 0
        self.reasons = pynvml.nvmlClocksEventReasonSwPowerCap
        self.xids: list[int] = []
        self.percent = {"NVML_GPM_METRIC_SM_UTIL": 91.0, "NVML_GPM_METRIC_ANY_TENSOR_UTIL": 47.0}

    def __getattr__(self, name: str) -> Any:
        """As ctypes looks a function up in a library."""
        if name.startswith("nvml"):
            return lambda *arguments: self._call(name, [getattr(a, "_obj", a) for a in arguments])
        raise AttributeError(name)

    def _call(self, name: str, arguments: list[Any]) -> int:
        self.called.append(name)
        if name == self.hangs_in:
            self.goes_on.wait(60)
        if name in self.unsupported:
            return NOT_SUPPORTED
        return int(type(self).__dict__[f"_{name}"](self, *arguments) or SUCCESS)

    def _nvmlInitWithFlags(self, flags: Any) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlErrorString(self, number: Any) -> bytes:  # pragma: no cover
        return b"an error"

    def _nvmlDeviceGetHandleByUUID(self, number: Any, device: Any) -> int:
        own = f"{'MIG' if self.mig else 'GPU'}-{UUID}"
        return SUCCESS if number.value == own.encode() else NOT_FOUND

    def _nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, device: Any) -> int:
        return SUCCESS if address.value == PCI.encode() else NOT_FOUND

    def _nvmlDeviceIsMigDeviceHandle(self, device: Any, answer: Any) -> None:
        answer.value = self.mig

    def _nvmlDeviceGetGpuInstanceId(self, device: Any, answer: Any) -> None:
        answer.value = 7

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Any, answer: Any) -> None: ...

    def _nvmlGpmQueryDeviceSupport(self, device: Any, answer: Any) -> None:
        assert answer.version == 1
        answer.isSupportedDevice = self.gpm

    def _nvmlGpmSampleAlloc(self, sample: Any) -> None: ...

    def _nvmlGpmSampleFree(self, sample: Any) -> None: ...

    def _nvmlGpmSampleGet(self, device: Any, sample: Any) -> None: ...

    def _nvmlGpmMigSampleGet(self, device: Any, instance: Any, sample: Any) -> None:
        assert instance == 7

    def _nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        known = {getattr(pynvml, name): value for name, value in self.percent.items()}
        for number in range(asked.numMetrics):
            asked.metrics[number].value = known.get(asked.metrics[number].metricId, 3.0)

    def _nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> None:
        self.held_down_ns += 10_000_000
        known = {
            pynvml.NVML_FI_DEV_POWER_INSTANT: (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, int(self.watts * 1000)),
            pynvml.NVML_FI_DEV_MEMORY_TEMP: (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 88),
        }
        for number in range(count.value):
            value = values[number]
            value.nvmlReturn = NOT_SUPPORTED if value.fieldId in self.unsupported else SUCCESS
            kind, content = known.get(
                value.fieldId, (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, self.held_down_ns)
            )  # fmt: skip
            value.valueType = kind
            setattr(value.value, "uiVal" if kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else "ullVal", content)

    def _nvmlDeviceGetPowerUsage(self, device: Any, answer: Any) -> None:
        answer.value = 444_000

    def _nvmlDeviceGetTotalEnergyConsumption(self, device: Any, answer: Any) -> None:
        self.joules += 10.0
        answer.value = int(self.joules * 1000)

    def _nvmlDeviceGetClockInfo(self, device: Any, kind: Any, answer: Any) -> None:
        assert kind.value == pynvml.NVML_CLOCK_SM
        answer.value = 1755

    def _nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, answer: Any) -> None:
        answer.value = self.reasons

    def _nvmlDeviceGetTemperatureV(self, device: Any, answer: Any) -> None:
        assert answer.version == pynvml.nvmlTemperature_v1 and answer.sensorType == pynvml.NVML_TEMPERATURE_GPU
        answer.temperature = 61

    def _nvmlDeviceGetUtilizationRates(self, device: Any, answer: Any) -> None:
        answer.gpu = 100

    def _nvmlDeviceGetTotalEccErrors(self, device: Any, kind: Any, counter: Any, answer: Any) -> None:
        assert counter.value == pynvml.NVML_VOLATILE_ECC
        answer.value = self.uncorrected if kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 5

    def _nvmlDeviceGetRemappedRows(self, device: Any, *answers: Any) -> None:
        for answer, value in zip(answers, (0, self.remapped, 1, 0), strict=True):
            answer.value = value

    def _nvmlEventSetCreate(self, events: Any) -> None: ...

    def _nvmlEventSetFree(self, events: Any) -> None: ...

    def _nvmlDeviceRegisterEvents(self, device: Any, kinds: Any, events: Any) -> None:
        assert kinds.value == pynvml.nvmlEventTypeXidCriticalError

    def _nvmlEventSetWait_v2(self, events: Any, event: Any, milliseconds: Any) -> int:
        assert milliseconds.value == 0, "a look would wait"
        if not self.xids:
            return TIMEOUT
        event.eventType, event.eventData = pynvml.nvmlEventTypeXidCriticalError, self.xids.pop(0)
        return SUCCESS


@contextmanager
def answering(library: FakeNvml) -> Iterator[FakeNvml]:
    """Let nvidia-ml-py talk to `library`."""
    with patch("pynvml.nvmlLib", library), patch.dict("pynvml._nvmlGetFunctionPointer_cache", clear=True):
        yield library
