"""What a GPU and its host report, read by a thread. NVML's answers are made up: tests/harness/nvml.py."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pynvml
import pytest

from shardwise.metrics import telemetry as module
from shardwise.metrics.nvml import GPU_VALUES, HOST_VALUES, GpuError, Nvml, Reader, Reading
from shardwise.metrics.telemetry import Energy, Host, Telemetry, build_readers
from tests.harness import patience
from tests.harness.nvml import PCI, UUID, FakeNvml, answering


def wait_until(is_so: Callable[[], bool]) -> None:
    patience.wait_until(is_so, "what the thread should do", 20, pause=0.01)


@contextmanager
def running(*readers: Reader, errors: list[GpuError] | None = None) -> Iterator[Telemetry]:
    found = [] if errors is None else errors
    telemetry = Telemetry(readers, 0.01, found.append)
    telemetry.start()
    try:
        yield telemetry
    finally:
        telemetry.stop()


def looks(library: FakeNvml) -> int:
    return library.called.count("nvmlDeviceGetTotalEnergyConsumption")


def test_every_value_of_a_gpu_has_its_unit() -> None:
    with answering(FakeNvml()) as library, running(Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: looks(library) > 4)
        telemetry.stop()
        values = telemetry.take()
        assert telemetry.take_notices() == []
    assert values.keys() == GPU_VALUES.keys()
    exact = {
        "gpu/power_watts": 650.0, "gpu/sm_clock_mhz": 1755, "gpu/temperature_celsius": 61,
        "gpu/memory_temperature_celsius": 88, "gpu/utilization": 1.0, "gpu/sm_active": 0.91, "gpu/tensor_active": 0.47,
        "gpu/dram_active": 0.03, "gpu/pcie_sent_bytes_per_second": 3 * 2**20, "gpu/held_down_by_hardware": 0.0,
        "gpu/energy_joules": 10.0 * (looks(library) - 1), "gpu/xid_errors": 0, "gpu/ecc_uncorrected_errors": 0,
    }  # fmt: skip
    assert {name: values[name] for name in exact} == pytest.approx(exact)
    assert values["gpu/held_down_by_power"] > 0
    assert "nvmlDeviceGetPcieThroughput" not in library.called  # each of these calls waits


def test_a_counter_becomes_a_rate_and_one_that_begins_anew_is_no_rate() -> None:
    telemetry = Telemetry([], 1.0, print)
    for now, count in ((10.0, 3.0), (12.0, 3.5), (13.0, 0.0), (15.0, 1.5)):
        telemetry._add(Reading(rates={"share": count}, sums={"joules": 100 * count}, levels={"watts": count}), now)
    assert telemetry.take() == {"share": (0.25 + 0.75) / 2, "joules": 200.0, "watts": 2.0}
    assert telemetry.take() == {"share": 0.5, "watts": 2.0}


def test_a_share_of_the_time_is_at_most_one() -> None:
    telemetry = Telemetry([], 1.0, print)
    name = "gpu/held_down_by_power"
    for now, count in ((10.0, 3.0), (11.0, 4.04)):  # the driver counted a little longer than the looks were apart
        telemetry._add(Reading(rates={name: count, "bytes": count}), now)
    assert telemetry.take() == {name: 1.0, "bytes": pytest.approx(1.04)}


def test_without_gpm_nvlink_is_counted_and_what_fails_is_dropped_and_reported_once() -> None:
    library = FakeNvml(gpm=False)
    library.unsupported = {pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_MEMORY_TEMP,
                           "nvmlDeviceGetTotalEccErrors"}  # fmt: skip
    with answering(library), running(Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: looks(library) > 4)
        telemetry.stop()
        values, notices = telemetry.take(), telemetry.take_notices()
    (notice,) = notices
    for failed in ("GPM (it needs Hopper or newer)", "NVML_FI_DEV_POWER_INSTANT (Not Supported)",
                   "NVML_FI_DEV_MEMORY_TEMP (Not Supported)", "ECC errors (Not Supported)"):  # fmt: skip
        assert failed in notice
    assert library.called.count("nvmlDeviceGetTotalEccErrors") == 1
    assert values["gpu/power_watts"] == 444.0  # the mean of a second, where nothing better is known
    assert values["gpu/nvlink_sent_bytes_per_second"] > 0
    assert not values.keys() & {"gpu/sm_active", "gpu/memory_temperature_celsius", "gpu/ecc_corrected_errors"}


def test_of_a_mig_instance_only_its_own_activity_is_read() -> None:
    with answering(FakeNvml(mig=True)) as library, running(Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: library.called.count("nvmlGpmMetricsGet") > 2)
        telemetry.stop()
        values, notices = telemetry.take(), telemetry.take_notices()
    assert "gpu/sm_active" in values and "gpu/power_watts" not in values and "gpu/energy_joules" not in values
    assert "MIG instance" in notices[0] and "nvmlGpmSampleGet" not in library.called


def test_one_thread_at_a_time_asks_for_counters_and_fields() -> None:
    """The driver's library crashes otherwise."""
    library, inside, most = FakeNvml(), 0, 0
    answer = library._call

    def counted(name: str, arguments: list[Any]) -> int:
        nonlocal inside, most
        if "Gpm" not in name and "FieldValues" not in name:
            return answer(name, arguments)
        inside += 1
        most = max(most, inside)
        time.sleep(0.005)
        try:
            return answer(name, arguments)
        finally:
            inside -= 1

    with patch.object(library, "_call", counted), answering(library):
        readers = [Nvml(UUID, PCI) for _ in range(4)]
        for reader in readers:
            reader.open()
        ready = threading.Barrier(len(readers))

        def look(reader: Nvml) -> None:
            for _ in range(5):
                ready.wait()
                reader.read()

        threads = [threading.Thread(target=look, args=(reader,)) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert library.called.count("nvmlGpmMetricsGet") == 16 and most == 1


def test_a_gpu_is_found_by_its_pci_address_where_its_uuid_is_not_known() -> None:
    with answering(FakeNvml()), running(Nvml("unknown", PCI)) as telemetry:
        wait_until(lambda: "gpu/power_watts" in telemetry.take())
    with answering(FakeNvml()), running(Nvml("unknown", "00000000:ff:00.0")) as telemetry:
        wait_until(lambda: not telemetry._thread.is_alive())
        assert telemetry.take_notices() == ["NVML cannot be used: Not Found; it gives no values"]


def test_without_the_package_or_the_driver_there_is_one_notice_and_the_hosts_values() -> None:
    with patch.dict("sys.modules", pynvml=None), running(Host(), Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: telemetry.take().keys() == HOST_VALUES.keys())
        (notice,) = telemetry.take_notices()
    assert notice.startswith("NVML cannot be used: ") and "pynvml" in notice
    with running(Nvml(UUID, PCI)) as telemetry:  # this machine has no driver
        wait_until(lambda: not telemetry._thread.is_alive())
        assert telemetry.take_notices() == ["NVML cannot be used: NVML Shared Library Not Found; it gives no values"]


def test_a_call_that_hangs_costs_its_values_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_JOIN_SECONDS", 0.05)
    library = FakeNvml()
    with answering(library), running(Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: looks(library) > 2)
        library.hangs_in = "nvmlDeviceGetUtilizationRates"
        wait_until(lambda: telemetry.take() == {})
        assert telemetry.take() == {}
        (notice,) = telemetry.take_notices()  # and not again
        assert notice.startswith("NVML has not answered for 0 s")
        telemetry.stop()
        assert telemetry._thread.is_alive() and telemetry._thread.daemon
        library.goes_on.set()
        wait_until(lambda: not telemetry._thread.is_alive())


def test_a_share_that_a_counter_gives_is_never_above_one() -> None:
    telemetry = Telemetry([], 1.0, print)
    for now, busy in ((0.0, 0.0), (1.0, 1.005)):
        telemetry._add(Reading(rates={"host/cpu_busy": busy, "host/rank_cpu_cores": 3 * now}), now)
    assert telemetry.take() == {"host/cpu_busy": 1.0, "host/rank_cpu_cores": 3.0}


def test_rows_closer_than_looks_repeat_levels_and_count_energy_once() -> None:
    with answering(FakeNvml()) as library, running(Nvml(UUID, PCI)) as telemetry:
        joules = 0.0
        wait_until(lambda: looks(library) > 2)
        for _ in range(300):
            values = telemetry.take()
            assert values["gpu/power_watts"] == 650.0
            joules += values.get("gpu/energy_joules", 0.0)
        telemetry.stop()
        joules += telemetry.take().get("gpu/energy_joules", 0.0)
    assert joules == pytest.approx(10.0 * (looks(library) - 1))


def test_errors_of_a_gpu_are_told_as_they_come() -> None:
    library, errors = FakeNvml(), list[GpuError]()
    with answering(library), running(Nvml(UUID, PCI), errors=errors) as telemetry:
        wait_until(lambda: looks(library) > 2)
        assert errors == []  # what was there before the run, five corrected errors, is no news
        library.uncorrected, library.remapped = 2, 1
        library.reasons |= pynvml.nvmlClocksEventReasonHwThermalSlowdown
        library.xids += [63, 94]
        wait_until(lambda: len(errors) == 4)
        telemetry.stop()
        values = telemetry.take()
    assert sorted((error.kind, error.data.get("xid", error.data.get("new"))) for error in errors) == [
        ("ecc", 1), ("ecc", 2), ("xid", 63), ("xid", 94),
    ]  # fmt: skip
    assert any("waits for the GPU's next reset" in error.text for error in errors)
    assert values["gpu/xid_errors"] == values["gpu/ecc_uncorrected_errors"] == 2
    assert values["gpu/remapped_rows"] == 1 and values["gpu/ecc_corrected_errors"] == 0
    assert values["gpu/held_down_by_hardware"] > 0


def test_a_fork_has_no_thread_and_ends_as_ever() -> None:
    with answering(FakeNvml()) as library, running(Nvml(UUID, PCI)) as telemetry:
        wait_until(lambda: looks(library) > 2)
        child = os.fork()
        if not child:
            os._exit(int(telemetry._thread.is_alive() or telemetry.take_notices() != []))
        assert os.waitpid(child, 0)[1] == 0
        before = looks(library)
        wait_until(lambda: looks(library) > before + 2)  # the parent's thread goes on


def test_what_the_host_reports(tmp_path: Path) -> None:
    reading = Host().read()
    assert reading.levels.keys() | reading.rates.keys() == HOST_VALUES.keys()
    assert 0.01 < reading.levels["host/rank_memory_gib"] < 100
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text("900 262144 1 1 0 1 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n")
    (tmp_path / "stat").write_text("cpu  300 100 200 9000 77 10 20 30 40 50\ncpu0 1 1\ncpu1 1 1\nintr 4\n")
    reading = Host(tmp_path).read()
    assert reading.levels == {
        "host/rank_memory_gib": 262144 * os.sysconf("SC_PAGE_SIZE") / 2**30, "host/memory_available_gib": 4.0,
    }  # fmt: skip
    assert reading.rates["host/cpu_busy"] == 630 / os.sysconf("SC_CLK_TCK") / 2
    assert Host(tmp_path / "none").read().levels == {}  # where there is no /proc


def test_energy_adds_up_over_the_starts_of_a_run(tmp_path: Path) -> None:
    first = Energy(tmp_path)
    first.read()
    assert first.kwh is None and first.joules_per_weight is None
    first.add(3.0e6, 500.0)
    second = Energy(tmp_path)  # the first was killed before it could write again
    second.read()
    second.add(0.5e6, 100.0)
    second.add(0.1e6, 300.0)
    assert second.kwh == pytest.approx(1.0) and second.joules_per_weight == pytest.approx(3.6e6 / 800)
    second.write()
    assert json.loads((tmp_path / "energy.json").read_text()) == {"joules": 3.6e6, "loss_weight": 800.0}
    (tmp_path / "energy.json").write_text("{")
    third = Energy(tmp_path)
    third.read()
    assert third.joules == 0.0


def test_a_cpu_has_no_gpu_to_read() -> None:
    assert [reader.name for reader in build_readers(None)] == ["/proc"]
    assert [reader.name for reader in build_readers(module.Gpu(UUID, PCI))] == ["/proc", "NVML"]
