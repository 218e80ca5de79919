"""Reads an AMD GPU through AMD SMI, whose Python package (`amdsmi`) comes with ROCm. Not run on such a GPU.

The numbers have the names of NVML's (`metrics/nvml.py`). There is none for tensor cores, NVLink, PCIe or Xids, and
the reasons that hold a clock down are left out: their counters differ between kinds of GPU.
"""

from __future__ import annotations

from typing import Any

from shardwise.metrics.reading import Calls, GpuError, Reading


class AmdSmi:
    """One GPU, found by its PCI address, as 0000:1b:00.0."""

    name = "AMD SMI"

    def __init__(self, pci_address: str) -> None:
        self.pci_address = pci_address[-12:]  # a domain of four digits
        self.calls = Calls()
        self._ecc: int | None = None  # the uncorrected errors at the last look

    def open(self) -> None:
        """Raises ImportError: amdsmi is not installed; AmdSmiException: no driver, or no such GPU."""
        import amdsmi

        self._smi: Any = amdsmi
        amdsmi.amdsmi_init()
        self._device = next(
            device for device in amdsmi.amdsmi_get_processor_handles()
            if amdsmi.amdsmi_get_gpu_device_bdf(device).lower() == self.pci_address.lower()
        )  # fmt: skip

    def read(self) -> Reading:
        reading = Reading()
        self.calls("power", self._read_power, reading)
        self.calls("energy", self._read_energy, reading)
        self.calls("clocks", self._read_clock, reading)
        self.calls("temperature", self._read_temperature, reading, "HOTSPOT", "gpu/temperature_celsius")
        self.calls("memory temperature", self._read_temperature, reading, "VRAM", "gpu/memory_temperature_celsius")
        self.calls("utilization", self._read_activity, reading)
        self.calls("ECC errors", self._read_ecc, reading)
        return reading

    def _read_power(self, reading: Reading) -> None:
        """Watts: of now where the GPU measures it, else a mean."""
        power = self._smi.amdsmi_get_power_info(self._device)
        watts = [power[f"{word}_socket_power"] for word in ("current", "average")]
        reading.levels["gpu/power_watts"] = next(float(w) for w in watts if isinstance(w, (int, float)))

    def _read_energy(self, reading: Reading) -> None:
        energy = self._smi.amdsmi_get_energy_count(self._device)  # the resolution is in microjoules
        reading.sums["gpu/energy_joules"] = energy["energy_accumulator"] * energy["counter_resolution"] / 1e6

    def _read_clock(self, reading: Reading) -> None:
        clock = self._smi.amdsmi_get_clock_info(self._device, self._smi.AmdSmiClkType.GFX)
        reading.levels["gpu/sm_clock_mhz"] = float(clock["clk"])

    def _read_temperature(self, reading: Reading, sensor: str, name: str) -> None:
        smi = self._smi
        kind, current = smi.AmdSmiTemperatureType[sensor], smi.AmdSmiTemperatureMetric.CURRENT
        reading.levels[name] = float(smi.amdsmi_get_temp_metric(self._device, kind, current))

    def _read_activity(self, reading: Reading) -> None:
        activity = self._smi.amdsmi_get_gpu_activity(self._device)
        reading.levels["gpu/utilization"] = float(activity["gfx_activity"]) / 100
        reading.levels["gpu/dram_active"] = float(activity["umc_activity"]) / 100

    def _read_ecc(self, reading: Reading) -> None:
        counts = self._smi.amdsmi_get_gpu_total_ecc_count(self._device)
        bad = counts["uncorrectable_count"]
        reading.changes["gpu/ecc_corrected_errors"] = counts["correctable_count"]
        reading.changes["gpu/ecc_uncorrected_errors"] = bad
        if self._ecc is not None and bad > self._ecc:
            new = bad - self._ecc
            data = {"value": "gpu/ecc_uncorrected_errors", "new": new}
            reading.errors.append(GpuError("ecc", f"{new} new uncorrected ECC errors", data))
        self._ecc = bad

    def close(self) -> None:
        self._smi.amdsmi_shut_down()
