"""Reads an AMD GPU through AMD SMI, whose Python package (`amdsmi`) comes with ROCm. Not run on such a GPU.

The numbers have the names of NVML's (`metrics/nvml.py`). There is none for tensor cores, NVLink, PCIe or Xids, and
the reasons that hold a clock down are left out: their counters differ between kinds of GPU.
"""

from __future__ import annotations

from typing import Any

from shardwise.metrics.reading import Calls, ErrorCounts, Reading


class AmdSmi:
    """One GPU, found by its PCI address, as 0000:1b:00.0."""

    name = "AMD SMI"

    def __init__(self, pci_address: str) -> None:
        self.pci_address = pci_address[-12:].lower()  # a domain of four digits
        self.calls = Calls()
        self._counts = ErrorCounts()

    def open(self) -> None:
        """Raises ImportError: amdsmi is not installed; AmdSmiException: no driver; LookupError: no such GPU."""
        import amdsmi

        self._smi: Any = amdsmi
        amdsmi.amdsmi_init()
        devices = {amdsmi.amdsmi_get_gpu_device_bdf(d).lower(): d for d in amdsmi.amdsmi_get_processor_handles()}
        if self.pci_address not in devices:
            raise LookupError(f"it knows no GPU at {self.pci_address}")
        self._device = devices[self.pci_address]

    def read(self) -> Reading:
        reading = Reading()
        self.calls("power", self._read_power, reading)
        self.calls("energy", self._read_energy, reading)
        self.calls("clocks", self._read_clock, reading)
        self.calls("temperature", self._read_temperature, reading, "HOTSPOT", "gpu/temperature_celsius")
        self.calls("memory temperature", self._read_temperature, reading, "VRAM", "gpu/memory_temperature_celsius")
        self.calls("utilization", self._read_activity, reading, "gfx", "gpu/utilization")
        self.calls("activity of memory", self._read_activity, reading, "umc", "gpu/dram_active")
        self.calls("ECC errors", self._read_ecc, reading)
        return reading

    def _read_power(self, reading: Reading) -> None:
        """Watts: of now where the GPU measures it, else a mean."""
        power = self._smi.amdsmi_get_power_info(self._device)
        watts = [power[f"{word}_socket_power"] for word in ("current", "average")]
        known = [float(value) for value in watts if isinstance(value, (int, float))]
        if not known:
            raise ValueError("the driver gives none")
        reading.levels["gpu/power_watts"] = known[0]

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

    def _read_activity(self, reading: Reading, part: str, name: str) -> None:
        activity = self._smi.amdsmi_get_gpu_activity(self._device)
        reading.levels[name] = float(activity[f"{part}_activity"]) / 100

    def _read_ecc(self, reading: Reading) -> None:
        counts = self._smi.amdsmi_get_gpu_total_ecc_count(self._device)
        for word, count in (("corrected", "correctable_count"), ("uncorrected", "uncorrectable_count")):
            self._counts.note(reading, f"gpu/ecc_{word}_errors", counts[count], f"{word} ECC errors")

    def close(self) -> None:
        self._smi.amdsmi_shut_down()
